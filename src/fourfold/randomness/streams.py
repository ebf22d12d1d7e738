"""A function mode that makes a stock model draw its dropout from logical streams.

The mode is entered *inside* a block's forward by `inside(block, path)`: autograd recomputes with the modes of the step
popped, and a mode around the step would miss it. A site is the path given to `inside` plus the ordinal of the dropout
within that call, so that a recomputation repeats the names of the first run. Around the blocks the whole model is
inside its own scope (path ""); there a site also names the block that ran last, hence a pipeline stage that owns only
the head gives its dropouts the names that one process gives them.

Attention dropout inside `F.scaled_dot_product_attention` is computed by the plain formula, since no fused kernel takes
a mask: on CPU torch does the same, on CUDA the flash kernel is given up while attention dropout is on.
Other random calls of a model in training (`torch.rand`, `F.rrelu`) are torch's own and are left alone: the survey
names them, and the run says so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold import torch_private
from fourfold.randomness.dropout import LANES, current, dropout, enter_scope, threshold
from fourfold.randomness.philox import RandomnessError


class Streams(TorchFunctionMode):
    """Replaces every dropout in training by `fourfold::dropout`, at sites that begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.ordinal = 0
        # A scope entered outside of a compiled graph is looked up when the graph runs, so that equal blocks share one
        # graph; one entered inside is gone by then, and is written into the graph's sites.
        self.written = torch.compiler.is_dynamo_compiling()

    def site(self) -> str:
        """The name of the next draw; within the scope, if it begins with "#"."""
        self.ordinal += 1
        return f"{self.prefix if self.written else ''}#{self.ordinal - 1}"

    def draw(self, x: Tensor, p: float) -> Tensor:
        """Dropout of `x` at the next site."""
        return dropout(x, p, self.site())

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        replacement = _REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(self, func, *args, **(kwargs or {}))


class _Scopes(threading.local):
    innermost: Streams | None = None


_scopes = _Scopes()


def innermost() -> Streams | None:
    """The scope whose sites are being drawn from in this thread, if any."""
    return _scopes.innermost


@contextmanager
def inside(module: nn.Module, prefix: str) -> Iterator[None]:
    """The scope of one call of `module`, whose path in the logical model is `prefix` ("" for the whole model).

    Without an ambient position (evaluation, plain use), or when the module is in eval mode, torch is left alone.
    """
    if current() is None or not module.training:
        yield
        return
    outer = _scopes.innermost
    try:
        with entered(Streams(prefix)):
            yield
    finally:
        if outer is not None:
            outer.prefix, outer.ordinal = f"{outer.prefix.split('>')[0]}>{prefix}", 0
            enter_scope(outer.prefix)


def skip(draws: int) -> None:
    """So many dropouts of the innermost scope are drawn by another process: the next one has the name that it has."""
    if _scopes.innermost is not None:
        _scopes.innermost.ordinal += draws


@contextmanager
def entered(scope: Streams) -> Iterator[None]:
    """Sites are drawn from `scope` until this ends."""
    outer, _scopes.innermost = _scopes.innermost, scope
    before = enter_scope(scope.prefix)
    try:
        with scope:
            yield
    finally:
        _scopes.innermost = outer
        enter_scope(before)


def _plain(
    streams: Streams, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return func(input, p, training, inplace)
    result = streams.draw(input, p)
    return input.copy_(result) if inplace else result


def _functional(streams: Streams, func: Callable, input: Tensor, p: float, train: bool) -> Tensor:
    """`torch.dropout` and `torch.dropout_`."""
    if not train or p == 0.0:
        return func(input, p, train)
    result = streams.draw(input, p)
    return input.copy_(result) if func is torch.dropout_ else result


def _channels(
    streams: Streams, func: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`dropout1d` … `dropout3d`: whole channels of (rows, channels, …)."""
    if not training or p == 0.0:
        return func(input, p, training, inplace)
    result = input * _over(streams.draw(_one_per_channel(input), p), input)
    return input.copy_(result) if inplace else result


def _alpha(
    streams: Streams, func: Callable, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """`alpha_dropout`, `feature_alpha_dropout`: keeps mean and variance (Klambauer et al., NeurIPS 2017)."""
    if not training or p == 0.0:
        return func(input, p, training, inplace)
    shape = _one_per_channel(input) if func is F.feature_alpha_dropout else torch.ones_like(input)
    keep = _over((streams.draw(shape, p) != 0).to(input.dtype), input)
    p = threshold(p) / LANES
    if p == 1.0:
        result = input * keep
    else:
        alpha = 1.7580993408473766  # scale × alpha of SELU
        a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
        result = input * (keep * a) + ((keep - 1) * (alpha * a) + alpha * a * p)
    return input.copy_(result) if inplace else result


def _one_per_channel(input: Tensor) -> Tensor:
    """[rows, channels]: without the other dims, so that a cut of those is none of what is drawn."""
    return torch.ones(input.shape[:2], dtype=input.dtype, device=input.device)


def _over(values: Tensor, input: Tensor) -> Tensor:
    """[rows, channels] → [rows, channels, 1, …], to be broadcast over `input`."""
    return values.view(values.shape + (1,) * (input.dim() - values.dim()))


def _attention(
    streams: Streams,
    func: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The formula of torch's documentation, with a mask of ours on the weights. (rows, heads, queries, features)."""
    if dropout_p == 0.0:
        return func(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        if attn_mask is not None:
            raise RandomnessError(
                f"attention at {streams.prefix!r}: both attn_mask and is_causal are given; torch takes one"
            )
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return streams.draw(torch_private.safe_softmax(scores), dropout_p) @ value


def _composite(streams: Streams, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A function that calls dropout inside: its body runs under the mode."""
    with streams:
        return torch_private.undispatched(func)(*args, **kwargs)


def _recurrent(streams: Streams, func: Callable, *args: Any) -> Any:
    """`torch.lstm`, `gru`, `rnn_tanh`, `rnn_relu`: layer by layer, since the kernel of all draws between them inside.

    The arguments are (input, state, weights, biases, layers, p, training, bidirectional, batch_first), or for packed
    sequences (data, sizes of the batches, state, …, bidirectional).
    """
    at = next(i for i, value in enumerate(args) if isinstance(value, float))
    p, training = args[at], args[at + 1]
    if not training or p == 0.0 or args[at - 1] == 1:
        return func(*args)
    if at == 6:
        raise RandomnessError(
            f"{streams.prefix!r}: {func.__name__} drops out between its layers (p = {p}) on packed sequences, whose"
            " rows lie among one another, so its masks cannot follow them; set its dropout to 0 and put an nn.Dropout"
            " between single layers, or pad the sequences"
        )
    x, state, weights, biases, layers, *_, bidirectional, batch_first = args
    states, last = (state if isinstance(state, tuple | list) else (state,)), []
    ways = 2 if bidirectional else 1
    for layer in range(layers):
        if layer:
            x = streams.draw(x, p)
        mine = [one[layer * ways : (layer + 1) * ways] for one in states]
        share = weights[layer * len(weights) // layers : (layer + 1) * len(weights) // layers]
        begin = mine if isinstance(state, tuple | list) else mine[0]
        x, *ends = func(x, begin, share, biases, 1, 0.0, training, bidirectional, batch_first)
        last.append(ends)
    return (x, *(torch.cat(ends) for ends in zip(*last, strict=True)))


_REPLACEMENTS: dict[Callable, Callable] = {
    F.dropout: _plain,
    torch.dropout: _functional,
    torch.dropout_: _functional,
    F.dropout1d: _channels,
    F.dropout2d: _channels,
    F.dropout3d: _channels,
    F.alpha_dropout: _alpha,
    F.feature_alpha_dropout: _alpha,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _composite,
    torch.lstm: _recurrent,
    torch.gru: _recurrent,
    torch.rnn_tanh: _recurrent,
    torch.rnn_relu: _recurrent,
}
