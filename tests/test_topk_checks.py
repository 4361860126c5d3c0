"""The checks on a choice of keys, on scores written by hand: what they accept, what they fail, where they have nothing to say."""
from __future__ import annotations

import math

import pytest
import torch

from arms.topk import TopkResult
from harness import topk_checks as checks
from harness import topk_relations as relations
from harness import topk_sets
from harness.locate.topk_localise import Windows, localise_members
from harness.topk_memory import LiveStorages, Meter
from harness.topk_sets import Band, Tally, compare, tally
from harness.verdicts import Check, Verdict

INF, NAN = math.inf, math.nan


class Rows:
    """Some rows of scores over the same keys, and what follows from them."""

    def __init__(self, scores: list[list[float]], topk: int, eps: float = 0.0, windows: list[tuple[int, int]] | None = None) -> None:
        self.scores, self.topk = torch.tensor(scores), topk
        keys = self.scores.shape[1]
        spans = windows or [(0, keys)] * len(scores)
        ks, ke = (torch.tensor(x, dtype=torch.int32) for x in zip(*spans))
        inside = topk_sets.windows(ks, ke, keys)
        self.valid = (inside & ~self.scores.isnan()).sum(1)
        self.count = self.valid.clamp(max=topk)
        ranked = self.scores.masked_fill(~inside | self.scores.isnan(), -INF).sort(1, descending=True).values
        kth = torch.where(self.count > 0, ranked.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0], INF)
        self.band = Band(lambda row0, row1: self.scores[row0:row1], kth, torch.full_like(kth, eps), ks, ke, keys)
        self.windows = Windows(ks.long(), ke.long(), topk, ((0, len(scores), 0, keys),))
        self.judged = torch.ones(len(scores), dtype=torch.bool)

    def tally(self, indices: list[list[int]]) -> Tally:
        return tally(torch.tensor(indices, dtype=torch.int32), self.band)

    def members(self, indices: list[list[int]]) -> Check | None:
        chosen = torch.tensor(indices, dtype=torch.int32)
        return checks.members(tally(chosen, self.band), chosen, self.band, self.judged, self.valid > self.topk, self.windows)

    def shape(self, indices: list[list[int]]) -> Check:
        return checks.shape(torch.tensor(indices, dtype=torch.int32), self.count, self.judged, self.windows, self.band)[0]


# --- shape ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "problem"), [
    ([2, 1, -1], ""), ([1, 2, -1], ""), ([1, -1, -1], "not min(topk, valid) keys"), ([1, 2, 3], "not min(topk, valid) keys"),
    ([-1, 1, 2], "a pad before a key"), ([1, 2, -2], "a pad that is not -1"), ([1, 1, -1], "a key twice"),
    ([0, 1, -1], "a key outside [ks, ke)"), ([1, 3, -1], "a key outside [ks, ke)"), ([2, 1 << 30, -1], "a key outside [ks, ke)")])
def test_shape_names_what_is_wrong(line: list[int], problem: str) -> None:
    check = Rows([[9.0, 1.0, 2.0, 8.0]], 3, windows=[(1, 3)]).shape([line])
    assert (check.verdict is Verdict.FAILED) == bool(problem) and problem in check.detail
    assert len(check.first) == bool(problem)


def test_an_empty_row_names_nothing_and_a_nan_is_no_valid_key() -> None:
    rows = Rows([[1.0, NAN, 2.0], [1.0, 2.0, 3.0]], 3, windows=[(0, 3), (2, 2)])
    assert rows.shape([[2, 0, -1], [-1, -1, -1]]).verdict is Verdict.PASSED
    assert rows.shape([[2, 0, 1], [-1, -1, -1]]).verdict is Verdict.FAILED


# --- set --------------------------------------------------------------------------------------------------------------

LADDER = [[5.0, 4.0, 3.0, 2.0, 1.0]]


@pytest.mark.parametrize(("chosen", "dropped", "extra", "deficit"), [
    ([0, 1], 0, 0, 0.0), ([1, 0], 0, 0, 0.0), ([0, 2], 0, 1, 1.0), ([3, 4], 1, 2, 3.0), ([0, -1], 0, 0, 0.0), ([4, -1], 1, 1, 3.0)])
def test_without_a_margin_dropped_and_extra_members_are_counted(chosen: list[int], dropped: int, extra: int, deficit: float) -> None:
    """The k-th itself, 4.0, is nobody's member to drop: a row short of it is the shape check's."""
    found = Rows(LADDER, 2).tally([chosen])
    assert (int(found.dropped), int(found.extra), float(found.deficit)) == (dropped, extra, deficit)
    assert int(found.hits) == len({0, 1} & set(chosen))


def test_keys_within_the_margin_may_stand_for_each_other_and_no_others() -> None:
    rows = Rows(LADDER, 2, eps=1.0)
    assert all(check is not None and check.verdict is Verdict.PASSED for check in (rows.members([[1, 2]]), rows.members([[0, 2]])))
    check = rows.members([[0, 3]])
    assert check is not None and check.verdict is Verdict.FAILED and check.margins["worst chosen"] == 2.0
    assert "0 members dropped, 1 that do not belong, value deficit 2" in check.detail and "do not belong" in check.where[-1]
    right = rows.members([[0, 2]])
    assert right is not None and right.margins == {"best left out": 0.0, "worst chosen": 1.0}


def test_ties_of_the_kth_are_free() -> None:
    rows = Rows([[7.0, 3.0, 3.0, 3.0, 1.0]], 2)
    assert all(rows.members([[0, key]]).verdict is Verdict.PASSED for key in (1, 2, 3))  # type: ignore[union-attr]
    assert rows.members([[1, 2]]).verdict is Verdict.FAILED  # type: ignore[union-attr]


def test_infinities_have_their_order() -> None:
    """+inf is best and ties with itself, -inf is valid and last, in and out of a band of a finite k-th."""
    best = Rows([[INF, INF, INF, 5.0]], 2)
    assert best.members([[2, 0]]).verdict is Verdict.PASSED  # type: ignore[union-attr]
    assert best.members([[2, 3]]).verdict is Verdict.FAILED  # type: ignore[union-attr]
    last = Rows([[-INF, -INF, 5.0, -INF]], 2)
    assert last.members([[2, 3]]).verdict is Verdict.PASSED  # type: ignore[union-attr]
    assert last.members([[0, 3]]).verdict is Verdict.FAILED  # type: ignore[union-attr]
    finite = Rows([[INF, 1.0, -INF, 0.0]], 2)
    assert float(finite.tally([[1, 2]]).deficit) == INF and int(finite.tally([[1, 2]]).dropped) == 1


def test_a_nan_is_never_a_member() -> None:
    rows = Rows([[NAN, 4.0, 3.0, NAN, 1.0]], 2)
    found = rows.tally([[0, 1]])
    assert (int(found.nan), bool(found.wrong), bool(found.unread)) == (1, True, True)
    check = checks.nan_chosen(found, rows.judged, rows.windows)
    assert check is not None and check.verdict is Verdict.FAILED
    assert checks.nan_chosen(rows.tally([[2, 1]]), rows.judged, rows.windows).verdict is Verdict.PASSED  # type: ignore[union-attr]
    assert checks.nan_chosen(Rows(LADDER, 2).tally([[0, 1]]), rows.judged, rows.windows) is None


@pytest.mark.parametrize(("scores", "topk", "eps", "verdict"), [
    (LADDER, 5, 0.0, None),  # every valid key is chosen
    ([[3.0, 3.0, 3.0]], 2, 0.0, None), ([[3.0, 3.0, NAN]], 1, 0.5, None), ([[INF, INF, INF]], 2, 0.0, None),  # all tie
    ([[1.0, 1 + 2.0**-20, 1 + 2.0**-19]], 2, 1e-3, None),  # a few ULPs apart, and the margin is more
    ([[1.0, 1 + 2.0**-20, 1 + 2.0**-19]], 2, 0.0, Verdict.PASSED),  # the same where scores are exact: they decide
    (LADDER, 2, 9.0, Verdict.VACUOUS),  # the margin covers scores that differ
    ([[3.0, 3.0, 3.0, 3.0, 3.0], [5.0, 4.0, 3.0, 2.0, 1.0]], 2, 2.5, Verdict.PASSED), ([[1.0, 2.0, -INF]], 2, 9.0, Verdict.PASSED)])
def test_no_check_where_nothing_can_be_chosen_and_vacuous_where_the_margin_hides_it(
        scores: list[list[float]], topk: int, eps: float, verdict: Verdict | None) -> None:
    rows = Rows(scores, topk, eps)
    best = rows.scores.nan_to_num(nan=-INF).topk(min(topk, rows.scores.shape[1]), dim=1).indices
    check = rows.members([line[: int(n)] + [-1] * (topk - int(n)) for line, n in zip(best.tolist(), rows.count)])
    assert (check and check.verdict) is verdict


def test_rows_that_the_arm_gives_up_are_left_to_status() -> None:
    rows = Rows([*LADDER, *LADDER], 2)
    rows.judged[0] = False
    assert rows.shape([[-1, -1], [0, 1]]).verdict is rows.members([[-1, -1], [0, 1]]).verdict is Verdict.PASSED  # type: ignore[union-attr]


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_chunks_change_nothing_and_no_more_than_a_chunk_is_scored(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(10, 40, generator=generator)
    rows = Rows(scores.tolist(), 5, eps=0.05)
    indices = torch.randint(40, (10, 5), generator=generator, dtype=torch.int32)
    whole = tally(indices, rows.band)
    asked: list[int] = []

    def counted(row0: int, row1: int) -> torch.Tensor:
        asked.append(row1 - row0)
        return scores[row0:row1]

    monkeypatch.setattr(topk_sets, "ELEMENTS", {"cpu": rows_at_once * 40})
    monkeypatch.setattr(topk_sets, "BLOCK", {"cpu": 1})
    part = tally(indices, Band(counted, rows.band.kth, rows.band.eps, rows.band.ks, rows.band.ke, 40))
    assert max(asked) == rows_at_once and sum(asked) == 10
    assert all(torch.equal(a, b) for a, b in zip(vars(whole).values(), vars(part).values()))


# --- own scores, values, status ---------------------------------------------------------------------------------------


def result_of(indices: list[list[int]], logits: torch.Tensor | None = None, values: list[list[float]] | None = None,
              status: list[int] | None = None) -> TopkResult:
    return TopkResult(torch.tensor(indices, dtype=torch.int32), None if values is None else torch.tensor(values),
                      None if status is None else torch.tensor(status, dtype=torch.int32),
                      None if logits is None else lambda row0, row1: logits[row0:row1])


@pytest.mark.parametrize(("chosen", "own", "verdict"), [
    ([0, 1], [5.0, 4.0, 3.0, 2.0, 1.0], Verdict.PASSED), ([0, 2], [5.0, 4.0, 4.0, 2.0, 1.0], Verdict.PASSED),
    ([0, 1], [5.0, 4.0, 4.0000005, 2.0, 1.0], Verdict.FAILED),  # one ULP: whatever the margin of the reference
    ([0, 1], [5.0, 4.0, NAN, 2.0, 1.0], Verdict.PASSED), ([0, 2], [5.0, 4.0, NAN, 2.0, 1.0], Verdict.FAILED)])
def test_a_choice_is_exact_by_its_own_scores(chosen: list[int], own: list[float], verdict: Verdict) -> None:
    rows = Rows(LADDER, 2, eps=9.0)
    found = checks.own_scores(result_of([chosen], torch.tensor([own])), rows.judged, rows.windows, rows.band)
    assert found.check is not None and found.check.verdict is verdict and bool(found.wrong) == (verdict is Verdict.FAILED)


def test_own_scores_outside_the_window_do_not_count_and_a_row_that_leaves_nothing_out_says_nothing() -> None:
    rows = Rows(LADDER, 2, windows=[(2, 4)])
    own = torch.tensor([[99.0, 99.0, 3.0, 2.0, 99.0]])
    assert checks.own_scores(result_of([[2, 3]], own), rows.judged, rows.windows, rows.band).check is None
    assert checks.own_scores(result_of([[2, 3]]), rows.judged, rows.windows, rows.band).check is None


def values_check(values: list[float], own: list[float] | None, bound: float, want: list[float] | None = None) -> Check | None:
    rows = Rows([[*(want or [5.0, 4.0]), 3.0, 2.0, 1.0]], 2)
    given = result_of([[0, 1]], values=[values])
    return checks.values(given, tally(given.indices, rows.band).scores, None if own is None else torch.tensor([own]),
                         lambda row0, row1, index: torch.full(index.shape, bound), rows.windows, rows.band)


@pytest.mark.parametrize(("values", "own", "bound", "verdict"), [
    ([5.0, 4.0], None, 0.0, Verdict.PASSED), ([5.0, 4.0], [5.0, 4.0], 0.0, Verdict.PASSED), ([5.1, 4.0], None, 0.2, Verdict.PASSED),
    ([5.1, 4.0], None, 0.05, Verdict.FAILED), ([5.0, NAN], None, 1.0, Verdict.FAILED), ([4.0, 5.0], None, 0.5, Verdict.FAILED),
    ([5.0, 4.0], [5.0, 4.0000005], 1.0, Verdict.FAILED), ([5.0, 4.0], None, 6.0, Verdict.VACUOUS)])
def test_values_are_the_scores_of_their_keys(values: list[float], own: list[float] | None, bound: float, verdict: Verdict) -> None:
    check = values_check(values, own, bound)
    assert check is not None and check.verdict is verdict


def test_infinite_values_must_coincide() -> None:
    assert values_check([INF, 4.0], None, 0.5, [INF, 4.0]).verdict is Verdict.PASSED  # type: ignore[union-attr]
    assert values_check([1e38, 4.0], None, 0.5, [INF, 4.0]).verdict is Verdict.FAILED  # type: ignore[union-attr]


@pytest.mark.parametrize(("indices", "status", "wrong", "says"), [
    ([[0], [0]], [0, 2], [False, False], ""), ([[0], [0]], [0, 1], [False, True], "1 rows certified though wrong"),
    ([[0], [-1]], [0, 3], [False, False], "1 rows given up (status failed)"), ([[0], [2]], [0, 3], [False, False], "yet with keys"),
    ([[0], [0]], [0, 4], [False, False], "outside 0..3"), ([[0], [0]], [-1, 0], [False, False], "outside 0..3")])
def test_status_agrees_with_the_choice(indices: list[list[int]], status: list[int], wrong: list[bool], says: str) -> None:
    check = relations.status(result_of(indices, status=status), torch.tensor(wrong), Rows(LADDER * 2, 1).windows)
    assert check is not None and (check.verdict is Verdict.FAILED) == bool(says) and says in check.detail


# --- two choices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b", "moved", "keys", "far"), [
    ([0, 1], [0, 1], 0, 0, False), ([0, 1], [1, 0], 1, 0, False), ([0, 1], [0, 2], 0, 2, False), ([0, 1], [0, 3], 0, 2, True),
    ([0, 1], [0, -1], 0, 1, True), ([0, 1], [0, 99], 0, 1, True), ([0, -1], [0, 2147483647], 0, 0, True), ([0, 0], [0, -1], 0, 0, True)])
def test_two_choices_may_differ_in_order_and_within_the_margin(a: list[int], b: list[int], moved: int, keys: int, far: bool) -> None:
    rows = Rows([[5.0, 4.0, 3.9, 2.0, 1.0]], 2, eps=0.2)
    found = compare(torch.tensor([a], dtype=torch.int32), torch.tensor([b], dtype=torch.int32), rows.band, ("A", "B"))
    assert (found.moved, found.keys, bool(found.far), bool(found.first)) == (moved, keys, far, far)


def test_a_difference_is_told_with_both_keys() -> None:
    rows = Rows(LADDER, 2)
    check = relations.same_choice("run-to-run", result_of([[0, 3]]), result_of([[0, 1]]), rows.band, rows.windows,
                                  ("launch 3", "launch 1"), Verdict.FLAKY)
    assert check.verdict is Verdict.FLAKY and check.first == ["[row 0, key 3 = ks + 3] score 2, k-th 4, margin 0: only in launch 3"]
    check = relations.same_choice("run-to-run", result_of([[1, 0]], values=[[4.0, 5.5]]), result_of([[0, 1]], values=[[5.0, 4.0]]),
                                  rows.band, rows.windows, ("a", "b"))
    assert check.verdict is Verdict.PASSED
    assert check.detail == "the same keys but for ties and margins: 1 rows in another order; the arm's own values differ in 1 rows"


def test_a_band_around_an_arm_is_made_of_its_own_scores() -> None:
    rows = Rows([[5.0, 4.0, 3.0, 2.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]], 2)
    own = rows.scores + 10
    dense = result_of([[0, 1], [-1, -1]], own, [[15.0, 14.0], [0.0, 0.0]])
    band = relations.band_of_arm(dense, rows.band, torch.tensor([0.5, 0.5]))
    assert band.kth.tolist() == [14.0, INF] and torch.equal(band.scores(0, 2), own)
    check, keys = relations.dense_vs_litetopk(result_of([[0, 2], [-1, -1]]), dense, band, rows.windows)
    assert check.verdict is Verdict.FAILED and keys == 2
    check, keys = relations.dense_vs_litetopk(result_of([[1, 0], [-1, -1]]), dense, band, rows.windows)
    assert (check.verdict, check.detail, keys) == (Verdict.PASSED, "the same keys in every row", 0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_meter_counts_what_is_held_at_once_with_what_was_kept() -> None:
    given, kept = torch.zeros(1000), []
    meter = Meter(torch.device("cpu"), [given])

    def prepare() -> torch.Tensor:
        return given.view(10, 100)[2:]  # a view of an input is no memory

    def launch() -> torch.Tensor:
        if not kept:
            kept.append(torch.empty(500))
        first = given * 2
        second = first + 1
        del first
        return second[:10].clone()

    assert meter.watch(prepare)[1] == 0
    assert meter.watch(launch)[1] == 4 * (500 + 2000)
    result, peak = meter.watch(launch)
    assert peak == 4 * (500 + 2000) and result.shape == (10,)  # the workspace of the first launch is there still


def test_storages_of_views_and_in_place_operations_count_once() -> None:
    with LiveStorages([]) as live:
        x = torch.zeros(100)
        x[3:].add_(1).mul_(2)
        y = x.t()
        del x
        assert (live.now, live.peak) == (400, 400)
        del y
        assert live.now == 0


def test_a_bound_is_judged_where_there_is_one() -> None:
    assert relations.memory(100, 1 << 62, 8, 8) is None
    assert relations.memory(100, 100, 8, 8).verdict is Verdict.PASSED  # type: ignore[union-attr]
    check = relations.memory(3 << 30, 1 << 30, 8192, 1 << 20)
    assert check is not None and check.verdict is Verdict.FAILED
    assert check.detail == "3 GiB at the peak, 1 GiB declared; all scores together are 32 GiB"


# --- where ------------------------------------------------------------------------------------------------------------

TWO = Windows(torch.tensor([0] * 4 + [1000] * 5), torch.tensor([997, 998, 999, 1000, 1196, 1197, 1198, 1199, 1200]), 64,
              ((0, 4, 0, 1000), (4, 9, 1000, 1200)))


@pytest.mark.parametrize(("rows", "pattern"), [
    ([4, 5, 6, 7, 8], "rows whose window begins after key 0"), ([8], "the last rows of the batch, past the last whole block of 4"),
    ([3, 8], "the last row of each request"), ([0, 4], "the first row of each request"), ([1, 3, 5, 7], "every other row")])
def test_bad_rows_are_named_by_the_border_that_fits(rows: list[int], pattern: str) -> None:
    bad = torch.zeros(9, dtype=torch.bool)
    bad[rows] = True
    assert f"pattern: {pattern}; it explains 100% of the bad rows, 100% overlap" in localise_members(bad, TWO)


@pytest.mark.parametrize(("row", "keys", "pattern"), [
    (4, [1000], "in the first key of the window"), (8, [1199], "in the last key of the window"), (0, [900, 950, 990], "partial tile"),
    (0, [3, 70, 128, 200], "before position 256"), (5, [3, 4], "outside the window")])
def test_bad_members_are_placed_in_their_windows(row: int, keys: list[int], pattern: str) -> None:
    bad = torch.zeros(9, dtype=torch.bool)
    bad[row] = True
    lines = localise_members(bad, TWO, {"dropped": torch.tensor([[row, key] for key in keys])})
    assert f"request {0 if row < 4 else 1} " in lines[1]
    assert any(line.startswith("pattern") and pattern in line for line in lines), lines


def test_a_border_that_half_of_the_keys_lie_behind_is_no_pattern() -> None:
    long, bad = Windows(torch.tensor([0]), torch.tensor([10000]), 64, ((0, 1, 0, 10000),)), torch.ones(1, dtype=torch.bool)
    last = localise_members(bad, long, {"dropped": torch.tensor([[0, key] for key in (8192, 8400, 9000, 9500)])})[-1]
    assert last == "pattern: 100% of them are at or past position 8192 of the window, where 18% of the keys are"
    assert not localise_members(bad, long, {"dropped": torch.tensor([[0, key] for key in (4096, 6000, 9000)])})[-1].startswith("pattern")
