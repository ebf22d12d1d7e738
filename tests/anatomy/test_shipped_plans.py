"""The roles found by tracing are those of the tensor-parallel plans that transformers ships.

A plan knows one axis, which is y here: "colwise" splits output features over it, "rowwise" input features. It may leave
layers out, so what it says is compared, and not what it does not say.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import transformers
from torch import nn

from anatomy.tiny_configs import batch, build, loss, shipping
from fourfold.anatomy import Anatomy, Norm, Raw, Whole, survey

SAYS_NOTHING = ("local_params", "replicate", "all_reduce", "moe_identity_expert", "sequence_parallel")
"""Styles that say how a module is run, and not how a weight lies."""

SLICE = (
    "Qwen3Config",
    "Phi3Config",
    "GPTNeoXConfig",
    "Gemma2Config",
    "Qwen2MoeConfig",
    "GptOssConfig",
    "MiniCPM3Config",
)
"""Heads with norms, packed weights, interleaved heads, four norms a block, experts, sinks, latent attention."""


class Difference(NamedTuple):
    layer: str
    style: str
    found: Any


def differences(model: nn.Module, anatomy: Anatomy) -> tuple[int, list[Difference]]:
    """How many statements of the plan are about something that ran, and those that the anatomy contradicts."""
    compared, differing = 0, []
    for layer, style in _statements(model):
        found = _found(model, anatomy, layer, style)
        if found is not None:
            compared += 1
            if found is not True:
                differing.append(Difference(re.sub(r"\.\d+", ".*", layer), style, found))
    return compared, differing


def _statements(model: nn.Module) -> Iterator[tuple[str, str]]:
    layers = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    for key, style in (model.tp_plan or {}).items():  # type: ignore[union-attr, operator]
        pattern = re.compile(re.escape(key).replace(r"\*", r"\d+"))
        yield from ((layer, style) for layer in layers if pattern.fullmatch(layer) and style not in SAYS_NOTHING)


def _found(model: nn.Module, anatomy: Anatomy, layer: str, style: str) -> Any:
    """True if the anatomy says the same, None if the layer did not run, else what it says."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    own = {name: group[0] for group in anatomy.ties for name in group}
    name = layer if layer in weights else f"{layer}.weight"
    weight = own.get(name, name)
    inside = [used for used in anatomy.order if used == weight or used.startswith(f"{layer}.")]
    if not inside:
        return None
    said = (
        anatomy.linears.get(weight) or anatomy.whole.get(layer) or anatomy.raw.get(weight) or anatomy.norms.get(layer)
    )
    if style == "moe_tp_experts":
        agrees = any(linear.role == "transposed" for used, linear in anatomy.linears.items() if used in inside)
    elif style == "replicated_with_grad_allreduce":
        agrees = said in (Norm("y", False), Raw("y", False))
    elif style.startswith("embedding"):
        agrees = weight in anatomy.embeddings
    elif style == "mla_kv_a_proj":
        agrees = isinstance(said, Whole) and said.output is None
    elif weight in anatomy.raw:
        agrees = said == Raw("y", True)
    else:
        agrees = weight in anatomy.linears and _split_alike(anatomy.linears[weight], weights[name].dim(), style)
    return agrees or said or _around(anatomy, layer) or "nothing"


def _split_alike(linear: Any, dims: int, style: str) -> bool:
    """The dim that the style splits is the one that lies over y."""
    colwise = "colwise" in style
    side = linear.layout.split(",")[dims - 2 if colwise else dims - 1] if dims <= 3 else "out" if colwise else "in"
    packed = not style.startswith("packed") or len(linear.parts) > 1 or linear.unit_out > 1
    return packed and (linear.output if side == "out" else linear.contract) == "y"


def _around(anatomy: Anatomy, layer: str) -> Any:
    return next(((path, whole) for path, whole in anatomy.whole.items() if layer.startswith(f"{path}.")), None)


def compare(config: type) -> tuple[int, list[Difference], tuple[str, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(config)
        anatomy = survey(model, loss(model), batch())
    return *differences(model, anatomy), anatomy.problems


@pytest.mark.parametrize("name", SLICE)
def test_shipped_plan(name):
    compared, differing, problems = compare(getattr(transformers, name))
    assert compared > 0
    assert (differing, problems) == ([], ())


NOT_RUN = {
    "Llama4Config": "its one statement is about multi_modal_projector.linear_1 of Llama4ForConditionalGeneration, "
    "whose text part is made from a configuration without pad_token_id and asks for it",
    "MuseSparkConfig": "validate_architecture of its sound part wants one entry a layer in patch_sizes, hidden_sizes "
    "and depths, and the table of sizes makes two layers of four entries",
}
"""Configurations that are not run tiny, with the reason."""

RECURRENT = (
    "shipped: linear_attn's projections colwise_gather_output, each gathered at once, so that its convolution and "
    "delta rule run on all features; ours: linear_attn runs whole on an input gathered once. The recurrence "
    "itself is not "
    "split by either"
)
HEAD = (
    "shipped: lm_head rowwise_split_input, input features split and logits summed; ours: normal, words over y, so that "
    "the loss needs no whole logits, and input features over x as well"
)
STREAMS = (
    "attn_hc and ffn_hc contract all streams of the residual at once (fn reads them flattened, so its input features "
    "are repeated ones), and the plan leaves both out: "
)
ENTRY = (
    " reads images, whose features are whole: shipped colwise_gather_output, its output gathered; ours: entry, its "
    "output features stay split, over x, where the residual lies"
)
DIFFERS = {
    **dict.fromkeys(("Qwen3NextConfig", "Qwen3_5MoeTextConfig", "Qwen3_5TextConfig"), RECURRENT),
    "LaraMiniConfig": "shipped: linear_attn.out_proj colwise_gather_output, and nothing of what is before it; ours: "
    "linear_attn runs whole, as its convolution and delta rule do in the plan",
    "Qwen4ExpTextConfig": f"{RECURRENT}. Beside: shipped indexer.index_qk_proj colwise_gather_output, gathered before "
    "a top-k of words, and input_mix_weight_down rowwise_split_input, summed to whole streams; ours runs both whole",
    "DeepseekV4Config": f"{STREAMS}the search finds none that leaves the residual over one axis, and a grid is refused",
    "HYV4Config": f"{STREAMS}the search finds none that leaves the residual over one axis, and a grid is refused",
    "HYV4VLTextConfig": f"{STREAMS}shipped splits q_b_proj, kv_b_proj, gate_proj and o_proj of self_attn; ours runs "
    "self_attn whole, and the streams around it stay over x and y both, so that a grid is refused",
    "Glm5NextTextConfig": f"{STREAMS}shipped splits o_proj and the experts; ours runs self_attn whole between them, "
    "and kv_a_proj_with_mqa (mla_kv_a_proj) reads whole features instead of features over x",
    "Gemma3nTextConfig": "all statements agree; but the model itself takes means over all features of its streams, in "
    "no norm, and mixes streams over x with others over y, so that a grid is refused, by name",
    **dict.fromkeys(("InklingTextConfig", "Inkling2TextConfig", "Inkling2LoopTextConfig"), HEAD),
    "MuseSparkTextConfig": "shipped: mlp.pre_expert_proj rowwise_split_input, input features split over the one axis "
    "and its output summed to whole; ours: normal, input features over x and output features over y",
    "MuseGlimmerAssistantConfig": "shipped: encoder.fc rowwise_split_input of hidden states that come from another "
    "model; ours: entry, since what is given to a model is whole, with its output over x",
    "MuseGlimmerVisionConfig": f"patch_embedder.patch_embedding{ENTRY}",
    "Llama4VisionConfig": f"patch_embedding.linear{ENTRY}. Shipped: vision_adapter.mlp.fc1 colwise and fc2 rowwise; "
    "between the blocks and it a pixel shuffle moves features into time, so ours runs fc1 whole and fc2 as an entry",
    "DogeConfig": "shipped: q, k, v colwise, o_proj rowwise, and dt_proj rowwise, which makes of all values a mask for "
    "every head, whole on every rank beside heads that are split; ours: such a mask would lie over x and the heads "
    "over y, so self_attn runs whole",
    "NeoMMEConfig": "shipped: q, k, v, gate_proj, up_proj colwise, o_proj rowwise; ours: the same two kinds over the "
    "other axis, since one projection stands between the words and the blocks, and so the residual lies over y",
}
"""Configurations whose anatomy says something else than their plan, with the reason."""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_shipped_plans():
    not_run, differing = {}, {}
    for name, config in sorted(shipping().items()):
        try:
            compared, found, problems = compare(config)
        except Exception as error:  # each fails in its own way
            not_run[name] = error
            continue
        if found or problems or not compared:
            differing[name] = found, problems
    amiss = _amiss(not_run, NOT_RUN) + _amiss(differing, DIFFERS)
    assert not amiss, "\n".join(amiss)


def _amiss(found: Mapping[str, Any], listed: Mapping[str, str]) -> list[str]:
    """What is found and has no reason in the list, and what is in the list for no reason any more."""
    new = [f"{name}: {found[name]}" for name in sorted(found.keys() - listed.keys())]
    return new + [f"{name}: no exception any more" for name in sorted(listed.keys() - found.keys())]
