"""Weights of other stages: a registered parameter of full shape that takes no memory and wants no gradient."""

from __future__ import annotations

from collections.abc import Set as Set

import torch
from torch import nn


def hollow(model: nn.Module, names: Set[str]) -> None:
    """Put zeros that share one element in the place of these weights, by their own names; ties stay ties.

    The model's code between layers may read one that another stage alone needs: what it makes of it goes nowhere.
    """
    standing = {id(weight): _zeros(weight) for name, weight in model.named_parameters() if name in names}
    for module in model.modules():
        for attribute, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(weight) in standing:
                module.register_parameter(attribute, standing[id(weight)])


def _zeros(weight: nn.Parameter) -> nn.Parameter:
    device = "cpu" if weight.is_meta else weight.device
    return nn.Parameter(torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape), requires_grad=False)
