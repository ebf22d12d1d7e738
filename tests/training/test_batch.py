"""A batch is cut by rows, or refused with the key, what was expected, what was found, and what to try."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from fourfold.training.batch import BatchError, batch_of

ROWS = torch.arange(12).view(4, 3)


def test_rows_of_a_mapping_are_views_of_its_tensors() -> None:
    batch = batch_of(UserDict(tokens=ROWS, labels=ROWS + 1))
    assert batch.rows == 4
    cut = batch(range(1, 3))
    assert {name: tensor.tolist() for name, tensor in cut.items()} == {
        "tokens": [[3, 4, 5], [6, 7, 8]],
        "labels": [[4, 5, 6], [7, 8, 9]],
    }
    assert cut["tokens"].data_ptr() == ROWS[1:].data_ptr()


def test_something_that_gives_rows_is_taken_as_it_is() -> None:
    class Source:
        rows = 2

        def __call__(self, rows: range) -> dict[str, torch.Tensor]:
            return {"tokens": ROWS[rows.start : rows.stop]}

    source = Source()
    assert batch_of(source) is source


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            {"tokens": ROWS, "labels": [1, 2, 3, 4]},
            "batch['labels']: expected a tensor with a row of the batch for each entry of dim 0, found list; "
            "make it one with torch.as_tensor",
        ),
        (
            {"tokens": ROWS.numpy()},
            "batch['tokens']: expected a tensor with a row of the batch for each entry of dim 0, found ndarray; "
            "make it one with torch.as_tensor",
        ),
        (
            {"tokens": ROWS, "task": "copy"},
            "batch['task']: expected a tensor with a row of the batch for each entry of dim 0, found str; "
            "what is no row belongs into the loss, not into the batch",
        ),
        (
            {"tokens": ROWS, "pad": 0},
            "batch['pad']: expected a tensor with a row of the batch for each entry of dim 0, found int; "
            "what is no row belongs into the loss, not into the batch",
        ),
        (
            {"tokens": ROWS, "mask": None},
            "batch['mask']: expected a tensor with a row of the batch for each entry of dim 0, found NoneType; "
            "what is no row belongs into the loss, not into the batch",
        ),
        (
            {"tokens": ROWS, "scale": torch.tensor(2.0)},
            "batch['scale']: expected a tensor with a row of the batch for each entry of dim 0, found a tensor without "
            "dims; what is no row belongs into the loss, not into the batch",
        ),
        (
            {"tokens": ROWS, "labels": ROWS[:3], "weights": ROWS},
            "batch: expected as many rows (entries of dim 0) in every tensor, found tokens 4, labels 3, weights 4; "
            "cut or pad them to one number",
        ),
        ({"tokens": ROWS[:0]}, "batch: expected at least one row, found none; leave the step out"),
        ({}, "batch: expected a tensor at least, found an empty mapping; name each tensor as the loss reads it"),
        (
            ROWS,
            "batch: expected a mapping of names to tensors, or something with `rows` that gives rows when called, "
            "found Tensor; name each tensor as the loss reads it: {'tokens': …}",
        ),
        (
            [ROWS, ROWS],
            "batch: expected a mapping of names to tensors, or something with `rows` that gives rows when called, "
            "found list; name each tensor as the loss reads it: {'tokens': …}",
        ),
        (
            None,
            "batch: expected a mapping of names to tensors, or something with `rows` that gives rows when called, "
            "found NoneType; name each tensor as the loss reads it: {'tokens': …}",
        ),
    ],
    ids=[
        *("list", "array", "str", "int", "none", "scalar", "uneven", "no rows", "no tensors", "tensor", "lists"),
        "nil",
    ],
)
def test_what_cannot_be_cut_is_refused_in_words(batch: Any, says: str) -> None:
    with pytest.raises(BatchError) as caught:
        batch_of(batch)
    assert str(caught.value) == says
