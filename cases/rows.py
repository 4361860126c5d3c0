"""Which entries of which row are valid, and what the indices say.

A row's valid entries are its first `valid` positions before holes are punched, so `valid` is also the length that the
serving metadata would state for it (min(kv_len, index_topk), and 0 for a padding row).
"""
from __future__ import annotations

import dataclasses

import torch

from cases.counter import below, bits
from cases.sparse_prefill import SparsePrefillCase

# Larger than any topk and prime, hence coprime to every row length: position -> stride * position + shift is a
# permutation of the row, without sorting and without rejection.
_PRIMES = (1000003, 1299709, 2750159, 3497861, 4256233, 5800079, 6700417)
_INT_MAX = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Per query row, int64 [s_q] each: the kv rows it may see are [kv_start, kv_start + visible); `valid` of them are named."""

    kv_start: torch.Tensor
    visible: torch.Tensor
    valid: torch.Tensor


def row_plan(case: SparsePrefillCase, device: torch.device) -> RowPlan:
    """Derive window and valid count of each row from the row pattern."""
    row = torch.arange(case.s_q, device=device)
    padding = row >= case.s_q - case.pad_rows
    if case.rows == "causal":
        kv_start, visible = _causal_windows(case, device)
        valid = visible.clamp(max=case.limit)
    else:
        kv_start, visible = torch.zeros_like(row), torch.full_like(row, case.s_kv)
        valid = torch.minimum(_valid_counts(case, row), visible)
    return RowPlan(kv_start, visible, valid.masked_fill(padding, 0))


def _causal_windows(case: SparsePrefillCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    starts, visibles, offset = [], [], 0
    for qo_len, kv_len in case.request_lengths:
        starts.append(torch.full((qo_len,), offset))
        visibles.append(torch.arange(kv_len - qo_len + 1, kv_len + 1))
        offset += kv_len
    padding = torch.zeros(case.pad_rows, dtype=torch.int64)
    return torch.cat([*starts, padding]).to(device), torch.cat([*visibles, padding + 1]).to(device)


def _valid_counts(case: SparsePrefillCase, row: torch.Tensor) -> torch.Tensor:
    limit = case.limit
    random = bits(case.seed, "rows", row, 1)[:, 0]
    ragged = below(random, limit + 1)
    short = 1 + below(random, max(1, limit // 4))
    counts = {
        "full": torch.full_like(row, limit),
        "half": torch.full_like(row, limit // 2),
        "short": short,
        "ramp": (row + 1).clamp(max=limit),
        "ragged": ragged,
        "allpad": torch.zeros_like(row),
        "mixed": _mixed(case, row, ragged, short),
    }
    return counts[case.rows]


def _mixed(case: SparsePrefillCase, row: torch.Tensor, ragged: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
    """Rows of every kind in turn, all-pad ones among them, and one row in eight at the end all-pad as well."""
    limit = case.limit
    kinds = [torch.zeros_like(row), torch.full_like(row, limit), torch.ones_like(row), ragged, short]
    kinds += [torch.full_like(row, limit // 2)]
    kinds += [torch.full_like(row, edge) for edge in (63, 64, 65, 127, 128, 129)]
    counts = torch.stack(kinds).gather(0, ((row + case.seed) % len(kinds))[None])[0]
    counts = torch.where(row >= case.s_q - case.s_q // 8, torch.zeros_like(row), counts)
    return counts.clamp(max=limit)


def indices(case: SparsePrefillCase, plan: RowPlan) -> torch.Tensor:
    """The indices: int32 [s_q, 1, topk], unique within the valid range of a row.

    The window is cut into as many strata as the row has valid entries and one key is drawn from each; the entry at a
    position takes the stratum that the row's order gives it. So uniqueness needs no sorting and no rejection.
    """
    rows = torch.arange(case.s_q, device=plan.valid.device)
    out = torch.empty(case.s_q, 1, case.topk, dtype=torch.int32, device=rows.device)
    step = max(1, (1 << 24) // case.topk)
    for start in range(0, case.s_q, step):
        part = slice(start, start + step)
        chunk = RowPlan(plan.kv_start[part], plan.visible[part], plan.valid[part])
        out[part, 0] = _indices_of(case, rows[part], chunk).to(torch.int32)
    return out


def _indices_of(case: SparsePrefillCase, rows: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    position = torch.arange(case.topk, device=rows.device)[None, :]
    valid, visible, kv_start = plan.valid[:, None], plan.visible[:, None], plan.kv_start[:, None]
    count = valid.clamp(min=1)
    stratum = _stratum(case, rows, position, count)
    low = stratum * visible // count
    width = (stratum + 1) * visible // count - low
    chosen = kv_start + low + below(bits(case.seed, "indices", rows, case.topk), width)
    if case.values == "peaked":
        chosen = _place_peak(case, chosen, position, valid, kv_start)
    inside = position < valid
    entries = torch.where(inside, chosen, _tail(case, rows))
    hole = below(bits(case.seed, "holes", rows, case.topk), 1 << 30) < round(case.holes * (1 << 30))
    return torch.where(inside & (hole | (position < case.lead)), torch.full_like(entries, -1), entries)


def _stratum(case: SparsePrefillCase, rows: torch.Tensor, position: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Which stratum each position draws from: a permutation of 0..count-1 over the valid positions."""
    if case.order == "ascending":
        return torch.minimum(position, count - 1)
    if case.order == "descending":
        return (count - 1 - position).clamp(min=0)
    draw = bits(case.seed, "order", rows, 2)
    stride = torch.tensor(_PRIMES, device=rows.device)[below(draw[:, :1], len(_PRIMES))]
    return (position * stride + below(draw[:, 1:], count)) % count


def _place_peak(case: SparsePrefillCase, chosen: torch.Tensor, position: torch.Tensor, valid: torch.Tensor,
                kv_start: torch.Tensor) -> torch.Tensor:
    """Make the window's first key, which values.py lets stand out, the row's first, middle or last valid entry.

    If the row names that key elsewhere already, the two entries change places, so the row stays unique.
    """
    last = (valid - 1).clamp(min=0)
    wanted = {"first": torch.full_like(last, min(case.lead, case.topk - 1)), "middle": last // 2, "last": last}[case.peak_at]
    wanted = torch.minimum(wanted, last)
    displaced = chosen.gather(1, wanted)
    chosen = torch.where(chosen == kv_start, displaced, chosen)
    return torch.where(position == wanted, kv_start, chosen)


def _tail(case: SparsePrefillCase, rows: torch.Tensor) -> torch.Tensor:
    """What stands at and past the valid count: int64 [len(rows), topk]."""
    if case.tail == "pad":
        return torch.full((len(rows), case.topk), -1, dtype=torch.int64, device=rows.device)
    random = bits(case.seed, "tail", rows, case.topk)
    if case.tail == "live":
        return below(random, case.s_kv)
    wild = [-1, -2, -case.s_kv, -_INT_MAX - 1, case.s_kv, case.s_kv + 1, case.s_kv + case.topk, _INT_MAX]
    return torch.tensor(wild, device=rows.device)[below(random, len(wild))]
