"""How a trained model's tensors lie in a Hugging Face folder: file names of tensors, shapes, and the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.core_model_loading import revert_weight_conversion

from fourfold.models.gpt import GPT
from fourfold.training.loader import LoaderError

Read = Callable[[str], Tensor]
"""One full tensor of a checkpoint by its name there (`model.…`, `buffer.…`)."""
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HfLayout:
    """What an export reads and writes.

    Attributes:
        architecture: the class of transformers that loads it.
        settings: its configuration.
        sources: tensors of the checkpoint that are read, with their logical shapes.
        targets: tensors of the files, with their shapes; of tied weights only one name.
        convert: with a way to read the sources, yields the targets one by one.
    """

    architecture: str
    settings: Any
    sources: Shapes
    targets: Shapes
    convert: Callable[[Read], Iterator[tuple[str, Tensor]]]


def layout_of(model: nn.Module) -> HfLayout:
    """The layout for a model (which may be on meta): ours becomes a GPT-2, one of transformers stays what it is."""
    return _gpt2(model) if isinstance(model, GPT) else _transformers(model)


def _transformers(model: nn.Module) -> HfLayout:
    """As `save_pretrained` lays it out, conversions to the architecture's published names included."""
    persistent = model.state_dict().keys()
    parameters = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    buffers = {name: tuple(tensor.shape) for name, tensor in model.named_buffers() if name in persistent}
    places = {name: f"model.{name}" for name in parameters} | {name: f"buffer.{name}" for name in buffers}
    shapes = parameters | buffers
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    targets = {name: tuple(tensor.shape) for name, tensor in _revert(model, blank).items()}
    by_layer = targets.keys() != shapes.keys()
    return HfLayout(
        type(model).__name__,
        model.config,
        {places[name]: shape for name, shape in shapes.items()},
        targets,
        partial(_convert_transformers, model, places, list(_groups(shapes, by_layer))),
    )


def _convert_transformers(
    model: nn.Module, places: Mapping[str, str], groups: list[list[str]], read: Read
) -> Iterator[tuple[str, Tensor]]:
    for group in groups:
        tensors = {name: read(places[name]) for name in group}
        yield from (_revert(model, tensors) if len(groups) < len(places) else tensors).items()


def _revert(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return revert_weight_conversion(model, tensors)  # pyright: ignore[reportArgumentType]


def _groups(names: Iterable[str], by_layer: bool) -> Iterator[list[str]]:
    """Names that must be read together: one by one, or by layer where the files pack or split tensors of one layer."""
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r"(.*?\.\d+)\.", name)
        groups.setdefault(layer.group(1) if by_layer and layer else name, []).append(name)
    yield from groups.values()


_GPT2_NAMES = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.project": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.expand": "mlp.c_fc",
    "mlp.contract": "mlp.c_proj",
}
"""A block's modules, ours and GPT-2's. GPT-2's linears (`Conv1D`) hold their weights transposed."""


def _gpt2(model: GPT) -> HfLayout:
    """Our GPT is GPT-2 with other names: pre-norm, packed q|k|v, tanh GELU, learned positions."""
    config = model.config
    if not config.bias:
        raise LoaderError(
            "export: expected a GPT with biases, found bias=False, which GPT-2 does not have; train with bias=True"
        )
    settings = GPT2Config(
        vocab_size=config.vocabulary,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        n_inner=config.hidden or None,
        activation_function="gelu_new",
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        layer_norm_epsilon=model.norm.eps,
        tie_word_embeddings=config.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    names = {name: _gpt2_name(name) for name, _ in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return HfLayout(
        "GPT2LMHeadModel",
        settings,
        {f"model.{name}": shape for name, shape in shapes.items()},
        {new: shapes[name][::-1] if _transposed(new) else shapes[name] for name, new in names.items()},
        partial(_convert_gpt2, names),
    )


def _convert_gpt2(names: Mapping[str, str], read: Read) -> Iterator[tuple[str, Tensor]]:
    for name, new in names.items():
        tensor = read(f"model.{name}")
        yield new, tensor.t().contiguous() if _transposed(new) else tensor


def _gpt2_name(name: str) -> str:
    """GPT-2's name of one of our parameters."""
    outside = {
        "tokens": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    module, _, kind = name.rpartition(".")
    if module in outside:
        return f"{outside[module]}.{kind}"
    _, index, inner = module.split(".", 2)
    return f"transformer.h.{index}.{_GPT2_NAMES[inner]}.{kind}"


def _transposed(name: str) -> bool:
    return name.endswith(".weight") and ".c_" in name
