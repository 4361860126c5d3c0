"""The dense path's chunk loop: logits of some rows over all keys, then a top-k over them; as many rows at a time as a budget allows."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from arms.topk import TopkProblem

BUDGET = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes of logits held at a time. On CUDA the default of serving stacks."""

SLICE = 1 << 14  # columns in which NaNs are counted at a time: counting all at once would widen them to int64

Logits = Callable[[int, int], torch.Tensor]
"""(row0, row1) -> fp32 [row1 - row0, s_kv], -inf outside the windows."""


def chunks(num_q: int, row_bytes: int, budget: int, multiple: int) -> Iterator[tuple[int, int]]:
    """(row0, row1) of each chunk: the budget's worth of rows in whole multiples of `multiple`, at least one multiple."""
    rows = max(budget // max(row_bytes, 1) // multiple, 1) * multiple
    for row0 in range(0, num_q, rows):
        yield row0, min(row0 + rows, num_q)


def chunk_rows(num_q: int, row_bytes: int, budget: int, multiple: int) -> int:
    """Rows of the largest chunk; 0 without rows."""
    return max((row1 - row0 for row0, row1 in chunks(num_q, row_bytes, budget, multiple)), default=0)


class TopkWriter:
    """Collects the choice of every row: indices int32 [num_q, topk], -1 until chosen, and values fp32 [num_q, topk]."""

    def __init__(self, p: TopkProblem, logits: Logits) -> None:
        self.p, self.logits = p, logits
        self.indices = torch.full((p.num_q, p.topk), -1, dtype=torch.int32, device=p.device)
        self.values = torch.full((p.num_q, p.topk), -torch.inf, device=p.device)
        self.short: list[torch.Tensor] = []

    def choose(self, scores: torch.Tensor, row0: int) -> None:
        """torch.topk over the rows from row0 on. scores fp32 [rows, s_kv], -inf outside the windows; overwritten.

        A NaN is no valid score. An infinite score is: genuine -inf are the last to be chosen, and as torch.topk cannot tell
        them from the keys outside, the rows that need some are remembered for `finish`.
        """
        p, rows = self.p, slice(row0, row0 + scores.shape[0])
        valid = p.ke[rows].long() - p.ks[rows].long()
        for part in scores.split(SLICE, dim=1):
            valid -= part.isnan().sum(1)
        count = valid.clamp_(0, p.topk)
        scores.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        width = min(p.topk, p.s_kv)
        values, indices = scores.topk(width, dim=1)
        chosen = torch.arange(width, device=p.device) < count[:, None]
        self.values[rows, :width] = values
        self.indices[rows, :width] = torch.where(chosen, indices, -1).int()
        self.short.append((chosen & (values == -torch.inf)).any(1))

    def finish(self) -> None:
        """Give the rows with a genuine -inf among the chosen the first such keys of their window. One host sync."""
        rows = torch.cat(self.short).nonzero()[:, 0].tolist() if self.short else []
        for row in rows:
            scores = self.logits(row, row + 1)[0]
            start, end = int(self.p.ks[row]), int(self.p.ke[row])
            lowest = (scores[start:end] == -torch.inf).nonzero()[:, 0] + start
            above = int((self.values[row] > -torch.inf).sum())
            room = min(self.p.topk - above, len(lowest))
            self.indices[row, above : above + room] = lowest[:room].int()


def choosing_bytes(p: TopkProblem, rows: int) -> int:
    """What TopkWriter holds for chunks of `rows` rows, the logits themselves left out.

    values of all rows; for a chunk the counts of a slice (bool, and int64 where the CPU widens it), torch.topk's histograms (half a
    byte an element at most) or, on the CPU, its (value, index) pairs, 16 bytes a key and thread, and result (fp32 and int64,
    twice while it is sorted) with the masks over it; one row again for a genuine -inf.
    """
    a_slice = rows * min(SLICE, p.s_kv) * 9
    pairs = 16 * p.s_kv * torch.get_num_threads() if p.device.type == "cpu" else rows * p.s_kv // 2 + (1 << 20)
    return 4 * p.num_q * p.topk + a_slice + pairs + 48 * rows * p.topk + 16 * p.s_kv + 64 * p.num_q
