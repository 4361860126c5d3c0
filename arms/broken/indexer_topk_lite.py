"""Deliberately wrong indexer top-k kernels, continued: what gates, candidate buffers, certificates, memory and state go wrong by
(see indexer_topk.py). Capacities are small, so that small problems meet them."""
from __future__ import annotations

import itertools

import torch

from arms.broken.indexer_topk import choose, count_of, logits, only, right
from arms.broken.problems import CROWDED, FLAT, LONG, ONE, PLAIN, RISING, SHIFTED, SHORT
from arms.broken.register import broken_topk as broken
from arms.topk import WAYS, TopkProblem, TopkResult

SCAN, FAILED = WAYS.index("scan"), WAYS.index("failed")

# --- gate and candidates ----------------------------------------------------------------------------------------------


def lowest_chosen(p: TopkProblem) -> torch.Tensor:
    """fp32 [num_q, 1]: each row's k-th score; +inf in a row without a key."""
    result = right(p)
    assert result.values is not None
    return torch.where(result.indices >= 0, result.values, torch.inf).amin(1, keepdim=True)


@broken("gate_of_request_0", "shape", SHIFTED, reports=("LT2",), boundary="the gate of the first row for all")
def gate_of_request_0(p: TopkProblem) -> TopkResult:
    """The threshold is calibrated on the first row, and holds for every request."""
    scores = logits(p)
    return only(p, scores, scores >= lowest_chosen(p)[:1])


@broken("gate_counts_twice", "shape", PLAIN, reports=("LT5",), boundary="the second half of the ranks")
def gate_counts_twice(p: TopkProblem) -> TopkResult:
    """A rescan adds to the first scan's counts: the threshold passes the k-th, and half of the members stay away."""
    result = right(p)
    half = (count_of(result) + 1) // 2
    place = torch.arange(p.topk, device=p.device)
    return TopkResult(torch.where((place < half[:, None]) | (p.ke - p.ks <= p.topk)[:, None], result.indices, -1))


@broken("gate_of_a_short_sample", "shape", "indexer_topk:requests=4/400,topk=64,values=descending", reports=("LT11",),
        boundary="a gate at the lowest of the first topk / 2 keys")
def gate_of_a_short_sample(p: TopkProblem) -> TopkResult:
    """Calibrated on the first topk/2 keys: what scores below them all is lost, however few are left."""
    scores = logits(p)
    position = torch.arange(p.s_kv, device=p.device)
    sample = (position < p.ks[:, None] + p.topk // 2) & (position >= p.ks[:, None])
    return only(p, scores, scores >= torch.where(sample & ~scores.isnan(), scores, torch.inf).amin(1, keepdim=True))


@broken("full_buffer_drops_silently", "set", RISING, reports=("LT4",), boundary="the window's first 4 * topk keys alone")
def full_buffer_drops_silently(p: TopkProblem) -> TopkResult:
    """All pass the gate; the first 4 * topk in order of position are kept."""
    scores = logits(p)
    inside = scores > -torch.inf
    return only(p, scores, inside & (inside.cumsum(1) <= 4 * p.topk) | ~inside)


@broken("tie_buffer_overflows", "set", LONG, boundary="a tie buffer of 1 * topk keys")
def tie_buffer_overflows(p: TopkProblem) -> TopkResult:
    """Candidates in the coarse bin of the k-th score (8 bits of it) are kept in a buffer of topk, the first to come."""
    scores = logits(p)
    coarse, border = ((x.view(torch.int32) >> 23) for x in (scores, lowest_chosen(p)))
    in_bin = coarse == border
    return only(p, scores, ~in_bin | (in_bin.cumsum(1) <= p.topk))


@broken("flat_row_emits_nothing", "shape", FLAT, reports=("LT1",), boundary="rows whose scores are all equal left empty")
def flat_row_emits_nothing(p: TopkProblem) -> TopkResult:
    """A span floored at 1e-20 makes the slope explode where all scores are equal."""
    scores = logits(p)
    inside = scores > -torch.inf
    low, high = (torch.where(inside, scores, fill) for fill in (torch.inf, -torch.inf))
    return only(p, scores, (high.amax(1) - low.amin(1) >= 1e-20)[:, None].expand_as(scores))


@broken("boundary_ranked_by_16_bits", "set", LONG, boundary="ranked by bf16 inside the bucket of the k-th score")
def boundary_ranked_by_16_bits(p: TopkProblem) -> TopkResult:
    """Above the bucket of the k-th score exact, inside it ranked by a 16-bit value, as the published SM100 kernel does."""
    scores = logits(p)
    kth = lowest_chosen(p).nan_to_num(posinf=0.0)
    near = (scores - kth).abs() < 2.0**-6 * kth.abs()
    return TopkResult(choose(p, torch.where(near, scores.bfloat16().float(), scores)).indices)


@broken("swaps_at_the_border", "own-scores", CROWDED)
def swaps_at_the_border(p: TopkProblem) -> TopkResult:
    """The last chosen key is exchanged for the best one left out: wrong by its own scores, whatever the margin."""
    scores = logits(p)
    wide = scores.topk(min(p.topk + 1, p.s_kv), dim=1)
    indices = right(p).indices
    if p.s_kv > p.topk:
        fits = (wide.values[:, -1] > -torch.inf) & ~scores.isnan().any(1)
        indices[fits] = wide.indices[fits][:, [*range(p.topk - 1), p.topk]].int()
    return TopkResult(indices, logits=lambda row0, row1: scores[row0:row1])


@broken("values_of_other_keys", "values", PLAIN)
def values_of_other_keys(p: TopkProblem) -> TopkResult:
    result = right(p)
    assert result.values is not None
    return TopkResult(result.indices, result.values.roll(1, 1))


@broken("values_rounded", "values", PLAIN)
def values_rounded(p: TopkProblem) -> TopkResult:
    """Within every bound, but not the scores by which it chose."""
    scores, result = logits(p), right(p)
    assert result.values is not None
    return TopkResult(result.indices, result.values * (1 + 2.0**-23), logits=lambda row0, row1: scores[row0:row1])


# --- certificates -----------------------------------------------------------------------------------------------------


@broken("certifies_what_is_wrong", "status", RISING, reports=("LT4",), boundary="the window's first 2 * topk keys alone")
def certifies_what_is_wrong(p: TopkProblem) -> TopkResult:
    scores = logits(p)
    inside = scores > -torch.inf
    result = only(p, scores, inside & (inside.cumsum(1) <= 2 * p.topk) | ~inside)
    return TopkResult(result.indices, status=torch.full((p.num_q,), SCAN, dtype=torch.int32, device=p.device))


@broken("gives_up_the_last_row", "status", PLAIN, boundary="the last row of the batch")
def gives_up_the_last_row(p: TopkProblem) -> TopkResult:
    indices, status = right(p).indices, torch.full((p.num_q,), SCAN, dtype=torch.int32, device=p.device)
    indices[-1], status[-1] = -1, FAILED
    return TopkResult(indices, status=status)


@broken("gives_up_and_keeps_keys", "status", PLAIN, boundary="the last row of the batch")
def gives_up_and_keeps_keys(p: TopkProblem) -> TopkResult:
    status = torch.full((p.num_q,), SCAN, dtype=torch.int32, device=p.device)
    status[-1] = FAILED
    return TopkResult(right(p).indices, status=status)


# --- memory, state, determinism, inputs -------------------------------------------------------------------------------


@broken("pads_unwritten", "written", SHORT, boundary="rows with fewer keys than topk")
def pads_unwritten(p: TopkProblem) -> TopkResult:
    result = right(p)
    indices = torch.empty_like(result.indices)
    return TopkResult(torch.where(result.indices >= 0, result.indices, indices))


@broken("values_unwritten", "written", PLAIN)
def values_unwritten(p: TopkProblem) -> TopkResult:
    """Right by accident where memory is fresh: the last value is what was there."""
    result = right(p)
    assert result.values is not None
    result.values[:, -1] += torch.empty_like(result.values)[:, -1] * 0
    return result


@broken("status_unwritten", "written", PLAIN)
def status_unwritten(p: TopkProblem) -> TopkResult:
    """Writes the status of rows that it rescans only, and there are none."""
    status = torch.empty(p.num_q, dtype=torch.int32, device=p.device)
    return TopkResult(right(p).indices, status=torch.where(status == torch.iinfo(torch.int32).max, status, SCAN))


@broken("holds_all_scores", "memory", LONG, memory=lambda p: 8 * p.num_q * p.topk + (1 << 16), reports=("ML10",))
def holds_all_scores(p: TopkProblem) -> TopkResult:
    """A LiteTopk in name: the [num_q, s_kv] logits exist, and the bound that it declares says they do not."""
    return right(p)


_kept: list[torch.Tensor] = []


@broken("keeps_a_workspace", "memory", PLAIN, memory=lambda p: 32 << 20)
def keeps_a_workspace(p: TopkProblem) -> TopkResult:
    """Takes 64 MiB at its first launch and keeps them, so that no later launch is seen to."""
    if not _kept:
        _kept.append(torch.empty(64 << 20, dtype=torch.uint8, device=p.device))
    return right(p)


_launches = itertools.count()


@broken("races", "run-to-run", PLAIN, reports=("ML1", "LT6", "TK17"), boundary="the last row of the batch")
def races(p: TopkProblem) -> TopkResult:
    """Every fourth launch loses the best key of the last row."""
    scores = logits(p)
    if next(_launches) % 4 == 3:
        scores[-1, scores[-1].argmax()] = -torch.inf
    return choose(p, scores)


@broken("writes_its_weights", "inputs-unchanged", PLAIN)
def writes_its_weights(p: TopkProblem) -> TopkResult:
    """Folds a factor into its caller's weights, in place: the order of scores is as before."""
    p.weights.mul_(2)
    return TopkResult(right(p).indices)


@broken("writes_its_windows", "inputs-unchanged", SHORT)
def writes_its_windows(p: TopkProblem) -> TopkResult:
    """Moves ks of empty rows, in place."""
    result = right(p)
    p.ks.copy_(torch.where(p.ke <= p.ks, 0, p.ks))
    p.ke.copy_(torch.where(p.ke <= p.ks, p.ks, p.ke))
    return result


_threshold: dict[tuple[int, int], torch.Tensor] = {}


@broken("threshold_of_the_launch_before", "after-another", ONE, reports=("LT9",))
def threshold_of_the_launch_before(p: TopkProblem) -> TopkResult:
    """The gate begins where the last launch on this shape ended, as a carry that is not keyed by the request would."""
    scores = logits(p)
    gate = _threshold.get((p.num_q, p.s_kv), torch.full((p.num_q, 1), -torch.inf, device=p.device))
    _threshold[p.num_q, p.s_kv] = lowest_chosen(p)
    return only(p, scores, scores >= gate)


_workspace: dict[tuple[int, ...], torch.Tensor] = {}


@broken("tail_of_the_launch_before", "after-another", SHORT, boundary="rows with fewer keys than topk")
def tail_of_the_launch_before(p: TopkProblem) -> TopkResult:
    """Keeps one indices per shape, -1 at first, and writes the keys of a row but not its pads."""
    indices = right(p).indices
    kept = _workspace.setdefault(tuple(indices.shape), torch.full_like(indices, -1))
    kept[indices >= 0] = indices[indices >= 0]
    return TopkResult(kept.clone())


_served: list[TopkProblem] = []  # the problem of the launches that came in a row, once for each


@broken("cached_after_20_topk_launches", "timed-output", PLAIN, reports=("HT16",))
def cached_after_20_topk_launches(p: TopkProblem) -> TopkResult:
    """Right while it is checked, where other problems come between; the launches after 20 on one problem give the first row's keys to
    all."""
    indices = right(p).indices
    _served[:] = [*(before for before in _served if before is p), p]
    return TopkResult(indices if len(_served) <= 20 else indices[:1].expand_as(indices).contiguous())


@broken("wrong_width", "raises", PLAIN)
def wrong_width(p: TopkProblem) -> TopkResult:
    return TopkResult(right(p).indices[:, :-1])
