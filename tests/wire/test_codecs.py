"""The laws of every codec (facts, communication.md §2.1), for each file in wire/codecs; then inside collectives."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fourfold import wire
from fourfold.plan import Codec, Technique, techniques
from fourfold.wire import formulas

CODECS = techniques("codec")
FLOATS = st.floats(-6e4, 6e4, width=32, allow_subnormal=False)
"""Below the smallest normal number a cast keeps fewer digits than its contraction says."""


def codec_of(name: str):
    technique = Technique.find("codec", name)
    return technique.module.Codec(technique.options)


class Scaled:
    """Eight bits an element behind a header: a codec whose payload is bytes, and not linear in the elements."""

    exact, rides_allreduce, contraction = False, False, 0.9

    def encode(self, tensor: Tensor) -> Tensor:
        scale = tensor.abs().amax().reshape(1).float() / 127 if tensor.numel() else torch.zeros(1)
        codes = (tensor / scale.clamp_min(1e-30)).round().to(torch.int8)
        return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)])

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        scale = payload[:4].clone().view(torch.float32)
        return (payload[4 : 4 + numel].view(torch.int8) * scale).to(dtype)

    def wire_bytes(self, numel: int, itemsize: int) -> int:
        return 4 + numel

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert not state


def carried(codec, tensor: Tensor) -> Tensor:
    return codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype)


def test_every_file_is_covered() -> None:
    assert set(CODECS) >= {"bf16", "fp16"}


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=60)
@given(values=st.lists(FLOATS, max_size=40), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_laws(name: str, values: list[float], dtype: torch.dtype) -> None:
    codec, x = codec_of(name), torch.tensor(values, dtype=dtype)
    payload = codec.encode(x)
    back = codec.decode(payload, x.numel(), dtype)
    assert payload.numel() * payload.element_size() == codec.wire_bytes(x.numel(), x.element_size())
    assert back.dtype == dtype and back.shape == x.shape
    assert torch.equal(codec.decode(payload, x.numel(), dtype), back), "the same bytes decode to the same bits"
    assert torch.equal(carried(codec, back), back), "a projection: nothing more is lost the second time"
    assert torch.equal(carried(codec, torch.zeros_like(x)), torch.zeros_like(x))
    if name == "bf16":  # below the smallest normal number the spacing no longer scales with the number
        exact = x.abs() >= torch.finfo(torch.float32).tiny
        assert torch.equal(carried(codec, 2 * x)[exact], 2 * back[exact]), "powers of two pass through"
    lost = (x.double() - back.double()).square().sum()
    tiny = x.numel() * 2.0**-50 if name == "fp16" else 0.0  # fp16 rounds to multiples of 2⁻²⁴ below its normal range
    assert lost <= (1 - codec.contraction) * x.double().square().sum() + tiny


@pytest.mark.parametrize(("name", "bits"), [("bf16", 8), ("fp16", 11)])
def test_the_relative_error_reaches_its_bound_and_not_more(name: str, bits: int) -> None:
    codec = codec_of(name)
    worst = torch.tensor([1 + 2.0**-bits])  # half way between two neighbours: ties to even, down to 1
    assert carried(codec, worst).item() == 1.0
    x = torch.linspace(1, 2, 100_001)
    assert ((carried(codec, x) - x).abs() / x).max().item() <= 2.0**-bits
    assert 1 - codec.contraction == pytest.approx(2.0 ** (-2 * bits), rel=1e-9)


@pytest.mark.parametrize("name", CODECS)
def test_special_values_and_signs(name: str) -> None:
    x = torch.tensor([math.inf, -math.inf, -0.0, math.nan, -1.0])
    back = carried(codec_of(name), x)
    assert back[:2].tolist() == [math.inf, -math.inf]
    assert math.copysign(1, back[2].item()) == -1
    assert math.isnan(back[3].item())
    assert back[4].item() == -1


def test_fp16_overflows_where_bf16_does_not() -> None:
    x = torch.tensor([1e6])
    assert carried(codec_of("fp16"), x).item() == math.inf
    assert carried(codec_of("bf16"), x).item() == pytest.approx(1e6, rel=2**-8)


@pytest.mark.parametrize("name", CODECS)
def test_state_round_trips_and_foreign_state_is_refused(name: str) -> None:
    codec = codec_of(name)
    codec.load_state_dict(codec.state_dict())
    with pytest.raises(ValueError, match="residual"):
        codec.load_state_dict({"residual": 1})


def draw(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("codec", [*map(codec_of, CODECS), Scaled()], ids=[*CODECS, "bytes with a header"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_carry_exactly_what_the_codec_makes_of_each_part(codec: Codec, size: int) -> None:
    count = 13

    def body(world: wire.World) -> dict[str, Tensor]:
        axis = wire.Mesh(world, {"data": size})["data"]
        mine, whole = draw(world.rank, count), draw(world.rank, count * size)
        summed, part = mine.clone(), torch.empty(count)
        gathered, exchanged, got = torch.empty(count * size), torch.empty(count * size), torch.empty(count)
        everyone = mine.clone()
        axis.all_reduce(summed, "gradient", codec=codec).wait()
        axis.reduce_scatter(part, whole, "gradient", codec=codec).wait()
        axis.all_gather(gathered, mine, "weight", codec=codec).wait()
        axis.all_to_all(exchanged, whole, "activation", codec=codec).wait()
        axis.broadcast(everyone, 1, "weight", codec=codec).wait()
        sending = axis.send(mine, (world.rank + 1) % size, "activation", codec=codec)
        axis.receive(got, (world.rank - 1) % size, "activation", codec=codec).wait()
        sending.wait()
        return {"all_reduce": summed, "reduce_scatter": part, "all_gather": gathered} | {
            "all_to_all": exchanged,
            "broadcast": everyone,
            "send": got,
        }

    mine = [carried(codec, draw(rank, count)) for rank in range(size)]
    whole = [[carried(codec, part) for part in draw(rank, count * size).split(count)] for rank in range(size)]
    shares = formulas.shares(count, size)
    split = [[carried(codec, part) for part in draw(rank, count).split(shares)] for rank in range(size)]
    sums = [functools.reduce(torch.add, parts) for parts in zip(*split, strict=True)]
    for rank, found in enumerate(wire.threads.launch(size, body)):
        parts = [one[rank] for one in whole]
        assert torch.equal(found["all_reduce"], torch.cat([carried(codec, part) for part in sums]))
        assert torch.equal(found["reduce_scatter"], sum(parts[1:], parts[0]))
        assert torch.equal(found["all_gather"], torch.cat(mine))
        assert torch.equal(found["all_to_all"], torch.cat(parts))
        assert torch.equal(found["broadcast"], mine[1])
        assert torch.equal(found["send"], mine[(rank - 1) % size])
