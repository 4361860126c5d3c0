"""Seed and select, the two ends of a fused LiteTopk, in Triton: a threshold for each row from its scored sample, and the exact
top-k among a row's candidates, with the row's certificate. Both rest on one thing: the k-th largest of a row, by bisection
over the bits of its floats, which is exact and needs no sort.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from arms.litetopk.layout import SIGMAS, Layout, Selected
from arms.litetopk.sample import Sample
from arms.topk import TopkProblem


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """The bits of fp32, or such bits back, as integers in the order of the floats (-0.0 just below 0.0)."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth(key, usable, rank):  # type: ignore[no-untyped-def]
    """The rank-th largest of the usable keys: the largest t that at least `rank` of them reach."""
    t = tl.where(tl.sum((usable & (key >= 0)).to(tl.int32), 0) >= rank, 0, -2147483648)
    for i in range(31):
        higher = t + (1 << (30 - i))
        t = tl.where(tl.sum((usable & (key >= higher)).to(tl.int32), 0) >= rank, higher, t)
    return t


@triton.jit(do_not_specialize=["stride", "topk", "whole"])  # type: ignore[untyped-decorator]
def _seed(score, stride, position, first, last, ks, ke, threshold, topk, whole, sigmas, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row of `seed`. score fp32 [num_q, stride], position int32 [columns], first, last, ks, ke int32 and threshold fp32 [num_q]."""
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(first + row), tl.load(last + row)
    begin, stop = tl.load(ks + row), tl.load(ke + row)
    at = start + tl.arange(0, BLOCK)
    here = at < end
    place = tl.load(position + at, mask=here, other=-1)
    x = tl.load(score + row * stride + at, mask=here, other=0.0)
    usable = here & (place >= begin) & (place < stop) & (x == x)
    found = tl.sum(usable.to(tl.int32), 0)
    length = tl.maximum(stop - begin, 1)
    root = (sigmas + tl.sqrt(sigmas * sigmas + 4.0 * found * (topk / length))) * 0.5
    rank = tl.ceil(root * root * factor).to(tl.int32)
    t = _ordered(_kth(_ordered(x.to(tl.int32, bitcast=True)), usable, rank)).to(tl.float32, bitcast=True)
    tl.store(threshold + row, tl.where((length <= whole) | (rank > found), -float("inf"), t))


@triton.jit(do_not_specialize=["topk"])  # type: ignore[untyped-decorator]
def _select(candidate, count, threshold, index, value, status, bound, topk, WIDTH: tl.constexpr, LANES: tl.constexpr,  # type: ignore[no-untyped-def]
            SEGMENT: tl.constexpr, TIES: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr):
    """One row of `select`. candidate int64 [num_q, WIDTH], count int32 [num_q, COUNTS], threshold, bound fp32 [num_q], index int32 and
    value fp32 [num_q, topk], status int32 [num_q]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    lane = at // SEGMENT
    in_lane = lane < LANES
    mine = in_lane & (at % SEGMENT < tl.load(count + row * COUNTS + lane, mask=in_lane, other=0))
    lanes = tl.arange(0, triton.next_power_of_2(LANES))
    wanted_in = tl.load(count + row * COUNTS + lanes, mask=lanes < LANES, other=0)
    fits = tl.max(wanted_in, 0) <= SEGMENT
    everything = fits & (tl.load(threshold + row) == -float("inf"))
    if TIES > 0:
        tied = tl.load(count + row * COUNTS + LANES)
        mine = mine | ((at >= LANES * SEGMENT) & (at < LANES * SEGMENT + tl.minimum(tied, TIES)))
        everything = everything & (tied <= TIES)
    packed = tl.load(candidate + row * WIDTH + at, mask=mine, other=0)
    key, place = _ordered((packed >> 32).to(tl.int32)), packed.to(tl.int32)
    stored = tl.sum(mine.to(tl.int32), 0)
    good = everything | (fits & (stored >= topk))
    need = tl.minimum(stored, topk)
    t = _kth(key, mine, need)
    above, equal = mine & (key > t), mine & (key == t)
    left = need - tl.sum(above.to(tl.int32), 0)
    if tl.sum(equal.to(tl.int32), 0) > left:  # of equal ones, those of the smallest positions
        limit = tl.full((), 0, tl.int32)
        for i in range(31):
            lower = limit + (1 << (30 - i))
            limit = tl.where(tl.sum((equal & (place < lower)).to(tl.int32), 0) >= left, limit, lower)
        equal = equal & (place <= limit)
    kept = tl.where(good, need, 0)
    slot = tl.cumsum((above | equal).to(tl.int32), 0) - 1
    chosen = (above | equal) & (slot < kept)
    tl.store(index + row * topk + slot, place, mask=chosen)
    tl.store(value + row * topk + slot, _ordered(key).to(tl.float32, bitcast=True), mask=chosen)
    rest = tl.arange(0, TOPK)
    tl.store(index + row * topk + rest, -1, mask=(rest < topk) & (rest >= kept))
    tl.store(status + row, tl.where(good, 0, 3))
    # What the next threshold may be: k genuine keys of the row reach it, if that many are stored; else nothing is known.
    tl.store(bound + row, tl.where(stored >= topk, _ordered(t).to(tl.float32, bitcast=True), float("nan")))


def seed(score: torch.Tensor, sample: Sample, p: TopkProblem, layout: Layout, factor: float) -> torch.Tensor:
    """A threshold for each row of p: fp32 [num_q], -inf where everything is to pass.

    score: fp32 [num_q, columns], the rows' own scores of the sampled keys; a row uses those inside its window. The threshold is
    the sample's g-th largest, g so that with SIGMAS times sqrt(g) to spare at least topk keys of the row reach it, times `factor`.
    Rows with no more keys than there is room for, or with too small a sample, pass whole.
    """
    threshold = torch.empty(p.num_q, dtype=torch.float32, device=p.device)
    block = triton.next_power_of_2(max(1024, sample.width))
    _seed[(p.num_q,)](score, score.stride(0), sample.position, sample.first, sample.last, p.ks, p.ke, threshold, p.topk,
                      layout.holds_any, SIGMAS, float(factor), BLOCK=block, num_warps=4 if block <= 4096 else 8)
    return threshold


def select(candidate: torch.Tensor, count: torch.Tensor, threshold: torch.Tensor, topk: int, layout: Layout) -> Selected:
    """The top-k of each row's candidates: indices int32 and values fp32 [num_q, topk], status int32 [num_q] (0 certified, else 3
    and the indices -1), bound fp32 [num_q] (a threshold that topk stored keys reach, or NaN).

    A row is certified if no lane wanted in more than it holds and topk are stored, or if everything passed and was stored.
    """
    rows, device = candidate.shape[0], candidate.device
    index = torch.empty(rows, topk, dtype=torch.int32, device=device)
    value = torch.empty(rows, topk, dtype=torch.float32, device=device)
    status = torch.empty(rows, dtype=torch.int32, device=device)
    bound = torch.empty(rows, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(layout.width)
    _select[(rows,)](candidate, count, threshold, index, value, status, bound, topk, WIDTH=layout.width, LANES=layout.lanes,
                     SEGMENT=layout.segment, TIES=layout.ties, COUNTS=layout.counts, BLOCK=block,
                     TOPK=triton.next_power_of_2(topk), num_warps=16 if block >= 8192 else 4)
    return index, value, status, bound
