"""Deliberately wrong indexer top-k kernels, continued: symptoms of public reports that no other one shows (docs/public-bugs.md).

A report tells a symptom and not the code behind it, so these show the symptom, at a size that a CPU can run.
"""
from __future__ import annotations

import dataclasses
import itertools

import torch

from arms.broken.indexer_topk import choose, count_of, logits, only, right
from arms.broken.indexer_topk_lite import lowest_chosen
from arms.broken.problems import ANY, INF, NAN, PLAIN, PLATEAU, RISING, SHORT, TWO
from arms.broken.register import broken_topk as broken
from arms.topk import TopkProblem, TopkResult


def has_choice(p: TopkProblem) -> torch.Tensor:
    """bool [num_q, 1]: rows with more keys than they choose."""
    return (p.ke - p.ks > p.topk)[:, None]


# --- scores -----------------------------------------------------------------------------------------------------------


@broken("columns_swizzled_wrong", "set", PLAIN, reports=("ML3",))
def columns_swizzled_wrong(p: TopkProblem) -> TopkResult:
    """Keys are read with groups of 16 columns in the order of another head dimension: garbage, the same in every launch."""
    k = p.k_fp8.view(torch.uint8).unflatten(1, (2, 4, 16)).transpose(1, 2).reshape(p.k_fp8.shape)
    return right(dataclasses.replace(p, k_fp8=k.view(torch.float8_e4m3fn)))


@broken("fewer_than_52_heads_refused", "raises", PLAIN, reports=("ML4",))
def fewer_than_52_heads_refused(p: TopkProblem) -> TopkResult:
    if p.heads < 52:
        raise RuntimeError(f"{p.heads} heads: at least 52 are supported")
    return right(p)


@broken("scales_asserted_powers_of_two", "raises", ANY, reports=("ML6",))
def scales_asserted_powers_of_two(p: TopkProblem) -> TopkResult:
    assert bool((p.kv_scale.view(torch.int32) & 0x7FFFFF == 0).all()), "scales must be exponents"
    return right(p)


@broken("last_key_not_gathered", "written", RISING, reports=("ML9",), boundary="the last key of the window")
def last_key_not_gathered(p: TopkProblem) -> TopkResult:
    """The gather's buffer ends a key too early. What is not poisoned is taken for the right scale, left there by an earlier gather."""
    scale, beyond = p.kv_scale.clone(), torch.empty_like(p.kv_scale)[-1]
    scale[-1] = torch.where(beyond.isnan(), beyond, scale[-1])
    return right(dataclasses.replace(p, kv_scale=scale))


@broken("page_moved_as_one_key", "set", PLAIN, reports=("ML11",))
def page_moved_as_one_key(p: TopkProblem) -> TopkResult:
    """Of the second page of 64 keys only the first was moved; the others hold what page 0 had there."""
    k = p.k_fp8.view(torch.uint8).clone()
    k[65:128] = k[1:64][: len(k[65:128])]
    return right(dataclasses.replace(p, k_fp8=k.view(torch.float8_e4m3fn)))


@broken("exact_choice_by_wrong_scores", "set", ANY, reports=("ML12",))
def exact_choice_by_wrong_scores(p: TopkProblem) -> TopkResult:
    """Scores drift (here: kv_scale in e4m3), the selection is exact, and it is the selection that gets the blame."""
    drifted = dataclasses.replace(p, kv_scale=p.kv_scale.to(torch.float8_e4m3fn).float())
    return dataclasses.replace(right(drifted), logits=lambda row0, row1: logits(drifted)[row0:row1])


@broken("rows_of_scores_at_a_stride_of_4", "set", "indexer_topk:requests=5/1023,topk=64", reports=("LT3",))
def rows_of_scores_at_a_stride_of_4(p: TopkProblem) -> TopkResult:
    """A width that is no multiple of 4 is rounded down in the stride: row r begins up to 3 r keys too early."""
    scores = logits(p)
    place = torch.arange(p.num_q, device=p.device)[:, None] * (p.s_kv // 4 * 4) + torch.arange(p.s_kv, device=p.device)
    return choose(p, scores.nan_to_num(neginf=-1e30).view(-1)[place].masked_fill(scores == -torch.inf, -torch.inf))


# --- the choice -------------------------------------------------------------------------------------------------------


@broken("low_scores_collapse", "set", "indexer_topk:requests=6/300,topk=64,values=integer,weights=negative", reports=("TK12",))
def low_scores_collapse(p: TopkProblem) -> TopkResult:
    """Stands for a coarse key in fp16, which ends at -65504: here all scores below an eighth of a row's lowest are one."""
    scores = logits(p)
    inside = scores > -torch.inf
    floor = torch.where(inside, scores, 0.0).amin(1, keepdim=True) / 8
    return TopkResult(choose(p, torch.where(inside, torch.maximum(scores, floor), scores)).indices)


@broken("phantom_lane_counted", "shape", SHORT, reports=("TK12",), boundary="ke + 1")
def phantom_lane_counted(p: TopkProblem) -> TopkResult:
    """The lane behind a window of odd length holds -inf and is a candidate: rows that take all their keys name it too."""
    result = right(p)
    count = count_of(result)
    odd = ((p.ke - p.ks) % 2 == 1) & (count < p.topk)
    result.indices[odd, count[odd]] = p.ke[odd]
    return TopkResult(result.indices)


@broken("columns_past_4096_dropped", "set", "indexer_topk:requests=1/4097,topk=64,values=ascending", reports=("TK18",),
        boundary="the window's first 4096 keys alone")
def columns_past_4096_dropped(p: TopkProblem) -> TopkResult:
    return right(dataclasses.replace(p, ke=torch.minimum(p.ke, p.ks + max(4096, p.topk))))


@broken("recall_of_one_half", "set", PLAIN, also=("dense-vs-litetopk", "downstream"), reports=("TK5",))
def recall_of_one_half(p: TopkProblem) -> TopkResult:
    """Every other key is looked at; the count is right, nearly half of the members are not."""
    looked_at = torch.arange(p.s_kv, device=p.device) % 2 == 0
    return only(p, logits(p), looked_at | (p.ke - p.ks <= 2 * p.topk)[:, None])


@broken("infinity_leaves_a_pad", "shape", INF, reports=("TK4",), boundary="the best key of the row")
def infinity_leaves_a_pad(p: TopkProblem) -> TopkResult:
    """A key that scores +inf falls out of the histogram: its slot is -1, in front of the others."""
    result = right(p)
    assert result.values is not None
    return TopkResult(torch.where((result.values == torch.inf) & has_choice(p), -1, result.indices))


@broken("nan_gives_an_id_out_of_range", "shape", NAN, reports=("TK7", "TK9"))
def nan_gives_an_id_out_of_range(p: TopkProblem) -> TopkResult:
    """In a row that has a NaN, the last slot is filled with what stands behind the keys."""
    result, has_nan = right(p), logits(p).isnan().any(1)
    result.indices[has_nan, -1] = p.s_kv + 5
    return TopkResult(result.indices)


@broken("bins_past_256_lost", "shape", "indexer_topk:requests=4/300,topk=250", reports=("LT10",))
def bins_past_256_lost(p: TopkProblem) -> TopkResult:
    """512 buckets over a row's range, and a histogram that has 256: candidates in the lower half are not counted."""
    scores = logits(p)
    inside = scores > -torch.inf
    high, low = scores.amax(1, keepdim=True), torch.where(inside, scores, torch.inf).amin(1, keepdim=True)
    bucket = ((high - scores) / (high - low) * 512).nan_to_num(posinf=1e9).int()
    return only(p, scores, ~inside | (bucket < 256) | ~has_choice(p))


# --- requests, launches -----------------------------------------------------------------------------------------------


@broken("serves_the_first_request_alone", "shape", TWO, reports=("LT9",), boundary="rows left empty")
def serves_the_first_request_alone(p: TopkProblem) -> TopkResult:
    indices = right(p).indices
    indices[p.requests[0][1] :] = -1
    return TopkResult(indices)


_launches = itertools.count()


@broken("plateau_races", "run-to-run", PLATEAU, reports=("TK6", "TK17"))
def plateau_races(p: TopkProblem) -> TopkResult:
    """Where ties fill a row, every fourth launch lets one of them in before a key that scores above them."""
    scores = logits(p)
    above = scores > lowest_chosen(p)
    if next(_launches) % 4 == 3:
        scores[above & (above.cumsum(1) == 1)] = -torch.inf
    return choose(p, scores)
