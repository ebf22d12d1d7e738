"""Is the split run the whole one, but for what is cut? Call by call: shapes, and numbers where shapes do not tell."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import zip_longest

from fourfold import randomness
from fourfold.anatomy import Anatomy
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.dealing import Dealing
from fourfold.placement.tensor.probe import agrees, suspicious
from fourfold.placement.tensor.rehearsal import Made, Run, Shape


def compare(
    whole: Run,
    local: Run,
    dealing: Dealing,
    coordinates: Mapping[str, int],
    gathered: Collection[str],
    rows: int = 1,
) -> None:
    """Every shape of the split run is that of the whole run, but where a dim is one that is cut; and so are values.

    Args:
        whole, local: the runs.
        dealing: what is cut, and how.
        coordinates: of this rank.
        gathered: paths of the modules whose input features are gathered before they run whole.
        rows: of the batch, which code may fold with heads into one dim.

    Raises:
        PlacementError: names the module, the function and the two shapes.
    """
    if isinstance(local.error, PlacementError):
        raise local.error
    _compare_gathered(whole, local, gathered)
    _compare_returned(whole, local)
    ways = _with_rows(dealing.ways(coordinates), rows)
    tried: set[str] = set()
    if local.error is None:
        _compare_calls(whole, local)
    for one, other in _matched(whole, local):
        if not _fits(one.shapes, other.shapes, ways):
            raise PlacementError(
                f"{_named(one)} gives {_text(one.shapes)} in the whole model, and {_text(other.shapes)} "
                "on a part of its heads or features: other dims differ than those that are cut. Does it count heads by "
                f"an attribute or a config that placement does not know? {_REMEDY}"
            )
        if suspicious(one.function, one.call, other.call):
            signature = repr((one.function, one.call.args, one.call.kwargs, other.call.args, other.call.kwargs))
            if signature not in tried and not agrees(one.call, other.call, ways):
                raise PlacementError(
                    f"{_named(one)} does not make of a part of the heads or features what it makes of all of them: it "
                    "moves or mixes them, or takes their number or their places from the shape of a tensor. Let a "
                    f"module of its own do it, which can run whole, or write it for every feature by itself; {_REMEDY}"
                )
            tried.add(signature)
    if local.error is not None:
        reason = (str(local.error).strip() or type(local.error).__name__).splitlines()[0]
        raise PlacementError(
            f"{local.running or 'the model'} fails on a part of the heads or features ({reason}). Does it take their "
            f"number from an attribute, a config or a buffer that placement does not know? {_REMEDY}"
        ) from local.error


def _with_rows(ways: dict[tuple[int, int], list[list[int]]], rows: int) -> dict[tuple[int, int], list[list[int]]]:
    """The same, and for each of them rows × that, in one dim. (What folds heads into time is told by its numbers.)"""
    found = {pair: list(listed) for pair, listed in ways.items()}
    for (size, here), listed in ways.items() if rows > 1 else ():
        folded = [[row * size + index for row in range(rows) for index in way] for way in listed]
        found.setdefault((rows * size, rows * here), []).extend(folded)
    return found


_REMEDY = "leave out plan.placement.tensor, or the axis of it that cuts these features"


def _named(made: Made) -> str:
    return f"{made.module or 'the model'}: {made.function}"


def _compare_gathered(whole: Run, local: Run, gathered: Collection[str]) -> None:
    """What runs whole finds the features that it is given in the last dim, and nowhere else."""
    for path in gathered:
        for one, other in zip(whole.given[path], local.given.get(path, []), strict=False):
            differing = [dim for dim, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
            if len(one) != len(other) or differing not in ([], [len(one) - 1]):
                raise PlacementError(
                    f"{path}: must run on whole features, and is given {list(other)} of {list(one)}: expected features "
                    f"in the last dim, as linears have them; {_REMEDY}"
                )


def _compare_returned(whole: Run, local: Run) -> None:
    """What a loss is given by modules that it calls itself is whole."""
    for (path, one), (_, other) in zip(whole.returned, local.returned, strict=False):
        if one != other:
            raise PlacementError(
                f"{path}: the loss calls it, and would be given {_text(tuple(other))} of {_text(tuple(one))}: expected "
                "features in the last dim, which are gathered for a loss, or a call of the whole model; let the model "
                f"call it, or {_REMEDY}"
            )


def _compare_calls(whole: Run, local: Run) -> None:
    """What computes runs in both, in the same order: nothing hangs on how many heads or features there are.

    Raises:
        PlacementError: names the first function that only one of them calls.
    """
    for module in dict.fromkeys(made.module for made in (*whole.made, *local.made)):
        ours, theirs = (
            [made for made in run.made if made.module == module and made.computes] for run in (whole, local)
        )
        for one, other in zip_longest(ours, theirs):
            if one is None or other is None or one.function != other.function:
                calls = [f"calls {made.function}" if made else "is done" for made in (one, other)]
                raise PlacementError(
                    f"{module or 'the model'}: {calls[0]} in the whole model, where on a part of its heads or features "
                    f"it {calls[1]}: its code asks how many there are. Let it do the same for any number; {_REMEDY}"
                )


def _matched(whole: Run, local: Run) -> Iterator[tuple[Made, Made]]:
    """Calls of the same function in the same module, in order.

    One of the two may call more where its code asks how many heads there are: a single key-value head need not be
    repeated.
    """
    if local.error is not None or [made[:2] for made in whole.made] == [made[:2] for made in local.made]:
        yield from zip(whole.made, local.made, strict=False)
        return
    for module in dict.fromkeys(made.module for made in whole.made):
        ours, theirs = ([made for made in run.made if made.module == module] for run in (whole, local))
        names = ([made.function for made in run] for run in (ours, theirs))
        for at, there, count in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
            yield from zip(ours[at : at + count], theirs[there : there + count], strict=True)


def _fits(whole: tuple[Shape, ...], local: tuple[Shape, ...], pairs: Collection[tuple[int, int]]) -> bool:
    return len(whole) == len(local) and all(
        len(before) == len(after) and all(a == b or (a, b) in pairs for a, b in zip(before, after, strict=True))
        for before, after in zip(whole, local, strict=True)
    )


def _text(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def cuts(
    whole: Run,
    local: Run,
    anatomy: Anatomy,
    dealing: Dealing,
    coordinates: Mapping[str, int],
    windows: Mapping[str, randomness.Window],
) -> dict[str, tuple[randomness.Cut, ...]]:
    """How the tensors that dropouts take are cut here, by site, besides by rows, which `windows` say."""
    axes = {dropout.site: dropout.axis for dropout in anatomy.dropouts}
    found: dict[str, tuple[randomness.Cut, ...]] = {}
    for site, shape in whole.draws.items():
        here, axis = local.draws.get(site, shape), axes.get(site)
        rows = anatomy.layouts.get(site, randomness.FIRST).dim if site in windows else -1
        differing = [dim for dim, (a, b) in enumerate(zip(shape, here, strict=True)) if a != b and dim != rows]
        if not differing:
            continue
        if axis is None or dealing.sizes[axis] == 1:  # time, which lies over the other axis
            axis = "y"
        found[site] = tuple(
            randomness.Cut(dim, dealing.runs(axis, shape[dim], here[dim], coordinates[axis]), shape[dim])
            for dim in differing
        )
    return found
