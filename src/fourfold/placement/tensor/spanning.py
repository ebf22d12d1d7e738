"""Code whose last dim of features lies over an axis: every function that is given them is exact here, or is refused.

Which tensors hold this rank's features, and in which dim, is followed from what a module is given to what it gives.
A function is one of these: it does the same to every entry; it arranges entries, and the features stay in one dim; it
reduces features, and is taken over the axis; it needs them all, and gets them gathered. Any other is refused by its
name, dry as well as in a step. What code asks of their sizes, it is told of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.probe import HARMLESS
from fourfold.torch_private import leaves, map_leaves
from fourfold.wire import Axis, ops

ENTRYWISE = (
    HARMLESS
    - frozenset("baddbmm bmm cross_entropy embedding linear matmul scaled_dot_product_attention softmax".split())
) | frozenset(
    "__iadd__ __imul__ __isub__ __itruediv__ __abs__ acos asin asinh atan atan2 bool ceil celu clamp_max clamp_min "
    "cosh cpu cuda empty_like expand_as expm1 fill_ float_power floor fmod full_like hardsigmoid hardtanh int "
    "isfinite isinf isnan lerp log10 log1p log2 logaddexp logit logsigmoid long maximum minimum nan_to_num "
    "negative ones_like positive remainder round selu sgn sigmoid_ sign silu_ sinh softsign special_expit "
    "tan tanhshrink threshold trunc xlogy zeros_like addcdiv addcmul hardshrink softshrink relu6".split()
)
ARRANGING = frozenset("contiguous movedim permute squeeze swapaxes t transpose unsqueeze __getitem__".split())
RESHAPING = frozenset("flatten reshape unflatten view".split())
GATHERED = frozenset(
    "amax amin cummax cummin cumprod cumsum log_softmax logcumsumexp logsumexp max median min softmax softmin sort std "
    "std_mean topk".split()
)
"""Functions of one tensor that need all features of it, and take a dim."""

LAST = frozenset("sort topk".split())
"""Those of them whose dim is the last one if they are given none."""

TELLING = frozenset("dim element_size get_device is_complex is_contiguous is_floating_point ndimension".split())


@dataclass(frozen=True)
class Place:
    """Where a tensor has the features: in which dim, in whole groups of how many."""

    dim: int
    group: int = 1


@dataclass(frozen=True)
class Spread:
    """Features over an axis.

    Attributes:
        path: of the module, for messages.
        sizes: how many features every rank has.
        ordered: every rank has one run of them, in the order of ranks.
    """

    path: str
    axis: Axis
    sizes: tuple[int, ...]
    ordered: bool = True

    @property
    def size(self) -> int:
        """Of all ranks."""
        return sum(self.sizes)

    @property
    def here(self) -> int:
        """Of this rank."""
        return self.sizes[self.axis.index]

    def refuse(self, what: str) -> NoReturn:
        """Raises: PlacementError: a function of these features that is not known to be right on a part of them."""
        raise PlacementError(
            f"{self.path}: {what} across features that are cut over {self.axis.name}; expected torch's layer or RMS "
            "norm, or functions of single entries, and sums, means, variances, norms and maxima over the last dim. "
            f"Leave out plan.placement.tensor.{self.axis.name}"
        )


class Followed:
    """Which tensors hold features that lie over an axis. Tensors are not kept alive."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self._places: Any = WeakIdKeyDictionary()

    def mark(self, tensor: Tensor, place: Place) -> Tensor:
        """Note where the features of a tensor are."""
        self._places[tensor] = place
        return tensor

    def place(self, value: Any) -> Place | None:
        """Where the features of a tensor are; None: it has none."""
        return self._places.get(value) if isinstance(value, Tensor) else None

    def mark_last(self, values: Any) -> None:
        """What of a nest has as many features in the last dim as are here, has these."""
        for value in leaves(values):
            if isinstance(value, Tensor) and value.shape[-1:] == (self.spread.here,):
                self.mark(value, Place(value.dim() - 1))

    def count(self, place: Place) -> int:
        """Size of the dim in the whole."""
        return self.spread.size // place.group

    def shape(self, tensor: Tensor) -> torch.Size:
        """Of the whole tensor."""
        place = self._places[tensor]
        return torch.Size((*tensor.shape[: place.dim], self.count(place), *tensor.shape[place.dim + 1 :]))


class Spanning(TorchFunctionMode):
    """Functions of features that lie over an axis are computed over it.

    Args:
        known: functions with code of their own, called with the features in the last dim of their first argument.
    """

    def __init__(self, followed: Followed, known: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.followed, self.known = followed, known

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in leaves((args, kwargs)) if self.followed.place(leaf) is not None]
        if not given:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            return self._attribute(func, args)
        if name in ("size", "numel", "__len__") or name in TELLING:
            return self._told(name, func, args, kwargs)
        known = self.known.get(func)
        if known is not None:
            return known(self.followed, *args, **kwargs)
        if func in (F.group_norm, torch.group_norm):
            spread = self.followed.spread
            spread.refuse(f"a group of its channels lies over several ranks of {spread.axis.name}: calls group_norm")
        return self._by_name(name, func, args, kwargs, given)

    def _by_name(self, name: str, func: Callable, args: tuple, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        if name in RESHAPING and len(given) == 1:
            return self._reshaped(func, args, kwargs)
        if name in ARRANGING and len(given) == 1:
            return self._arranged(name, func, args, kwargs)
        if name in ("einsum", "matmul", "__matmul__", "bmm"):
            return self._product(name, func, args, kwargs)
        if name in GATHERED and len(given) == 1 and given[0] is args[0]:
            return self._gathered(name, func, args, kwargs)
        if name in ENTRYWISE:
            return self._entrywise(name, func, args, kwargs)
        self.followed.spread.refuse(f"calls {name}")

    def _attribute(self, func: Any, args: tuple) -> Any:
        tensor, name = args[0], getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "shape":
            return self.followed.shape(tensor)
        result = func(*args)
        if isinstance(result, Tensor):
            place = self.followed.place(tensor)
            if place is None or result.shape != tensor.shape or name not in ("data", "grad"):
                self.followed.spread.refuse(f"reads {name}")
            self.followed.mark(result, place)
        return result

    def _told(self, name: str, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if name in TELLING:
            return func(*args, **kwargs)
        shape = self.followed.shape(args[0])
        if name == "numel":
            return shape.numel()
        dim = (args[1] if len(args) > 1 else kwargs.get("dim")) if name == "size" else 0
        return shape if dim is None else shape[dim]

    def _entrywise(self, name: str, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """All operands have the features in one dim, counted from the last, or one number for all of them."""
        if name in ("to", "type_as") and self.followed.place(args[0]) is None:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {
            (tensor.dim() - place.dim, place.group)
            for tensor in tensors
            if (place := self.followed.place(tensor)) is not None
        }
        if len(places) != 1:
            self.followed.spread.refuse(f"{name} joins tensors with different dims")
        ((back, group),) = places
        for tensor in tensors:
            if self.followed.place(tensor) is None and tensor.dim() >= back and tensor.shape[-back] != 1:
                self.followed.spread.refuse(f"{name} joins {list(tensor.shape)}, which is not cut as they are,")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            return self.followed.mark(result, Place(result.dim() - back, group))
        return result

    def _arranged(self, name: str, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """On a whole and a part without values: the dim that differs is that of the features."""
        place = self.followed.place(args[0])
        assert place is not None
        count, here = self.followed.count(place), args[0].shape[place.dim]
        bare = torch.empty(self.followed.shape(args[0]), device="meta")
        if any(isinstance(leaf, Tensor) for leaf in leaves((args[1:], kwargs))):
            self.followed.spread.refuse(f"calls {name} with a tensor")
        whole = func(bare, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        differ = [dim for dim, (a, b) in enumerate(zip(whole.shape, result.shape, strict=True)) if a != b]
        if len(differ) != 1 or (whole.shape[differ[0]], result.shape[differ[0]]) != (count, here):
            self.followed.spread.refuse(f"calls {name}")
        return self.followed.mark(result, Place(differ[0], place.group))

    def _reshaped(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Features may be folded into groups that all ranks have whole, and unfolded again."""
        x, spread = args[0], self.followed.spread
        place = self.followed.place(x)
        assert place is not None
        if any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values())):
            spread.refuse("views as another type what is")
        wanted = func(torch.empty(self.followed.shape(x), device="meta"), *args[1:], **kwargs).shape
        before = prod(x.shape[: place.dim])
        for dim in range(len(wanted)):
            features = wanted[dim] * place.group  # had every entry of the dim as many as now
            if prod(wanted[:dim]) != before:
                continue
            after = prod(wanted[dim + 1 :])
            inner = prod(x.shape[place.dim + 1 :])
            group = self._group(place, wanted[dim], inner, after)
            if group is not None and features:
                part = (*wanted[:dim], spread.here // group, *wanted[dim + 1 :])
                return self.followed.mark(x.reshape(part), Place(dim, group))
        spread.refuse(f"calls {getattr(func, '__name__', func)} to {list(wanted)}")

    def _group(self, place: Place, count: int, inner: int, after: int) -> int | None:
        """In groups of how many features the dim goes on that has `count` entries with `after` numbers each."""
        one = inner // place.group if inner % place.group == 0 else None  # numbers of one feature
        if one is None or after % one:
            return None
        group = after // one
        divides = all(size % group == 0 for size in self.followed.spread.sizes)
        fits = count * group == self.followed.spread.size and divides
        return group if fits and (group == 1 or self.followed.spread.ordered) else None

    def _gathered(self, name: str, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """All features on every rank; gradients of what it gives are those of this rank's features, and are summed."""
        x, spread = args[0], self.followed.spread
        place = self.followed.place(x)
        last = (-1, x.dim() - 1)
        dim = kwargs.get("dim", _dim_among(args[2:] if name == "topk" else args[1:], -1 if name in LAST else None))
        dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
        if place != Place(x.dim() - 1) or not spread.ordered or dim not in last:
            spread.refuse(f"calls {name} (dim {dim})")
        whole = ops.gather_scatter(x, spread.axis, sizes=spread.sizes)
        found, start = func(whole, *args[1:], **kwargs), sum(spread.sizes[: spread.axis.index])

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape != whole.shape:
                return value
            return self.followed.mark(value.narrow(-1, start, spread.here), Place(x.dim() - 1))

        results = [cut(value) for value in found] if isinstance(found, tuple) else cut(found)
        return type(found)(results) if isinstance(found, tuple) else results

    def _product(self, name: str, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Products over the features are summed over the axis; features of one result are those of the operands."""
        if name == "einsum":
            equation, *operands = args
            if not isinstance(equation, str):
                self.followed.spread.refuse("calls einsum without a string")
            operands = list(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
        else:
            operands = [*args, *kwargs.values()]
            equation = "...ij,...jk->...ik"
        taken, arrow, given = equation.replace(" ", "").partition("->")
        terms = taken.split(",")
        letters = {
            _letter(term, operand.dim(), place.dim)
            for term, operand in zip(terms, operands, strict=False)
            if (place := self.followed.place(operand)) is not None
        }
        letter = next(iter(letters))
        others = any(
            letter in term for term, one in zip(terms, operands, strict=False) if self.followed.place(one) is None
        )
        groups = {place.group for one in operands if (place := self.followed.place(one)) is not None}
        two_dims = name == "einsum" or all(operand.dim() >= 2 for operand in operands)
        if not (arrow and letter and two_dims) or len(letters) != 1 or others or len(groups) != 1:
            self.followed.spread.refuse(f"calls {name}")
        result = func(*args, **kwargs)
        if letter not in given:
            return ops.sum_sum(result, self.followed.spread.axis)
        back = len(given) - given.index(letter)
        if "..." in given[given.index(letter) :]:
            self.followed.spread.refuse(f"calls {name}")
        return self.followed.mark(result, Place(result.dim() - back, *groups))


def _dim_among(args: Sequence[Any], default: int | None) -> Any:
    """The first argument, if it is a dim or some."""
    return args[0] if args and not isinstance(args[0], bool) and isinstance(args[0], int | tuple | list) else default


def _letter(term: str, dims: int, dim: int) -> str:
    """Of a dim of an operand of an einsum; empty: an ellipsis stands for it."""
    before, ellipsis, after = term.partition("...")
    if not ellipsis or dim < len(before):
        return term[dim]
    back = dims - dim
    return after[-back] if back <= len(after) else ""


def over_last(followed: Followed, x: Tensor, dim: Any, what: str) -> bool:
    """Whether a reduction is of the features: over the last dim alone, of all of it.

    Raises:
        PlacementError: it is of the features and of others, or of groups of them.
    """
    place = followed.place(x)
    if place is None:
        followed.spread.refuse(f"takes {what} of another tensor")
    dims = (dim,) if isinstance(dim, int) else tuple(range(x.dim()) if dim is None else dim)
    dims = tuple(one % x.dim() for one in dims)
    if place.dim not in dims:
        return False
    if dims != (x.dim() - 1,) or place != Place(x.dim() - 1):
        followed.spread.refuse(f"takes {what} over dims {dim}")
    return True


def kept(followed: Followed, x: Tensor, dim: int | Sequence[int], keepdim: bool, result: Tensor) -> Tensor:
    """The result of a reduction over other dims: the features are where they were."""
    place = followed.place(x)
    assert place is not None
    gone = {one % x.dim() for one in ((dim,) if isinstance(dim, int) else dim)}
    before = 0 if keepdim else sum(one < place.dim for one in gone)
    return followed.mark(result, Place(place.dim - before, place.group))


def check_given(followed: Followed, module: nn.Module, found: Any) -> None:
    """What the module gives of so many features must have come of them by functions that were seen.

    Raises:
        PlacementError: code that torch does not show made it: a function of its own, or a compiled one.
    """

    def check(value: Any) -> Any:
        here = isinstance(value, Tensor) and value.shape[-1:] == (followed.spread.here,)
        if here and value.is_floating_point() and followed.place(value) is None:
            followed.spread.refuse(f"{type(module).__name__} gives what code that torch does not show has computed")
        return value

    map_leaves(check, found)
