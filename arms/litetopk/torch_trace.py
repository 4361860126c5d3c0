"""What the portable LiteTopk can report of itself while it runs, for tests and for looking at a case."""
from __future__ import annotations

import dataclasses

import torch

from arms.litetopk.torch_gate import Gate


@dataclasses.dataclass(frozen=True)
class Step:
    """One tile of one scan. rows, keys: (first, past the last); attempt: 0 for the first scan of these rows, 1 for the first corrected one.

    before, after int64 [rows]: the threshold that the tile met and the one that it left; emitted, dropped int64 [rows]: candidates
    let through so far (dropped ones among them), and those of them for which there was no room.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    attempt: int
    before: torch.Tensor
    after: torch.Tensor
    emitted: torch.Tensor
    dropped: torch.Tensor


@dataclasses.dataclass
class Trace:
    """Steps in the order in which they were done, and the gate of each scan, by (first row, attempt)."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    gates: dict[tuple[int, int], Gate] = dataclasses.field(default_factory=dict)

    def emitted(self, row: int, attempt: int = 0) -> int:
        """How many candidates a scan of this row let through; 0 if it was not scanned."""
        return self._last(row, attempt, "emitted")

    def dropped(self, row: int, attempt: int = 0) -> int:
        """How many of them were lost for want of room."""
        return self._last(row, attempt, "dropped")

    def _last(self, row: int, attempt: int, what: str) -> int:
        steps = [step for step in self.steps if step.attempt == attempt and step.rows[0] <= row < step.rows[1]]
        return int(getattr(steps[-1], what)[row - steps[-1].rows[0]]) if steps else 0
