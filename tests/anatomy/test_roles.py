"""Roles of layers on a tensor grid: written out by hand for each architecture, the first layer standing for all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.anatomy import Anatomy, Dropout, survey
from fourfold.models import convnet, gpt


def total(model: nn.Module, batch) -> tuple[Tensor, int]:
    return model(batch["x"]).sum(), 1


LLAMA = {
    "normal": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"],
    "transposed": ["self_attn.o_proj", "mlp.down_proj"],
    "siblings": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")],
    "norms": {"input_layernorm": "x", "post_attention_layernorm": "x"},
    "head": ("lm_head.weight", "normal"),
}
EXPECTED: dict[str, dict] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": {**LLAMA, "norms": {**LLAMA["norms"], "self_attn.q_norm": "y", "self_attn.k_norm": "y"}},
    "mixtral": {
        **LLAMA,
        "normal": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate", "mlp.experts.gate_up_proj"],
        "transposed": ["self_attn.o_proj", "mlp.experts.down_proj"],
        "siblings": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")],
    },
    "gpt2": {
        "normal": ["attn.c_attn", "mlp.c_fc"],
        "transposed": ["attn.c_proj", "mlp.c_proj"],
        "siblings": [],
        "norms": {"ln_1": "x", "ln_2": "x"},
        "head": ("transformer.wte.weight", "normal"),
    },
    "opt": {
        "normal": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"],
        "transposed": ["self_attn.out_proj", "fc2"],
        "siblings": [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")],
        "norms": {"self_attn_layer_norm": "x", "final_layer_norm": "x"},
        "head": ("model.decoder.embed_tokens.weight", "normal"),
    },
    "bert": {
        "normal": ["attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"],
        "transposed": ["attention.output.dense", "output.dense"],
        "siblings": [("attention.self.query", "attention.self.key", "attention.self.value")],
        "norms": {"attention.output.LayerNorm": "x", "output.LayerNorm": "x"},
        "head": ("bert.embeddings.word_embeddings.weight", "transposed"),  # its norm lies over y: decoder y → x
    },
    "vit": {
        "normal": ["attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"],
        "transposed": ["attention.o_proj", "mlp.fc2"],
        "siblings": [("attention.q_proj", "attention.k_proj", "attention.v_proj")],
        "norms": {"layernorm_before": "x", "layernorm_after": "x"},
        "head": ("classifier.weight", "normal"),
    },
}


def in_block(names, block: str) -> list[str]:
    cut = [name.removeprefix(f"{block}.").removesuffix(".weight") for name in names if name.startswith(f"{block}.")]
    return sorted(cut)


def test_stock_architectures(architecture):
    anatomy = survey(architecture.build(), architecture.loss, architecture.batch())
    expected = EXPECTED[architecture.name]
    for block in anatomy.blocks:
        for role in ("normal", "transposed"):
            found = [name for name, linear in anatomy.linears.items() if linear.role == role]
            assert in_block(found, block) == sorted(expected[role])
        siblings = [tuple(n.removeprefix(f"{block}.").removesuffix(".weight") for n in g) for g in anatomy.siblings]
        assert [group for group in siblings if not group[0].startswith(architecture.layers)] == expected["siblings"]
        norms = {path.removeprefix(f"{block}."): axis for path, axis in anatomy.norms.items() if path.startswith(block)}
        assert norms == expected["norms"]
    head, role = expected["head"]
    assert anatomy.linears[head].role == role
    layouts = {linear.layout for name, linear in anatomy.linears.items() if name.startswith(architecture.layers)}
    assert layouts == {"in,out" if architecture.name == "gpt2" else "out,in"}
    assert set(anatomy.embeddings.values()) <= {"x"}


def test_problems_are_the_router_and_the_experts_alone(architecture):
    anatomy = survey(architecture.build(), architecture.loss, architecture.batch())
    where = {line.split(":")[0].split(".mlp.")[-1] for line in anatomy.problems}
    assert where == ({"gate", "experts"} if architecture.name == "mixtral" else set())


def test_raw_parameters_and_odd_heads(architecture):
    anatomy = survey(architecture.build(), architecture.loss, architecture.batch())
    raw = {"vit": {"vit.embeddings.cls_token": "x", "vit.embeddings.position_embeddings": "x"}}
    assert anatomy.raw == raw.get(architecture.name, {})
    if architecture.name == "bert":
        assert anatomy.norms["cls.predictions.transform.LayerNorm"] == "y"
    if architecture.name == "vit":
        assert anatomy.linears["vit.embeddings.patch_embeddings.projection.weight"].role == "entry"


def survey_gpt(**settings) -> Anatomy:
    config = gpt.Config(vocabulary=17, context=8, layers=1, width=12, heads=3, dropout=0.1, **settings)
    return survey(gpt.GPT(config), total, {"x": torch.zeros(2, 8, dtype=torch.long)})


def test_gpt():
    anatomy = survey_gpt(tied=False)
    roles = {name: (linear.contract, linear.output) for name, linear in anatomy.linears.items()}
    assert roles == {
        "blocks.0.attention.qkv.weight": ("x", "y"),
        "blocks.0.attention.project.weight": ("y", "x"),
        "blocks.0.mlp.expand.weight": ("x", "y"),
        "blocks.0.mlp.contract.weight": ("y", "x"),
        "head.weight": ("x", "y"),
    }
    assert anatomy.norms == {"blocks.0.norm1": "x", "blocks.0.norm2": "x", "norm": "x"}
    assert anatomy.embeddings == {"tokens.weight": "x", "positions.weight": "x"}
    assert (anatomy.siblings, anatomy.raw, anatomy.problems) == ((), {}, ())
    assert anatomy.dropouts == (
        Dropout("drop", "x", "dropout"),
        Dropout("blocks.0.attention", "y", "attention"),
        Dropout("blocks.0.drop", "x", "dropout"),
        Dropout("blocks.0.drop", "x", "dropout"),
    )


def test_a_tied_weight_is_table_and_head():
    anatomy = survey_gpt(tied=True)
    assert anatomy.embeddings["tokens.weight"] == "x"
    assert anatomy.linears["tokens.weight"].module == "head"


def test_convnet():
    anatomy = survey(convnet.ConvNet(convnet.Config(blocks=2)), total, {"x": torch.zeros(2, 3, 8, 8)})
    assert [linear.role for linear in anatomy.linears.values()] == ["entry", *("normal", "transposed") * 2, "normal"]
    assert anatomy.dropouts == ()


def test_a_residual_that_joins_x_and_y_is_a_problem():
    class Skewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.table(tokens)
            return x + self.linear(x)

    anatomy = survey(Skewed(), total, {"x": torch.zeros(2, 3, dtype=torch.long)})
    assert len(anatomy.problems) == 1 and "joins features over x with features over y" in anatomy.problems[0]


def test_a_weight_contracted_over_both_axes_is_a_problem():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.linear(self.linear(self.table(tokens)))

    anatomy = survey(Twice(), total, {"x": torch.zeros(2, 3, dtype=torch.long)})
    assert anatomy.problems == ("linear.weight: contracted over x by linear, over y by linear",)
