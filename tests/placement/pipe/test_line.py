"""Stages one after the other, in one process, are the whole model, whatever the model's code does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy import survey
from fourfold.anatomy.layers import INSIDE, Layers, Value, layers
from fourfold.models.convnet import Config as ConvConfig
from fourfold.models.convnet import ConvNet
from fourfold.models.gpt import GPT, Config
from fourfold.placement.pipe.bundle import Bundle, gradients
from fourfold.placement.pipe.line import Line
from fourfold.placement.refusals import PlacementError
from fourfold.training.losses.cross_entropy import cross_entropy

Loss = Callable[[nn.Module, dict[str, Tensor]], Any]


def whole(model: nn.Module, loss: Loss, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    with randomness.at(randomness.Position(1, 0, 0, 2)), randomness.inside(model, ""):
        total, _ = loss(model, batch)
    total.backward()
    return total.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def scoped(model: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """A copy whose blocks draw in scopes of their own, as those of a placed model."""

    def forward(path: str, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with randomness.inside(block, path):
            return inner(*args, **kwargs)

    model = copy.deepcopy(model)
    for path in blocks:
        block = model.get_submodule(path)
        block.forward = partial(forward, path, block, block.forward)
    return model


def in_stages(model: nn.Module, loss: Loss, batch: dict[str, Tensor], bounds: list[int], line: Layers, blocks: Any):
    """Every stage on a copy of its own, all weights but its own set to NaN."""
    grads: dict[str, Tensor] = {}
    stages = []
    for number in range(len(bounds) - 1):
        mine = scoped(model, blocks)
        keep = line.weights(bounds[number], bounds[number + 1])
        with torch.no_grad():
            for name, weight in mine.named_parameters():
                if name not in keep:
                    weight.fill_(float("nan"))
        stages.append((mine, Line(mine, line, bounds, blocks)))
    given, kept = None, []
    for number, (mine, gates) in enumerate(stages):
        with randomness.at(randomness.Position(1, 0, 0, 2)), randomness.inside(mine, ""):
            result = gates.run(number, lambda mine=mine: loss(mine, batch), given)
        kept.append((given, result))
        if isinstance(result, Bundle):
            words = result.described()
            assert words.numel() == result.words
            given = Bundle.of(words, [value.detach() for value in result.values], line.crossing(bounds[number + 1]))
            assert given.looks == result.looks
    total = kept[-1][1][0]
    total.backward()
    back = gradients(kept[-1][0].values) if kept[-1][0] is not None else ()
    for given, result in reversed(kept[:-1]):
        pairs = [(v, g) for v, g in zip(result.values, back, strict=True) if v.requires_grad and g is not None]
        torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
        back = gradients(given.values) if given is not None else ()
    for mine, _ in stages:
        for name, weight in mine.named_parameters():
            if weight.grad is not None:
                grads[name] = grads[name] + weight.grad if name in grads else weight.grad
    return total.detach(), grads


def tiny(kind: str) -> tuple[nn.Module, Loss, dict[str, Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (2, 9))
    common: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    common["intermediate_size"] = 24
    if kind == "gpt":
        return GPT(Config(50, 16, 3, 16, 2, dropout=0.2, tied=True)), cross_entropy, {"tokens": tokens}
    if kind == "convnet":
        batch = {"images": torch.randn(2, 3, 5, 5, dtype=torch.float64), "labels": torch.tensor([1, 2])}
        return ConvNet(ConvConfig(width=8, blocks=3, groups=2)), _classes("images"), batch
    if kind == "vit":
        config = transformers.ViTConfig(
            **{key: value for key, value in common.items() if key != "vocab_size"}, image_size=8, patch_size=4
        )
        batch = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64), "labels": torch.tensor([1, 0])}
        return transformers.ViTForImageClassification(config), _classes("pixel_values"), batch
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**common)), _masked, {"tokens": tokens}
    if kind == "t5":
        config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, num_heads=2, d_ff=24, num_layers=2)
        return transformers.T5ForConditionalGeneration(config), _translated, {"tokens": tokens}
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=16)
        return transformers.GPT2LMHeadModel(config), cross_entropy, {"tokens": tokens}
    more: dict[str, Any] = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    if kind == "OPT":
        common |= {"ffn_dim": common.pop("intermediate_size"), "word_embed_proj_dim": 16}
        more: dict[str, Any] = {"max_position_embeddings": 32}
    if kind == "Mixtral":
        more |= {"num_local_experts": 2, "experts_implementation": "eager"}
    config = getattr(transformers, f"{kind}Config")(**common, **more)
    return transformers.AutoModelForCausalLM.from_config(config), cross_entropy, {"tokens": tokens}


def _classes(name: str) -> Loss:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        out = model(batch[name])
        return F.cross_entropy(getattr(out, "logits", out), batch["labels"], reduction="sum"), len(batch["labels"])

    return loss


def _masked(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(batch["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="sum"), batch["tokens"].numel()


def _translated(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(input_ids=batch["tokens"], decoder_input_ids=batch["tokens"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="sum"), batch["tokens"].numel()


KINDS = ("gpt", "convnet", "gpt2", "vit", "bert", "t5", "Llama", "Mistral", "Qwen3", "OPT", "Mixtral")


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_gives_the_whole_models_gradients(kind: str) -> None:
    model, loss, batch = tiny(kind)
    model = model.double().train()
    anatomy = survey(model, loss, batch)
    line = layers(model, loss, batch, anatomy.blocks)
    assert not line.looks
    total, expected = whole(scoped(model, anatomy.blocks), loss, batch)
    cuts = [[0, cut, len(line)] for cut in range(1, len(line))] + [list(range(len(line) + 1))]
    for bounds in cuts:
        found, grads = in_stages(model, loss, batch, bounds, line, anatomy.blocks)
        assert torch.allclose(found, total, rtol=1e-12, atol=0), bounds
        assert grads.keys() == expected.keys(), bounds
        for name, gradient in grads.items():
            assert (gradient - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), (bounds, name)


class Skips(nn.Module):
    """A U: what early layers give is read again by late ones, and the loss reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.a(x) + self.shift)
        b = torch.tanh(self.b(a))
        return self.d(torch.tanh(self.c(b)) + a * self.shift)


def _squared(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["x"]) ** 2).sum(), len(batch["x"])


def test_skip_connections_cross_every_cut_between() -> None:
    model, batch = Skips().double(), {"x": torch.randn(3, 4, dtype=torch.float64)}
    line = layers(model, _squared, batch, ())
    assert [layer.path for layer in line.calls] == ["a", "b", "c", "d"]
    assert [line.crossing(cut) for cut in range(5)] == [
        (),
        (Value(0, 0),),
        (Value(0, 0), Value(1, 0)),
        (Value(0, 0), Value(2, 0)),
        (Value(3, 0),),
    ]
    assert line.weights(2, 4) == {"c.weight", "c.bias", "d.weight", "d.bias", "shift"}
    total, expected = whole(copy.deepcopy(model), _squared, batch)
    found, grads = in_stages(model, _squared, batch, [0, 1, 2, 3, 4], line, ())
    assert torch.equal(found, total)
    for name, gradient in grads.items():
        assert (gradient - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


class Keeps(nn.Linear):
    """What it makes inside gets out by an attribute."""

    def forward(self, input: Tensor) -> Tensor:
        self.kept = input * 2
        return super().forward(self.kept)


class Leaky(Skips):
    def __init__(self) -> None:
        super().__init__()
        self.a = Keeps(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.d(self.c(self.b(y)) + self.a.kept)


def test_what_leaves_a_layer_by_another_way_is_seen() -> None:
    line = layers(Leaky(), _squared, {"x": torch.randn(3, 4)}, ())
    assert Value(0, INSIDE) in line.calls[3].needs


class Hooked(Skips):
    """A hook is code of the model's between layers: it runs again."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        handle = self.a.register_forward_hook(lambda module, args, out: kept.append(out * 2) or out + 1)
        y = self.b(self.a(x))
        handle.remove()
        return self.d(self.c(y) + kept[0])


def test_hooks_run_again_behind_a_cut() -> None:
    model, batch = Hooked().double(), {"x": torch.randn(3, 4, dtype=torch.float64)}
    line = layers(model, _squared, batch, ())
    total, expected = whole(copy.deepcopy(model), _squared, batch)
    found, grads = in_stages(model, _squared, batch, [0, 1, 2, 3, 4], line, ())
    assert torch.equal(found, total)
    for name, gradient in grads.items():
        assert (gradient - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max(), name


class Looks(Skips):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = self.b(y)
        y += 1
        return self.d(self.c(y))


def test_code_that_looks_at_values_between_layers_is_named() -> None:
    line = layers(Looks(), _squared, {"x": torch.randn(3, 4)}, ())
    assert line.looks[0] == "__bool__ after a"
    assert any("(in place) after" in one for one in line.looks)


def test_another_sequence_of_layers_is_refused_by_name() -> None:
    model, batch = Skips(), {"x": torch.randn(3, 4)}
    line = layers(model, _squared, batch, ())
    gates = Line(model, line, [0, 2, 4], ())
    model.b.forward, model.c.forward = model.c.forward, model.b.forward
    with pytest.raises(PlacementError, match="layer 1 of the model: expected b, as when it was surveyed, found c"):
        gates.run(0, lambda: _squared(model, batch), None)
