"""Mixture-of-experts layers whose experts' weights are 3-D parameters.

Every rank computes all experts for its own inner features. What experts read is summed in backward once, and what they
write is summed in forward once, or dealt out again: the module adds its experts up, and a sum of sums is a sum. How a
module multiplies is its own choice: expert by expert, with a weight for each token, in groups of tokens.

With T tokens, k experts for each, I columns of the first layers and J rows of the second ones (I = 2J where a gate and
what it scales lie in one), e bytes a number, one rank sends, beside what `Exchange` sends:

| what                                       | over | bytes                            |
|---|---|---|
| the sum of first products                  | x    | 2 (x − 1)/x · e · T k I/y        |
| the sum of second products' input gradient | x    | 2 (x − 1)/x · e · T k J/y        |
| the sum of the scales' gradient            | x, y | 2 (n − 1)/n · e · T k each       |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy import Anatomy
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.executor import Executor, Switch
from fourfold.placement.tensor.partials import Partials
from fourfold.torch_private import leaves, map_leaves
from fourfold.wire import Axis, ops

PRODUCTS = frozenset("__matmul__ _grouped_mm bmm einsum grouped_mm grouped_mm_fallback linear matmul mm".split())
"""Functions that sum over the input features of a weight among their arguments, and add nothing but `linear`'s bias."""

GROUPED = frozenset(("_grouped_mm", "grouped_mm"))
ALIGNMENT = 16
"""Bytes of which rows of their operands are multiples."""

VIEWS = frozenset(
    "__get__ __getitem__ bfloat16 contiguous double float half index_select mT movedim permute select squeeze t to "
    "transpose type type_as unsqueeze".split()
)
"""Functions that give weights of some experts, or the same in another order or type."""


class Layer(Enum):
    """Of an expert."""

    FIRST = 1
    """It reads the features of a token."""

    SECOND = 2
    """It writes them."""


class Exchange(NamedTuple):
    """How tokens reach the experts, and what these make leaves them.

    Attributes:
        enter: this rank's tokens → all that it computes; in backward their gradients are summed over the inner axis.
        leave: this rank's parts of a sum over the inner axis → what it goes on with.
    """

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]


class Experts(NamedTuple):
    """What the parameters of a module with experts are.

    Attributes:
        weights: attribute of a 3-D parameter → the layer of all experts that it is.
        late: attributes of what is added to the second layers' products: every rank of the inner axis has it.
        outer: axis that the features of tokens lie over.
        inner: axis that the features between the layers lie over.
        features: that a token has here when it has entered.
    """

    weights: Mapping[str, Layer]
    late: tuple[str, ...]
    outer: Axis
    inner: Axis
    features: int


class ExpertsExecutor(Executor):
    """A module that computes experts by its 3-D parameters."""

    def __init__(self, switch: Switch, module: nn.Module, path: str, experts: Experts, exchange: Exchange) -> None:
        super().__init__(switch, module)
        self.path, self.experts, self.exchange = path, experts, exchange

    def on_blocks(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens [tokens, features here], and what is whole: choices, and weights that scale what the experts make.

        Raises:
            PlacementError: the module computes its experts in a way that cannot be cut.
        """
        tokens: list[Tensor] = []

        def entered(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if not tokens:
                tokens.append(self.exchange.enter(value))
                return tokens[0]
            return ops.identity_sum(ops.identity_sum(value, self.experts.inner), self.experts.outer)

        args, kwargs = map_leaves(entered, (args, kwargs))
        if not tokens or tokens[0].shape[-1] != self.experts.features:
            raise self.refused(
                f"expected tokens of {self.experts.features} features here as what it is given first, found "
                f"{list(tokens[0].shape) if tokens else 'no numbers'}"
            )
        with _Products(self) as products:
            found = self.inner(*args, **kwargs)
        if tokens[0].numel() and not products.finished(found):
            raise self.refused(
                "does not give the sum of its second layers' products, or multiplies by functions that are not "
                "torch's; expected experts_implementation 'grouped_mm' (the default), 'batched_mm' or 'eager'"
            )
        return self.exchange.leave(found)

    def refused(self, why: str) -> PlacementError:
        """The error that says so."""
        return PlacementError(f"{self.path}: {why}; leave out plan.placement.tensor")


class _Products(TorchFunctionMode):
    """Products with first layers' weights are summed; those with second layers' are parts of a sum.

    Attributes:
        weights: id of a parameter, or of a view of one → itself and its layer. Kept, so that the id stays its own.
        late: id of a parameter that second layers add → what one rank adds of it: all, and the others nothing.
    """

    def __init__(self, executor: ExpertsExecutor) -> None:
        super().__init__()
        self.executor, self.experts, self.partials = executor, executor.experts, Partials()
        named = dict(executor.module.named_parameters(recurse=False))
        self.weights: dict[int, tuple[Tensor, Layer]] = {
            id(named[name]): (named[name], layer) for name, layer in self.experts.weights.items()
        }
        once = {name: _once(named[name], self.experts.inner) for name in self.experts.late}
        self.late = {id(named[name]): self.partials.mark(part) for name, part in once.items()}
        self.read = False

    def finished(self, found: Any) -> bool:
        """Whether a first layer's weights were multiplied, and what the module gives is a sum of parts."""
        return self.read and (self.experts.inner.size == 1 or self.partials.is_part(found))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", str(func))
        kwargs = kwargs or {}
        if self.late:
            args, kwargs = map_leaves(lambda leaf: self.late.get(id(leaf), leaf), (args, kwargs))
        assert kwargs is not None
        layer = next((self.weights[id(leaf)][1] for leaf in leaves((args, kwargs)) if id(leaf) in self.weights), None)
        if layer is not None and name in PRODUCTS:
            return self._product(layer, func, args, kwargs)
        if self.experts.inner.size > 1 and not self.partials.allows(name, args, kwargs):
            raise self.executor.refused(
                f"calls {name} on what its experts make, which is a part of a sum until all are added up: expected "
                "nothing but sums and scalings by then"
            )
        result = func(*args, **kwargs)
        self.partials.note(name, args, kwargs, result)
        made = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        if layer is not None and made:
            if name not in VIEWS:
                raise self.executor.refused(
                    f"calls {name} on the weights of its experts; expected products ({', '.join(sorted(PRODUCTS))})"
                )
            self.weights |= {id(one): (one, layer) for one in made}
        return result

    def _product(self, layer: Layer, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        outer = self.experts.outer
        if layer is Layer.FIRST:
            self.read, bias = True, None
            if func.__name__ in GROUPED:
                return ops.sum_identity(_grouped(func, *args, **kwargs), outer)
            if func is F.linear:
                bias = kwargs.pop("bias", None) if len(args) < 3 else args[2]
                args = args[:2]
            found = ops.sum_identity(func(*args, **kwargs), outer)
            return found if bias is None else found + bias

        def summed(value: Any) -> Any:
            is_input = isinstance(value, Tensor) and value.is_floating_point() and id(value) not in self.weights
            return ops.identity_sum(value, outer) if is_input and not self.partials.is_part(value) else value

        args, kwargs = map_leaves(summed, (args, kwargs))
        made = _grouped(func, *args, **kwargs) if func.__name__ in GROUPED else func(*args, **kwargs)
        return self.partials.mark(made)


def described(path: str, module: nn.Module, anatomy: Anatomy, outer: Axis, inner: Axis, features: int) -> Experts:
    """What the parameters of a module with experts are, by the anatomy.

    Args:
        path: of the module.
        outer, inner: axes of the input and the output features of its first layers.
        features: input features of first layers that are here.

    Raises:
        PlacementError: it has a parameter that is neither multiplied nor added; names it.
    """
    linears = {name: linear for name, linear in anatomy.linears.items() if linear.module == path}
    first = next(iter(linears.values()))
    weights, late = {}, []
    for name, parameter in module.named_parameters(recurse=False):
        linear, raw = linears.get(f"{path}.{name}"), anatomy.raw.get(f"{path}.{name}")
        if linear is not None:
            weights[name] = Layer.FIRST if linear.contract == first.contract else Layer.SECOND
        elif raw is None:
            raise PlacementError(
                f"{path}.{name}: expected experts with matrices and biases and nothing else, found "
                f"{list(parameter.shape)} that is neither multiplied with nor added to anything; leave out "
                "plan.placement.tensor"
            )
        elif raw.axis != first.output:
            late.append(name)
    return Experts(weights, tuple(late), outer, inner, features)


def _grouped(func: Callable, x: Tensor, weight: Tensor, **settings: Any) -> Tensor:
    """A grouped product whose kernel wants rows of whole `ALIGNMENT`s: a part of the features need not be such.

    Args:
        func: `grouped_mm`.
        x: [tokens, in].
        weight: [experts, in, out].
        settings: `offs`.
    """
    unit, (into, out) = ALIGNMENT // x.element_size(), weight.shape[-2:]
    if into % unit == out % unit == 0:
        return func(x, weight, **settings)
    wide = F.pad(weight, (0, -out % unit, 0, -into % unit))
    return func(F.pad(x, (0, -into % unit)), wide, **settings)[:, :out]


def _once(bias: Tensor, axis: Axis) -> Tensor:
    """What the ranks of an axis add of it, one all and the others nothing, with its whole gradient on each of them."""
    return bias if axis.index == 0 else bias - bias.detach()
