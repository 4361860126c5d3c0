"""Indexer scores in fp32 for the portable arms: a tile of rows by keys at a time, on a fixed grid, so that a score's bits depend
on its row and key alone and never on how many others were asked for."""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from arms.topk import TopkProblem
from cases.indexer_topk import HEAD_DIM

CUBLAS_WORKSPACE = 64 << 20  # bytes that torch keeps for cuBLAS and cuBLASLt on Hopper, 32 MiB each


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows and keys of one matrix product; the last ones of a problem are filled up with zeros."""

    rows: int
    keys: int


TILES = {"cpu": Tile(8, 1024), "cuda": Tile(64, 4096)}


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """fp32 matrix products without TF32, whatever the process has set. Restores the setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def score_tile(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
    """q e4m3 [rows, h, 128], weights fp32 [rows, h], k e4m3 [keys, 128], kv_scale fp32 [keys] -> scores fp32 [rows, keys].

    Products of two e4m3 numbers are exact in fp32, so upcasting first loses nothing.
    """
    rows, heads, _ = q.shape
    with full_precision():
        dots = q.float().view(rows * heads, HEAD_DIM) @ k.float().T
        summed = torch.bmm(weights[:, None], dots.relu_().view(rows, heads, k.shape[0]))[:, 0]
    return summed.mul_(kv_scale)


def tile_bytes(tile: Tile, heads: int) -> int:
    """What score_tile, the filled-up copies it is given and the masks over one tile hold at a time."""
    rows = tile.rows * heads
    return 4 * rows * tile.keys + (rows + tile.keys) * (5 * HEAD_DIM + 4) + 16 * tile.rows * tile.keys


def filled_up(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Entries [first, first + count) of the first dimension, zeros past its end. Works on e4m3 too."""
    part = tensor[first : first + count]
    if len(part) == count:
        return part
    out = torch.zeros((count, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    out[: len(part)] = part
    return out


class Scorer:
    """The scores of one problem. Reads ks and ke back once, so it is made in set-up."""

    def __init__(self, p: TopkProblem, tile: Tile | None = None) -> None:
        self.p, self.tile = p, tile or TILES[p.device.type]
        self.ks, self.ke = p.ks.tolist(), p.ke.tolist()

    def span(self, row0: int, row1: int) -> tuple[int, int]:
        """The keys [first, last) that some row of [row0, row1) may attend; (0, 0) if there is none."""
        windows = [(a, b) for a, b in zip(self.ks[row0:row1], self.ke[row0:row1]) if a < b]
        return (min(a for a, _ in windows), max(b for _, b in windows)) if windows else (0, 0)

    def inside(self, row0: int, row1: int, key0: int, key1: int) -> torch.Tensor:
        """bool [row1 - row0, key1 - key0]: which of these keys each row may attend."""
        position = torch.arange(key0, key1, device=self.p.device, dtype=torch.int32)
        return (position >= self.p.ks[row0:row1, None]) & (position < self.p.ke[row0:row1, None])

    def raw(self, row0: int, row1: int, key0: int, key1: int) -> torch.Tensor:
        """fp32 [row1 - row0, key1 - key0]: scores, also outside the windows, where a tile that no row may attend is -inf."""
        out = torch.full((row1 - row0, key1 - key0), -torch.inf, device=self.p.device)
        for top in range(row0 - row0 % self.tile.rows, row1, self.tile.rows):
            first, last = self.span(max(top, row0), min(top + self.tile.rows, row1))
            first, last = max(first, key0), min(last, key1)
            for left in range(first - first % self.tile.keys, last, self.tile.keys):
                self._put(out, row0, key0, top, left)
        return out

    def at(self, row0: int, row1: int, keys: torch.Tensor) -> torch.Tensor:
        """fp32 [row1 - row0, len(keys)]: scores of named keys (int64), also outside the windows."""
        p, tile = self.p, self.tile
        out = torch.empty((row1 - row0, len(keys)), device=p.device)
        for left in range(0, len(keys), tile.keys):
            part = keys[left : left + tile.keys]
            k = filled_up(p.k_fp8.view(torch.uint8)[part].view(torch.float8_e4m3fn), 0, tile.keys)
            for top in range(row0 - row0 % tile.rows, row1, tile.rows):
                scores = score_tile(filled_up(p.q_fp8, top, tile.rows), filled_up(p.weights, top, tile.rows), k,
                                    filled_up(p.kv_scale[part], 0, tile.keys))
                above = max(row0 - top, 0)
                place = out[max(top - row0, 0) : top - row0 + tile.rows, left : left + tile.keys]
                place.copy_(scores[above : above + place.shape[0], : place.shape[1]])
        return out

    def _put(self, out: torch.Tensor, row0: int, key0: int, top: int, left: int) -> None:
        """Score the grid's tile at (top, left) and write the part of it that `out`, which begins at (row0, key0), covers."""
        rows, keys, p = self.tile.rows, self.tile.keys, self.p
        scores = score_tile(filled_up(p.q_fp8, top, rows), filled_up(p.weights, top, rows),
                            filled_up(p.k_fp8, left, keys), filled_up(p.kv_scale, left, keys))
        above, before = max(row0 - top, 0), max(key0 - left, 0)
        place = out[max(top - row0, 0) : top - row0 + rows, max(left - key0, 0) : left - key0 + keys]
        place.copy_(scores[above : above + place.shape[0], before : before + place.shape[1]])

    def masked(self, row0: int, row1: int, key0: int = 0, key1: int | None = None) -> torch.Tensor:
        """As raw, with -inf outside each row's window. A NaN inside stays one."""
        key1 = self.p.s_kv if key1 is None else key1
        out = self.raw(row0, row1, key0, key1)
        for left in range(0, key1 - key0, self.tile.keys):
            for top in range(0, row1 - row0, self.tile.rows):  # tile by tile, so that the mask stays small
                part = out[top : top + self.tile.rows, left : left + self.tile.keys]
                at = (row0 + top, row0 + top + part.shape[0], key0 + left, key0 + left + part.shape[1])
                part.masked_fill_(~self.inside(*at), -torch.inf)
        return out

    @property
    def bytes(self) -> int:
        """What scoring holds beyond its result."""
        return scoring_bytes(self.p, self.tile)


def scoring_bytes(p: TopkProblem, tile: Tile | None = None) -> int:
    """What scoring holds beyond its result: one tile, and on CUDA what torch keeps for cuBLAS."""
    return tile_bytes(tile or TILES[p.device.type], p.heads) + (CUBLAS_WORKSPACE if p.device.type == "cuda" else 0)
