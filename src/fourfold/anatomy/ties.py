"""Parameters under several names."""

from __future__ import annotations

from torch import nn


def ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that share one parameter, weights and biases alike; the first name of a group is its own name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def own_names(model: nn.Module) -> dict[int, str]:
    """id of each parameter → the one name it goes by (the first of its ties)."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
