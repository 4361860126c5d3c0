"""Comparing tensors, naming where they differ, and holding a kernel to what it promises when it skips."""
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arms.kernel import BITWISE, Outputs, SkipPromise
from harness import checks
from harness.compare import bits_differ, margin, ulp_distance, ulp_histogram, values_differ
from harness.locate.localise import Rows, best_fit, describe_rows, explain, localise, ranges
from harness.verdicts import Check, Verdict

INF, NAN = math.inf, math.nan
BF16, FP32 = torch.bfloat16, torch.float32


def values(*numbers: float, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


# --- comparing --------------------------------------------------------------------------------------------------------


def test_values_and_bits() -> None:
    a, b = values(0.0, NAN, NAN, INF, INF, 1.0), values(-0.0, NAN, 1.0, INF, -INF, 1.0)
    assert values_differ(a, b).tolist() == [False, False, True, False, True, False]
    assert bits_differ(a, b).tolist() == [True, False, True, False, True, False]
    other_nan = torch.tensor([0x7FC1], dtype=torch.int16).view(BF16)
    assert bits_differ(values(NAN, dtype=BF16), other_nan).tolist() == [True]
    assert values_differ(values(NAN, dtype=BF16), other_nan).tolist() == [False]
    assert bits_differ(torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(2, 3).T).sum() == 0  # not contiguous


@pytest.mark.parametrize(("a", "b", "distance"), [
    (1.0, 1.0, 0), (1.0, 1.0078125, 1), (1.0, 0.99609375, 1), (-1.0, -1.0078125, 1), (1.0, 2.0, 128), (0.0, -0.0, 0),
    (2.0**-133, -(2.0**-133), 2), (2.0**-133, 0.0, 1), (2.0**-133, -0.0, 1), (-(2.0**-126), 2.0**-126, 256)])
def test_ulp_distance_of_bf16(a: float, b: float, distance: int) -> None:
    assert ulp_distance(values(a, dtype=BF16), values(b, dtype=BF16)).tolist() == [distance]
    assert ulp_distance(values(b, dtype=BF16), values(a, dtype=BF16)).tolist() == [distance]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 1000))
def test_ulp_distance_counts_steps_of_nextafter(start: float, steps: int) -> None:
    here = values(start)
    for _ in range(min(steps, 40)):
        here = torch.nextafter(here, values(INF))
    if math.isfinite(float(here)):
        assert ulp_distance(values(start), here).tolist() == [min(steps, 40)]


def test_histogram_counts_only_the_bad_by_distance() -> None:
    right = torch.ones(12, dtype=BF16)
    steps = torch.tensor([0, 1, 1, 2, 3, 4, 5, 9, 16, 17, 0, 0], dtype=torch.int16)
    left = (right.view(torch.int16) + steps).view(BF16)
    left[10], left[11] = NAN, INF
    bad = values_differ(left, right)
    assert int(bad.sum()) == 11
    assert ulp_histogram(left, right, bad) == {"1": 2, "2": 1, "3-4": 2, "5-8": 1, "9-16": 2, "more": 1, "not finite": 2}
    assert ulp_histogram(left, right, bad & (torch.arange(12) == 3)) == {"2": 1}


def test_margin() -> None:
    want = values(1.0, 1.0, 1.0, INF, INF, 1.0, NAN, NAN, 0.0, 0.0, 1.0)
    got = values(1.0, 1.5, 2.0, INF, -INF, NAN, 1.0, NAN, -0.0, 1.0, INF)
    budget = values(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, INF)
    assert margin(got, want, budget).tolist() == [0.0, 1.0, 2.0, 0.0, INF, INF, INF, 0.0, 0.0, INF, INF]


def test_margin_is_taken_in_the_references_precision() -> None:
    """1 + 2^-40 is not 1, though fp32 cannot tell."""
    assert float(margin(values(1.0), torch.tensor([1 + 2.0**-40], dtype=torch.float64), torch.tensor([2.0**-40]).double())) == 1.0


# --- localising -------------------------------------------------------------------------------------------------------


def rows_with(lengths: list[int], topk: int = 512, counting: list[int] | None = None, holes: list[bool] | None = None) -> Rows:
    counted = torch.tensor(counting or lengths)
    return Rows(torch.tensor(lengths), counted, topk, torch.tensor(holes or [False] * len(lengths)))


LENGTHS = [512, 128, 100, 256, 300, 384, 500, 64, 512, 130, 320, 512]
PLANTED = {
    "rows whose length is no multiple of 128 (partial pair)": [2, 4, 6, 7, 9, 10],
    "rows whose length is no multiple of 64 (partial block)": [2, 4, 6, 9],
    "rows where a 128-key pair is skipped": [1, 2, 3, 4, 5, 7, 9, 10],
    "rows that end before topk (topk_length < topk)": [1, 2, 3, 4, 5, 6, 7, 9, 10],
    "rows longer than 256": [0, 4, 5, 6, 8, 10, 11],
    "rows with an odd number of 64-key blocks": [4, 7, 9, 10],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_boundary_is_named(name: str) -> None:
    bad = torch.zeros(12, 4, 512, dtype=torch.bool)
    bad[PLANTED[name], 1:3, 256:] = True
    lines = localise(bad, rows_with(LENGTHS))
    assert lines[1:] == ["heads 1..2 (2 of 4)", "columns 256..511 (256 of 512)",
                         f"pattern: {name}; it explains 100% of the bad rows, 100% overlap"]
    assert lines[0].startswith("rows ") and lines[0].endswith(f"({len(PLANTED[name])} of 12)")


def test_rows_without_a_key_and_rows_with_a_hole_are_named() -> None:
    rows = rows_with([512] * 6, counting=[512, 0, 500, 0, 400, 512], holes=[False, False, True, False, True, False])
    assert explain(torch.tensor([False, True, False, True, False, False]), rows).startswith("pattern: rows without a valid key;")
    assert explain(torch.tensor([False, False, True, False, True, False]), rows).startswith("pattern: rows with a hole;")


def test_a_boundary_that_explains_most_is_named_with_its_share() -> None:
    bad = torch.zeros(12, dtype=torch.bool)
    bad[[2, 4, 6, 9, 0]] = True  # the partial blocks, and one more
    assert explain(bad, rows_with(LENGTHS)) == ("pattern: rows whose length is no multiple of 64 (partial block); "
                                                "it explains 80% of the bad rows, 80% overlap")


def test_borders_between_rows_by_number_must_fit_well() -> None:
    """On a few rows one of them fits nearly anything by half."""
    rows = rows_with([512] * 12)
    bad = torch.arange(12) >= 8
    assert explain(bad, rows) == "pattern: rows from 8 on; it explains 100% of the bad rows, 100% overlap"
    assert explain(torch.arange(12) == 0, rows).startswith("pattern: the first row;")
    assert explain(torch.arange(12) % 2 == 1, rows).startswith("pattern: every other row, from row 1;")
    assert explain(torch.tensor([False, True, False, True] * 2 + [True, False, False, False]), rows) == ""


def test_masked_entries_and_wild_indices_make_rows_of_their_own() -> None:
    entries = torch.tensor([[1, 2, 3, -1], [1, 2, 9, 3], [1, 2, 3, 4], [-1, 1, 2, 3], [1, 2, 3, 4]])
    counts = (entries >= 0) & (entries < 5)
    rows = describe_rows(torch.tensor([3, 4, 4, 4, 2]), counts, torch.tensor([3, 4, 4, 4, 4]), entries)
    assert rows.has_pads is not None and rows.has_pads.tolist() == [False, True, False, True, False]
    assert rows.has_outside is not None and rows.has_outside.tolist() == [False, True, False, False, False]
    assert explain(torch.tensor([False, True, False, True, False]), rows).startswith("pattern: rows with a hole;")
    assert explain(rows.has_outside, rows).startswith("pattern: rows with an index that is no key before the length;")


def test_a_border_of_heads_or_columns_is_named_where_ranges_do_not_show_it() -> None:
    bad = torch.zeros(3, 128, 512, dtype=torch.bool)
    bad[:, 64:, 256:] = True
    bad[:, 70] = bad[:, 99] = False
    bad[..., 300] = False
    lines = localise(bad, rows_with([512] * 3))
    assert lines[1:] == ["heads 64..69, 71..98, 100..127 (62 of 128)",
                         "pattern: heads from 64 on; it explains 100% of the bad heads, 97% overlap",
                         "columns 256..299, 301..511 (255 of 512)",
                         "pattern: columns from 256 on; it explains 100% of the bad columns, 100% overlap"]


def test_a_set_that_holds_everything_is_no_border() -> None:
    bad = torch.arange(8) < 3
    assert best_fit(bad, {"everything": torch.ones(8, dtype=torch.bool)}, least=0.3) == ""
    assert best_fit(bad, {"everything": torch.ones(8, dtype=torch.bool), "a third": bad & ~bad.roll(1)}, least=0.3, what="things") == (
        "pattern: a third; it explains 33% of the things, 33% overlap")


def test_a_border_separates() -> None:
    """511 of 512 columns are bad, on both sides of any border; or fewer are, and most of what is before the border as well."""
    bad = torch.ones(2, 4, 512, dtype=torch.bool)
    bad[..., 100] = False
    assert localise(bad, rows_with([512] * 2))[2:] == ["columns 0..99, 101..511 (511 of 512)"]
    number = torch.arange(40)
    behind, most = number >= 8, (number >= 8) | (number < 6)
    assert best_fit(behind, {"from 8 on": behind}).startswith("pattern: from 8 on;")
    assert best_fit(most & (number < 36), {"from 8 on": behind}) == ""
    assert best_fit((behind | (number == 1)) & (number < 36), {"from 8 on": behind}).startswith("pattern: from 8 on;")
    assert best_fit(number > 3, {"from 4 on": number > 3}).startswith("pattern: ") and best_fit(number > 2, {"from 3 on": number > 2}) == ""


def test_nothing_is_claimed_where_no_boundary_fits_or_every_row_is_bad() -> None:
    one = torch.zeros(12, dtype=torch.bool)
    one[8] = True
    assert explain(one, rows_with(LENGTHS)) == ""
    assert localise(torch.ones(12, 4, dtype=torch.bool), rows_with(LENGTHS)) == ["rows all 12", "heads all 4"]


def test_ranges() -> None:
    mask = torch.zeros(20, dtype=torch.bool)
    mask[[0, 3, 4, 5, 9, 11, 13, 15, 19]] = True
    assert ranges(mask) == "0, 3..5, 9, 11, 3 more ranges (9 of 20)"
    assert ranges(mask[:6]) == "0, 3..5 (4 of 6)"
    assert ranges(torch.ones(3, dtype=torch.bool)) == "all 3"


# --- the promise of a kernel that skips -------------------------------------------------------------------------------

PROMISE = SkipPromise(max_ulp=1, columns=(256, 512), max_share=0.25, none_nearer_zero=True)
SKIPS = torch.tensor([False, True, True, False])


def outputs() -> Outputs:
    """out of both signs, away from zero; the arm that walks everything."""
    out = torch.linspace(-3, 3, 4 * 2 * 512).view(4, 2, 512).bfloat16()
    return out, torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2) + 1


def further(out: torch.Tensor, at: object, steps: int = 1) -> torch.Tensor:
    """A copy of out with some elements `steps` ULP further from zero."""
    moved = out.clone()
    moved[at] = (moved[at].view(torch.int16) + steps).view(BF16)
    return moved


def judged(skipped: Outputs, promise: SkipPromise = PROMISE) -> Check:
    return checks.skipping("none-vs-backscan", skipped, outputs(), SKIPS, promise, rows_with([512, 100, 256, 512]),
                           ("kernel/backscan", "kernel/none"))


def test_equal_arms_pass_whatever_the_promise() -> None:
    for promise in (PROMISE, BITWISE):
        check = judged(outputs(), promise)
        assert check.verdict is Verdict.PASSED
        assert check.detail == "2 of 4 rows skip a pair; bitwise equal: out, max_logits, lse"


def test_within_the_promise_passes_and_says_how_much() -> None:
    out, max_logits, lse = outputs()
    check = judged((further(out, (slice(1, 3), slice(None), slice(256, 300))), max_logits, lse))
    assert check.verdict is Verdict.PASSED
    assert "17.1875% of 1024 elements" in check.detail and "within the promise (1 bf16 ULP, columns 256..511" in check.detail
    assert check.bad == 176 and check.ulp == {"1": 176}


def test_the_share_is_one_of_a_sample_and_may_exceed_by_its_spread() -> None:
    assert PROMISE.allowance(1024) == 256 + 8 * 16 and BITWISE.allowance(1024) == 0
    assert judged(moved((slice(1, 3), slice(None), slice(256, 352)))).verdict is Verdict.PASSED  # 384 elements
    assert judged(moved((slice(1, 3), slice(None), slice(256, 353)))).verdict is Verdict.FAILED


def test_a_bitwise_promise_allows_nothing() -> None:
    out, max_logits, lse = outputs()
    check = judged((further(out, (1, 0, 300)), max_logits, lse), BITWISE)
    assert check.verdict is Verdict.FAILED and check.bad == 1
    assert check.first[0].startswith("[1, 0, 300]  kernel/none ")


def moved(at: object, steps: int = 1) -> Outputs:
    out, max_logits, lse = outputs()
    return further(out, at, steps), max_logits, lse


def with_statistic(which: int) -> Outputs:
    changed = list(moved((1, 0, 300)))
    changed[which] = torch.nextafter(changed[which], torch.tensor(INF))
    return changed[0], changed[1], changed[2]


BROKEN_PROMISES = {
    "2 ULP": (moved((1, 0, 300), 2), "more than 1 ULP"),
    "nearer zero": (moved((1, 0, 300), -1), "kernel/none is not the one nearer zero"),
    "wrong columns": (moved((1, 0, 255)), "elements outside the promised rows and columns"),
    "a row that skips nothing": (moved((3, 0, 300)), "elements outside the promised rows and columns"),
    "share exceeded": (moved((slice(1, 3), slice(None), slice(256, 420))), "more than 25.00% of the promised columns"),
    "max_logits": (with_statistic(1), "lse or max_logits differ"),
    "lse": (with_statistic(2), "lse or max_logits differ"),
}


@pytest.mark.parametrize("name", BROKEN_PROMISES)
def test_each_rule_of_the_promise_is_named_alone_when_it_is_broken(name: str) -> None:
    skipped, rule = BROKEN_PROMISES[name]
    check = judged(skipped)
    assert check.verdict is Verdict.FAILED
    assert check.detail.endswith(f"promise broken: {rule}")


def test_nan_on_one_side_breaks_the_promise() -> None:
    skipped = outputs()
    skipped[0][1, 0, 300] = NAN
    check = judged(skipped)
    assert check.verdict is Verdict.FAILED and "more than 1 ULP" in check.detail
    assert check.ulp == {"not finite": 1}


def test_same_tells_outputs_apart_and_bits_from_values() -> None:
    rows = rows_with([512] * 4)
    left, right = outputs(), outputs()
    left[2][3, 1] += 1
    check = checks.same("written", left, right, rows, ("a", "b"))
    assert check.verdict is Verdict.FAILED and check.detail == "lse differs in 1 of 8; equal: out, max_logits"
    left, right = outputs(), outputs()
    left[0][0, 0, 0], right[0][0, 0, 0] = 0.0, -0.0
    assert checks.same("written", left, right, rows, ("a", "b")).verdict is Verdict.PASSED
    assert checks.same("run-to-run", left, right, rows, ("a", "b"), Verdict.FLAKY, bits=True).verdict is Verdict.FLAKY
