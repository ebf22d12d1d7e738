"""What each private name of torch promises us; a new torch that breaks one fails here."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fourfold import torch_private
from fourfold.wire import ops
from fourfold.wire.dry import dry_mesh


def test_this_torch_has_stateless_uniforms():
    assert torch_private.has_stateless_uniform()


def test_stateless_uniform_takes_one_key_a_row():
    keys = torch.zeros(3, 1, 2, dtype=torch.uint64, device="meta")
    assert torch_private.stateless_uniform(keys, torch.empty(3, 4, device="meta")).shape == (3, 4)


def test_safe_softmax_of_a_masked_row_is_zero():
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    assert torch.equal(torch_private.safe_softmax(scores), torch.tensor([[0.5, 0.5], [0.0, 0.0]]))


def test_undispatched_lets_a_mode_see_the_calls_inside():
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            if func is F.multi_head_attention_forward:
                with self:
                    return torch_private.undispatched(func)(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    layer = torch.nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).train()
    x = torch.randn(2, 3, 4)
    with Watch():
        layer(x, x, x)
    assert F.multi_head_attention_forward in seen and F.dropout in seen


def test_overlaps_of_a_column_cut_with_a_row_cut():
    saved = [((0, 0), (4, 3)), ((0, 3), (4, 2))]
    wanted = [((3, 0), (1, 5)), ((0, 0), (2, 4))]
    found = torch_private.overlaps("w", saved, wanted)
    assert sorted(found) == [
        (0, 0, (3, 0), (0, 0), (1, 3)),
        (0, 1, (0, 0), (0, 0), (2, 3)),
        (1, 0, (3, 0), (0, 3), (1, 2)),
        (1, 1, (0, 0), (0, 3), (2, 1)),
    ]


def test_overlaps_of_a_scalar():
    assert torch_private.overlaps("s", [((), ())], [((), ())]) == [(0, 0, (), (), ())]


def test_storage_key_is_equal_for_views_alone():
    a = torch.empty(4, device="meta")
    assert torch_private.storage_key(a) == torch_private.storage_key(a[1:].view(3, 1).detach())
    assert torch_private.storage_key(a) != torch_private.storage_key(torch.empty(4, device="meta"))


def test_truncated_normal_is_replaced_for_a_while():
    with torch_private.truncated_normal_is(lambda tensor, *_, **__: tensor.fill_(7)):
        assert torch.nn.init.trunc_normal_(torch.empty(2)).tolist() == [7, 7]
    assert (torch.nn.init.trunc_normal_(torch.empty(64)).abs() <= 2).all()


def test_fake_tensors_have_shape_stride_and_device_but_no_data():
    mode = torch_private.fake_mode()
    fake = torch_private.fake_cpu(mode, torch.empty(3, 4, device="meta").T)
    assert (fake.shape, fake.stride(), fake.device.type) == ((4, 3), (1, 4), "cpu")
    with mode:
        assert (fake + torch.ones(3)).shape == (4, 3)


def test_persistent_buffers_are_those_of_the_state_dict():
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("table", torch.zeros(2), persistent=False)
    assert torch_private.persistent_buffers(module) == ["running_mean", "running_var", "num_batches_tracked"]
    assert set(torch_private.persistent_buffers(module)) == module.state_dict().keys() - {"weight", "bias"}


def test_reporting_agent_tells_exit_codes_of_a_failed_group(monkeypatch):
    from inspect import signature
    from types import SimpleNamespace

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    assert list(signature(LocalElasticAgent._monitor_workers).parameters)[:2] == ["self", "worker_group"]
    results = [
        RunResult(WorkerState.HEALTHY),
        RunResult(WorkerState.FAILED, failures={2: SimpleNamespace(exitcode=-9)}),  # pyright: ignore[reportArgumentType]
    ]
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: results.pop(0))
    told = []
    spec = SimpleNamespace(max_restarts=0, rdzv_handler=None, local_world_size=1)
    agent = torch_private.reporting_agent(spec, None, shutdown_timeout=1, on_failure=told.append)
    agent._monitor_workers(None)
    assert told == []
    agent._monitor_workers(None)
    assert told == [{2: -9}]


def test_fake_tensors_have_shapes_and_no_memory():
    with torch_private.fake_tensors():
        made = torch.empty(1 << 20, 1 << 20) @ torch.empty(1 << 20, 3)
    assert made.shape == (1 << 20, 3)


def test_dispatch_mode_sees_operators_below_autograd():
    seen = []

    class Watch(torch_private.dispatch_mode()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        (torch.ones(2, requires_grad=True) * 2).sum().backward()
    assert seen.count("aten.mul.Tensor") == 2


def test_composite_shows_a_mode_what_an_operator_calls():
    seen = []

    class Watch(torch_private.dispatch_mode()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            if func.namespace == "fourfold":
                with self:
                    return torch_private.composite(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    mesh = dry_mesh({"x": 2})
    with torch_private.fake_tensors(), Watch():
        total = ops.sum_identity(torch.ones(3), mesh["x"])
    assert total.shape == (3,)
    assert [name for name in seen if "sum_identity" in name or "clone" in name] == [
        "fourfold.sum_identity.default",
        "aten.clone.default",
    ]


def test_watched_are_tensors_without_numbers_and_all_inside_of_a_mode():
    class Watch(torch_private.dispatch_mode()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    plain = torch.ones(2)
    assert not torch_private.watched(plain)
    assert torch_private.watched(torch.ones(2, device="meta"))
    with torch_private.fake_tensors():
        assert torch_private.watched(torch.ones(2))
    with Watch():
        assert torch_private.watched(plain)
    assert not torch_private.watched(plain)


class Pair(NamedTuple):
    first: object
    second: object


def test_nests_are_walked_as_torch_walks_them():
    tensor = torch.ones(1)
    nest = (Pair(1, [tensor]), {"b": None, "a": {"c": torch.Size([2, 3])}}, OrderedDict(z=2.5, y="text"), [], slice(3))
    assert list(torch_private.leaves(nest)) == pytree.tree_leaves(nest)
    mine, theirs = (walk(lambda leaf: (leaf,), nest) for walk in (torch_private.map_leaves, pytree.tree_map))
    assert mine == theirs
    assert [type(one) for one in mine] == [Pair, dict, OrderedDict, list, tuple]
    assert not set(pytree.SUPPORTED_NODES) & torch_private.SINGLE


def test_leaves_of_a_nest_in_order():
    nest = {"a": (1, [2, torch.Size([3, 4])]), "b": None}
    assert list(torch_private.leaves(nest)) == [1, 2, 3, 4, None]
    assert list(torch_private.leaves(nest, lambda value: isinstance(value, torch.Size))) == [
        1,
        2,
        torch.Size([3, 4]),
        None,
    ]


def test_map_leaves_keeps_the_nest():
    nest = ((1, [2]), {"a": 3})
    assert torch_private.map_leaves(lambda value: -value, nest) == ((-1, [-2]), {"a": -3})
    assert torch_private.map_leaves(len, ((1, 2), [(3,)]), lambda value: value in ((1, 2), (3,))) == (2, [1])


def test_allocations_are_signed_and_in_order():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        first = torch.empty(1000)
        del first
        kept = torch.empty(500)
    assert torch_private.allocations(profile) == [4000, -4000, 2000]
    assert kept.numel() == 500


def test_without_torch_function_a_subclass_is_a_plain_tensor():
    class Shy(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("asked")

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.__class__ = Shy
    with torch_private.without_torch_function():
        assert parameter.shape == (2,) and type(parameter * 2) is torch.Tensor
    with pytest.raises(AssertionError, match="asked"):
        parameter.sum()


def test_take_assign_tells_how_a_state_is_loaded_and_leaves_no_trace():
    module, seen = torch.nn.Linear(2, 2), []
    state = module.state_dict()
    module.register_load_state_dict_pre_hook(lambda *about: seen.append(torch_private.take_assign(about[3])))
    for assign in (False, True, False):
        module.load_state_dict(state, assign=assign)
    assert seen == [False, True, False]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_inside_checkpoint_is_told_however_deep(reentrant: bool, grad: bool):
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    told = []

    def inner(x: Any) -> Any:
        told.append(torch_private.inside_checkpoint())
        return x.sin()

    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda module, args, result: inner(result))
    with torch.set_grad_enabled(grad):
        partial(checkpoint, use_reentrant=reentrant)(model, torch.ones(1, 2, requires_grad=True))
        model(torch.ones(1, 2))
    assert told == [True, False]
