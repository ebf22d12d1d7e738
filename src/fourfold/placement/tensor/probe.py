"""Does a function make of a part of the features what it makes of all of them? Tried on random numbers.

Shapes cannot tell: `flip`, a pooling across channels, a division by the number of features here, all keep them. So a
function that is not known to be harmless runs twice on the CPU, once on all features and once on those of this rank,
and both must agree. The numbers come from a generator of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.torch_private import leaves, map_leaves

Shape = tuple[int, ...]
Places = Mapping[tuple[int, int], list[int]]
"""(size of a dim in the whole, size here) → which indices of the whole are here."""

HARMLESS = frozenset(
    "__add__ __and__ __eq__ __ge__ __gt__ __invert__ __le__ __lt__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ "
    "__rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__ "
    "abs add add_ baddbmm bfloat16 bmm clamp clone contiguous copy_ cos cross_entropy detach div div_ double "
    "dropout dropout_ elu embedding eq erf exp float ge gelu gt half hardswish le leaky_relu linear log logical_and "
    "logical_not logical_or lt masked_fill masked_fill_ matmul mish mul mul_ ne neg pow reciprocal relu relu_ "
    "requires_grad_ rsqrt rsub scaled_dot_product_attention sigmoid silu sin softmax softplus sqrt square sub sub_ "
    "tanh to true_divide type type_as where".split()
)
"""Functions that do the same to every entry, or whose features the anatomy follows. Numbers among their arguments must
be the same for a part as for the whole."""

SIZES = frozenset(
    "broadcast_to empty empty_like expand expand_as full_like movedim new_empty new_ones new_zeros ones ones_like "
    "permute size squeeze stride swapaxes t transpose unsqueeze zeros zeros_like".split()
)
"""Functions whose numbers are sizes and dims, which show in the shapes of their results. What picks, repeats or joins
entries is not among them (the first of a part are not the first of the whole), nor is a `view`: what it folds into time
may have the size of a part of something else."""

DRAWS = frozenset(
    "bernoulli bernoulli_ exponential_ multinomial normal normal_ poisson rand rand_like randint_like randn randn_like "
    "random_ rrelu rrelu_ uniform_".split()
)
"""Functions that draw from torch's own generator: on a part they draw other numbers, which are not tried out."""

LARGEST = 1 << 24
"""Elements of the whole's arguments beyond which nothing is tried: a real batch of a real model, some seconds."""


class Call(NamedTuple):
    """A function that a model called, and its arguments with a `Like` in the place of every tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Without the values."""
        return cls(function, map_leaves(_described, args), map_leaves(_described, dict(kwargs)))

    @property
    def numbers(self) -> list[Any]:
        """What is no tensor among the arguments."""
        return [leaf for leaf in leaves((self.args, self.kwargs)) if not isinstance(leaf, Like)]

    @property
    def tensors(self) -> list[Like]:
        """The tensors among the arguments."""
        return [leaf for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Like)]


class Like:
    """A tensor's shape and type. (No tuple: nests of arguments are walked.)"""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _described(value: Any) -> Any:
    return Like(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def suspicious(name: str, whole: Call, local: Call) -> bool:
    """Whether a call must be tried: its function is not known, or it is given other numbers on a part."""
    if name in SIZES:
        return False
    same = [tensor.shape for tensor in whole.tensors] == [tensor.shape for tensor in local.tensors]
    return whole.numbers != local.numbers or (name not in HARMLESS and not same)


def agrees(whole: Call, local: Call, pairs: Mapping[tuple[int, int], list[list[int]]]) -> bool:
    """Whether the function on this rank's part gives this rank's part of what it gives on the whole.

    Args:
        whole, local: the same call in the whole model, and on a part.
        pairs: (size of a dim in the whole, size here) → the ways in which such a dim may be dealt to this rank.
    """
    if getattr(whole.function, "__name__", "") in DRAWS:
        return False
    if len(whole.tensors) != len(local.tensors) or sum(_numel(like.shape) for like in whole.tensors) > LARGEST:
        return len(whole.tensors) == len(local.tensors)
    if any(len(one.shape) != len(other.shape) for one, other in zip(whole.tensors, local.tensors, strict=True)):
        return False
    given = [_drawn(like, seed, 2) for seed, like in enumerate(whole.tensors)]
    try:
        expected = _outcome(whole, [tensor.clone() for tensor in given])
    except IndexError:  # integers that choose from a single entry
        given = [_drawn(like, seed, 1) for seed, like in enumerate(whole.tensors)]
        expected = _outcome(whole, [tensor.clone() for tensor in given])
    return any(_alike(local, given, expected, places) for places in _ways(whole, local, expected, pairs))


def _numel(shape: Shape) -> int:
    return torch.Size(shape).numel()


def _drawn(like: Like, seed: int, most: int) -> Tensor:
    """Random numbers; integers from 0 up to `most`, without it."""
    generator = torch.Generator().manual_seed(seed)
    if like.dtype == torch.bool:
        return torch.randint(2, like.shape, generator=generator).bool()
    if not (like.dtype.is_floating_point or like.dtype.is_complex):
        return torch.randint(most, like.shape, generator=generator).to(like.dtype)
    wide = torch.complex128 if like.dtype.is_complex else torch.float64
    return torch.randn(like.shape, generator=generator, dtype=wide)


def _outcome(call: Call, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that the function returns; of one that returns nothing, the first that it is given."""
    given = iter(tensors)

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Like):
            return next(given)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = map_leaves(real, (call.args, call.kwargs))
    result = call.function(*args, **kwargs)
    return [leaf for leaf in leaves(tensors[:1] if result is None else result) if isinstance(leaf, Tensor)]


def _ways(
    whole: Call, local: Call, results: list[Tensor], pairs: Mapping[tuple[int, int], list[list[int]]]
) -> Iterator[Places]:
    """Every way in which the dims that differ may be dealt: the same for dims of the same sizes; few are tried."""
    differing = {
        (a, b)
        for one, other in zip(whole.tensors, local.tensors, strict=True)
        for a, b in zip(one.shape, other.shape, strict=True)
        if a != b
    }
    sizes = {size for result in results for size in result.shape}
    differing |= {pair for pair in pairs if pair[0] in sizes and pair[0] != pair[1]}
    listed = sorted(differing)
    for ways in islice(product(*(pairs.get(pair, [list(range(pair[1]))]) for pair in listed)), 64):
        yield dict(zip(listed, ways, strict=True))


def _alike(local: Call, given: list[Tensor], expected: list[Tensor], places: Places) -> bool:
    parts = [_part(tensor, like.shape, places) for tensor, like in zip(given, local.tensors, strict=True)]
    try:
        found = _outcome(local, parts)
    except (RuntimeError, ValueError, IndexError):
        return False
    if len(found) != len(expected):
        return False
    for mine, theirs in zip(found, expected, strict=True):
        if mine.dim() != theirs.dim() or any(
            a != b and (a, b) not in places for a, b in zip(theirs.shape, mine.shape, strict=True)
        ):
            return False
        if not torch.allclose(mine, _part(theirs, tuple(mine.shape), places).to(mine.dtype), equal_nan=True):
            return False
    return True


def _part(whole: Tensor, shape: Shape, places: Places) -> Tensor:
    for dim, (a, b) in enumerate(zip(whole.shape, shape, strict=True)):
        if a != b:
            whole = whole.index_select(dim, torch.tensor(places[a, b]))
    return whole.clone()
