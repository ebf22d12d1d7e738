"""Tiny models of the configurations of transformers that ship a tensor-parallel plan."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from anatomy.tiny_settings import BESIDE, CALLS, EMBEDDED, MODELS, OVERRIDES

SIZES: tuple[tuple[str, int | None], ...] = (
    ("num_hidden_layers|n_layers?|num_layers|depth", 2),
    ("hidden_size|n_embd|dim|d_model", 64),
    (".*vocab_size.*", 48),
    ("num_attention_heads|n_heads?|num_heads", 4),
    ("num_key_value_heads|num_kv_heads", 2),
    ("head_dim|global_head_dim|attention_head_dim", 16),
    ("intermediate_size|ffn_dim|ffn_hidden_size|n_inner|mlp_dim|intermediate_size_mlp|dense_intermediate_size", 96),
    ("moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size", 24),
    ("num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    ("num_experts_per_tok|moe_topk|moe_k|num_experts_per_token|top_k_experts|num_selected_experts", 2),
    ("n_group|topk_group|num_expert_group", 1),
    ("q_lora_rank", 24),
    ("kv_lora_rank", 20),
    ("qk_rope_head_dim", 8),
    ("qk_nope_head_dim|v_head_dim", 16),
    ("max_position_embeddings|n_positions", 64),
    (".*_token_id", 1),
)
"""Settings by their names → tiny ones. All layers of a hybrid are of at least as many kinds as it has."""

EVEN_IF_NONE = ("num_key_value_heads", "head_dim", "num_hidden_layers")
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""One entry a layer."""

WAYS = (
    {"attn_implementation": "sdpa", "experts_implementation": "eager"},
    {"attn_implementation": "sdpa"},
    {"attn_implementation": "eager"},
)


@cache
def shipping() -> dict[str, type]:
    """All configuration classes that ship a plan, by name."""
    import transformers.models as models
    from transformers import PreTrainedConfig

    found = {}
    for package in pkgutil.iter_modules(models.__path__):
        path = f"transformers.models.{package.name}"
        if not package.ispkg:
            continue
        for module in pkgutil.iter_modules(importlib.import_module(path).__path__):
            if module.name.startswith("configuration_"):
                for name, kind in vars(importlib.import_module(f"{path}.{module.name}")).items():
                    own = inspect.isclass(kind) and kind.__module__ == f"{path}.{module.name}"
                    if own and issubclass(kind, PreTrainedConfig) and kind.base_model_tp_plan:
                        found[name] = kind
    return found


def build(config: type) -> nn.Module:
    """Its model for text, or its base model, with tiny sizes, in training.

    Raises:
        Exception: of any kind, from transformers: some need what a table of sizes does not give.
    """
    last: Exception | None = None
    for way in WAYS:
        try:
            model = _model_class(config)._from_config(tiny(config), **way)
            if config.__name__ in EMBEDDED:
                model.embedded = nn.Embedding(48, model.config.hidden_size)
            return model.train()
        except (TypeError, ValueError) as error:
            last = error
    assert last is not None
    raise last


def tiny(config: type) -> Any:
    """A configuration of this class with tiny sizes."""
    default = config().to_dict()
    names = {entry.name for entry in dataclasses.fields(config)}  # type: ignore[arg-type]
    settings = {name: value for name, value in _shrunk(default).items() if name in names}
    kinds = [name for name in KINDS if isinstance(default.get(name), list)]
    layers = max([2, *(len(set(default[name])) for name in kinds)])
    for name in kinds:
        settings[name] = (list(dict.fromkeys(default[name])) * layers)[:layers]
        settings |= {name: layers for name in ("num_hidden_layers", "n_layer", "num_layers") if name in settings}
    if default.get("kv_lora_rank") and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = 4
    if "rotary_dim" in default:
        settings["rotary_dim"] = 8
    rope = default.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
        half = int(settings.get("head_dim", 16) * rope.get("partial_rotary_factor", 1.0) / 2)
        settings["rope_parameters"] = {
            **rope,
            "mrope_section": [half // 4, half * 3 // 8, half - half // 4 - half * 3 // 8],
        }
    made = config(**{**settings, **OVERRIDES.get(config.__name__, {})})
    for name, value in BESIDE.get(config.__name__, {}).items():
        setattr(made, name, value)
    return made


def _shrunk(default: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in default.items():
        if isinstance(value, dict) and name.endswith("config"):
            settings[name] = _shrunk(value)
        size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
        number = isinstance(value, int) and not isinstance(value, bool)
        if size is not None and (number or name in EVEN_IF_NONE):
            settings[name] = size
        elif size is not None and name.endswith("_token_id"):
            settings[name] = [1] if isinstance(value, list) else None
    return settings


def _model_class(config: type) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    code = config.__module__.replace("configuration_", "modeling_")
    if config.__name__ in MODELS:
        return getattr(importlib.import_module(code), MODELS[config.__name__])
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        try:
            return mapping[config]
        except (KeyError, ValueError):
            continue
    module = importlib.import_module(code)
    own = [kind for kind in vars(module).values() if getattr(kind, "config_class", None) is config]
    return next(kind for kind in own if "forward" in vars(kind))


def batch() -> dict[str, Tensor]:
    """Two rows of six words."""
    return {"inputs": torch.randint(3, 40, (2, 6), generator=torch.Generator().manual_seed(1))}


def loss(model: nn.Module) -> Callable[[nn.Module, Mapping[str, Tensor]], tuple[Tensor, int]]:
    """Calls the model with words, or with what it takes instead, and sums what it returns."""
    takes = inspect.signature(model.forward).parameters
    extra = {"use_cache": False} if {"use_cache", "kwargs"} & set(takes) else {}
    call = CALLS.get(type(model.config).__name__)  # type: ignore[union-attr]

    def total(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        words = batch["inputs"]
        output = call(model, words) if call else model(input_ids=words, **extra)
        logits = getattr(output, "logits", None)
        return (logits if logits is not None else output[0]).float().sum(), 1

    return total
