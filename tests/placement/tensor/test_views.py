"""Outside of steps a split model is the plain one: its values, its outputs, its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fourfold import wire
from fourfold.placement.refusals import PlacementError
from fourfold.plan import Plan
from fourfold.training.run import Run, parallelize
from plain import Outcome, Work, assert_equal, gpt, serial, stock_work

from .grouped import Sizes, decoding

Body = Callable[[Run, Work], Any]
GRIDS = ({"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}, {"x": 3})
"""Copies of key-value heads; all axes; sizes that do not divide."""


def plan(grid: dict[str, int], **more: Any) -> dict[str, Any]:
    return {"placement": {"precision": "fp64", "tensor": {"algorithm": "4d", **grid}, **more}}


def on_ranks(work: Work, settings: dict[str, Any], body: Body) -> list[Any]:
    """`body(run, work)` on every rank of a plan."""

    def rank(world: wire.World) -> Any:
        example = work.batch(0)
        return body(parallelize(work.fresh(), work.loss, work.options, settings, world=world, example=example), work)

    return wire.threads.launch(Plan.of(settings).world, rank)


@functools.cache
def works(name: str) -> Work:
    """By name."""
    if name == "packed":
        return Work(gpt(0.1), rows=4, sequence=6, steps=3)
    if name == "grouped":
        return decoding(Sizes(heads=6, shared=2), steps=3)
    return stock_work(name, rows=4, sequence=6, steps=3)


@functools.cache
def alone(name: str) -> Outcome:
    return serial(works(name))


def loaded(work: Work, weights: dict[str, Tensor]) -> Any:
    """The plain model with these weights, dropout off."""
    model = work.fresh().eval()
    model.load_state_dict(weights, strict=False)
    return model


# ---- reading


def looking(run: Run, work: Work) -> Outcome:
    """Training, with looks at the whole model between the steps."""
    outcome = Outcome()
    for step in range(work.steps):
        batch = work.batch(step)
        plain = loaded(work, run.logical_state())
        total, count = work.loss(plain, batch)
        with run.gathered() as model, torch.no_grad():
            model.eval()
            assert torch.equal(work.loss(model, batch)[0], total), "the model inside is the plain one, bit for bit"
            model.train()
        mean = float(total) / float(count)
        assert abs(run.evaluate([batch]) - mean) <= 1e-12 * mean
        result = run.step(batch)
        outcome.losses.append(result.loss)
        outcome.norms.append(result.gradient_norm)
    outcome.weights, outcome.gradients = run.logical_state(), run.logical_gradients()
    outcome.predicted, outcome.measured = run.forecast().traffic(), run.ledger.traffic(work.steps - 1)
    return outcome


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("packed", GRIDS[1]),
        ("grouped", GRIDS[0]),
        ("grouped", GRIDS[2]),
        pytest.param("gpt2", {"x": 2, "y": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_looks_between_steps_see_the_plain_model_and_change_nothing(name: str, grid: dict[str, int]) -> None:
    for outcome in on_ranks(works(name), plan(grid), looking):
        assert_equal(outcome, alone(name))


def test_a_stock_model_generates_text_inside_and_trains_on_after_it() -> None:
    work = stock_work("llama", rows=2, sequence=6, steps=2)
    prompt = work.batch(0)["tokens"][:1]

    def told(model: Any) -> list[int]:
        kept: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        return model.eval().generate(prompt, **kept)[0].tolist()

    def body(run: Run, work: Work) -> tuple[list[list[int]], Outcome]:
        outcome, texts = Outcome(), []
        for step in range(work.steps):
            with run.gathered() as model:
                texts.append(told(model))
                model.train()
            outcome.losses.append(run.step(work.batch(step)).loss)
        return texts, outcome

    plain = told(loaded(work, dict(work.fresh().named_parameters())))
    for texts, outcome in on_ranks(work, plan({"x": 2, "y": 2}), body):
        assert texts[0] == plain
        for mine, theirs in zip(outcome.losses, serial(work).losses, strict=True):
            assert abs(mine - theirs) <= 1e-12 * theirs


# ---- the model's own state


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_state_dict_holds_whole_tensors_and_takes_them_back(grid: dict[str, int], tied: bool) -> None:
    work = decoding(Sizes(tied=tied))
    plain = work.fresh().state_dict()

    def body(run: Run, work: Work) -> None:
        own = run.model.state_dict()
        assert list(own) == list(plain)
        assert all(torch.equal(own[name], value) for name, value in plain.items())
        part = run.model.blocks[1].attention.state_dict()  # pyright: ignore
        assert torch.equal(part["key.weight"], plain["blocks.1.attention.key.weight"])
        run.step(work.batch(0))
        trained = run.logical_state()
        assert not torch.equal(trained["norm.weight"], plain["norm.weight"])
        run.model.load_state_dict(plain)
        assert all(torch.equal(value, plain[name]) for name, value in run.logical_state().items())

    on_ranks(work, plan(grid), body)


STATES = [
    plan({"x": 2, "y": 2}),
    plan({"y": 2, "z": 2}),
    {"placement": {"precision": "fp64", "tensor": {"algorithm": "1d", "y": 2}}},
    {"placement": {"precision": "fp64", "tensor": {"algorithm": "2d", "q": 2}}},
]


@pytest.mark.parametrize("settings", STATES, ids=lambda settings: str(Plan.of(settings)))
def test_inside_gathered_the_state_is_the_plain_models_and_can_be_saved(settings: Any, tmp_path: Path) -> None:
    work = works("gpt2")
    plain = work.fresh().state_dict()

    def body(run: Run, work: Work) -> None:
        with run.gathered() as model:
            own = model.state_dict()
            assert list(own) == list(plain)
            assert all(torch.equal(own[name], value) for name, value in plain.items())
            part = model.transformer.h[1].attn.state_dict()  # pyright: ignore
            assert torch.equal(part["c_attn.weight"], plain["transformer.h.1.attn.c_attn.weight"])
            model.save_pretrained(tmp_path / str(run.world.rank))  # pyright: ignore
            with pytest.raises(PlacementError, match=r"load_state_dict .* call it outside"):
                model.load_state_dict(plain)
        assert all(torch.equal(value, plain[name]) for name, value in run.model.state_dict().items())

    ranks = len(on_ranks(work, settings, body))
    for rank in range(ranks):
        for name, value in load_file(tmp_path / str(rank) / "model.safetensors").items():
            assert torch.equal(value, plain[name])


def test_a_part_of_the_model_is_loaded_by_itself_and_trains_from_there() -> None:
    work = decoding(steps=2)
    other = {name: value.flip(0) for name, value in work.fresh().blocks[0].state_dict().items()}  # pyright: ignore
    expected = serial(replace(work, prepare=lambda model: model.blocks[0].load_state_dict(other)))  # pyright: ignore

    def body(run: Run, work: Work) -> list[float]:
        run.model.blocks[0].load_state_dict(other)  # pyright: ignore
        return [run.step(work.batch(step)).loss for step in range(work.steps)]

    for losses in on_ranks(work, plan({"x": 2, "y": 2, "z": 2}), body):
        assert all(abs(a - b) <= 1e-12 * b for a, b in zip(losses, expected.losses, strict=True))


def test_what_does_not_fit_is_refused_by_torch_and_changes_nothing() -> None:
    work = decoding()
    plain = work.fresh().state_dict()
    local = {name: value[:1] if name == "norm.weight" else value for name, value in plain.items()}
    missing = {name: value for name, value in plain.items() if name != "norm.bias"}

    def body(run: Run, work: Work) -> None:
        for state, words in ((local, "size mismatch for norm.weight"), (missing, "Missing key.*norm.bias")):
            with pytest.raises(RuntimeError, match=words):
                run.model.load_state_dict(state)
        assert all(torch.equal(value, plain[name]) for name, value in run.logical_state().items())
        assert run.model.load_state_dict(missing, strict=False).missing_keys == ["norm.bias"]
        with pytest.raises(PlacementError, match="assign=True"):
            run.model.load_state_dict(plain, assign=True)

    on_ranks(work, plan({"x": 2, "y": 2}), body)


# ---- copies


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_ranks_that_hold_the_same_block_hold_the_same_bits(grid: dict[str, int]) -> None:
    """Copies of key-value heads, norms over y, biases over x: nothing ever brings them together again."""
    work = decoding(Sizes(heads=6, shared=2), steps=3)

    def body(run: Run, work: Work) -> dict[tuple[Any, ...], Tensor]:
        for step in range(work.steps):
            run.step(work.batch(step))
        slots = [(unit, slot) for unit in run.placed.units for slot in unit.arena.layout.slots]
        return {
            (slot.name, slot.block.runs, *slot.span(unit.arena.index)): unit.arena.shard[
                slot.shard_start : slot.shard_start + slot.used
            ].clone()
            for unit, slot in slots
        }

    seen: dict[tuple[Any, ...], Tensor] = {}
    met = 0
    for held in on_ranks(work, plan(grid), body):
        for place, values in held.items():
            met += place in seen
            assert torch.equal(values, seen.setdefault(place, values)), place
    assert met


def test_what_a_step_will_send_is_known_before_the_first() -> None:
    def body(run: Run, work: Work) -> bool:
        forecast = run.forecast().traffic()
        run.step(work.batch(0))
        return forecast == run.ledger.traffic(0)

    assert all(on_ranks(works("packed"), plan(GRIDS[1]), body))
