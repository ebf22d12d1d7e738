"""Whether a row holds several sequences: what a model that cannot look is told, and whom that reaches."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from fourfold.anatomy import survey
from fourfold.anatomy.stock import OneSequenceARow

ONE = torch.arange(6).unsqueeze(0)
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])


def look(positions: Tensor) -> Tensor | None:
    return masking_utils.find_packed_sequence_indices(positions)


def meta(rows: int, *, made: bool) -> Tensor:
    one = torch.empty(1 if made else rows, 6, dtype=torch.int64, device="meta")
    return one.expand(rows, -1)


def test_inside_positions_without_values_that_are_the_same_for_all_rows_are_one_sequence():
    with OneSequenceARow(), OneSequenceARow():
        assert look(meta(3, made=True)) is None
        with pytest.raises(RuntimeError, match="meta"):
            look(meta(3, made=False))


def test_values_are_looked_at_inside_and_outside():
    for around in (nullcontext(), OneSequenceARow()):
        with around:
            found = look(PACKED)
            assert look(ONE.expand(2, -1)) is None
        assert found is not None and found.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]]


def test_nobody_else_is_told():
    heard: list[str] = []

    def another() -> None:
        try:
            look(meta(3, made=True))
        except RuntimeError as error:
            heard.append(str(error))

    with OneSequenceARow():
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
    another()
    assert len(heard) == 2 and all("meta" in line for line in heard)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_that_says_positions_is_surveyed_with_the_mask_that_they_may_need(packed):
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=17, intermediate_size=40
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64)} | ({"position_ids": PACKED} if packed else {})

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return model(**batch, use_cache=False).logits.sum(), 1

    anatomy = survey(model, loss, batch)
    assert anatomy.traced == ("fake" if packed else "meta")
