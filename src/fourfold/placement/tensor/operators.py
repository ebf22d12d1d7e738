"""Registered torch ops that communicate over axes, which they are given by key: graphs hold strings, but no axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fourfold.torch_private import watched
from fourfold.wire.axis import axis_of

_library = torch.library.Library("fourfold", "FRAGMENT")


def register(
    name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any], axis: int
) -> Callable[..., Any]:
    """Let `torch.ops.fourfold.<name>` be `run`, and `shapes` where tensors are on meta or fake.

    On a dry axis (`wire.dry`) those run too, since bytes are counted in it; but not while a compiler looks at shapes,
    which it does several times a trace.

    Args:
        schema: "(Tensor x, …) -> Tensor".
        axis: which argument, counted from the end, is the key of an axis of the mesh.

    Returns:
        What to call: the op where somebody sees operators (a compiler, a mode, tensors without numbers), else `run`
        itself: torch's way there and back takes 8 to 12 µs.
    """

    def fake(*inputs: Any) -> Any:
        dry = axis_of(inputs[-axis]).dry and not torch.compiler.is_compiling()
        return (run if dry else shapes)(*inputs)

    _library.define(name + schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fourfold::{name}", fake, lib=_library)
    op = getattr(torch.ops.fourfold, name)

    def call(*inputs: Any) -> Any:
        return op(*inputs) if torch.compiler.is_compiling() or watched(inputs[0]) else run(*inputs)

    return call
