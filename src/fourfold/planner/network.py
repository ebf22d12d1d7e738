"""A network as numbers, for closed forms: its linear layers, heads, norms and vocabulary. Nothing is traced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fourfold.placement.tensor.dealing import SMALL_TABLE
from fourfold.wire.formulas import shares


@dataclass(frozen=True)
class Band:
    """Features that are dealt together: `count` units of `width` each (heads of a head's width; else width 1).

    Units are dealt as evenly as can be. Where there are fewer than ranks, neighbours hold the same one (a key-value
    head), or deal its parts among themselves (the query heads that share a key-value head).

    Attributes:
        within: equal parts of a unit.
    """

    count: int
    width: int = 1
    within: int = 1

    @property
    def features(self) -> int:
        """All of them."""
        return self.count * self.width

    @property
    def parts(self) -> int:
        """The most ranks of which each gets its own."""
        return self.count * self.within

    def local(self, size: int, index: int = 0) -> int:
        """Features that rank `index` of `size` holds."""
        if size <= self.count:
            return self.width * shares(self.count, size)[index]
        if self.within == 1:
            return self.width
        neighbours = size // self.count
        return self.width // self.within * shares(self.within, neighbours)[index % neighbours]


@dataclass(frozen=True)
class Linear:
    """One matrix product, or siblings that read the same tensor and share one.

    Attributes:
        name: where it is.
        inputs: features that it reads.
        outputs: features that it yields; several bands where it is packed (q, k, v).
        transposed: its inputs lie over y and its outputs over x; a normal one's the other way round.
        bias: it has one.
        kept: what is kept for backward beside its input, dealt like its output: what an activation function or
            attention reads.
    """

    name: str
    inputs: Band
    outputs: tuple[Band, ...]
    transposed: bool = False
    bias: bool = True
    kept: tuple[Band, ...] = ()

    @classmethod
    def of(cls, inputs: int, outputs: int, *, transposed: bool = False, bias: bool = False) -> Linear:
        """A plain one."""
        return cls(f"{inputs}x{outputs}", Band(inputs), (Band(outputs),), transposed, bias)

    @property
    def contract(self) -> str:
        """The axis over which outputs are summed."""
        return "y" if self.transposed else "x"

    @property
    def across(self) -> str:
        """The axis over which input gradients are summed."""
        return "x" if self.transposed else "y"

    @property
    def weight(self) -> int:
        """Logical elements."""
        return self.inputs.features * sum(band.features for band in self.outputs)

    def local(self, sizes: dict[str, int], at: dict[str, int]) -> tuple[int, int]:
        """Inputs and outputs that the rank with these coordinates holds."""
        outputs = sum(band.local(sizes[self.across], at[self.across]) for band in self.outputs)
        return self.inputs.local(sizes[self.contract], at[self.contract]), outputs

    def shapes(self, sizes: dict[str, int], at: dict[str, int]) -> list[tuple[int, ...]]:
        """Of the local weight and bias, outputs first, as torch stores them."""
        inputs, outputs = self.local(sizes, at)
        return [(outputs, inputs), (outputs,)] if self.bias else [(outputs, inputs)]


@dataclass(frozen=True)
class Network:
    """Equal blocks between an embedding and a head.

    Attributes:
        linears: of one block, in the order of forward.
        blocks: how many.
        hidden: features of the residual stream, which lies over x.
        sequence: tokens of a row; 1 where rows are samples.
        heads, kv_heads, head: attention heads, those of keys and values, a head's width; 0 heads: no attention.
        norms: of a block; one more stands before the head.
        statistics: values a token that a rank gives a norm over x, each way: 2 for LayerNorm (mean, variance), 1
            for RMSNorm.
        vocabulary: rows of embedding and head; 0: neither.
        positions: rows of learned positions.
        tied: embedding and head share their weight.
        masks: dropout masks of a block on the residual stream, one byte an element.
    """

    name: str
    linears: tuple[Linear, ...]
    blocks: int
    hidden: int
    sequence: int = 1
    heads: int = 0
    kv_heads: int = 0
    head: int = 0
    norms: int = 0
    statistics: int = 2
    vocabulary: int = 0
    positions: int = 0
    tied: bool = False
    masks: int = 0

    @classmethod
    def gpt(
        cls, hidden: int, blocks: int, heads: int, *, vocabulary: int = 0, sequence: int = 2048, name: str = "GPT"
    ) -> Network:
        """LayerNorm, packed q|k|v, four times as wide in between, biases, learned positions, tied head, dropout."""
        attention = Band(heads, hidden // heads)
        linears = (
            Linear("qkv", Band(hidden), (attention,) * 3, kept=(attention,) * 3),
            Linear("project", attention, (Band(hidden),), transposed=True),
            Linear("expand", Band(hidden), (Band(4 * hidden),), kept=(Band(4 * hidden),)),
            Linear("contract", Band(4 * hidden), (Band(hidden),), transposed=True),
        )
        about = (name, linears, blocks, hidden, sequence, heads, heads, hidden // heads)
        ends = {"vocabulary": vocabulary, "positions": sequence if vocabulary else 0}
        return cls(*about, norms=2, statistics=2, tied=True, masks=2, **ends)

    @classmethod
    def llama(
        cls,
        hidden: int,
        blocks: int,
        heads: int,
        kv_heads: int,
        intermediate: int,
        *,
        vocabulary: int = 0,
        sequence: int = 2048,
        name: str = "Llama",
    ) -> Network:
        """RMSNorm, grouped queries, gated MLP (gate and up are siblings), no biases, no dropout, a head of its own."""
        width = hidden // heads
        shared = heads // kv_heads
        query, key, wide = Band(kv_heads, shared * width, shared), Band(kv_heads, width), Band(intermediate)
        linears = (
            Linear("q|k|v", Band(hidden), (query, key, key), bias=False, kept=(query, key, key)),
            Linear("o", query, (Band(hidden),), transposed=True, bias=False),
            # of a gated MLP, gate, activated gate and up are kept
            Linear("gate|up", Band(hidden), (wide, wide), bias=False, kept=(wide, wide, wide)),
            Linear("down", wide, (Band(hidden),), transposed=True, bias=False),
        )
        about = (name, linears, blocks, hidden, sequence, heads, kv_heads, width)
        return cls(*about, norms=2, statistics=1, vocabulary=vocabulary)

    def part(self, blocks: int, *, ends: bool) -> Network:
        """Some of its blocks, with embedding and head or without: a stage."""
        if ends:
            return replace(self, blocks=blocks)
        return replace(self, blocks=blocks, vocabulary=0, positions=0)

    @property
    def vocabulary_linear(self) -> Linear:
        """The head: hidden over x, vocabulary over y."""
        return Linear("head", Band(self.hidden), (Band(self.vocabulary),), bias=False)

    @property
    def positions_cut(self) -> bool:
        """The table of positions lies over y as that of tokens does; much smaller ones lie whole on every rank."""
        return self.positions * SMALL_TABLE > self.vocabulary

    @property
    def parameters(self) -> int:
        """Logical elements."""
        whole = {"x": 1, "y": 1}, {"x": 0, "y": 0}
        return self.blocks * sum(map(prod, self.block_shapes(*whole))) + sum(map(prod, self.outer_shapes(*whole)))

    def block_shapes(self, sizes: dict[str, int], at: dict[str, int]) -> list[tuple[int, ...]]:
        """Local shapes of one block's weights on the rank with these coordinates; norms lie over x."""
        local = Band(self.hidden).local(sizes["x"], at["x"])
        norms: list[tuple[int, ...]] = [(local,)] * (self.norms * self.statistics)  # scale, and LayerNorm's shift
        return norms + [shape for linear in self.linears for shape in linear.shapes(sizes, at)]

    def outer_shapes(self, sizes: dict[str, int], at: dict[str, int]) -> list[tuple[int, ...]]:
        """Local shapes of what lies before and after the blocks: embedding, positions, last norm, head."""
        if not self.vocabulary:
            return []
        columns = Band(self.hidden).local(sizes["x"], at["x"])
        rows = Band(self.vocabulary).local(sizes["y"], at["y"])
        shapes: list[tuple[int, ...]] = [(rows, columns)] * (1 if self.tied else 2)
        if self.positions:
            rows = Band(self.positions).local(sizes["y"], at["y"]) if self.positions_cut else self.positions
            shapes.append((rows, columns))
        return shapes + [(columns,)] * (self.statistics if self.norms else 0)
