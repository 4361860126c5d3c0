"""Variations of an indexer problem: each is a valid problem, and what is read back from it is the choice of the case itself."""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from topk_problems import best, problem, steered
from topk_trials import run_topk, topk_trial

from arms.broken.fault import FAULTS
from arms.dense import TopkWriter
from arms.kernel import KERNELS, Requires, load_package
from arms.scoring import Scorer
from arms.topk import TopkKernel, TopkProblem, TopkResult, check_problem, no_bound
from cases import IndexerTopkCase, parse_case
from cases.indexer_inputs import make_indexer_inputs
from harness import stress
from harness import topk_metamorphic as metamorphic
from harness.topk_junk import junk_of
from harness.topk_launches import beside_a_busy_stream, replayed_from_a_graph
from harness.topk_metamorphic import Variation, View, batch_split, doubles_exactly, enlarged, rows_permuted, turned, variations
from harness.topk_sets import Band
from harness.topk_trial import TopkRun, TopkTrial
from harness.verdicts import CUDA_CHECKS, Check, Verdict
from references.indexer_topk import topk_reference

load_package("arms.broken")

CASES = (
    "indexer_topk:requests=6/300+5/200,topk=64,weights=mixed",
    "indexer_topk:requests=3/90+1/70+4/150,topk=32,values=integer,weights=negative,window=full,pad_rows=3,pad_keys=9",
    "indexer_topk:requests=12/40+5/90,topk=32,empty=0.2,pad_rows=1",
    "indexer_topk:requests=7/400,topk=48,span=100,order=shuffled,values=plateau,share=0.9",
    "indexer_topk:requests=6/300,topk=64,values=nan",
    "indexer_topk:requests=1/50,topk=64")
NAMES = ["rows-permuted", "batch-split", "weights-scaled", "request-shifted", "request-duplicated", "keys-appended"]
ANY = Requires(heads=(32, 64))


def right(p: TopkProblem) -> TopkResult:
    """All scores at once, then a top-k. Checks its problem as a kernel would."""
    check_problem(p)
    scores = Scorer(p).masked(0, p.num_q)
    writer = TopkWriter(p, lambda row0, row1: scores[row0:row1])
    writer.choose(scores.clone(), 0)
    writer.finish()
    return TopkResult(writer.indices, writer.values)


def trial_of(text: str, requires: Requires = ANY, launch: object = right) -> TopkTrial:
    trial = topk_trial("torch_dense", text)
    trial.kernel = TopkKernel("made_up", lambda p: lambda: launch(p), requires, "litetopk", "fp32", no_bound, __file__,  # type: ignore[operator]
                              place_free=True)
    return trial


def all_variations(text: str, requires: Requires = ANY) -> list[Variation]:
    trial = trial_of(text)
    return list(variations(trial.problem, requires, trial.band, trial.expected.valid, trial._score_error))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, with NaN in the same places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def named(run: TopkRun) -> dict[str, Check]:
    return {check.name: check for check in run.checks}


@pytest.mark.parametrize("text", CASES)
def test_a_right_kernel_passes_every_variation_and_each_is_a_valid_problem(text: str) -> None:
    """`right` refuses what check_problem does."""
    trial = trial_of(text)
    run = trial.run("litetopk")
    assert {name: check.detail for name, check in named(run).items() if check.verdict is not Verdict.PASSED} == {}
    expected = [name for name in NAMES if name != "keys-appended" or "plateau" not in text]  # a k-th of 0 has no key below it
    if trial.problem.num_q == 1:
        expected = ["weights-scaled", "request-shifted", "request-duplicated"]
    assert [check.name for check in run.checks if check.name in NAMES] == expected and "not run" not in run.note


@pytest.mark.parametrize("text", CASES)
def test_the_case_is_read_back_key_by_key(text: str) -> None:
    """What stands for a row and a key holds the same query and key, and its window holds the same keys, but for those appended."""
    p = trial_of(text).problem
    for variation in all_variations(text):
        for view in variation.views:
            rows = (view.row >= 0).nonzero()[:, 0]
            place = view.row[rows]
            got = {name: torch.cat([getattr(part, name).view(torch.uint8) if name == "q_fp8" else getattr(part, name)
                                    for part in variation.problems]) for name in ("q_fp8", "weights", "ks", "ke")}
            assert torch.equal(got["q_fp8"][place], p.q_fp8.view(torch.uint8)[rows])
            assert same(got["weights"][place] * view.factor, p.weights[rows])
            if view.key is None:
                assert torch.equal(got["ks"][place], p.ks[rows]) and torch.equal(got["ke"][place], p.ke[rows])
                continue
            (part,), known = variation.problems, view.key >= 0
            for name in ("k_fp8", "kv_scale"):
                mine, theirs = (getattr(x, name).view(torch.uint8).view(x.s_kv, -1) for x in (part, p))
                assert torch.equal(mine[known], theirs[view.key[known].long()])
            for row, start, end in zip(rows.tolist(), got["ks"][place].tolist(), got["ke"][place].tolist()):
                keys = view.key[start:end]
                assert keys[keys >= 0].tolist() == list(range(int(p.ks[row]), int(p.ke[row]))), (view.name, row)
                assert view.name == "keys-appended" or bool((keys >= 0).all())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 65])
def test_rows_are_turned_round_and_change_places_with_odd_ones(count: int) -> None:
    order = turned(count)
    assert sorted(order.tolist()) == list(range(count))
    same_parity = int(((order - torch.arange(count)) % 2 == 0).sum())
    assert same_parity == count % 2  # one row of an odd number has to


def test_a_row_that_stands_alone_is_an_odd_one_and_padding_is_left_a_request() -> None:
    p = problem([(3, 40), (2, 50)], 8)
    one, alone, rest = batch_split(p).problems
    assert (one.num_q, alone.num_q, rest.num_q) == (1, 1, 3)
    assert one.requests == ((0, 1, 0, 40),) and rest.requests == ((0, 1, 0, 40), (1, 3, 40, 90))
    assert metamorphic.clipped(((0, 3, 0, 40), (3, 5, 40, 90)), 5, 7) == ((0, 0, 40, 90),)
    assert batch_split(problem([(1, 40)], 8)) == Variation() == rows_permuted(problem([(1, 40), (1, 50)], 8))


@pytest.mark.parametrize(("requires", "shifted", "reason"), [
    (Requires(requests_max=2), True, "request-duplicated: the kernel takes 2 request(s)"),
    (Requires(keys=(0, 600)), False, "the kernel takes up to 600 keys"),
    (Requires(keys_multiple=4), True, ""), (Requires(keys_multiple=100), True, "")])
def test_what_the_kernel_does_not_take_is_not_made_and_told(requires: Requires, shifted: bool, reason: str) -> None:
    text = CASES[0]
    sizes = [part.s_kv for variation in all_variations(text, requires) for part in variation.problems]
    assert all(size % requires.keys_multiple == 0 and size <= requires.keys[1] for size in sizes)
    trial = trial_of(text, dataclasses.replace(requires, heads=(32, 64)))
    run = trial.run("litetopk")
    assert ("request-shifted" in named(run)) is shifted
    assert ("request-duplicated" in named(run)) is not reason and (reason in run.note if reason else "not run" not in run.note)


def test_a_problem_that_would_be_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metamorphic.SCORES, "cpu", 1000)
    run = trial_of(CASES[0]).run("litetopk")
    assert not named(run).keys() & {"request-shifted", "request-duplicated", "keys-appended"}
    for name in ("request-shifted", "request-duplicated", "keys-appended"):
        assert f"not run: {name}: " in run.note
    assert "rows by" in run.note and "would be more than 1,000 scores" in run.note


def test_a_large_problem_may_not_grow_but_be_turned_round_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metamorphic.SCORES, "cpu", 1000)
    names = [view.name for variation in all_variations(CASES[0]) for view in variation.views]
    assert names == ["rows-permuted", "batch-split", "weights-scaled"]


# --- junk -------------------------------------------------------------------------------------------------------------


def band_of(scores: torch.Tensor, topk: int, eps: float = 0.0) -> tuple[TopkProblem, Band]:
    """One row that sees all of these scores, fp32 [s_kv]."""
    p = steered(scores, topk)
    kth = scores[best(scores, 0, len(scores), topk)].min()
    return p, Band(lambda row0, row1: scores[None], kth[None], torch.tensor([eps]), p.ks, p.ke, p.s_kv)


def error(row0: int, row1: int, indices: torch.Tensor) -> torch.Tensor:
    return torch.zeros(indices.shape)


@pytest.mark.parametrize(("low", "eps", "kind"), [
    (1.0, 0.0, "zeros"), (1.0, 1.5, "zeros"), (1.0, 2.0, None), (0.0, 0.0, None), (-100.0, 0.0, "heavy"), (-100.0, 200.0, None)])
def test_junk_is_below_the_kth_score_and_its_margin_or_not_made(low: float, eps: float, kind: str | None) -> None:
    """Scores low, low + 1, ...; all are chosen but the lowest."""
    p, band = band_of(low + torch.arange(20.0), 19, eps)
    if low == 0.0:
        band = dataclasses.replace(band, kth=torch.zeros(1))
    junk = junk_of(p, band, torch.tensor([20]), error)
    assert (junk is None) == (kind is None)
    if junk is not None:
        assert bool(junk.heavy) == (kind == "heavy")
        (new,) = metamorphic.keys_appended(p, ANY, junk).problems
        scores = Scorer(new).masked(0, 1)[0]
        added = torch.cat([scores[:67], scores[-67:]])
        assert bool((added < float(band.kth - band.eps)).all()) and bool((added == added[0]).all())
        assert (float(added[0]) == 0.0) == (kind == "zeros")


def test_no_junk_for_a_row_that_would_have_to_choose_it() -> None:
    p, band = band_of(1.0 + torch.arange(20.0), 25)
    assert junk_of(p, band, torch.tensor([20]), error) is None
    q, wide = band_of(1.0 + torch.arange(20.0), 20)
    assert junk_of(q, wide, torch.tensor([20]), error) is not None


def test_a_key_that_is_negative_in_some_rows_only_is_no_heavy_one() -> None:
    scores = -1.0 - torch.arange(20.0)
    p = steered(scores, 4, [(2, 20)])
    both = torch.stack([scores, torch.where(torch.arange(20) < 8, 0.5, scores)])
    band = Band(lambda row0, row1: both[row0:row1], torch.tensor([-4.0, -4.0]), torch.zeros(2), p.ks, p.ke, 20)
    assert junk_of(p, band, torch.tensor([19, 20]), error) is None


# --- exactness of doubling, values ------------------------------------------------------------------------------------


def test_doubling_is_only_judged_where_it_is_exact() -> None:
    p = problem([(2, 40)], 8)
    assert doubles_exactly(p)
    assert doubles_exactly(dataclasses.replace(p, kv_scale=torch.full((40,), torch.inf)))
    assert not doubles_exactly(dataclasses.replace(p, weights=p.weights * 2.0**100))
    assert not doubles_exactly(dataclasses.replace(p, kv_scale=p.kv_scale * 2.0**-80))
    assert doubles_exactly(dataclasses.replace(p, weights=p.weights * torch.inf))


def test_values_are_compared_bit_by_bit_only_for_a_kernel_that_promises_them() -> None:
    def rounds_odd_rows(p: TopkProblem) -> TopkResult:
        result = right(p)
        assert result.values is not None
        result.values[1::2] *= 1 + 2.0**-23
        return result

    trial = trial_of(CASES[0], launch=rounds_odd_rows)
    found = named(trial.run("litetopk"))["rows-permuted"]
    assert found.verdict is Verdict.FAILED and "promises" in found.detail and "value 0 from below" in found.first[0]
    trial = trial_of(CASES[0], launch=rounds_odd_rows)
    trial.kernel = dataclasses.replace(trial.kernel, place_free=False)
    found = named(trial.run("litetopk"))["rows-permuted"]
    assert found.verdict is Verdict.PASSED and "own values differ in 10 rows" in found.detail


def test_keys_from_elsewhere_are_no_keys_of_the_case() -> None:
    """In front, behind, pads, and what is no position at all."""
    key = torch.tensor([-2, -2, 0, 1, 2], dtype=torch.int32)
    view = View("request-shifted", torch.tensor([0]), key, "", "")
    launched, base = torch.tensor([[4, 1, -1, 7, 2]], dtype=torch.int32), TopkResult(torch.zeros(1, 5, dtype=torch.int32))
    got = metamorphic.seen(view, launched, None, base)
    assert got.indices.tolist() == [[2, -2, -1, -2, 0]]


def test_a_kernel_that_raises_on_a_variation_fails_its_checks_and_keeps_the_others() -> None:
    def no_single_row(p: TopkProblem) -> TopkResult:
        if p.num_q == 1:
            raise ValueError("one row is not supported")
        return right(p)

    run = trial_of(CASES[0], launch=no_single_row).run("litetopk")
    failed = {name: check.detail for name, check in named(run).items() if check.verdict is not Verdict.PASSED}
    assert list(failed) == ["batch-split"] and failed["batch-split"].endswith(
        "the kernel takes the case, but raises on this variation of it: ValueError: one row is not supported")


def test_more_launches_are_made_where_asked_for() -> None:
    trial = trial_of(CASES[0])
    trial.launches = 20
    assert named(trial.run("litetopk"))["run-to-run"].detail.startswith("22 launches, 20 of them back to back")


def test_a_right_kernel_is_the_same_between_guard_bands() -> None:
    check = named(run_topk("litetopk_torch", CASES[0]))["guards"]
    assert check.verdict is Verdict.PASSED and "bands around q_fp8, k_fp8, kv_scale, weights, ks, ke" in check.detail


def test_the_enlarged_problem_copies_the_shortest_request_that_has_a_choice() -> None:
    p = problem([(70, 90), (2, 50), (3, 20)], 32)
    (new,) = enlarged(p, ANY).problems
    assert new.requests[-1] == (75, 77, 179, 229) and new.requests[0] == (0, 70, 19, 109)
    many = problem([(70, 90)], 32)
    (new,) = enlarged(many, ANY).problems
    assert new.requests[-1] == (70, 134, 179, 269)  # its last 64 rows


# --- on CUDA, and what stands in for it ---------------------------------------------------------------------------------


def same_as(base: TopkResult) -> Callable[[str, TopkResult, str, Verdict], Check]:
    """A check that looks at the indices alone."""
    def same(name: str, got: TopkResult, where: str, verdict: Verdict) -> Check:
        return Check(name, Verdict.PASSED if torch.equal(got.indices, base.indices) else verdict, where)

    return same


def test_results_beside_a_busy_stream_are_each_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem([(3, 40)], 8)
    launches = itertools.count(1)

    def launch() -> torch.Tensor:
        indices = right(p).indices
        return indices.flip(0) if next(launches) == 3 else indices

    def while_busy(call: Callable[[], TopkResult], device: torch.device) -> tuple[list[TopkResult], int]:
        return [call() for _ in range(4)], 2

    monkeypatch.setattr(stress, "while_busy", while_busy)
    found = beside_a_busy_stream(launch, p, same_as(right(p)))
    assert found.verdict is Verdict.FLAKY and found.detail == "launch 3 beside a busy stream"
    found = beside_a_busy_stream(launch, p, same_as(right(p)))
    assert found.verdict is Verdict.PASSED and found.detail.startswith("4 launches, beside 2 of them a second stream was")


@pytest.mark.parametrize("stale", [False, True])
def test_a_graph_is_captured_on_other_numbers_and_replayed_on_the_case_s(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem([(3, 40)], 8)
    before, base = p.weights.clone(), right(p)

    def replayed(launch: Callable[[], TopkResult], update: Callable[[], None]) -> tuple[TopkResult, None]:
        captured = launch()
        assert torch.equal(p.weights, before.flip(0))
        update()
        return (captured if stale else launch()), None

    monkeypatch.setattr(stress, "replayed", replayed)
    found = replayed_from_a_graph(lambda: right(p), p, same_as(base), "")
    assert found.verdict is (Verdict.FAILED if stale else Verdict.PASSED) and torch.equal(p.weights, before)


def test_a_launch_that_cannot_be_captured_has_to_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(launch: object, update: object) -> None:
        raise stress.NotCaptured("RuntimeError: it waits")

    monkeypatch.setattr(stress, "replayed", replayed)
    p = problem([(3, 40)], 8)
    assert replayed_from_a_graph(lambda: right(p), p, same_as(right(p)), "it reads back") is None
    found = replayed_from_a_graph(lambda: right(p), p, same_as(right(p)), "")
    assert found.verdict is Verdict.FAILED and found.detail.endswith("which the kernel does not declare: RuntimeError: it waits")


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.family == "indexer_topk" and fault.check in CUDA_CHECKS])
def test_faults_that_need_a_gpu_are_caught_there(name: str) -> None:
    fault = FAULTS[name]
    case = parse_case(fault.case)
    assert isinstance(case, IndexerTopkCase)
    inputs = make_indexer_inputs(case, "cuda")
    kernel = KERNELS[name]
    trial = TopkTrial(kernel, inputs, topk_reference(inputs), inputs.digests(), lambda phase: None)  # type: ignore[arg-type]
    assert named(trial.run("litetopk"))[fault.check].verdict in (Verdict.FAILED, Verdict.FLAKY)
