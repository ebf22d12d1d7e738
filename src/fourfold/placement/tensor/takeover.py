"""Which executor takes over which module of a model whose weights are blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fourfold.anatomy import Anatomy, Linear, own_names
from fourfold.placement.tensor.between import Between
from fourfold.placement.tensor.dealing import Dealing, experts_of, features_of
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.experts import ExpertsExecutor, described
from fourfold.placement.tensor.heads import Counts, Patch, patches
from fourfold.placement.tensor.linears import ConvolutionExecutor, LinearExecutor
from fourfold.placement.tensor.norms import GroupExecutor, NormExecutor
from fourfold.placement.tensor.regions import WholeExecutor
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
        overlap: sums of input gradients travel while weight gradients are computed.
        widths: of modules that run whole, how many features go in and come out.
        switch: whether weights are blocks just now.
    """

    anatomy: Anatomy
    mesh: Mesh
    dealing: Dealing
    between: Between
    overlap: bool
    widths: Mapping[str, tuple[int, int]]
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
        for path, whole in self.anatomy.whole.items():
            axis = self.between.axis(whole.inputs)
            if axis.size > 1 or self.between.axis(whole.output).size > 1:
                self._attach_whole(model, path)
        for patch in self._patches:
            patch.apply(split=True)

    def _attach_linears(self, model: nn.Module) -> None:
        linears = self.anatomy.linears
        for group in self._sibling_groups(model):
            first = linears[group[0]]
            contract, output = self.between.axis(first.contract), self.between.axis(first.output)
            modules = [model.get_submodule(linears[name].module) for name in group]
            self._count_heads(model, group)
            if contract.size == output.size == 1:
                continue
            if isinstance(modules[0], CONVOLUTIONS):
                ConvolutionExecutor(self.switch, modules[0], contract, output)
                continue
            about: dict[str, Any] = {"overlap": self.overlap, "shared": first.role == "reducing"}
            siblings = self.between.siblings(first, modules, about)
            for number, module in enumerate(modules):
                LinearExecutor(self.switch, module, siblings, number)

    def _sibling_groups(self, model: nn.Module) -> Iterator[list[str]]:
        """Linears that are computed together: siblings with axes, layout and kind in common."""
        done: set[str] = set()
        for name, linear in self.anatomy.linears.items():
            if name in done or linear.layout not in ("out,in", "in,out"):
                continue
            together = next((names for names in self.anatomy.siblings if name in names), (name,))
            group = [one for one in together if one not in done and self._alike(linear, self.anatomy.linears.get(one))]
            if isinstance(model.get_submodule(linear.module), CONVOLUTIONS):
                group = [name]
            done.update(group)
            yield group

    @staticmethod
    def _alike(one: Linear, other: Linear | None) -> bool:
        return other is not None and one[:4] == other[:4]

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
            first = next(module.parameters(recurse=False))
            size = self.dealing.cuts[names[id(first)]].shape[-1]
            NormExecutor(self.switch, module, path, self.mesh[norm.axis], size)

    def _attach_whole(self, model: nn.Module, path: str) -> None:
        whole = self.anatomy.whole[path]
        given, made = self.widths[path]
        share = None if self.between.axis(whole.inputs).size == 1 else self.dealing.evenly(given, whole.inputs or "")
        dealt = None if self.between.axis(whole.output).size == 1 else self.dealing.evenly(made, whole.output or "")
        axes = self.between.axis(whole.inputs), self.between.axis(whole.output)
        WholeExecutor(self.switch, model.get_submodule(path), axes[0], share, axes[1], dealt)

    def be(self, *, split: bool) -> None:
        """Compute on blocks, or be the plain model."""
        self.switch.split = split
        for patch in self._patches:
            patch.apply(split=split)
