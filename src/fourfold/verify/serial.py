"""The serial reference: one plain process, plain PyTorch, nothing of fourfold but its random streams.

The whole batch in one forward, one backward, gradients divided by the count, torch's own clipping, torch's optimizer
parameter by parameter. No arena, no collective, no schedule: what a parallel run is held against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy.blocks import Calls
from fourfold.randomness import Layout, Position, at, inside
from fourfold.training.optimizer import OptimizerOptions, build_plain

Loss = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Types:
    """Element types: of the weights that the optimizer updates, as they rest in the model, and as it computes."""

    master: torch.dtype
    rest: torch.dtype
    compute: torch.dtype


@dataclass(frozen=True)
class SerialStep:
    """One step of the reference.

    Attributes:
        loss: the mean loss.
        count: what the sum was divided by.
        gradient_norm: before clipping; None without clipping.
        gradients: by parameter name, divided and clipped.
        magnitudes: by name, the sum over parts of the rows of each part's gradient without its sign, divided like the
            gradients: what a rounding of the parts' gradients is relative to.
    """

    loss: float
    count: int
    gradient_norm: float | None
    gradients: dict[str, Tensor]
    magnitudes: dict[str, Tensor]


class Serial:
    """A plain model in training."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        options: OptimizerOptions,
        *,
        seed: int,
        types: Types,
        blocks: Iterable[str] = (),
        layouts: Mapping[str, Layout] | None = None,
    ) -> None:
        """Take a model over. After the first step, `narrow` says where it computes in a narrower type than its own.

        Args:
            model: plain, with its initial weights.
            loss: `loss(model, batch) -> (sum, count)`.
            options: of the optimizer.
            seed: of the random streams.
            types: of the elements.
            blocks: paths of the blocks, which name the places where dropout draws.
            layouts: where rows lie in the tensors of those places, if not whole and in dim 0.
        """
        self.loss, self.seed, self.types = loss, seed, types
        self.layouts = layouts or {}
        self.masters = {
            name: nn.Parameter(value.detach().to(types.master), requires_grad=value.requires_grad)
            for name, value in model.named_parameters()
        }
        self.model = model.to(types.compute).train()
        self.optimizer = build_plain(options, self._trained())
        self.narrow: str | None = None
        for path in blocks:
            _name_sites(self.model.get_submodule(path), path)
        self._rest()

    def step(self, number: int, batch: Mapping[str, Tensor], parts: int = 1, divisor: float = 1.0) -> SerialStep:
        """Take optimizer step `number` on the whole batch.

        Args:
            number: of the step.
            batch: all rows.
            parts: pieces that the rows are cut in, one after the other.
            divisor: losses are divided by it before backward, gradients by the rest of the count afterwards.
        """
        rows = len(next(iter(batch.values())))
        total, count = 0.0, 0.0
        gradients = {name: torch.zeros_like(master.data) for name, master in self._trained()}
        magnitudes = {name: torch.zeros_like(master.data) for name, master in self._trained()}
        for part in torch.arange(rows).tensor_split(min(parts, rows)):
            chosen = {name: tensor[int(part[0]) : int(part[-1]) + 1] for name, tensor in batch.items()}
            value, counted = self._forward(Position(self.seed, number, int(part[0]), len(part)), chosen)
            value.backward(torch.full_like(value, 1 / divisor))
            total, count = total + float(value.detach()), count + float(counted)
            for name, gradient in self._taken_gradients():
                gradients[name] += gradient
                magnitudes[name] += gradient.abs()
        for values in (*gradients.values(), *magnitudes.values()):
            values /= count / divisor
        norm = self._update(number, gradients)
        return SerialStep(total / count, int(count), norm, gradients, magnitudes)

    def weights(self) -> dict[str, Tensor]:
        """Master weights by name; a tied weight comes once."""
        return {name: master.detach() for name, master in self.masters.items()}

    def _forward(self, position: Position, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        with at(position._replace(layouts=self.layouts)), inside(self.model, ""):
            if self.narrow is not None:
                return self.loss(self.model, batch)
            with Calls().watching(self.model) as calls, _Narrow(calls, self.types.compute) as narrow:
                result = self.loss(self.model, batch)
        self.narrow = narrow.where
        return result

    def _taken_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield name, parameter.grad.to(self.types.master)
                parameter.grad = None

    def _update(self, number: int, gradients: dict[str, Tensor]) -> float | None:
        """Clip, step, and give the model its new weights. Clips `gradients` in place."""
        for name, master in self._trained():
            master.grad = gradients[name]
        options = self.optimizer.options
        norm = None
        if options.clip is not None:
            trained = [master for _, master in self._trained()]
            norm = float(nn.utils.clip_grad_norm_(trained, options.clip, options.clip_norm))
        self.optimizer.step(self.optimizer.rate(number))
        self._rest()
        return norm

    def _rest(self) -> None:
        """The model's weights are the masters, rounded to the type in which weights rest."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name].to(self.types.rest))

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, master) for name, master in self.masters.items() if master.requires_grad]


class _Narrow(TorchFunctionMode):
    """Looks for a module that computes in a narrower type than it is given: where the first one is, or ""."""

    def __init__(self, calls: Calls, dtype: torch.dtype) -> None:
        super().__init__()
        self.calls, self.dtype, self.where = calls, dtype, ""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = args[0] if args else None
        if not self.where and isinstance(given, Tensor) and isinstance(result, Tensor) and given.dtype == self.dtype:
            if result.is_floating_point() and result.itemsize < given.itemsize:
                self.where = self.calls.inside or "the model"
        return result


def _name_sites(block: nn.Module, path: str) -> None:
    """Dropout inside the block draws from streams that are named after its path."""
    plain = block.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with inside(block, path):
            return plain(*args, **kwargs)

    block.forward = forward
