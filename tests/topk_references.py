"""Shared by tests of the indexer_topk reference: cases by their keys, made once, and scores added up as kernels may add them."""
from __future__ import annotations

import functools

import torch

import references.indexer_topk as module
from cases import IndexerTopkCase, parse_case
from cases.indexer_inputs import IndexerInputs, make_indexer_inputs
from cases.indexer_topk import VALUES, WEIGHTS
from references.indexer_topk import TopkExpected, topk_reference

torch.set_num_threads(1)  # small products on shared cores

EXACT = [f"requests=5/{keys}+3/129,topk=40,values={values},weights={weights},h={h}" for values, keys in (
    *((values, 700) for values in ("integer", "plateau", "nan", "inf", "bucketedge", "lastbits")),
    ("ascending", 4096), ("descending", 6000))
    for weights, h in (("mixed", 32), ("positive", 64), ("negative", 32))] + [
    f"requests=5/700+3/129,topk=40,values=digits,weights=mixed,h={h},scales={scales}" for h, scales in ((32, "pow2"), (64, "any"))]
ROUNDED = [f"requests=4/600+3/200,topk=64,values={values},weights={weights},scales=any" for values in VALUES
           for weights in WEIGHTS if values not in ("digits", "nan", "inf", "bucketedge", "lastbits")]


def case_of(body: str) -> IndexerTopkCase:
    case = parse_case(f"indexer_topk:{body}")
    assert isinstance(case, IndexerTopkCase)
    return case


@functools.lru_cache(maxsize=16)
def inputs_of(body: str) -> IndexerInputs:
    return make_indexer_inputs(case_of(body), "cpu")


@functools.lru_cache(maxsize=16)
def expected_of(body: str, dtype: torch.dtype = torch.float32) -> TopkExpected:
    return topk_reference(inputs_of(body), dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN being NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def unmasked(expected: TopkExpected) -> torch.Tensor:
    """fp32 or fp64 scores of all rows and keys, those outside the windows as well."""
    inputs, scorer = expected.inputs, module._Scorer(expected.inputs, expected.dtype)
    q, weights = inputs.q_fp8.to(expected.dtype), inputs.weights.to(expected.dtype)
    with module.full_precision(inputs.device):
        return module._sums(q, weights, inputs.k_fp8.to(scorer.dtype), inputs.kv_scale.to(scorer.dtype), ()).score


def fp32_scores(inputs: IndexerInputs, way: str) -> torch.Tensor:
    """fp32 [num_q, s_kv]: the scores in another order of operations, one addition at a time."""
    q, k, weights, scale = inputs.q_fp8.float(), inputs.k_fp8.float(), inputs.weights, inputs.kv_scale
    columns, heads = list(range(128)), list(range(inputs.case.h))
    if way == "backwards":
        columns, heads = columns[::-1], heads[::-1]
    if way == "scaled keys":
        k, scale = k * scale[:, None], torch.ones_like(scale)
    if way == "scaled queries":
        q, weights = q * weights.abs()[..., None], weights.sign()
    total = torch.zeros(inputs.case.num_q, inputs.case.s_kv)
    for head in heads:
        dot = torch.zeros_like(total)
        for column in columns:
            dot += q[:, head, column, None] * k[None, :, column]
        total += weights[:, head, None] * dot.relu()
    return total * scale


def truncated(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """x towards zero to multiples of 2^-13 of the power of two at or below `largest`."""
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest.clamp(min=2.0**-60)).exponent - 14)
    return (x / unit).trunc() * unit


def hopper_scores(inputs: IndexerInputs) -> torch.Tensor:
    """fp32 [num_q, s_kv]: dot products as Hopper's fp8 tensor core adds them up: 32 products and the accumulator are cut to 13 bits below
    the largest of them and summed, and so is the sum; heads in fp32."""
    q, k = inputs.q_fp8.double(), inputs.k_fp8.double()
    total = torch.zeros(inputs.case.num_q, inputs.case.s_kv)
    for head in range(inputs.case.h):
        acc = torch.zeros(inputs.case.num_q, inputs.case.s_kv, 1, dtype=torch.float64)
        for step in range(0, 128, 32):
            terms = torch.cat([q[:, head, None, step : step + 32] * k[None, :, step : step + 32], acc], -1)
            acc = truncated(terms, terms.abs().amax(-1, keepdim=True)).sum(-1, keepdim=True)
            acc = truncated(acc, acc.abs())
        total += inputs.weights[:, head, None] * acc[..., 0].relu().float()
    return total * inputs.kv_scale
