"""What the layers of a model are on a tensor grid: the findings, as plain values.

All names are the parameters' own (the first of a tie). An axis is "x", "y", or None (whole).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose forward may take statistics over the rows of its batch (the lazy ones become one of these)."""

FLIP: dict[str | None, str] = {"x": "y", "y": "x", None: "x"}


class Linear(NamedTuple):
    """A weight that contracts features.

    Attributes:
        role: "normal" (x in, y out), "transposed" (y in, x out), "entry" (whole in: what reads images, or what a
            whole module gives), or "reducing" (a single feature out, which nothing can split).
        contract: axis over which its input features lie, None if whole.
        output: axis over which its output features lie, None if whole.
        layout: what the dims of the weight are: "out,in" (nn.Linear, convolutions), "in,out" (transformers' Conv1D),
            "expert,out,in" or "expert,in,out" (the linears of all experts in one).
        module: path of the module that ran it.
        unit_in: neighbouring input features that stay together (those of a head).
        unit_out: neighbouring output features that stay together.
        parts: sizes of what lies packed side by side in its output (q|k|v, gate|up), in order; () if it is one.
    """

    role: str
    contract: str | None
    output: str | None
    layout: str
    module: str
    unit_in: int = 1
    unit_out: int = 1
    parts: tuple[int, ...] = ()


class Norm(NamedTuple):
    """A module that normalises.

    Attributes:
        axis: over which the features of its input lie.
        spans: it normalises across features that are split over the axis, and its weight runs over them too; False if
            it works inside a unit, one weight for all of them, whose gradient is then partial over the axis.
    """

    axis: str | None
    spans: bool


class Raw(NamedTuple):
    """A parameter that joins activations elementwise.

    Attributes:
        axis: over which the features of these lie.
        spans: its elements run over the split features and are split like them; False if all share it (a scalar, one
            vector for all heads), and its gradient is then partial over the axis.
        dim: of the parameter, that runs over the split features; counted from the last (-1).
        heads: an element stands for all features of a head, and not for one.
    """

    axis: str | None
    spans: bool
    dim: int = -1
    heads: bool = False


class Beside(NamedTuple):
    """A tensor without features, as each rank has it (a buffer, or what a module is given), that joins split features.

    Attributes:
        axis: over which these features lie.
        dim: of the tensor, that runs over them; counted from the last (-1).
        size: how many entries do; where the dim has several times as many (rows × heads), they follow one another.
        heads: an entry stands for all features of a head, and not for one.
        module: path of the one that joins them.
        name: of the buffer, or the place among the floating tensors that the module is given.
    """

    axis: str
    dim: int
    size: int
    heads: bool
    module: str
    name: str | int

    @property
    def what(self) -> str:
        """Names the tensor."""
        given = f"{self.module or 'the model'}: floating tensor {self.name} that it is given"
        return self.name if isinstance(self.name, str) else given


class Whole(NamedTuple):
    """A module that must run on whole features: gathered, replicated, cut again.

    Attributes:
        inputs: axis over which its input features lie; None if they are whole already.
        output: axis over which the last dim of its output is cut again; None if it stays whole.
    """

    inputs: str | None
    output: str | None


class Shared(NamedTuple):
    """Whole features that every rank of an axis uses for split features of its own: their gradient is partial over it.

    Attributes:
        axis: over which their gradient must be summed.
        columns: (start, stop) of these features among those of the tensor, in order.
    """

    axis: str
    columns: tuple[tuple[int, int], ...]


class Dropout(NamedTuple):
    """A dropout that ran.

    Attributes:
        module: that it is in.
        axis: over which the features of its tensor lie.
        kind: "attention" (on the weights inside of an attention function) or "dropout".
        site: its name in the random streams.
    """

    module: str
    axis: str | None
    kind: str
    site: str = ""


class BatchNorm(NamedTuple):
    """A call of `F.batch_norm` that takes statistics over the rows of its batch.

    Attributes:
        module: path of the module that calls it.
        channels: how many pairs of statistics it takes.
        learned: its input has a gradient, so that backward takes statistics too.
        repeated: it is inside a `torch.utils.checkpoint` of the model's own.
    """

    module: str
    channels: int
    learned: bool
    repeated: bool = False


class Trouble(NamedTuple):
    """What cannot be split as found.

    Attributes:
        where: path of the module that does it.
        line: says it.
        suspects: weights whose layers, run whole, might prevent it.
    """

    where: str
    line: str
    suspects: frozenset[str]


@dataclass
class Roles:
    """What a reading found.

    Attributes:
        linears: weight → its role.
        embeddings: table → axis of its columns.
        norms: module path → what it normalises across.
        raw: parameter → how it joins activations.
        whole: module path → what is gathered for it and cut after it.
        shared: weight of a reducing linear, or "PATH:PLACE" (the floating outputs of a module that runs whole, by their
            place) → what of these outputs split features use.
        beside: "MODULE:NAME" of a buffer that a module reads, or of the place of what it is given → how that lies.
        siblings: groups of linear weights that read the very same tensor, in order of use.
        dropouts: in order of execution.
        outputs: axis of each floating tensor that the root module returned.
        exits: the same of modules that the loss calls itself; None too where features do not lie in the last dim.
        troubles: in order.
    """

    linears: dict[str, Linear] = field(default_factory=dict)
    embeddings: dict[str, str] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    raw: dict[str, Raw] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)
    shared: dict[str, Shared] = field(default_factory=dict)
    beside: dict[str, Beside] = field(default_factory=dict)
    siblings: tuple[tuple[str, ...], ...] = ()
    dropouts: list[Dropout] = field(default_factory=list)
    outputs: tuple[str | None, ...] = ()
    exits: dict[str, tuple[str | None, ...]] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
