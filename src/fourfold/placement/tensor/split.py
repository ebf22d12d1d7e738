"""A model whose features are cut over x and y: who computes what on which block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold import randomness
from fourfold.anatomy import Anatomy, Linear, own_names
from fourfold.ledger import Ledger
from fourfold.placement.cut import Share
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import rehearsal
from fourfold.placement.tensor.assembly import Assembly
from fourfold.placement.tensor.dealing import Dealing, deal_weights, features_of, share_over_time
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.experts import ExpertsExecutor, Role
from fourfold.placement.tensor.experts import refuse as refuse_experts
from fourfold.placement.tensor.heads import Counts, Patch, patches
from fourfold.placement.tensor.layers import refuse_layers
from fourfold.placement.tensor.linears import ConvolutionExecutor, LinearExecutor, Siblings
from fourfold.placement.tensor.norms import GroupExecutor, NormExecutor
from fourfold.placement.tensor.regions import LossScope, RootExecutor, WholeExecutor
from fourfold.placement.tensor.rehearsal import Stage
from fourfold.placement.tensor.sequence import EdgeExecutor, GatheringExecutor, Time
from fourfold.placement.tensor.tables import TableExecutor
from fourfold.plan.grid import Grid
from fourfold.wire import Axis, Mesh
from fourfold.wire.dry import dry_mesh

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Split:
    """How one model is split over the x and y of a mesh.

    Attributes:
        anatomy: of the model.
        mesh: this rank's, or a dry one.
        dealing: the cuts of all weights.
        overlap: sums of input gradients travel while weight gradients are computed.
        time: how time is dealt over y between linears; None: every rank has all of it.
        scope: of the loss that is being computed.
        outputs: by place among the floating tensors that the model returns, the axis of their features and how many
            they are in the whole model. Found by `rehearse`.
        dropped: by site, how the tensors that dropouts take are cut. Found by `rehearse`.
        widths: of modules that run whole, how many features go in and come out. Found by `rehearse`.
    """

    anatomy: Anatomy
    mesh: Mesh
    dealing: Dealing
    overlap: bool = True
    time: Time | None = None
    switch: Switch = field(default_factory=Switch)
    scope: LossScope = field(default_factory=LossScope)
    assembly: Assembly = field(init=False)
    outputs: dict[int, tuple[str, int]] = field(default_factory=dict)
    dropped: dict[str, tuple[randomness.Cut, ...]] = field(default_factory=dict)
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)
    _stage: Stage = field(init=False, repr=False)
    _patches: list[Patch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.assembly = Assembly(self.mesh, self.dealing.cuts)

    # ---- before anything is allocated

    def rehearse(self, stage: Stage) -> None:
        """Run the model dry, whole and split, and compare.

        Raises:
            PlacementError: it would not compute what the whole model does; names the module and the function.
        """
        self._stage = stage
        opaque = frozenset(self._taken_over(stage.model))
        with stage.entered():
            twin = stage.twin({})
            whole = rehearsal.run(twin, stage.loss, stage.inputs(), self.anatomy, opaque)
            if whole.error is not None:
                raise whole.error
            refuse_layers(twin, self.anatomy, whole)
            for place, (axis, shape) in enumerate(zip(self.anatomy.outputs, whole.outputs, strict=False)):
                if axis is not None and self.mesh[axis].size > 1:
                    self.outputs[place] = axis, shape[-1]
            self.widths = {path: _widths(whole, path) for path in self.anatomy.whole}
            split, model = self._dry(Ledger())
            with split.scope.around():
                local = rehearsal.run(model, stage.loss, stage.inputs(), self.anatomy, opaque)
        if split.time is not None:
            self._remember_time(split.time)
        self._compare(whole, local)
        self.dropped = rehearsal.cuts(whole, local, self.anatomy, self.dealing, self.mesh.coordinates)

    def _remember_time(self, time: Time) -> None:
        """Between linears, shapes have a part of the time steps."""
        for each, total in ((1, time.steps), (time.rows, time.rows * time.steps)):
            runs = [range(each * mine.start, each * mine.stop) for mine in time.runs()]
            self.dealing.remember(Share("y", tuple((run,) for run in runs)), total)

    def _compare(self, whole: rehearsal.Run, local: rehearsal.Run) -> None:
        """Ranks hold different parts, so one of them may find what the others do not: then all refuse.

        Raises:
            PlacementError: this rank's own, or one that says where another was raised.
        """
        axis, error = self.mesh.over("x", "y"), None
        gathered = [path for path, one in self.anatomy.whole.items() if self._axis(one.inputs).size > 1]
        try:
            rehearsal.compare(whole, local, self.dealing, self.mesh.coordinates, gathered)
        except PlacementError as found:
            error = found
        refusing = [index for index, (flag,) in enumerate(axis.collect([float(error is not None)])) if flag]
        if error is not None:
            raise error
        if refusing and not axis.dry:
            y, x = divmod(refusing[0], self.mesh["x"].size)
            raise PlacementError(
                f"the part of the model on the ranks with x = {x}, y = {y} does not compute what the whole model does; "
                "these ranks say what and where. Leave out plan.placement.tensor"
            )

    def forecast(self, ledger: Ledger, batches: Sequence[Mapping[str, Tensor]], *, recompute: bool) -> None:
        """Add what this rank sends over x and y in a step, by running it dry: shapes decide, and formulas count.

        Args:
            batches: of every micro-batch (values do not matter).
            recompute: blocks are computed again in backward.
        """
        for batch in batches:
            stage = dataclasses.replace(self._stage, batch=batch)
            with stage.entered():
                split, model = self._dry(ledger)
                for path in self.anatomy.blocks if recompute else ():
                    block = model.get_submodule(path)
                    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
                split.watch_partial(dict(model.named_parameters()))
                with split.scope.around():
                    total, _ = stage.loss(model, stage.inputs())
                total.backward()

    def _dry(self, ledger: Ledger) -> tuple[Split, nn.Module]:
        """This rank's split of a twin with blocks for weights, on a mesh that moves nothing."""
        x, y = self.mesh["x"], self.mesh["y"]
        mesh = dry_mesh({"x": x.size, "y": y.size}, x.index + x.size * y.index, ledger)
        shapes = {name: block.shape for name, block in self.assembly.blocks().items()}
        model = self._stage.twin(shapes)
        time = None if self.time is None else Time(mesh["y"])
        split = dataclasses.replace(self, mesh=mesh, time=time, switch=Switch(), scope=LossScope(), _patches=[])
        split.attach(model)
        split.attach_root(model, self.outputs)
        return split, model

    def _taken_over(self, model: nn.Module) -> Iterator[str]:
        """Modules whose insides are not the whole model's."""
        yield from (linear.module for linear in self.anatomy.linears.values())
        yield from self.anatomy.whole
        yield from (path for path, norm in self.anatomy.norms.items() if norm.spans)
        yield from (path for path, module in model.named_modules() if isinstance(module, nn.Embedding))

    # ---- taking over

    def attach(self, model: nn.Module) -> None:
        """Take over the modules that compute with blocks. The model's weights are blocks from here on."""
        names = own_names(model)
        self._attach_linears(model)
        self._attach_experts(model)
        self._attach_norms(model, names)
        self._attach_time(model)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                self._attach_table(names[id(module.weight)], module)
        for path, whole in self.anatomy.whole.items():
            axis = self._axis(whole.inputs)
            if axis.size > 1 or self._axis(whole.output).size > 1:
                self._attach_whole(model, path)
        for patch in self._patches:
            patch.apply(split=True)

    def attach_root(self, model: nn.Module, outputs: Mapping[int, tuple[str, int]]) -> None:
        """Make the model's outputs whole: by place, the axis and the number of their features."""
        cut = {place: (self.mesh[axis], self.dealing.evenly(size, axis)) for place, (axis, size) in outputs.items()}
        if cut:
            RootExecutor(self.switch, model, cut, self.scope)

    def install(self, model: nn.Module) -> None:
        """Take over a model whose weights are blocks by now; it has been rehearsed."""
        self.attach(model)
        self.attach_root(model, self.outputs)
        self.watch_partial(dict(model.named_parameters()))

    def watch_partial(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of weights that every rank of an axis, or some of them, use for features of their own."""
        for name, about in self.dealing.partial.items():
            parameter = parameters[name]
            if parameter.requires_grad:
                axis = self.mesh[about] if isinstance(about, str) else self.mesh.part(about.axis, about.copies)
                parameter.register_hook(_summing(axis))

    def _axis(self, name: str | None) -> Axis:
        """An axis; where features are whole, one of a single rank."""
        return self.mesh.over() if name is None else self.mesh[name]

    def _attach_linears(self, model: nn.Module) -> None:
        linears = self.anatomy.linears
        for group in self._sibling_groups(model):
            first = linears[group[0]]
            contract, output = self._axis(first.contract), self._axis(first.output)
            modules = [model.get_submodule(linears[name].module) for name in group]
            self._count_heads(model, group)
            if contract.size == output.size == 1:
                continue
            if isinstance(modules[0], CONVOLUTIONS):
                ConvolutionExecutor(self.switch, modules[0], contract, output)
                continue
            siblings = self._siblings(group[0], modules, contract, output)
            for number, module in enumerate(modules):
                LinearExecutor(self.switch, module, siblings, number)

    def _siblings(self, name: str, modules: list[nn.Module], contract: Axis, output: Axis) -> Siblings:
        linear = self.anatomy.linears[name]
        about: dict[str, Any] = {"overlap": self.overlap, "shared": linear.role == "reducing"}
        block = self._block_of(linear.module) if self.time is not None else None
        if self.time is None or block is None:
            return Siblings(modules, contract, output, linear.layout, **about)
        # Gathers and scatters of time are the sums over y.
        if linear.contract == "y":
            return Siblings(modules, self._axis(None), output, linear.layout, **about, time=(self.time, "scatter"))
        alone = (self.time, "gather") if linear.module.rpartition(".")[0] == block else None
        return Siblings(modules, contract, self._axis(None), linear.layout, **about, time=alone)

    def _block_of(self, path: str) -> str | None:
        """The block that a module is in."""
        return next((block for block in self.anatomy.blocks if path.startswith(f"{block}.")), None)

    def _attach_time(self, model: nn.Module) -> None:
        """Blocks pass on their own time steps; modules with a block's first linears gather them all."""
        if self.time is None:
            return
        parents = {
            linear.module.rpartition(".")[0]: linear for linear in self.anatomy.linears.values() if linear.output == "y"
        }
        for path in parents:
            if self._block_of(path) is not None:
                GatheringExecutor(self.switch, model.get_submodule(path), self.time)
        first, last = self.anatomy.blocks[0], self.anatomy.blocks[-1]
        for path in dict.fromkeys((first, last)):
            EdgeExecutor(self.switch, model.get_submodule(path), self.time, first=path == first, last=path == last)

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
        axis = self._axis(linears[0].output)
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
        for path, names in self._experts().items():
            linears = {name: self.anatomy.linears[name] for name in names}
            outer = next(iter(linears.values()))
            if self._axis(outer.contract).size == self._axis(outer.output).size == 1:
                continue
            module = model.get_submodule(path)
            refuse_experts(path, module)
            roles = {
                name.rpartition(".")[2]: Role(self._axis(linear.contract), self._axis(linear.output))
                for name, linear in linears.items()
            }
            cut = self.dealing.cuts[names[0]]
            features = cut.at(self.mesh.coordinates).shape[outer.layout.split(",").index("in")]
            ExpertsExecutor(self.switch, module, path, roles, features, self._axis(outer.contract))

    def _experts(self) -> dict[str, list[str]]:
        """3-D weights by the module that reads them, first layers first."""
        found: dict[str, list[str]] = {}
        for name, linear in self.anatomy.linears.items():
            if linear.layout.startswith("expert"):
                found.setdefault(linear.module, []).append(name)
        return found

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

    def _attach_table(self, name: str, module: nn.Embedding) -> None:
        share = self.dealing.cuts[name].shares[0] if name in self.anatomy.embeddings else None
        if share is not None:
            axis = self.mesh[share.axis]
            (rows,) = share.runs[axis.index]
            TableExecutor(self.switch, module, axis, rows)

    def _attach_whole(self, model: nn.Module, path: str) -> None:
        whole = self.anatomy.whole[path]
        given, made = self.widths[path]
        share = None if self._axis(whole.inputs).size == 1 else self.dealing.evenly(given, whole.inputs or "")
        dealt = None if self._axis(whole.output).size == 1 else self.dealing.evenly(made, whole.output or "")
        axes = self._axis(whole.inputs), self._axis(whole.output)
        WholeExecutor(self.switch, model.get_submodule(path), axes[0], share, axes[1], dealt)

    # ---- the logical view

    @contextmanager
    def whole(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Inside, the model is the plain one: its weights are whole and its own code runs, on every rank for itself."""
        blocks = {name: parameter.data for name, parameter in parameters.items()}
        for name, values in self.assembly.assembled(blocks).items():
            parameters[name].data = values
        self._be(split=False)
        try:
            yield
        finally:
            self._be(split=True)
            for name, values in blocks.items():
                parameters[name].data = values

    def _be(self, *, split: bool) -> None:
        self.switch.split = split
        for patch in self._patches:
            patch.apply(split=split)


def _widths(whole: rehearsal.Run, path: str) -> tuple[int, int]:
    """Features of the first floating tensor that a module is given, and of the first that it gives."""
    return whole.given[path][0][-1], whole.gave[path][0][-1]


def _summing(axis: Axis) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        axis.all_reduce(total, "gradient").wait()
        return total

    return hook


def rehearsed(stage: Stage, anatomy: Anatomy, mesh: Mesh, grid: Grid, *, overlap: bool) -> Split:
    """How a model is split over a grid, rehearsed; nothing of the model itself has changed.

    Raises:
        PlacementError: it does not fit the grid; names the layer, the axis and the nearest sizes that fit.
    """
    split = divide(stage.model, anatomy, mesh, grid, overlap=overlap)
    split.rehearse(stage)
    return split


def divide(model: nn.Module, anatomy: Anatomy, mesh: Mesh, grid: Grid, *, overlap: bool) -> Split:
    """How the model is split, by the shapes of its weights."""
    if anatomy.problems:
        raise PlacementError(
            f"plan.placement.tensor: {type(model).__name__} cannot be cut over x and y: {anatomy.problems[0]}"
            f"{f' (and {len(anatomy.problems) - 1} more)' if len(anatomy.problems) > 1 else ''}; leave it out"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
            raise PlacementError(
                f"{path}: expected an embedding without max_norm and scale_grad_by_freq, which look at whole rows of "
                "the table or at all lookups; set them to None and False, or leave out plan.placement.tensor"
            )
    split = Split(anatomy, mesh, deal_weights(model, anatomy, grid), overlap)
    if grid.rows_cut and grid.y > 1:
        split.time = Time(mesh["y"])
        share_over_time(split.dealing, model)
    return split
