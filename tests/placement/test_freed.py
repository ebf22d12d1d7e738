"""A freed weight stays a registered parameter of full shape; who asks for its values gets them, or words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement.freed import Freed
from fourfold.placement.refusals import PlacementError
from fourfold.training.batch import Held
from fourfold.training.run import Run, parallelize
from plain import Work, disturbed, gpt, worst

WORK = Work(gpt())
FREED = "blocks.1.mlp.expand.weight"


def plan_of(level: str, precision: str = "fp64") -> dict[str, Any]:
    cut = {"data": 3} if level == "none" else {"z": 3}
    return {"placement": {**cut, "shard": level, "precision": precision}}


LEVELS = [plan_of(level) for level in ("none", "optimizer", "gradients", "parameters")]
BF16 = [plan_of(level, "bf16") for level in ("none", "gradients", "parameters")]


def placed(world: wire.World, plan: dict[str, Any] = LEVELS[3], work: Work = WORK) -> tuple[Run, Work]:
    run = parallelize(work.fresh(), work.loss, work.options, plan, world=world, seed=1)
    run.step(work.batch(0))
    return run, work


def test_shape_and_type_are_those_of_the_whole_weight() -> None:
    def body(world: wire.World) -> None:
        run, work = placed(world)
        plain = dict(work.fresh().named_parameters())
        found = dict(run.model.named_parameters())
        assert found.keys() == plain.keys()
        for name, parameter in found.items():
            assert isinstance(parameter, nn.Parameter)
            assert (parameter.shape, parameter.dtype) == (plain[name].shape, plain[name].dtype)
            assert (len(parameter), parameter.numel(), parameter.size(0)) == (
                len(plain[name]),
                plain[name].numel(),
                plain[name].size(0),
            )
            assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None
            assert torch.equal(torch.zeros_like(parameter), torch.zeros_like(plain[name]))
            assert parameter.new_empty(2).dtype == torch.float64 and hash(parameter) == id(parameter)
        assert found[FREED].untyped_storage().nbytes() == 0

    wire.threads.launch(3, body)


READS: list[Callable[[Any], Any]] = [
    lambda p: p.norm(),
    lambda p: p + 1,
    lambda p: 1 * p,
    lambda p: p[0],
    lambda p: p.data,
    lambda p: p.T,
    lambda p: p.detach(),
    lambda p: p.tolist(),
    lambda p: p.numpy(),
    lambda p: float(p.sum()),
    lambda p: list(p),
    lambda p: torch.cat([p, p]),
    lambda p: nn.functional.linear(torch.ones(2, 12), p),
    lambda p: nn.utils.parameters_to_vector([p]),
    lambda p: copy.deepcopy(p),
    lambda p: p.to(torch.float32),
    lambda p: p.zero_(),
    lambda p: p.copy_(torch.ones(30, 12)),
    lambda p: nn.init.zeros_(p),
    lambda p: torch.ops.aten.mul(p, p),
]


def test_values_of_a_freed_weight_are_refused_in_words() -> None:
    def body(world: wire.World) -> None:
        run, _ = placed(world)
        weight = run.model.get_parameter(FREED)
        with torch.no_grad():
            for read in READS:
                with pytest.raises(PlacementError, match=rf"^{FREED}: .*run.gathered"):
                    read(weight)
        assert str(weight) == repr(weight) == f"{weight:}"
        assert FREED in repr(weight) and "[30, 12]" in repr(weight)
        with pytest.raises(PlacementError):
            run.model.half()
        run.step(WORK.batch(1))

    wire.threads.launch(3, body)


def test_no_property_hands_out_the_storage_of_a_freed_weight() -> None:
    """Whatever properties this torch has: they refuse, or what they give is no tensor."""
    weight = nn.Parameter(torch.ones(2, 2))
    weight.__class__ = Freed
    weight.logical_name, weight.bring = "weight", None  # type: ignore[attr-defined]
    for name in dir(torch.Tensor):
        if callable(getattr(torch.Tensor, name)) or name.startswith("__"):
            continue
        try:
            assert not isinstance(getattr(weight, name), Tensor), name
        except (PlacementError, RuntimeError):
            pass


def test_a_gathered_weight_is_an_ordinary_parameter() -> None:
    def body(world: wire.World) -> None:
        run, _ = placed(world)
        weight, state = run.model.get_parameter(FREED), run.logical_state()
        with run.gathered():
            assert type(weight) is nn.Parameter
            assert torch.equal(weight.detach(), state[FREED])
        assert type(weight) is Freed

    wire.threads.launch(3, body)


@pytest.mark.parametrize("plan", [*LEVELS[:3], *BF16[:2]])
def test_weights_that_rest_here_are_read_up_to_date(plan: dict[str, Any]) -> None:
    """The refresh after an update is under way between steps; who reads a weight waits for it."""

    def body(world: wire.World) -> None:
        run, _ = placed(world, plan)
        state = run.logical_state()
        for name, parameter in run.model.named_parameters():
            assert float((parameter.detach() - state[name]).abs().max()) <= (0 if plan in LEVELS else 1e-2), name
            assert "tensor(" in repr(parameter)
        run.step(WORK.batch(1))

    wire.threads.launch(3, body)


@pytest.mark.parametrize("plan", [*LEVELS, *BF16])
def test_state_dict_answers_with_values_and_frees_again(plan: dict[str, Any]) -> None:
    def body(world: wire.World) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        run, _ = placed(world, plan)
        whole = run.model.state_dict()
        part = run.model.get_submodule("blocks.2.mlp").state_dict()
        if plan == LEVELS[3]:
            assert not any(unit.arena.live for unit in run.placed.units)
        return whole, part, run.logical_state()

    for whole, part, state in wire.threads.launch(3, body):
        whole.pop("head.weight")  # tied: the same tensor as tokens.weight
        tolerance = 0 if plan in LEVELS else 1e-2
        assert worst(whole, state) <= tolerance
        assert worst(part, {name: state[f"blocks.2.mlp.{name}"] for name in part}) <= tolerance


# ---- load_state_dict


def other() -> nn.Module:
    """The same model with other weights."""
    return disturbed(copy.deepcopy(gpt()))


@pytest.mark.parametrize("plan", [*LEVELS, *BF16])
def test_load_state_dict_sets_the_master_weights(plan: dict[str, Any]) -> None:
    """What a step then computes is what it computes from these weights."""
    new = other()
    state = new.state_dict()

    def body(world: wire.World) -> None:
        run, work = placed(world, plan)
        assert run.model.load_state_dict(state) == ([], [])
        found = run.logical_state()
        for name, value in found.items():
            assert torch.equal(value, state[name].to(value.dtype)), name
        start = copy.deepcopy(new).train()
        fresh = parallelize(start, work.loss, work.options, plan, world=world, example=work.batch(0))
        assert run.evaluate([Held(work.batch(3))]) == fresh.evaluate([Held(work.batch(3))])
        assert worst(run.logical_state(), found) == 0

    wire.threads.launch(3, body)


@pytest.mark.parametrize("plan", LEVELS)
def test_training_goes_on_from_loaded_weights(plan: dict[str, Any]) -> None:
    new = other()
    work, state = Work(new), new.state_dict()

    def one(world: wire.World, load: bool) -> dict[str, Tensor]:
        start = WORK.fresh() if load else work.fresh()
        run = parallelize(start, WORK.loss, WORK.options, plan, world=world, example=WORK.batch(0))
        if load:
            run.model.load_state_dict(state)
        run.step(WORK.batch(0))
        return run.logical_state()

    loaded, fresh = (wire.threads.launch(3, one, load) for load in (True, False))
    for mine, plain in zip(loaded, fresh, strict=True):
        assert worst(mine, plain) == 0


@pytest.mark.parametrize("plan", LEVELS)
def test_a_part_can_be_loaded_and_the_rest_stays(plan: dict[str, Any]) -> None:
    state = other().state_dict()
    inside = {name.removeprefix("blocks.1."): value for name, value in state.items() if name.startswith("blocks.1.")}

    def body(world: wire.World) -> None:
        run, _ = placed(world, plan)
        before = run.logical_state()
        run.model.get_submodule("blocks.1").load_state_dict(inside)
        missing, _ = run.model.load_state_dict({"norm.bias": state["norm.bias"]}, strict=False)
        assert len(missing) > 10
        for name, value in run.logical_state().items():
            loaded = name.startswith("blocks.1.") or name == "norm.bias"
            assert torch.equal(value, state[name] if loaded else before[name]), name
        assert worst({"w": run.model.state_dict()[FREED]}, {"w": state[FREED]}) == 0
        run.step(WORK.batch(1))

    wire.threads.launch(3, body)


@pytest.mark.parametrize("plan", LEVELS)
def test_a_state_that_does_not_fit_is_refused_by_torch_and_the_next_one_is_loaded(plan: dict[str, Any]) -> None:
    state = dict(other().state_dict())  # torch notes `assign` in the metadata of a shared one

    def body(world: wire.World) -> None:
        run, _ = placed(world, plan)
        before = run.logical_state()
        with pytest.raises(RuntimeError, match="size mismatch for blocks.1.mlp.expand.weight"):
            run.model.load_state_dict({FREED: torch.ones(3, 4)}, strict=False)
        assert worst(run.logical_state(), before) == 0
        with pytest.raises(PlacementError, match="assign=False"):
            run.model.load_state_dict(state, assign=True)
        run.model.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in run.logical_state().items())

    wire.threads.launch(3, body)


# ---- the whole model


def test_gathered_is_the_whole_model() -> None:
    def body(world: wire.World) -> tuple[Tensor, Tensor]:
        run, work = placed(world)
        tokens = work.batch(3)["tokens"]
        plain = work.fresh()
        plain.load_state_dict(run.model.state_dict())
        with torch.no_grad(), run.gathered() as model:
            return model(tokens), plain(tokens)

    for found, expected in wire.threads.launch(3, body):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_nothing_transient_is_left_after_a_step_and_an_evaluation() -> None:
    def body(world: wire.World) -> list[bool]:
        run, work = placed(world)
        run.evaluate([Held(work.batch(9))])
        gathered = [unit.arena.live for unit in run.placed.units]
        return gathered + [parameter.grad is not None for parameter in run.model.parameters()]

    for live in wire.threads.launch(3, body):
        assert not any(live)
