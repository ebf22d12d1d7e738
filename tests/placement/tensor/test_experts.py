"""Experts of every kind on every algorithm: by themselves against all in one process, and in stock models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fourfold import wire
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor import cube, plane, sequence, traffic
from fourfold.placement.tensor.executor import Switch
from fourfold.placement.tensor.experts import Exchange, Experts, ExpertsExecutor, Layer
from fourfold.placement.tensor.partials import Partials
from fourfold.training.losses.cross_entropy import summed
from fourfold.wire import ops
from fourfold.wire.errors import RankFailed
from plain import VOCABULARY, Work, _lift, assert_equal, disturbed, forgive_routing, lift_casts, on_threads, serial

from .grids import close, draw, part

ROWS, STEPS, WIDTH, INNER, EXPERTS, CHOICES = 6, 7, 9, 8, 3, 2
TOKENS = ROWS * STEPS
EIGHT = 8
"""Bytes of a float64."""


class Mixture(nn.Module):
    """Experts of two layers with biases; `way` is how they are multiplied."""

    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor

    def __init__(self, way: str, parts: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.way: str = way
        for name, tensor in parts.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))

    def forward(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        """[tokens, width], experts and scales [tokens, choices] → [tokens, width]."""
        return getattr(self, self.way)(tokens, chosen, scales)

    def one_by_one(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert in range(EXPERTS):
            at, which = torch.where(chosen == expert)
            inside = torch.tanh(F.linear(tokens[at], self.up[expert], self.up_bias[expert]))
            made = F.linear(inside, self.down[expert]) + self.down_bias[expert]
            found.index_add_(0, at, made * scales[at, which, None])
        return found

    def by_token(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        flat = chosen.reshape(-1)
        every = tokens.repeat_interleave(CHOICES, 0)
        inside = torch.tanh(torch.bmm(self.up[flat], every.unsqueeze(-1)).squeeze(-1) + self.up_bias[flat])
        made = torch.bmm(self.down[flat], inside.unsqueeze(-1)).squeeze(-1) + self.down_bias[flat]
        return (made * scales.reshape(-1, 1)).view(len(tokens), CHOICES, -1).sum(1)

    def all_for_all(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        inside = torch.tanh(torch.matmul(tokens, self.up.transpose(1, 2)) + self.up_bias[:, None])
        made = torch.matmul(inside, self.down.transpose(1, 2)) + self.down_bias[:, None]
        dense = torch.zeros(len(tokens), EXPERTS, dtype=scales.dtype).scatter_add(1, chosen, scales)
        return (made * dense.t()[:, :, None]).sum(0)

    def normed(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        return F.rms_norm(self.one_by_one(tokens, chosen, scales), tokens.shape[-1:])

    def shifted(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        return tokens + self.one_by_one(tokens, chosen, scales)

    def turned(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        return tokens @ self.up.flip(0)[0].t()

    def unseen(self, tokens: Tensor, chosen: Tensor, scales: Tensor) -> Tensor:
        return torch.zeros_like(tokens)


WEIGHTS: dict[str, Tensor] = {
    "up": draw(EXPERTS, INNER, WIDTH, seed=1),
    "up_bias": draw(EXPERTS, INNER, seed=2),
    "down": draw(EXPERTS, WIDTH, INNER, seed=3),
    "down_bias": draw(EXPERTS, WIDTH, seed=4),
}
GIVEN = draw(TOKENS, WIDTH, seed=5)
SCALES = draw(TOKENS, CHOICES, seed=6)
CHOSEN = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(7)).topk(CHOICES).indices
LIES = {"up": {"y": 1, "x": 2}, "up_bias": {"y": 1}, "down": {"y": 2, "x": 1}, "down_bias": {"x": 1}}
"""Along which dim each axis cuts a weight. In `plane` tokens are whole, so that x does not."""


def outcome(module: nn.Module, given: Tensor) -> dict[str, Tensor]:
    """What it makes, and the gradients of a loss with a large gradient."""
    given, scales = given.detach().clone().requires_grad_(), SCALES.clone().requires_grad_()
    found = module(given, CHOSEN, scales)
    (found.square().sum() * 1000).backward()
    grads: dict[str, Any] = {name: weight.grad for name, weight in module.named_parameters()}
    return {"given": given.grad, "scales": scales.grad, "found": found.detach(), **grads}  # type: ignore[dict-item]


def times(tensor: Tensor, mesh: wire.Mesh) -> Tensor:
    """This rank's time steps of tokens."""
    return part(tensor.unflatten(0, (ROWS, STEPS)), {"y": 1}, mesh).flatten(0, 1)


def exchanged(way: str, mesh: wire.Mesh) -> tuple[Exchange, Callable[[Tensor], Tensor]]:
    """Of an algorithm, and what of a tensor of all tokens this rank has in it."""
    y: Any = mesh["y"]
    none: Any = SimpleNamespace(anatomy=None)
    if way == "sequence":
        by_time = sequence.Way(mesh, none)
        by_time.time.rows, by_time.time.steps = ROWS, STEPS
        return by_time.exchange(y, WIDTH), lambda tensor: times(tensor, mesh)
    if way == "cube":
        return cube.Way(mesh, none).exchange(y, WIDTH), lambda tensor: part(tensor, {"y": 0, "x": 1}, mesh)
    if way == "plane":
        return plane.Way(mesh, none).exchange(y, WIDTH), lambda tensor: part(tensor, {"y": 1}, mesh)
    whole = Exchange(lambda tokens: ops.identity_sum(tokens, y), lambda parts: ops.sum_identity(parts, y))
    return whole, lambda tensor: part(tensor, {"x": 1}, mesh)


def executed(mesh: wire.Mesh, how: str, exchange: Exchange) -> Mixture:
    """The experts on this rank's blocks."""
    module = Mixture(how, {name: part(tensor, LIES[name], mesh) for name, tensor in WEIGHTS.items()})
    layers = {"up": Layer.FIRST, "down": Layer.SECOND}
    about = Experts(layers, ("down_bias",), mesh["x"], mesh["y"], module.up.shape[2])
    ExpertsExecutor(Switch(), module, "mlp.experts", about, exchange)
    return module


@pytest.mark.parametrize("how", ["one_by_one", "by_token", "all_for_all"])
@pytest.mark.parametrize(
    ("way", "sizes"),
    [
        ("copies", {"x": 2, "y": 3}),
        ("copies", {"x": 3, "y": 1}),
        ("sequence", {"x": 1, "y": 3}),
        ("cube", {"x": 2, "y": 2}),
        ("plane", {"x": 1, "y": 2}),
    ],
    ids=str,
)
def test_experts_on_blocks_have_the_results_of_one_process(way: str, sizes: dict[str, int], how: str) -> None:
    wanted = outcome(Mixture(how, WEIGHTS), GIVEN)

    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, sizes)
        exchange, own = exchanged(way, mesh)
        found = outcome(executed(mesh, how, exchange), own(GIVEN))
        for name in ("given", "found"):
            close(found[name], own(wanted[name]), wanted[name])
        for name, cut in {**LIES, "scales": {}}.items():
            close(found[name], part(wanted[name], cut, mesh), wanted[name])
        if how == "by_token":
            x, y = mesh["x"], mesh["y"]
            width, inner = wire.formulas.shares(WIDTH, x.size)[x.index], wire.formulas.shares(INNER, y.size)[y.index]
            parts = {
                "sequence": [ROWS * steps * WIDTH for steps in wire.formulas.shares(STEPS, y.size)],
                "cube": [TOKENS // y.size * width] * y.size,
                "plane": [TOKENS * features for features in wire.formulas.shares(WIDTH, y.size)],
            }.get(way)
            formula = traffic.experts(
                *(TOKENS, CHOICES, width, (inner, inner)), outer=x, inner=y, itemsize=EIGHT, parts=parts
            )
            assert sum(formula.sent) == mesh.ledger.sent()

    wire.threads.launch(sizes["x"] * sizes["y"], body)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("normed", "mlp.experts: calls rms_norm on what its experts make, which is a part of a sum"),
        ("shifted", "mlp.experts: calls (__)?add(__)? on what its experts make"),
        ("turned", "mlp.experts: calls flip on the weights of its experts; expected products"),
        ("unseen", "mlp.experts: does not give the sum of its second layers' products"),
    ],
)
def test_what_is_no_sum_of_experts_is_refused(how: str, message: str) -> None:
    def body(world: wire.World) -> None:
        mesh = wire.Mesh(world, {"y": 2})
        with pytest.raises(PlacementError, match=message):
            outcome(executed(mesh, how, exchanged("copies", mesh)[0]), GIVEN)

    wire.threads.launch(2, body)


def test_parts_of_a_sum() -> None:
    partials, scale = Partials(), torch.ones(3)
    part_, other = partials.mark(torch.ones(3)), partials.mark(torch.ones(3))
    nothing = torch.zeros(3)
    partials.note("zeros", (3,), {}, nothing)
    allowed = [("add", (part_, other)), ("mul", (part_, scale)), ("sum", (part_, 0)), ("add_", (nothing, part_))]
    refused = [("add", (part_, scale)), ("add", (part_, 1)), ("mul", (part_, other)), ("tanh", (part_,))]
    assert all(partials.allows(name, args, {}) for name, args in allowed)
    assert not any(partials.allows(name, args, {}) for name, args in refused)
    partials.note("add_", (nothing, scale), {}, nothing)
    assert not partials.allows("add_", (nothing, part_), {})


# ---- stock models


def balanced(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Cross-entropy and the model's own balance loss, of the whole micro-batch."""
    output = model(batch["tokens"], output_router_logits=True, use_cache=False)
    total, count = summed(output.logits, batch["targets"])
    return total + 0.3 * count * output.aux_loss, count


def settled(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Cross-entropy and a penalty on each token's router logits (z-loss), which adds up over ranks."""
    output = model(batch["tokens"], output_router_logits=True, use_cache=False)
    total, count = summed(output.logits, batch["targets"])
    return total + 0.1 * sum(logits.logsumexp(-1).square().sum() for logits in output.router_logits), count


@functools.cache
def stock(name: str, way: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny stock mixture of experts: mixtral, qwen2 and qwen3 (the former with shared experts), gpt_oss."""
    import transformers

    shape: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    shape |= {"intermediate_size": 20, "num_experts_per_tok": 2, "attention_dropout": 0.1}
    many: dict[str, Any] = {"num_experts": 3, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
    windows: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    windows |= {"head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_local_experts": 3}
    configs: dict[str, Callable[[], Any]] = {
        "mixtral": lambda: transformers.MixtralConfig(**shape, num_local_experts=3),
        "qwen2": lambda: transformers.Qwen2MoeConfig(**shape, **many, shared_expert_intermediate_size=18),
        "qwen3": lambda: transformers.Qwen3MoeConfig(**{**shape, **many, "head_dim": 6}),
        "gpt_oss": lambda: transformers.GptOssConfig(**shape, **windows),
    }
    torch.manual_seed(0)
    settings = {} if way == "default" else {"experts_implementation": way}
    return disturbed(transformers.AutoModelForCausalLM.from_config(configs[name](), **settings).to(dtype))


def lifted(model: nn.Module) -> None:
    """Balance losses are computed in float32, too, by the model itself."""
    lift_casts(model)
    _lift(model)


@functools.cache
def work(name: str, way: str, loss: Callable[..., Any]) -> Work:
    return Work(stock(name, way), rows=4, sequence=11, steps=2, loss=loss, prepare=lifted)


def plan(**tensor: Any) -> dict[str, Any]:
    return {"placement": {"precision": "fp64", "tensor": tensor}}


CASES = [
    ("mixtral", "eager", balanced, {"algorithm": "1d-sequence", "y": 2}),
    ("mixtral", "batched_mm", settled, {"algorithm": "3d", "q": 2}),
    ("qwen2", "batched_mm", settled, {"algorithm": "1d-sequence", "y": 2}),
    ("qwen3", "batched_mm", balanced, {"algorithm": "4d", "x": 2, "y": 2}),
    ("gpt_oss", "batched_mm", balanced, {"algorithm": "4d", "x": 2, "y": 2}),
    ("gpt_oss", "eager", settled, {"algorithm": "4d", "y": 2, "z": 2}),
    ("gpt_oss", "batched_mm", settled, {"algorithm": "2d", "q": 2}),
]


def named(value: Any) -> str:
    """For people, and the same in every process of a pool."""
    return value.__name__ if callable(value) else str(value)


@pytest.mark.parametrize(("name", "way", "loss", "tensor"), CASES, ids=named)
def test_stock_mixtures_of_experts_equal_one_process(
    name: str, way: str, loss: Callable[..., Any], tensor: dict[str, Any]
) -> None:
    one = work(name, way, loss)
    for found in on_threads(one, plan(**tensor)):
        if way == "eager":  # how many experts have tokens hangs on values: messages are cut otherwise
            forgive_routing(found)
        assert_equal(found, serial(one))


def test_what_transformers_does_unless_told_otherwise() -> None:
    """`grouped_mm`, which torch has for 32 and 16 bits alone: compared with itself in one process, in 32 bits."""
    model = stock("mixtral", "default", torch.float32)
    assert model.config._experts_implementation == "grouped_mm"  # type: ignore[union-attr]
    one = Work(model, rows=4, steps=2, loss=settled)
    settings = {"placement": {"tensor": {"algorithm": "4d", "x": 2, "y": 2}}}
    for found in on_threads(one, settings):
        assert_equal(found, serial(one), 2e-5)
        assert found.measured == found.predicted


def test_what_a_sequence_cannot_be_dealt_to_is_refused_by_name() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(draw(12, seed=1))

        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1) * self.weight

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.mix = nn.Linear(12, 20), nn.Linear(20, 12), Whole()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(self.mix(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCABULARY, 12), nn.Linear(12, VOCABULARY)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    message = "blocks.0.mix: runs on whole features, and 1d-sequence deals rows or time to blocks"
    with pytest.raises(RankFailed, match=message):
        on_threads(Work(disturbed(Model().double()), steps=1), plan(algorithm="1d-sequence", y=2))
