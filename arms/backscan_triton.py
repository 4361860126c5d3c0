"""backscan on CUDA: one program a row, blocks from the tail, stopping at the first block that holds an index >= 0."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def _backscan(indices, lengths, row_stride, topk, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = tl.cdiv(topk, BLOCK) * BLOCK
    length = 0
    while (length == 0) & (start > 0):
        start -= BLOCK
        position = start + tl.arange(0, BLOCK)
        # Masked, so a width that is no multiple of BLOCK never reads outside its row.
        index = tl.load(indices + row * row_stride + position, mask=position < topk, other=-1)
        length = tl.max(tl.where(index >= 0, position + 1, 0), axis=0)
    tl.store(lengths + row, tl.maximum(length, 1))


def backscan_triton(indices: torch.Tensor) -> torch.Tensor:
    """1 + last position with an index >= 0, at least 1. indices: int32 [s_q, topk], last stride 1. Returns int32 [s_q]."""
    lengths = torch.empty(indices.shape[0], dtype=torch.int32, device=indices.device)
    _backscan[(indices.shape[0],)](indices, lengths, indices.stride(0), indices.shape[1], BLOCK=BLOCK)
    return lengths
