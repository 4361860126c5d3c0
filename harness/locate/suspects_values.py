"""What a faulty kernel of sparse_prefill may have done to scales, sink and outputs, as hypotheses (see suspects.py)."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from arms.kernel import Outputs
from harness.locate.hypotheses import Hypothesis, View, margins
from references.sparse_prefill import Expected

SCALED = "out scaled as a whole: out is a constant multiple c of the right one in each row and head"


def scales() -> list[Hypothesis]:
    """Sink and scales. Nothing is tried where it would change nothing."""
    def scale(**factors: Callable[[View], float]) -> Callable[[View], dict[str, float | torch.Tensor | None]]:
        def change(v: View) -> dict[str, float | torch.Tensor | None]:
            old = v.inputs.values
            new = {name: getattr(old, name) * factor(v) for name, factor in factors.items()}
            return {} if all(getattr(old, name) == value for name, value in new.items()) else dict(new)

        return change

    def sink(make: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[View], dict[str, float | torch.Tensor | None]]:
        def change(v: View) -> dict[str, float | torch.Tensor | None]:
            old = v.inputs.sink
            new = None if old is None else make(old)
            same = old is None or (new is not None and torch.equal(new[v.heads], old[v.heads]))
            return {} if same else {"sink": new}

        return change

    def scaled_sink(v: View) -> dict[str, float | torch.Tensor | None]:
        return {} if v.inputs.sink is None else {"sink": v.inputs.sink * v.inputs.case.scale}

    def power(x: float) -> float:
        return 2.0 ** math.ceil(math.log2(x)) / x

    return [
        Hypothesis("the sink left out", change=sink(lambda x: None)),
        Hypothesis("the sink counted twice (out scaled by it once more)", after=lambda e, v: sunk(e, v)),
        Hypothesis("the sink counted twice, in heads whose lse is below 0", after=lambda e, v: sunk(e, v, torch.lt)),
        Hypothesis("the sink counted twice, in heads whose lse is above 0", after=lambda e, v: sunk(e, v, torch.gt)),
        Hypothesis("the sink counted twice in the denominator", change=sink(lambda x: x + math.log(2))),
        Hypothesis("the sink of head h % 64", change=sink(lambda x: x[torch.arange(len(x), device=x.device) % 64])),
        Hypothesis("the sink of the next head", change=sink(lambda x: x.roll(-1))),
        Hypothesis("the sink of the first head for all", change=sink(lambda x: x[:1].expand_as(x))),
        Hypothesis("the sink taken for one in base 2", change=sink(lambda x: x * math.log(2))),
        Hypothesis("the sink given in base 2", change=sink(lambda x: x / math.log(2))),
        Hypothesis("the sink taken for a score before sm_scale", change=scaled_sink),
        Hypothesis("q_scale and kv_scale rounded up to powers of two",
                   change=scale(q_scale=lambda v: power(v.inputs.values.q_scale), kv_scale=lambda v: power(v.inputs.values.kv_scale))),
        Hypothesis("q_scale left out", change=scale(q_scale=lambda v: 1 / v.inputs.values.q_scale)),
        Hypothesis("kv_scale left out", change=scale(kv_scale=lambda v: 1 / v.inputs.values.kv_scale)),
        Hypothesis("kv_scale left out of the scores", change=scale(q_scale=lambda v: 1 / v.inputs.values.kv_scale)),
        Hypothesis("kv_scale left out of V", after=lambda e, v: outs(e, 1 / v.inputs.values.kv_scale)),
        Hypothesis("q_scale and kv_scale changed for each other", change=scale(
            q_scale=lambda v: v.inputs.values.kv_scale / v.inputs.values.q_scale,
            kv_scale=lambda v: v.inputs.values.q_scale / v.inputs.values.kv_scale)),
        Hypothesis("sm_scale left out", change=scale(q_scale=lambda v: 1 / v.inputs.case.scale)),
        Hypothesis("sm_scale of 512 columns", change=scale(q_scale=lambda v: 512**-0.5 / v.inputs.case.scale)),
        Hypothesis("sm_scale taken twice", change=scale(q_scale=lambda v: v.inputs.case.scale)),
        Hypothesis("exp in place of exp2 (scores log2(e) too large)", change=scale(q_scale=lambda v: 1 / math.log(2))),
        Hypothesis("exp2 in place of exp (scores ln(2) too small)", change=scale(q_scale=lambda v: math.log(2))),
    ]


def outs(e: Expected, factor: float | torch.Tensor) -> Expected:
    """out times a factor, one for all or [n, m]."""
    each = torch.as_tensor(factor, dtype=e.out.dtype, device=e.out.device)[..., None]
    return dataclasses.replace(e, out=e.out * each, out_budget=e.out_budget * each.abs(), row_budget=e.row_budget * each[..., 0].abs())


def sunk(e: Expected, v: View, where: Callable[[torch.Tensor, float], torch.Tensor] | None = None) -> Expected:
    """out with the sink taken in once more, in rows and heads whose lse is on one side of 0 or in all. An empty row's out is 0 anyhow."""
    if v.inputs.sink is None:
        return e
    factor = torch.sigmoid(e.lse - v.inputs.sink[v.heads].to(e.lse.dtype)).nan_to_num(1.0)
    return outs(e, factor if where is None else torch.where(where(e.lse, 0.0), factor, 1.0))


def scaled(got: Outputs, e: Expected) -> Expected | None:
    """out times the factor of each row and head by which the out that was given is nearest; where lse and max_logits are right."""
    if any(bool((ratio > 1).any()) for ratio in margins(got, e)[1:]):
        return None
    out = got[0].to(e.out.dtype)
    factor = (out * e.out).sum(-1) / e.out.square().sum(-1)
    return outs(e, factor.nan_to_num(1.0, 1.0, 1.0))


def statistic(e: Expected, name: str, factor: float) -> Expected:
    """lse or max_logits times a factor."""
    return dataclasses.replace(e, **{name: getattr(e, name) * factor, f"{name}_budget": getattr(e, f"{name}_budget") * factor})


def outputs() -> list[Hypothesis]:
    """What may be done to outputs that were right."""
    log2e = 1 / math.log(2)

    def in_lse(e: Expected, v: View) -> Expected:
        if v.inputs.sink is None:
            return e
        merged = torch.logaddexp(e.lse, v.inputs.sink[v.heads].to(e.lse.dtype))
        return dataclasses.replace(e, lse=torch.where(e.lse == torch.inf, e.lse, merged))

    def empty(name: str, old: float, new: float) -> Callable[[Expected, View], Expected]:
        return lambda e, v: dataclasses.replace(e, **{name: torch.where(getattr(e, name) == old, new, getattr(e, name))})

    def shifted(rows: int = 0, heads: int = 0) -> Callable[[Expected, View], Expected]:
        return lambda e, v: v.some(v.expected, (v.rows - rows) % v.inputs.case.s_q, (v.heads - heads) % v.inputs.case.h_q)

    found = {
        "out is zero": lambda e, v: outs(e, 0.0),
        "out negated": lambda e, v: outs(e, -1.0),
        "lse in base 2": lambda e, v: statistic(e, "lse", log2e),
        "lse and max_logits in base 2": lambda e, v: statistic(statistic(e, "lse", log2e), "max_logits", log2e),
        "max_logits in base 2": lambda e, v: statistic(e, "max_logits", log2e),
        "max_logits not scaled by sm_scale": lambda e, v: statistic(e, "max_logits", 1 / v.inputs.case.scale),
        "lse without its maximum": lambda e, v: dataclasses.replace(e, lse=e.lse - e.max_logits),
        "the sink in lse": in_lse,
        "lse of a row without a key is -inf": empty("lse", math.inf, -math.inf),
        "lse of a row without a key is 0": empty("lse", math.inf, 0.0),
        "max_logits of a row without a key is 0": empty("max_logits", -math.inf, 0.0),
        "outputs of the row before": shifted(rows=1), "outputs of the next row": shifted(rows=-1),
        "outputs of the head before": shifted(heads=1), "outputs of the next head": shifted(heads=-1),
        "outputs of the head 64 before": shifted(heads=64),
        "out not divided by the denominator": lambda e, v: dataclasses.replace(
            e, out=e.out * (e.lse - e.max_logits).exp()[..., None], out_budget=e.out_budget * (e.lse - e.max_logits).exp()[..., None]),
    }
    return [*(Hypothesis(name, after=after) for name, after in found.items()), Hypothesis(SCALED, fitted=scaled)]
