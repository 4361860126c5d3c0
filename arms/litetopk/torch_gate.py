"""A row's gate: an affine scale of buckets over its scores, bucket 0 the best, and the last bucket that is let through."""
from __future__ import annotations

import dataclasses

import torch

from arms.litetopk.torch_config import Config, gate_rank

NOTHING = -1  # a threshold that lets nothing through
NARROWEST, WIDEST = 1e-30, 1e38  # of a scale: its slope is then a normal fp32 number at any number of buckets


@dataclasses.dataclass
class Gate:
    """origin, inv_delta fp32 [rows]; threshold, safe int64 [rows] (safe: the threshold that no sampled score speaks against); buckets.

    bucket(s) = clamp(trunc((-s - origin) * inv_delta), 0, buckets - 1) never rises with s, whatever is rounded, so letting through
    all buckets up to that of the k-th score lets through the k best.
    """

    origin: torch.Tensor
    inv_delta: torch.Tensor
    threshold: torch.Tensor
    safe: torch.Tensor
    buckets: int

    def bucket(self, scores: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, n] -> fp32 [rows, n], whole numbers; +inf is in bucket 0, -inf in the last, NaN stays NaN."""
        return ((-scores - self.origin[:, None]) * self.inv_delta[:, None]).trunc_().clamp_(0, self.buckets - 1)

    def only(self, rows: torch.Tensor) -> Gate:
        """This gate for the rows where bool `rows` is set, shut for the others."""
        return dataclasses.replace(self, threshold=self.threshold.masked_fill(~rows, NOTHING))


def count_buckets(buckets: torch.Tensor, counted: torch.Tensor, many: int) -> torch.Tensor:
    """int64 [rows, many]: how many entries of each row are in each bucket. buckets as Gate.bucket gives them; counted: bool."""
    place = torch.where(counted, buckets, many).long()  # what is not counted goes into a bucket behind the last
    counts = torch.zeros(len(buckets), many + 1, dtype=torch.int64, device=buckets.device)
    return counts.scatter_add_(1, place, torch.ones_like(place))[:, :many]


def first_reaching(counts: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the first bucket up to which `rank` (int64 [rows]) entries were counted; the number of buckets if there is none."""
    return (counts.cumsum(1) < rank[:, None]).sum(1)


def calibrate(scores: torch.Tensor, may: torch.Tensor, keys: torch.Tensor, topk: int, config: Config) -> Gate:
    """The gate of each row from its sample.

    scores fp32 [rows, sample]; may bool: which of them the row may attend; keys int64 [rows]: the length of its window.
    Infinite scores do not stretch the scale, but count. A row without a finite score gets an open gate.
    """
    finite = may & scores.isfinite()
    best = scores.masked_fill(~finite, -torch.inf).amax(1)
    worst = scores.masked_fill(~finite, torch.inf).amin(1)
    some = finite.any(1)
    best, worst = best.masked_fill(~some, 0.0), worst.masked_fill(~some, 0.0)
    floor = (torch.maximum(best.abs(), worst.abs()) * config.floor).clamp_(min=config.least)
    span = torch.maximum(best - worst, floor)
    unset = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    gate = scale_of(best, span, unset, config.buckets)
    may = may & ~scores.isnan()
    counts, sampled = count_buckets(gate.bucket(scores), may, config.buckets), may.sum(1)
    gate.safe = gate.threshold = threshold_at(counts, sampled, torch.full_like(sampled, topk), config)
    if config.gate == "margin":
        ranks = [gate_rank(topk, *pair) for pair in zip(sampled.tolist(), keys.tolist())]
        tight = threshold_at(counts, sampled, torch.tensor(ranks, device=scores.device), config)
        gate.threshold = torch.minimum(gate.safe, tight)
    return gate


def scale_of(best: torch.Tensor, span: torch.Tensor, threshold: torch.Tensor, buckets: int) -> Gate:
    """A gate whose scale is `span` wide and begins at `best` ([rows], any float). Whatever they are, the scale's numbers are finite and
    its slope is above 0, so that no score but NaN has no bucket."""
    limit = torch.finfo(torch.float32).max
    origin = (-best).nan_to_num(0.0, limit, -limit).clamp(-limit, limit).float()
    inv_delta = ((buckets - 1) / span.nan_to_num(1.0, WIDEST).clamp(NARROWEST, WIDEST)).float()
    return Gate(origin, inv_delta, threshold, threshold, buckets)


def threshold_at(counts: torch.Tensor, sampled: torch.Tensor, rank: torch.Tensor, config: Config) -> torch.Tensor:
    """The bucket of the sample's entry of this rank. A sample with fewer entries says nothing of the k-th score: open; as published
    (open_short off), the bucket of its last one if the sample as a whole is too short."""
    if not config.open_short:
        rank = rank.clamp(max=config.sample)
    return torch.where(sampled >= rank, first_reaching(counts, rank), config.buckets - 1)


def zoom(gate: Gate, bucket: torch.Tensor, best: torch.Tensor, worst: torch.Tensor) -> Gate:
    """A gate whose scale is one bucket of another, for rows where that bucket holds more than fits. It lets that bucket and better through.

    bucket int64 [rows]; best, worst fp32 [rows]: the finite scores seen furthest up and down, as the first and the last bucket have no
    end of their own.
    """
    step = 1 / gate.inv_delta.double()
    high = -gate.origin.double() - bucket * step
    low = high - step
    high = torch.where(bucket == 0, best.double(), high)
    low = torch.where(bucket == gate.buckets - 1, worst.double(), low)
    # The affine's own rounding may put a score a few ULP past these ends, so the scale begins and ends a little outside of them.
    slack = (high - low).abs() / 64 + torch.maximum(high.abs(), low.abs()) * 2.0**-22
    last = torch.full_like(bucket, gate.buckets - 2)
    return scale_of(high + slack, high - low + 2 * slack, last, gate.buckets)
