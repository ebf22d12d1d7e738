"""FLOPs by the published formula, and utilisation by its definition."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from fourfold.models import gpt
from fourfold.training.losses import cross_entropy
from fourfold.training.throughput import Throughput, estimated_flops, flops_of, gemm_peak


def test_flops_of_a_gpt_are_the_formula():
    layers, width, time, vocabulary = 3, 32, 16, 50
    with torch.device("meta"):
        model = gpt.GPT(gpt.Config(vocabulary=vocabulary, context=time, layers=layers, width=width, heads=4))
    batch = {"tokens": torch.zeros(2, time + 1, dtype=torch.int64)}
    # Forward: 24 w^2 a token and block, attention 4 T w a token and block, head 2 w V a token; backward twice that.
    forward = 2 * time * (layers * (24 * width**2 + 4 * time * width) + 2 * width * vocabulary)
    assert flops_of(model, cross_entropy, batch) == 3 * forward
    assert all(parameter.grad is None for parameter in model.parameters())


def test_flops_of_a_stock_model_that_looks_at_values_are_the_formula():
    """A Llama looks for packed sequences in its positions: there are no values of meta tensors to look at."""
    layers, width, inner, time, vocabulary = 2, 32, 48, 16, 50
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    batch = {"tokens": torch.zeros(2, time + 1, dtype=torch.int64)}
    # q and out w^2, k and v half of it, three w * inner; attention over all pairs
    block = 2 * (3 * width**2 + 3 * width * inner) + 4 * time * width
    assert flops_of(model, cross_entropy, batch) == 3 * 2 * time * (layers * block + 2 * width * vocabulary)
    assert all(weight.grad is None and weight.is_meta for weight in model.parameters())


def test_counting_is_not_seen_by_models_on_other_threads():
    """Ranks may be threads, one of which counts while others rehearse."""
    model, batch = torch.nn.Linear(3, 2, device="meta"), {"x": torch.zeros(1, 3)}
    seen: list[str] = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def other() -> None:
        with Names():
            twin(torch.ones(1, 3, requires_grad=True))

    def loss(model, batch):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()
        return model(batch["x"]).sum(), 1

    twin = torch.nn.Linear(3, 2)
    assert flops_of(model, loss, batch) == 2 * 3 * 2 * 2
    assert "linear" in seen and "register_hook" not in seen


def test_utilisation_is_work_over_what_all_ranks_could_do():
    assert Throughput(flops=8e9, peak=1e9, ranks=4).utilisation(4.0) == 0.5


def test_the_peak_is_measured_in_the_type_that_computes():
    assert gemm_peak("fp32", torch.device("cpu")) > 1e8
    assert gemm_peak("fp64", torch.device("cpu")) > 1e8


def test_the_estimate_is_six_a_parameter_and_token():
    assert estimated_flops(torch.nn.Linear(10, 3), tokens=7) == 6 * 33 * 7
