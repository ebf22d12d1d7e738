"""Data: corpora, the tokenizer, the token cache, and the order of windows as a pure function of (seed, step)."""

from fourfold.training.data.corpus import CorpusError as CorpusError
from fourfold.training.data.prepare import Prepared as Prepared
from fourfold.training.data.prepare import prepare as prepare
from fourfold.training.data.tokens import synthetic as synthetic
from fourfold.training.data.windows import Batch as Batch
from fourfold.training.data.windows import Source as Source
