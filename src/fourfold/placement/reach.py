"""How far backward goes down: with frozen weights below, it ends above them."""

from __future__ import annotations

from collections.abc import Iterable

from fourfold.anatomy import Anatomy


def reached(anatomy: Anatomy, trained: Iterable[str]) -> frozenset[str]:
    """Paths of the blocks that backward comes to: those that a trained weight lies in, or is first used before.

    A frozen block above a trained weight is among them, since the gradient of its input is wanted. Blocks are taken to
    follow one another: of two branches side by side, the frozen one counts as reached if it runs second.

    Args:
        anatomy: of the model.
        trained: names of the weights that get gradients.
    """
    wanted = set(trained)
    aliases = {names[0]: names for names in anatomy.ties}
    found: set[str] = set()
    begun = False
    for name in anatomy.order:
        begun = begun or name in wanted
        if begun:
            names = aliases.get(name, (name,))
            found.update(path for path in anatomy.blocks if any(alias.startswith(f"{path}.") for alias in names))
    return frozenset(found)
