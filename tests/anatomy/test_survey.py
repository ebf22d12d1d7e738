"""Blocks, order, ties, and how the forward ran: our models, eight stock ones, and the odd cases by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fourfold.anatomy import AnatomyError, survey
from fourfold.models import convnet, gpt

BLOCKS = ("blocks.0", "blocks.1")
# Eager experts ask which tokens each got, which neither meta nor fake tensors know.
TRACED = {"mixtral": "real"}
TIES = {
    "gpt2": (("transformer.wte.weight", "lm_head.weight"),),
    "opt": (("model.decoder.embed_tokens.weight", "lm_head.weight"),),
    "bert": (
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
}


def total(model: nn.Module, batch) -> tuple[Tensor, int]:
    return model(batch["x"]).sum(), 1


def test_gpt():
    model = gpt.GPT(gpt.Config(vocabulary=17, context=8, layers=2, width=12, heads=3, dropout=0.1))
    anatomy = survey(model, total, {"x": torch.zeros(2, 8, dtype=torch.long)})
    assert anatomy.traced == "meta" and anatomy.failures == ()
    assert anatomy.blocks == BLOCKS
    assert anatomy.before == ("tokens.weight", "positions.weight")
    assert anatomy.after == ("norm.weight", "norm.bias")
    assert anatomy.ties == (("tokens.weight", "head.weight"),)
    assert anatomy.unused == ()
    assert set(anatomy.order) == {name for name, _ in model.named_parameters()}
    inside = [name for name in anatomy.order if name.startswith("blocks.0.")]
    layers = list(dict.fromkeys(name.rsplit(".", 1)[0].removeprefix("blocks.0.") for name in inside))
    assert layers == ["norm1", "attention.qkv", "attention.project", "norm2", "mlp.expand", "mlp.contract"]


def test_convnet():
    anatomy = survey(convnet.ConvNet(convnet.Config(blocks=3)), total, {"x": torch.zeros(2, 3, 8, 8)})
    assert anatomy.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert set(anatomy.before) == {"stem.weight", "stem.bias"}
    assert set(anatomy.after) == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


def test_stock_architectures(architecture):
    model = architecture.build()
    anatomy = survey(model, architecture.loss, architecture.batch())
    assert anatomy.blocks == (f"{architecture.layers}.0", f"{architecture.layers}.1")
    assert anatomy.unused == ()
    assert set(anatomy.order) == {name for name, _ in model.named_parameters()}
    outside = [name for name, _ in model.named_parameters() if not name.startswith(f"{architecture.layers}.")]
    assert sorted(anatomy.before + anatomy.after) == sorted(outside)
    assert "embed" in anatomy.before[0] or "wte" in anatomy.before[0]
    assert anatomy.traced == TRACED.get(architecture.name, "meta")
    assert len(anatomy.failures) == ("meta", "fake", "real").index(anatomy.traced)
    assert anatomy.ties == TIES.get(architecture.name, ())


class Stack(nn.Module):
    """Layers in a container, run in the order given."""

    def __init__(self, layers: nn.Module, order: list[int]) -> None:
        super().__init__()
        self.first, self.layers, self.order = nn.Linear(4, 4), layers, order
        self.spare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.layers[index](x)  # type: ignore[index]
        return x


def composite() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def found(model: nn.Module) -> tuple[str, ...]:
    return survey(model, total, {"x": torch.zeros(2, 4)}).blocks


def test_blocks_come_in_the_order_of_execution():
    layers = nn.ModuleList(composite() for _ in range(3))
    assert found(Stack(layers, [2, 0, 1])) == ("layers.2", "layers.0", "layers.1")


def test_a_layer_that_is_skipped_is_no_block_and_its_weights_are_unused():
    anatomy = survey(Stack(nn.ModuleList(composite() for _ in range(3)), [0, 2]), total, {"x": torch.zeros(2, 4)})
    assert anatomy.blocks == ("layers.0", "layers.2")
    assert anatomy.unused == (
        *(f"layers.1.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")),
        "spare.weight",
        "spare.bias",
    )


def test_shared_layers_are_no_blocks():
    layers = nn.ModuleList(composite() for _ in range(2))
    assert found(Stack(layers, [0, 1, 0, 1])) == ()


def test_the_outermost_of_nested_containers_counts():
    stages = nn.ModuleList(nn.Sequential(composite(), composite()) for _ in range(2))
    assert found(Stack(stages, [0, 1])) == ("layers.0", "layers.1")


def test_a_wrapper_of_unlike_parts_is_looked_into():
    wrapped = nn.Sequential(nn.Embedding(5, 4), nn.Sequential(composite(), composite()), nn.Linear(4, 5))
    assert survey(wrapped, total, {"x": torch.zeros(2, 3, dtype=torch.long)}).blocks == ("1.0", "1.1")


def test_an_mlp_of_bare_layers():
    assert found(composite()) == ("0", "2")
    model = Stack(nn.ModuleList(composite() for _ in range(2)), [0, 1])
    model.first = composite()  # type: ignore[assignment]
    assert found(model) == ("layers.0", "layers.1"), "a bare MLP beside composite blocks is no block"


def test_without_blocks_everything_is_after():
    anatomy = survey(nn.Linear(4, 2), total, {"x": torch.zeros(2, 4)})
    assert (anatomy.blocks, anatomy.before) == ((), ())
    assert set(anatomy.after) == {"weight", "bias"}


class OnCpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.constant = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + torch.arange(4.0, device="cpu") + self.constant


class ByValue(OnCpu):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if (x >= 0).all() else x


@pytest.mark.parametrize("model, traced", [(OnCpu(), "fake"), (ByValue(), "real")])
def test_what_meta_cannot_run_falls_back_and_says_so(model: nn.Module, traced: str):
    anatomy = survey(model, total, {"x": torch.zeros(2, 4)})
    assert anatomy.traced == traced
    assert [line.split(":")[0] for line in anatomy.failures] == {"fake": ["meta"], "real": ["meta", "fake"]}[traced]
    assert anatomy.order == ("weight",)


def test_the_model_is_left_as_it_was():
    """Running statistics, the mode and the hooks stay, even when the forward has to run for real."""

    class Norm(ByValue):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x))

    model = Norm().eval()
    assert survey(model, total, {"x": torch.rand(8, 4)}).traced == "real"
    assert model.norm.num_batches_tracked == 0 and not model.training
    assert not model.norm._forward_hooks and not model.norm._forward_pre_hooks


def test_a_parameter_read_by_a_custom_function_is_used():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

    class Model(OnCpu):
        def forward(self, x: Tensor) -> Tensor:
            return Scale.apply(x, self.weight)

    assert survey(Model(), total, {"x": torch.zeros(2, 4)}).order == ("weight",)


class Reads(Stack):
    """Three blocks; `read` is called with the model and block 0's input once block 1 is there to be read."""

    def __init__(self, read) -> None:
        super().__init__(nn.ModuleList(composite() for _ in range(3)), [])
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):  # type: ignore[arg-type]
            x = layer(x + self.read(self, x) if number == 2 else x)
        return x


def outside(read=lambda model, x: 0, loss=total) -> tuple[str, ...]:
    return survey(Reads(read), loss, {"x": torch.zeros(2, 4)}).read_outside


def test_weights_read_where_they_belong_are_not_read_outside():
    assert outside() == ()
    assert outside(lambda model, x: model.first(x)) == ()


@pytest.mark.parametrize(
    "read",
    [
        lambda model, x: x @ model.layers[0][0].weight,
        lambda model, x: x @ model.layers[0][0].weight.t(),
        lambda model, x: model.layers[0][0].weight[1],
        lambda model, x: model.layers[0][0].weight.data.sum(),
    ],
)
def test_a_weight_read_between_blocks_and_by_a_view(read):
    assert outside(read) == ("layers.0.0.weight",)


def test_a_view_made_inside_and_read_outside():
    def keep(layer, args, result):
        layer.view = layer.weight.t()

    model = Reads(lambda model, x: x @ model.layers[0][0].view)
    model.layers[0][0].register_forward_hook(keep)  # type: ignore[index]
    assert survey(model, total, {"x": torch.zeros(2, 4)}).read_outside == ("layers.0.0.weight",)


def test_a_hook_of_a_block_runs_outside_of_it():
    model = Reads(lambda model, x: 0)
    model.layers[1].register_forward_hook(lambda block, args, result: result * block[2].bias)  # type: ignore[index]
    assert survey(model, total, {"x": torch.zeros(2, 4)}).read_outside == ("layers.1.2.bias",)


def test_a_penalty_in_the_loss_reads_the_weights_of_all_blocks():
    def penalised(model: nn.Module, batch) -> tuple[Tensor, int]:
        return total(model, batch)[0] + sum(p.square().sum() for p in model.parameters()), 1

    assert set(outside(loss=penalised)) == {name for name, _ in Reads(None).named_parameters() if "layers." in name}


def test_a_forward_that_never_runs_says_its_own_error():
    class Broken(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            raise RuntimeError("no such road")

    with pytest.raises(AnatomyError, match="Broken does not run on its own batch, .*: RuntimeError: no such road"):
        survey(Broken(4, 4), total, {"x": torch.zeros(2, 4)})


def test_a_loss_that_takes_gradients_itself():
    """Without a graph it could not run; the survey notices, and makes one."""

    def penalised(model: nn.Module, batch) -> tuple[Tensor, int]:
        x = batch["x"].requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum(), 1

    def backward(model: nn.Module, batch) -> tuple[Tensor, int]:
        model(batch["x"]).sum().backward()
        return total(model, batch)

    def hooked(model: nn.Module, batch) -> tuple[Tensor, int]:
        y = model(batch["x"])
        y.register_hook(lambda gradient: gradient)
        return y.sum(), 1

    model = composite()
    for loss in (penalised, backward, hooked):
        anatomy = survey(model, loss, {"x": torch.zeros(2, 4)})
        assert anatomy.traced == "meta" and anatomy.failures == ()
        assert set(anatomy.order) == {name for name, _ in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
