"""A freed weight stays a registered parameter of full shape; who asks for its values gets them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fourfold import wire
from fourfold.training.batch import Held
from fourfold.training.run import Run, parallelize
from plain import Work, gpt, worst

PLAN = {"placement": {"z": 3, "shard": "parameters", "precision": "fp64"}}


WORK = Work(gpt())


def placed(world: wire.World) -> tuple[Run, Work]:
    work = WORK
    run = parallelize(work.fresh(), work.loss, work.options, PLAN, world=world, seed=1)
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
        blocks: Any = run.model.blocks
        assert blocks[1].mlp.expand.weight.untyped_storage().nbytes() == 0

    wire.threads.launch(3, body)


def test_state_dict_answers_with_values_and_frees_again() -> None:
    def body(world: wire.World) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        run, _ = placed(world)
        whole = run.model.state_dict()
        part = run.model.get_submodule("blocks.2.mlp").state_dict()
        assert not any(unit.arena.live for unit in run.placed.units)
        return whole, part, run.logical_state()

    for whole, part, state in wire.threads.launch(3, body):
        whole.pop("head.weight")  # tied: the same tensor as tokens.weight
        assert worst(whole, state) == 0
        for name, value in part.items():
            assert torch.equal(value, state[f"blocks.2.mlp.{name}"])


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
