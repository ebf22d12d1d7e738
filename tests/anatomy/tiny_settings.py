"""What single configurations of transformers need to be built tiny and called, beside a table of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _rope(*section: int, **others: Any) -> dict[str, Any]:
    """Rotary positions of a head's 2 · sum(section) features: so many pairs turn with time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **others}}


LLAMA4_VISION: dict[str, Any] = {
    "num_channels": 3,
    "image_size": 8,
    "patch_size": 2,
    "intermediate_size": 256,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "vision_output_dim": 64,
}
"""Four words an image: a pixel shuffle makes one of four of its 4 × 4 patches."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "DeepseekV2Config": {"num_experts_per_tok": 2, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "Dots1Config": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "EsmcConfig": {"num_key_value_heads": 4},
    "Gemma3nTextConfig": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 24},
    "Step3p7TextConfig": {"sliding_window": 4},
    **dict.fromkeys(("Glm4vTextConfig", "GlmImageTextConfig", "GlmOcrTextConfig"), _rope(2, 3, 3)),
    **dict.fromkeys(("Qwen2VLTextConfig", "Qwen2_5OmniTextConfig", "Qwen2_5_VLTextConfig"), _rope(2, 3, 3)),
    **dict.fromkeys(("PaddleOCRTextConfig", "HunYuanVLTextConfig"), _rope(2, 3, 3)),
    **dict.fromkeys(("Ernie4_5_VLMoeTextConfig", "Ernie4_5_VL_MoeTextConfig"), _rope(3, 3, 2)),
    "Glm4vMoeTextConfig": _rope(1, 1, 2, partial_rotary_factor=0.5),
    "HYV4VLTextConfig": _rope(2, 1, 1),
    "LongcatFlashConfig": {"head_dim": 8, "num_layers": 1},
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _rope(2, 3, 3)["rope_parameters"], "full_attention": None},
    },
    "DoryConfig": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "MuseGlimmerAssistantConfig": {"target_layer_ids": [0, 1]},
    "Dots3NoteVisionConfig": {
        "adapter_in_dim": 64,
        "mlp_layer_types": ["dense", "sparse"],
        "patch_size": 2,
        "adapter_out_dim": 32,
    },
    "Glm5NextTextConfig": {
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_types": ["full"] * 4,
        "num_key_value_heads": 4,
        "index_topk": 4,
        "index_kpool": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "Qwen4ExpTextConfig": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "Llama4VisionConfig": LLAMA4_VISION,
    "Llama4Config": {
        "image_token_index": 47,
        "return_dict": False,
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **LLAMA4_VISION},
        "text_config": {
            "vocab_size": 48,
            "hidden_size": 64,
            "intermediate_size": 96,
            "intermediate_size_mlp": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
        },
    },
    "Gemma4VisionConfig": {"patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 16},
    "MuseGlimmerVisionConfig": {
        "patch_size": 2,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "max_position_embeddings": 64,
    },
    "MuseSparkConfig": {
        "image_token_id": 47,
        "out_hidden_size": 256,
        "projector_hidden_size": 96,
        "text_config": {
            "vocab_size": 48,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "moe_hidden_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "vision_config": {
            "patch_size": 2,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
        },
        "audio_config": {
            "num_hidden_layers": 2,
            "patch_sizes": [4, 2],
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "out_hidden_size": 64,
        },
    },
    **dict.fromkeys(
        ("Ernie4_5_VLMoeVisionConfig", "Ernie4_5_VL_MoeVisionConfig"), {"patch_size": 2, "spatial_merge_size": 2}
    ),
}
"""Settings that depend on one another, by the name of the configuration's class."""

BESIDE: dict[str, dict[str, Any]] = {
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5GemmaModuleConfig": {"dropout_rate": 0.0},
}
"""What a configuration of a larger model sets on this one after it is made."""

EMBEDDED = ("DeepseekOcr2VisionEncoderConfig", "MuseGlimmerAssistantConfig")
"""Inner models that are given the features of another: a table of words stands for it."""

MODELS = {
    "Llama4Config": "Llama4ForConditionalGeneration",
    "Ernie4_5_VL_MoeTextConfig": "Ernie4_5_VL_MoeTextModel",
    "Ernie4_5_VL_MoeVisionConfig": "Ernie4_5_VL_MoeVisionTransformerPretrainedModel",
    "T5GemmaModuleConfig": "T5GemmaEncoder",
    "T5Gemma2DecoderConfig": "T5Gemma2Decoder",
    "T5Gemma2TextConfig": "T5Gemma2TextEncoder",
}
"""The class of the model, where neither the automatic classes nor a class's own mark tell it rightly."""


def _pixels(words: Tensor, *shape: int) -> Tensor:
    """An image for every row of words."""
    return words.new_zeros((len(words), *shape), dtype=None).float()


def _with_images(words: Tensor) -> Tensor:
    """Four places for the parts of an image, then the words that are left of each row."""
    return torch.cat([words.new_full((len(words), 4), 47), words[:, 4:]], 1)


def _patches(model: nn.Module, words: Tensor, width: int, name: str) -> Any:
    """A 4 × 4 grid of patches for every row of words, all of them one after the other."""
    grid = words.new_tensor([[1, 4, 4]] * len(words))
    return model(**{name: _pixels(words, 16, width).flatten(0, 1), "grid_thw": grid})


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "Qwen3OmniMoeTalkerTextConfig": lambda model, words: model(inputs_embeds=model.codec_embedding(words)),
    "Qwen3OmniMoeTalkerCodePredictorConfig": lambda model, words: model(inputs_embeds=model.codec_embedding[0](words)),
    "VoxtralRealtimeTextConfig": lambda model, words: model(words, t_cond=_pixels(words, 1, 64)),
    "T5Gemma2DecoderConfig": lambda model, words: model(words, encoder_hidden_states=model.embed_tokens(words)),
    "DeepseekOcr2VisionEncoderConfig": lambda model, words: model(model.embedded(words), 3),
    "MuseGlimmerAssistantConfig": lambda model, words: model(model.embedded(words), _pixels(words, 3, 128)),
    # Of its text part's named outputs it reads one that these lack (transformers 5.24), so they are a tuple by its
    # settings, which what is around its forward must not read.
    "Llama4Config": lambda model, words: model(
        _with_images(words), pixel_values=_pixels(words, 3, 8, 8), return_dict=True
    ),
    "MuseSparkConfig": lambda model, words: model(
        _with_images(words),
        pixel_values=_pixels(words, 16, 2 * 3 * 4).flatten(0, 1),
        image_grid_thw=words.new_tensor([[1, 4, 4]] * len(words)),
    ),
    "Llama4VisionConfig": lambda model, words: model(_pixels(words, 3, 8, 8)),
    "Gemma4VisionConfig": lambda model, words: model(_pixels(words, 16, 12), _pixels(words, 16, 2).long()),
    "MuseGlimmerVisionConfig": lambda model, words: _patches(model, words, 3 * 2 * 4, "pixel_values"),
    "Dots3NoteVisionConfig": lambda model, words: _patches(model, words, 3 * 4, "pixel_values"),
    **dict.fromkeys(
        ("Ernie4_5_VLMoeVisionConfig", "Ernie4_5_VL_MoeVisionConfig"),
        lambda model, words: _patches(model, words, 3 * 4, "hidden_states"),
    ),
}
"""How a model is called that does not take words alone."""
