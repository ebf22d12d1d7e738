"""The oracle of the exactness tests: a plain loop in one process, and the same work on a plan's ranks.

Nothing here knows of arenas, units or shards: a plain model, a plain optimizer, the loss divided by its count.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fourfold import wire
from fourfold.anatomy import survey
from fourfold.ledger import Flow, Traffic
from fourfold.models.gpt import GPT, Config
from fourfold.plan import Plan
from fourfold.randomness import Position, at, inside
from fourfold.training.losses.cross_entropy import cross_entropy
from fourfold.training.optimizer import OptimizerOptions, build_plain
from fourfold.training.run import Run, parallelize

torch.set_num_threads(1)  # as ranks have: with more, sums inside a matrix product are taken in another order

VOCABULARY = 37
SGD = OptimizerOptions(name="sgd", lr=0.3, momentum=0.9, weight_decay=0.01, clip=1.0)
"""A large step, so that no error of scale hides; an Adam would hide it."""


@dataclass(frozen=True)
class Work:
    """What is trained. `model` is built once and copied: ranks as threads would race for torch's generator."""

    model: nn.Module
    rows: int = 5
    sequence: int = 12
    steps: int = 4
    options: OptimizerOptions = SGD
    loss: Callable[..., Any] = cross_entropy
    prepare: Callable[[nn.Module], None] = lambda model: None

    def fresh(self) -> nn.Module:
        """A copy of the model, in training."""
        model = copy.deepcopy(self.model).train()
        self.prepare(model)
        return model

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step; some targets are ignored, unevenly over the rows."""
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCABULARY, (self.rows, self.sequence), generator=generator)
        targets = torch.randint(VOCABULARY, (self.rows, self.sequence), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        return {"tokens": tokens, "targets": targets}


@dataclass
class Outcome:
    """What a run came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    """Of the optimizer, under "exp_avg.<weight>" and the like; filled by `serial` alone."""
    predicted: dict[Flow, Traffic] = field(default_factory=dict)
    measured: dict[Flow, Traffic] = field(default_factory=dict)


@functools.cache
def gpt(dropout: float = 0.0, tied: bool = True, dtype: torch.dtype = torch.float64) -> GPT:
    """A tiny GPT whose sizes do not divide by 2, 3 or 4 ranks everywhere, with biases off zero."""
    torch.manual_seed(0)
    model = GPT(Config(VOCABULARY, context=16, layers=3, width=12, heads=3, hidden=30, dropout=dropout, tied=tied))
    return disturbed(model.to(dtype))


def disturbed(model: Any) -> Any:
    """Every parameter moved off its initial value, so that no zero hides an error."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype) * 0.05)
    return model


@functools.cache
def serial(work: Work) -> Outcome:
    """A plain process; taken once for equal work (of the same model object), however many plans it is compared with."""
    model, outcome = work.fresh(), Outcome()
    anatomy = survey(model, work.loss, work.batch(0))
    for path in anatomy.blocks:
        _scope(model.get_submodule(path), path)
    optimizer = build_plain(work.options, model.named_parameters())
    for step in range(work.steps):
        optimizer.zero_grad()
        with ExitStack() as stack:
            stack.enter_context(at(Position(1, step, 0, work.rows, anatomy.layouts)))
            stack.enter_context(inside(model, ""))
            total, count = work.loss(model, work.batch(step))
        total.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= float(count)
        norm = None
        if work.options.clip is not None:
            trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
            norm = float(nn.utils.clip_grad_norm_(trained, work.options.clip, norm_type=work.options.clip_norm))
        optimizer.step(optimizer.rate(step))
        outcome.losses.append(float(total.detach()) / float(count))
        outcome.norms.append(norm)
    for name, parameter in model.named_parameters():
        outcome.weights[name] = parameter.detach().clone()
        if parameter.requires_grad:
            outcome.gradients[name] = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            ).clone()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, state in zip(trained, optimizer.state_dict(), strict=True):
        outcome.moments |= {f"{kind}.{name}": state[kind].clone() for kind in optimizer.state_names}
    return outcome


def _scope(module: nn.Module, path: str) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with inside(module, path):
            return inner(*args, **kwargs)

    module.forward = forward


def rank(
    world: wire.World, work: Work, plan: Mapping[str, Any], during: Callable[[Run], None] | None = None
) -> Outcome:
    """One rank of a plan."""
    run = parallelize(work.fresh(), work.loss, work.options, plan, world=world, seed=1)
    outcome = Outcome()
    for step in range(work.steps):
        result = run.step(work.batch(step))
        outcome.losses.append(result.loss)
        outcome.norms.append(result.gradient_norm)
        if during is not None:
            during(run)
    outcome.weights, outcome.gradients = run.logical_state(), run.logical_gradients()
    outcome.predicted = run.forecast().traffic()
    outcome.measured = run.ledger.traffic(work.steps - 1)
    run.close()
    return outcome


def on_threads(work: Work, plan: Mapping[str, Any], **settings: Any) -> list[Outcome]:
    """All ranks of a plan, as threads."""
    return wire.threads.launch(Plan.of(plan).world, functools.partial(rank, **settings), work, plan)


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest |a - b| relative to the largest |b| of its layer (a parameter's module); names must agree."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    scale: dict[str, float] = {}
    for name, tensor in expected.items():
        layer = name.rpartition(".")[0]
        scale[layer] = max(scale.get(layer, 0.0), float(tensor.abs().max()))
    return max(
        float((found[name] - tensor).abs().max()) / (scale[name.rpartition(".")[0]] or 1.0)
        for name, tensor in expected.items()
    )


def forgive_routing(found: Outcome) -> None:
    """How many experts a token's router finds hangs on values: messages are cut otherwise, and their sum hardly."""
    for flow, predicted in found.predicted.items():
        if flow.axis in ("x", "y"):
            assert abs(found.measured[flow].bytes - predicted.bytes) <= 1e-3 * predicted.bytes
            found.measured[flow] = predicted


def assert_equal(found: Outcome, expected: Outcome, tolerance: float = 1e-12) -> None:
    """Losses, gradients and weights agree, and every byte was predicted."""
    for mine, plain in zip(found.losses, expected.losses, strict=True):
        assert abs(mine - plain) <= tolerance * abs(plain), (found.losses, expected.losses)
    for norm, plain_norm in zip(found.norms, expected.norms, strict=True):
        if plain_norm is not None:
            assert norm is not None and abs(norm - plain_norm) <= tolerance * plain_norm * 10
    assert worst(found.gradients, expected.gradients) <= tolerance
    assert worst(found.weights, expected.weights) <= tolerance
    flows = found.measured.keys() | found.predicted.keys()
    both = {flow: (found.measured.get(flow), found.predicted.get(flow)) for flow in flows}
    assert {flow: pair for flow, pair in both.items() if pair[0] != pair[1]} == {}


class _Wide(TorchFunctionMode):
    """Casts to float32 leave float64 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "float" and args[0].dtype == torch.float64:
            return args[0]
        if name in ("to", "type"):
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def lift_casts(model: nn.Module, *more: str) -> None:
    """Norms, rotary tables and routers of stock models compute in float32 whatever they are given; here in float64.

    Args:
        more: how the names of other classes end whose casts are lifted.
    """
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding", "Router", *more)):
            _lift(module)


def _lift(module: nn.Module) -> None:
    """By its class: a forward on the instance would be the original's in every copy of the module."""
    plain = type(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Wide():
            return plain.forward(self, *args, **kwargs)

    module.__class__ = type(plain.__name__, (plain,), {"forward": forward})


@functools.cache
def stock(name: str, dropout: float = 0.1) -> nn.Module:
    """A tiny stock transformer in float64: llama, qwen3, mistral, mixtral, gpt2, opt, bert or vit."""
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
    }
    shape |= {"max_position_embeddings": 32}
    grouped: dict[str, Any] = {"intermediate_size": 40, "num_key_value_heads": 2, "attention_dropout": dropout}
    plain: dict[str, Any] = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    dropped: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    both: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    both |= {"intermediate_size": 40}
    pictures: dict[str, Any] = {"image_size": 12, "patch_size": 4, "num_labels": VOCABULARY, "qkv_bias": True}
    experts: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2}
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**shape, **grouped),
        "qwen3": lambda: transformers.Qwen3Config(**shape, **grouped, head_dim=6),
        "mistral": lambda: transformers.MistralConfig(**shape, **grouped),
        "mixtral": lambda: transformers.MixtralConfig(**shape, **grouped, **experts),
        "gpt2": lambda: transformers.GPT2Config(**plain, **dropped),
        "opt": lambda: transformers.OPTConfig(
            **shape, ffn_dim=40, word_embed_proj_dim=24, attention_dropout=dropout, dropout=dropout
        ),
        "bert": lambda: transformers.BertConfig(**shape, **both),
        "vit": lambda: transformers.ViTConfig(**shape, **both, **pictures),
    }
    kinds = {"bert": transformers.AutoModelForMaskedLM, "vit": transformers.AutoModelForImageClassification}
    settings: dict[str, Any] = {"attn_implementation": "sdpa"}
    settings |= {"experts_implementation": "eager"} if name == "mixtral" else {}
    torch.manual_seed(0)
    model = kinds.get(name, transformers.AutoModelForCausalLM).from_config(configs[name](), **settings)
    return disturbed(model.double())


@dataclass(frozen=True)
class Pictures(Work):
    """Small pictures to classify."""

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(1000 + step)
        pixels = torch.randn(self.rows, 3, 12, 12, generator=generator, dtype=torch.float64)
        return {"pixels": pixels, "labels": torch.randint(VOCABULARY, (self.rows,), generator=generator)}


def picture_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Cross-entropy of the classes."""
    logits = model(batch["pixels"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


def stock_work(name: str, dropout: float = 0.1, **settings: Any) -> Work:
    """Training of a stock model with the casts lifted."""
    about: dict[str, Any] = {"prepare": lift_casts, **settings}
    if name == "vit":
        return Pictures(stock(name, dropout), loss=picture_loss, **about)
    return Work(stock(name, dropout), **about)


def at_rest(run: Run) -> int:
    """Bytes of every storage that the run keeps between steps."""
    step = run._step
    assert step is not None
    tensors = list(run.model.buffers())
    for unit in step.placed.units:
        arena = unit.arena
        tensors += [arena.shard, arena.gradient, arena.full, *([arena.rest] if arena.rest is not None else [])]
    for state in step.optimizer.state_dict():
        tensors += state.values()
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(held.values())
