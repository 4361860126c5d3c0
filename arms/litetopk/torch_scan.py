"""One pass over the keys for a few rows: score a tile, let through what the gate lets through, keep it, tighten the gate."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from arms.litetopk.torch_config import Config
from arms.litetopk.torch_gate import Gate, count_buckets, first_reaching
from arms.litetopk.torch_trace import Step, Trace
from arms.scoring import Scorer


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows [row0, row1) that are scanned together, with the scorer of their problem."""

    scorer: Scorer
    row0: int
    row1: int

    @property
    def rows(self) -> int:
        return self.row1 - self.row0

    def tiles(self, width: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(key0, key1, scores fp32 [rows, width], may bool: which of them each row may attend and are no NaN), in the order of the keys.

        Scores are computed by the grid's tiles and handed out `width` keys at a time, 0 for a whole tile.
        """
        grid = self.scorer.tile.keys
        first, last = self.scorer.span(self.row0, self.row1)
        for key0 in range(first - first % grid, last, grid):
            key1 = min(key0 + grid, last)
            scores = self.scorer.raw(self.row0, self.row1, key0, key1)
            may = self.scorer.inside(self.row0, self.row1, key0, key1) & ~scores.isnan()
            for at in range(0, key1 - key0, width or grid):
                part = slice(at, at + (width or grid))
                yield key0 + at, min(key0 + part.stop, key1), scores[:, part], may[:, part]


@dataclasses.dataclass
class Candidates:
    """What a scan let through. value fp32, index int32 [rows, capacity + 1], the last column for what is thrown away; in the order of
    the keys. emitted int64 [rows]: how many were let through, those that found no room among them.

    stored, lost int64 [rows, buckets]: how many of each bucket were kept and were thrown away; valid int64 [rows]: keys that a row may
    choose from; best, worst fp32 [rows]: the outermost finite scores let through.
    """

    value: torch.Tensor
    index: torch.Tensor
    emitted: torch.Tensor
    stored: torch.Tensor
    lost: torch.Tensor
    valid: torch.Tensor
    best: torch.Tensor
    worst: torch.Tensor

    @classmethod
    def none(cls, rows: int, capacity: int, buckets: int, device: torch.device) -> Candidates:
        """The state before a scan: every count is zero."""
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(torch.full((rows, capacity + 1), -torch.inf, device=device),
                   torch.full((rows, capacity + 1), -1, dtype=torch.int32, device=device), zeros(rows), zeros(rows, buckets),
                   zeros(rows, buckets), zeros(rows), torch.full((rows,), -torch.inf, device=device),
                   torch.full((rows,), torch.inf, device=device))

    @property
    def capacity(self) -> int:
        return self.value.shape[1] - 1

    @property
    def dropped(self) -> torch.Tensor:
        """int64 [rows]: how many found no room."""
        return (self.emitted - self.capacity).clamp(min=0)

    @property
    def kept(self) -> torch.Tensor:
        """int64 [rows]: how many are stored."""
        return self.emitted.clamp(max=self.capacity)

    def add(self, key0: int, scores: torch.Tensor, passes: torch.Tensor, bucket: torch.Tensor) -> None:
        """Keep what passes, in the order of the keys, while there is room; count all of it."""
        slot = self.emitted[:, None] + passes.cumsum(1) - 1
        fits = passes & (slot < self.capacity)
        slot = torch.where(fits, slot, self.capacity)
        keys = torch.arange(key0, key0 + scores.shape[1], dtype=torch.int32, device=scores.device).expand(scores.shape)
        self.value.scatter_(1, slot, scores)
        self.index.scatter_(1, slot, keys)
        self.emitted += passes.sum(1)
        self.stored += count_buckets(bucket, fits, self.stored.shape[1])
        self.lost += count_buckets(bucket, passes & ~fits, self.stored.shape[1])
        finite = passes & scores.isfinite()
        self.best = torch.maximum(self.best, scores.masked_fill(~finite, -torch.inf).amax(1))
        self.worst = torch.minimum(self.worst, scores.masked_fill(~finite, torch.inf).amin(1))


def tightened(gate: Gate, candidates: Candidates, topk: int) -> torch.Tensor:
    """int64 [rows]: the threshold after a look at the counts. They are of candidates of the row that are stored: where topk of them lie
    in the buckets up to some one, the topk-th score lies in no later one, so this only ever tightens, and never too far."""
    rank = torch.full_like(candidates.emitted, topk)
    return torch.minimum(gate.threshold, first_reaching(candidates.stored, rank))


def scan(block: Block, gate: Gate, topk: int, config: Config, attempt: int = 0, trace: Trace | None = None) -> Candidates:
    """One scan of a block. gate.threshold is tightened in place; a row whose threshold is NOTHING is passed over."""
    found = Candidates.none(block.rows, config.room(topk), gate.buckets, block.scorer.p.device)
    if trace is not None:
        trace.gates[block.row0, attempt] = dataclasses.replace(gate)
    for number, (key0, key1, scores, may) in enumerate(block.tiles(config.tile)):
        found.valid += may.sum(1)
        bucket = gate.bucket(scores)
        before = gate.threshold
        found.add(key0, scores, may & (bucket <= before[:, None]), bucket)
        if config.refresh and number % config.refresh == config.refresh - 1:
            gate.threshold = tightened(gate, found, topk)
        if trace is not None:
            trace.steps.append(Step((block.row0, block.row1), (key0, key1), attempt, before, gate.threshold, found.emitted.clone(),
                                    found.dropped))
    return found


def candidates_bytes(rows: int, capacity: int, buckets: int) -> int:
    """What a scan's Candidates hold, two histograms being counted (each with its ones) and a few numbers a row besides."""
    return rows * (8 * (capacity + 1) + 8 * 5 * (buckets + 1) + 256)


def step_bytes(rows: int, columns: int) -> int:
    """What a step, or a calibration, over so many columns holds at a time: scores, buckets and three more fp32, three int64 (slots; places
    and ones of a histogram), six masks."""
    return rows * columns * (5 * 4 + 3 * 8 + 6)
