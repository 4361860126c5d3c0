"""The exact end of a scan: the topk best of a row's candidates, equal ones by the smallest position, and whether they can be trusted."""
from __future__ import annotations

import torch

from arms.litetopk.torch_gate import Gate
from arms.litetopk.torch_scan import Block, Candidates

INVALID = -(1 << 31)
REVERSED = (1 << 31) - 1


def rank_of(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """int32, ordered as the fp32 values are: -0.0 and 0.0 are equal, -inf is above what is not valid. NaN must not be valid."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0
    return torch.where(valid, bits ^ ((bits >> 31) & REVERSED), INVALID)


def choose(values: torch.Tensor, indices: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The topk best entries of each row: values fp32, -inf behind them, and indices int32, -1 behind them, both [rows, topk].

    values fp32, indices int32 [rows, n], -1 for no entry. Equal values must stand in the order of their indices: the first are taken.
    """
    valid = indices >= 0
    order = rank_of(values, valid).sort(stable=True, dim=1, descending=True).indices[:, :topk]
    best = values.masked_fill(~valid, -torch.inf).gather(1, order)
    chosen = indices.gather(1, order)
    missing = topk - order.shape[1]
    return torch.nn.functional.pad(best, (0, missing), value=-torch.inf), torch.nn.functional.pad(chosen, (0, missing), value=-1)


def certified(gate: Gate, found: Candidates, topk: int) -> torch.Tensor:
    """bool [rows]: the topk best valid keys are all stored.

    Every key in a bucket up to the last threshold passed when it came by, as the threshold only fell. So if nothing was dropped and
    min(topk, valid) of those that passed are in such buckets, no key that did not pass is among the best.
    """
    needed = found.valid.clamp(max=topk)
    return (found.dropped == 0) & (needed <= found.kept) & (needed <= up_to(found.stored, gate.threshold))


def up_to(counts: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the sum of counts [rows, buckets] up to and with a bucket, 0 for bucket -1."""
    place = torch.arange(counts.shape[1], device=counts.device)
    return torch.where(place <= bucket[:, None], counts, 0).sum(1)


def stream(block: Block, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The dense way, in a tile's memory: values and indices [rows, topk] of a block from all scores, each tile merged into the best so
    far. The best so far stand in front and have smaller positions, so equal values stay in order."""
    device = block.scorer.p.device
    values = torch.full((block.rows, topk), -torch.inf, device=device)
    indices = torch.full((block.rows, topk), -1, dtype=torch.int32, device=device)
    for key0, key1, scores, may in block.tiles(0):
        keys = torch.arange(key0, key1, dtype=torch.int32, device=device)
        candidates = torch.where(may, keys, -1)
        values, indices = choose(torch.cat([values, scores], 1), torch.cat([indices, candidates], 1), topk)
    return values, indices


def choose_bytes(rows: int, entries: int, topk: int, device: str) -> int:
    """What choose holds for so many entries a row: ranks while they are made (four int32), a mask, sorted ranks and their places (int64),
    and what it returns, twice. A CUDA sort has copies of its own of (rank, place), five at most."""
    return rows * (entries * (4 * 4 + 1 + 12 + (60 if device == "cuda" else 0)) + 2 * 12 * topk)
