"""ZeRO: what replicas hold in common is held once: the optimizer's state (stage 1), gradients (2), weights (3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from fourfold.plan import Plan
from fourfold.recipes import _workload
from fourfold.recipes._claim import Claim
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize
from fourfold.wire import World
from fourfold.wire.threads import launch

RANKS = (1, 2, 3, 4)
STAGES = {1: "optimizer", 2: "gradients", 3: "parameters"}
WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes a parameter of fp32 training with Adam."""


def claim() -> Claim:
    """Rajbhandari et al. 2020, section 5 and figure 1, for fp32 Adam (16 bytes a parameter); section 7 for traffic.

    The figures are those that a stage cuts. (Below stage 3 this placement also keeps a master shard beside the full
    weights, 4/d bytes a parameter, which fp32 would not need.) A stage-3 rank gathers the weights for forward and for
    backward, but for the last block, which backward begins with, and for what lies outside of the blocks: so "at most
    1.5 times the traffic of data parallelism" is a bound, and the exact count is the planner's.
    """
    elements = _workload.parameters()
    predicted: dict[str, float] = {}
    for ranks in RANKS:
        predicted[f"stage 1, {ranks} ranks: optimizer"] = MOMENTS * elements / ranks
        predicted[f"stage 2, {ranks} ranks: + gradients"] = (MOMENTS + GRADIENT) * elements / ranks
        predicted[f"stage 3, {ranks} ranks: + weights"] = (MOMENTS + GRADIENT + WEIGHT) * elements / ranks
        predicted[f"stage 2, {ranks} ranks: bytes sent"] = 2 * (ranks - 1) / ranks * WEIGHT * elements
        predicted[f"stage 3, {ranks} ranks: sent beyond 3(d-1)/d"] = 0.0
    return Claim(
        system="ZeRO",
        paper="Rajbhandari et al. 2020, arXiv 1910.02054",
        statement="model states shrink by the number of ranks; stages 1 and 2 send no more than data parallelism, "
        "stage 3 at most 1.5 times as much",
        predicted=predicted,
        measure=lambda: _figures(sharded=True),
        control=lambda: _figures(sharded=False),
        off="plain replicas (shard: none)",
        tolerance=1e-9,
    )


def _figures(*, sharded: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    for ranks in RANKS:
        for stage, shard in STAGES.items():
            placement = {"z": ranks, "shard": shard} if sharded else {"data": ranks}
            optimizer, gradients, weights, sent = _largest(launch(ranks, _states, Plan.of({"placement": placement})))
            figures |= {
                1: {f"stage 1, {ranks} ranks: optimizer": optimizer},
                2: {
                    f"stage 2, {ranks} ranks: + gradients": optimizer + gradients,
                    f"stage 2, {ranks} ranks: bytes sent": sent,
                },
                3: {
                    f"stage 3, {ranks} ranks: + weights": optimizer + gradients + weights,
                    f"stage 3, {ranks} ranks: sent beyond 3(d-1)/d": max(
                        0.0, sent - 3 * (ranks - 1) / ranks * WEIGHT * _workload.parameters()
                    ),
                },
            }[stage]
    return figures


def _largest(ranks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(column) for column in zip(*ranks, strict=True))


def _states(world: World, plan: Plan) -> tuple[int, ...]:
    """Bytes that lie in this rank's storages between two steps: optimizer, gradients, weights; and what a step sent."""
    batch = _workload.batch()
    run = parallelize(_workload.model(), cross_entropy, OptimizerOptions(), plan, world=world, example=batch)
    for _ in range(2):
        run.step(batch)
    arenas = [unit.arena for unit in run.placed.units]
    sent = run.ledger.sent(1, kind="weight") + run.ledger.sent(1, kind="gradient")
    return (
        _stored(_moments(run)),
        _stored(arena.gradient for arena in arenas),
        _stored(tensor for arena in arenas for tensor in (arena.shard, arena.rest, arena.full) if tensor is not None),
        sent,
    )


def _moments(run: Run) -> Iterator[Tensor]:
    for state in run.optimizer.state_dict():
        yield from (tensor for name, tensor in state.items() if name != "step")


def _stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    return sum({storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}.values())
