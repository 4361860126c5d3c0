"""litetopk_windowed's scanner: DeepGEMM's logits of one window of keys at a time, gated and then overwritten."""
from __future__ import annotations

import ctypes

import torch

from arms.litetopk.certify import mask_outside, rows_of
from arms.litetopk.cuda_library import SelectsByCuda, call
from arms.litetopk.layout import Layout
from arms.litetopk.sample import Sample
from arms.topk import TopkProblem

WINDOW_BYTES = 256 << 20  # of logits at a time: more than L2 holds, but wider windows were faster (docs/evidence/litetopk.md)
NARROWEST = 2048  # keys: below, DeepGEMM's own start shows


class WindowedScanner(SelectsByCuda):
    """A problem made ready to be scored by deep_gemm.fp8_mqa_logits, window by window."""

    def __init__(self, p: TopkProblem, layout: Layout) -> None:
        self.p, self.layout = p, layout
        self.window = max(NARROWEST, WINDOW_BYTES // (4 * p.num_q) // 256 * 256)

    def of_rows(self, rows: torch.Tensor) -> WindowedScanner:
        return WindowedScanner(rows_of(self.p, rows), self.layout)

    def sample_scores(self, sample: Sample) -> torch.Tensor:
        at = sample.position.long()
        k = self.p.k_fp8.view(torch.uint8)[at].view(torch.float8_e4m3fn)
        return mqa_logits(self.p.q_fp8, k, self.p.kv_scale[at], self.p.weights, sample.first, sample.last)

    def logits(self, row0: int, row1: int) -> torch.Tensor:
        p, rows = self.p, slice(row0, row1)
        scores = mqa_logits(p.q_fp8[rows], p.k_fp8, p.kv_scale, p.weights[rows], p.ks[rows], p.ke[rows])
        return mask_outside(scores, p, row0)

    def candidates(self, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, layout = self.p, self.layout
        candidate = torch.empty(p.num_q, layout.width, dtype=torch.int64, device=p.device)
        count = torch.zeros(p.num_q, layout.counts, dtype=torch.int32, device=p.device)
        for start in range(0, p.s_kv, self.window):
            keys = slice(start, min(start + self.window, p.s_kv))
            width = keys.stop - start
            bounds = ((bound - start).clamp_(0, width) for bound in (p.ks, p.ke))
            scores = mqa_logits(p.q_fp8, p.k_fp8[keys], p.kv_scale[keys], p.weights, *bounds)
            self._gate(scores, start, width, threshold, candidate, count)
        return candidate, count

    def _gate(self, scores: torch.Tensor, start: int, width: int, threshold: torch.Tensor, candidate: torch.Tensor,
              count: torch.Tensor) -> None:
        p, layout = self.p, self.layout
        call("gate_rows", p.device, scores, ctypes.c_longlong(scores.stride(0)), start, width, p.ks, p.ke, threshold, candidate, count,
             p.num_q, layout.segment, layout.ties)


def mqa_logits(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor,
               ) -> torch.Tensor:
    """fp32 [rows, keys], a view of padded rows; anything outside the windows. A row whose window is empty must have ks = ke = 0:
    the kernel takes the difference of a block's bounds as unsigned."""
    import deep_gemm

    empty = ke <= ks
    begin, end = ks.masked_fill(empty, 0), ke.masked_fill(empty, 0)
    scores: torch.Tensor = deep_gemm.fp8_mqa_logits(q, (k, scale), weights, begin, end, clean_logits=False)
    return scores
