"""Deliberately wrong indexer top-k kernels, continued: numbers that lose bits on the way, kernels that do not read what they are given."""
from __future__ import annotations

import dataclasses

import torch

from arms.broken.indexer_topk import choose, logits, right
from arms.broken.problems import DIGITS, LASTBITS, PLAIN, SCALE_DIGITS
from arms.broken.register import broken_topk as broken
from arms.broken.register import broken_topk_set_up
from arms.topk import TopkLaunch, TopkProblem, TopkResult


def rounded(p: TopkProblem, name: str, dtype: torch.dtype) -> TopkResult:
    """A right launch on one input rounded to 16 bits. Its scores are kept to itself."""
    return TopkResult(right(dataclasses.replace(p, **{name: getattr(p, name).to(dtype).float()})).indices)


@broken("weights_in_fp16", "set", DIGITS, boundary="weights rounded to fp16")
def weights_in_fp16(p: TopkProblem) -> TopkResult:
    return rounded(p, "weights", torch.float16)


@broken("kv_scale_in_fp16", "set", SCALE_DIGITS, boundary="kv_scale rounded to fp16")
def kv_scale_in_fp16(p: TopkProblem) -> TopkResult:
    return rounded(p, "kv_scale", torch.float16)


@broken("ranked_by_20_bits", "set", DIGITS, boundary="ranked by 20 bits")
def ranked_by_20_bits(p: TopkProblem) -> TopkResult:
    """A radix selection that leaves out its last pass."""
    scores = logits(p)
    return TopkResult(choose(p, (scores.view(torch.int32) & ~0xFFF).view(torch.float32)).indices)


@broken("ranked_by_30_bits", "set", LASTBITS, boundary="ranked by 30 bits")
def ranked_by_30_bits(p: TopkProblem) -> TopkResult:
    """The same, with only the last two bits left out."""
    scores = logits(p)
    return TopkResult(choose(p, (scores.view(torch.int32) & ~0b11).view(torch.float32)).indices)


@broken("shows_zeros_for_its_scores", "values", PLAIN)
def shows_zeros_for_its_scores(p: TopkProblem) -> TopkResult:
    """By these scores every choice is an exact top-k."""
    return TopkResult(right(p).indices, logits=lambda row0, row1: torch.zeros(row1 - row0, p.s_kv, device=p.device))


@broken_topk_set_up("chooses_in_set_up", "reads-inputs", PLAIN, reports=("HT16",))
def chooses_in_set_up(p: TopkProblem) -> TopkLaunch:
    """All the work is done once, where it is not timed."""
    result = right(p)
    return lambda: result


@broken_topk_set_up("keeps_its_keys", "reads-inputs", PLAIN)
def keeps_its_keys(p: TopkProblem) -> TopkLaunch:
    """The keys are laid out in set-up; what is written into them afterwards is not seen."""
    keys = p.k_fp8.clone()
    return lambda: right(dataclasses.replace(p, k_fp8=keys))
