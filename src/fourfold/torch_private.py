"""The only file that uses private names of torch, one small function each.

Private names change without notice: `tests/test_torch_private.py` holds a contract for every function here, so that a
new torch fails there, by name, and nowhere else.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


def stateless_uniform(keys: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with uniforms in [0, 1) by torch's stateless Philox: row i of `out` is a function of `keys[i]` only.

    CUDA and meta only: torch 2.13 has no CPU kernel (and fourfold uses numpy's Philox there).

    Args:
        keys: (rows, 1, 2), uint64: (seed, offset) of each row, on `out`'s device.
        out: (rows, elements a row), floating point.
    """
    return torch.ops.aten._philox_uniform_(out, keys, 0.0, 1.0)


def has_stateless_uniform() -> bool:
    """This torch has `stateless_uniform`; 2.11 may not."""
    return hasattr(torch.ops.aten, "_philox_uniform_")


def safe_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dim in which a row of only -inf gives zeros (not NaN), as inside torch's own attention."""
    return torch.ops.aten._safe_softmax(scores, -1)


@functools.cache
def undispatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function of `torch.nn.functional` that does not hand itself to a function mode.

    Composite functions such as `multi_head_attention_forward` give themselves to the active mode as a whole, and what
    they call inside is then hidden from it. The copy runs its body, so that the mode sees the calls inside.
    """
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def dispatch_mode() -> type:
    """The base class of modes that see every operator below autograd (`__torch_dispatch__`).

    By default torch hides a mode from its compiler, for which it imports the compiler: over a second of CPU time in
    every process. No mode of ours is entered around compiled code.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

    return Mode


def composite(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operator with one kernel for all devices (CompositeExplicitAutograd) gives, computed by that kernel here.

    Called from a dispatch mode that has been entered again, so that the mode sees what the kernel calls.
    """
    return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def watched(tensor: Tensor) -> bool:
    """Some mode sees operators below autograd, or this is no tensor of numbers (meta, fake, any other subclass)."""
    return type(tensor) is not Tensor or tensor.is_meta or torch._C._len_torch_dispatch_stack() > 0


SINGLE = frozenset((Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device, slice))
"""Types that are no nests; torch's own walk takes a microsecond to find that out."""


def leaves(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Everything inside nested tuples, lists and dicts, in order; what `is_leaf` holds for is not looked into.

    Also inside what is registered with torch as a nest (named tuples, outputs of transformers' models), by its own
    walk, which takes five times as long: every function of a dry run is looked at several times.
    """
    found: list[Any] = []
    _gather(found, value, is_leaf)
    return iter(found)


def _gather(found: list[Any], value: Any, is_leaf: Callable[[Any], bool] | None) -> None:
    kind = type(value)
    if kind in SINGLE or (is_leaf is not None and is_leaf(value)):
        found.append(value)
    elif kind is tuple or kind is list:
        for one in value:
            _gather(found, one, is_leaf)
    elif kind is dict:
        for one in value.values():
            _gather(found, one, is_leaf)
    else:
        from torch.utils._pytree import tree_iter

        found.extend(tree_iter(value, is_leaf))


def map_leaves(function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The same nest of tuples, lists and dicts with `function` of every leaf in its place."""
    kind = type(value)
    if kind in SINGLE or (is_leaf is not None and is_leaf(value)):
        return function(value)
    if kind is tuple:
        return tuple([map_leaves(function, one, is_leaf) for one in value])
    if kind is list:
        return [map_leaves(function, one, is_leaf) for one in value]
    if kind is dict:
        return {name: map_leaves(function, one, is_leaf) for name, one in value.items()}
    from torch.utils._pytree import tree_map

    return tree_map(function, value, is_leaf=is_leaf)


def fake_tensors() -> Any:
    """A mode under which tensors have shapes and types, and no memory; a context manager."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def allocations(profile: Any) -> list[int]:
    """Bytes of every allocation (positive) and release (negative) of the CPU allocator under a profile, in order.

    Only what this thread did is recorded, and only releases of what was allocated under the profile.

    Args:
        profile: a finished `torch.profiler.profile(activities=[CPU], profile_memory=True)`.
    """
    kind = torch._C._profiler._EventType.Allocation  # pyright: ignore[reportAttributeAccessIssue]
    events, waiting = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        if event.typed[0] == kind and event.typed[1].device.type == "cpu":
            events.append((event.start_time_ns, len(events), event.typed[1].alloc_size))
        waiting.extend(event.children)
    return [nbytes for _, _, nbytes in sorted(events)]


class Overlap(NamedTuple):
    """What a saved and a wanted box share: their places in the lists given, and the shared box as each one sees it."""

    saved: int
    wanted: int
    saved_offsets: tuple[int, ...]
    wanted_offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements shared."""
        return prod(self.lengths)


def overlaps(
    name: str,
    saved: list[tuple[tuple[int, ...], tuple[int, ...]]],
    wanted: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[Overlap]:
    """Which parts of the saved boxes fill the wanted ones: the resharding of torch's distributed checkpoints.

    Args:
        name: of the logical tensor; only carried along.
        saved, wanted: (offsets, sizes) of every box, per dim of the logical shape; none empty.
    """
    # Imported here: it doubles the time that `import torch` takes, and only loading a checkpoint needs it.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(box: tuple[tuple[int, ...], tuple[int, ...]]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))

    # The planner reads the chunks only; size and dtype belong to the type.
    stored = TensorStorageMetadata(TensorProperties(), torch.Size(()), [chunk(box) for box in saved])
    items = create_read_items_for_chunk_list(name, stored, [chunk(box) for box in wanted])
    return [
        Overlap(
            cast(int, item.storage_index.index),
            cast(int, item.dest_index.index),
            tuple(item.storage_offsets),
            tuple(item.dest_offsets),
            tuple(item.lengths),
        )
        for item in items
    ]


def storage_key(tensor: Tensor) -> int:
    """A number that tensors share exactly while they share their storage, on meta too."""
    return tensor.untyped_storage()._cdata


_initialisers = threading.RLock()


@contextmanager
def truncated_normal_is(function: Callable[..., Tensor]) -> Iterator[None]:
    """`torch.nn.init.trunc_normal_`, by whatever name it was imported, draws by `function` for the time of the context.

    One thread at a time; another one that initialises a truncated normal meanwhile draws by it, too.
    """
    with _initialisers:
        before, torch.nn.init._no_grad_trunc_normal_ = torch.nn.init._no_grad_trunc_normal_, function
        try:
            yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = before


def fake_mode() -> Any:
    """A mode under which tensors have shapes and a device, but no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # It logs a page before it raises; the caller expects failures and reports them in a line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_cpu(mode: Any, tensor: Tensor) -> Tensor:
    """A fake tensor of `mode` with the shape, strides and dtype of `tensor`, that stands for one on CPU."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def reporting_agent(
    spec: Any, logs: Any, *, shutdown_timeout: int, on_failure: Callable[[dict[int, int]], bool | None]
) -> Any:
    """torchrun's local elastic agent, which also tells who failed before it starts the group again.

    The public agent keeps the failures of a restarted group to itself.

    Args:
        spec: the agent's WorkerSpec.
        logs: its LogsSpecs.
        shutdown_timeout: seconds that workers have to end (s).
        on_failure: called in the agent's thread, once for each group that failed, with the exit code of every rank
            that ended with another code than 0 (negative: a signal). Where it returns True, the group is not started
            again.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    base: Any = LocalElasticAgent  # its methods are wrapped by a timer, which hides their types

    class Agent(base):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.is_failed():
                codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
                if on_failure(codes):
                    self._remaining_restarts = 0
            return result

    return Agent(spec, logs, shutdown_timeout=shutdown_timeout)


def persistent_buffers(module: Any) -> list[str]:
    """Names of a module's own buffers that belong into its `state_dict`, without calling it: a placed model answers
    that with a gather, in which all ranks must take part."""
    return [name for name in module._buffers if name not in module._non_persistent_buffers_set]


def without_torch_function() -> Any:
    """A context in which tensor subclasses are plain tensors: their `__torch_function__` is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def take_assign(local_metadata: dict[str, Any]) -> bool:
    """`load_state_dict(..., assign=True)` is under way: by the `local_metadata` that its pre-hooks are given.

    Torch leaves its note in the metadata of the state, where the next load would find it, too; here it is taken out.
    """
    return bool(local_metadata.pop("assign_to_params_buffers", False))


def inside_checkpoint() -> bool:
    """The caller runs, however deep, inside a function that `torch.utils.checkpoint` will run again in backward.

    Both kinds call it from a frame of that file. Nothing is replaced to find out, so ranks on threads do not disturb
    one another, and it does not matter under which name a model holds the function (transformers binds it early).
    """
    from torch.utils import checkpoint

    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
