"""Weights read box by box from the safetensors files of a Hugging Face folder: no rank holds a full copy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from fourfold.anatomy import own_names
from fourfold.training.unread import Source, Unread

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN = 5


class LoaderError(ValueError):
    """A model folder or configuration that cannot be loaded: says what, expected, found, and what to try."""


@dataclass
class _Origin:
    """Where a logical tensor comes from: one key of the files, or several that a converter of transformers joins."""

    keys: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    converter: WeightConverter | None = None


class SafetensorsSource(Source):
    """The weights of a causal LM in a folder, by the names that the model has now.

    Keys of older or other layouts are renamed, joined and split as transformers does it on loading. Tied names read
    the one that is in the files. Everything is matched before any value is read.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        """Match the files' keys with the model's.

        Args:
            folder: holds `*.safetensors`, and their index if there are several.
            model: of transformers; may be on meta.

        Raises:
            LoaderError: weights are missing, unexpected or of other shapes (with the nearest names); only pickles.
        """
        self.folder = folder
        self._model = model
        self._files = _files(folder)
        self._opened: dict[str, Any] = {}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._origins, unexpected = self._match()
        self._alias = self._aliases()
        self._check(unexpected)
        self._found: dict[str, Unread] = {}
        self._whole: set[str] = set()

    def unread(self, name: str) -> Unread:
        """A tensor of the model as it lies in the files."""
        name = self._alias[name]
        if name not in self._found:
            origin = self._origins[name]
            self._found[name] = self._view(origin.keys[0]) if origin.converter is None else self._join(name, origin)
        return self._found[name]

    def _view(self, key: str) -> Unread:
        """A tensor of the files: the library gives a view of the file, whose values are read when they are copied."""
        view = self._open(key).get_slice(key)
        return Unread.of(view[...] if view.get_shape() else self._open(key).get_tensor(key))

    def _open(self, key: str) -> Any:
        """The file of a key, mapped into memory once."""
        file = self._files[key]
        if file not in self._opened:
            self._opened[file] = _opened(self.folder / file)
        return self._opened[file]

    def _match(self) -> tuple[dict[str, _Origin], list[str]]:
        """Origins by logical name, and the files' keys that have no place in the model."""
        model = self._model
        mapping = get_model_conversion_mapping(model)  # pyright: ignore[reportArgumentType]
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = str(getattr(model, "base_model_prefix", "")) or None
        known: dict[str, Any] = model.state_dict()
        origins: dict[str, _Origin] = {}
        unexpected = []
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = rename_source_key(key, [], [], prefix, known)
            if name not in known:
                unexpected.append(key)
                continue
            origin = origins.setdefault(name, _Origin())
            origin.keys.append(key)
            if pattern is not None:
                origin.patterns.append(pattern)
                origin.converter = by_pattern[pattern]
        for name in [name for name, origin in origins.items() if origin.converter is not None]:
            self._place_split(origins, name)
        return origins, unexpected

    def _place_split(self, origins: dict[str, _Origin], name: str) -> None:
        """A converter with several targets (a packed tensor that the model holds in parts) is the origin of each."""
        origin = origins[name]
        assert origin.converter is not None
        targets = origin.converter.target_patterns
        stem = next((target for target in targets if target in name), None)
        for target in targets if stem is not None else ():
            other = name.replace(stem or "", target)
            if other in self._shapes:
                origins.setdefault(other, origin)

    def _join(self, name: str, origin: _Origin) -> Unread:
        """One logical tensor by a converter of transformers.

        The usual ones put parts side by side, stack, split or transpose them, which needs no values. Another one is
        given values: then the tensor is made whole, and kept until another such is asked for.
        """
        try:
            return self._converted(name, origin, self._view)
        except Exception:  # what a converter does beside that, it may do to a tensor in any way
            self._found = {known: tensor for known, tensor in self._found.items() if known not in self._whole}
            self._whole = {name}
            return Unread.of(self._converted(name, origin, lambda key: self._open(key).get_tensor(key)))

    def _converted(self, name: str, origin: _Origin, read: Callable[[str], Any]) -> Any:
        converter = deepcopy(origin.converter)
        assert converter is not None
        for key, pattern in zip(origin.keys, origin.patterns, strict=True):
            converter.add_tensor(name, key, pattern, partial(read, key))  # pyright: ignore[reportArgumentType]
        config = getattr(self._model, "config", None)
        made: Mapping[str, Any] = converter.convert(name, model=self._model, config=config)
        value = made[name]
        return value[0] if isinstance(value, list) else value

    def _aliases(self) -> dict[str, str]:
        """Every name of the model → the name under which its values were found (tied ones are often there once)."""
        owners = own_names(self._model)
        groups: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            groups.setdefault(id(parameter), []).append(name)
        alias = {name: name for name in self._shapes}
        for identity, names in groups.items():
            there = [name for name in (owners[identity], *names) if name in self._origins]
            alias |= {name: there[0] for name in names if there}
        return alias

    def _check(self, unexpected: list[str]) -> None:
        """All of the model is in the files, nothing else is, and the shapes agree."""
        problems = []
        missing = sorted({name for name in self._shapes if self._alias[name] not in self._origins})
        for name in missing:
            near = get_close_matches(name, self._files, n=1)
            problems.append(f"missing: {name!r}" + (f" (nearest in the files: {near[0]!r})" if near else ""))
        ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        patterns = [*ignored, r"rotary_emb\.inv_freq"]  # recomputed by every model that has it
        for key in unexpected:
            if not any(re.search(pattern, key) for pattern in patterns):
                near = get_close_matches(key, self._shapes, n=1)
                problems.append(f"unexpected: {key!r}" + (f" (nearest in the model: {near[0]!r})" if near else ""))
        for name, origin in self._origins.items():
            if origin.converter is None:
                found = tuple(self._open(origin.keys[0]).get_slice(origin.keys[0]).get_shape())
                if found != self._shapes[name]:
                    problems.append(f"shape of {name!r}: expected {self._shapes[name]}, found {found}")
        if problems:
            more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise LoaderError(
                f"{self.folder}: the weights are not those of a {type(self._model).__name__}:\n  "
                + "\n  ".join(problems[:_SHOWN])
                + f"{more}\nis it the folder of a causal language model with this config.json?"
            )


def has_weights(folder: Path) -> bool:
    """Whether the folder holds weights that can be read.

    Raises:
        LoaderError: it holds only pickles, which are never read.
    """
    if any(folder.glob("*.safetensors")):
        return True
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise LoaderError(
            f"{folder}: expected *.safetensors, found {', '.join(pickles[:_SHOWN])}; pickles can run code, so they are "
            f"never read. Where you trust them, save the model again with transformers' save_pretrained"
        )
    return False


def _files(folder: Path) -> dict[str, str]:
    """File name by key, from the index where there is one, else from the files themselves."""
    index = folder / _INDEX
    if index.is_file():
        try:
            mapped = {str(key): str(file) for key, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoaderError(
                f"{index}: expected a mapping weight_map of keys to files, found none ({error!r})"
            ) from error
        for file in sorted(set(mapped.values())):
            if Path(file).name != file or not (folder / file).is_file():
                raise LoaderError(f"{index}: names {file!r}, which is not in {folder}; copy the whole folder")
        for key, file in mapped.items():
            if key not in _opened(folder / file).keys():
                raise LoaderError(
                    f"{index}: says that {key!r} is in {file}, where it is not; copy the whole folder again"
                )
        return mapped
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for key in _opened(path).keys():
            if key in found:
                raise LoaderError(
                    f"{folder}: {key!r} is in both {found[key]} and {path.name}, and there is no {_INDEX}"
                )
            found[key] = path.name
    return found


def _opened(path: Path) -> Any:
    """The file, mapped into memory."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoaderError(f"{path}: not a whole safetensors file ({error}); copy it again") from error
