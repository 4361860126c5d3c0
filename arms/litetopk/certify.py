"""The frame of the fused arms: sample, gate, scan, select, and what becomes of rows that the certificate refuses.

A scan is given one threshold a row and returns every key that reaches it. If at least topk did and none was lost for want of
room, the top-k is among them, whatever the threshold was made from: so the sample needs no guarantee, only to be
representative. It is spread over the whole window of a request, not taken from its front, since scores drift along a context. A
threshold that proves too high or too low is corrected from what the scan counted and the row is scanned again; what still fails
is computed densely.
"""
from __future__ import annotations

import dataclasses
from typing import Protocol

import torch

from arms.dense import TopkWriter
from arms.litetopk.layout import LOGITS_BYTES, Layout, Selected
from arms.litetopk.sample import Sample
from arms.topk import WAYS, TopkProblem, TopkResult

READS_BACK = "the host reads back which rows are certified"
"""Why no CUDA graph can be made of a fused arm."""


class Scanner(Protocol):
    """One problem made ready to be scanned."""

    p: TopkProblem
    layout: Layout

    def sample_scores(self, sample: Sample) -> torch.Tensor:
        """fp32 [num_q, at least columns]: scores of the sampled keys, bitwise those of the scan."""

    def candidates(self, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys that reach fp32 [num_q]: int64 [num_q, layout.width] and counts int32 [num_q, layout.counts]."""

    def logits(self, row0: int, row1: int) -> torch.Tensor:
        """All scores of some rows: fp32 [row1 - row0, s_kv], -inf outside a row's window."""

    def seed(self, scores: torch.Tensor, sample: Sample, factor: float) -> torch.Tensor:
        """A threshold for each row, fp32 [num_q]: the sample's g-th largest score among those inside the row's window, NaN left out. g is
        such that mean = g - SIGMAS * sqrt(g) of the sample are expected among the topk, times `factor`. -inf, so that everything passes,
        where the row has no more keys than find room (layout.holds_any), or fewer than g usable sample scores.

        scores: of `sample_scores`, fp32 [num_q, at least columns]."""

    def select(self, candidate: torch.Tensor, count: torch.Tensor, threshold: torch.Tensor) -> Selected:
        """The rows' top-k (of equal scores those of the smallest positions) and certificate, from what `candidates` gave.

        A row is certified if topk are stored and no lane wanted in more than it holds (of ties: topk suffice), or if everything passed and
        found room."""

    def of_rows(self, rows: torch.Tensor) -> Scanner:
        """A scanner of these rows alone (int64)."""


def certified(p: TopkProblem, scanner: Scanner, sample: Sample, rescans: int = 3) -> TopkResult:
    """The exact top-k of every row by the scanner's own scores: one scan, at most `rescans` more of the rows that fail, then dense. The
    host waits for the device once, and once more for each scan after the first."""
    scores = scanner.sample_scores(sample)
    threshold = scanner.seed(scores, sample, 1.0)
    index, value, status, bound = scanner.select(*scanner.candidates(threshold), threshold)
    failed = (status == WAYS.index("failed")).nonzero()[:, 0]
    hopeless = []
    for attempt in range(rescans if len(failed) else 0):
        # A row whose k-th stored score is its threshold has more ties than room: another scan would end the same way.
        stuck = bound[failed] == threshold[failed]
        hopeless.append(failed[stuck])
        failed = failed[~stuck]
        if not len(failed):
            break
        part = scanner.of_rows(failed)
        own = Sample(sample.position, sample.first[failed], sample.last[failed], sample.width)
        # Too high: eight times the rank, then everything. Too low: the k-th of what was stored, which k keys are known to reach.
        lower = part.seed(scores[failed], own, 8.0) if attempt == 0 else torch.full_like(bound[failed], -torch.inf)
        threshold[failed] = torch.where(bound[failed].isnan(), lower, bound[failed])
        index[failed], value[failed], again, bound[failed] = part.select(*part.candidates(threshold[failed]), threshold[failed])
        status[failed] = torch.where(again == 0, WAYS.index("rescan"), WAYS.index("failed")).to(torch.int32)
        failed = failed[again != 0]
    del scores
    failed = torch.cat([*hopeless, failed])
    for rows in failed.split(max(1, LOGITS_BYTES // (4 * p.s_kv))) if len(failed) else ():
        index[rows], value[rows] = dense(rows_of(p, rows), scanner.of_rows(rows))
        status[rows] = WAYS.index("dense")
    return TopkResult(index, value, status, scanner.logits)


def dense(p: TopkProblem, scanner: Scanner) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices int32 and values fp32 [num_q, topk] from all scores at once."""
    writer = TopkWriter(p, scanner.logits)
    writer.choose(scanner.logits(0, p.num_q), 0)
    writer.finish()
    return writer.indices, writer.values


def rows_of(p: TopkProblem, rows: torch.Tensor) -> TopkProblem:
    """The problem of these rows alone (int64), with the same keys. It has no requests: its rows may be of any."""
    q = p.q_fp8.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    return dataclasses.replace(p, q_fp8=q, weights=p.weights[rows], ks=p.ks[rows], ke=p.ke[rows], requests=())


def mask_outside(scores: torch.Tensor, p: TopkProblem, row0: int) -> torch.Tensor:
    """Write -inf outside each row's window, in place. scores: fp32 [rows, s_kv], of the rows from row0 on."""
    position = torch.arange(p.s_kv, device=p.device, dtype=torch.int32)
    for i in range(0, len(scores), 64):  # some rows at a time, so that the mask stays small
        part = scores[i : i + 64]
        rows = slice(row0 + i, row0 + i + len(part))
        part.masked_fill_((position < p.ks[rows, None]) | (position >= p.ke[rows, None]), -torch.inf)
    return scores
