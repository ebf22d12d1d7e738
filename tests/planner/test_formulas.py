"""Published tables (Korthikanti et al. 2022, figures 1 and 7, tables 3 and 5; Narayanan et al. 2021, table 1)."""

from __future__ import annotations

import pytest

from fourfold.planner.formulas import first_stage, flops, layer, parameters, states

GIB = 1024**3
MODELS = {  # heads, hidden, layers, t, p, v, micro-batch; sequence 2048, vocabulary 51200
    "22B": (64, 6144, 48, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (128, 20480, 105, 8, 35, 3, 1),
    "1T": (160, 25600, 128, 8, 64, 1, 1),
}


@pytest.mark.parametrize(
    ("name", "state", "tensor", "both"),
    [
        ("22B", 45.5625, 59.25, 9.5625),
        ("175B", 45.5625, 66.84375, 12.3515625),
        ("530B", 31.640625, 114.0234375, 23.076171875),
        ("1T", 32.958984375, 131.25, 26.5625),
    ],
)
def test_first_stage_in_gib(name, state, tensor, both):
    a, h, layers, t, p, v, b = MODELS[name]
    assert states(h, layers, t, p) / GIB == state
    assert first_stage(2048, b, h, a, layers, t, p, v) / GIB == pytest.approx(tensor, rel=1e-12)
    present = first_stage(2048, b, h, a, layers, t, p, v, sequence=True, recompute="selective")
    assert present / GIB == pytest.approx(both, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "sequence", "selective", "both", "full"),
    [
        ("22B", 66.84, 49.42, 16.18, 7.64),
        ("175B", 62.04, 56.53, 18.49, 8.71),
        ("530B", 58.31, 62.04, 20.27, 9.42),
        ("1T", 58.31, 62.04, 20.27, 9.42),
    ],
)
def test_share_of_tensor_parallel_only_in_percent(name, sequence, selective, both, full):
    a, h, _, t, _, _, b = MODELS[name]
    whole = layer(2048, b, h, a, t)
    shares = [
        layer(2048, b, h, a, t, sequence=True),
        layer(2048, b, h, a, t, recompute="selective"),
        layer(2048, b, h, a, t, sequence=True, recompute="selective"),
        layer(2048, b, h, a, t, recompute="full"),
    ]
    assert [100 * share / whole for share in shares] == pytest.approx(
        [sequence, selective, both, full], abs=0.15
    )  # read off a figure


def test_without_splitting_it_is_34_and_5():
    assert layer(128, 3, 48, 2) == 128 * 3 * 48 * 34 + 5 * 2 * 128 * 128 * 3


@pytest.mark.parametrize(
    ("billions", "h", "layers"),
    [
        (1.7, 2304, 24),
        (3.6, 3072, 30),
        (7.5, 4096, 36),
        (18.4, 6144, 40),
        (39.1, 8192, 48),
        (76.1, 10240, 60),
        (145.6, 12288, 80),
        (310.1, 16384, 96),
        (529.6, 20480, 105),
        (1008.0, 25600, 128),
    ],
)
def test_parameters_to_the_printed_digit(billions, h, layers):
    assert round(parameters(h, layers, 51200, 2048) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("name", "devices", "rows", "seconds", "mfu", "hfu"),
    [
        ("22B", 8, 4, 1.10, 41.5, 43.7),
        ("175B", 64, 64, 13.75, 51.4, 52.8),
        ("530B", 280, 280, 37.83, 56.0, 57.0),
        ("1T", 512, 512, 71.49, 56.3, 57.0),
    ],
)
def test_published_utilisation(name, devices, rows, seconds, mfu, hfu):
    _, h, layers, *_ = MODELS[name]
    peak = devices * seconds * 312e12
    assert 100 * flops(2048, rows, h, layers, 51200) / peak == pytest.approx(mfu, abs=0.2)
    assert 100 * flops(2048, rows, h, layers, 51200, recompute="selective") / peak == pytest.approx(hfu, abs=0.2)


def test_published_step_times_of_full_recompute():
    seconds = flops(2048, 512, 2304, 24, 51200, recompute="full") / (32 * 137e12)
    assert seconds == pytest.approx(3.53, abs=0.03)
