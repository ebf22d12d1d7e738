"""A run folder as a run of two ranks writes it, with invented numbers: for tests of the report, and for the browser."""

import json
import math
from pathlib import Path

from fourfold.ledger import Ledger

CONFIG = """\
seed: 1
model: {name: gpt, layers: 2, width: 64, heads: 2, context: 64}
data: {name: stdlib, sequence: 64, vocabulary: 512}
train: {steps: 120, batch: 8, evaluate_every: 30}
plan: {placement: {z: 2, shard: parameters}, schedule: {name: accumulate, microbatches: 2}}
"""
HOSTILE = "<script>document.title = 'broken'</script> & \"quotes\""
MS = 1_000_000


def write_run(folder: Path, steps: int = 120, ranks: int = 2) -> Path:
    """Write the folder and give it back."""
    (folder / "ledger").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "origin.json").write_text(json.dumps(origin()))
    (folder / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in journal(steps)))
    (folder / "verify.json").write_text(json.dumps(verdict()))
    for rank in range(ranks):
        (folder / "ledger" / f"rank-{rank}.json").write_text(json.dumps(measured(rank, steps).to_dict()))
    (folder / "ledger" / "forecast.json").write_text(json.dumps(forecast().to_dict()))
    return folder


def origin():
    return {
        "when": "2026-11-30T14:00:00+0000",
        "command": ["fourfold", "train", HOSTILE],
        "python": "3.11.7",
        "system": "Linux",
        "processors": 2,
        "versions": {"fourfold": "0.1.0", "torch": "2.13.0", "transformers": None},
        "git": {"commit": "0123456789abcdef", "changed": []},
        "plan": ["plan: z 2 shard parameters (given)"],
    }


def journal(steps):
    yield {
        "kind": "start",
        "step": 0,
        "plan": "z 2 shard parameters, accumulate 2",
        "ranks": 2,
        "parameters": 1_234_567,
    }
    yield {"kind": "note", "step": 0, "text": "the last 17 tokens do not fill a row"}
    for step in range(1, steps + 1):
        wiggle = 0.05 * math.sin(step * 1.7)
        yield {
            "kind": "step",
            "step": step,
            "loss": 6.2 * math.exp(-step / 60) + 1.9 + wiggle,
            "count": 512,
            "gradient_norm": 0.8,
            "lr": 1e-3,
            "seconds": 0.05 + 0.01 * wiggle,
            "tokens_per_second": 10_000 + 2_000 * wiggle,
            "mfu": 0.31,
            "memory": 300 << 20,
        }
        if step % 30 == 0:
            yield {"kind": "evaluation", "step": step, "loss": 6.2 * math.exp(-step / 60) + 2.1, "count": 1024}
            yield {"kind": "checkpoint", "step": step, "path": f"checkpoints/{step}"}
    yield {"kind": "sample", "step": steps, "text": "def forward(self):\n    return " + HOSTILE}
    yield {"kind": "end", "step": steps, "stopped": False, "validation": 2.9, "sample": None}


def measured(rank, steps):
    ledger = Ledger(rank=rank, recording=True)
    for step in range(3):
        begin = (100 * step + rank) * MS
        ledger.span("step", f"step {step + 2}", begin, begin + 50 * MS)
        for number in range(4):
            start = begin + (2 + 11 * number) * MS
            args = {"kind": "weight", "bytes": 4000, "exposed": (1 + rank) * MS}
            ledger.span("wire:z", "all_gather", start, start + 3 * MS, **args)
        ledger.span("data", "rows", begin, begin + MS)
    ledger.begin(steps - 1)
    ledger.send("z", "weight", "all_gather", 16_000, calls=4)
    ledger.send("z", "gradient", "reduce_scatter", 12_000, calls=4)
    ledger.send("z+data", "control", "all_gather", 40)
    for category, nbytes in (("parameters", 5 << 20), ("optimizer", 10 << 20), ("activations", 7 << 20)):
        ledger.peak(category, nbytes + rank * 1000)
    ledger.notes |= {"step seconds": 0.050}
    ledger.begin(-1)
    ledger.send("z", "control", "all_gather", 999)
    return ledger


def forecast():
    ledger = Ledger()
    ledger.send("z", "weight", "all_gather", 16_000, calls=4)
    ledger.send("z", "gradient", "reduce_scatter", 12_000, calls=4)
    ledger.send("z+data", "control", "all_gather", 48)
    for category, nbytes in (("parameters", 5 << 20), ("optimizer", 10 << 20), ("activations", 6 << 20)):
        ledger.peak(category, nbytes)
    ledger.notes |= {"step seconds": 0.045}
    return ledger


def verdict():
    step = {"loss": 8.1, "serial_loss": 8.1, "loss_error": 0.0, "gradient_error": 3.1e-16, "gradient_layer": "blocks.1"}
    step |= {"weight_error": 1.2e-16, "weight_layer": "norm"}
    return {
        "ok": True,
        "verdict": "equal to serial: worst difference 3.1e-16 in blocks.1, allowed 1.0e-12",
        "steps": [{"step": number, **step} for number in range(3)],
    }
