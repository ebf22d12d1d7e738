"""Published closed forms for transformers: oracles for the trace, and a quick answer where there is no model at hand.

Korthikanti et al. 2022 (arXiv 2205.05198), sections 4 and 5: activation bytes of one layer in 16 bits, with dropout and
without flash attention. s sequence, b rows of a micro-batch, h hidden, a heads, t ranks over which a layer is split.
"""

from __future__ import annotations


def layer(s: int, b: int, h: int, a: int, t: int = 1, *, sequence: bool = False, recompute: str = "none") -> float:
    """Activation bytes that one layer keeps on a rank.

    Args:
        sequence: the norms and dropouts between the split parts are split too, along the sequence.
        recompute: "none", "selective" (the attention core) or "full".
    """
    if recompute == "full":
        return 2 * s * b * h / (t if sequence else 1)
    outside = 10 / t if sequence else 10
    core = 5 * a * s / (h * t) if recompute == "none" else 0
    return s * b * h * (outside + 24 / t + core)


def first_stage(
    s: int,
    b: int,
    h: int,
    a: int,
    layers: int,
    t: int,
    p: int,
    v: int = 1,
    *,
    sequence: bool = False,
    recompute: str = "none",
) -> float:
    """Activation bytes of the first of `p` stages under 1F1B: all layers' worth, more with `v` interleaved chunks."""
    interleaved = 1 + (p - 1) / (p * v) if v > 1 else 1
    return layers * interleaved * layer(s, b, h, a, t, sequence=sequence, recompute=recompute)


def states(h: int, layers: int, t: int, p: int, each: int = 18) -> float:
    """Bytes of weights, gradients and optimizer on a rank: `each` a parameter, 12 L h^2 parameters."""
    return each * 12 * layers * h * h / (t * p)


def parameters(h: int, layers: int, vocabulary: int, s: int) -> int:
    """Weights of a GPT with biases and learned positions (Narayanan et al. 2021, arXiv 2104.04473, equation 2)."""
    return 12 * layers * h * h + 13 * layers * h + (vocabulary + s) * h


def flops(s: int, rows: int, h: int, layers: int, vocabulary: int, *, recompute: str = "none") -> float:
    """Floating-point operations of one iteration over `rows` sequences; attention counted dense.

    Backward is twice forward; "selective" computes the attention core once more, "full" every layer's forward.
    """
    if recompute == "full":
        return 96 * rows * layers * s * h * h * (1 + s / (6 * h) + vocabulary / (16 * h * layers))
    core = s / (3 * h) if recompute == "selective" else s / (6 * h)
    return 72 * rows * layers * s * h * h * (1 + core + vocabulary / (12 * h * layers))
