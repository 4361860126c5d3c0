"""What q, kv and attn_sink hold: integers from counter.py, turned into floats by power-of-two scaling only.

pattern   q                                kv                                       what it shows
normal    bell-shaped, std 1.15            the same                                 the ordinary case
large     normal                           8 times normal                           a softmax that is nearly one-hot, a large V
poison    normal                           normal, NaN in rows no valid index names a key that must not matter, does
peaked    one value in the score columns   one key stands `peak` nats above others; lost or moved probability mass
                                           V: even columns 1.0, odd ones random     (random V alone averages the loss away)
flat      small integers, score columns    score columns agree in every key,        P = 1 for every key: out is sum(v) / count
          only                             V integers in [-2, 2]
integer   one 16 in a score column         score columns 0, -1, -2, V in [-2, 2]    P = 1, 1/2, 1/4: every sum is exact

The score columns are the last 64 of d_qk; where a pattern says so, q is zero elsewhere, so V is free of the scores.
"""
from __future__ import annotations

import dataclasses
import math

import torch

from cases.counter import bell, below, bits
from cases.rows import RowPlan
from cases.sparse_prefill import SCORE_COLUMNS, SparsePrefillCase

_CHUNK = 1 << 26  # elements made at a time

# e4m3 holds up to 448. What q and kv are multiplied by before the cast; their scales are the reciprocals. Patterns of integers
# are kept as they are; bell-shaped ones (|x| < 4, kv of `large`: < 32) are scaled up, q and kv by different factors, so that a
# swapped or forgotten scale shows.
_FP8_FACTORS = {"normal": (64.0, 32.0), "poison": (64.0, 32.0), "large": (64.0, 4.0), "peaked": (1.0, 16.0),
                "flat": (1.0, 1.0), "integer": (1.0, 1.0)}
_ANY_FACTORS = {"normal": (51.0, 23.0), "poison": (51.0, 23.0), "large": (51.0, 11.0)}


def _reciprocal(factor: float) -> float:
    """1 / factor as fp32 holds it, which is the scale that a kernel is given."""
    return torch.tensor(1 / factor, dtype=torch.float32).item()


@dataclasses.dataclass(frozen=True)
class Values:
    """q [s_q, h_q, d_qk] and kv [s_kv, 1, d_qk] in bf16; for fp8 cases their quantised bytes and scales as well."""

    q: torch.Tensor
    kv: torch.Tensor
    q_fp8: torch.Tensor | None
    kv_fp8: torch.Tensor | None
    q_scale: float
    kv_scale: float


def make_values(case: SparsePrefillCase, plan: RowPlan, named: torch.Tensor) -> Values:
    """Fill q and kv. named: bool [s_kv], the kv rows that some valid index names (used by values=poison)."""
    device = named.device
    q = torch.empty(case.s_q, case.h_q, case.d_qk, dtype=torch.bfloat16, device=device)
    kv = torch.empty(case.s_kv, 1, case.d_qk, dtype=torch.bfloat16, device=device)
    fp8 = case.dtype == "fp8"
    q_fp8 = torch.empty_like(q, dtype=torch.float8_e4m3fn) if fp8 else None
    kv_fp8 = torch.empty_like(kv, dtype=torch.float8_e4m3fn) if fp8 else None
    factors = _ANY_FACTORS if case.scales == "any" else _FP8_FACTORS
    q_factor, kv_factor = factors[case.values] if fp8 else (1.0, 1.0)
    peaks = torch.unique(plan.kv_start)
    for rows in _row_chunks(case.s_q * case.h_q, case.d_qk, device):
        _store(_q_rows(case, rows), rows, q, q_fp8, q_factor)
    for rows in _row_chunks(case.s_kv, case.d_qk, device):
        _store(_kv_rows(case, rows, peaks), rows, kv, kv_fp8, kv_factor)
    if case.values == "poison":
        put_nan(kv, ~named)
        if kv_fp8 is not None:
            put_nan(kv_fp8, ~named)
    return Values(q, kv, q_fp8, kv_fp8, _reciprocal(q_factor), _reciprocal(kv_factor))


def _row_chunks(rows: int, columns: int, device: torch.device) -> list[torch.Tensor]:
    return list(torch.arange(rows, device=device, dtype=torch.int32).split(max(1, _CHUNK // columns)))


def _store(x: torch.Tensor, rows: torch.Tensor, bf16: torch.Tensor, fp8: torch.Tensor | None, factor: float) -> None:
    start, columns = int(rows[0]), x.shape[1]
    bf16.view(-1, columns)[start : start + len(rows)] = x
    if fp8 is not None:
        # From the fp32 value, not from its bf16 rounding; no value exceeds 448, so no saturation rule is involved.
        fp8.view(-1, columns)[start : start + len(rows)] = (x * factor).to(torch.float8_e4m3fn)


def put_nan(tensor: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite whole rows with NaN, by bytes, so that every device writes the same NaN. rows: bool [len(tensor)]."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[rows] = 0x7F
    else:
        tensor.view(torch.int16)[rows] = 0x7FC0


def _q_rows(case: SparsePrefillCase, rows: torch.Tensor) -> torch.Tensor:
    """fp32 [len(rows), d_qk]; a row here is one (query, head) pair."""
    plain = case.d_qk - SCORE_COLUMNS
    if case.values in ("normal", "poison", "large"):
        return _bell(case, "q", rows, case.d_qk)
    q = torch.zeros(len(rows), case.d_qk, device=rows.device)
    if case.values == "peaked":
        q[:, plain:] = case.peak_value
    elif case.values == "flat":
        q[:, plain:] = _small(case, "q", rows, SCORE_COLUMNS)
    else:
        column = plain + below(bits(case.seed, "q", rows, 1), SCORE_COLUMNS)
        q.scatter_(1, column, 16.0)
    return q


def _kv_rows(case: SparsePrefillCase, rows: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
    """fp32 [len(rows), d_qk]."""
    plain = case.d_qk - SCORE_COLUMNS
    if case.values in ("normal", "poison", "large"):
        return _bell(case, "kv", rows, case.d_qk)
    if case.values == "peaked":
        kv = _bell(case, "kv", rows, case.d_qk)
        kv[:, 0:plain:2] = 1.0
        kv[:, plain:] = torch.isin(rows, peaks)[:, None] * case.peak_value
        return kv
    kv = _small(case, "kv", rows, case.d_qk)
    if case.values == "flat":
        kv[:, plain:] = _small(case, "scores", torch.zeros(1, dtype=torch.int32, device=rows.device), SCORE_COLUMNS)
    else:
        kv[:, plain:] = -below(bits(case.seed, "scores", rows, SCORE_COLUMNS), 3).float()
    return kv


def _bell(case: SparsePrefillCase, stream: str, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Bell-shaped, standard deviation 1.155, |x| < 4 (kv of values=large: 8 times that)."""
    scale = 2.0**-12 if (case.values, stream) == ("large", "kv") else 2.0**-15
    return bell(case.seed, stream, rows, columns).float() * scale


def _small(case: SparsePrefillCase, stream: str, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Integers from -2 to 2, mixed signs: 4096 of them stay inside a 13-bit accumulator."""
    return below(bits(case.seed, stream, rows, columns), 5).float() - 2


def make_sink(case: SparsePrefillCase, device: torch.device) -> torch.Tensor | None:
    """attn_sink: fp32 [h_q] in nats, centred where it competes with the row's own mass, or None."""
    if case.sink == "none":
        return None
    heads = torch.arange(case.h_q, device=device)
    sink = bell(case.seed, "sink", heads, 1)[:, 0].float() * 2.0**-14 + 4
    if case.sink == "mixed":
        odd = torch.tensor([-math.inf, math.inf, 0.0, 88.0, -88.0], device=device)
        sink = torch.where(heads % 2 == 0, sink, odd[heads // 2 % len(odd)])
    return sink
