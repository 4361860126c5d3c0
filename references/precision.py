"""How much a right kernel may differ from the reference: roundoff constants and the formulas made of them.

docs/budgets.md derives every term. Everything here is per element and knows nothing of kernels by name: a kernel is
described by how it rounds P and how it accumulates, which its dtype decides.
"""
from __future__ import annotations

import dataclasses
import math

import torch

LAMBDA = 8.0
"""Hoeffding: a sum of independent roundoffs exceeds LAMBDA times the root of their squared bounds with probability
2 exp(-LAMBDA^2 / 2) = 2.5e-14, that is 2.5e-4 over a suite of 1e10 elements."""

FP32_UNIT = 2.0**-24
OUT_UNIT = 2.0**-8  # half an ULP of bf16, relative
KAPPA = 4.0
"""fp32 operations around the sums (scale, subtract, exp2 with fast math, log, normalise), each within an ULP of what it handles."""

UNDERFLOW = 2.0**-100
"""fp32 values below 2^-126 may be flushed to zero on one side only: P, or the sink's factor through a reciprocal, which moves out by at
most topk * 2^-126 * max|v|; a dot product or a score, which moves a statistic by 2^-126 times a scale of at most 10^4. Both are far below
this."""


@dataclasses.dataclass(frozen=True)
class Roundoff:
    """How a kernel of one dtype rounds.

    p_unit:   relative half-ULP of P as it enters the second product
    p_floor:  below this P is lost or rounded to a neighbour that far away (unscaled e4m3: half the smallest subnormal)
    acc_unit: relative error of the accumulator in one tensor-core step
    acc_step: products summed in one step
    acc_zero: what a product of P = 1 and a V of zero counts as when the accumulator is aligned to the step's largest exponent
    """

    p_unit: float
    p_floor: float
    acc_unit: float
    acc_step: int
    acc_zero: float


ROUNDOFF = {
    "bf16": Roundoff(p_unit=2.0**-8, p_floor=0.0, acc_unit=2.0**-22, acc_step=16, acc_zero=0.0),
    "fp8": Roundoff(p_unit=2.0**-4, p_floor=2.0**-10, acc_unit=2.0**-12, acc_step=32, acc_zero=2.0**-6),
}
"""acc_unit: the accumulator keeps 23 (bf16) or 13 (fp8, Hopper) fraction bits and truncates: one unit in the last place for
the accumulator itself and one for the products, which are aligned to it before they are summed. acc_zero: an e4m3 zero has the exponent
of the smallest normal number, 2^-6, so a zero product still moves the alignment; a bf16 zero has 2^-126, which moves nothing."""


def p_error(p: torch.Tensor, roundoff: Roundoff) -> torch.Tensor | float:
    """Bound on the relative error of rounded P: p_unit, or p_floor / P where that is more, at most 1 (P lost). One number for
    all of P where nothing is lost, else of p's shape."""
    if not roundoff.p_floor:
        return roundoff.p_unit
    return (roundoff.p_floor / p.clamp(min=roundoff.p_floor)).clamp_(min=roundoff.p_unit)


def score_sigma(score: torch.Tensor, variance: torch.Tensor, units: tuple[float, ...]) -> torch.Tensor:
    """One-sigma error of a dot product, from the independent accumulations of both sides.

    After a fraction x of the products the partial sum has mean x * score and variance x * variance, so over the steps it
    has mean square score^2 / 3 + variance / 2. score: nats, any shape; variance: sum (q k)^2 in nats^2; units: for each
    side the relative error of one step times the root of the number of steps.
    """
    sigma = score.square().mul_(1 / 3).add_(variance, alpha=0.5).sqrt_()
    return sigma.mul_(math.hypot(*units))


def bf16_ulp(x: torch.Tensor) -> torch.Tensor:
    """Distance between neighbouring bf16 values at |x|, in x's dtype; the smallest normal's spacing at and near zero."""
    exponent = torch.frexp(x.abs().clamp(min=2.0**-126)).exponent
    ulp: torch.Tensor = torch.ldexp(torch.ones_like(x), exponent - 8)
    return ulp
