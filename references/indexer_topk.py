"""The indexer_topk reference: every score, the k-th of each row, and how far a right kernel's scores may be from them.

    score(r, j) = kv_scale[j] * sum_h weights[r, h] * max(0, <q[r, h], k[j]>)    for ks[r] <= j < ke[r], -inf elsewhere

Plain torch, fp32 with TF32 off (or fp64), independent of every kernel. Scores are made block by block on a grid of absolute row and
key numbers, always whole blocks, so that a score has the same bits whichever rows are asked for; [num_q, s_kv] is kept only where it is
small. Order: a NaN is never chosen, +inf is best, a -inf inside the window is a valid score and the last. docs/budgets.md derives the
bounds.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from cases.indexer_inputs import IndexerInputs
from cases.indexer_topk import ACCUMULATE, HEAD_DIM
from references.precision import FP32_UNIT, LAMBDA, ROUNDOFF
from references.sparse_prefill import free_memory, full_precision

ROWS = {"cpu": 8, "cuda": 32}
KEYS = {"cpu": 1 << 13, "cuda": 1 << 16}
"""Rows and keys of a block: its dot products take 8 MiB on the CPU and 256 MiB on CUDA in fp32 with 32 heads, and six rows' worth of
scores beside them 192 and 768 MiB at 1M keys."""
CACHED = {"cpu": 1 << 26, "cuda": 32 << 30}
"""Bytes of scores kept at most, so that they need not be made again for every look; less where less than four times that is free."""


@dataclasses.dataclass
class TopkExpected:
    """What is right for a case, on the inputs' device.

    kth:   dtype [num_q], the count-th largest valid score of each row, +inf where count is 0
    valid: int64 [num_q], keys of the window whose score is not NaN; count: int64 [num_q], min(topk, valid)
    eps:   for each way to accumulate, fp32 and fp8, dtype [num_q] >= 0: a right kernel's choice holds every key with
           score > kth + eps and none with score < kth - eps. 0 where every sum is exact.
    """

    inputs: IndexerInputs
    dtype: torch.dtype
    kth: torch.Tensor
    valid: torch.Tensor
    count: torch.Tensor
    eps: dict[str, torch.Tensor]
    cached: torch.Tensor | None = None

    def scores(self, row0: int, row1: int) -> torch.Tensor:
        """Scores of rows [row0, row1): dtype [row1 - row0, s_kv], -inf outside [ks, ke). The same bits whenever called.

        They may be the ones kept: not to be written to.
        """
        if self.cached is not None:
            return self.cached[row0:row1]
        return self._scorer.scores(row0, row1)

    def score_error(self, accumulate: str, row0: int, row1: int, indices: torch.Tensor) -> torch.Tensor:
        """How far a kernel's own score of a key may be from `scores`: dtype, shaped as indices.

        accumulate: fp32 or fp8; indices: integers [row1 - row0, n], absolute positions; an entry outside [0, s_kv) gets 0.
        """
        if accumulate in self.inputs.case.exact:
            return torch.zeros(indices.shape, dtype=self.dtype, device=self.inputs.device)
        return self.rounding(accumulate, row0, row1, indices)

    def rounding(self, accumulate: str, row0: int, row1: int, indices: torch.Tensor) -> torch.Tensor:
        """As score_error, for whatever q, k, kv_scale and weights hold now: it does not rely on the case's being exact."""
        return self._scorer.errors_at(accumulate, row0, row1, indices)

    @functools.cached_property
    def _scorer(self) -> _Scorer:
        return _Scorer(self.inputs, self.dtype)


def topk_reference(inputs: IndexerInputs, dtype: torch.dtype = torch.float32) -> TopkExpected:
    """Expected values of a case. dtype: torch.float32 or torch.float64. Raises RuntimeError if fp32 products are not fp32 here."""
    case, device = inputs.case, inputs.device
    scorer = _Scorer(inputs, dtype)
    kth = torch.empty(case.num_q, dtype=dtype, device=device)
    valid = torch.empty(case.num_q, dtype=torch.int64, device=device)
    eps = {name: torch.zeros(case.num_q, dtype=dtype, device=device) for name in ACCUMULATE}
    keep = case.num_q * case.s_kv * dtype.itemsize <= min(CACHED[device.type], free_memory(device) // 4)
    cached = torch.empty(case.num_q, case.s_kv, dtype=dtype, device=device) if keep else None
    wanted = tuple(name for name in ACCUMULATE if name not in case.exact)
    with full_precision(device):
        for row0, row1 in scorer.row_blocks(0, case.num_q):
            rows = slice(row0, row1)
            score, errors = scorer.block(row0, row1, wanted)
            kth[rows], valid[rows] = _kth(score, scorer.inside(row0, row1, 0, case.s_kv), case.topk)
            for name, error in errors.items():
                eps[name][rows] = margin_of(score, kth[rows], error)
            if cached is not None:
                cached[rows] = score
    return TopkExpected(inputs, dtype, kth, valid, valid.clamp(max=case.topk), eps, cached)


def _kth(score: torch.Tensor, inside: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The min(topk, valid)-th largest valid score of each row, +inf without one, and the number of valid ones."""
    unread = score.isnan()
    valid = (inside & ~unread).sum(1)
    best = score.masked_fill(unread, -torch.inf).topk(min(topk, score.shape[1]), dim=1).values
    last = (valid.clamp(max=topk) - 1).clamp(min=0)
    return best.gather(1, last[:, None])[:, 0].masked_fill(valid == 0, torch.inf), valid


def margin_of(score: torch.Tensor, kth: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """eps of each row: twice the largest error among the keys that errors could carry across the k-th.

    A key further from kth than twice its own error stays on its side whatever the others do (docs/budgets.md).
    score, error: [rows, s_kv]; kth: [rows].
    """
    near = (score - kth[:, None]).abs() < 2 * error
    return 2 * torch.where(near, error, 0.0).amax(1)


@dataclasses.dataclass
class _Sums:
    """What errors are made of, [rows, keys] each, kv_scale included: score = s sum w relu(dot), absolute = s sum_h |w| sum_d |q k|,
    products = s^2 sum_h w^2 sum_d (q k)^2, dots = s^2 sum_h w^2 relu(dot)^2. None where no bound was wanted; the last two are for fp8."""

    score: torch.Tensor
    absolute: torch.Tensor | None = None
    products: torch.Tensor | None = None
    dots: torch.Tensor | None = None


class _Scorer:
    """Scores and error bounds of one case."""

    def __init__(self, inputs: IndexerInputs, dtype: torch.dtype) -> None:
        self.inputs, self.dtype, self.device = inputs, dtype, inputs.device
        self.rows, self.keys = ROWS[self.device.type], KEYS[self.device.type]
        self.windows = list(zip(inputs.ks.tolist(), inputs.ke.tolist()))

    def row_blocks(self, row0: int, row1: int) -> Iterator[tuple[int, int]]:
        """The grid's blocks of rows that hold some of [row0, row1)."""
        for start in range(row0 - row0 % self.rows, row1, self.rows):
            yield start, min(start + self.rows, self.inputs.case.num_q)

    def key_blocks(self, row0: int, row1: int) -> Iterator[tuple[int, int]]:
        """The grid's blocks of keys that some row of [row0, row1) may attend."""
        windows = [(start, end) for start, end in self.windows[row0:row1] if start < end]
        if windows:
            first, last = min(start for start, _ in windows), max(end for _, end in windows)
            for start in range(first - first % self.keys, last, self.keys):
                yield start, min(start + self.keys, self.inputs.case.s_kv)

    def inside(self, row0: int, row1: int, key0: int, key1: int) -> torch.Tensor:
        """bool [row1 - row0, key1 - key0]: the keys that each row may attend."""
        at = torch.arange(key0, key1, device=self.device, dtype=torch.int32)
        return (at >= self.inputs.ks[row0:row1, None]) & (at < self.inputs.ke[row0:row1, None])

    def scores(self, row0: int, row1: int) -> torch.Tensor:
        """dtype [row1 - row0, s_kv]."""
        out = torch.empty(row1 - row0, self.inputs.case.s_kv, dtype=self.dtype, device=self.device)
        with full_precision(self.device):
            for start, end in self.row_blocks(row0, row1):
                first, last = max(start, row0), min(end, row1)
                out[first - row0 : last - row0] = self.block(start, end, ())[0][first - start : last - start]
        return out

    def block(self, row0: int, row1: int, wanted: tuple[str, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Scores of one block of rows over all keys, and their errors in the wanted accumulations: [row1 - row0, s_kv] each."""
        shape = (row1 - row0, self.inputs.case.s_kv)
        score = torch.full(shape, -torch.inf, dtype=self.dtype, device=self.device)
        errors = {name: torch.zeros(shape, dtype=self.dtype, device=self.device) for name in wanted}
        q, weights = self.inputs.q_fp8[row0:row1].to(self.dtype), self.inputs.weights[row0:row1].to(self.dtype)
        for key0, key1 in self.key_blocks(row0, row1):
            k, scale = self.inputs.k_fp8[key0:key1].to(self.dtype), self.inputs.kv_scale[key0:key1].to(self.dtype)
            sums = _sums(q, weights, k, scale, wanted)
            outside = ~self.inside(row0, row1, key0, key1)
            score[:, key0:key1] = sums.score.masked_fill(outside, -torch.inf)
            for name in wanted:
                errors[name][:, key0:key1] = self._error(name, sums).masked_fill_(outside, 0.0)
        return score, errors

    def errors_at(self, accumulate: str, row0: int, row1: int, indices: torch.Tensor) -> torch.Tensor:
        """As TopkExpected.rounding."""
        out = torch.empty(indices.shape, dtype=self.dtype, device=self.device)
        named = (indices >= 0) & (indices < self.inputs.case.s_kv)
        with full_precision(self.device):
            for start in range(row0, row1, self.rows):
                rows, here = slice(start, min(start + self.rows, row1)), slice(start - row0, start - row0 + self.rows)
                q, weights = self.inputs.q_fp8[rows].to(self.dtype), self.inputs.weights[rows].to(self.dtype)
                index = torch.where(named[here], indices[here], 0).long()
                every = index.shape[1] > self.inputs.case.s_kv  # fewer keys than entries: once for each key is less
                part = slice(None) if every else index
                k, scale = self.inputs.k_fp8[part].to(self.dtype), self.inputs.kv_scale[part].to(self.dtype)
                error = self._error(accumulate, _sums(q, weights, k, scale, (accumulate,)))
                out[here] = error.gather(1, index) if every else error
        return out.masked_fill_(~named, 0.0)

    def _error(self, accumulate: str, sums: _Sums) -> torch.Tensor:
        """Bound on the difference between a kernel's score and this reference's; 0 where the score is not finite."""
        heads = self.inputs.case.h
        own = FP32_UNIT if self.dtype == torch.float32 else 2.0**-53
        side = gamma(HEAD_DIM + heads + 4, FP32_UNIT) if accumulate == "fp32" else gamma(heads + 4, FP32_UNIT)
        assert sums.absolute is not None
        error = sums.absolute * ((side + gamma(HEAD_DIM + heads + 4, own)) * (1 + 2.0**-10))  # `absolute` itself is rounded
        if accumulate == "fp8":
            assert sums.products is not None and sums.dots is not None
            unit, steps = ROUNDOFF["fp8"].acc_unit, HEAD_DIM / ROUNDOFF["fp8"].acc_step
            sigma = sums.dots.mul_(1 / 3).add_(sums.products, alpha=0.5).sqrt_()
            error.add_(sigma, alpha=LAMBDA * unit * steps**0.5).add_(sums.score.abs(), alpha=unit / 4 * steps)
        return torch.where(sums.score.isfinite(), error, 0.0)


def gamma(n: int, unit: float) -> float:
    """Relative error of n roundings in a row, each of at most `unit` (Higham)."""
    return n * unit / (1 - n * unit)


def _sums(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, wanted: tuple[str, ...]) -> _Sums:
    """q [rows, h, 128], weights [rows, h]; k [keys, 128] and scale [keys], or for each row keys of its own, k [rows, keys, 128]."""
    rows, heads, dim = q.shape
    if k.dim() == 2:
        dots = (q.view(rows * heads, dim) @ k.T).view(rows, heads, len(k))
    else:
        dots = torch.bmm(q, k.mT)
    dots = dots.relu_()  # [rows, h, keys]
    sums = _Sums(torch.bmm(weights[:, None], dots)[:, 0] * scale)
    if wanted:
        sums.absolute = _over_columns((weights.abs()[..., None] * q.abs()).sum(1), k.abs()) * scale
    if "fp8" in wanted:
        square = weights.square()
        sums.dots = torch.bmm(square[:, None], dots.square_())[:, 0] * scale.square()
        sums.products = _over_columns((square[..., None] * q.square()).sum(1), k.square()) * scale.square()
    return sums


def _over_columns(row: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """sum_d row[r, d] k[j, d]: [rows, keys]. A sum over heads of non-negative terms is taken into `row` first, so no head is left."""
    return row @ k.T if k.dim() == 2 else torch.bmm(row[:, None], k.mT)[:, 0]
