from __future__ import annotations

import json

import pytest
import torch

from fourfold.plan import Plan
from fourfold.planner import Subject, forecast, here, workspace
from fourfold.planner.measure import measured_peak
from fourfold.planner.recorder import describe


def operator(name, *args, flops=0, nbytes=0, **kwargs):
    return {
        "name": name,
        "args": describe(args),
        "kwargs": describe(kwargs),
        "flops": flops,
        "bytes": nbytes,
        "born": 0,
    }


def convolution(rows=2):
    images, weights = torch.ones(rows, 8, 16, 16), torch.ones(8, 8, 3, 3)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return operator("aten.convolution.default", images, weights, None, *settings, nbytes=2 * images.nbytes)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_peak_and_end_of_a_piece_of_work():
    found = measured_peak(lambda: torch.zeros(1000) + 1)
    assert found.end == 4000
    assert 8000 <= found.peak < 8100  # both tensors, and the wrapped number


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrix_products_hold_nothing(dtype):
    """What `workspace.PRODUCTS` takes for granted."""
    a, b = torch.ones(96, 64, dtype=dtype), torch.ones(64, 80, dtype=dtype)
    assert workspace.measure(operator("aten.mm.default", a, b)) == 0
    assert workspace.measure(operator("aten.addmm.default", torch.ones(80, dtype=dtype), a, b)) == 0
    assert workspace.measure(operator("aten.bmm.default", a[None], b[None])) == 0
    assert workspace.measure(operator("aten.mm.default", a, b.t().contiguous().t())) == 0


def test_a_convolution_holds_as_much_as_it_returns():
    assert workspace.measure(convolution()) >= 2 * 8 * 16 * 16 * 4


def test_rebuilt_arguments_are_alike():
    expanded = torch.ones(3, 1).expand(3, 5)
    strided = torch.ones(4, 6).t()[1:]
    for tensor in (expanded, strided, torch.ones((), dtype=torch.bfloat16), torch.zeros(0, 3), torch.ones(2) > 0):
        made = workspace.rebuild(json.loads(json.dumps(describe(tensor))))
        assert (made.shape, made.stride(), made.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    plain = [None, True, 2, "sum", float("-inf"), [1, [2]]]
    assert workspace.rebuild(json.loads(json.dumps(describe(plain)))) == plain


def test_results_are_kept_on_disk_and_damage_is_no_harm(monkeypatch):
    first = workspace.sizes([convolution()])
    monkeypatch.setattr(workspace, "_KNOWN", {})
    monkeypatch.setattr(workspace, "measure", lambda operator: pytest.fail("measured twice"))
    assert workspace.sizes([convolution()]) == first
    monkeypatch.undo()
    place = workspace.cache_file()
    place.parent.mkdir(parents=True, exist_ok=True)
    for damage in ("{", "[]", '{"a": "b"}'):
        place.write_text(damage)
        monkeypatch.setattr(workspace, "_KNOWN", {})
        assert workspace.sizes([convolution()]) == first


def test_too_large_is_extrapolated_from_two_small_ones():
    large = {**convolution(64), "flops": 10**12}
    sizes = workspace.sizes([large], [[convolution(2)], [convolution(3)]])
    assert sizes[0] == pytest.approx(workspace.measure(convolution(64)), rel=0.02)


def test_an_operator_that_needs_values_counts_nothing():
    assert workspace.measure(operator("aten.linalg_cholesky_ex.default", torch.zeros(3))) == 0


def test_a_kernel_that_does_not_survive_made_up_inputs_does_not_end_the_planner() -> None:
    """An LSTM's kernel reads packed weights by pointer: it is tried in a process of its own."""
    model = torch.nn.LSTM(4, 4, batch_first=True)

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return model(batch["x"])[0].sum(), len(batch["x"])

    subject = Subject(lambda: model, loss, {"x": torch.ones(2, 3, 4)}, rows=2)
    assert forecast(subject, here(1), Plan.of()).peak > 0
