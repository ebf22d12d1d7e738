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
        agrees = said == Whole("x", None)
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


OTHER = "takes images, sound or the inner values of a larger model, not words"
PART = "a part of a larger model, which has no forward of its own or is not exported"
SIZES = "its settings depend on one another in ways that a table of tiny sizes does not know"
NOT_RUN = {
    **dict.fromkeys(("DeepseekOcr2VisionEncoderConfig", "Ernie4_5_VLMoeVisionConfig", "Gemma4VisionConfig"), OTHER),
    **dict.fromkeys(("Llama4VisionConfig", "MuseGlimmerVisionConfig", "MuseGlimmerAssistantConfig"), OTHER),
    **dict.fromkeys(("Dots3NoteVisionConfig", "Qwen3OmniMoeTalkerCodePredictorConfig"), OTHER),
    **dict.fromkeys(("Ernie4_5_VL_MoeTextConfig", "Ernie4_5_VL_MoeVisionConfig", "DeepseekOcr2TextConfig"), PART),
    **dict.fromkeys(("Qwen3OmniMoeTalkerTextConfig", "T5GemmaModuleConfig"), PART),
    **dict.fromkeys(("VoxtralRealtimeTextConfig", "T5Gemma2TextConfig"), PART),
    **dict.fromkeys(("T5Gemma2DecoderConfig", "Llama4Config"), PART),
    **dict.fromkeys(("CohereCompassTextConfig", "DoryConfig", "Ernie4_5_VLMoeTextConfig", "Glm4vMoeTextConfig"), SIZES),
    **dict.fromkeys(("Glm4vTextConfig", "Glm5NextTextConfig", "GlmImageTextConfig", "GlmOcrTextConfig"), SIZES),
    **dict.fromkeys(("HYV4VLTextConfig", "HunYuanVLTextConfig", "LongcatFlashConfig", "MuseSparkConfig"), SIZES),
    **dict.fromkeys(("PaddleOCRTextConfig", "Qwen2VLTextConfig", "Qwen2_5OmniTextConfig"), SIZES),
    **dict.fromkeys(("Qwen2_5_VLTextConfig", "Qwen4ExpTextConfig"), SIZES),
}
"""Configurations that are not run tiny, with the reason."""

RECURRENT = "the plan splits the projections of a recurrent layer and gathers what they give; here the layer runs whole"
LATENT = "attention with an indexer, which reads latent queries and words: the search runs the attention whole"
STREAMS = "its residual is several streams, mixed by weights that contract all of them: what is around them runs whole"
DIFFERS = {
    **dict.fromkeys(("Qwen3NextConfig", "Qwen3_5MoeTextConfig", "Qwen3_5TextConfig", "LaraMiniConfig"), RECURRENT),
    **dict.fromkeys(("AXK2Config", "DeepseekV32Config", "Dots3NoteTextConfig"), LATENT),
    **dict.fromkeys(("GlmMoeDsaConfig",), LATENT),
    **dict.fromkeys(("DeepseekV4Config", "HYV4Config"), STREAMS),
    "BailingHybridConfig": "latent and linear attention in turn: the search runs both and the experts whole",
    "DeepseekV2Config": "latent attention with complex rotary positions: the search runs the attention whole",
    "Gemma3nTextConfig": "several residual streams, predicted from one another: nothing found makes them splittable",
    **dict.fromkeys(
        ("Inkling2TextConfig", "Inkling2LoopTextConfig"), "its convolutions in time: whole layers are taken"
    ),
    "InklingTextConfig": "the plan splits the input features of its head, and not its words",
    "MuseSparkTextConfig": "the plan splits the input features of what is before the experts",
    "NemotronHConfig": "one class for all mixers, recurrent ones and experts: what makes one run whole is for all",
    "NeoMMEConfig": "one projection between words and blocks, so that x and y are exchanged in all of them",
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
