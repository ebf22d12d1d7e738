"""Linear modules on blocks: siblings, which read the same tensor, are computed by whichever is called first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.product import product
from fourfold.placement.tensor.tuning import Tuning
from fourfold.placement.uncopied import Uncopied
from fourfold.wire import Axis, ops


class Siblings(Uncopied):
    """Linears that are given the very same tensor: one product and one message for all, in both directions.

    Attributes:
        modules: each has `weight`, and `bias` or none.
        contract, output: the axes over which their input and their output features lie.
        layout: of the weights: "out,in" or "in,out".
        tuning: how their products run.
        shared: every rank of it goes on with other features, which these outputs scale: their gradients are sums over
            it, too.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        contract: Axis,
        output: Axis,
        layout: str,
        *,
        tuning: Tuning,
        shared: Axis | None = None,
    ) -> None:
        self.modules, self.contract, self.output, self.layout = modules, contract, output, layout
        self.tuning, self.shared = tuning, shared
        self._read: Tensor | None = None
        self._outputs: list[Tensor | None] = []

    def outputs(self, number: int, x: Tensor) -> Tensor:
        """What linear `number` makes of x; the others' outputs are kept until they are asked for."""
        if x is not self._read or self._outputs[number] is None:
            self._read, self._outputs = x, list(self.compute(x))
        found, self._outputs[number] = self._outputs[number], None
        assert found is not None
        if all(output is None for output in self._outputs):
            self._read = None
        return found

    def compute(self, x: Tensor) -> tuple[Tensor, ...]:
        """All outputs [..., output features here] of x [..., input features here]."""
        found = self.product(x, self.biases)
        return found if self.shared is None else tuple(ops.identity_sum(one, self.shared) for one in found)

    def product(self, x: Tensor, biases: Sequence[Tensor | None], **settings: Any) -> tuple[Tensor, ...]:
        """`product` of the weights as they are now."""
        weights: list[Any] = [module.weight for module in self.modules]
        settings = {"contract": self.contract, "output": self.output, "layout": self.layout, **settings}
        return product(x, weights, biases, **settings, **self.tuning.settings)

    @property
    def biases(self) -> list[Tensor | None]:
        """As they are now."""
        return [getattr(module, "bias", None) for module in self.modules]


class LinearExecutor(Executor):
    """One of some siblings."""

    def __init__(self, switch: Switch, module: nn.Module, siblings: Siblings, number: int) -> None:
        super().__init__(switch, module)
        self.siblings, self.number = siblings, number

    def on_blocks(self, x: Tensor) -> Tensor:
        """[..., input features here] → [..., output features here]."""
        return self.siblings.outputs(self.number, x)


class ConvolutionExecutor(Executor):
    """A convolution whose channels are cut: out of whole channels, or from one axis to the other."""

    def __init__(self, switch: Switch, module: nn.Module, contract: Axis, output: Axis) -> None:
        super().__init__(switch, module)
        self.contract, self.output = contract, output

    def on_blocks(self, x: Tensor) -> Tensor:
        """[rows, channels here, …] → [rows, channels here, …]; the bias is added once, after the sum."""
        module: Any = self.module
        x = ops.identity_sum(x, self.output)
        if self.contract.size == 1:
            return self.inner(x)
        partial = ops.sum_identity(module._conv_forward(x, module.weight, None), self.contract)
        return partial if module.bias is None else partial + module.bias.view(-1, *(1,) * (x.dim() - 2))
