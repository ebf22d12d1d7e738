"""Text to token ids and back: a byte-level BPE, trained here or brought along by a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fourfold.training.data.corpus import CorpusError

END = "<|end|>"
"""Token 0 of a tokenizer trained here: stands behind every document."""
SAMPLE_BYTES = 2_000_000
"""How much text the BPE is trained on: enough for a few thousand merges, a second or two of work."""


def train(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most `vocabulary` tokens, trained on about `SAMPLE_BYTES` of text taken evenly.

    Every byte is a token, so any text can be encoded and decoded back exactly.

    Args:
        texts: the corpus, one string a document.
        vocabulary: 257 or more: the end mark, the 256 bytes, merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_evenly(list(texts)), trainer)
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Raises:
        CorpusError: the file is missing or is not a tokenizer.
    """
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception for a malformed file
        raise CorpusError(f"{path}: expected a tokenizer.json of the tokenizers library, found: {error}") from error


def end_token(tokenizer: Tokenizer) -> int | None:
    """The id that separates documents: ours, or the usual names of published models; None where there is none."""
    for name in (END, "<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]"):
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    return None


def _evenly(texts: list[str]) -> list[str]:
    """Every n-th document, so that about SAMPLE_BYTES remain; a single long text gives its slices evenly."""
    total = sum(map(len, texts))
    if total <= SAMPLE_BYTES:
        return texts
    pieces = [text[start : start + 4096] for text in texts for start in range(0, len(text), 4096)]
    stride = max(1, round(total / SAMPLE_BYTES))
    return pieces[::stride]
