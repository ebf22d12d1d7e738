"""Weights come straight into any grid: each rank reads its own blocks, a chunk at a time, and nothing beside them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fourfold import wire
from fourfold.anatomy import deferred, materialize
from fourfold.config import Config
from fourfold.placement import cut
from fourfold.plan import Plan
from fourfold.training import checkpoint as checkpoints
from fourfold.training import subject, values, worker
from fourfold.training.boxes import boxes_to_read
from fourfold.training.checkpoint import reader
from fourfold.training.loader import hf_causal_lm
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import Run, parallelize
from fourfold.training.safetensors_source import SafetensorsSource
from ranks import Processes
from training.test_loader import GPT2, LLAMA, MIXTRAL, NEOX

CHUNK = 64
MODELS = {
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2, packed q|k|v by columns": GPT2,
    "neox, packed q|k|v by heads": NEOX,
    "mixtral, a file tensor an expert": {**MIXTRAL, "experts_implementation": "eager"},
}
GRIDS = ({"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2}, {"y": 4})
CASES = [(name, GRIDS[0]) for name in MODELS] + [("llama, tied", tensor) for tensor in GRIDS[1:]]
EXAMPLE = {"tokens": torch.zeros(1, 9, dtype=torch.int64)}


def plan(tensor: dict[str, int], **placement: Any) -> dict[str, Any]:
    return {"placement": {"tensor": {"algorithm": "4d", **tensor}, **placement}}


def saved(folder: Path, settings: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model of random weights, written by transformers in several files with an index."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).to(dtype)
    model.save_pretrained(folder, max_shard_size="5KB")
    file = folder / "config.json"  # save_pretrained leaves out which code computes the experts
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return model


class Metered:
    """A source that notes how many elements it was asked for, and how many at once."""

    def __init__(self, source: Any) -> None:
        self.source, self.read, self.most = source, 0, 0

    def __call__(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self.noted(self.source(name, start, stop, dtype))

    def noted(self, values: Tensor) -> Tensor:
        self.read, self.most = self.read + values.numel(), max(self.most, values.numel())
        return values


class MeteredBoxes(Metered):
    """One of a source that gives boxes."""

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.noted(self.source.box(name, offsets, sizes, dtype))


def placed(model: nn.Module, world: wire.World, tensor: dict[str, int], weights: Any, **placement: Any) -> Run:
    return parallelize(
        model,
        cross_entropy,
        OptimizerOptions(),
        plan(tensor, **placement),
        world=world,
        example=EXAMPLE,
        weights=weights,
        seed=5,
    )


def own_elements(run: Run) -> int:
    """What this rank holds of all weights."""
    layouts = [(unit.arena.layout, unit.arena.index) for unit in run.placed.units]
    spans = [slot.span(index) for layout, index in layouts for slot in layout.slots]
    return sum(last - first for first, last in spans)


def read_on_a_rank(world: wire.World, folder: Path, tensor: dict[str, int]) -> tuple[int, int, int, dict[str, Tensor]]:
    loaded = hf_causal_lm(folder)
    source = MeteredBoxes(loaded.weights)
    run = placed(loaded.model, world, tensor, source, shard="parameters" if tensor.get("z", 1) > 1 else "none")
    assert isinstance(loaded.weights, SafetensorsSource) and not loaded.weights._whole, "a weight was made whole"
    return source.read, source.most, own_elements(run), run.logical_state()


@pytest.mark.parametrize(("name", "tensor"), CASES, ids=str)
def test_a_rank_reads_its_own_blocks_and_holds_a_chunk_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tensor: dict[str, int]
) -> None:
    monkeypatch.setattr(cut, "CHUNK", CHUNK)
    model = saved(tmp_path, MODELS[name])
    size = tensor.get("x", 1) * tensor.get("y", 1) * tensor.get("z", 1)
    results = wire.threads.launch(size, read_on_a_rank, tmp_path, tensor)
    whole = sum(parameter.numel() for parameter in model.parameters())
    for read, most, own, state in results:
        assert read == own < whole and most <= CHUNK
        for key, parameter in model.named_parameters():
            assert torch.equal(state[key], parameter.float()), key
    assert sum(own for _, _, own, _ in results) >= whole


class Drawing(nn.Module):
    """Every kind of initialiser: uniform by fan-in, normal, constant, and one that cannot be drawn in part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 12)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 30)
        self.down = nn.Linear(30, 12)
        self.head = nn.Linear(12, 40, bias=False)
        nn.init.orthogonal_(self.down.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def drawn_on_a_rank(world: wire.World, tensor: dict[str, int]) -> tuple[int, dict[str, Tensor]]:
    model = deferred(Drawing)
    source = Metered(values.Drawn(model, 5))
    run = placed(model, world, tensor, source)
    return source.most, run.logical_state()


@pytest.mark.parametrize("tensor", GRIDS, ids=str)
def test_drawn_weights_are_the_same_bits_on_every_grid(tensor: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "CHUNK", CHUNK)
    plain = dict(materialize(deferred(Drawing), 5).named_parameters())
    size = tensor.get("x", 1) * tensor.get("y", 1) * tensor.get("z", 1)
    for most, state in wire.threads.launch(size, drawn_on_a_rank, tensor):
        assert most <= CHUNK
        assert state.keys() == plain.keys()
        for key, parameter in plain.items():
            assert torch.equal(state[key], parameter), key


class Counting:
    """`safe_open` of the checkpoints' reader; counts the elements that each thread takes from slices."""

    def __init__(self) -> None:
        self.open, self.taken = reader.safe_open, dict[int, int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _File(self, self.open(*args, **kwargs))


class _File:
    def __init__(self, counting: Counting, file: Any, key: str = "") -> None:
        self.counting, self.file, self.key = counting, file, key

    def __enter__(self) -> _File:
        self.file.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.__exit__(*args)

    def get_slice(self, key: str) -> _File:
        return _File(self.counting, self.file.get_slice(key))

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        values, taken = self.file[index], self.counting.taken
        taken[threading.get_ident()] = taken.get(threading.get_ident(), 0) + values.numel()
        return values


def save_on_a_rank(world: wire.World, folder: Path, tensor: dict[str, int]) -> None:
    placed(deferred(Drawing), world, tensor, None).save(folder)


def load_on_a_rank(world: wire.World, folder: Path, tensor: dict[str, int], counting: Counting) -> tuple[int, int]:
    run = placed(deferred(Drawing), world, tensor, None)
    wanted = sum(box.tensor.numel() for box in boxes_to_read(run._taken))
    run.load(str(checkpoints.latest(folder)))
    return counting.taken[threading.get_ident()], wanted


def test_of_a_checkpoint_a_rank_reads_its_own_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.threads.launch(6, save_on_a_rank, tmp_path, {"x": 3, "y": 2})
    counting = Counting()
    monkeypatch.setattr(reader, "safe_open", counting)
    for taken, wanted in wire.threads.launch(8, load_on_a_rank, tmp_path, {"x": 2, "y": 2, "z": 2}, counting):
        assert taken == wanted


# ---- the whole way from a config, on processes


def logits_on_a_rank(world: wire.World, settings: dict[str, Any], tokens: Tensor) -> Tensor:
    config = Config.model_validate(settings)
    model, weights = subject.deferred_model(config)
    values.fill_buffers(model, config.seed)
    run = worker._place(config, Plan.of(settings["plan"]), model, weights, world)
    run.model.eval()
    with torch.no_grad(), run.placed.forward(None):
        return run.model(tokens).logits + 0  # anything but a view or a copy is given whole logits


@pytest.mark.timeout(180)
def test_from_a_folder_in_a_config_to_the_logits_of_transformers(tmp_path: Path, gloo: Processes) -> None:
    """Tied bf16 weights in several files, on four processes x 2 y 2; fp64 but for the casts of its norms."""
    saved(tmp_path, MODELS["llama, tied"])
    settings = {
        "model": {"name": "hf_causal_lm", "path": str(tmp_path)},
        "data": {"name": "tokens", "files": ["none.npy"], "vocabulary": 40, "sequence": 8},
        "plan": plan({"x": 2, "y": 2}, precision="fp64"),
    }
    tokens = torch.arange(24).view(3, 8) % 40
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        wanted = plain(tokens).logits
    found = gloo(4, logits_on_a_rank, settings, tokens, timeout=150)
    for logits in found:
        assert torch.equal(logits, found[0])
        assert float((logits - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())
