"""The forecast of a step's memory beside the allocator's peak, for four kinds of model; no GPU, no profiling run.

    OMP_NUM_THREADS=1 python benchmarks/memory_forecast.py

Prints, for each model, the forecast, the measured peak (what lay there before a steady step and what the profiler saw
the CPU allocator hand out in it), the error, and the seconds that forecasting took. Exits with 1 beyond 5 %.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from fourfold.models.convnet import Config as ConvConfig
from fourfold.models.convnet import ConvNet
from fourfold.models.gpt import GPT
from fourfold.models.gpt import Config as GPTConfig
from fourfold.planner import Subject, Traces, measured_peak
from fourfold.planner.memory import plain
from fourfold.planner.trace import Settings
from fourfold.training.losses.cross_entropy import cross_entropy

BOUND = 0.05
Case = tuple[Callable[[], nn.Module], Callable[..., Any], dict[str, Tensor]]


def tokens(rows: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * length).view(rows, length) % vocabulary
    return {"tokens": ids, "targets": ids}


def classified(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["images"]), batch["labels"], reduction="sum"), len(batch["labels"])


LLAMA = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
)
BERT = BertConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    max_position_embeddings=256,
)
CASES: dict[str, Case] = {
    "GPT, 12 layers": (
        lambda: GPT(GPTConfig(vocabulary=4096, context=256, layers=12, width=256, heads=8)),
        cross_entropy,
        tokens(4, 256, 4096),
    ),
    "Llama (transformers)": (lambda: LlamaForCausalLM(LLAMA), cross_entropy, tokens(4, 256, 4096)),
    "BERT (transformers)": (lambda: BertForMaskedLM(BERT), cross_entropy, tokens(4, 256, 4096)),
    "convnet": (
        lambda: ConvNet(ConvConfig(width=64, blocks=8)),
        classified,
        {"images": torch.ones(16, 3, 48, 48), "labels": torch.arange(16) % 10},
    ),
}


def forecast(build: Callable[[], nn.Module], loss: Callable[..., Any], batch: dict[str, Tensor]) -> int:
    """Bytes at the peak, without having built the model."""
    rows = len(next(iter(batch.values())))
    settings = Settings(rows, streams=False)
    traces = Traces(Subject(build, loss, {name: tensor[:2] for name, tensor in batch.items()}, rows))
    return plain(traces.tape(settings), traces.workspace(settings), states=2, itemsize=4).highest


def measure(build: Callable[[], nn.Module], loss: Callable[..., Any], batch: dict[str, Tensor]) -> int:
    """Bytes at the peak of a steady step of one ordinary process with fused AdamW."""
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss(model, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    gc.collect()
    weights = sum(weight.nbytes for weight in model.parameters())
    around = sum(tensor.nbytes for tensor in (*model.buffers(), *batch.values()))
    return 3 * weights + around + measured_peak(step).peak


def main() -> int:
    """Compare all cases; 1 if one is out of bounds."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    print(f"{'model':<24}{'forecast MiB':>14}{'measured MiB':>14}{'error':>9}{'seconds':>9}{'cpu':>8}")
    worst = 0.0
    for name, case in CASES.items():
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        said = forecast(*case)
        wall, cpu = time.perf_counter() - wall, sum(os.times()[:4]) - cpu
        found = measure(*case)
        error = said / found - 1
        worst = max(worst, abs(error))
        print(f"{name:<24}{said / 2**20:>14.2f}{found / 2**20:>14.2f}{error:>9.2%}{wall:>9.1f}{cpu:>8.1f}")
    print(f"worst error {worst:.2%}, bound {BOUND:.0%}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
