"""From the `data` section of a configuration to a `Source`: read, tokenize, cache, split, cut into windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fourfold.config.schema import Corpus, Stdlib, TextFiles, TokenFiles
from fourfold.training.data import cache, corpus, tokenizer, tokens
from fourfold.training.data.corpus import CorpusError
from fourfold.training.data.tokens import Ids
from fourfold.training.data.windows import Source

BATCH_BYTES = 1 << 22
"""Text handed to the tokenizer at a time."""


@dataclass(frozen=True)
class Prepared:
    """Data ready to train on. `tokenizer` is None for files of token ids, which nobody can turn back into text."""

    source: Source
    tokenizer: Tokenizer | None
    vocabulary: int


def prepare(
    settings: Stdlib | TextFiles | TokenFiles, *, rows: int, seed: int, tokenizer_file: Path | None = None
) -> Prepared:
    """Open the data of a run; the first time this reads and tokenizes the text, later it maps the cached ids.

    Args:
        settings: the `data` section.
        rows: rows of the global batch.
        seed: of the order.
        tokenizer_file: tokenizer.json of a model that brings its own; None trains one on the text.

    Raises:
        CorpusError: nothing to train on, an unreadable file, a cache that cannot be written.
    """
    if isinstance(settings, TokenFiles):
        documents = tokens.read(corpus.files(settings.files), settings.vocabulary)
        train, held = (_joined(part, settings.vocabulary) for part in tokens.split(documents, settings.held_out))
        source = Source(train, held, sequence=settings.sequence, rows=rows, seed=seed)
        return Prepared(source, None, settings.vocabulary)
    entry = _tokenized(settings, tokenizer_file)
    source = Source(entry.train, entry.held, sequence=settings.sequence, rows=rows, seed=seed)
    vocabulary = settings.vocabulary if tokenizer_file is None else entry.tokenizer.get_vocab_size()
    return Prepared(source, entry.tokenizer, vocabulary)


def _tokenized(settings: Stdlib | TextFiles, tokenizer_file: Path | None) -> cache.Entry:
    documents = corpus.stdlib() if isinstance(settings, Stdlib) else corpus.files(settings.files)
    texts = list(corpus.texts(documents, settings.limit_bytes))
    if not any(texts):
        raise CorpusError(f"data: the corpus is empty: {len(documents)} files without a single character of text")
    place = (
        cache.folder(settings.cache)
        / "corpus"
        / cache.key(_settings(settings, tokenizer_file), _named(documents, texts))
    )
    found = cache.load(place)
    if found is None:
        words = tokenizer.load(tokenizer_file) if tokenizer_file else tokenizer.train(texts, settings.vocabulary)
        vocabulary = max(settings.vocabulary, words.get_vocab_size())
        parts = tokens.split(list(encode(words, texts, vocabulary)), settings.held_out)
        train, held = (_joined(part, vocabulary) for part in parts)
        cache.store(place, train, held, words)
        found = cache.load(place)
    if found is None:
        raise CorpusError(f"{place}: the token cache changed while it was read; run again, or set data.cache elsewhere")
    return found


def encode(words: Tokenizer, texts: Iterable[str], vocabulary: int) -> Iterator[Ids]:
    """The ids of each text, with the end mark behind it where the tokenizer has one."""
    end = tokenizer.end_token(words)
    mark = [] if end is None else [end]
    for group in _grouped(texts):
        for encoding in words.encode_batch_fast(group, add_special_tokens=False):
            yield np.array(encoding.ids + mark, dtype=tokens.width(vocabulary))


def _grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _settings(settings: Corpus, tokenizer_file: Path | None) -> dict[str, object]:
    brought = hashlib.sha256(tokenizer_file.read_bytes()).hexdigest() if tokenizer_file else None
    return {"vocabulary": settings.vocabulary, "held_out": settings.held_out, "tokenizer": brought}


def _named(documents: list[corpus.Document], texts: list[str]) -> list[tuple[str, str]]:
    """Name and content hash of each document in use (a limit may leave the last ones out)."""
    pairs = zip(documents, texts, strict=False)
    return [(document.name, hashlib.sha256(text.encode()).hexdigest()) for document, text in pairs]


def _joined(parts: list[Ids], vocabulary: int) -> Ids:
    return np.concatenate(parts).astype(tokens.width(vocabulary)) if parts else np.empty(0, tokens.width(vocabulary))
