"""Export: a run's newest checkpoint as a Hugging Face folder that transformers loads to the same logits."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import nn

from fourfold.config import Config
from fourfold.config.schema import HfCausalLm
from fourfold.training import subject
from fourfold.training.checkpoint import durable, latest, manifest
from fourfold.training.checkpoint.errors import errno_of, free_bytes
from fourfold.training.checkpoint.reader import read_whole
from fourfold.training.data import prepare
from fourfold.training.data.corpus import CorpusError
from fourfold.training.data.tokenizer import end_token
from fourfold.training.folder import RunFolder
from fourfold.training.hf_layout import HfLayout, layout_of
from fourfold.training.hf_writer import FILE_BYTES, HfWriter

_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
"""Files of a model's folder that go with its weights unchanged."""


class ExportError(ValueError):
    """A run that cannot be exported: says what, expected, found, and what to try."""


@dataclass(frozen=True)
class ExportResult:
    """What was written. There is a result only if all of it was read back and compared.

    Attributes:
        folder: the Hugging Face folder.
        checkpoint: what was exported.
        step: optimizer steps that it has seen.
        architecture: the class of transformers that loads it.
        tensors, bytes: how many, and how much.
        files: of weights.
        notes: what a reader should know, such as a tokenizer that could not be found.
    """

    folder: Path
    checkpoint: Path
    step: int
    architecture: str
    tensors: int
    bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"folder": str(self.folder), "checkpoint": str(self.checkpoint)}

    def text(self) -> str:
        """A few lines."""
        load = f"AutoModelForCausalLM.from_pretrained({str(self.folder)!r})"
        return "\n".join(
            [
                f"exported step {self.step} ({self.checkpoint}) as {self.architecture} to {self.folder}",
                f"{self.tensors} tensors, {self.bytes:,} bytes in {len(self.files)} file(s): "
                f"names, shapes and hashes read back and equal",
                *(f"note: {note}" for note in self.notes),
                f"load it with transformers: {load}",
            ]
        )


def export(
    run: str | Path, target: str | Path, *, overwrite: bool = False, file_bytes: int = FILE_BYTES
) -> ExportResult:
    """Write the newest whole checkpoint of a run as a Hugging Face folder.

    One full tensor is read at a time, from however many boxes; a file is held until it is full. Everything is written
    aside, read back and compared, then renamed.

    Args:
        run: a run folder (config.yaml, checkpoints/).
        target: where to write; must not exist, or be empty.
        overwrite: replace an earlier export at `target`.
        file_bytes: size beyond which weights go into several files.

    Raises:
        ExportError: no checkpoint, a target that is in use, no room. CheckpointError: the checkpoint is damaged.
    """
    folder, target = RunFolder(Path(run)), Path(target)
    newest = latest(folder.checkpoints)
    if newest is None:
        raise ExportError(f"{folder.checkpoints}: expected a whole checkpoint, found none; train the run first")
    found = manifest.read(newest)
    config = folder.read_config()
    layout = layout_of(_blank(subject.builder(config)))
    _check_sources(newest, found, layout)
    _check_target(target, overwrite)
    tokenizer, notes = _tokenizer(config, folder)
    aside = target.parent / f".{target.name}.part-{uuid.uuid4().hex}"
    try:
        aside.mkdir(parents=True)
        writer, files = _write_weights(aside, newest, found, layout, file_bytes)
        _write_settings(aside, found, layout, None if isinstance(config.model, HfCausalLm) else tokenizer)
        _write_tokenizer(aside, config, tokenizer)
        problems = writer.differences(layout.targets)
        if problems:
            raise ExportError(f"{target}: what was read back is not what was meant: " + "; ".join(problems[:5]))
        _put_in_place(aside, target)
    except (OSError, SafetensorError) as error:
        if errno_of(error) is None:
            raise
        raise ExportError(
            f"{target} cannot be written ({error}): needed about {_bytes(found, layout):,} bytes, "
            f"free {free_bytes(target):,} bytes; free some space or name another folder"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    size, count = writer.bytes, len(layout.targets)
    return ExportResult(target, newest, found.step, layout.architecture, count, size, tuple(files), tuple(notes))


def _blank(build: Callable[[], nn.Module]) -> nn.Module:
    """The model without values: names, shapes and ties are all that is needed."""
    with torch.device("meta"):
        return build()


def _check_sources(path: Path, found: manifest.Manifest, layout: HfLayout) -> None:
    """The checkpoint has the model's tensors, in their shapes, and no others of the model."""
    problems = []
    for name, shape in layout.sources.items():
        entry = found.tensors.get(name)
        if entry is None:
            near = get_close_matches(name, found.tensors, n=1)
            problems.append(f"missing {name!r}" + (f" (nearest: {near[0]!r})" if near else ""))
        elif entry.shape != shape:
            problems.append(f"shape of {name!r}: expected {shape}, found {entry.shape}")
    ours = [name for name in found.tensors if name.startswith(("model.", "buffer."))]
    problems += [f"unexpected {name!r}" for name in ours if name not in layout.sources]
    if problems:
        raise ExportError(
            f"{path} does not hold the model of config.yaml: {'; '.join(problems[:5])}; "
            f"was config.yaml changed by hand?"
        )


def _check_target(target: Path, overwrite: bool) -> None:
    """Nothing that is not an earlier export is ever replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ExportError(f"{target}: expected a folder or nothing, found a file; name another folder")
    inside = list(target.iterdir())
    if inside and not overwrite:
        raise ExportError(
            f"{target}: expected an empty folder or none, found {len(inside)} entries; name another folder, "
            "or replace an earlier export with --overwrite"
        )
    if inside and ((target / "config.json") not in inside or any(path.is_dir() for path in inside)):
        raise ExportError(f"{target}: expected an earlier export to replace, found something else; name another folder")


def _write_weights(
    aside: Path, path: Path, found: manifest.Manifest, layout: HfLayout, file_bytes: int
) -> tuple[HfWriter, list[str]]:
    writer = HfWriter(aside, file_bytes)
    for name, tensor in layout.convert(lambda source: read_whole(path, found, source)):
        writer.add(name, tensor)
    return writer, writer.finish()


def _write_settings(aside: Path, found: manifest.Manifest, layout: HfLayout, trained: Tokenizer | None) -> None:
    """config.json, in the dtype of the weights; with the end mark of the tokenizer, if one was trained for the run."""
    if trained is not None:
        layout.settings.bos_token_id = layout.settings.eos_token_id = end_token(trained)
    layout.settings.architectures = [layout.architecture]
    layout.settings.dtype = found.tensors[next(iter(layout.sources))].dtype
    layout.settings.save_pretrained(aside)


def _tokenizer(config: Config, folder: RunFolder) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer that was trained for this run, and a note where there is none to be had."""
    if isinstance(config.model, HfCausalLm):
        own = subject.tokenizer_file(config)
        if own is not None:
            return Tokenizer.from_file(str(own)), []
    path = folder.path / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path)), []
    try:
        prepared = prepare(config.data, rows=config.train.batch, seed=config.seed)
    except CorpusError as error:
        return None, [f"without a tokenizer, since the text cannot be read again: {error}"]
    if prepared.tokenizer is None:
        return None, ["without a tokenizer: the run was trained on token ids"]
    return prepared.tokenizer, []


def _write_tokenizer(aside: Path, config: Config, tokenizer: Tokenizer | None) -> None:
    """The files that came with the model; or the trained tokenizer, such that `AutoTokenizer` reads it."""
    if subject.tokenizer_file(config) is not None:
        assert isinstance(config.model, HfCausalLm) and config.model.path is not None
        for name in _COMPANIONS:
            source = Path(config.model.path) / name
            if source.is_file():
                shutil.copyfile(source, aside / name)
    elif tokenizer is not None:
        tokenizer.save(str(aside / "tokenizer.json"))
        end = end_token(tokenizer)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if end is not None:
            settings |= {"eos_token": tokenizer.id_to_token(end), "bos_token": tokenizer.id_to_token(end)}
        (aside / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _put_in_place(aside: Path, target: Path) -> None:
    durable.flush_folder(aside)
    old = target.parent / f"{aside.name}.old"
    if target.exists() and any(target.iterdir()):
        target.rename(old)
    aside.rename(target)
    durable.flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _bytes(found: manifest.Manifest, layout: HfLayout) -> int:
    """What the weights take."""
    entries = [found.tensors[name] for name in layout.sources]
    return sum(torch.Size(e.shape).numel() * getattr(torch, e.dtype).itemsize for e in entries)
