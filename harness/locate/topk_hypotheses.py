"""Which suspected fault explains a wrong choice of keys: the choice again on some of the wrong rows, as each fault would have made it.

A hypothesis gives other scores, other windows, a gate or a buffer that keeps some candidates only, or another reading of the indices
(topk_suspects.py lists them). What a choice does wrong by a hypothesis is counted in keys: those that had to be in and are not, those that
must not be and are, entries that name nothing, keys too few or too many. Ties are free, so a hypothesis that makes scores tie is held to
the share of the keys for which it does. The one that leaves the fewest of the wrong keys unexplained is named; none where the case cannot
tell most of them apart, and none that needs a NaN where no key with one was chosen.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from arms.topk import TopkProblem
from harness.topk_sets import Band
from references.sparse_prefill import full_precision

BAD_ROWS, GOOD_ROWS = 12, 4
ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Dot products held at a time, rows * heads * keys; beyond it fewer rows are looked at."""
LEAST = 0.5
MOST_ALIKE = 0.5  # share of the suspects beyond which those that do equally well say nothing
ELSEWHERE = 0.02  # weight of what a hypothesis would do to rows that are right
TIE = 1e-3


@dataclasses.dataclass(frozen=True)
class TopkView:
    """Some rows of a problem. rows int64 [n]; indices int32 [n, topk], what the arm chose; score [n, s_kv], the reference's, NaN where it
    is NaN and -inf outside the window; eps [n, 1], their margins."""

    p: TopkProblem
    rows: torch.Tensor
    indices: torch.Tensor
    score: torch.Tensor
    eps: torch.Tensor

    @property
    def key(self) -> torch.Tensor:
        """int64 [s_kv]."""
        return torch.arange(self.p.s_kv, device=self.score.device)

    @property
    def ks(self) -> torch.Tensor:
        """int64 [n, 1]."""
        return self.p.ks[self.rows, None].long()

    @property
    def ke(self) -> torch.Tensor:
        return self.p.ke[self.rows, None].long()

    @functools.cached_property
    def inside(self) -> torch.Tensor:
        return (self.key >= self.ks) & (self.key < self.ke)

    @functools.cached_property
    def unread(self) -> torch.Tensor:
        """bool [n, s_kv]: keys of the window whose score is NaN."""
        return self.inside & self.score.isnan()

    @functools.cached_property
    def kth(self) -> torch.Tensor:
        """[n, 1]: the reference's k-th score."""
        return kth_of(self.score, self.inside, self.p.topk)

    def dots(self, rows: torch.Tensor | None = None, columns: int = 128) -> torch.Tensor:
        """fp32 [n, h, s_kv]: dot products of the first columns, of other rows in place of these if given."""
        q = self.p.q_fp8.view(torch.uint8)[self.rows if rows is None else rows].view(self.p.q_fp8.dtype)
        with full_precision(self.score.device):
            return q.float()[..., :columns] @ self.p.k_fp8.float()[:, :columns].T

    @functools.cached_property
    def plain(self) -> torch.Tensor:
        return self.dots()

    def scored(self, dots: torch.Tensor | None = None, weights: torch.Tensor | None = None, scale: torch.Tensor | None = None,
               relu: bool = True) -> torch.Tensor:
        """fp32 [n, s_kv] by other dot products, weights [n, h] or kv_scale [s_kv]."""
        dots = self.plain if dots is None else dots
        weights = self.p.weights[self.rows] if weights is None else weights
        with full_precision(self.score.device):
            summed = torch.bmm(weights[:, None], dots.relu() if relu else dots)[:, 0]
        return summed * (self.p.kv_scale if scale is None else scale)


@dataclasses.dataclass
class Choice:
    """How a hypothesis has the choice made. score [n, s_kv]; inside bool [n, s_kv], the keys that it may choose; indices int32 [n, topk]:
    the arm's, as the hypothesis reads them. None: as they are."""

    score: torch.Tensor | None = None
    inside: torch.Tensor | None = None
    indices: torch.Tensor | None = None


Make = Callable[[TopkView], "Choice | None"]
"""A view -> how a fault has the choice made; None where it has nothing to change on this problem."""


@dataclasses.dataclass(frozen=True)
class TopkHypothesis:
    """A suspected fault."""

    name: str
    make: Make


def kth_of(score: torch.Tensor, inside: torch.Tensor, topk: int) -> torch.Tensor:
    """[n, 1]: the min(topk, valid)-th largest score of each row, +inf without one."""
    valid = inside & ~score.isnan()
    count = valid.sum(1, keepdim=True).clamp(max=topk)
    best = score.masked_fill(~valid, -torch.inf).topk(min(topk, score.shape[1]), dim=1).values
    return best.gather(1, (count - 1).clamp(min=0)).masked_fill(count == 0, torch.inf)


def bounds(v: TopkView) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n, 1]: kv0 and kv1 of each row's request; the row's own window for a row of none."""
    first, last = v.ks.clone(), v.ke.clone()
    for row0, row1, kv0, kv1 in v.p.requests:
        its = (v.rows >= row0) & (v.rows < row1)
        first[its], last[its] = kv0, kv1
    return first, last


def make_view(p: TopkProblem, indices: torch.Tensor, band: Band, wrong: torch.Tensor) -> TopkView:
    """Some of the wrong rows (bool [num_q]) and a few others, as many as there is room for."""
    room = max(1, ELEMENTS[indices.device.type] // (p.heads * p.s_kv))
    rows = [_spread(wrong.nonzero()[:, 0], max(1, min(BAD_ROWS, room))), _spread((~wrong).nonzero()[:, 0], min(GOOD_ROWS, room // 4))]
    chosen = torch.cat(rows).sort().values
    score = torch.cat([band.scores(row, row + 1) for row in chosen.tolist()])
    return TopkView(p, chosen, indices[chosen], score, band.eps[chosen, None])


def _spread(values: torch.Tensor, most: int) -> torch.Tensor:
    if len(values) <= most:
        return values
    return values[torch.linspace(0, len(values) - 1, most, device=values.device).round().long()] if most else values[:0]


def chosen_of(indices: torch.Tensor, s_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys entries int32 [n, topk] name, bool [n, s_kv], and how often, int16."""
    named = (indices >= 0) & (indices < s_kv)
    times = torch.zeros(len(indices), s_kv + 1, dtype=torch.int16, device=indices.device)
    times.scatter_add_(1, torch.where(named, indices, s_kv).long(), torch.ones_like(indices, dtype=torch.int16))
    return times[:, :-1] > 0, times[:, :-1]


def faults_of(view: TopkView, choice: Choice) -> tuple[torch.Tensor, float]:
    """What is wrong with each row of the arm's choice if it was made that way, in keys: int64 [n]. And the share of the keys that tie with
    the k-th then."""
    score = view.score if choice.score is None else choice.score
    inside = view.inside if choice.inside is None else choice.inside
    indices = view.indices if choice.indices is None else choice.indices
    s_kv, topk = view.p.s_kv, view.p.topk
    chosen, times = chosen_of(indices, s_kv)
    valid = inside & ~score.isnan()
    gap = score - kth_of(score, inside, topk)
    must, never = valid & (gap > view.eps), ~valid | (gap < -view.eps)
    astray = (indices < -1).sum(1) + (indices >= s_kv).sum(1) + (times - 1).clamp(min=0).sum(1)
    uneven = ((indices >= 0).sum(1) - valid.sum(1).clamp(max=topk)).abs()
    tied = float((valid & ~must & ~never).sum() / valid.sum().clamp(min=1))
    return (must & ~chosen).sum(1) + (never & chosen).sum(1) + astray + uneven, tied


def explain_choice(view: TopkView, hypotheses: list[TopkHypothesis]) -> str:
    """The line that names the best hypothesis, "" if none explains half of what is wrong, or most of them explain it alike."""
    before, tied_before = faults_of(view, Choice())
    wrong, total = before > 0, int(before.sum())
    if not total:
        return ""
    nan_was_chosen = bool(chosen_of(view.indices, view.p.s_kv)[0].logical_and(view.unread).any())
    found: list[tuple[float, float, str]] = []
    for hypothesis in hypotheses:
        choice = hypothesis.make(view)
        if choice is None:
            continue
        if choice.score is not None and not nan_was_chosen:  # then a key whose score is NaN is no key, whatever it would score
            choice = dataclasses.replace(choice, score=choice.score.masked_fill(view.unread, torch.nan))
        left, tied = faults_of(view, choice)
        share = 1 - int(left[wrong].sum()) / total
        elsewhere = int(left[~wrong].sum()) / total  # a fault may be one of some rows
        found.append((share - max(0.0, tied - tied_before) - ELSEWHERE * min(1.0, elsewhere), share, hypothesis.name))
    best = max(found, key=lambda item: item[0], default=(0.0, 0.0, ""))
    if best[0] < LEAST:
        return ""
    first = next(item for item in found if item[0] >= best[0] - TIE)
    others = [name for score, _, name in found if score >= best[0] - TIE and name != first[2]]
    if len(others) + 1 > MOST_ALIKE * len(found):
        return ""
    told = f" (here the same as: {'; '.join(others[:5])})" if others else ""
    return f"explained by: {first[2]}; it leaves {1 - first[1]:.0%} of what is wrong with the keys{told}"
