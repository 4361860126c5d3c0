"""The fused LiteTopk scan in Triton: scores, gate and emission in one pass over the keys, for SM90 and, interpreted, for the CPU.

Triton has no shared-memory queue and its atomics stall the loop, so candidates leave it without any communication: each of the
BLOCK keys of a tile is a lane with a segment of the candidates and a count of its own, kept in registers. A lane that fills up makes
its row fail the certificate; consecutive keys go to different lanes, so it takes keys that rank high at one place modulo BLOCK.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from arms.litetopk.certify import mask_outside, rows_of
from arms.litetopk.layout import Layout, Selected, layout_of
from arms.litetopk.sample import Sample
from arms.litetopk.select_triton import seed, select
from arms.topk import TopkProblem

BLOCK = 128  # keys of a tile
MOST_SPLITS = 4  # of a block's keys, where there are fewer blocks of rows than multiprocessors


@triton.jit(do_not_specialize=["stride", "num_q", "s_kv"])  # type: ignore[untyped-decorator]
def _scan(q, k, scale, weight, ks, ke, threshold, candidate, count, score, stride, num_q, s_kv, SPLITS: tl.constexpr,  # type: ignore[no-untyped-def]
          SEGMENT: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STORE: tl.constexpr):
    """One block of ROWS query rows against one of SPLITS shares of its keys. q e4m3 [num_q, H, 128], k e4m3 [s_kv, 128], scale fp32 [s_kv],
    weight fp32 [num_q, H], ks, ke int32 [num_q]. STORE: every score of the windows to score fp32 [num_q, stride]. Otherwise what reaches
    threshold fp32 [num_q] to candidate int64 [num_q, SPLITS * BLOCK, SEGMENT], and how many did to count int32 [num_q, SPLITS * BLOCK]."""
    block, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < num_q
    begin, end = tl.load(ks + row, mask=real, other=0), tl.load(ke + row, mask=real, other=0)
    t = tl.load(threshold + row, mask=real, other=float("nan"))
    pair = tl.arange(0, ROWS * H)
    there = block * ROWS + pair // H < num_q
    d, lane = tl.arange(0, 128), tl.arange(0, BLOCK)
    queries = tl.load(q + (block * ROWS * H + pair)[None, :] * 128 + d[:, None], mask=there[None, :], other=0.0)
    w = tl.load(weight + block * ROWS * H + pair, mask=there, other=0.0)
    taken = tl.zeros([BLOCK, ROWS], tl.int32)
    mine = candidate + ((row * SPLITS + split) * BLOCK)[None, :] * SEGMENT + lane[:, None] * SEGMENT
    first = tl.min(tl.where(end > begin, begin, s_kv), 0) // BLOCK
    tiles = tl.maximum(tl.cdiv(tl.max(tl.where(end > begin, end, 0), 0), BLOCK) - first, 0)
    share = tl.cdiv(tiles, SPLITS)
    at = k + (first + split * share).to(tl.int64) * (BLOCK * 128) + lane[:, None] * 128 + d[None, :]
    for tile in range(first + split * share, first + tl.minimum(tiles, split * share + share)):
        place = tile * BLOCK + lane
        keys = tl.load(at, mask=place[:, None] < s_kv, other=0.0)
        at += BLOCK * 128
        factor = tl.load(scale + place, mask=place < s_kv, other=0.0)
        dots = tl.dot(keys, queries, out_dtype=tl.float32)
        x = tl.sum(tl.reshape(tl.maximum(dots, 0.0) * w[None, :], [BLOCK, ROWS, H]), 2) * factor[:, None]
        inside = (place[:, None] >= begin[None, :]) & (place[:, None] < end[None, :])
        if STORE:
            tl.store(score + row[None, :] * stride + place[:, None], x, mask=inside)
        else:
            passes = inside & (x >= t[None, :])
            packed = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | place[:, None]
            tl.store(mine + taken, packed, mask=passes & (taken < SEGMENT))
            taken += passes.to(tl.int32)
    if not STORE:
        # The comparison makes the mask as wide as the block: the interpreter does not broadcast one.
        tl.store(count + ((row * SPLITS + split) * BLOCK)[None, :] + lane[:, None], taken, mask=real[None, :] & (lane[:, None] >= 0))


class TritonScanner:
    """A problem made ready for the Triton scan. splits: shares of a block's keys, 0 for as many as fill the GPU, at most MOST_SPLITS."""

    def __init__(self, p: TopkProblem, splits: int = 0) -> None:
        self.p, self.rows = p, max(1, 128 // p.heads)
        self.blocks = -(-p.num_q // self.rows)
        units = torch.cuda.get_device_properties(p.device).multi_processor_count if p.device.type == "cuda" else 1
        self.splits = splits or min(MOST_SPLITS, 1 << max(0, (units // self.blocks).bit_length() - 1))
        self.layout: Layout = layout_of(p, lanes=BLOCK * self.splits)

    def of_rows(self, rows: torch.Tensor) -> TritonScanner:
        return TritonScanner(rows_of(self.p, rows))

    def sample_scores(self, sample: Sample) -> torch.Tensor:
        at = sample.position.long()
        k = self.p.k_fp8.view(torch.uint8)[at].view(torch.float8_e4m3fn)
        return self._scores(k, self.p.kv_scale[at], sample.first, sample.last)

    def logits(self, row0: int, row1: int) -> torch.Tensor:
        part = TritonScanner(rows_of(self.p, torch.arange(row0, row1, device=self.p.device)))
        return mask_outside(part._scores(self.p.k_fp8, self.p.kv_scale, part.p.ks, part.p.ke), self.p, row0)

    def candidates(self, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, layout = self.p, self.layout
        candidate = torch.empty(p.num_q, layout.width, dtype=torch.int64, device=p.device)
        count = torch.empty(p.num_q, layout.counts, dtype=torch.int32, device=p.device)
        self._launch(p.k_fp8, p.kv_scale, p.ks, p.ke, threshold, candidate, count, scores=threshold[:, None], store=False)
        return candidate, count

    def seed(self, scores: torch.Tensor, sample: Sample, factor: float) -> torch.Tensor:
        return seed(scores, sample, self.p, self.layout, factor)

    def select(self, candidate: torch.Tensor, count: torch.Tensor, threshold: torch.Tensor) -> Selected:
        return select(candidate, count, threshold, self.p.topk, self.layout)

    def _scores(self, k: torch.Tensor, scale: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor) -> torch.Tensor:
        """fp32 [num_q, keys]; only the windows are written."""
        scores = torch.empty(self.p.num_q, len(k), device=self.p.device)
        self._launch(k, scale, ks, ke, threshold=scores, candidate=scores, count=scores, scores=scores, store=True)
        return scores

    def _launch(self, k: torch.Tensor, scale: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, threshold: torch.Tensor,
                candidate: torch.Tensor, count: torch.Tensor, scores: torch.Tensor, store: bool) -> None:
        p = self.p
        _scan[(self.blocks, self.splits)](
            p.q_fp8, k, scale, p.weights, ks, ke, threshold, candidate, count, scores, scores.stride(0), p.num_q, len(k),
            SPLITS=self.splits, SEGMENT=self.layout.segment, H=p.heads, ROWS=self.rows, BLOCK=BLOCK, STORE=store, num_warps=4, num_stages=3)
