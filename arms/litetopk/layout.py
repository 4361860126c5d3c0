"""How the fused arms keep candidates, and what a launch of one holds. Torch alone: the kernels' own modules come later."""
from __future__ import annotations

import dataclasses

import torch

from arms.litetopk.sample import sample_length
from arms.topk import TopkProblem
from cases.indexer_topk import HEAD_DIM

SIGMAS = 5.0  # of the pass count: of independent scores, at most one row in 3 million gets fewer than topk passes (a Poisson tail)
LOGITS_BYTES = 128 << 20  # of rows computed densely, at a time

Selected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""indices int32 and values fp32 [num_q, topk], status int32 [num_q] (0 certified, else 3 and the indices -1), bound fp32 [num_q]
(a threshold that topk stored keys reach, or NaN)."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a row's candidates stand: `lanes` segments of `segment` entries, then `ties` entries for keys that equal the
    threshold. A candidate is an int64, its score's bits above its key's position; a count for each lane, and one of the ties
    where there is room for them, says how many wanted in.
    """

    lanes: int
    segment: int
    ties: int

    @property
    def width(self) -> int:
        """Candidates of a row."""
        return self.lanes * self.segment + self.ties

    @property
    def holds_any(self) -> int:
        """So many keys of a row, consecutive ones, find room if all pass."""
        return self.lanes * self.segment

    @property
    def counts(self) -> int:
        """Counts of a row."""
        return self.lanes + (self.ties > 0)


def layout_of(p: TopkProblem, lanes: int = 1) -> Layout:
    """Room for eight times topk candidates a row, rounded up to a power of two from 1024; topk of it for ties where one lane takes all."""
    width = max(1024, 1 << (8 * p.topk - 1).bit_length())
    return Layout(1, width - p.topk, p.topk) if lanes == 1 else Layout(lanes, width // lanes, 0)


def transient_bytes(p: TopkProblem) -> int:
    """What a launch of a fused arm holds beyond inputs and indices.

    A row's candidates, sample scores and result (twice: the rows of a rescan have theirs beside the first); copies of q (two, and
    two more of rescanned rows), keys and sampled keys; or, after the candidates are gone, rows computed densely with their masks.
    """
    columns = sum(sample_length(kv1 - kv0) + 256 for _, _, kv0, kv1 in p.requests)
    rows = p.num_q * (layout_of(p).width * 8 + columns * 4 + 2 * (p.topk * 8 + 64))
    copies = (4 * p.num_q * p.heads + p.s_kv + 2 * columns + 1024) * (HEAD_DIM + 4)
    return copies + max(rows, p.num_q * (columns * 4 + p.topk * 8) + 6 * max(LOGITS_BYTES, 4 * p.s_kv)) + (8 << 20)
