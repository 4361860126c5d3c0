"""An indexer_topk case's tensors: the same bytes on every device, windows and value patterns as they say."""
from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from profiles import many

from cases import IndexerTopkCase, indexer_values, parse_case
from cases.indexer_inputs import IndexerInputs, make_indexer_inputs, make_windows
from cases.indexer_topk import ORDERS, SCALES, TIES, VALUES, WEIGHTS, WINDOWS
from cases.indexer_values import score_sigma
from cases.strategies import indexer_topk_cases
from references.indexer_topk import topk_reference

torch.set_num_threads(1)
GOLDEN = [line.split(" ", 1) for line in (Path(__file__).parent / "golden_indexer.txt").read_text(encoding="utf-8").splitlines()]
CPU = torch.device("cpu")


def case_of(body: str) -> IndexerTopkCase:
    case = parse_case(f"indexer_topk:{body}")
    assert isinstance(case, IndexerTopkCase)
    return case


@functools.lru_cache(maxsize=16)
def inputs_of(body: str) -> IndexerInputs:
    return make_indexer_inputs(case_of(body), CPU)


@functools.lru_cache(maxsize=16)
def scores_of(body: str) -> torch.Tensor:
    """fp64 scores of all rows and keys, -inf outside the windows."""
    return topk_reference(inputs_of(body), torch.float64).scores(0, case_of(body).num_q)


def winners(body: str, row: int) -> set[int]:
    """Keys of a row's topk best, ties aside."""
    score = scores_of(body)[row]
    return set(score.topk(min(case_of(body).topk, int(score.isfinite().sum()))).indices.tolist())


# --- the same bytes everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("want", "text"), GOLDEN)
def test_inputs_hash_to_the_golden_table(want: str, text: str, device: str) -> None:
    case = parse_case(text)
    assert isinstance(case, IndexerTopkCase)
    assert make_indexer_inputs(case, device).digests()["all"] == want


def test_golden_table_covers_every_pattern() -> None:
    cases = [parse_case(text) for _, text in GOLDEN]
    allowed = {"values": VALUES, "ties": TIES, "weights": WEIGHTS, "scales": SCALES, "order": ORDERS, "window": WINDOWS, "h": (32, 64)}
    for key, words in allowed.items():
        assert {getattr(case, key) for case in cases} == set(words), key


@pytest.mark.parametrize(("base", "changes"), [
    ("requests=12/200,values=integer", ("seed=1", "h=64", "window=full", "span=50", "order=shuffled", "order=descending", "empty=0.5",
     "pad_rows=3", "pad_keys=3", "values=normal", "ties=pairs", "ties=runs", "ties=far", "ties=all",
     "weights=mixed", "scales=any", "requests=12/201")),
    ("requests=2/99+2/300,values=planted", ("at=first", "at=last", "at=tile", "at=ke", "values=shifted", "values=outlier")),
    ("requests=2/300,values=nan,share=0.5", ("share=0.1", "values=inf", "values=latehot", "values=plateau")),
    ("requests=2/300,values=nearflat", ("ulps=64", "values=flat")),
    ("requests=2/300,values=drift", ("sigma=1.0", "values=ascending", "values=descending")),
])
def test_every_key_that_shapes_tensors_changes_the_hash(base: str, changes: tuple[str, ...]) -> None:
    bodies = [base]
    for change in changes:
        key = change.partition("=")[0]
        bodies.append(",".join([part for part in base.split(",") if not part.startswith(f"{key}=")] + [change]))
    assert len({inputs_of(body).digests()["all"] for body in bodies}) == len(bodies)


@pytest.mark.parametrize("text", [text for _, text in GOLDEN[2:22:3]])
def test_values_made_in_chunks_are_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(text.partition(":")[2])
    whole = make_indexer_inputs(case, CPU).digests()
    monkeypatch.setattr(indexer_values, "_CHUNK", {"cpu": 7 * 128})
    assert make_indexer_inputs(case, CPU).digests() == whole


@settings(deadline=None, max_examples=many(100))
@given(indexer_topk_cases(max_work=1 << 18))
def test_tensors_have_the_shapes_and_windows_that_arms_accept(case: IndexerTopkCase) -> None:
    inputs = make_indexer_inputs(case, CPU)
    assert inputs.q_fp8.shape == (case.num_q, case.h, 128) and inputs.k_fp8.shape == (case.s_kv, 128)
    assert inputs.kv_scale.shape == (case.s_kv,) and inputs.weights.shape == (case.num_q, case.h)
    assert inputs.ks.dtype == inputs.ke.dtype == torch.int32 and inputs.ks.shape == inputs.ke.shape == (case.num_q,)
    assert bool((inputs.ks >= 0).all()) and bool((inputs.ks <= inputs.ke).all()) and bool((inputs.ke <= case.s_kv - case.pad_keys).all())
    assert not bool(inputs.q_fp8.float().isnan().any()) and not bool(inputs.k_fp8.float().isnan().any())
    if case.values not in ("nan", "inf"):
        assert bool(inputs.kv_scale.isfinite().all()) and bool((inputs.kv_scale > 0).all()) and bool(inputs.weights.isfinite().all())
    for row0, row1, kv0, kv1 in inputs.requests:
        assert bool((inputs.ks[row0:row1] >= kv0).all()) and bool((inputs.ke[row0:row1] <= kv1).all())


# --- windows ----------------------------------------------------------------------------------------------------------


def windows_of(body: str) -> tuple[list[int], list[int]]:
    ks, ke = make_windows(case_of(body), CPU)
    return ks.tolist(), ke.tolist()


def test_rows_see_their_request_up_to_themselves() -> None:
    assert windows_of("requests=3/200+4+1/77,pad_rows=2,pad_keys=9") == (
        [0, 0, 0, 200, 200, 200, 200, 204, 0, 0], [198, 199, 200, 201, 202, 203, 204, 281, 0, 0])
    assert windows_of("requests=3/200+2/5,window=full") == ([0, 0, 0, 200, 200], [200, 200, 200, 205, 205])
    assert windows_of("requests=3/200+4,span=3") == ([195, 196, 197, 200, 200, 200, 201], [198, 199, 200, 201, 202, 203, 204])
    assert windows_of("requests=3/200,order=descending")[1] == [200, 199, 198]


def test_shuffled_rows_are_a_permutation_that_goes_back_and_forth() -> None:
    _, ke = windows_of("requests=50/200+50/100,order=shuffled")
    assert sorted(ke[:50]) == list(range(151, 201)) and sorted(ke[50:]) == list(range(251, 301))
    steps = torch.tensor(ke[:50]).diff()
    assert bool((steps > 1).any()) and bool((steps < -1).any())
    assert [end - 150 for end in ke[:50]] != [end - 250 for end in ke[50:]]


def test_empty_rows_are_the_asked_share_and_lie_inside_the_keys() -> None:
    ks, ke = make_windows(case_of("requests=400/1000+400/1000,empty=0.25"), CPU)
    empty = ks == ke
    assert 0.2 < float(empty.float().mean()) < 0.3
    assert bool((ks[empty][-50:] >= 1000).all())
    assert windows_of("requests=3/9,empty=1.0")[0] == windows_of("requests=3/9,empty=1.0")[1]


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("sign", WEIGHTS)
def test_weights_have_the_asked_signs(values: str, sign: str) -> None:
    weights = inputs_of(f"requests=6/70+6/30,values={values},weights={sign}").weights
    weights = weights[weights.isfinite()]
    assert bool((weights > 0).any()) == (sign != "negative") and bool((weights < 0).any()) == (sign != "positive")


def test_normal_values_have_the_stated_spread() -> None:
    inputs = inputs_of("requests=32/2000,weights=mixed,scales=any")
    assert float(inputs.q_fp8.float().std()) == pytest.approx(1.155, rel=0.02)
    assert float(inputs.k_fp8.float().std()) == pytest.approx(1.155, rel=0.02)
    assert float(inputs.weights.std()) == pytest.approx(48**-0.5, rel=0.05)
    scale = inputs.kv_scale
    assert 1 <= float(scale.min()) < 1.1 and 1.9 < float(scale.max()) < 2 and len(scale.unique()) > 1900
    assert set(inputs_of("requests=32/2000").kv_scale.unique().tolist()) == {0.5, 1.0, 2.0}


def test_digits_do_not_fit_sixteen_bits() -> None:
    """No weight (scales=pow2) or scale (any) is a bf16 or fp16 number, and ranking the scores by either chooses other keys."""
    for scales, heads in (("pow2", 32), ("any", 64)):
        inputs = inputs_of(f"requests=9/3000,topk=300,values=digits,weights=mixed,scales={scales},h={heads}")
        assert set(inputs.k_fp8.float().unique().tolist()) == {-1.0, 0.0, 1.0}
        assert bool((inputs.q_fp8.float().abs().sum(2) == 8).all())
        odd = inputs.weights if scales == "pow2" else inputs.kv_scale
        for small in (torch.bfloat16, torch.float16):
            assert bool((odd.to(small).float() != odd).all())


def test_integer_values_are_small_integers_and_powers_of_two() -> None:
    inputs = inputs_of("requests=9/500,values=integer,weights=mixed")
    assert set(inputs.q_fp8.float().unique().tolist()) == set(inputs.k_fp8.float().unique().tolist()) == set(range(-4, 5))
    assert set(inputs.weights.abs().unique().tolist()) == {1.0, 0.5, 0.25, 0.125}
    assert set(inputs.kv_scale.unique().tolist()) == {0.5, 1.0, 2.0}


@pytest.mark.parametrize("scales", SCALES)
def test_flat_rows_tie_and_nearly_flat_ones_differ_by_ulps(scales: str) -> None:
    flat = inputs_of(f"requests=4/200+2/90,values=flat,scales={scales}")
    assert len(flat.k_fp8.view(torch.uint8).unique(dim=0)) == 1 and len(flat.kv_scale.unique()) == 1
    near = inputs_of(f"requests=4/200+2/90,values=nearflat,ulps=4,scales={scales}")
    assert len(near.k_fp8.view(torch.uint8).unique(dim=0)) == 1
    assert len((near.kv_scale.view(torch.int32) - near.kv_scale.view(torch.int32).min()).unique()) == 5
    assert int(near.kv_scale.view(torch.int32).max() - near.kv_scale.view(torch.int32).min()) == 4


@pytest.mark.parametrize("sign", WEIGHTS)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_plateau_is_exactly_zero_for_the_asked_share(share: float, sign: str) -> None:
    score = scores_of(f"requests=1/2000,values=plateau,share={share},weights={sign}")[0]
    assert float((score == 0).double().mean()) == pytest.approx(share, abs=0.03)
    assert len(score[score != 0].unique()) >= 0.7 * (1 - share) * 2000 - 40


@pytest.mark.parametrize("at", ["first", "last"])
def test_plateau_has_its_positive_scores_at_the_asked_end(at: str) -> None:
    score = scores_of(f"requests=1/2000,values=plateau,share=0.9,at={at}")[0]
    positive = (score > 0).nonzero()[:, 0]
    assert positive.tolist() == list(range(200) if at == "first" else range(1800, 2000))


@pytest.mark.parametrize("sign", WEIGHTS)
@pytest.mark.parametrize("length", [5, 1000, 9000])
def test_ramps_rise_and_fall_strictly(length: int, sign: str) -> None:
    for values, direction in (("ascending", 1), ("descending", -1)):
        body = f"requests=2/{length}+2/{length // 2},values={values},weights={sign}"
        rows = scores_of(body)
        assert bool((rows[1, :length].diff() * direction > 0).all()) and bool((rows[3, length:].diff() * direction > 0).all()), values


@pytest.mark.parametrize("sign", WEIGHTS)
def test_bucket_edges_are_hit_exactly(sign: str) -> None:
    score = scores_of(f"requests=1/3000,values=bucketedge,weights={sign}")[0]
    best, span = score.max(), score.max() - score.min()
    bucket = (best - score) * 255 / span  # 256 buckets over the range of the scores
    off = bucket - bucket.round()
    assert bool(((off == 0) | (off.abs() == 1 / 16)).all())
    assert set(bucket.round().tolist()) == set(range(256)) and 0.3 < float((off == 0).double().mean()) < 0.37
    assert bool((off > 0).any()) and bool((off < 0).any())
    sample = score[:2]  # the extremes come first, so a sample of any length finds the same range
    assert (float(sample.max()), float(sample.min())) == (float(score.max()), float(score.min()))


@pytest.mark.parametrize("h", [32, 64])
def test_steered_patterns_have_the_stated_spread(h: int) -> None:
    case = case_of(f"requests=64/3000,values=drift,sigma=0.0,h={h},window=full")
    score = scores_of(str(case).partition(":")[2])
    assert float(score.std(dim=1).mean()) == pytest.approx(score_sigma(case), rel=0.05)


@pytest.mark.parametrize("sign", WEIGHTS)
def test_drift_latehot_and_shifted_rise_by_sigma(sign: str) -> None:
    def rise(body: str, low: slice, high: slice) -> float:
        """In standard deviations, the mean over many rows of the difference of two ranges' means."""
        body += f",weights={sign},window=full"
        score = scores_of(body)
        return float((score[:32, high].mean(1) - score[:32, low].mean(1)).mean()) / score_sigma(case_of(body))

    assert rise("requests=32/4000,values=drift,sigma=3.0", slice(0, 400), slice(3600, 4000)) == pytest.approx(2.7, abs=0.15)
    assert rise("requests=32/4000,values=latehot,share=0.1", slice(0, 3600), slice(3600, 4000)) == pytest.approx(4, abs=0.15)
    body = f"requests=32/2000+32/2000,values=shifted,sigma=5.0,window=full,weights={sign}"
    score = scores_of(body)
    assert float(score[:32, :2000].mean() - score[32:, 2000:].mean()) / score_sigma(case_of(body)) == pytest.approx(5, abs=0.6)


@pytest.mark.parametrize("sign", WEIGHTS)
def test_outlier_is_one_score_of_a_million_in_the_sample(sign: str) -> None:
    score = scores_of(f"requests=2/3000+2/50,values=outlier,weights={sign},window=full")
    for row in range(4):
        far = score[row].isfinite() & (score[row].abs() > 1000)
        assert int(far.sum()) == 1
        assert int(far.nonzero()[0, 0]) < (1024 if row < 2 else 3050)
        want = {"positive": 1, "negative": -1, "mixed": (1, -1)[row % 2]}[sign]
        assert float(score[row][far]) == pytest.approx(want * 1e6, rel=0.02)


@pytest.mark.parametrize("sign", WEIGHTS)
@pytest.mark.parametrize("h", [32, 64])
def test_planted_winners_win(sign: str, h: int) -> None:
    tail = f"weights={sign},h={h}"
    for row, kv0, ke in ((0, 0, 1996), (4, 0, 2000), (5, 2000, 2398), (7, 2000, 2400)):
        for at, want in {"first": {kv0}, "ks": {kv0}, "last": {ke - 1} if row in (4, 7) else set(), "ke": {ke - 1}}.items():
            assert want <= winners(f"requests=5/2000+3/400,topk=8,values=planted,at={at},{tail}", row), (at, row)
    tiles = {key for key in range(2000) if key % 64 in (0, 63) and key >= 63}
    assert len(tiles) == 62
    assert winners(f"requests=1/2000,topk=62,values=planted,at=tile,{tail}", 0) == tiles


def test_planted_edges_of_windows_are_the_best_of_their_row() -> None:
    """Off by one at either end, and the row's best key is lost."""
    body = "requests=40/2000+9/700,topk=16,values=planted,at={},span=300,order=shuffled,weights=mixed"
    inputs = inputs_of(body.format("ks"))
    assert scores_of(body.format("ks")).argmax(1).tolist() == inputs.ks.tolist()
    assert scores_of(body.format("ke")).argmax(1).tolist() == (inputs.ke - 1).tolist()


def test_tiles_of_long_rows_are_far_apart_and_few() -> None:
    want = {key for boundary in range(1024, 20000, 1024) for key in (boundary - 1, boundary)}
    assert winners("requests=1/20000,topk=38,values=planted,at=tile", 0) == want and len(want) == 38


@pytest.mark.parametrize("sign", WEIGHTS)
def test_nan_and_infinite_scales_and_weights(sign: str) -> None:
    nan = scores_of(f"requests=30/900,values=nan,share=0.1,weights={sign},window=full")
    unread = nan.isnan().double().mean(1)
    assert bool((unread[5::16] == 1).all()) and len(unread[5::16]) == 2
    assert bool(((unread[:5] > 0.05) & (unread[:5] < 0.15)).all())
    inf = scores_of(f"requests=30/900,values=inf,share=0.1,weights={sign},window=full")
    assert bool((inf == math.inf).any()) == (sign != "negative") and bool((inf == -math.inf).any()) == (sign != "positive")
    assert 50 < int(inf[0].isinf().sum()) < 150 and not bool(inf[0].isnan().any())
    assert not bool(inf[5].isfinite().any()) and bool(inf[5].isnan().any()) and bool(inf[5].isinf().any())


@pytest.mark.parametrize("values", ["normal", "integer", "ascending", "planted", "nan"])
@pytest.mark.parametrize(("ties", "original"), [
    ("pairs", lambda at, n: at // 2 * 2), ("runs", lambda at, n: at // 64 * 64), ("far", lambda at, n: at % ((n + 1) // 2)),
    ("all", lambda at, n: at * 0)])
def test_tied_keys_are_copies(ties: str, original: object, values: str) -> None:
    inputs = inputs_of(f"requests=4/333+2/90,values={values},ties={ties},weights=mixed")
    assert callable(original)
    for kv0, kv1 in ((0, 333), (333, 423)):
        source = original(torch.arange(kv1 - kv0), kv1 - kv0) + kv0
        assert torch.equal(inputs.k_fp8.view(torch.uint8)[kv0:kv1], inputs.k_fp8.view(torch.uint8)[source])
        torch.testing.assert_close(inputs.kv_scale[kv0:kv1], inputs.kv_scale[source], rtol=0, atol=0, equal_nan=True)
        assert len(source.unique()) == len(set(source.tolist())) < kv1 - kv0


@pytest.mark.parametrize("sign", ["positive", "negative"])
@pytest.mark.parametrize("values", [v for v in VALUES if v not in ("nan", "inf", "outlier")])
def test_padding_keys_would_outscore_all_others(values: str, sign: str) -> None:
    inputs = inputs_of(f"requests=2/500+1/200,values={values},weights={sign},pad_keys=40")
    dots = (inputs.q_fp8.double() @ inputs.k_fp8.double().T).relu()
    score = torch.einsum("rh,rhk->rk", inputs.weights.double(), dots) * inputs.kv_scale.double()
    assert bool((score[:, 700:].amax(1) >= score[:, :700].amax(1)).all()) and bool((score[:, 700:] >= 0).all())
