"""The repeated blocks of a model, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn


class Call(NamedTuple):
    """One call of the module at `path`, between two ticks of a clock that counts entries and exits of modules."""

    path: str
    start: int
    stop: int


class Calls:
    """Records every module's `forward` by hooks."""

    def __init__(self) -> None:
        self.clock = 0
        self.done: list[Call] = []
        self._open: list[tuple[str, int]] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[Calls]:
        """Hook all modules of `model` for the time of the context."""
        hooks = []
        for path, module in model.named_modules():
            # Right around `forward`: what the model's own hooks do is outside of the module, as it is when placed.
            hooks.append(module.register_forward_pre_hook(lambda *_, path=path: self._enter(path)))
            hooks.append(module.register_forward_hook(lambda *_: self._leave(), prepend=True))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def inside(self) -> str:
        """Path of the innermost module that is running; "" outside of all."""
        return self._open[-1][0] if self._open else ""

    @property
    def running(self) -> bool:
        """Some module is running, be it the whole model."""
        return bool(self._open)

    def _enter(self, path: str) -> None:
        self.clock += 1
        self._open.append((path, self.clock))

    def _leave(self) -> None:
        self.clock += 1
        path, start = self._open.pop()
        self.done.append(Call(path, start, self.clock))


def blocks(model: nn.Module, calls: list[Call]) -> tuple[Call, ...]:
    """The calls of the repeated blocks, in execution order; () if the model has none.

    A container (ModuleList, Sequential) holds blocks when at least two of its children have parameters, all these
    are of one class, and each runs at most once, one after the other. Of nested containers the outermost counts;
    several side by side (an encoder's and a decoder's) are joined. A container of bare layers (an MLP's linears) counts
    only if no container of composite blocks exists.
    """
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.path, []).append(call)
    found: dict[str, list[Call]] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(_within(path, outer) for outer in found):
            run = _repeated(path, module, by_path)
            if run:
                found[path] = run
    composite = {path: run for path, run in found.items() if _has_children(model.get_submodule(run[0].path))}
    runs = (composite or found).values()
    return tuple(sorted((call for run in runs for call in run), key=lambda call: call.start))


def _repeated(path: str, container: nn.Module, by_path: dict[str, list[Call]]) -> list[Call]:
    children = [(name, child) for name, child in container.named_children() if any(True for _ in child.parameters())]
    if len({type(child) for _, child in children}) != 1:
        return []
    runs = [by_path.get(f"{path}.{name}" if path else name, []) for name, _ in children]
    if any(len(run) > 1 for run in runs):
        return []
    once = sorted((call for run in runs for call in run), key=lambda call: call.start)
    apart = all(first.stop < second.start for first, second in zip(once, once[1:], strict=False))
    return once if len(once) >= 2 and apart else []


def _within(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.") or outer == ""


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())
