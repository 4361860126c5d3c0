"""The fused scan for SM90, scan.cu, made ready for a problem."""
from __future__ import annotations

import ctypes

import torch

from arms.litetopk.certify import mask_outside, rows_of
from arms.litetopk.cuda_library import SelectsByCuda, call
from arms.litetopk.layout import Layout
from arms.litetopk.sample import Sample
from arms.topk import TopkProblem
from cases.indexer_topk import HEAD_DIM

TILE = 256  # keys of a tile, and (row, head) pairs of a block, in scan.cu


def swizzled(x: torch.Tensor) -> torch.Tensor:
    """e4m3 [n, 128] in the layout that scan.cu reads: uint8 [n rounded up to 256, 128]."""
    padded = -(-x.shape[0] // TILE) * TILE
    out = torch.empty(padded, HEAD_DIM, dtype=torch.uint8, device=x.device)
    call("swizzle", x.device, x, out, ctypes.c_longlong(x.shape[0]), ctypes.c_longlong(padded))
    return out


def padded_scale(scale: torch.Tensor) -> torch.Tensor:
    """fp32 [n] with zeros up to a multiple of 256."""
    return torch.nn.functional.pad(scale, (0, -scale.shape[0] % TILE))


class Keys:
    """Keys and their scales as scan.cu reads them."""

    def __init__(self, k: torch.Tensor, scale: torch.Tensor) -> None:
        self.k, self.scale = swizzled(k), padded_scale(scale)
        self.tiles = self.k.shape[0] // TILE


class CudaScanner(SelectsByCuda):
    """A problem made ready for scan.cu. Everything it does is part of the launch: the swizzled copies of q and k, too."""

    def __init__(self, p: TopkProblem, layout: Layout, keys: Keys | None = None) -> None:
        self.p, self.layout = p, layout
        self.q = swizzled(p.q_fp8.view(-1, HEAD_DIM))
        self.keys = keys or Keys(p.k_fp8, p.kv_scale)
        self.sms = torch.cuda.get_device_properties(p.device).multi_processor_count
        blocks = -(-p.num_q * p.heads // TILE)
        # Enough units for every SM where the rows do not give them: then counts are kept in global memory.
        self.splits = 1 if blocks >= self.sms else min(self.keys.tiles, -(-2 * self.sms // blocks))

    def of_rows(self, rows: torch.Tensor) -> CudaScanner:
        return CudaScanner(rows_of(self.p, rows), self.layout, self.keys)

    def sample_scores(self, sample: Sample) -> torch.Tensor:
        at = sample.position.long()
        keys = Keys(self.p.k_fp8.view(torch.uint8)[at], self.p.kv_scale[at])
        return self._scores(keys, self.q, self.p.weights, sample.first, sample.last)

    def logits(self, row0: int, row1: int) -> torch.Tensor:
        rows = slice(row0, row1)
        q = swizzled(self.p.q_fp8[rows].reshape(-1, HEAD_DIM))
        scores = self._scores(self.keys, q, self.p.weights[rows], self.p.ks[rows], self.p.ke[rows])
        return mask_outside(scores[:, : self.p.s_kv], self.p, row0)

    def _scores(self, keys: Keys, q: torch.Tensor, weights: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, keys rounded up to 256]; only tiles that some row of a block may attend are written."""
        scores = torch.empty(len(weights), keys.tiles * TILE, device=self.p.device)
        self._launch(keys, q, weights, ks, ke, scores=scores)
        return scores

    def candidates(self, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.p
        candidate = torch.empty(p.num_q, self.layout.width, dtype=torch.int64, device=p.device)
        count = torch.zeros(p.num_q, self.layout.counts, dtype=torch.int32, device=p.device)
        self._launch(self.keys, self.q, p.weights, p.ks, p.ke, threshold, candidate, count)
        return candidate, count

    def _launch(self, keys: Keys, q: torch.Tensor, weights: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor,
                threshold: torch.Tensor | None = None, candidate: torch.Tensor | None = None, count: torch.Tensor | None = None,
                scores: torch.Tensor | None = None) -> None:
        columns = ctypes.c_longlong(0 if scores is None else scores.shape[1])
        call("scan_keys", self.p.device, keys.k, keys.scale, q, weights, ks, ke, threshold, candidate, count, scores, columns, self.p.heads,
             len(weights), keys.tiles, self.splits, self.layout.segment, self.layout.ties, self.sms)
