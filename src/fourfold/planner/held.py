"""What a rank of a grid holds at the highest moment of a step, in closed form. Bytes, by the ledger's categories.

The activations of a GPT block are those of Korthikanti et al. 2022 (arXiv 2205.05198), with what lies on the residual
stream cut over x: sbh(10/x + 24/y + 5as/(hy)) in 16 bits. The traced forecast of a plan knows the model's own operators
and is the one to believe; this one needs no model.
"""

from __future__ import annotations

from fourfold.hardware import Cluster
from fourfold.ledger.ledger import MEMORY
from fourfold.planner.network import Band
from fourfold.planner.tolls import Tolls

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, WORKSPACE, OTHER = MEMORY
MASTER, MOMENTS = 4, 8
"""Bytes an element of a master weight or its gradient, and of Adam's two moments."""

LOGIT = 4
"""Bytes of a logit where the loss reads it."""


def held(tolls: Tolls, cluster: Cluster, *, inflight: float = 1.0) -> dict[str, int]:
    """Bytes of the rank, by category.

    Args:
        inflight: micro-batches whose activations are held at once (pipelines hold several).
    """
    job, network, z = tolls.job, tolls.network, tolls.grid.z
    shard = network.blocks * tolls.block.size + tolls.outer.size
    full = network.blocks * tolls.block.full + tolls.outer.full
    found: dict[str, int] = dict.fromkeys(MEMORY, 0)
    found[PARAMETERS] = MASTER * shard
    found[OPTIMIZER] = MOMENTS * shard
    found[GRADIENTS] = MASTER * shard
    resident = z == 1 or job.shard != "parameters"
    if resident and (z > 1 or job.itemsize < MASTER):
        found[PARAMETERS] += job.itemsize * full
    if z > 1 and job.shard == "optimizer":
        found[GRADIENTS] += job.itemsize * full
    if z > 1:
        gathered = 0 if resident else min(network.blocks, 2 + job.kept)  # the one in use and the next, and the kept
        leaving = min(network.blocks, 2)  # a gradient being written, another on its way
        found[BUFFERS] = job.itemsize * ((gathered + leaving) * tolls.block.full + 2 * tolls.outer.full)
    tokens = max(tolls.tokens)
    found[ACTIVATIONS] = round(inflight * blocks_keep(tolls, tokens)) + ends_keep(tolls, tokens)
    found[OTHER] = cluster.device.reserved
    return found


def blocks_keep(tolls: Tolls, tokens: int) -> int:
    """Activation bytes that all blocks keep for the backward of one micro-batch."""
    each, blocks = block_keeps(tolls, tokens), tolls.network.blocks
    if tolls.job.recompute != "full":
        return blocks * each
    return blocks * tokens * _columns(tolls) * tolls.job.itemsize + each  # inputs, and the block computed again


def block_keeps(tolls: Tolls, tokens: int) -> int:
    """Activation bytes that one block keeps, unless it is computed again."""
    network, job = tolls.network, tolls.job
    elements = network.norms * _columns(tolls)
    for linear in network.linears:
        elements += linear.local(tolls.sizes, tolls.places)[0]
        elements += sum(band.local(tolls.sizes[linear.across], tolls.places[linear.across]) for band in linear.kept)
    return tokens * (job.itemsize * elements + network.masks * _columns(tolls) + _core(tolls))


def ends_keep(tolls: Tolls, tokens: int) -> int:
    """Activation bytes of the last norm's input, the head's, and the logits."""
    if not tolls.network.vocabulary:
        return 0
    columns, rows = tolls.network.vocabulary_linear.local(tolls.sizes, tolls.places)
    return tokens * (2 * tolls.job.itemsize * columns + LOGIT * rows)


def _columns(tolls: Tolls) -> int:
    return Band(tolls.network.hidden).local(tolls.sizes["x"], tolls.places["x"])


def _core(tolls: Tolls) -> int:
    """Bytes a token of the attention core: a log-sum-exp a head, or scores, their mask and what is left of them."""
    network, job = tolls.network, tolls.job
    heads = Band(network.heads).local(tolls.sizes["y"], tolls.places["y"]) if network.heads else 0
    if job.flash:
        return 4 * heads
    scores = 2 * job.itemsize + 1 if network.masks else job.itemsize
    return 0 if job.recompute == "selective" else heads * network.sequence * scores
