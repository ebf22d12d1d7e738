"""One forward and backward of a model, recorded without memory and without a device.

The model runs on fake CPU tensors (shapes without values) in a subprocess. A model that decides by values cannot run
so; then it is really built and run, on two and on three rows, with no more than three of equal blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fourfold import randomness, torch_private
from fourfold.anatomy import Anatomy, AnatomyError, survey
from fourfold.anatomy.nest import tensors
from fourfold.anatomy.stock import OneSequenceARow
from fourfold.placement.membership import members
from fourfold.placement.refusals import PlacementError
from fourfold.placement.selective import recompute_attention
from fourfold.placement.tensor.between import way_of
from fourfold.placement.tensor.rehearsal import Stage
from fourfold.placement.tensor.split import Split, divide, rehearsed
from fourfold.placement.tensor.tuning import Tuning
from fourfold.plan.grid import Grid
from fourfold.planner import blocks
from fourfold.planner.recorder import AFTER, BACKWARD, BEFORE, DONE, FORWARD, Recorder
from fourfold.planner.subject import Subject
from fourfold.planner.tap import tapped
from fourfold.wire.dry import dry_mesh

REAL_LIMIT = 4 * 1024**3
"""Bytes of weights beyond which a model is not really built in order to be traced."""


class TraceError(ValueError):
    """The model cannot be run, not even for a forecast."""


class UnrunnableError(TraceError):
    """The model does not run on its own batch: neither would a run of it, under any plan."""


@dataclass(frozen=True)
class Settings:
    """How the model is run.

    Attributes:
        rows: of the batch.
        dtype: of weights and floating inputs.
        recompute: "none", "selective" or "full", as in a plan.
        streams: dropout draws fourfold's masks (one byte an element), as in a placed model; else torch's own.
        real: with values and kernels.
        short: with no more than three of equal blocks.
        grid: over which features are cut, with the axes that a forward knows (`Between.inside`); the first rank's part
            is run. None: the whole model.
        chunks: that products of a grid are cut into, as in a plan.
        layers: paths of a pipeline's layers: those that are no blocks are told apart, too. Empty: they are not.
    """

    rows: int
    dtype: str = "float32"
    recompute: str = "none"
    streams: bool = True
    real: bool = False
    short: bool = True
    grid: Grid | None = None
    chunks: int = 1
    layers: tuple[str, ...] = ()


def outline(
    subject: Subject, *, bucket: int = 0, apart: bool = True, itemsize: int = 1, still: Set[str] = frozenset()
) -> dict[str, Any]:
    """What the subject's model is, from one forward without values, as plain JSON.

    Args:
        bucket, apart, itemsize, still: how weights are sorted into units, see `placement.membership.members`.

    Returns:
        Or {"unrunnable": why}: the model does not run.
    """
    model = built(subject, real=False)
    try:
        anatomy = survey(model, subject.loss, subject.batch)
    except AnatomyError as error:
        return {"unrunnable": str(error)}
    about: dict[str, Any] = {"bucket": bucket, "apart": apart, "itemsize": itemsize, "still": still}
    units = members(model, anatomy, lambda name, weight: "weights", **about)
    return {
        "anatomy": dataclasses.asdict(anatomy),
        "units": [
            [unit.name, list(unit.blocks), [list(weight) for weight in unit.weights], unit.outer, unit.still]
            for unit in units
        ],
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "inputs": _inputs(subject, model, anatomy.blocks),
    }


def _inputs(subject: Subject, model: nn.Module, paths: Sequence[str]) -> dict[str, str]:
    """Shapes of what every block is called with: equal blocks that work on different sizes do not cost the same.

    Empty where the model needs values to run; then equal blocks are taken at their word.
    """
    found: dict[str, str] = {}

    def note(path: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        found[path] = str([tuple(tensor.shape) for tensor in tensors((args, kwargs))])

    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(partial(note, path), with_kwargs=True)
    settings = Settings(rows=2)
    try:
        with _without_values(), torch.no_grad():
            _replace_tensors(model, torch.float32, real=False)
            subject.loss(
                model, {name: _rows(tensor, settings, torch.float32) for name, tensor in subject.batch.items()}
            )
    except Exception:  # any operator may refuse fake tensors, each in its own way
        return {}
    return found


def record(subject: Subject, anatomy: Anatomy, inputs: Mapping[str, str], settings: Settings) -> dict[str, Any]:
    """Run the model and return the tape as plain JSON (`tape.Tape` reads it). To be called in a process of its own.

    A model that cannot be cut as `settings.grid` asks gives {"refused": why}.

    Raises:
        TraceError: the model is too large to be really built.
    """
    dtype = getattr(torch, settings.dtype)
    model = built(subject, settings.real).train()
    weights = [[name, list(weight.shape), weight.requires_grad] for name, weight in model.named_parameters()]
    buffers = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    # Who reads a block's weights outside of it (a penalty) would not find those of the blocks left out.
    alike = settings.grid is None or not way_of(settings.grid).deals_tokens
    short = settings.short and alike and not anatomy.read_outside
    images = blocks.shorten(model, anatomy.blocks, inputs) if short else blocks.all_of(anatomy.blocks)
    images += [blocks.Image(path, (path,)) for path in settings.layers if path not in anatomy.blocks]
    recorder = Recorder()
    recorder.uses = bool(settings.layers)
    split = None
    if settings.grid is not None:
        try:
            split = _split(subject, model, settings.grid, settings, recorder)
        except PlacementError as error:
            return {"refused": str(error)}
        recorder.forget()
    with nullcontext() if settings.real else _without_values():
        _replace_tensors(model, dtype, real=settings.real, split=split)
        if split is not None:
            split.install(model)
        batch = {name: _rows(tensor, settings, dtype) for name, tensor in subject.batch.items()}
        position = randomness.Position(0, 0, 0, settings.rows, anatomy.layouts) if settings.streams else None
        if position is not None and split is not None:
            position = position._replace(cuts=split.dropped, windows=split.windows)
        outer = frozenset(settings.layers).difference(anatomy.blocks)
        places = _Places(recorder, settings, len(images), position, outer)
        for image in images:
            places.watch(image, model.get_submodule(image.path))
        _run(subject, model, batch, recorder, position, split)
        still = frozenset() if split is None else split.assembly.still
        gradients = _gradients(model, recorder, anatomy, images, still)
    return {
        "rows": settings.rows,
        "segments": recorder.segments,
        "storages": recorder.storages,
        "operators": recorder.operators,
        "messages": recorder.messages,
        "images": [list(image.stands_for) for image in places.order],
        "looks": [places.looks[image] for image in places.order],
        "extents": 0 if split is None else len(split.takeover.between.extents()),
        "gradients": gradients,
        "weights": weights,
        "buffer_bytes": buffers,
        "batch_bytes": sum(tensor.numel() * tensor.itemsize for tensor in batch.values()),
    }


def local_shapes(subject: Subject, anatomy: Anatomy, grid: Grid) -> dict[str, Any]:
    """What the first rank of a grid holds of every weight. To be called in a process of its own.

    Returns:
        As plain JSON {"shapes": {name: shape}, "still": names of the weights that it alone holds the rows of}, or
        {"refused": why}.
    """
    model = built(subject, real=False)
    if grid.by_rows:
        anatomy = survey(model, subject.loss, subject.batch, whole=grid.by_rows)
    try:
        split = divide(model, anatomy, dry_mesh(_axes(grid)), grid)
    except PlacementError as error:
        return {"refused": str(error)}
    shapes = {name: list(block.shape) for name, block in split.assembly.blocks().items()}
    return {"shapes": shapes, "still": sorted(split.assembly.still)}


def _split(subject: Subject, model: nn.Module, grid: Grid, settings: Settings, recorder: Recorder) -> Split:
    """How the model (with fewer blocks, maybe: it is surveyed anew) is split; the recorder hears what it sends.

    Raises:
        PlacementError: it cannot be.
    """
    anatomy = survey(model, subject.loss, subject.batch, whole=grid.by_rows)
    dtype = getattr(torch, settings.dtype)
    real = dataclasses.replace(settings, real=True)
    batch = {name: _rows(tensor, real, dtype) for name, tensor in subject.batch.items()}  # rows may be cut, too
    stage = Stage.of(model, subject.loss, batch, anatomy.traced, dtype)
    return rehearsed(stage, anatomy, tapped(_axes(grid), recorder), grid, Tuning(chunks=settings.chunks))


def _axes(grid: Grid) -> dict[str, int]:
    return {"x": grid.x, "y": grid.y, "z": grid.z}


class _Unset(TorchFunctionMode):
    """Initialisers do nothing: shapes are all that is wanted (on meta, torch imports its compiler to draw numbers)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("normal_", "uniform_", "trunc_normal_", "erfinv_", "bernoulli_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return function(*args, **(kwargs or {}))


@contextmanager
def _without_values() -> Iterator[None]:
    with torch_private.fake_tensors(), OneSequenceARow():
        yield


def built(subject: Subject, real: bool) -> nn.Module:
    """The model on meta, or `real`.

    Raises:
        TraceError: it is too large to be really built.
    """
    with torch.device("meta"), _Unset():
        model = subject.build()
    if not real:
        return model
    nbytes = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    if nbytes > REAL_LIMIT:
        raise TraceError(f"the model cannot run without values, and its {nbytes / 2**30:.1f} GiB are too many to build")
    return subject.build()


def _replace_tensors(model: nn.Module, dtype: torch.dtype, *, real: bool, split: Split | None = None) -> None:
    """Give every module weights (and buffers) on the CPU: fake ones, or real ones in the dtype. Ties stay tied.

    Args:
        split: weights are the first rank's blocks.
    """
    held = {} if split is None else split.assembly.blocks()
    names = {id(weight): name for name, weight in model.named_parameters()}
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in made:
                kind = dtype if weight.is_floating_point() else weight.dtype
                block = held.get(names[id(weight)])
                if real:
                    value = (weight.detach() if block is None else block.take(weight.detach()).clone()).to(kind)
                else:
                    value = torch.empty(weight.shape if block is None else block.shape, dtype=kind, device="cpu")
                made[id(weight)] = nn.Parameter(value, requires_grad=weight.requires_grad)
            module._parameters[name] = made[id(weight)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and not real:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def _rows(example: Tensor, settings: Settings, dtype: torch.dtype) -> Tensor:
    """The example with as many rows as are asked for."""
    shape = (settings.rows, *example.shape[1:])
    kind = dtype if example.is_floating_point() else example.dtype
    if not settings.real:
        return torch.zeros(shape, dtype=kind, device="cpu")
    if example.is_meta:
        return torch.ones(shape, dtype=kind)
    repeats = -(-settings.rows // example.shape[0])
    return torch.cat([example.detach().cpu()] * repeats)[: settings.rows].to(kind)


def _run(
    subject: Subject,
    model: nn.Module,
    batch: dict[str, Tensor],
    recorder: Recorder,
    position: randomness.Position | None,
    split: Split | None,
) -> None:
    """Forward and backward under the recorder."""
    for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
        recorder.know(tensor)
    with recorder, randomness.at(position):
        with nullcontext() if split is None else split.scope.around():
            total, _ = subject.loss(model, batch)
        recorder.phase, recorder.place = BACKWARD, AFTER
        total.backward()
        recorder.phase = DONE


def _gradients(
    model: nn.Module, recorder: Recorder, anatomy: Anatomy, images: list[blocks.Image], still: Set[str]
) -> list[list[Any]]:
    """The storages of the gradients, each with where its weight belongs: "still", "block", "before" or "after"."""
    late = set(anatomy.after)
    found: dict[int, str] = {}
    for name, weight in model.named_parameters():
        number = recorder.number(weight.grad) if weight.grad is not None else None
        if number is not None:
            inside = any(name.startswith(f"{image.path}.") for image in images)
            home = "block" if inside else "after" if name in late else "before"
            found[number] = "still" if name in still else home
    return [list(entry) for entry in sorted(found.items())]


class _Places:
    """Tells the recorder in which block the model computes, forward and backward."""

    def __init__(
        self,
        recorder: Recorder,
        settings: Settings,
        count: int,
        position: randomness.Position | None,
        outer: Set[str] = frozenset(),
    ):
        """`outer`: paths that are no blocks."""
        self.outer = outer
        self.looks: dict[blocks.Image, list[Any]] = {}
        self.recorder, self.settings, self.count, self.position = recorder, settings, count, position
        self.order: list[blocks.Image] = []

    def watch(self, image: blocks.Image, block: nn.Module) -> None:
        """Take over the block's forward."""
        block.forward = partial(self._forward, image, block, block.forward)

    def _forward(
        self, image: blocks.Image, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if image not in self.order:
            self.order.append(image)
        place = self.order.index(image)
        for tensor in tensors((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._enter, BACKWARD, place - 1 if place else BEFORE))
        self._enter(FORWARD, place)
        compute = partial(self._compute, image, block, inner)
        if image.path in self.outer:
            result = inner(*args, **kwargs)
        elif self.settings.recompute == "full":
            result = checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        else:
            result = compute(*args, **kwargs)
        self.looks[image] = [[list(one.shape), one.itemsize, one.requires_grad] for one in tensors(result)]
        for tensor in tensors(result):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._enter, BACKWARD, place))
        if len(self.order) == self.count:
            self._enter(FORWARD, AFTER)
        return result

    def _compute(
        self, image: blocks.Image, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As `placement.block` does: the random streams and selective recomputation inside, so that both repeat."""
        with ExitStack() as stack:
            if self.position is not None:
                stack.enter_context(randomness.at(self.position))
                stack.enter_context(randomness.inside(block, image.path))
            if self.settings.recompute == "selective":
                stack.enter_context(recompute_attention())
            return inner(*args, **kwargs)

    def _enter(self, phase: str, place: int, gradient: Tensor | None = None) -> None:
        if phase == BACKWARD and place > self.recorder.place:
            return  # the gradient of something that many blocks read: backward is further on already
        if phase == FORWARD and self.recorder.phase == BACKWARD:
            return  # computed again in backward
        self.recorder.phase, self.recorder.place = phase, place
