"""The calibration sample of the fused arms: which keys are scored first, to make each row's threshold from."""
from __future__ import annotations

import dataclasses

import torch

from arms.topk import TopkProblem


@dataclasses.dataclass(frozen=True)
class Sample:
    """Where the keys of the calibration sample stand. position: int32 [columns]; first, last: int32 [num_q], the columns of a
    row's request; width: the most of one request."""

    position: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    width: int


def sample_length(keys: int) -> int:
    """How many of so many keys are sampled: one in 64, at least 1024, at most 16384."""
    return min(keys, max(1024, min(16384, keys // 64)))


def plan_sample(p: TopkProblem) -> Sample:
    """sample_length positions of each request's keys, one in each of as many equal strata, at places that no period of the keys keeps
    step with (multiples of the golden ratio). All positions where the request has no more."""
    positions, width, column = [], 0, 0
    first, last = [0] * p.num_q, [0] * p.num_q  # rows of no request have no sample
    for row0, row1, kv0, kv1 in p.requests:
        count = sample_length(kv1 - kv0)
        i = torch.arange(count, dtype=torch.float64)
        positions.append(kv0 + ((i + (i * 0.6180339887498949) % 1.0) * ((kv1 - kv0) / max(1, count))).long())
        first[row0:row1] = [column] * (row1 - row0)
        column += count
        last[row0:row1] = [column] * (row1 - row0)
        width = max(width, count)

    def on_device(values: list[int] | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(p.device)

    return Sample(on_device(torch.cat([torch.empty(0, dtype=torch.long), *positions])), on_device(first), on_device(last), width)
