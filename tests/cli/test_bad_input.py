"""Bad input: exit code 2 and one screen of plain words with place, key and a way out; never a traceback."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fourfold.cli import main, settings


@dataclass(frozen=True)
class Bad:
    """One malformed input.

    Attributes:
        name: of the row.
        text: of the config file; bytes are written as they are, None: no file.
        says: what the message must hold: the key, and the remedy or the nearest name.
        overrides: after the config.
        ending: of the config file.
    """

    name: str
    text: str | bytes | None
    says: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    ending: str = ".yaml"


def bad(name: str, text: str | bytes | None, *says: str, over: tuple[str, ...] = (), ending: str = ".yaml") -> Bad:
    return Bad(name, text, says, over, ending)


def over(name: str, override: str, *says: str) -> Bad:
    return Bad(name, "seed: 1\n", ("command line", *says), (override,))


FORMAT = [
    bad("yaml: unclosed bracket", "optimizer: {betas: [0.9\n", "bad.yaml:2", "not YAML", "brackets"),
    bad("yaml: unclosed quote", 'hardware: "here\n', "bad.yaml", "not YAML", "quotes"),
    bad("yaml: tab", "train:\n\tsteps: 3\n", "bad.yaml:2", "indent by spaces, not by tabs"),
    bad("yaml: wrong indentation", "train:\n  steps: 3\n batch: 4\n", "bad.yaml:3", "indentation"),
    bad("yaml: missing space after colon", "train:\n  steps:3\n", "train", "bad.yaml", "key: value"),
    bad("yaml: duplicate key", "seed: 1\nseed: 2\n", "bad.yaml:2: seed: written twice, first on line 1; remove one"),
    bad("yaml: duplicate section", "train: {steps: 3}\nseed: 1\ntrain: {batch: 4}\n", "bad.yaml:3: train", "line 1"),
    bad("yaml: duplicate inner key", "train:\n  steps: 3\n  steps: 4\n", "bad.yaml:3: train.steps", "line 2"),
    bad("yaml: two documents", "seed: 1\n---\nseed: 2\n", "bad.yaml", "document"),
    bad("yaml: a list at the top", "- seed\n- 3\n", "bad.yaml:1", "key: value"),
    bad("yaml: only text", "just words\n", "bad.yaml:1", "key: value"),
    bad("yaml: python tag", "seed: !!python/object/apply:os.system ['true']\n", "seed", "tag", "plain value"),
    bad("yaml: tag that lies", "seed: !!int many\n", "bad.yaml:1: seed", "!!int", "write a number"),
    bad("yaml: unknown anchor", "model: *nothing\n", "bad.yaml:1", "nothing"),
    bad("yaml: merge key", "a: &a {steps: 3}\ntrain:\n  <<: *a\n", "train.<<", "no such setting"),
    bad("yaml: key is a list", "? [a, b]\n: 3\n", "bad.yaml:1", "a key is a word"),
    bad("yaml: control characters", "seed: 1\nhardware: a\x07b\n", "bad.yaml", "odd characters"),
    bad("yaml: deep", "plan: " + "[" * 300 + "]" * 300, "bad.yaml:1", "nested too deep"),
    bad("yaml: very deep", "plan: " + "[" * 50_000 + "]" * 50_000, "bad.yaml:1", "nested too deep"),
    bad(
        "yaml: alias bomb",
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "expand to more than 20000 values",
        "use fewer",
    ),
    bad("yaml: alias to itself", "plan: &p\n  placement: *p\n", "plan", "holds itself"),
    bad("yaml: many values", "plan: [" + "1," * 30_000 + "]", "bad.yaml:1", "more than 20000 values"),
    bad("yaml: number of ten thousand digits", f"seed: {'9' * 10_000}\n", "seed", "write a number"),
    bad("toml: syntax", "seed = \n", "bad.toml:1", "not TOML", "quote text", ending=".toml"),
    bad("toml: bare word", "hardware = here\n", "bad.toml:1", "quote text", ending=".toml"),
    bad("toml: unclosed", 'seed = 1\nhardware = "here\n', "bad.toml:2", "close every quote", ending=".toml"),
    bad("toml: duplicate key", "seed = 1\nseed = 2\n", "bad.toml:2", "written twice", ending=".toml"),
    bad("toml: duplicate table", "[train]\nsteps=3\n[train]\nbatch=4\n", "bad.toml:3", "twice", ending=".toml"),
    bad("toml: wrong type", '[train]\nsteps = "3"\n', "bad.toml:2: train.steps", "write 3", ending=".toml"),
    bad("toml: unknown key", "[optimizer]\n\nlrr = 1.0\n", "bad.toml:3: optimizer.lrr", "'lr'", ending=".toml"),
    bad("toml: date", "seed = 2020-01-01\n", "bad.toml:1: seed", "'2020-01-01'", "explain seed", ending=".toml"),
    bad("toml: yaml inside", "seed: 1\n", "bad.toml:1", "not TOML", ending=".toml"),
]

FILES = [
    bad("no file", None, "no such file", "check the path"),
    bad("empty file", "", "bad.yaml", "found none", "for instance seed: 1"),
    bad("only comments", "# nothing\n", "bad.yaml", "found none", "for instance seed: 1"),
    bad("empty toml", "", "bad.toml", "for instance seed: 1", ending=".toml"),
    bad("binary", b"\x00\x01\x02\x03" * 9, "binary", "right file"),
    bad("not UTF-8", "seed: 1\nhardware: café\n".encode("latin-1"), "bad.yaml:2", "0xe9", "UTF-8"),
    bad("UTF-16", "seed: 1\n".encode("utf-16"), "bad.yaml", "UTF-8"),
    bad("huge", b"# " + b"x" * 300_000, "300002 bytes", "right file"),
    bad("wrong ending", '{"seed": 1}', "found '.json'", ".yaml, .yml or .toml", ending=".json"),
    bad("no ending", "seed: 1", "found no ending", "rename", ending=""),
]

KEYS = [
    bad("unknown at the top", "sede: 1\n", "bad.yaml:1: sede", "did you mean 'seed'?"),
    bad("misplaced at the top", "lr: 1e-3\n", "lr: no such setting", "'optimizer.lr'"),
    bad("unknown in model", "model: {layer: 3}\n", "model.layer", "'layers'"),
    bad("of the other model", "model: {attention: sdpa}\n", "model.attention", "belongs to hf_causal_lm"),
    bad("unknown in data", "data: {sequnce: 3}\n", "data.sequnce", "'sequence'"),
    bad("of the other data", "data: {name: stdlib, files: [a.txt]}\n", "data.files", "belongs to text or tokens"),
    bad("unknown in loss", "loss: {nam: cross_entropy}\n", "loss.nam", "'name'"),
    bad("unknown in optimizer", "optimizer:\n  lr: 1\n  beta: [0.9, 0.9]\n", "bad.yaml:3: optimizer.beta", "'betas'"),
    bad("of the other optimizer", "optimizer: {name: sgd, eps: 1e-8}\n", "optimizer.eps", "belongs to adamw"),
    bad("unknown in train", "train: {stepz: 3}\n", "train.stepz", "'steps'"),
    bad("unknown in sample", "train: {sample: {promt: a}}\n", "train.sample.promt", "'prompt'"),
    bad("unknown in run", "run: {foldr: a}\n", "run.foldr", "'folder'"),
    bad("unknown in launch", "launch: {worker: 2}\n", "launch.worker", "'workers'"),
    bad("dotted key in a file", "train.steps: 3\n", "train.steps", "indented under it"),
    bad("missing files", "data: {name: text}\n", "data.files", "write `files: …` under data"),
    bad("nothing like it", "zzzz: 1\n", "zzzz", "there is seed, model"),
]

VALUES = [
    bad("bool for int", "seed: true\n", "seed", "whole number", "found true"),
    bad("text for int", "train: {steps: many}\n", "train.steps", "'many'", "config explain train.steps"),
    bad("quoted int", 'train: {steps: "10"}\n', "train.steps", "write 10, without quotes"),
    bad("underscores", "train: {steps: 1_000}\n", "train.steps", "write 1000, without quotes or underscores"),
    bad("float for int", "train: {batch: 8.0}\n", "train.batch", "write 8"),
    bad("broken float for int", "train: {batch: 8.5}\n", "train.batch", "found 8.5"),
    bad("null for int", "train: {batch: null}\n", "train.batch", "found nothing"),
    bad("list for int", "train: {batch: [8]}\n", "train.batch", "found a list of 1"),
    bad("mapping for int", "train: {batch: {size: 8}}\n", "train.batch", "found settings"),
    bad("bool for float", "optimizer: {lr: true}\n", "optimizer.lr", "finite number above 0, found true"),
    bad("text for float", "optimizer: {lr: fast}\n", "optimizer.lr", "'fast'", "explain optimizer.lr"),
    bad("no for bool", "model: {tie_embeddings: no}\n", "model.tie_embeddings", "write false"),
    bad("yes for bool", "run: {resume: yes}\n", "run.resume", "write true"),
    bad("one for bool", "run: {resume: 1}\n", "run.resume", "true or false, found 1"),
    bad("number for text", "hardware: 8\n", "hardware", "text", "found 8"),
    bad("section is a number", "train: 5\n", "train", "write `train:` and its settings under it"),
    bad("section is a list", "train: [5]\n", "train", "found a list of 1"),
    bad("section is empty", "train:\nseed: 1\n", "bad.yaml:1: train", "remove the line"),
    bad("kind is a list", "model: [gpt]\n", "model", "settings"),
    bad("unknown model", "model: {name: gtp}\n", "model.name", "did you mean 'gpt'?"),
    bad("unknown data", "data: {name: stdlb}\n", "data.name", "did you mean 'stdlib'?"),
    bad("unknown loss", "loss: {name: cross_entropi}\n", "loss.name", "cross_entropy"),
    bad("unknown optimizer", "optimizer: {name: adam}\n", "optimizer.name", "did you mean 'adamw'?"),
    bad("name is a number", "optimizer: {name: 3}\n", "optimizer.name", "one of adamw, sgd, found 3"),
    bad("unknown word", "optimizer: {decay: cosin}\n", "optimizer.decay", "did you mean 'cosine'?"),
    bad("unknown backend", "launch: {backend: goo}\n", "launch.backend", "did you mean 'gloo'?"),
    bad("betas of three", "optimizer: {betas: [0.9, 0.9, 0.9]}\n", "optimizer.betas", "two numbers"),
    bad("betas of one", "optimizer: {betas: [0.9]}\n", "optimizer.betas", "two numbers"),
    bad("betas of text", "optimizer: {betas: [0.9, high]}\n", "optimizer.betas.1", "'high'"),
    bad("beta of one", "optimizer: {betas: [0.9, 1.0]}\n", "optimizer.betas.1", "below 1"),
    bad("norm of three", "optimizer: {clip_norm: 3}\n", "optimizer.clip_norm", "2 or inf"),
    bad("tensorboard maybe", "run: {tensorboard: maybe}\n", "run.tensorboard", "auto, or true or false"),
    bad("files is text", "data: {name: text, files: a.txt}\n", "data.files", 'write ["a.txt"]'),
    bad("no files", "data: {name: text, files: []}\n", "data.files", "at least one path"),
]

NUMBERS = [
    bad("nan", "optimizer: {lr: .nan}\n", "optimizer.lr", "finite", "found nan"),
    bad("infinity", "optimizer: {lr: .inf}\n", "optimizer.lr", "finite", "found inf"),
    bad("too large", "optimizer: {lr: 1e999}\n", "optimizer.lr", "finite", "found inf"),
    bad("huge int", f"train: {{steps: {10**40}}}\n", "train.steps", "about 40 digits"),
    bad("toml nan", "[optimizer]\nclip = nan\n", "bad.toml:2: optimizer.clip", "finite", ending=".toml"),
    bad("negative seed", "seed: -1\n", "seed", "at least 0"),
    bad("negative lr", "optimizer: {lr: -1e-3}\n", "optimizer.lr", "above 0, found -0.001"),
    bad("zero lr", "optimizer: {lr: 0}\n", "optimizer.lr", "above 0, found 0"),
    bad("zero steps", "train: {steps: 0}\n", "train.steps", "at least 1, found 0"),
    bad("negative batch", "train: {batch: -8}\n", "train.batch", "at least 1, found -8"),
    bad("zero layers", "model: {layers: 0}\n", "model.layers", "at least 1"),
    bad("dropout of one", "model: {dropout: 1.0}\n", "model.dropout", "below 1"),
    bad("held out too much", "data: {held_out: 0.9}\n", "data.held_out", "from 0 to 0.5"),
    bad("vocabulary too small", "data: {vocabulary: 100}\n", "data.vocabulary", "from 257"),
    bad("no workers", "launch: {workers: 0}\n", "launch.workers", "at least 1"),
    bad("negative restarts", "launch: {max_restarts: -1}\n", "launch.max_restarts", "at least 0"),
    bad("never stalls", "launch: {stall_after: .inf}\n", "launch.stall_after", "finite"),
    bad("keep none", "run: {keep: 0}\n", "run.keep", "at least 1"),
    bad("negative temperature", "train: {sample: {temperature: -1}}\n", "train.sample.temperature", "at least 0"),
    bad("port too large", 'launch: {address: "here:70000"}\n', "launch.address", "port from 1 to 65535"),
    bad("no port", "launch: {address: here}\n", "launch.address", "host:port"),
]

RELATIONS = [
    bad("heads do not divide width", "model: {width: 100, heads: 7}\n", "bad.yaml:1: model.width", "try 98 or 105"),
    bad("heads above width", "model: {width: 4, heads: 6}\n", "model.width", "try 6"),
    bad(
        "sequence above context", "data: {sequence: 256}\n", "data.sequence", "model.context (128)", "model.context=256"
    ),
    bad(
        "evaluate without text",
        "data: {held_out: 0}\ntrain: {evaluate_every: 5}\n",
        "data.held_out",
        "evaluate_every=0",
    ),
    bad("hf without source", "model: {name: hf_causal_lm}\n", "model.path", "set one of them"),
    bad(
        "hf with two",
        "model: {name: hf_causal_lm, path: ., config: {model_type: gpt2}}\n",
        "model.config",
        "remove one",
    ),
    bad("hf without type", "model: {name: hf_causal_lm, config: {a: 1}}\n", "model.config.model_type", "llama"),
]

PATHS = [
    bad("model nowhere", "model: {name: hf_causal_lm, path: modl}\n", "bad.yaml:1: model.path", "'model'"),
    bad("model is a file", "model: {name: hf_causal_lm, path: notes.txt}\n", "model.path", "found the file"),
    bad("model without config", "model: {name: hf_causal_lm, path: model}\n", "model.path", "config.json"),
    bad("text nowhere", "data: {name: text, files: [note.txt]}\n", "data.files.0", "did you mean 'notes.txt'?"),
    bad("second text", "data:\n  name: text\n  files:\n  - notes.txt\n  - b\n", "bad.yaml:5: data.files.1", "no 'b'"),
    bad("pattern of nothing", "data: {name: text, files: ['*.md']}\n", "data.files.0", "'*.md'", "relative to"),
    bad("text is a folder", "data: {name: text, files: [model]}\n", "data.files.0", "write model/**/*.txt"),
    bad("cache is a file", "data: {cache: notes.txt}\n", "data.cache", "choose another"),
    bad("runs is a file", "run: {folder: notes.txt}\n", "run.folder", "choose another"),
    bad("name climbs out", "run: {name: ../../etc}\n", "run.name", "letters, digits"),
    bad("name is hidden", "run: {name: .a}\n", "run.name", "not beginning with a dot"),
    bad("cluster nowhere", "hardware: clustr.yaml\n", "hardware", "did you mean 'cluster.yaml'?"),
]

PLANS = [
    bad("plan is a word", "plan: automatic\n", "plan: expected auto, or settings", "'automatic'", "explain plan"),
    bad("plan is a list", "plan: [a]\n", "plan: expected auto, or settings", "explain plan"),
    bad("unknown choice", "plan: {placment: {}}\n", "bad.yaml:1: plan.placment", "'placement'"),
    bad("unknown placement", "plan:\n  placement:\n    dta: 2\n", "bad.yaml:3: plan.placement.dta", "'data'"),
    bad("unknown shard", "plan: {placement: {shard: parameter}}\n", "plan.placement.shard", "'parameters'"),
    bad("unknown precision", "plan: {placement: {precision: bf61}}\n", "plan.placement.precision", "'bf16'"),
    bad("z without shard", "plan: {placement: {z: 2}}\n", "plan.placement.z", "use data: 2"),
    bad("data of zero", "plan: {placement: {data: 0}}\n", "plan.placement.data", "at least 1"),
    bad("data of text", "plan: {placement: {data: two}}\n", "plan.placement.data", "whole number"),
    bad("nan in a plan", "plan: {placement: {bucket: .nan}}\n", "plan.placement.bucket", "finite number, found nan"),
    bad("chunks of zero", "plan: {placement: {chunks: 0}}\n", "plan.placement.chunks", "at least 1"),
    bad("chunks of nothing", "plan: {placement: {chunks: 2}}\n", "plan.placement.chunks", "x or y above 1"),
    bad("kernels of nothing", "plan: {placement: {kernels: tuned}}\n", "plan.placement.kernels", "x or y above 1"),
    bad("unknown kernels", "plan: {placement: {kernels: tune}}\n", "plan.placement.kernels", "'tuned'"),
    bad("placement is a list", "plan: {placement: [2]}\n", "plan.placement", "mapping"),
    bad("unknown schedule", "plan: {schedule: accumulat}\n", "plan.schedule", "'accumulate'"),
    bad("unknown option", "plan: {schedule: {name: accumulate, microbatch: 2}}\n", "plan.schedule", "'microbatches'"),
    bad("unknown rule", "plan: {sync: bps}\n", "plan.sync", "'bsp'"),
    bad("unknown wire", "plan: {wire: {gradients: none}}\n", "plan.wire.gradients", "'gradient'"),
    bad("unknown codec", "plan: {wire: {gradient: zzz}}\n", "plan.wire.gradient", "it has"),
    bad("unknown device", "hardware: 8x rtx4091\n", "bad.yaml:1: hardware", "'rtx4090'"),
    bad("not a machine", "hardware: a few cards\n", "hardware", "8x rtx4090"),
]

OVERRIDES = [
    over("no equals sign", "train.steps", "expected key.path=value", "'train.steps'"),
    over("no key", "=3", "expected key.path=value", "'=3'"),
    over("empty part", "train..steps=3", "expected key.path=value"),
    over("space in the key", "train steps=3", "expected key.path=value"),
    over("unclosed list", "optimizer.betas=[0.9", "optimizer.betas", "quote and bracket closed"),
    over("list of bare words", "data.files=[a/b.txt]", "data.files", """write 'data.files=["a/b.txt"]'"""),
    bad(
        "text for a list",
        "data: {name: text}\n",
        "data.files",
        """write 'data.files=["a/b.txt"]'""",
        over=("data.files=a/b.txt",),
    ),
    over("unclosed quote", 'hardware="here', "hardware", "quote and bracket closed"),
    over("wrong type", "train.steps=many", "train.steps", "'many'"),
    over("quoted number", 'train.steps="3"', "train.steps", "write 3"),
    over("unknown key", "train.stepz=3", "train.stepz", "'steps'"),
    over("into a number", "seed.x=3", "seed", "found settings"),
    over("non-finite", "optimizer.lr=nan", "optimizer.lr", "finite"),
    over("algorithm", 'plan.placement.tensor={algorithm="5d"}', "plan.placement.tensor", "'5d' (did you mean '2.5d'?)"),
    over(
        "algorithms", 'plan.placement.tensor="9"', "plan.placement.tensor", "it has: 1d, 1d-sequence, 2.5d, 2d, 3d, 4d"
    ),
    over("a capital", 'plan.placement.tensor={algorithm="4D"}', "plan.placement.tensor", "'4D' (did you mean '4d'?)"),
    over("its key", 'plan.placement.tensor={algoritm="4d"}', "plan.placement.tensor.algoritm", "'algorithm'"),
    over("no algorithm", "plan.placement.tensor={y=2}", "plan.placement.tensor.algorithm", "found nothing"),
    over("its option", 'plan.placement.tensor={algorithm="2.5d",e=2}', "plan.placement.tensor", "'2.5d' has no option"),
    over("plan", "plan.placement.z=2", "plan.placement.z", "use data: 2"),
    over("unknown device", "hardware=8x rtx409", "hardware", "'rtx4090'"),
    bad("twice", "seed: 1\n", "train.steps: given twice", over=("train.steps=3", "train.steps=4")),
    bad("two lines", "seed: 1\n", "train.steps", "found '3", over=("train.steps=3\nseed = 4",)),
]

ROWS = [*FORMAT, *FILES, *KEYS, *VALUES, *NUMBERS, *RELATIONS, *PATHS, *PLANS, *OVERRIDES]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a few things to be near to; a config that is accepted ends in an AssertionError."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "cluster.yaml").write_text("nodes: 1")

    def accepted(loaded: object) -> None:
        raise AssertionError(f"accepted: {loaded}")

    monkeypatch.setattr(settings, "blaming", accepted)
    return tmp_path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_says_where_what_and_a_way_out(row: Bad, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = folder / f"bad{row.ending}"
    if row.text is not None:
        config.write_bytes(row.text if isinstance(row.text, bytes) else row.text.encode())
    assert main(["train", config.name, *row.overrides]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for words in row.says:
        assert words in err
    for words in ("Traceback", "pydantic", "Error", "{'"):
        assert words not in err
    assert err.count("\n") <= 24


def test_there_are_enough_rows_and_no_two_alike() -> None:
    assert len(ROWS) >= 60
    assert len({row.name for row in FORMAT}) == len(FORMAT)
    assert len({(row.text, row.overrides, row.ending) for row in ROWS}) == len(ROWS)


def test_everything_that_is_wrong_is_said_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "seed: -1\nmodel: {layer: 2}\ndata: {name: text, files: [gone.txt]}\nplan: {placement: {z: 2}}\nseed: 3\n"
    (folder / "bad.yaml").write_text(text)
    assert main(["train", "bad.yaml", "train.steps=0", "run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    starts = (
        "6 problems:",
        "bad.yaml:2: model.layer: ",
        "bad.yaml:3: data.files.0: ",
        "bad.yaml:4: plan.placement.z: ",
        "bad.yaml:5: seed: written twice, first on line 1",
        "command line: expected key.path=value",
        "command line: train.steps: ",
    )
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_a_screen_holds_twenty_problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.yaml").write_text("".join(f"key{number}: 1\n" for number in range(50)))
    assert main(["train", "bad.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], len(lines), lines[-1]) == ("50 problems:", 22, "… and 30 more")
