"""Deliberately wrong indexer top-k kernels, each a few lines on top of a right one and named for its fault: what they score and choose.

They exist to show that the checks can fail: each names the check that must catch it, and tests/test_broken_topk.py runs them.
They are registered with --broken, or when one is named with --arm, and never otherwise.
"""
from __future__ import annotations

import dataclasses

import torch

from arms.broken.problems import ANY, EXACT, HEADS, INF, LONG, LONG_EXACT, MINUS_INF, NAN, PLAIN, PLATEAU, RISING, SHIFTED, SHORT, TWO
from arms.broken.register import broken_topk as broken
from arms.dense import TopkWriter
from arms.scoring import Scorer
from arms.topk import TopkProblem, TopkResult


def logits(p: TopkProblem) -> torch.Tensor:
    """All scores at once: fp32 [num_q, s_kv], -inf outside the windows."""
    return Scorer(p).masked(0, p.num_q)


def choose(p: TopkProblem, scores: torch.Tensor) -> TopkResult:
    """A right choice by these scores, with values: of NaNs, infinities and short rows as well."""
    writer = TopkWriter(p, lambda row0, row1: scores[row0:row1])
    writer.choose(scores.clone(), 0)
    writer.finish()
    return TopkResult(writer.indices, writer.values)


def right(p: TopkProblem) -> TopkResult:
    """What each fault starts from."""
    return choose(p, logits(p))


def count_of(result: TopkResult) -> torch.Tensor:
    """int64 [num_q]: keys named by each row."""
    return (result.indices >= 0).sum(1)


def only(p: TopkProblem, scores: torch.Tensor, kept: torch.Tensor) -> TopkResult:
    """The choice among the keys that are kept, bool [num_q, s_kv]; a row with too few of them names fewer."""
    return choose(p, torch.where(kept, scores, torch.nan))


# --- form -------------------------------------------------------------------------------------------------------------


@broken("drops_one_member", "shape", PLAIN, boundary="the last of the chosen keys left out")
def drops_one_member(p: TopkProblem) -> TopkResult:
    result = right(p)
    last = (count_of(result) - 1).clamp(min=0)
    result.indices.scatter_(1, last[:, None], -1)
    return TopkResult(result.indices)


@broken("names_a_key_twice", "shape", PLAIN)
def names_a_key_twice(p: TopkProblem) -> TopkResult:
    indices = right(p).indices
    indices[:, 1] = torch.where(indices[:, 1] >= 0, indices[:, 0], indices[:, 1])
    return TopkResult(indices)


@broken("pads_with_0", "shape", SHORT, boundary="rows with fewer keys than topk")
def pads_with_0(p: TopkProblem) -> TopkResult:
    return TopkResult(right(p).indices.clamp(min=0))


@broken("pads_with_minus_2", "shape", SHORT, boundary="rows with fewer keys than topk")
def pads_with_minus_2(p: TopkProblem) -> TopkResult:
    indices = right(p).indices
    return TopkResult(torch.where(indices < 0, -2, indices))


@broken("pad_before_a_key", "shape", SHORT, reports=("TK4",))
def pad_before_a_key(p: TopkProblem) -> TopkResult:
    return TopkResult(right(p).indices.roll(1, 1))


@broken("relative_to_ks", "shape", TWO, reports=("TL3", "TK8"), boundary="indices relative to ks")
def relative_to_ks(p: TopkProblem) -> TopkResult:
    indices = right(p).indices
    return TopkResult(torch.where(indices >= 0, indices - p.ks[:, None], -1))


@broken("offset_added_twice", "shape", TWO, reports=("TL5",), boundary="ks added to the indices twice")
def offset_added_twice(p: TopkProblem) -> TopkResult:
    indices = right(p).indices
    return TopkResult(torch.where(indices >= 0, indices + p.ks[:, None], -1))


@broken("sees_the_future", "shape", RISING, boundary="ke ignored")
def sees_the_future(p: TopkProblem) -> TopkResult:
    """ke is not looked at: every row sees its request to the end."""
    ke = p.ke.clone()
    for row0, row1, _, kv1 in p.requests:
        ke[row0:row1] = torch.where(p.ke[row0:row1] > p.ks[row0:row1], kv1, p.ke[row0:row1])
    return right(dataclasses.replace(p, ke=ke))


@broken("sees_what_is_before_ks", "shape", SHIFTED, reports=("TL4",), boundary="ks ignored")
def sees_what_is_before_ks(p: TopkProblem) -> TopkResult:
    return right(dataclasses.replace(p, ks=torch.where(p.ke > p.ks, 0, p.ks)))


@broken("last_rows_skipped", "shape", PLAIN, boundary="past the last whole block of 4")
def last_rows_skipped(p: TopkProblem) -> TopkResult:
    """Whole blocks of 4 rows only."""
    result = right(p)
    result.indices[p.num_q // 4 * 4 :] = -1
    return TopkResult(result.indices)


@broken("ties_of_the_kth_dropped", "shape", PLATEAU, boundary="keys that tie with the k-th left out")
def ties_of_the_kth_dropped(p: TopkProblem) -> TopkResult:
    """`>` in place of `>=` at the threshold."""
    scores = logits(p)
    lowest = torch.where(right(p).indices >= 0, right(p).values, torch.inf).amin(1, keepdim=True)  # type: ignore[arg-type]
    return only(p, scores, scores > lowest)


@broken("nan_empties_the_row", "shape", NAN, boundary="rows with a NaN left empty")
def nan_empties_the_row(p: TopkProblem) -> TopkResult:
    """A row's maximum is taken without looking for NaN, and everything compares false with it."""
    scores = logits(p)
    return only(p, scores, (scores <= scores.amax(1, keepdim=True)))


@broken("genuine_minus_inf_lost", "shape", MINUS_INF, reports=("TK13",), boundary="keys that score -inf left out")
def genuine_minus_inf_lost(p: TopkProblem) -> TopkResult:
    """An entry that scores -inf is taken for one outside the window."""
    scores = logits(p)
    return only(p, scores, scores > -torch.inf)


# --- scores -----------------------------------------------------------------------------------------------------------


@broken("absolute_weights", "set", ANY, boundary="weights without their sign")
def absolute_weights(p: TopkProblem) -> TopkResult:
    return right(dataclasses.replace(p, weights=p.weights.abs()))


@broken("no_relu", "set", PLAIN, reports=("ML11",), boundary="no ReLU")
def no_relu(p: TopkProblem) -> TopkResult:
    dots = torch.einsum("rhd,kd->rhk", p.q_fp8.float(), p.k_fp8.float())
    scores = (dots * p.weights[..., None]).sum(1) * p.kv_scale
    return choose(p, scores.masked_fill(logits(p) == -torch.inf, -torch.inf))


@broken("kv_scale_forgotten", "set", ANY, boundary="kv_scale left out")
def kv_scale_forgotten(p: TopkProblem) -> TopkResult:
    return right(dataclasses.replace(p, kv_scale=torch.ones_like(p.kv_scale)))


@broken("kv_scale_of_the_next_key", "set", EXACT, boundary="kv_scale of the next key")
def kv_scale_of_the_next_key(p: TopkProblem) -> TopkResult:
    return right(dataclasses.replace(p, kv_scale=p.kv_scale.roll(-1)))


@broken("one_head_dropped", "set", PLAIN, also=("downstream",), reports=("TK19",), boundary="the last head left out")
def one_head_dropped(p: TopkProblem) -> TopkResult:
    weights = p.weights.clone()
    weights[:, -1] = 0
    return right(dataclasses.replace(p, weights=weights))


@broken("second_32_heads_dropped", "set", HEADS, boundary="the second half of the heads left out")
def second_32_heads_dropped(p: TopkProblem) -> TopkResult:
    weights = p.weights.clone()
    weights[:, 32:] = 0
    return right(dataclasses.replace(p, weights=weights))


@broken("heads_of_the_next_row", "set", PLAIN, boundary="weights of the next row")
def heads_of_the_next_row(p: TopkProblem) -> TopkResult:
    return right(dataclasses.replace(p, weights=p.weights.roll(-1, 0)))


@broken("last_columns_dropped", "set", PLAIN, boundary="columns from 96 on left out")
def last_columns_dropped(p: TopkProblem) -> TopkResult:
    """96 of the 128 columns of q and k are multiplied."""
    q = p.q_fp8.clone()
    q.view(torch.uint8)[..., 96:] = 0
    return right(dataclasses.replace(p, q_fp8=q))


# --- the choice -------------------------------------------------------------------------------------------------------


@broken("best_key_dropped", "set", PLAIN, also=("dense-vs-litetopk",), reports=("LT7",), boundary="the best key left out")
def best_key_dropped(p: TopkProblem) -> TopkResult:
    """The next best one is taken in its place."""
    scores = logits(p)
    longer = (p.ke - p.ks > p.topk)[:, None]
    best = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf).argmax(1, keepdim=True)
    return only(p, scores, ~(longer & torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)))


@broken("smallest_chosen", "set", PLAIN, boundary="the lowest scores chosen")
def smallest_chosen(p: TopkProblem) -> TopkResult:
    scores = logits(p)
    return TopkResult(choose(p, torch.where(scores == -torch.inf, scores, -scores)).indices)


@broken("ranked_by_bf16", "set", LONG, boundary="ranked by bf16")
def ranked_by_bf16(p: TopkProblem) -> TopkResult:
    return TopkResult(choose(p, logits(p).bfloat16().float()).indices)


@broken("ranked_by_fp16", "set", LONG_EXACT, boundary="ranked by fp16")
def ranked_by_fp16(p: TopkProblem) -> TopkResult:
    return TopkResult(choose(p, logits(p).half().float()).indices)


@broken("infinite_score_skipped", "set", INF, boundary="keys that score +inf left out")
def infinite_score_skipped(p: TopkProblem) -> TopkResult:
    """`isfinite` where NaN is meant: the best keys there are go missing."""
    scores = logits(p)
    longer = (p.ke - p.ks > p.topk)[:, None]
    return only(p, scores, ~(longer & (scores == torch.inf)))


@broken("nan_chosen", "nan-chosen", NAN, reports=("TK7",), boundary="NaN ranked first")
def nan_chosen(p: TopkProblem) -> TopkResult:
    """NaN ranks first, as it does in torch.topk."""
    return TopkResult(choose(p, logits(p).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)).indices)


@broken("last_tile_of_keys_skipped", "set", RISING, boundary="the last, partial tile of 128 keys")
def last_tile_of_keys_skipped(p: TopkProblem) -> TopkResult:
    """Whole tiles of 128 keys only, in rows that have more than topk keys in them."""
    whole = p.ks + (p.ke - p.ks) // 128 * 128
    return right(dataclasses.replace(p, ke=torch.where(whole - p.ks > p.topk, whole, p.ke)))


@broken("int32_overflow", "set", LONG, reports=("ML8",), boundary="offsets of scores (row * s_kv) cut to 12 bits")
def int32_overflow(p: TopkProblem) -> TopkResult:
    """Stands for row * s_kv in 32 bits, with 12: rows past the border read another row's scores."""
    scores = logits(p)
    start = torch.arange(p.num_q, device=p.device)[:, None] * p.s_kv % (1 << 12)
    flat = (start + torch.arange(p.s_kv, device=p.device)) % scores.numel()
    return choose(p, scores.nan_to_num(neginf=-1e30).view(-1)[flat].masked_fill(scores == -torch.inf, -torch.inf))
