"""The indexer_topk record: its text, what it refuses, its suites."""
from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from profiles import many

from cases import CaseError, IndexerTopkCase, format_case, load_suite, parse_case
from cases.indexer_topk import MOST_KEYS, MOST_ROWS, PLACES, SCALES, TIES, VALUES, WEIGHTS
from cases.strategies import indexer_topk_cases
from cases.suites import override

EXTREMES = IndexerTopkCase(
    requests=f"{MOST_ROWS - 5}/{MOST_KEYS - 9}", topk=1 << 14, h=64, span=MOST_KEYS, empty=1 / 3, pad_rows=5, pad_keys=9,
    share=1e-300, sigma=64.0, ulps=64, seed=(1 << 31) - 1)

MESSAGES = {
    "grammar": ("requests=3/x", ["requests=3/x", "rows[/kv_len] joined by '+'"]),
    "no request": ("requests=", ["requests=", "rows[/kv_len]"]),
    "zero rows": ("requests=0/5", ["requests=0/5", "rows[/kv_len]"]),
    "kv_len under rows": ("requests=8/1024+4/3", ["requests=8/1024+4/3", "kv_len 3 is less than rows 4"]),
    "too many rows": ("requests=1048576,pad_rows=1", ["1048577 rows", "allowed are 1048576"]),
    "too many keys": ("requests=1/16777216,pad_keys=1", ["16777217 keys", "allowed are 16777216"]),
    "heads": ("h=48", ["h=48", "32 or 64"]),
    "topk": ("topk=16385", ["topk=16385", "an integer from 1 to 16384"]),
    "weights": ("weights=both", ["weights=both", "positive | mixed | negative"]),
    "values": ("values=gauss", ["values=gauss", "normal | integer | digits | lastbits | flat"]),
    "unknown key": ("requestss=4", ["unknown key 'requestss' in indexer_topk", "did you mean 'requests'?"]),
    "one request to shift": ("values=shifted", ["requests=8/1024", "values=shifted needs two or more"]),
    "edges and any scale": ("values=bucketedge,scales=any", ["scales=any", "scales=pow2"]),
    "places of no pattern": ("at=last", ["at=last", "with values=normal allowed is -"]),
    "places of planted": ("values=planted,at=middle", ["at=middle", "first, last, tile, ks, ke"]),
    "a place twice": ("values=planted,at=ke+ke", ["at=ke+ke", "joined by '+'"]),
    "places of plateau": ("values=plateau,at=ke", ["at=ke", "with values=plateau allowed is - or first, last"]),
    "two places of plateau": ("values=plateau,at=first+last", ["at=first+last", "- or first, last"]),
}


@settings(deadline=None, max_examples=many(300))
@given(indexer_topk_cases(max_work=1 << 24))
@example(IndexerTopkCase())
@example(EXTREMES)
def test_text_reads_back_to_the_same_case(case: IndexerTopkCase) -> None:
    assert parse_case(format_case(case)) == case == parse_case(format_case(case, canonical=True))
    assert parse_case(str(case)) == case


def test_short_form_leaves_defaults_out() -> None:
    assert str(IndexerTopkCase()) == "indexer_topk:"
    assert str(IndexerTopkCase(requests="2/9+4", topk=512, values="planted", at="ke+ks")) == (
        "indexer_topk:requests=2/9+4,topk=512,values=planted,at=ke+ks")


@pytest.mark.parametrize("name", MESSAGES)
def test_a_text_that_is_no_case_gives_one_line_that_names_key_value_and_what_is_allowed(name: str) -> None:
    body, parts = MESSAGES[name]
    with pytest.raises(CaseError) as error:
        parse_case(f"indexer_topk:{body}")
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_requests_are_laid_one_after_the_other_and_padding_comes_last() -> None:
    case = IndexerTopkCase(requests="3/200+4+1/77", pad_rows=2, pad_keys=9)
    assert case.request_lengths == ((3, 200), (4, 4), (1, 77))
    assert case.bounds == ((0, 3, 0, 200), (3, 7, 200, 204), (7, 8, 204, 281))
    assert (case.num_q, case.s_kv) == (10, 290)
    assert case.work == 2 * 128 * 32 * (3 * 200 + 4 * 4 + 77)


def test_places() -> None:
    assert IndexerTopkCase(values="planted").places == PLACES
    assert IndexerTopkCase(values="planted", at="ke+first").places == ("ke", "first")
    assert IndexerTopkCase().places == ()


@settings(deadline=None, max_examples=many(100))
@given(indexer_topk_cases())
def test_strategy_stays_within_its_work(case: IndexerTopkCase) -> None:
    assert case.num_q * case.s_kv * case.h <= 1 << 20


def test_suites_hold_what_they_are_for() -> None:
    suites = {name: load_suite(name) for name in ("indexer-topk", "indexer-failure-modes", "indexer-edge", "litetopk-scale", "smoke")}
    ours = {name: [case for case in cases if isinstance(case, IndexerTopkCase)] for name, cases in suites.items()}
    for name, cases in suites.items():
        assert name == "smoke" or cases == ours[name]
    published = [((32, 32768),), ((16, 8192), (16, 24576), (8, 4096)), ((8, 1024),)]
    shapes = {(case.request_lengths, case.topk) for case in ours["indexer-topk"] if case.values == "normal"}
    assert shapes >= {(lengths, 2048) for lengths in published} | {(published[0], 512), (((9, 4099), (5, 1023)), 512)}
    assert ((8, 16384),) in {case.request_lengths for case in ours["indexer-topk"] if case.values == "flat"}
    assert [case.s_kv >> 10 for case in ours["litetopk-scale"]] == [32, 64, 96, 128, 256, 512, 1024]
    assert {(case.num_q, case.topk, case.h) for case in ours["litetopk-scale"]} == {(8192, 2048, 32)}
    for name in ("indexer-failure-modes", "indexer-edge"):
        assert {case.values for case in ours[name]} == set(VALUES), name
        assert {case.weights for case in ours[name]} == set(WEIGHTS), name
    assert {case.ties for case in ours["indexer-edge"]} == set(TIES) and {case.scales for case in ours["indexer-edge"]} == set(SCALES)
    small = 4e10  # FLOPs of a launch: a second of one CPU core
    assert max(case.work for case in ours["indexer-edge"]) < small and max(case.work for case in ours["smoke"]) < small / 16


def test_override_keeps_to_what_is_allowed() -> None:
    assert override(parse_case("indexer_topk:requests=2/9"), "topk=512,h=64") == IndexerTopkCase(requests="2/9", topk=512, h=64)
    with pytest.raises(CaseError, match="values=shifted needs two"):
        override(parse_case("indexer_topk:requests=2/9"), "values=shifted")
