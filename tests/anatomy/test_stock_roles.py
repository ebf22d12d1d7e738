"""What a tensor grid must know of the eight stock architectures, written out by hand from their code.

`{}` stands for the path of a block. The sizes are those of `conftest`: 32 features, 4 heads of 8 (2 heads of keys and
values where they are fewer), 64 features inside an MLP, 40 words.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from fourfold.anatomy import Anatomy, Dropout, Linear, Norm, Raw, Whole, restored, survey


def normal(unit: int = 1, parts: tuple[int, ...] = (), layout: str = "out,in") -> tuple[Any, ...]:
    return ("normal", "x", "y", layout, 1, unit, parts)


def transposed(unit: int = 1, layout: str = "out,in") -> tuple[Any, ...]:
    return ("transposed", "y", "x", layout, unit, 1, ())


HEADS = {"{}.self_attn.q_proj.weight": normal(8), "{}.self_attn.k_proj.weight": normal(8)}
HEADS["{}.self_attn.v_proj.weight"] = normal(8)
ACROSS = Norm("x", True)
LLAMA: dict[str, Any] = {
    "linears": {
        **HEADS,
        "{}.self_attn.o_proj.weight": transposed(8),
        "{}.mlp.gate_proj.weight": normal(),
        "{}.mlp.up_proj.weight": normal(),
        "{}.mlp.down_proj.weight": transposed(),
        "lm_head.weight": normal(),
    },
    "siblings": [tuple(HEADS), ("{}.mlp.gate_proj.weight", "{}.mlp.up_proj.weight")],
    "norms": {"{}.input_layernorm": ACROSS, "{}.post_attention_layernorm": ACROSS, "model.norm": ACROSS},
    "embeddings": {"model.embed_tokens.weight": "x"},
    "dropouts": [("{}.self_attn", "y", "attention", "{}#0")],
}
BERT_HEADS = tuple(f"{{}}.attention.self.{name}.weight" for name in ("query", "key", "value"))
VIT_HEADS = tuple(f"{{}}.attention.{name}_proj.weight" for name in "qkv")
EXPECTED: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": {
        **LLAMA,
        "norms": {
            **LLAMA["norms"],
            "{}.self_attn.q_norm": Norm("y", False),
            "{}.self_attn.k_norm": Norm("y", False),
        },
    },
    "mixtral": {
        **LLAMA,
        "linears": {
            **HEADS,
            "{}.self_attn.o_proj.weight": transposed(8),
            "{}.mlp.experts.gate_up_proj": normal(1, (64, 64), "expert,out,in"),
            "{}.mlp.experts.down_proj": transposed(1, "expert,out,in"),
            "lm_head.weight": normal(),
        },
        "siblings": [tuple(HEADS)],
        "whole": {"{}.mlp.gate": Whole("x", None)},
    },
    "gpt2": {
        "linears": {
            "{}.attn.c_attn.weight": normal(8, (32, 32, 32), "in,out"),
            "{}.attn.c_proj.weight": transposed(8, "in,out"),
            "{}.mlp.c_fc.weight": normal(layout="in,out"),
            "{}.mlp.c_proj.weight": transposed(layout="in,out"),
            "transformer.wte.weight": normal(),
        },
        "norms": {"{}.ln_1": ACROSS, "{}.ln_2": ACROSS, "transformer.ln_f": ACROSS},
        "embeddings": {"transformer.wte.weight": "x", "transformer.wpe.weight": "x"},
        "dropouts": [
            ("transformer.drop", "x", "dropout", "#0"),
            ("{}.attn", "y", "attention", "{}#0"),
            ("{}.attn.resid_dropout", "x", "dropout", "{}#1"),
            ("{}.mlp.dropout", "x", "dropout", "{}#2"),
        ],
    },
    "opt": {
        "linears": {
            **HEADS,
            "{}.self_attn.out_proj.weight": transposed(8),
            "{}.fc1.weight": normal(),
            "{}.fc2.weight": transposed(),
            "model.decoder.embed_tokens.weight": normal(),
        },
        "siblings": [tuple(HEADS)],
        "norms": {
            "{}.self_attn_layer_norm": ACROSS,
            "{}.final_layer_norm": ACROSS,
            "model.decoder.final_layer_norm": ACROSS,
        },
        "embeddings": {"model.decoder.embed_tokens.weight": "x", "model.decoder.embed_positions.weight": "x"},
        "dropouts": [("{}", "x", "dropout", "{}#0"), ("{}", "x", "dropout", "{}#1")],
    },
    "bert": {
        "linears": {
            **dict.fromkeys(BERT_HEADS, normal(8)),
            "{}.attention.output.dense.weight": transposed(8),
            "{}.intermediate.dense.weight": normal(),
            "{}.output.dense.weight": transposed(),
            "bert.embeddings.word_embeddings.weight": normal(),
        },
        "siblings": [BERT_HEADS],
        "norms": {
            "bert.embeddings.LayerNorm": ACROSS,
            "{}.attention.output.LayerNorm": ACROSS,
            "{}.output.LayerNorm": ACROSS,
        },
        "embeddings": {f"bert.embeddings.{name}_embeddings.weight": "x" for name in ("word", "token_type", "position")},
        # It would put features over y, which the decoder would contract; but the decoder's weight is the word table.
        "whole": {"cls.predictions.transform": Whole("x", "x")},
        "dropouts": [
            ("bert.embeddings.dropout", "x", "dropout", "#0"),
            ("{}.attention.self", "y", "attention", "{}#0"),
            ("{}.attention.output.dropout", "x", "dropout", "{}#1"),
            ("{}.output.dropout", "x", "dropout", "{}#2"),
        ],
    },
    "vit": {
        "linears": {
            "vit.embeddings.patch_embeddings.projection.weight": ("entry", None, "x", "out,in", 1, 1, ()),
            **dict.fromkeys(VIT_HEADS, normal(8)),
            "{}.attention.o_proj.weight": transposed(8),
            "{}.mlp.fc1.weight": normal(),
            "{}.mlp.fc2.weight": transposed(),
            "classifier.weight": normal(),
        },
        "siblings": [VIT_HEADS],
        "norms": {"{}.layernorm_before": ACROSS, "{}.layernorm_after": ACROSS, "vit.layernorm": ACROSS},
        "raw": {"vit.embeddings.cls_token": Raw("x", True), "vit.embeddings.position_embeddings": Raw("x", True)},
        "dropouts": [
            ("vit.embeddings.dropout", "x", "dropout", "#0"),
            ("{}.attention", "y", "attention", "{}#0"),
            ("{}.dropout", "x", "dropout", "{}#1"),
            ("{}.dropout", "x", "dropout", "{}#2"),
        ],
    },
}


@pytest.fixture(scope="module")
def anatomy(architecture) -> Anatomy:
    return survey(architecture.build(), architecture.loss, architecture.batch())


def expected(architecture, what: str, anatomy: Anatomy) -> dict[str, Any]:
    found = EXPECTED[architecture.name].get(what, {})
    return {name.format(block): value for block in anatomy.blocks for name, value in found.items()}


def test_linears(architecture, anatomy):
    modules = {name: linear.module for name, linear in anatomy.linears.items()}
    found = {
        name: tuple(entry for entry in linear if entry != modules[name]) for name, linear in anatomy.linears.items()
    }
    assert found == expected(architecture, "linears", anatomy)
    assert all(isinstance(linear, Linear) for linear in anatomy.linears.values())
    heads = {"gpt2": "lm_head", "opt": "lm_head", "bert": "cls.predictions.decoder"}
    table = {"gpt2": "transformer.wte", "opt": "model.decoder.embed_tokens", "bert": "bert.embeddings.word_embeddings"}
    for name, module in modules.items():
        tied = name == f"{table.get(architecture.name)}.weight"
        own = name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]
        assert module == (heads[architecture.name] if tied else own)


@pytest.mark.parametrize("what", ["norms", "raw", "whole"])
def test_modules_and_parameters(architecture, anatomy, what):
    assert getattr(anatomy, what) == expected(architecture, what, anatomy)


def test_embeddings(architecture, anatomy):
    assert anatomy.embeddings == EXPECTED[architecture.name].get("embeddings", {})


def test_siblings(architecture, anatomy):
    groups = EXPECTED[architecture.name].get("siblings", [])
    wanted = {tuple(name.format(block) for name in group) for block in anatomy.blocks for group in groups}
    assert set(anatomy.siblings) == wanted


def test_dropouts(architecture, anatomy):
    wanted = EXPECTED[architecture.name]["dropouts"]
    outside = [Dropout(*entry) for entry in wanted if "{}" not in entry[0]]
    inside = [
        Dropout(module.format(block), axis, kind, site.format(block))
        for block in anatomy.blocks
        for module, axis, kind, site in wanted
        if "{}" in module
    ]
    assert list(anatomy.dropouts) == outside + inside


def test_outputs_and_problems(architecture, anatomy):
    assert anatomy.outputs == ("y",)
    assert anatomy.problems == ()
    assert len(anatomy.blocks) == 2


def test_an_anatomy_travels_as_json(anatomy):
    assert restored(json.loads(json.dumps(dataclasses.asdict(anatomy)))) == anatomy
