"""Where the rows lie in what is dropped from: each case by hand. Tensors are [2 rows, 5 times, 8 features]."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.anatomy import Anatomy, survey
from fourfold.models.gpt import GPT, Config
from fourfold.randomness import Layout

SECOND, FASTEST = Layout(1, "slowest"), Layout(0, "fastest")
SHARED, APART = Layout(0, "shared"), Layout(0, "apart")


def total(model: nn.Module, batch) -> tuple[Tensor, int]:
    return model(batch["x"]).sum(), 1


def drop(x: Tensor) -> Tensor:
    return F.dropout(x, 0.2)


class Model(nn.Module):
    """A forward of one's own, with a few layers at hand."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.1)

    def order(self, x: Tensor) -> Tensor:
        """Time × rows, as indices of rows × time."""
        return torch.arange(x[..., 0].numel()).view(x.shape[:2]).t().reshape(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def surveyed(function: Callable, batch: dict[str, Tensor] | None = None) -> Anatomy:
    return survey(Model(function), total, batch or {"x": torch.randn(2, 5, 8, generator=torch.Generator())})


def inverse(order: Tensor) -> Tensor:
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order))
    return result


def unsorted(x: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
    order = x[:, 0, 0].argsort()
    return (x[order // 1] * 2)[back(order)]


CASES: dict[str, tuple[Callable, Layout | None]] = {
    "whole rows": (lambda m, x: drop(x), None),
    "rows × time": (lambda m, x: drop(x.reshape(-1, 8)), None),
    "rows × heads": (lambda m, x: drop(x.view(-1, 5, 2, 4).transpose(1, 2).reshape(-1, 5, 4)), None),
    "rows × copies": (lambda m, x: drop(x.repeat_interleave(3, 0)), None),
    "rows × stacked": (lambda m, x: drop(torch.stack([x, x], 1).flatten(0, 1)), None),
    "time, rows": (lambda m, x: drop(x.transpose(0, 1)), SECOND),
    "time × rows": (lambda m, x: drop(m.linear(x.transpose(0, 1).reshape(-1, 8))), FASTEST),
    "time × rows, later": (lambda m, x: drop(x.transpose(0, 1).reshape(-1, 8).unsqueeze(1).relu()), FASTEST),
    "two views": (lambda m, x: drop(torch.cat([x, x + 1])), FASTEST),
    "copies × rows": (lambda m, x: drop(x.repeat(3, 1, 1)), FASTEST),
    "stacked × time × rows": (lambda m, x: drop(torch.stack([x, x]).transpose(1, 2).reshape(-1, 8)), FASTEST),
    "features, time, rows": (lambda m, x: drop(x.transpose(0, 2)), Layout(2, "slowest")),
    "a weight": (lambda m, x: x @ drop(m.linear.weight), SHARED),
    "a number": (lambda m, x: x * drop(m.linear.bias.sum()), SHARED),
    "stacked × rows × time": (lambda m, x: drop(torch.stack([x, x]).flatten(0, 2)), APART),
    "rows among themselves": (lambda m, x: drop(x[:, 0] @ x[:, 0].t()), APART),
    "a prefix before the rows": (lambda m, x: drop(torch.cat([x.new_zeros(3, 5, 8), x])), APART),
    "by value": (lambda m, x: drop(x[x[..., 0] > 0]), APART),
    "positions of 22": (lambda m, x: x + drop(x.new_ones(22, 8))[:5], SHARED),
    "sorted": (lambda m, x: drop(x[x[:, 0, 0].argsort()]), APART),
    "sorted, later": (lambda m, x: m.linear(drop(m.linear(x[x[:, 0, 0].argsort()]) + 1)), APART),
    "sorted and put back": (
        lambda m, x: drop(torch.zeros_like(x).index_add_(0, x[:, 0, 0].argsort(), x[x[:, 0, 0].argsort()])),
        None,
    ),
    "sorted and unsorted": (lambda m, x: drop(unsorted(x, lambda order: order.argsort())), None),
    "sorted and unsorted, as grouped experts do": (lambda m, x: drop(unsorted(x, inverse)), None),
    "sorted twice": (lambda m, x: drop(unsorted(x, lambda order: order)), APART),
    "dropped while sorted": (lambda m, x: drop(x[x[:, 0, 0].argsort()])[x[:, 0, 0].argsort().argsort()], APART),
    "put by index": (lambda m, x: drop(torch.zeros_like(x).index_copy_(0, x[:, 0, 0].argsort(), x)), APART),
    "flipped rows": (lambda m, x: drop(x.flip(0)), APART),
    "flipped time": (lambda m, x: drop(x.flip(1)), None),
    "rolled rows": (lambda m, x: drop(x.roll(1, 0)), APART),
    "rolled time": (lambda m, x: drop(x.roll(1, 1)), None),
    "gathered rows": (lambda m, x: drop(x.gather(0, x.argsort(0))), APART),
    "gathered time": (lambda m, x: drop(x.gather(1, x.argsort(1))), None),
    "sorted values": (lambda m, x: drop(x.sort(0).values), APART),
    "selected": (lambda m, x: drop(x.reshape(-1, 8).index_select(0, m.order(x))), APART),
    "selected by a view": (
        lambda m, x: drop(x.reshape(-1, 8)[torch.arange(x[..., 0].numel()).view(x.shape[:2]).t()]),
        APART,
    ),
    "strided": (lambda m, x: drop(x.as_strided((5, len(x), 8), (8, 40, 1))), APART),
    "unpadded": (lambda m, x: drop(x[x[..., 0] != 0]), APART),
    "masked": (lambda m, x: drop(x.masked_select(x != 0)), APART),
    "rearranged, channels": (lambda m, x: F.dropout1d(x.flip(0), 0.2), APART),
    "rearranged, attention": (lambda m, x: F.scaled_dot_product_attention(*[x.flip(0)] * 3, dropout_p=0.1), APART),
    "last of each row": (lambda m, x: drop(x[torch.arange(len(x)), x[..., 0].argmax(-1)]), None),
    "a table": (lambda m, x: drop(m.linear.weight[x[..., 0].long() % 8]), None),
    "another tensor": (lambda m, x: drop(x) + x.flip(0), None),
    "a sum": (lambda m, x: drop(x * x.flip(0).sum()), None),
    "a mask": (lambda m, x: drop(x.masked_fill(x[:, :, :1].flip(0) > 0, 0.0)), None),
    "channels": (lambda m, x: F.dropout2d(x.view(-1, 5, 2, 4)), None),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), None),
    "attention, time first": (lambda m, x: m.attention(*[x.transpose(0, 1)] * 3, need_weights=False)[0], None),
    "attention and its weights": (lambda m, x: m.attention(*[x.transpose(0, 1)] * 3)[0], None),
}


@pytest.mark.parametrize("case", CASES)
def test_layouts(case: str):
    function, expected = CASES[case]
    anatomy = surveyed(function)
    assert anatomy.layouts == ({} if expected is None else {"#0": expected})
    assert len(anatomy.dropouts) == 1
    assert bool(anatomy.unknown_rows) == bool(anatomy.inexact) == (expected == APART)


def test_what_cannot_be_told_is_named_with_module_site_and_shapes():
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return drop(x[:, 0] @ x[:, 0].t())

    model = Model(lambda m, x: m.inner(x))
    model.inner = Inner()
    (line,) = survey(model, total, {"x": torch.zeros(2, 5, 8)}).inexact
    assert line.startswith("inner drops out (site #0): its tensor is no whole number of entries of one dim a row")
    assert "(1009, 1009) for 1009 rows, (2018, 2018) for 2018 rows" in line


def test_sites_are_named_as_in_training():
    """Blocks count their own dropouts; around them the block before is part of the name."""
    model = GPT(Config(vocabulary=17, context=8, layers=2, width=12, heads=3, dropout=0.1))

    def backwards(model: nn.Module, batch) -> tuple[Tensor, int]:
        return drop(model(batch["x"]).transpose(0, 1)).sum(), 1

    anatomy = survey(model, backwards, {"x": torch.zeros(1, 8, dtype=torch.long)})
    assert anatomy.layouts == {">blocks.1#0": SECOND}
    assert len(anatomy.dropouts) == 1 + 2 * 3 + 1


def test_real_tensors_are_compared_at_two_numbers_of_rows():
    def by_value(model: nn.Module, x: Tensor) -> Tensor:
        return drop((x if x.sum() > -1e9 else -x).transpose(0, 1))

    anatomy = surveyed(by_value, {"x": torch.ones(1, 5, 8)})
    assert anatomy.traced == "real" and anatomy.layouts == {"#0": SECOND}


def test_a_model_that_fails_with_more_rows_is_named():
    def single(model: nn.Module, x: Tensor) -> Tensor:
        return drop(x if float(x.sum()) > -1e9 and len(x) == 1 else x.view(1, 5, 8))

    anatomy = surveyed(single, {"x": torch.ones(1, 5, 8)})
    (line,) = anatomy.inexact
    assert "runs with 1 row, and fails with 2 rows" in line and anatomy.layouts == {}


def test_a_batch_may_hold_what_has_no_rows():
    def scaled(model: nn.Module, batch) -> tuple[Tensor, int]:
        return (drop(model(batch["x"]).transpose(0, 1)) * batch["scale"] + batch["table"].sum()).sum(), 1

    batch = {"scale": torch.tensor(2.0), "x": torch.zeros(2, 5, 8), "table": torch.ones(7, 3)}
    anatomy = survey(Model(lambda m, x: x), scaled, batch)
    assert anatomy.traced == "meta" and anatomy.layouts == {"#0": SECOND}


def test_which_dropouts_run_must_not_hang_on_values():
    def routed(model: nn.Module, x: Tensor) -> Tensor:
        return sum(drop(x[:, i]) for i in range(5) if x[:, i, 0].sum() > 0)  # type: ignore[return-value]

    x = torch.full((1, 5, 8), -1.0)
    x[0, :3] = 2.0  # three of five run; where all times are as the first, all five
    lines = surveyed(routed, {"x": x}).inexact
    assert [line.split(":")[0] for line in lines] == ["the model drops out (site #0 and 4 more)"]
    assert "which dropouts run, or how many, hangs on the number of rows, on values or chance" in lines[0]


def test_modules_in_evaluation_draw_nothing():
    """A frozen part keeps its mode, as it does in training: its dropouts are no sites."""
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 8), nn.Dropout(0.1))
    model.train()
    model[0].eval()
    anatomy = survey(model, total, {"x": torch.zeros(2, 8)})
    assert [dropout.module for dropout in anatomy.dropouts] == ["2"]


def test_a_loop_over_rows_has_no_sites_of_its_own():
    """Each local row would be "the first", "the second", ... on every rank."""
    anatomy = surveyed(lambda m, x: torch.stack([drop(row) for row in x]))
    assert set(anatomy.layouts.values()) == {APART} and {"#0", "#1", "#1008"} <= set(anatomy.layouts)
    (line,) = anatomy.inexact
    assert line.startswith("the model drops out (site #0 and 2017 more): which dropouts run, or how many, hangs on")


def test_a_loop_over_rows_that_holds_rows():
    anatomy = surveyed(lambda m, x: sum(drop(x * row) for row in x))
    assert set(anatomy.layouts.values()) == {APART} and len(anatomy.inexact) == 1


def test_a_loop_over_time_is_as_long_for_any_rows():
    anatomy = surveyed(lambda m, x: torch.stack([drop(x[:, time]) for time in range(x.shape[1])], 1))
    assert anatomy.layouts == {} and len(anatomy.dropouts) == 5 and anatomy.inexact == ()


def test_after_a_loop_over_rows_nothing_is_sure():
    anatomy = surveyed(lambda m, x: drop((x + sum(drop(row) for row in x)).transpose(0, 1)))
    assert anatomy.layouts["#1009"] == anatomy.layouts["#2018"] == APART


class Experts(nn.Module):
    """Rows of an expert are chosen by value; an expert without rows does not run."""

    def forward(self, x: Tensor) -> Tensor:
        result, chosen = torch.zeros_like(x), (x[..., 0] > 0).long()
        for expert in range(3):
            rows, times = torch.where(chosen == expert)
            if len(rows):
                result.index_put_((rows, times), drop(x[rows, times]), accumulate=True)
        return drop(result)


def test_experts_chosen_by_value_and_what_follows_them():
    model = Model(lambda m, x: drop(m.experts(drop(x)).transpose(0, 1)))
    model.experts = Experts()
    # Both experts have as many tokens in either forward, or one expert's count is that of the rows.
    batch = {"x": torch.ones(2, 5, 8)}
    batch["x"][0, :2] = -1.0
    anatomy = survey(model, total, batch)
    assert anatomy.traced == "real"
    assert anatomy.layouts == {f"#{ordinal}": APART for ordinal in range(1, 5)}
    lines = anatomy.inexact
    assert "experts drops out (site #1 and 1 more): rows were rearranged by index in experts" in lines[0]
    assert "how many dropouts run before it may hang on values" in lines[1]
