"""Keys that score below every row's k-th, for the check keys-appended: which rows have some, and what they are made of."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from arms.topk import TopkProblem
from harness.topk_sets import Band

TRIED = 8  # first keys of a request that a heavy key may be made of
FURTHER = 10  # doublings more than are needed: far below, such keys also stretch what a kernel makes its buckets from
MOST_DOUBLINGS = 40
LARGE = 2.0**60

Error = Callable[[int, int, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Junk:
    """rows: bool [num_q], rows that may see the keys added to their request. heavy: of some requests, by number, the key that the added
    ones are copies of and the kv_scale that they have; of the others they are zeros with scale 1."""

    rows: torch.Tensor
    heavy: dict[int, tuple[int, float]]


def junk_of(p: TopkProblem, band: Band, valid: torch.Tensor, error: Error) -> Junk | None:
    """What can be added to each request without changing a choice; None if no row could see any of it.

    A right kernel's own k-th score is at least kth - eps / 2 (docs/budgets.md), so what it scores below kth - eps is never chosen by a row
    that has topk keys without it.
    * A key of zeros scores exactly 0 in every kernel. It may be seen by rows with kth > eps.
    * Where a request has no such row, its scores are mostly negative: a key j that scores below 0 in every row, with 2^m times the
      scale, has 2^m times the score and the error, so m is chosen such that 2^m (s_j + d_j) < kth - eps.
    Rows whose k-th is 0, or within eps of it, see nothing, nor do those whose k-th is -inf.

    valid: int64 [num_q], the keys that each row may choose.
    """
    enough = valid >= p.topk
    rows = enough & (band.kth > band.eps)
    heavy = {}
    below = enough & (band.kth < -band.eps) & band.kth.isfinite()
    for number, (row0, row1, kv0, kv1) in enumerate(p.requests):
        here = slice(row0, row1)
        if kv1 - kv0 < TRIED or row0 == row1 or bool(rows[here].any()):
            continue
        seeing = below[here] & (p.ks[here] == kv0) & (p.ke[here] >= kv0 + TRIED)
        found = heavy_key(p, band, error, number, seeing) if bool(seeing.any()) else None
        if found:
            rows[here], heavy[number] = seeing, found
    return Junk(rows, heavy) if bool(rows.any()) else None


def heavy_key(p: TopkProblem, band: Band, error: Error, request: int, seeing: torch.Tensor) -> tuple[int, float] | None:
    """The first key of a request that is surely negative in all rows `seeing` it (bool [rows of the request]), and a scale with which it is
    below their margins. None without one."""
    row0, row1, kv0, _ = p.requests[request]
    index = torch.arange(kv0, kv0 + TRIED, device=p.device).expand(row1 - row0, TRIED)
    most = (band.scores(row0, row1)[:, kv0 : kv0 + TRIED] + error(row0, row1, index))[seeing]
    target = (band.kth - band.eps)[row0:row1][seeing]
    for key in range(TRIED):
        scale = float(p.kv_scale[kv0 + key])
        if not (bool((most[:, key] < 0).all()) and bool(most[:, key].isfinite().all())):
            continue
        needed = math.floor(math.log2(float((target / most[:, key]).max()))) + 1
        doublings = max(0, needed) + FURTHER
        if doublings <= MOST_DOUBLINGS and 0 < scale * 2.0**doublings < LARGE:
            return kv0 + key, scale * 2.0**doublings
    return None
