"""What a choice of keys does downstream: attention over the arm's keys and over torch_dense's, on the same KV.

The KV is synthetic (the indexer's own scores say nothing of attention's values) and made for the named keys alone, from the case's
seed and the keys' positions. Attention is references/sparse_prefill in fp64, so that nothing but the choice differs.

The bound. Let A, B be the two choices of a row, C what they share, a the softmax mass of A without C under A, b that of B without C
under B, and v_X the mean of V over X with softmax weights. Then out_A = (1 - a) v_C + a v_{A-C}, and likewise for B, so

    out_A - out_B = a (v_{A-C} - v_C) - b (v_{B-C} - v_C),    |out_A - out_B| <= (a + b) * 2 max|v|

in every column, since means of V lie within max|v|. The bound counts only the mass of keys that may be swapped: ties of the k-th
score and keys within its margin. Where no such key is swapped it is rounding alone, so any key that is wrong shows.
"""
from __future__ import annotations

import torch

from arms.topk import TopkResult
from cases.counter import bell
from cases.inputs import Inputs
from cases.sparse_prefill import SparsePrefillCase
from cases.values import Values
from harness.locate.picture import locate_members
from harness.locate.topk_localise import Windows
from harness.topk_sets import SHOWN, Band, look
from harness.verdicts import Check, Verdict
from references.sparse_prefill import reference

ROWS, HEADS, D_QK = 64, 8, 512
ENTRIES = {"cpu": 1 << 14, "cuda": 1 << 17}
"""Rows times topk: fewer rows are taken where topk is large."""
ROUNDING = 2.0**-32
"""Of max|v|, what two fp64 evaluations may differ by where the choices are equal: a score is a dot product of 512 terms with
sum |q k| scale <= 512 * 16 * 512^-0.5 = 363, so it errs by 512 * 2^-53 * 363 < 2^-35, a weight relatively by twice that (numerator and
denominator), and the sum of at most 2^14 weighted values by 2^-39."""


def downstream(arm: TopkResult, dense: TopkResult, band: Band, seed: int, windows: Windows) -> tuple[Check | None, float]:
    """The check, and the relative error of attention's output over the arm's keys (2-norm over the rows looked at).

    Looks at rows in which the choices differ first, then at rows all over the batch. None without a row that names a key.
    """
    rows = _some_rows(arm.indices, dense.indices)
    both = [_ordered(x.indices[rows], band, rows) for x in (arm, dense)]
    if not len(rows) or not any(bool((x >= 0).any()) for x in both):
        return None, 0.0
    keys = torch.cat([x[x >= 0] for x in both]).unique()
    sides = [_inputs(x, keys, rows, seed) for x in both]
    outs = [reference(inputs, torch.float64).out for inputs in sides]
    swapped = _mass(sides, _free_to_swap(both, band, rows))
    biggest = float(sides[0].kv[..., :512].abs().max())
    bound = (2 * swapped + ROUNDING) * biggest  # [rows, heads]
    error = (outs[0] - outs[1]).abs().amax(-1)
    relative = float(torch.linalg.vector_norm(outs[0] - outs[1]) / torch.linalg.vector_norm(outs[1]).clamp(min=1e-300))
    bad = (error > bound).any(1)
    check = Check("downstream", Verdict.PASSED, margins={"out": float((error / bound).max())}, bad=int(bad.sum()), total=len(rows))
    check.detail = f"attention over the arm's keys is {relative:.3g} (relative) from that over torch_dense's, in {len(rows)} rows"
    if check.bad:
        check.verdict = Verdict.FAILED
        check.detail += "; more than the keys that may be swapped can do"
        check.first = [f"[row {int(rows[i])}] out differs by {float(error[i].max()):.3g}, bound {float(bound[i][error[i].argmax()]):.3g}"
                       for i in bad.nonzero()[:SHOWN, 0].tolist()]
        every = torch.zeros(len(arm.indices), dtype=torch.bool)
        every[rows[bad].cpu()] = True
        locate_members(check, every, windows)
    return check, relative


def _some_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Row numbers, ascending: as many as there is room for of those whose keys differ, and others all over the batch."""
    most = max(1, min(ROWS, ENTRIES[a.device.type] // a.shape[1]))
    differ = (a.sort(1).values != b.sort(1).values).any(1).nonzero()[:most, 0]
    spread = torch.linspace(0, len(a) - 1, most - len(differ), device=a.device).round().long()
    rows: torch.Tensor = torch.cat([differ, spread]).unique()
    return rows


def _ordered(indices: torch.Tensor, band: Band, rows: torch.Tensor) -> torch.Tensor:
    """Entries of the row's window, ascending, in front of -1: equal choices give equal bits. What is no key of the window is left out."""
    inside = (indices >= band.ks[rows, None]) & (indices < band.ke[rows, None])
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(inside, indices, last).sort(1).values
    return torch.where(ordered == last, -1, ordered)


def _inputs(indices: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, seed: int) -> Inputs:
    """The sparse_prefill problem of these rows over the compacted keys: q and kv bell-shaped, standard deviation 1.155."""
    case = SparsePrefillCase(s_q=len(rows), s_kv=len(keys), h_q=HEADS, d_qk=D_QK, topk=indices.shape[1], seed=seed)
    q = bell(seed, "downstream q", rows, HEADS * D_QK).view(len(rows), HEADS, D_QK).float() * 2.0**-15
    kv = bell(seed, "downstream kv", keys, D_QK)[:, None].float() * 2.0**-15
    place = torch.searchsorted(keys, indices.clamp(min=0)).int()
    index = torch.where(indices >= 0, place, -1)[:, None]
    count = (indices >= 0).sum(1)
    values = Values(q.bfloat16(), kv.bfloat16(), None, None, 1.0, 1.0)
    return Inputs(case, values, index, count.int(), None, count, torch.ones(len(keys), dtype=torch.bool, device=keys.device))


def _free_to_swap(both: list[torch.Tensor], band: Band, rows: torch.Tensor) -> list[torch.Tensor]:
    """For each of two choices bool [rows, topk]: entries that the other one does not have, and that tie with the k-th or are within its
    margin."""
    free = [torch.zeros_like(x, dtype=torch.bool) for x in both]
    for at, row in enumerate(rows.tolist()):
        if torch.equal(both[0][at], both[1][at]):
            continue
        chunk = look(band, row, row + 1)
        either = (chunk.inside & ~(chunk.above | chunk.below | chunk.score.isnan()))[0]
        for mine, other, allowed in zip(both, both[::-1], free):
            allowed[at] = (mine[at] >= 0) & either[mine[at].clamp(min=0).long()] & ~torch.isin(mine[at], other[at])
    return free


def _mass(sides: list[Inputs], free: list[torch.Tensor]) -> torch.Tensor:
    """Softmax mass of the entries that are free to swap, both choices together: fp64 [rows, heads]."""
    mass = torch.zeros(len(free[0]), HEADS, dtype=torch.float64, device=free[0].device)
    for inputs, entries in zip(sides, free):
        for row in entries.any(1).nonzero()[:, 0].tolist():
            named = inputs.valid_entries[row]
            k = inputs.kv[inputs.indices[row, 0][named].long(), 0].double()
            weights = torch.softmax(inputs.q[row].double() @ k.T * inputs.case.scale, 1)
            mass[row] += (weights * entries[row][named]).sum(1)
    return mass
