"""Initial weights as functions of (seed, name, element): recorded once without memory, replayed slice by slice.

`deferred(build)` builds a model on meta and records what its constructor does. The stream of a random operation is
named by the parameter that it ends up in and the operation's ordinal among those that lead to it; the index in the
stream is the flat index in the logical weight. The constructor reads fan-in and fan-out from the logical shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fourfold import torch_private
from fourfold.anatomy import replay
from fourfold.anatomy.replay import InitialiserError
from fourfold.anatomy.tape import AsIfReal, Recorder, Ref, Tape, truncated_normal
from fourfold.anatomy.twin import loose_tensors, twin


@dataclass
class Recording:
    """What `deferred` learned: the tape, the final window of every name, and on which device the constructor ran."""

    tape: Tape
    windows: dict[str, Ref]
    device: str
    reason: str

    def __post_init__(self) -> None:
        self.histories = {name: replay.history(self.tape, ref.storage) for name, ref in self.windows.items()}
        self.sites: dict[int, str] = {}
        for name, indices in self.histories.items():
            drawing = [index for index in indices if replay.is_random(self.tape.entries[index])]
            for ordinal, index in enumerate(drawing):
                self.sites.setdefault(index, f"{name}:{ordinal}")


_recordings: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()


@dataclass(frozen=True)
class Initialiser:
    """How one tensor of a deferred model begins.

    Attributes:
        name: of the parameter or buffer; any name of a tied one will do.
        shape: logical shape.
        dtype: in which it is computed.
        whole: whether a slice costs the whole tensor (it is not elementwise).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: bool
    recording: Recording = field(repr=False)

    def values(self, seed: int, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Flat elements [start, stop) of the logical tensor, computed in its own dtype, then rounded to `dtype`.

        Raises:
            InitialiserError: the slice is not inside the tensor.
        """
        numel = torch.Size(self.shape).numel()
        if not 0 <= start <= stop <= numel:
            raise InitialiserError(f"{self.name}: slice [{start}, {stop}) is not inside its {numel} elements")
        recording = self.recording
        window, indices = recording.windows[self.name], recording.histories[self.name]
        if self.whole:
            whole = replay.play_whole(recording.tape, indices, recording.sites, seed, window)
            result = whole.reshape(-1)[start:stop]
        else:
            span = range(window.offset + start, window.offset + stop)
            result = replay.play_slice(recording.tape, indices, recording.sites, seed, window, span)
        return result.to(self.dtype if dtype is None else dtype)


def deferred(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build()` makes, on meta, with its initialisers recorded.

    A constructor that refuses meta (it asks for values) runs for real on CPU, once, and the result moves to meta:
    `recorded(model).device` is then "cpu", and `reason` says why. Stock transformers skip initialisation on meta,
    so they are asked for it.
    """
    try:
        model, tape = _build(build, "meta")
        device, reason = "meta", ""
    except Exception as error:  # whatever the constructor raises on tensors without values
        reason = f"{type(error).__name__}: {error}"
        model, tape = _build(build, "cpu")
        device = "cpu"
    windows = {name: tape.ref(tensor) for name, tensor in _named_tensors(model)}
    for name, window in windows.items():
        if window.storage not in tape.writers:
            raise InitialiserError(f"{name}: its initial value was made where no operation was recorded")
    recording = Recording(tape, windows, device, reason)
    tape.seal()
    if device == "cpu":
        model = twin(model, _on_meta, _on_meta)
    _recordings[model] = recording
    return model


def _build(build: Callable[[], nn.Module], device: str) -> tuple[nn.Module, Tape]:
    tape = Tape()
    pretence = AsIfReal() if device == "meta" else nullcontext()
    with torch.device(device), pretence, torch_private.truncated_normal_is(truncated_normal), Recorder(tape):
        model = build()
        if device == "meta" and any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
            model.initialize_weights()  # type: ignore[operator]
    return model, tape


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    yield from loose_tensors(model)


def recorded(model: nn.Module) -> Recording:
    """The recording of a deferred model.

    Raises:
        InitialiserError: the model was not made by `deferred`.
    """
    if model not in _recordings:
        raise InitialiserError(
            f"{type(model).__name__} has no recorded initialisers; expected a model made by deferred(build)"
        )
    return _recordings[model]


def initialiser(model: nn.Module, name: str) -> Initialiser:
    """The initialiser of the parameter or buffer `name` of a deferred model.

    Raises:
        InitialiserError: no such name, or not a deferred model.
    """
    recording = recorded(model)
    window = recording.windows.get(name)
    if window is None:
        raise InitialiserError(f"{type(model).__name__} has no parameter or buffer {name!r}")
    entries = [recording.tape.entries[index] for index in recording.histories[name]]
    whole = not (window.run and all(replay.sliceable(entry) for entry in entries))
    return Initialiser(name, window.size, window.dtype, whole, recording)


def materialize(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a deferred model on CPU with real weights and buffers from the streams of `seed`; ties stay ties."""
    names = {id(tensor): name for name, tensor in reversed(list(_named_tensors(model)))}

    def value(tensor: Tensor) -> Tensor:
        return initialiser(model, names[id(tensor)]).values(seed, 0, tensor.numel()).view(tensor.shape)

    return twin(model, value, value)
