"""Margins of the indexer_topk reference: they hold for every right way to add up, and are no wider than that takes."""
from __future__ import annotations

import pytest
import torch
from topk_references import EXACT, ROUNDED, case_of, expected_of, fp32_scores, hopper_scores, inputs_of

import references.indexer_topk as module
from cases.indexer_topk import WEIGHTS
from references.indexer_topk import TopkExpected, margin_of


def judge(expected: TopkExpected, accumulate: str, got: torch.Tensor) -> tuple[float, float]:
    """The largest error of scores over their bounds, and of a choice by these scores over its margin (beyond the k-th)."""
    inputs = expected.inputs
    case = inputs.case
    want = expected.scores(0, case.num_q)
    every = torch.arange(case.s_kv).expand(case.num_q, -1)
    inside = want.isfinite()
    error = torch.where(inside, (got - want).abs(), 0.0)
    bound = expected.score_error(accumulate, 0, case.num_q, every)
    assert bool((error[bound == 0] == 0).all())
    choice = torch.where(inside, got, -torch.inf).topk(min(case.topk, case.s_kv), 1)
    mask = torch.zeros_like(inside).scatter_(1, choice.indices, choice.values > -torch.inf)
    gap = want - expected.kth[:, None]
    missed = torch.where(inside & ~mask, gap, 0.0).amax(1)
    wrong = torch.where(inside & mask, -gap, 0.0).amax(1)
    eps = expected.eps[accumulate].clamp(min=1e-30)
    return float((error / bound.clamp(min=1e-30)).max()), float((torch.maximum(missed, wrong) / eps).max())


@pytest.mark.parametrize("way", ["forwards", "backwards", "scaled keys", "scaled queries"])
@pytest.mark.parametrize("body", ROUNDED[::4] + EXACT[:1])
def test_every_order_of_fp32_operations_is_within_the_margin(body: str, way: str) -> None:
    scores, choice = judge(expected_of(body), "fp32", fp32_scores(inputs_of(body), way))
    assert scores <= 1 and choice <= 1


@pytest.mark.parametrize("body", ROUNDED)
def test_hopper_s_accumulation_is_within_the_margin_and_uses_some_of_it(body: str) -> None:
    scores, choice = judge(expected_of(body), "fp8", hopper_scores(inputs_of(body)))
    assert choice <= 1
    regular = ("integer", "plateau", "flat", "nearflat", "ascending", "descending")  # little or nothing to round
    assert (0 if case_of(body).values in regular else 0.02) <= scores <= 0.5


@pytest.mark.parametrize("accumulate", ["fp32", "fp8"])
@pytest.mark.parametrize("body", ROUNDED[::2])
def test_the_worst_errors_within_the_bounds_stay_within_the_margin(body: str, accumulate: str) -> None:
    """Every key that is in pushed down and every other pushed up by all that it may be off: nothing is worse for a choice."""
    inputs, expected = inputs_of(body), expected_of(body, torch.float64)
    case = inputs.case
    score = expected.scores(0, case.num_q)
    error = expected.score_error(accumulate, 0, case.num_q, torch.arange(case.s_kv).expand(case.num_q, -1))
    for share in (1.0, 0.5):
        pushed = torch.where(score >= expected.kth[:, None], score - share * error, score + share * error)
        _, choice = judge(expected, accumulate, pushed)
        assert choice <= 1 + 1e-9


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_margin_is_no_wider_than_it_has_to_be(weights: str) -> None:
    """Where keys are dense around the k-th, the worst errors use much of it."""
    body = f"requests=4/6000,topk=1500,weights={weights}"
    expected = expected_of(body, torch.float64)
    score, every = expected.scores(0, 4), torch.arange(6000).expand(4, -1)
    error = expected.score_error("fp8", 0, 4, every)
    pushed = torch.where(score >= expected.kth[:, None], score - error, score + error)
    assert 0.3 < judge(expected, "fp8", pushed)[1] <= 1


def test_margin_ignores_keys_that_no_error_carries_across() -> None:
    score = torch.tensor([[5.0, 4.0, 3.0, 1e6, -1e6, 3.5]])
    error = torch.tensor([[0.1, 0.2, 0.1, 4e3, 4e3, 0.0]])
    assert margin_of(score, torch.tensor([4.0]), error).tolist() == [pytest.approx(0.4)]
    error[0, 2] = 0.6  # 1 away, but twice 0.6 reaches it
    assert margin_of(score, torch.tensor([4.0]), error).tolist() == [pytest.approx(1.2)]
    infinite = torch.tensor([[torch.inf, 1.0, -torch.inf, torch.nan]])
    assert margin_of(infinite, torch.tensor([torch.inf]), torch.zeros(1, 4)).tolist() == [0.0]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_an_outlier_does_not_widen_the_margin(weights: str) -> None:
    body = "requests=4/600,topk=64,values={},weights=" + weights
    plain, outlier = expected_of(body.format("drift,sigma=0.0")), expected_of(body.format("outlier"))
    for name in ("fp32", "fp8"):
        torch.testing.assert_close(outlier.eps[name], plain.eps[name], rtol=0.3, atol=0)


@pytest.mark.parametrize(("accumulate", "least"), [("fp32", 400), ("fp8", 30)])
def test_margins_are_small_against_the_scores(accumulate: str, least: float) -> None:
    for weights in WEIGHTS:
        expected = expected_of(f"requests=8/4000,topk=512,weights={weights}")
        spread = expected.scores(7, 8)[0, :].std()
        assert float(spread) > least * float(expected.eps[accumulate][7]) > 0


def test_score_errors_of_named_keys_are_those_of_the_margins() -> None:
    body = ROUNDED[1]
    expected, case = expected_of(body), case_of(body)
    every = torch.arange(case.s_kv).expand(case.num_q, -1)
    score, errors = module._Scorer(inputs_of(body), torch.float32).block(0, case.num_q, ("fp32", "fp8"))
    for name, error in errors.items():
        got = expected.score_error(name, 0, case.num_q, every)
        torch.testing.assert_close(torch.where(score > -torch.inf, got, 0.0), error, rtol=1e-4, atol=0)
        part = expected.score_error(name, 2, 4, torch.tensor([[7, -1, 3], [-1, case.s_kv, 0]], dtype=torch.int32))
        want = torch.stack([got[2, [7, 0, 3]] * torch.tensor([1, 0, 1]), got[3, [0, 0, 0]] * torch.tensor([0, 0, 1])])
        torch.testing.assert_close(part, want, rtol=1e-4, atol=0)


