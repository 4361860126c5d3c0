"""The sparse_prefill reference: what out, lse and max_logits are, and how far a right kernel may be from them.

Plain torch on gathered rows, fp32 with TF32 off (or fp64), independent of every kernel: no blocks, no running maximum,
no early exit. Definitions follow FlashMLA's flash_mla_sparse_fwd with natural logarithms:

    s[i,h,j]   = sm_scale * <q[i,h,:], kv[t,:]>,  t = indices[i,j], over the entries that count
    max_logits = max_j s        lse = log sum_j exp(s)        out = sum_j exp(s - lse) kv[t,:512]
    with a sink: out *= exp(lse) / (exp(lse) + exp(sink)); lse and max_logits do not see it
    a row without an entry that counts: out = 0, max_logits = -inf, lse = +inf
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from cases.inputs import Inputs
from cases.sparse_prefill import D_V, SCORE_COLUMNS
from references.precision import FP32_UNIT, KAPPA, LAMBDA, OUT_UNIT, ROUNDOFF, UNDERFLOW, Roundoff, bf16_ulp, p_error, score_sigma

MEMORY_BUDGET = {"cpu": 1 << 29, "cuda": 8 << 30}
"""Bytes of temporaries the reference uses at most; less where less than four times that is free."""


@dataclasses.dataclass
class Expected:
    """Reference values and budgets, all in the reference's dtype, on the inputs' device.

    out [s_q, h_q, 512], lse and max_logits [s_q, h_q] (nats);
    out_budget [s_q, h_q, 512]: the smaller of the worst-case and the probabilistic bound, or one ULP in exact cases;
    row_budget [s_q, h_q]: bound on the 2-norm of out's error over a row; lse_budget, max_logits_budget [s_q, h_q].
    """

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor
    out_budget: torch.Tensor
    row_budget: torch.Tensor
    lse_budget: torch.Tensor
    max_logits_budget: torch.Tensor


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in IEEE fp32 inside the block, checked by a product that TF32 or bf16 would round.

    Raises RuntimeError if the check fails, so a reference is never computed in less than it says.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        probe = torch.full((64, 64), 1 + 2.0**-12, device=device)
        if not torch.equal(probe @ torch.eye(64, device=device), probe):
            raise RuntimeError("fp32 matrix products are not fp32 on this device (TF32 or bf16 is forced)")
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def rows_at_once(inputs: Inputs, dtype: torch.dtype) -> int:
    """How many query rows fit the memory budget: gathered kv, its squares and magnitudes, and nine score-shaped arrays."""
    case = inputs.case
    per_row = case.topk * (4 * case.d_qk + 9 * case.h_q) + 8 * case.h_q * D_V
    budget = min(MEMORY_BUDGET[inputs.device.type], free_memory(inputs.device) // 4)
    return max(1, budget // (per_row * dtype.itemsize))


def reference(inputs: Inputs, dtype: torch.dtype = torch.float32) -> Expected:
    """Expected outputs of a case and their budgets. dtype: torch.float32 or torch.float64.

    fp8 cases are judged on their own quantised bytes. Raises RuntimeError if fp32 products are not fp32 here.
    """
    case, device = inputs.case, inputs.device
    pair = (case.s_q, case.h_q)
    wide, thin = (*pair, D_V), pair
    shapes = {"out": wide, "lse": thin, "max_logits": thin, "out_budget": wide, "row_budget": thin,
              "lse_budget": thin, "max_logits_budget": thin}
    result = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    step = rows_at_once(inputs, dtype)
    with full_precision(device):
        for start in range(0, case.s_q, step):
            part = slice(start, start + step)
            for name, value in _rows(inputs, part, dtype).items():
                result[name][part] = value
    return Expected(**result)


def gather(kv: torch.Tensor, scale: float, index: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """kv rows named by index: [rows, topk, d_qk], zero where the entry does not count (whatever it names)."""
    picked = kv[:, 0][torch.where(counts, index, 0).long()].to(dtype)
    return (picked * scale).masked_fill_(~counts[..., None], 0.0)


def unquantised_out(inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """out of the given query rows from the bf16 values before quantisation: fp32 [len(rows), h_q, 512].

    What an fp8 kernel is not judged by: its distance to this is reported beside its own error.
    """
    counts = inputs.valid_entries[rows]
    with full_precision(inputs.device):
        k = gather(inputs.values.kv, 1.0, inputs.indices[rows, 0], counts, torch.float32)
        scores = torch.bmm(inputs.values.q[rows].float(), k.mT) * inputs.case.scale
        scores.masked_fill_(~counts[:, None], -torch.inf)
        out = torch.bmm(torch.softmax(scores, dim=-1), k[..., :D_V])
    out, _ = _apply_sink(out, torch.logsumexp(scores, -1), inputs.sink)
    return out.masked_fill(~counts.any(-1)[:, None, None], 0.0)


def _rows(inputs: Inputs, part: slice, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    case, roundoff = inputs.case, ROUNDOFF[inputs.case.dtype]
    counts = inputs.valid_entries[part]
    k = gather(inputs.kv, inputs.values.kv_scale, inputs.indices[part, 0], counts, dtype)
    q = inputs.q[part].to(dtype) * inputs.values.q_scale
    absent = ~counts[:, None]
    empty = ~counts.any(-1)[:, None]  # [rows, 1]

    score = (torch.bmm(q, k.mT) * case.scale).masked_fill_(absent, -torch.inf)
    highest = score.amax(-1).masked_fill(empty, 0.0)
    p = torch.exp(score - highest[..., None])
    total = p.sum(-1).masked_fill(empty, 1.0)
    w = p / total[..., None]
    lse = highest + total.log()

    variance = positive_bmm(q.square(), k.square().mT).mul_(case.scale**2)
    sigma, bias = _score_errors(score.masked_fill(absent, 0.0), variance, highest, case.d_qk, roundoff, dtype)
    lse_budget = (LAMBDA * torch.linalg.vector_norm(w * sigma, dim=-1) + (w * bias).sum(-1)
                  + KAPPA * 2 * FP32_UNIT * (1 + lse.abs() + total.log()))
    tolerance = bias.add_(sigma, alpha=LAMBDA)
    high_budget = (score + tolerance).amax(-1) - highest
    v = k[..., :D_V]
    out = torch.bmm(w, v)
    relative = tolerance.clamp_(max=20.0).expm1_().add_(p_error(p, roundoff))
    out_budget, row_budget = _out_budgets(out, w.mul_(relative), v, lse_budget, case.topk, roundoff)
    floor = roundoff.acc_unit * case.topk / roundoff.acc_step * roundoff.acc_zero * inputs.values.kv_scale
    out_budget, row_budget = out_budget + floor, row_budget + floor * D_V**0.5
    out, factor = _apply_sink(out, lse, inputs.sink)
    slope = ((1 - factor) * lse_budget)[..., None] * out.abs()  # what an error of lse does to the sink's factor
    out_budget, row_budget = out_budget * factor[..., None] + slope, row_budget * factor + slope.square().sum(-1).sqrt()
    if case.exact:
        exact = slice(0, min(D_V, case.d_qk - SCORE_COLUMNS))
        out_budget[..., exact] = bf16_ulp(out[..., exact]) + 2.0**-18
    out_budget, row_budget = out_budget + UNDERFLOW, row_budget + UNDERFLOW
    return {
        "out": out.masked_fill(empty[..., None], 0.0),
        "lse": lse.masked_fill(empty, torch.inf),
        "max_logits": highest.masked_fill(empty, -torch.inf),
        "out_budget": out_budget.masked_fill(empty[..., None], 0.0),
        "row_budget": row_budget.masked_fill(empty, 0.0),
        "lse_budget": (lse_budget + UNDERFLOW).masked_fill(empty, 0.0),
        "max_logits_budget": (high_budget + UNDERFLOW).masked_fill(empty, 0.0),
    }


def _score_errors(score: torch.Tensor, variance: torch.Tensor, highest: torch.Tensor, d_qk: int, roundoff: Roundoff,
                  dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (one sigma) and systematic error of each score, in nats, kernel and reference together."""
    steps = d_qk / roundoff.acc_step
    own = FP32_UNIT if dtype == torch.float32 else 2.0**-53
    sigma = score_sigma(score, variance, (roundoff.acc_unit * steps**0.5, own * d_qk**0.5))
    # A truncating accumulator always errs towards zero: half a unit of the mean partial sum, |score| / 2, per step.
    # Then the fp32 operations from the score to exp2's argument.
    rounding = KAPPA * FP32_UNIT
    bias = score.abs().mul_(roundoff.acc_unit / 4 * steps + rounding).add_(highest.abs()[..., None], alpha=rounding)
    return sigma, bias


def _out_budgets(out: torch.Tensor, e: torch.Tensor, v: torch.Tensor, lse_budget: torch.Tensor, topk: int,
                 roundoff: Roundoff) -> tuple[torch.Tensor, torch.Tensor]:
    """Per element and per row. e: [rows, h_q, topk] = w times the bound on P's relative error; v: [rows, topk, 512].

    The accumulator's error is stated as a share of P's, since e >= p_unit * w.
    """
    steps = topk / roundoff.acc_step
    worst = positive_bmm(e, v.abs()) * (1 + steps * roundoff.acc_unit / roundoff.p_unit)
    square = positive_bmm(e.square(), v.square())
    accumulator = 1 + steps**0.5 * roundoff.acc_unit / roundoff.p_unit
    common = torch.bmm(e, v).abs()  # errors of equal P are equal: they add up where V has a mean
    relative = OUT_UNIT + lse_budget[..., None] + roundoff.acc_unit * steps / 4 + KAPPA * FP32_UNIT
    rounding = relative * out.abs()
    likely = LAMBDA * accumulator * square.sqrt() + common
    row = (accumulator * square.sum(-1).sqrt() + common.square().sum(-1).sqrt() + rounding.square().sum(-1).sqrt())
    return torch.minimum(worst, likely) + rounding, row


def positive_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bmm for budgets, where every factor is >= 0 and an upper bound is wanted: on CUDA in bf16, which is many times
    faster, enlarged by what bf16 can lose (two factors at 2^-8 each, accumulation in fp32)."""
    if not a.is_cuda:
        return torch.bmm(a, b)
    return torch.bmm(a.bfloat16(), b.bfloat16()).to(a.dtype) * (1 + 2.0**-6)


def _apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """out times exp(lse) / (exp(lse) + exp(sink)), and that factor [rows, h_q]."""
    if sink is None:
        return out, torch.ones_like(lse)
    factor = torch.sigmoid(lse - sink.to(lse.dtype))
    return out * factor[..., None], factor
