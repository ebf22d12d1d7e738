"""A model whose features are cut over x and y: who computes what on which block."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold import randomness
from fourfold.anatomy import Anatomy, survey
from fourfold.ledger import Flow, Ledger, Traffic
from fourfold.placement.cut import Share
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import comparison, rehearsal, resplit, rowwise
from fourfold.placement.tensor.assembly import Assembly
from fourfold.placement.tensor.between import Between, way_of
from fourfold.placement.tensor.dealing import Dealing, bias_of, deal_weights
from fourfold.placement.tensor.familiar import Dropped, Familiar
from fourfold.placement.tensor.layers import refuse_holders, refuse_layers
from fourfold.placement.tensor.places import Places
from fourfold.placement.tensor.reads import Reads
from fourfold.placement.tensor.regions import ExitExecutor, LossScope, RootExecutor
from fourfold.placement.tensor.rehearsal import Stage
from fourfold.placement.tensor.takeover import Takeover
from fourfold.placement.tensor.tuning import Tuning
from fourfold.plan.grid import Grid
from fourfold.wire import Axis, Mesh
from fourfold.wire.dry import dry_mesh

READ = "linears embeddings norms raw whole shared beside siblings dropouts outputs exits".split()
"""What of an anatomy says how a model is cut."""

Staged = Callable[[Callable[[], tuple[Tensor, object]], Ledger], Mapping[Flow, Traffic]]
"""Runs a model stage by stage: what runs it whole, and the ledger that it counts in, to the traffic of some stages."""


@dataclass
class Split:
    """How one model is split over the x and y of a mesh.

    Attributes:
        anatomy: of the model.
        mesh: this rank's, or a dry one.
        dealing: the cuts of all weights.
        way: what becomes of rows and time between linears.
        tuning: how the products of cut linears run.
        scope: of the loss that is being computed.
        outputs: by place among the floating tensors that the model returns, the axis of their features and how many
            they are in the whole model. Found by `rehearse`.
        exits: the same of modules that the loss calls itself, by path. Found by `rehearse`.
        dropped: by site, how the tensors that dropouts take are cut. Found by `rehearse`, and by `look_at`.
        windows: by site, which part of the rows a dropout is of. Found by `rehearse`.
        widths: of modules that run whole, how many features go in and come out. Found by `rehearse`.
        by_rows: paths of those of them that are computed by rows.
        rowwise: where the rows are in what these are given and give. Found by `rehearse`.
        places: which of the tensors that modules are given have features, or rows. Found by `rehearse`.
        untried: why the split model was not tried on numbers (`trial.py`), in words; empty if it was.
        takeover: the executors, once there are some.
    """

    anatomy: Anatomy
    mesh: Mesh
    dealing: Dealing
    way: type[Between]
    tuning: Tuning = Tuning()
    scope: LossScope = field(default_factory=LossScope)
    assembly: Assembly = field(init=False)
    outputs: dict[int, tuple[str, int]] = field(default_factory=dict)
    exits: dict[str, dict[int, tuple[str, int]]] = field(default_factory=dict)
    dropped: Dropped = field(default_factory=dict)
    windows: dict[str, randomness.Window] = field(default_factory=dict)
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)
    by_rows: tuple[str, ...] = ()
    rowwise: dict[str, rowwise.Rowwise] = field(default_factory=dict)
    places: Places = field(default_factory=Places)
    untried: str = ""
    takeover: Takeover = field(init=False, repr=False)
    _stage: Stage = field(init=False, repr=False)
    _familiar: Familiar = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.assembly = Assembly(self.mesh, self.dealing.cuts)
        between = self.way(self.mesh, self.dealing)
        between.places = self.places
        about = self.anatomy, self.mesh, self.dealing, between, self.tuning, self.widths, self.places, self.rowwise
        self.takeover = Takeover(*about)

    # ---- before anything is allocated

    def rehearse(self, stage: Stage) -> None:
        """Run the model dry, whole and split, and compare.

        Raises:
            PlacementError: it would not compute what the whole model does; names the module and the function.
        """
        self._stage = stage
        opaque = frozenset(self._taken_over(stage.model))
        if self.by_rows:
            self.rowwise.update(rowwise.find(stage, self.anatomy, self.by_rows))
        self.takeover.between.look(stage)
        with stage.entered():
            twin = stage.twin({})
            shapes = {name: block.shape for name, block in self.assembly.blocks().items()}
            reads = partial(Reads, twin, shapes, self._of_linears())
            whole = rehearsal.run(twin, stage.loss, stage.inputs(), self.anatomy, opaque, reads)
            if whole.error is not None:
                raise whole.error
            refuse_layers(twin, self.anatomy, whole)
            self.outputs.update(self._cut(self.anatomy.outputs, whole.outputs))
            self.exits.update({path: self._cut(self.anatomy.exits[path], shapes) for path, shapes in whole.returned})
            self.widths.update({path: _widths(whole, path) for path in self.anatomy.whole})
            self.places.see_whole(whole, self.widths)
            split, model = self._dry(Ledger())
            with split.scope.around():
                local = rehearsal.run(model, stage.loss, stage.inputs(), self.anatomy, opaque)
        self.places.see_part(whole, local)
        self.windows = split.takeover.between.remember(self.dealing, whole)
        self.windows |= resplit.windows(self.mesh, self.anatomy, self.by_rows)
        self._compare(whole, local)
        about = self.anatomy, self.dealing, self.mesh.coordinates, self.windows
        self.dropped = comparison.cuts(whole, local, *about)
        self._familiar = Familiar(stage, self.anatomy.blocks, self.dropped)

    def look_at(self, batch: Mapping[str, Tensor]) -> None:
        """Rehearse again if the model calls other functions on this batch, as code that asks for a length may, or if
        what dropouts take is cut otherwise.

        All ranks of x and y call it together. Where what is called hangs on values, nothing is seen without them.

        Args:
            batch: of a micro-batch, before its forward.

        Raises:
            PlacementError: the split model would not compute on it what the whole model does.
        """
        path = self._familiar.new_path(batch)
        if path is not None:
            grid = Grid(x=self.mesh["x"].size, y=self.mesh["y"].size)
            stage = dataclasses.replace(self._stage, batch=self.way.example(batch, grid))
            self._refuse_others(survey(stage.model, stage.loss, batch, whole=self.by_rows), batch)
            found: dict[str, Any] = {"outputs": {}, "exits": {}, "dropped": {}, "windows": {}, "widths": {}}
            again = dataclasses.replace(self, **found, rowwise={})
            again.rehearse(stage)
            self._familiar.learn(batch, path, again.dropped)
        self.dropped = self._familiar.dropped(batch)

    def _refuse_others(self, anatomy: Anatomy, batch: Mapping[str, Tensor]) -> None:
        """The model is cut as it is by its first batch.

        Raises:
            PlacementError: on this batch it cannot be cut, or would be in another way.
        """
        _refuse_problems(self._stage.model, anatomy)
        seen = self.way.seen(anatomy)
        other = [name for name in READ if getattr(seen, name) != getattr(self.anatomy, name)]
        if other:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in batch.items())
            raise PlacementError(
                f"plan.placement.tensor: on a batch of {shapes} the model calls other functions than on the first one, "
                f"by which it would be cut in another way ({', '.join(other)}): expected the same on every batch; give "
                "parallelize an `example` on which it calls all of them, or leave it out"
            )

    def _compare(self, whole: rehearsal.Run, local: rehearsal.Run) -> None:
        """Ranks hold different parts, so one of them may find what the others do not: then all refuse.

        Raises:
            PlacementError: this rank's own, or one that says where another was raised.
        """
        axis, error = self.mesh.over("x", "y"), None
        dealt = self.takeover.between.routers() if self.takeover.between.deals_tokens else ()
        run_whole = self.anatomy.whole.items()
        gathered = [
            path for path, one in run_whole if one.inputs and self.mesh[one.inputs].size > 1 and path not in dealt
        ]
        try:
            rows = max((len(tensor) for tensor in self.example.values() if tensor.dim()), default=1)
            comparison.compare(whole, local, self.dealing, self.mesh.coordinates, gathered, rows)
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

    def forecast(
        self,
        ledger: Ledger,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        recompute: bool,
        staged: Callable[[nn.Module, Between], Staged] | None = None,
    ) -> None:
        """Add what this rank sends over x and y in a step, by running it dry: shapes decide, and formulas count.

        Args:
            batches: of every micro-batch (values do not matter).
            recompute: blocks are computed again in backward.
            staged: makes of a model what runs it stage by stage, and tells what those of this rank sent; None: it is
                this rank's as a whole.
        """
        real = self._stage.kind == "real"  # there a router may find other experts in other rows
        kinds = [
            (number if real else 0, *((name, tensor.shape, tensor.dtype) for name, tensor in batch.items()))
            for number, batch in enumerate(batches)
        ]
        for kind, times in Counter(kinds).items():  # micro-batches of one size send the same
            once = Ledger()
            stage = dataclasses.replace(self._stage, batch=batches[kinds.index(kind)])
            with stage.entered():
                split, model = self._dry(once)
                for path in self.anatomy.blocks if recompute else ():
                    block = model.get_submodule(path)
                    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
                split.watch_partial(dict(model.named_parameters()))
                sent = self._sent(split, model, stage, once, staged)
            for flow, traffic in sent.items():
                ledger.send(*flow, traffic.bytes * times, calls=traffic.calls * times)

    @staticmethod
    def _sent(
        split: Split,
        model: nn.Module,
        stage: Stage,
        once: Ledger,
        staged: Callable[[nn.Module, Between], Staged] | None,
    ) -> Mapping[Flow, Traffic]:
        """By a forward and a backward of one micro-batch."""

        def whole() -> tuple[Tensor, object]:
            with split.scope.around():
                return stage.loss(model, stage.inputs())

        if staged is not None:
            return staged(model, split.takeover.between)(whole, once)
        total, _ = whole()
        total.backward()
        return once.traffic()

    @property
    def example(self) -> Mapping[str, Tensor]:
        """The batch of the rehearsal."""
        return self._stage.batch

    def _dry(self, ledger: Ledger) -> tuple[Split, nn.Module]:
        """This rank's split of a twin with blocks for weights, on a mesh that moves nothing."""
        x, y, z = (self.mesh[name] for name in ("x", "y", "z"))
        here = x.index + x.size * (y.index + y.size * z.index)
        mesh = dry_mesh({"x": x.size, "y": y.size, "z": z.size}, here, ledger)
        shapes = {name: block.shape for name, block in self.assembly.blocks().items()}
        model = self._stage.twin(shapes)
        split = dataclasses.replace(self, mesh=mesh, scope=LossScope())
        split.takeover.attach(model)
        split.attach_root(model)
        return split, model

    def _cut(self, axes: Sequence[str | None], shapes: Sequence[rehearsal.Shape]) -> dict[int, tuple[str, int]]:
        """Of tensors with these axes and shapes, which are cut: by place, the axis and the number of features."""
        found = enumerate(zip(axes, shapes, strict=False))
        return {place: (axis, shape[-1]) for place, (axis, shape) in found if axis and self.mesh[axis].size > 1}

    def _taken_over(self, model: nn.Module) -> Iterator[str]:
        """Modules whose insides are not the whole model's."""
        yield from (linear.module for linear in self.anatomy.linears.values())
        yield from self.anatomy.whole
        yield from (path for path, norm in self.anatomy.norms.items() if norm.spans)
        yield from (path for path, module in model.named_modules() if isinstance(module, nn.Embedding))

    def _of_linears(self) -> frozenset[str]:
        """Weights and biases of linears."""
        linears, names = self.anatomy.linears.items(), self.dealing.names
        biases = (bias_of(self._stage.model, linear, names) for _, linear in linears)
        return frozenset([*self.anatomy.linears, *(bias for bias in biases if bias is not None)])

    # ---- taking over

    def attach_root(self, model: nn.Module) -> None:
        """Make whole what a loss gets, from the model and from modules that it calls itself."""
        if any(self.exits.values()) or self.outputs:
            for path, outputs in self.exits.items():  # all of them: marked tensors are parts to whatever they enter
                ExitExecutor(self.takeover.switch, model.get_submodule(path), self._lying(outputs), self.scope)
            RootExecutor(self.takeover.switch, model, self._lying(self.outputs), self.scope)

    def _lying(self, outputs: Mapping[int, tuple[str, int]]) -> dict[int, tuple[Axis, Share]]:
        return {place: (self.mesh[axis], self.dealing.evenly(size, axis)) for place, (axis, size) in outputs.items()}

    def install(self, model: nn.Module) -> None:
        """Take over a model whose weights are blocks by now; it has been rehearsed."""
        self.takeover.attach(model)
        self.attach_root(model)
        self.watch_partial(dict(model.named_parameters()))

    def watch_partial(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of weights that every rank of an axis, or some of them, use for features of their own."""
        for name, about in self.dealing.partial.items():
            parameter = parameters[name]
            if parameter.requires_grad:
                if isinstance(about, str):
                    axis = self.mesh.over(*about.split("+"))
                else:
                    axis = self.mesh.part(about.axis, about.copies)
                parameter.register_hook(_summing(axis))

    # ---- the logical view

    @contextmanager
    def whole(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Inside, the model is the plain one: its weights are whole and its own code runs, on every rank for itself."""
        blocks = {name: parameter.data for name, parameter in parameters.items()}
        for name, values in self.assembly.assembled(blocks).items():
            parameters[name].data = values
        self.takeover.be(split=False)
        try:
            yield
        finally:
            self.takeover.be(split=True)
            for name, values in blocks.items():
                parameters[name].data = values


def _widths(whole: rehearsal.Run, path: str) -> tuple[int, int]:
    """Features of the first floating tensor that a module is given, and of the first that it gives; 0 without one."""
    given, made = ([shape for shape in run.get(path, []) if shape] for run in (whole.given, whole.gave))
    return (given[0][-1] if given else 0), (made[0][-1] if made else 0)


def _summing(axis: Axis) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        axis.all_reduce(total, "gradient").wait()
        return total

    return hook


def rehearsed(stage: Stage, anatomy: Anatomy, mesh: Mesh, grid: Grid, tuning: Tuning | None = None) -> Split:
    """How a model is split over a grid, rehearsed; nothing of the model itself has changed.

    Raises:
        PlacementError: it does not fit the grid; names the layer, the axis and the nearest sizes that fit.
    """
    split = divide(stage.model, anatomy, mesh, grid, tuning)
    batch = split.way.example(stage.batch, grid)
    if split.by_rows:
        batch = resplit.example(batch, grid)
    split.rehearse(dataclasses.replace(stage, batch=batch))
    return split


def _refuse_problems(model: nn.Module, anatomy: Anatomy) -> None:
    if anatomy.problems:
        raise PlacementError(
            f"plan.placement.tensor: {type(model).__name__} cannot be cut over x and y: {anatomy.problems[0]}"
            f"{f' (and {len(anatomy.problems) - 1} more)' if len(anatomy.problems) > 1 else ''}; leave it out"
        )


def divide(model: nn.Module, anatomy: Anatomy, mesh: Mesh, grid: Grid, tuning: Tuning | None = None) -> Split:
    """How the model is split, by the shapes of its weights."""
    _refuse_problems(model, anatomy)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
            raise PlacementError(
                f"{path}: expected an embedding without max_norm and scale_grad_by_freq, which look at whole rows of "
                "the table or at all lookups; set them to None and False, or leave out plan.placement.tensor"
            )
    refuse_holders(model, anatomy)
    rehearsal.refuse_draws(anatomy)
    way, tuning = way_of(grid), tuning or Tuning()
    if tuning.chunks > 1 and way.untiled:
        raise PlacementError(f"plan.placement.chunks: expected 1, found {tuning.chunks}: {way.untiled}; leave it out")
    anatomy = way.seen(anatomy)
    by_rows = resplit.chosen(anatomy, grid)
    split = Split(anatomy, mesh, deal_weights(model, anatomy, grid), way, tuning, by_rows=by_rows)
    resplit.share(split.dealing, model, by_rows)
    split.takeover.between.share(split.dealing, model)
    return split
