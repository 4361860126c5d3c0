"""The indexer_topk reference against a loop anyone can read: scores, k-th, exactness, what it costs."""
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from profiles import many
from topk_references import EXACT, ROUNDED, case_of, expected_of, hopper_scores, inputs_of, same, unmasked

import references.indexer_topk as module
from cases import IndexerTopkCase, load_suite
from cases.indexer_inputs import IndexerInputs, make_indexer_inputs
from cases.strategies import indexer_topk_cases
from references.indexer_topk import topk_reference

TINY = [f"requests=2/20+3/7,topk=5,pad_rows=1,pad_keys=2,{rest}" for rest in (
    "weights=mixed,scales=any", "values=integer,weights=mixed,ties=pairs", "values=nan,share=0.3,weights=mixed",
    "values=inf,share=0.3,weights=mixed", "values=inf,share=0.5,weights=negative,window=full",
    "values=plateau,share=0.5,weights=mixed,empty=0.4", "values=planted,span=4,h=64",
    "values=outlier,weights=negative,order=shuffled")]


def loop_score(inputs: IndexerInputs, row: int, key: int) -> float:
    """One score from Python floats. An infinite weight times 0, and infinities of both signs, are NaN."""
    k = inputs.k_fp8[key].double().tolist()
    total = 0.0
    for head, weight in enumerate(inputs.weights[row].tolist()):
        dot = math.fsum(x * y for x, y in zip(inputs.q_fp8[row, head].double().tolist(), k))
        total += weight * max(0.0, dot)
    return inputs.kv_scale[key].item() * total


@pytest.mark.parametrize("body", TINY)
def test_reference_is_what_a_plain_loop_computes(body: str) -> None:
    inputs, got = inputs_of(body), expected_of(body, torch.float64)
    case = inputs.case
    scores = got.scores(0, case.num_q)
    for row in range(case.num_q):
        start, end = int(inputs.ks[row]), int(inputs.ke[row])
        want = [loop_score(inputs, row, key) if start <= key < end else -math.inf for key in range(case.s_kv)]
        torch.testing.assert_close(scores[row], torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12, equal_nan=True)
        valid = sorted((score for score in want[start:end] if not math.isnan(score)), reverse=True)
        count = min(case.topk, len(valid))
        assert (int(got.valid[row]), int(got.count[row])) == (len(valid), count)
        assert float(got.kth[row]) == (pytest.approx(valid[count - 1], rel=1e-12, abs=1e-12) if count else math.inf)


def test_tiny_cases_hold_every_kind_of_score() -> None:
    found: set[str] = set()
    for body in TINY:
        inputs, expected = inputs_of(body), expected_of(body, torch.float64)
        for row in range(inputs.case.num_q):
            window = expected.scores(row, row + 1)[0, int(inputs.ks[row]) : int(inputs.ke[row])]
            kinds = {"nan": window.isnan(), "+inf": window == math.inf, "-inf": window == -math.inf, "negative": window < 0,
                     "zero": window == 0, "positive": window > 0}
            found |= {name for name, mask in kinds.items() if bool(mask.any())} | ({"no key"} if not len(window) else set())
    assert found == {"nan", "+inf", "-inf", "negative", "zero", "positive", "no key"}


@pytest.mark.parametrize("body", [TINY[0], TINY[3], TINY[5], "requests=20/300+9/77,topk=30,span=90,order=shuffled"])
def test_scores_have_the_same_bits_whichever_rows_are_asked_for(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", {"cpu": 4})
    monkeypatch.setattr(module, "KEYS", {"cpu": 16})
    case = case_of(body)
    kept = topk_reference(inputs_of(body))
    monkeypatch.setattr(module, "CACHED", {"cpu": 0})
    made = topk_reference(inputs_of(body))
    assert kept.cached is not None and made.cached is None
    whole = kept.scores(0, case.num_q)
    for row0, row1 in ((0, case.num_q), (0, 1), (3, 4), (2, 7), (case.num_q - 1, case.num_q)):
        row1 = min(row1, case.num_q)
        assert same(made.scores(row0, row1), whole[row0:row1]) and same(kept.scores(row0, row1), whole[row0:row1])
    for name in ("kth", "valid", "count"):
        assert same(getattr(kept, name), getattr(made, name))
    one = topk_reference(inputs_of(body), torch.float64)  # the grid's size moves roundings alone
    torch.testing.assert_close(one.scores(0, case.num_q).float(), whole, rtol=1e-5, atol=1e-5, equal_nan=True)


@settings(deadline=None, max_examples=many(60))
@given(indexer_topk_cases(max_work=1 << 18))
def test_what_is_expected_of_any_case_is_consistent(case: IndexerTopkCase) -> None:
    inputs = make_indexer_inputs(case, "cpu")
    expected = topk_reference(inputs)
    score = expected.scores(0, case.num_q)
    window = (inputs.ke - inputs.ks).long()
    assert bool((expected.valid <= window).all()) and torch.equal(expected.count, expected.valid.clamp(max=case.topk))
    read = score.masked_fill(score.isnan(), -torch.inf)
    assert bool(((read >= expected.kth[:, None]).sum(1) >= expected.count).all())
    assert bool(((read > expected.kth[:, None]).sum(1) < expected.count.clamp(min=1)).all())
    assert torch.equal(expected.kth == torch.inf, (expected.count == 0) | ((read == torch.inf).sum(1) >= expected.count))
    for name, eps in expected.eps.items():
        assert bool((eps >= 0).all()) and bool(eps.isfinite().all())
        assert name not in case.exact or not bool(eps.any())


# --- exact cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", EXACT)
def test_exact_cases_are_exact(body: str) -> None:
    """fp32 and fp64 agree in every bit, there is no margin, and all terms together fit the 24 bits of an fp32, so no order of
    summation rounds: every partial sum is a multiple of one unit below 2^24 units."""
    inputs, single, double = inputs_of(body), expected_of(body), expected_of(body, torch.float64)
    rows = inputs.case.num_q
    assert "fp32" in inputs.case.exact
    assert same(single.scores(0, rows).double(), double.scores(0, rows)) and same(single.kth.double(), double.kth)
    for name in inputs.case.exact:
        assert not bool(single.eps[name].any())
        assert not bool(single.score_error(name, 0, rows, torch.zeros(rows, 3, dtype=torch.int32)).any())
    q, k = inputs.q_fp8.double(), inputs.k_fp8.double()
    read = inputs.weights.isfinite().all(1)
    dots = q[read].abs() @ k.abs().T  # [rows, h, keys], all terms of a dot product
    weights = inputs.weights[read].double().abs()
    unit = lowest_bit(q[read]) * lowest_bit(k)
    active = (dots > 0).any(0).any(1)  # heads that add anything
    unit_w = lowest_bit(weights[:, active])
    most = float(torch.einsum("rh,rhk->rk", weights, dots).amax())
    assert most <= 2**24 * unit * unit_w
    scale = inputs.kv_scale[inputs.kv_scale.isfinite()]
    if inputs.case.values == "digits":  # whatever is multiplied first fits as well
        assert most * float(scale.max()) <= 2**24 * unit * unit_w * lowest_bit(scale.double())
        return
    assert bool((torch.frexp(weights[:, active]).mantissa == 0.5).all())
    assert bool((torch.frexp(scale).mantissa == 0.5).all())


def lowest_bit(x: torch.Tensor) -> float:
    """The largest power of two of which every number of x is a multiple."""
    unit = 2.0**12
    while bool((x / unit != (x / unit).round()).any()):
        unit /= 2
    return unit


@pytest.mark.parametrize("body", [body for body in EXACT if "fp8" in case_of(body).exact])
def test_exact_cases_are_exact_on_hopper(body: str) -> None:
    inputs, expected = inputs_of(body), expected_of(body)
    assert same(hopper_scores(inputs), unmasked(expected))


# --- cost -------------------------------------------------------------------------------------------------------------


def test_temporary_memory_is_bounded_by_the_block() -> None:
    """What a block of the largest cases takes: dot products, and six rows' worth of scores."""
    for device, limit in (("cpu", 256 << 20), ("cuda", 2 << 30)):
        rows, keys = module.ROWS[device], module.KEYS[device]
        for heads in (32, 64):
            assert 4 * rows * keys * (heads + 8) + 6 * 4 * rows * (1 << 20) < limit


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu() -> None:
    for body in (*ROUNDED, *EXACT, *TINY):
        case = case_of(body)
        here, there = expected_of(body), topk_reference(make_indexer_inputs(case, "cuda"))
        rows = case.num_q
        if "fp32" in case.exact:
            assert same(here.scores(0, rows), there.scores(0, rows).cpu()), body
        torch.testing.assert_close(there.scores(0, rows).cpu(), here.scores(0, rows), rtol=1e-4, atol=1e-3, equal_nan=True)
        assert torch.equal(here.valid, there.valid.cpu())
        for name, eps in here.eps.items():
            torch.testing.assert_close(there.eps[name].cpu(), eps, rtol=0.05, atol=1e-6)


@pytest.mark.cuda
def test_cuda_scores_have_the_same_bits_whichever_rows_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED", {"cuda": 0})
    for body in ("requests=100/3000+37/140000,weights=mixed,scales=any", "requests=70/90000,h=64,weights=mixed"):
        expected = topk_reference(make_indexer_inputs(case_of(body), "cuda"))
        rows = case_of(body).num_q
        whole = expected.scores(0, rows)
        for row0, row1 in ((0, rows), (1, 2), (30, 35), (rows - 3, rows)):
            assert torch.equal(expected.scores(row0, row1), whole[row0:row1])


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["indexer-topk", "indexer-edge"])
def test_cuda_suites_take_little_memory(name: str) -> None:
    for case in load_suite(name):
        assert isinstance(case, IndexerTopkCase)
        inputs = make_indexer_inputs(case, "cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        expected = topk_reference(inputs)
        kept = 0 if expected.cached is None else expected.cached.numel() * 4
        assert torch.cuda.max_memory_allocated() - before - kept < 2 << 30, str(case)
