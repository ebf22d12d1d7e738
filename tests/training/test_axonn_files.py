"""Per-rank files in AxoNN's layout: what its own slicing would have written, read back under any plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fourfold import wire
from fourfold.placement import cut
from fourfold.training import axonn_files
from fourfold.training.axonn_export import export
from fourfold.training.axonn_files import AxonnError, AxonnGrid, AxonnLayout, AxonnSource, write
from fourfold.training.export import ExportError
from fourfold.training.loader import LoaderError, hf_causal_lm
from training.test_export import CASES, trained
from training.test_loader import LLAMA
from training.test_loading import CHUNK, MeteredBoxes, own_elements, placed

GRID = AxonnGrid(2, 3, 2)
"""All sizes differ where they can, so that no swap goes unseen."""


class Pair(nn.Module):
    """A normal layer and a transposed one, a norm, a table, and a layer that does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 12)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 18)
        self.down = nn.Linear(18, 12)
        self.odd = nn.Linear(12, 5)
        self.register_buffer("seen", torch.tensor(3))


@pytest.fixture
def model() -> Pair:
    torch.manual_seed(2)
    model = Pair()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


class Held:
    """The values that a model holds."""

    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict()

    def __call__(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return self.state[name].reshape(-1)[start:stop].to(dtype)

    def dtype(self, name: str) -> torch.dtype:
        return self.state[name].dtype


def as_axonn_cuts(weight: Tensor, rows: tuple[int, int], columns: tuple[int, int], depth: tuple[int, int]) -> Tensor:
    """What AxoNN's `extract_local_params_from_full_params` keeps of [out, in]; each pair is (parts, index)."""
    weight = weight.chunk(columns[0], dim=1)[columns[1]]
    weight = weight.chunk(rows[0], dim=0)[rows[1]].contiguous()
    return weight.reshape(-1).chunk(depth[0])[depth[1]]


def written(folder: Path, model: nn.Module, grid: AxonnGrid = GRID, **settings: Any) -> Path:
    folder.mkdir()
    held = Held(model)
    write(folder, held, model, grid, dtype=held.dtype, **settings)
    return folder


def assert_same(source: Any, model: nn.Module) -> None:
    for name, tensor in model.named_parameters(remove_duplicate=False):
        assert torch.equal(source(name, 0, tensor.numel(), tensor.dtype).view(tensor.shape), tensor), name
        box = tuple(slice(size // 3, size) for size in tensor.shape)
        offsets, sizes = zip(*((part.start, part.stop - part.start) for part in box), strict=True)
        assert torch.equal(source.box(name, offsets, sizes, torch.float64), tensor[box].double()), name


def test_the_files_are_what_axonn_keeps_on_each_rank(tmp_path: Path, model: Pair) -> None:
    written(tmp_path / "set", model, transposed=["down"])
    assert len(list((tmp_path / "set").iterdir())) == 12
    for r, c, d in GRID.ranks():
        found = load_file(tmp_path / "set" / f"tp_row_{r}_col_{c}_depth_{d}" / "model.safetensors")
        row, col, depth = (2, r), (3, c), (2, d)
        assert torch.equal(found.pop("up.weight"), as_axonn_cuts(model.up.weight, row, col, depth))
        assert torch.equal(found.pop("up.bias"), model.up.bias.chunk(2)[r])
        assert torch.equal(found.pop("down.weight"), as_axonn_cuts(model.down.weight, col, row, depth))
        assert torch.equal(found.pop("down.bias"), model.down.bias.chunk(3)[c])
        for name, whole in found.items():
            assert torch.equal(whole, model.state_dict()[name]), name
        assert found.keys() == {"tokens.weight", "norm.weight", "norm.bias", "odd.weight", "odd.bias", "seen"}


def test_what_is_read_is_what_was_written(tmp_path: Path, model: Pair) -> None:
    for number, transposed in enumerate(([], ["down"])):
        source = AxonnSource(written(tmp_path / str(number), model, transposed=transposed), model)
        assert_same(source, model)


def test_files_that_do_not_say_what_is_transposed(tmp_path: Path, model: Pair) -> None:
    """Such as those that were converted: a bias tells that something is wrong, and the name of the layer mends it."""
    folder = written(tmp_path / "set", model, transposed=["down"])
    for path in folder.rglob("*.safetensors"):
        save_file(load_file(path), path)
    with pytest.raises(AxonnError, match=r"shape of 'down.bias': expected .6,., found .4,.(.|\n)*transposed"):
        AxonnSource(folder, model)
    assert_same(AxonnSource(folder, model, transposed=["down"]), model)


def test_layers_that_axonn_was_not_given_and_its_own_tables(tmp_path: Path, model: Pair) -> None:
    """Which layers are parallel is the user's choice in AxoNN's expert mode; the shapes in the files tell."""
    grid = AxonnGrid(2, 1, 3)
    folder = written(tmp_path / "set", model, grid)
    for r, _, d in grid.ranks():
        path = folder / AxonnGrid(r, 0, d).folder / "model.safetensors"
        tensors = load_file(path)
        tensors["down.weight"], tensors["down.bias"] = model.down.weight.detach(), model.down.bias.detach()
        tensors["tokens.weight"] = model.tokens.weight.detach().chunk(2, dim=1)[r].reshape(-1).chunk(3)[d].clone()
        save_file(tensors, path)
    assert_same(AxonnSource(folder, model), model)


def a_rank(world: wire.World, folder: Path, tensor: dict[str, int]) -> tuple[int, int, int, dict[str, Tensor]]:
    loaded = hf_causal_lm(folder)
    source = MeteredBoxes(loaded.weights)
    run = placed(loaded.model, world, tensor, source)
    return source.read, source.most, own_elements(run), run.logical_state()


def test_from_a_run_to_files_to_another_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights, a config.json beside the ranks' folders; read by six ranks of another grid, each its own blocks."""
    monkeypatch.setattr(cut, "CHUNK", CHUNK)
    model = trained(tmp_path / "run", CASES["llama, tied"], torch.float32)
    result = export(tmp_path / "run", tmp_path / "out", AxonnGrid(4, 2, 2))
    assert result.ok and result.parallel == 2 * 7 + 1 and "read back and equal" in result.text()
    assert json.loads(json.dumps(result.to_dict()))["grid"] == [4, 2, 2]
    for read, most, own, state in wire.threads.launch(6, a_rank, tmp_path / "out", {"x": 3, "y": 2}):
        assert read == own and most <= CHUNK
        for name, parameter in model.named_parameters():
            assert torch.equal(state[name], parameter), name


def test_one_file_of_one_rank_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "run", CASES["gpt"], torch.float32)
    held: list[int] = []

    def saving(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors.values()))
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(axonn_files, "save_file", saving)
    export(tmp_path / "run", tmp_path / "out", AxonnGrid(2, 2, 2))
    first = next((tmp_path / "out").rglob("*.safetensors"))
    assert len(held) == 8 and all(size < first.stat().st_size for size in held)


def test_an_export_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="expected a whole checkpoint, found none"):
        export(tmp_path / "run", tmp_path / "out", GRID)
    trained(tmp_path / "run", CASES["gpt2"])
    with pytest.raises(ExportError, match="at least 1, found"):
        export(tmp_path / "run", tmp_path / "out", AxonnGrid(2, 0, 1))
    with pytest.raises(ExportError, match="expected an empty folder or none"):
        export(tmp_path / "run", tmp_path / "run", GRID)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_sets_that_are_not_whole(tmp_path: Path, model: Pair) -> None:
    whole = written(tmp_path / "whole", model)

    def broken(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    def refused(folder: Path, words: str) -> None:
        with pytest.raises(AxonnError, match=words):
            AxonnSource(folder, model)

    shutil.rmtree(broken("gone") / "tp_row_1_col_0_depth_0")
    refused(tmp_path / "gone", "expected a folder for every rank .* found none for tp_row_1_col_0_depth_0")
    file = broken("pickled") / "tp_row_0_col_0_depth_0" / "model.safetensors"
    file.rename(file.with_suffix(".pt"))
    refused(tmp_path / "pickled", "found model.pt; pickles can run code, so they are never read")
    file = broken("cut") / "tp_row_0_col_2_depth_1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    refused(tmp_path / "cut", "tp_row_0_col_2_depth_1.*not a whole safetensors file")
    file = broken("renamed") / "tp_row_1_col_2_depth_1" / "model.safetensors"
    save_file({name.replace("up", "upp"): tensor for name, tensor in load_file(file).items()}, file)
    refused(tmp_path / "renamed", r"tp_row_1_col_2_depth_1: missing 'up.bias' \(nearest: 'upp.bias'\)")
    shutil.copy(file, file.with_name("two.safetensors"))
    refused(tmp_path / "renamed", "expected one safetensors file, found 2")
    refused(tmp_path, "expected folders tp_row_R_col_C_depth_D, found none")


def test_layers_named_as_transposed_must_be_there_and_divide(model: Pair) -> None:
    with pytest.raises(AxonnError, match="expected paths of linear layers, found norm"):
        AxonnLayout.of(model, GRID, ["norm"])
    with pytest.raises(AxonnError, match="odd: expected sizes that divide"):
        AxonnLayout.of(model, GRID, ["odd"])


def test_a_folder_with_both_kinds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tp_row_0_col_0_depth_0").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(LoaderError, match="found both"):
        hf_causal_lm(tmp_path)


def test_the_files_say_what_is_transposed(tmp_path: Path, model: Pair) -> None:
    written(tmp_path / "set", model, transposed=["down"])
    with safe_open(tmp_path / "set" / GRID._replace(row=0, col=0, depth=0).folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "axonn.transposed": '["down"]'}
