"""Which executor takes over which module of a model whose weights are blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fourfold.anatomy import Anatomy, own_names
from fourfold.placement.cut import Share
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.beside import BesideExecutor, Part
from fourfold.placement.tensor.between import Between
from fourfold.placement.tensor.dealing import Dealing, experts_of, features_of
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.experts import ExpertsExecutor, described
from fourfold.placement.tensor.heads import Counts, Patch, patches
from fourfold.placement.tensor.linears import ConvolutionExecutor, LinearExecutor
from fourfold.placement.tensor.norms import GroupExecutor, NormExecutor
from fourfold.placement.tensor.places import Places
from fourfold.placement.tensor.regions import Gathered, Sum, WholeExecutor, extents
from fourfold.placement.tensor.resplit import Lying, Resplit, ResplitExecutor, RowsExecutor
from fourfold.placement.tensor.rowwise import Rowwise
from fourfold.placement.tensor.tuning import Tuning
from fourfold.wire import Mesh

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Takeover:
    """The executors of one model.

    Attributes:
        anatomy: of the model.
        mesh: this rank's, or a dry one.
        dealing: the cuts of all weights.
        between: what becomes of rows and time between linears.
        tuning: how products run.
        widths: of modules that run whole, how many features go in and come out.
        places: which of the tensors that they are given have the features.
        rowwise: of those of them that are computed by rows, and of the model (""), where the rows are.
        switch: whether weights are blocks just now.
    """

    anatomy: Anatomy
    mesh: Mesh
    dealing: Dealing
    between: Between
    tuning: Tuning
    widths: Mapping[str, tuple[int, int]]
    places: Places
    rowwise: Mapping[str, Rowwise] = field(default_factory=dict)
    switch: Switch = field(default_factory=Switch)
    _patches: list[Patch] = field(default_factory=list)

    def attach(self, model: nn.Module) -> None:
        """Take over the modules that compute with blocks. The model's weights are blocks from here on."""
        names = own_names(model)
        self._attach_linears(model)
        self._attach_experts(model)
        self._attach_norms(model, names)
        self.between.attach(model, self.switch)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                self.between.table(module, self.dealing.cuts[names[id(module.weight)]], self.switch)
        resplit = Resplit(self.mesh["x"], self.mesh["y"])
        for path, whole in self.anatomy.whole.items():
            axes = self.between.axis(whole.inputs), self.between.axis(whole.output)
            sums = {place: sums for place, sums in self._sums(path) if sums[0].size > 1}
            if path in self.rowwise:
                self._attach_resplit(model, path, resplit, sums)
            elif sums or any(axis.size > 1 for axis in axes):
                self._attach_whole(model, path, sums)
        self._attach_beside(model)
        if self.rowwise:
            RowsExecutor(self.switch, model, self.rowwise[""], resplit)
        for patch in self._patches:
            patch.apply(split=True)

    def _attach_linears(self, model: nn.Module) -> None:
        linears = self.anatomy.linears
        for group in self._sibling_groups(model):
            first = linears[group[0]]
            contract, output = self.between.axis(first.contract), self.between.axis(first.output)
            modules = [model.get_submodule(linears[name].module) for name in group]
            self._count_heads(model, group)
            about = self.anatomy.shared.get(group[0])
            shared = self.between.axis(about.axis) if about is not None else None
            if contract.size == output.size == 1 and (shared is None or shared.size == 1):
                continue
            if isinstance(modules[0], CONVOLUTIONS):
                ConvolutionExecutor(self.switch, modules[0], contract, output)
                continue
            settings: dict[str, Any] = {"tuning": self.tuning, "shared": shared}
            siblings = self.between.siblings(first, modules, settings)
            for number, module in enumerate(modules):
                LinearExecutor(self.switch, module, siblings, number)

    def _sibling_groups(self, model: nn.Module) -> Iterator[list[str]]:
        """Linears that are computed together: siblings with axes, layout and kind in common."""
        done: set[str] = set()
        for name, linear in self.anatomy.linears.items():
            if name in done or linear.layout not in ("out,in", "in,out"):
                continue
            together = next((names for names in self.anatomy.siblings if name in names), (name,))
            group = [one for one in together if one not in done and self._alike(name, one)]
            if isinstance(model.get_submodule(linear.module), CONVOLUTIONS):
                group = [name]
            done.update(group)
            yield group

    def _alike(self, name: str, beside: str) -> bool:
        one, other = (self.anatomy.linears.get(weight) for weight in (name, beside))
        shared = self.anatomy.shared
        return one is not None and other is not None and one[:4] == other[:4] and shared.get(name) == shared.get(beside)

    def _count_heads(self, model: nn.Module, group: list[str]) -> None:
        """The module that holds the projections of an attention may keep counts of heads."""
        linears = [self.anatomy.linears[name] for name in group]
        axis = self.between.axis(linears[0].output)
        if axis.size == 1 or all(linear.unit_out == 1 for linear in linears):
            return
        heads: dict[int, int] = {}
        features: dict[int, int] = {}
        for name, linear in zip(group, linears, strict=True):
            for size, here in features_of(self.dealing, name, axis.index):
                heads[size // linear.unit_out] = here // linear.unit_out
                features[size] = here
        parent = model.get_submodule(linears[0].module.rpartition(".")[0])
        counts = Counts(heads, features, max(heads.values()) // min(heads.values()))
        self._patches += patches(parent, counts)

    def _attach_experts(self, model: nn.Module) -> None:
        for path, names in experts_of(self.anatomy).items():
            first = self.anatomy.linears[names[0]]
            outer, inner = self.between.axis(first.contract), self.between.axis(first.output)
            if outer.size == inner.size == 1:
                continue
            module = model.get_submodule(path)
            here = self.dealing.cuts[names[0]].at(self.mesh.coordinates).shape
            features = here[first.layout.split(",").index("in")]
            experts = described(path, module, self.anatomy, outer, inner, features)
            ExpertsExecutor(self.switch, module, path, experts, self.between.exchange(inner, features))

    def _attach_norms(self, model: nn.Module, names: Mapping[int, str]) -> None:
        for path, norm in self.anatomy.norms.items():
            if norm.axis is None or self.mesh[norm.axis].size == 1:
                continue
            module = model.get_submodule(path)
            if not norm.spans:
                if isinstance(module, nn.GroupNorm):
                    GroupExecutor(self.switch, module)
                continue
            share = self._normalised(path, module, norm.axis, names)
            order = [index for runs in share.runs for run in runs for index in run]
            about = extents(share), order == list(range(len(order)))
            NormExecutor(self.switch, module, path, self.mesh[norm.axis], *about)

    def _normalised(self, path: str, module: nn.Module, axis: str, names: Mapping[int, str]) -> Share:
        """How the features are dealt that a norm spans: as its weight is; without one, as those of so many are."""
        first = next(module.parameters(recurse=False), None)
        share = None if first is None else self.dealing.cuts[names[id(first)]].shares[-1]
        if share is not None:
            return share
        shape = getattr(module, "normalized_shape", None)
        known = self.dealing.known.get((axis, shape[-1]), []) if shape else []
        if len(known) != 1:
            raise PlacementError(
                f"{path}: {type(module).__name__} normalises across features that are split over {axis} and has no "
                "weight that says how they are dealt: expected nn.LayerNorm or nn.RMSNorm of features that are dealt "
                f"in one way; give it a weight, or leave out plan.placement.tensor.{axis}"
            )
        return known[0]

    def _sums(self, path: str) -> Iterator[tuple[int, Sum]]:
        """By place among the floating outputs of a module that runs whole, what of their gradients is summed."""
        for name, shared in self.anatomy.shared.items():
            module, _, place = name.rpartition(":")
            if module == path:
                yield int(place), Sum(self.between.axis(shared.axis), shared.columns)

    def _attach_whole(self, model: nn.Module, path: str, sums: Mapping[int, Sum]) -> None:
        whole = self.anatomy.whole[path]
        given, made = self.widths[path]
        share = None if self.between.axis(whole.inputs).size == 1 else self.dealing.evenly(given, whole.inputs or "")
        dealt = None if self.between.axis(whole.output).size == 1 else self.dealing.evenly(made, whole.output or "")
        axes = self.between.axis(whole.inputs), self.between.axis(whole.output)
        given = Gathered(axes[0], share, self.places.features.get(path, frozenset()))
        WholeExecutor(self.switch, model.get_submodule(path), given, axes[1], dealt, sums)

    def _attach_resplit(self, model: nn.Module, path: str, resplit: Resplit, sums: Mapping[int, Sum]) -> None:
        whole = self.anatomy.whole[path]
        given, made = (
            None
            if name is None or self.mesh[name].size == 1
            else Lying(self.mesh[name], extents(self.dealing.evenly(width, name)))
            for name, width in zip((whole.inputs, whole.output), self.widths[path], strict=True)
        )
        about = self.rowwise[path], resplit, given, made, self.mesh.over("x", "y"), sums
        ResplitExecutor(self.switch, model.get_submodule(path), path, *about)

    def _attach_beside(self, model: nn.Module) -> None:
        given: dict[str, dict[int, Part]] = {}
        buffers: dict[str, list[tuple[nn.Module, str, Part]]] = {}
        for beside in self.anatomy.beside.values():
            path, name = beside.module, beside.name
            axis = self.between.axis(beside.axis)
            if axis.size == 1:
                continue
            share = self.dealing.beside(beside.what, path, beside.axis, beside.size, heads=beside.heads)
            part = Part(beside.dim, beside.size, share.runs[axis.index])
            if isinstance(name, int):
                given.setdefault(path, {})[name] = part
            else:
                owner, _, own = name.rpartition(".")
                buffers.setdefault(path, []).append((model.get_submodule(owner), own, part))
        for path in dict.fromkeys([*given, *buffers]):
            BesideExecutor(self.switch, model.get_submodule(path), given.get(path, {}), buffers.get(path, ()))

    def be(self, *, split: bool) -> None:
        """Compute on blocks, or be the plain model."""
        self.switch.split = split
        for patch in self._patches:
            patch.apply(split=split)
