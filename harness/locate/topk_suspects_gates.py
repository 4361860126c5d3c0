"""What a faulty selection of keys may have lost to a gate or a buffer, and how its indices may be meant, as hypotheses (see
topk_suspects.py)."""
from __future__ import annotations

from collections.abc import Callable

import torch

from harness.locate.topk_hypotheses import Choice, Make, TopkView, bounds, kth_of

CAPACITIES = (256, 512, 1024, 2048, 4096, 8192, 16384)  # of candidate and tie buffers, samples
BUCKETS = {23: "bucket: the octave of the k-th score", 24: "bucket: two octaves around the k-th score"}


def gates() -> dict[str, Make]:
    """Keys that are left out for their score."""
    def kept(keep: Callable[[TopkView], torch.Tensor]) -> Make:
        return lambda v: Choice(inside=v.inside & keep(v))

    return {
        "the last of the chosen keys left out": last_left_out,
        "keys that score +inf left out": kept(lambda v: v.score < torch.inf),
        "keys that score -inf left out": kept(lambda v: v.score > -torch.inf),
        "rows whose scores are all equal left empty": kept(lambda v: (best_of(v) != worst_of(v))),
        "rows with a NaN left empty": kept(lambda v: ~(v.score.isnan() & v.inside).any(1, keepdim=True)),
        "NaN ranked first": lambda v: Choice(v.score.nan_to_num(torch.inf, torch.inf, -torch.inf)),
        "NaN ranked last": lambda v: Choice(v.score.nan_to_num(-torch.inf, torch.inf, -torch.inf)),
        "the best key left out": kept(lambda v: (v.score != best_of(v)) | (v.ke - v.ks <= v.p.topk)),
        "keys that tie with the k-th left out": kept(lambda v: v.score > v.kth),
        "keys that score 0 left out": kept(lambda v: v.score != 0),
        "keys that score below 0 left out": kept(lambda v: v.score >= 0),
        "rows left empty": kept(lambda v: (v.indices >= 0).any(1, keepdim=True)),
        "the gate of the first row for all": lambda v: gate_of_first(v),
        "a gate at the lowest of the first topk / 2 keys": kept(lambda v: v.score >= lowest_early(v, v.p.topk // 2)),
        "a gate at the lowest of the first topk keys": kept(lambda v: v.score >= lowest_early(v, v.p.topk)),
        "half of the keys, the better ones, named alone": kept(
            lambda v: (v.score >= kth_of(v.score, v.inside, (v.p.topk + 1) // 2)) | (v.ke - v.ks <= v.p.topk)),
        "half of the choice from each half of the window": halves,
    }


def buffers() -> dict[str, Make]:
    """Candidates that a full buffer loses."""
    def arrival(v: TopkView, of: torch.Tensor) -> torch.Tensor:
        """int64 [n, s_kv]: how many keys of the window, up to this one, are among `of`."""
        return (of & v.inside).cumsum(1)

    def bucket(v: TopkView, shift: int) -> torch.Tensor:
        return v.score.float().view(torch.int32) >> shift == v.kth.float().view(torch.int32) >> shift

    def buffer(capacity: Callable[[TopkView], int], shift: int) -> Make:
        return lambda v: Choice(inside=v.inside & (~bucket(v, shift) | (arrival(v, bucket(v, shift)) <= capacity(v))))

    def first(count: Callable[[TopkView], int]) -> Make:
        return lambda v: Choice(inside=v.inside & (arrival(v, v.inside) <= count(v)))

    def passed(count: Callable[[TopkView], int]) -> Make:
        """The first keys, in order of position, of those that reach the k-th score of the first topk keys."""
        def make(v: TopkView) -> Choice:
            early = v.inside & (v.key < v.ks + v.p.topk)
            reach = v.inside & (v.score >= kth_of(v.score, early, v.p.topk))
            return Choice(inside=reach & (arrival(v, reach) <= count(v)))

        return make

    found: dict[str, Make] = {}
    for times in (1, 2, 4, 8):
        found[f"the window's first {times} * topk keys alone (a buffer of candidates that overflows)"] = first(of_topk(times))
        found[f"the first {times} * topk keys alone of those that reach the k-th score of the window's first topk"] = passed(of_topk(times))
        for shift, bin_of in BUCKETS.items():
            found[f"a tie buffer of {times} * topk keys that overflows ({bin_of})"] = buffer(of_topk(times), shift)
    for size in CAPACITIES:
        found[f"the window's first {size} keys alone (a buffer of candidates that overflows)"] = first(fixed(size))
        for shift, bin_of in BUCKETS.items():
            found[f"a tie buffer of {size} keys that overflows ({bin_of})"] = buffer(fixed(size), shift)
    return found


def last_left_out(v: TopkView) -> Choice:
    """One key too few, the k-th."""
    ties = v.inside & (v.score == v.kth)
    return Choice(inside=v.inside & ((v.score > v.kth) | (ties & (ties.cumsum(1) != ties.sum(1, keepdim=True)))))


def fixed(size: int) -> Callable[[TopkView], int]:
    return lambda v: size


def of_topk(times: int) -> Callable[[TopkView], int]:
    return lambda v: times * v.p.topk


def best_of(v: TopkView) -> torch.Tensor:
    """[n, 1]: the best score of each row."""
    return v.score.masked_fill(~v.inside | v.score.isnan(), -torch.inf).amax(1, keepdim=True)


def worst_of(v: TopkView) -> torch.Tensor:
    return v.score.masked_fill(~v.inside | v.score.isnan(), torch.inf).amin(1, keepdim=True)


def lowest_early(v: TopkView, count: int) -> torch.Tensor:
    """[n, 1]: the lowest score of a window's first keys."""
    early = v.inside & (v.key < v.ks + count) & ~v.score.isnan()
    return v.score.masked_fill(~early, torch.inf).amin(1, keepdim=True)


def gate_of_first(v: TopkView) -> Choice:
    """Only keys that reach the k-th score of the batch's first row."""
    first = torch.zeros(1, dtype=torch.int64, device=v.rows.device)
    score = v.scored(v.dots(first)[:1], v.p.weights[:1])
    inside = (v.key >= v.p.ks[:1, None]) & (v.key < v.p.ke[:1, None])
    return Choice(inside=v.inside & (v.score >= kth_of(score, inside, v.p.topk)))


def halves(v: TopkView) -> Choice | None:
    """The best (topk + 1) / 2 keys of the first half and topk / 2 of the second, in rows of more than 2 topk keys."""
    if v.p.topk < 2:
        return None
    middle = (v.ks + v.ke) // 2
    front, back = v.inside & (v.key < middle), v.inside & (v.key >= middle)
    some = front & (v.score >= kth_of(v.score, front, (v.p.topk + 1) // 2)) | back & (v.score >= kth_of(v.score, back, v.p.topk // 2))
    return Choice(inside=v.inside & (some | (v.ke - v.ks <= 2 * v.p.topk)))


def readings() -> dict[str, Make]:
    """Other meanings of the indices that were written."""
    def read(change: Callable[[TopkView], torch.Tensor], names: Callable[[TopkView], torch.Tensor]) -> Make:
        return lambda v: Choice(indices=torch.where(names(v), change(v), v.indices).int())

    def named(v: TopkView) -> torch.Tensor:
        return v.indices >= 0

    return {
        "indices relative to ks": read(lambda v: v.indices + v.ks, named),
        "ks added to the indices twice": read(lambda v: v.indices - v.ks, named),
        "indices one too high, all of them": read(lambda v: v.indices - 1, named),
        "indices one too low, all of them": read(lambda v: v.indices + 1, named),
        "indices relative to the request's first key": read(lambda v: v.indices + bounds(v)[0], named),
        "0 in place of -1": read(lambda v: torch.full_like(v.indices, -1), lambda v: (v.indices == 0) & ((v.ks > 0) | after_keys(v))),
        "-2 in place of -1": read(lambda v: torch.full_like(v.indices, -1), lambda v: v.indices == -2),
    }


def after_keys(v: TopkView) -> torch.Tensor:
    """bool [n, topk]: entries behind the keys that a row has."""
    valid = (v.inside & ~v.score.isnan()).sum(1, keepdim=True)
    return torch.arange(v.indices.shape[1], device=v.indices.device) >= valid
