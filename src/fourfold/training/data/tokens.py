"""Token ids as arrays: read from .npy files, drawn for tests, and split into a training and a held-out part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fourfold.randomness import bits, permutation
from fourfold.training.data.corpus import CorpusError, Document

Ids = np.ndarray
"""A one-dimensional integer array of token ids."""
FEW_DOCUMENTS = 10
"""Below this many documents the held-out part is the tail of the text instead of whole documents."""


def width(vocabulary: int) -> np.dtype:
    """The smallest unsigned type that holds every id."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def read(documents: Sequence[Document], vocabulary: int) -> list[Ids]:
    """The arrays of .npy files, memory-mapped, one a document.

    Raises:
        CorpusError: not an array file, an array of another shape or type, or an id outside of the vocabulary.
    """
    arrays = []
    for document in documents:
        try:
            array = np.lib.format.open_memmap(document.path, mode="r")  # refuses pickled objects
        except (OSError, ValueError, EOFError) as error:
            raise CorpusError(
                f"{document.name}: expected a .npy file of token ids, found: {error}; write it with numpy.save"
            ) from error
        if getattr(array, "ndim", None) != 1 or array.dtype.kind not in "iu":
            found = f"{getattr(array, 'dtype', type(array).__name__)} of shape {getattr(array, 'shape', '?')}"
            raise CorpusError(f"{document.name}: expected a one-dimensional array of integers, found {found}")
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < vocabulary):
            raise CorpusError(
                f"{document.name}: expected ids from 0 to {vocabulary - 1}, found {int(array.min())} to "
                f"{int(array.max())}; set data.vocabulary to at least {int(array.max()) + 1}"
            )
        arrays.append(array)
    return arrays


def synthetic(count: int, vocabulary: int, seed: int = 0) -> Ids:
    """`count` ids that any process draws alike, with something to learn: each is near the one before.

    A walk whose steps, of 0 to 3, come from the counter-based stream.
    """
    steps = bits(seed, "data/synthetic", 0, 0, count).astype(np.int64) & 3
    return (np.cumsum(steps) % vocabulary).astype(width(vocabulary))


def split(documents: Sequence[Ids], share: float) -> tuple[list[Ids], list[Ids]]:
    """What is trained on, and what is held out: about `share` of the tokens.

    Whole documents, drawn by a stream that no seed moves (so that runs with other seeds compare); with fewer than
    FEW_DOCUMENTS the tail of the text.
    """
    total = sum(len(document) for document in documents)
    wanted = round(total * share)
    if wanted == 0:
        return list(documents), []
    if len(documents) < FEW_DOCUMENTS:
        whole = np.concatenate(documents)
        return [whole[: total - wanted]], [whole[total - wanted :]]
    held: set[int] = set()
    taken = 0
    for index in permutation(0, "data/held-out", len(documents)).tolist():
        if taken >= wanted:
            break
        if taken + len(documents[index]) <= 2 * wanted:  # a giant document must not swallow the training text
            held.add(index)
            taken += len(documents[index])
    train = [document for index, document in enumerate(documents) if index not in held]
    return train, [documents[index] for index in sorted(held)]
