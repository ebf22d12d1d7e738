"""Weights in AxoNN's layout: one file a tensor rank, in the folder `tp_row_R_col_C_depth_D`.

A linear layer's weight [out, in] has its rows cut over *row* and its columns over *col*; the block is flattened and cut
into equal pieces over *depth*, so that a file holds a 1-D piece. Its bias is cut over row. A *transposed* layer swaps
row and col. All else lies whole in every file, and so does a linear layer whose sizes do not divide, which AxoNN leaves
alone. (The layout is that of AxoNN 0.2.0's sources: `checkpoint.py`, `intra_layer/fully_connected.py`.)

AxoNN pickles these files. Fourfold writes and reads safetensors, under the same names of folders and tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fourfold.anatomy import own_names
from fourfold.placement.cut import Block, Cut, Fill, Share, deal
from fourfold.training.checkpoint.durable import flush_file, flush_folder
from fourfold.training.unread import Brick, Source, Unread

_TRANSPOSED = "axonn.transposed"
"""Key of the files' metadata: JSON, the paths of transposed layers."""
_FOLDER = re.compile(r"tp_row_(\d+)_col_(\d+)_depth_(\d+)")
_SHOWN = 5


class AxonnError(ValueError):
    """Per-rank files that cannot be read or written: says what, expected, found, and what to try."""


class AxonnGrid(NamedTuple):
    """How many tensor ranks there are along each of AxoNN's axes (its G_intra_r, G_intra_c, G_intra_d)."""

    row: int
    col: int
    depth: int

    def ranks(self) -> Iterator[AxonnGrid]:
        """The coordinates of every rank."""
        return (AxonnGrid(*at) for at in product(*map(range, self)))

    @property
    def folder(self) -> str:
        """Of the rank at these coordinates."""
        return f"tp_row_{self.row}_col_{self.col}_depth_{self.depth}"


@dataclass(frozen=True)
class AxonnLayout:
    """How a model's tensors lie in the files.

    Attributes:
        grid: of the files.
        shapes: of all tensors in the model's `state_dict`, by name.
        cuts: of the tensors of parallel linear layers, over "row" and "col".
    """

    grid: AxonnGrid
    shapes: dict[str, tuple[int, ...]]
    cuts: dict[str, Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, grid: AxonnGrid, transposed: Collection[str] = ()) -> AxonnLayout:
        """The layout that AxoNN's `auto_parallelize` makes of a model, but for the layers named as transposed.

        Args:
            model: may be on meta.
            grid: of the files.
            transposed: paths of linear layers, or ends of paths such as `o_proj`.

        Raises:
            AxonnError: a transposed layer that is not there or does not divide.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        layout = cls(grid, shapes)
        unmet = set(transposed)
        for path, module in model.named_modules():
            if type(module) is nn.Linear:
                names = {end for end in transposed if path == end or path.endswith(f".{end}")}
                unmet -= names
                if not layout._take(path, module, swapped=bool(names)) and names:
                    raise AxonnError(
                        f"{path}: expected sizes that divide over {grid}, found {tuple(module.weight.shape)}; "
                        "leave it out of the transposed layers, or choose another grid"
                    )
        if unmet:
            raise AxonnError(f"transposed layers: expected paths of linear layers, found {', '.join(sorted(unmet))}")
        return layout

    def _take(self, path: str, linear: nn.Linear, *, swapped: bool) -> bool:
        """Cut a linear layer; False: AxoNN would leave it as it is."""
        rows, columns = ("col", "row") if swapped else ("row", "col")
        out, into = linear.weight.shape
        over = self.grid._asdict()
        if out % over[rows] or into % over[columns] or out * into // (self.grid.row * self.grid.col) % self.grid.depth:
            return False
        dealt = _even(out, rows, over[rows])
        self.cuts[f"{path}.weight"] = Cut((out, into), (dealt, _even(into, columns, over[columns])))
        if linear.bias is not None:
            self.cuts[f"{path}.bias"] = Cut((out,), (dealt,))
        return True

    def found(self, shapes: Mapping[str, tuple[int, ...]]) -> AxonnLayout:
        """The layout of files in which tensors have these shapes, where they tell more than the model does.

        A linear layer that AxoNN was not given lies whole. A table of AxoNN's own `Embedding` has its columns cut over
        the one of row and col that has several ranks, and its block is flattened and cut over depth.
        """
        cuts = dict(self.cuts)
        for name, shape in self.shapes.items():
            if shapes.get(name) == shape and len(shape) == 2:
                cuts.pop(name, None)
                cuts.pop(f"{name.removesuffix('weight')}bias", None)
            elif name not in cuts and len(shape) == 2 and len(shapes.get(name, shape)) == 1:
                axis = "row" if self.grid.col == 1 else "col"
                cuts[name] = Cut(shape, (None, _even(shape[1], axis, self.grid._asdict()[axis])))
        return AxonnLayout(self.grid, self.shapes, cuts)

    def block(self, name: str, rank: AxonnGrid) -> tuple[Block, int, int]:
        """What the file of a rank holds of a tensor: elements [first, last) of a block (all of them but of weights)."""
        cut = self.cuts.get(name)
        block = Block.whole(self.shapes[name]) if cut is None else cut.at({"row": rank.row, "col": rank.col})
        size = prod(block.shape)
        if cut is None or len(cut.shape) == 1:
            return block, 0, size
        piece = size // self.grid.depth
        return block, rank.depth * piece, (rank.depth + 1) * piece

    def shape_in_file(self, name: str) -> tuple[int, ...]:
        """Of a tensor in every file."""
        block, first, last = self.block(name, AxonnGrid(0, 0, 0))
        return (last - first,) if name in self.cuts else block.shape


def _even(size: int, axis: str, ranks: int) -> Share:
    return Share(axis, tuple((deal(size, ranks, index),) for index in range(ranks)))


# ---- writing


def write(
    folder: Path,
    source: Fill,
    model: nn.Module,
    grid: AxonnGrid,
    *,
    dtype: Callable[[str], torch.dtype],
    transposed: Collection[str] = (),
    name: str = "model",
) -> list[Path]:
    """Write a model's weights as one file a rank of `grid`; at most one file's worth of them is held.

    Args:
        folder: gets a folder a rank.
        source: of the weights; best one that gives boxes, such as `CheckpointSource`.
        model: whose they are; may be on meta.
        grid: any; also where the weights come from another grid, or none.
        dtype: of a tensor in the files, by its name in the source.
        transposed: see `AxonnLayout.of`.
        name: of the files, without ending.
    """
    layout = AxonnLayout.of(model, grid, transposed)
    owners = _own_by_name(model)
    metadata = {"format": "pt", _TRANSPOSED: json.dumps(sorted(transposed))}
    written = []
    for rank in grid.ranks():
        tensors: dict[str, Tensor] = {}
        for key in layout.shapes:
            own = owners.get(key, key)
            block, first, last = layout.block(key, rank)
            values = torch.empty(last - first, dtype=dtype(own))
            block.read(source, own, first, values, values.dtype)
            tensors[key] = values.view(layout.shape_in_file(key))
        path = folder / rank.folder / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        save_file(tensors, path, metadata=metadata)
        path.chmod(folder.stat().st_mode & 0o666)
        flush_file(path)
        flush_folder(path.parent)
        written.append(path)
    return written


def _own_by_name(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter → the one by which checkpoints know it."""
    owners = own_names(model)
    return {name: owners[id(weight)] for name, weight in model.named_parameters(remove_duplicate=False)}


# ---- reading


def is_set(folder: Path) -> bool:
    """Whether a folder holds per-rank folders."""
    return any(_FOLDER.fullmatch(path.name) for path in folder.glob("tp_row_*"))


class AxonnSource(Source):
    """The weights in per-rank files, by box; `parallelize(weights=…)` takes it, under any plan.

    What several files hold (biases, norms, tables) is read from the first of them.

    Attributes:
        layout: of the files.
    """

    def __init__(self, folder: Path, model: nn.Module, *, transposed: Collection[str] | None = None) -> None:
        """Open every file and compare names and shapes; no value is read.

        Args:
            folder: holds a folder `tp_row_R_col_C_depth_D` a rank, with one safetensors file in each.
            model: whose weights they are; may be on meta.
            transposed: see `AxonnLayout.of`; None: what the files say, else none.

        Raises:
            AxonnError: files are missing, only pickles, or of another model or layout.
        """
        self.folder = Path(folder)
        self._files = {rank: _opened(path) for rank, path in _paths(self.folder).items()}
        grid = AxonnGrid(*(max(at) + 1 for at in zip(*self._files, strict=True)))
        first = self._files[AxonnGrid(0, 0, 0)]
        if transposed is None:
            transposed = _transposed(first, self.folder)
        shapes = {name: tuple(first.get_slice(name).get_shape()) for name in first.keys()}
        self.layout = AxonnLayout.of(model, grid, transposed).found(shapes)
        self._alias = self._aliases(model, set(first.keys()))
        self._check()
        self._found: dict[str, Unread] = {}

    def unread(self, name: str) -> Unread:
        """A tensor of the model as it lies in the files."""
        name = self._alias[name]
        if name not in self._found:
            self._found[name] = Unread(self.layout.shapes[name], list(self._bricks(name)))
        return self._found[name]

    def _bricks(self, name: str) -> Iterator[Brick]:
        """The boxes of a tensor that the files hold, each once."""
        piece = name in self.layout.cuts and len(self.layout.shapes[name]) == 2
        for rank, file in self._files.items():
            block, first, last = self.layout.block(name, rank)
            once = block.owned if name in self.layout.cuts else rank.row == rank.col == 0
            if once and (piece or rank.depth == 0):
                flat = file.get_tensor(name).reshape(-1)
                for part in block.parts(first, last):
                    yield Brick(part.offsets, part._replace(start=part.start - first).of(flat))

    def _aliases(self, model: nn.Module, there: set[str]) -> dict[str, str]:
        """Every name of the model → the one of its tied names that the files have; embeddings before linears."""
        owners, alias = _own_by_name(model), {name: name for name in self.layout.shapes}
        for name, owner in owners.items():
            tied = [owner, *(other for other, its in owners.items() if its == owner)]
            alias[name] = next((one for one in tied if one in there), owner)
        return alias

    def _check(self) -> None:
        problems: list[str] = []
        wanted = set(self._alias.values())
        for rank, file in self._files.items():
            names = set(file.keys())
            for name in sorted(wanted - names):
                near = get_close_matches(name, names, n=1)
                problems.append(f"{rank.folder}: missing {name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
            problems += [f"{rank.folder}: unexpected {name!r}" for name in sorted(names - self._alias.keys())]
            for name in sorted(wanted & names):
                found, shape = tuple(file.get_slice(name).get_shape()), self.layout.shape_in_file(name)
                if found != shape:
                    problems.append(f"{rank.folder}: shape of {name!r}: expected {shape}, found {found}")
        if problems:
            more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise AxonnError(
                f"{self.folder}: the files are not those of this model on {self.layout.grid}:\n  "
                + "\n  ".join(problems[:_SHOWN])
                + f"{more}\nare layers transposed, or sharded, that are not here? name those with `transposed`"
            )


def _paths(folder: Path) -> dict[AxonnGrid, Path]:
    """The file of every rank of the grid that the folders' names span."""
    found: dict[AxonnGrid, Path] = {}
    for inside in sorted(folder.glob("tp_row_*")):
        if match := _FOLDER.fullmatch(inside.name):
            found[AxonnGrid(*map(int, match.groups()))] = inside
    if not found:
        raise AxonnError(f"{folder}: expected folders tp_row_R_col_C_depth_D, found none; name the folder above them")
    grid = AxonnGrid(*(max(at) + 1 for at in zip(*found, strict=True)))
    missing = [rank.folder for rank in grid.ranks() if rank not in found]
    if missing:
        raise AxonnError(f"{folder}: expected a folder for every rank of {grid}, found none for {missing[0]}; copy all")
    return {rank: _file_in(found[rank]) for rank in grid.ranks()}


def _file_in(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    pickles = sorted(folder.glob("*.pt"))
    if not files and pickles:
        raise AxonnError(
            f"{folder}: expected a safetensors file, found {pickles[0].name}; pickles can run code, so they are never "
            "read. Where you trust them, convert them once, as the page docs/loading.md shows"
        )
    raise AxonnError(f"{folder}: expected one safetensors file, found {len(files)}; keep those of one save")


def _transposed(file: Any, folder: Path) -> list[str]:
    """What the files say of themselves."""
    said = (file.metadata() or {}).get(_TRANSPOSED, "[]")
    with suppress(ValueError):
        if isinstance(names := json.loads(said), list):
            return [str(name) for name in names]
    raise AxonnError(f"{folder}: expected a list of layers as {_TRANSPOSED} in the files' metadata, found {said!r}")


def _opened(path: Path) -> Any:
    with suppress(SafetensorError, OSError):
        return safe_open(path, framework="pt")
    raise AxonnError(f"{path}: not a whole safetensors file; copy it again")
