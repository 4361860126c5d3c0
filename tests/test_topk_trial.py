"""A kernel taken through its checks: what is launched and when, what is refused, and that a right kernel of any manners passes."""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from topk_trials import run_topk, topk_expected, topk_inputs, topk_trial

from arms.dense import TopkWriter
from arms.kernel import KERNELS, load_package
from arms.scoring import Scorer
from arms.topk import TopkKernel, TopkLaunch, TopkProblem, TopkResult, check_problem, no_bound
from harness.topk_downstream import downstream
from harness.topk_inplace import margins
from harness.topk_sets import Band
from harness.topk_trial import REPEATS, TopkRun, TopkTrial, make_topk_problem
from harness.verdicts import Check, Verdict
from references.indexer_topk import topk_reference

load_package("arms.broken")

PLAIN = "indexer_topk:requests=6/300+5/200,topk=64,weights=mixed"
TIED = "indexer_topk:requests=6/300,topk=50,values=integer,ties=runs"
SHORT = "indexer_topk:requests=12/40+5/90,topk=32,empty=0.2,pad_rows=1"
VARIED = 8
"""Launches of variations: rows permuted, three parts, weights doubled, keys shifted and a request copied, keys appended; between bands."""
Launch = Callable[[TopkProblem], "TopkResult | torch.Tensor"]


def trial_of(launch: Launch, text: str = PLAIN, phases: list[str] | None = None,
             prepare: Callable[[TopkProblem], TopkLaunch] | None = None) -> TopkTrial:
    """A kernel made of one function, on a case."""
    inputs = topk_inputs(text)
    requires = KERNELS["torch_dense"].requires
    kernel = TopkKernel("made_up", prepare or (lambda problem: lambda: launch(problem)), requires, "litetopk", "fp32", no_bound, __file__)
    return TopkTrial(kernel, inputs, topk_expected(text), inputs.digests(), (phases if phases is not None else []).append)


def right(p: TopkProblem) -> TopkResult:
    """torch.topk over all scores at once."""
    scores = Scorer(p).masked(0, p.num_q)
    writer = TopkWriter(p, lambda row0, row1: scores[row0:row1])
    writer.choose(scores.clone(), 0)
    writer.finish()
    return TopkResult(writer.indices, writer.values)


def failures(run: TopkRun) -> dict[str, str]:
    return {check.name: check.detail for check in run.checks if check.verdict is not Verdict.PASSED}


def check_of(run: TopkRun, name: str) -> Check:
    return next(check for check in run.checks if check.name == name)


# --- right kernels ----------------------------------------------------------------------------------------------------

_turn = itertools.count()


def in_another_order(p: TopkProblem) -> torch.Tensor:
    """As atomics would have it: the keys of a row come in another order every time."""
    indices = right(p).indices
    order = torch.rand(indices.shape, generator=torch.Generator().manual_seed(next(_turn)))
    order += (indices < 0) * 2.0
    return indices.gather(1, order.argsort(1))


def other_ties(p: TopkProblem) -> TopkResult:
    """Which of the keys that tie with the k-th are taken changes with every launch."""
    scores = Scorer(p).masked(0, p.num_q)
    shift = next(_turn) * 37 % p.s_kv
    writer = TopkWriter(p, lambda row0, row1: scores[row0:row1].roll(shift, 1))
    writer.choose(scores.roll(shift, 1), 0)
    indices = torch.where(writer.indices >= 0, (writer.indices - shift) % p.s_kv, -1).int()
    return TopkResult(indices, writer.values, torch.zeros(p.num_q, dtype=torch.int32), lambda row0, row1: scores[row0:row1])


@pytest.mark.parametrize("launch", [right, in_another_order, other_ties])
@pytest.mark.parametrize("text", [PLAIN, TIED, SHORT])
def test_order_and_ties_are_free(launch: Launch, text: str) -> None:
    run = trial_of(launch, text).run("litetopk")
    assert failures(run) == {}
    if (launch, text) == (other_ties, TIED):
        assert "keys differ" in check_of(run, "run-to-run").detail and run.extra["keys unlike torch_dense"] > 0
        assert run.extra["downstream relative error"] > 0 and check_of(run, "downstream").margins["out"] <= 1


def test_one_output_buffer_for_every_launch_is_no_fault() -> None:
    def prepare(p: TopkProblem) -> TopkLaunch:
        kept = torch.empty(p.num_q, p.topk, dtype=torch.int32)

        def launch() -> torch.Tensor:
            kept.copy_(right(p).indices)
            return kept

        return launch

    run = trial_of(right, prepare=prepare).run("litetopk")
    assert failures(run) == {} and "one by one, since they share a buffer" in check_of(run, "run-to-run").detail


def test_scores_in_fp64_and_a_kernel_in_fp32_agree() -> None:
    inputs = topk_inputs(PLAIN)
    trial = TopkTrial(KERNELS["torch_dense"], inputs, topk_reference(inputs, torch.float64), inputs.digests(),  # type: ignore[arg-type]
                      lambda phase: None)
    assert failures(trial.run("dense")) == {}


# --- what is launched -------------------------------------------------------------------------------------------------


def test_launches_and_phases_come_in_order_and_every_problem_is_a_valid_one() -> None:
    seen: list[TopkProblem] = []
    phases: list[str] = []

    def launch(p: TopkProblem) -> TopkResult:
        check_problem(p)
        phases.append("*")
        seen.append(p)
        return right(p)

    trial = trial_of(launch, SHORT, phases)
    trial.run("litetopk")
    assert phases[:4] == ["prepare", "launch", "*", "launch"] and phases.count("*") == len(seen) == 6 + REPEATS + VARIED
    launched = phases[: phases.index("judge")]
    assert set(launched[1:]) == {"launch", "*"} and launched.count("*") == 6 + REPEATS + VARIED  # nothing is launched in phase judge
    others = [p for p in seen[: 6 + REPEATS] if p.requests != trial.problem.requests]
    assert len(others) == 1 and others[0].requests == ((0, 18, 0, 130),) and others[0].q_fp8.shape == trial.problem.q_fp8.shape


def test_the_problem_is_the_inputs_themselves() -> None:
    inputs = topk_inputs(PLAIN)
    problem = make_topk_problem(inputs)
    assert problem.k_fp8 is inputs.k_fp8 and problem.weights is inputs.weights and problem.ks is inputs.ks and problem.topk == 64


@pytest.mark.parametrize(("change", "message"), [
    (lambda r: r.indices[:, :-1], r"indices must be torch.int32 \[11, 64\], the kernel returned torch.int32 \[11, 63\]"),
    (lambda r: r.indices.long(), "the kernel returned torch.int64"), (lambda r: (r.indices, r.values), "indices must be a tensor"),
    (lambda r: dataclasses.replace(r, values=r.values.double()), "values must be torch.float32"),
    (lambda r: dataclasses.replace(r, status=torch.zeros(3, dtype=torch.int32)), r"status must be torch.int32 \[11\]")])
def test_what_is_no_result_is_an_error_of_the_launch(change: Callable[[TopkResult], object], message: str) -> None:
    phases: list[str] = []
    with pytest.raises(ValueError, match=message):
        trial_of(lambda p: change(right(p)), phases=phases).run("litetopk")  # type: ignore[arg-type, return-value]
    assert phases[-1] == "launch"


# --- what is told -----------------------------------------------------------------------------------------------------


def test_a_run_tells_ways_memory_and_numbers() -> None:
    def launch(p: TopkProblem) -> TopkResult:
        return dataclasses.replace(right(p), status=torch.arange(p.num_q, dtype=torch.int32) % 3)

    run = trial_of(launch).run("litetopk")
    assert run.ways == {"scan": 4, "rescan": 4, "dense": 3} and run.note == "rows: 4 scan, 4 rescan, 3 dense"
    assert run.memory is not None and run.memory > 4 * 11 * 500
    assert run.extra == {"recall worst": 1.0, "recall mean": 1.0, "members dropped": 0.0, "members extra": 0.0, "value deficit": 0.0,
                         "keys unlike torch_dense": 0.0, "downstream relative error": 0.0}
    assert set(run.tensors) == {"indices", "set", "values"} and run.lengths is None


def test_a_case_without_a_choice_has_no_set_check_and_says_so() -> None:
    run = run_topk("torch_dense", "indexer_topk:requests=6/60,topk=64")
    assert "set" not in {check.name for check in run.checks} and run.note.startswith("no set check")
    assert failures(run) == {}


def test_the_last_timed_call_is_judged_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    import arms.broken.indexer_topk_lite as broken

    monkeypatch.setattr(broken, "_served", [])
    inputs = topk_inputs(PLAIN)
    trial = TopkTrial(KERNELS["broken_cached_after_20_topk_launches"], inputs, topk_expected(PLAIN),  # type: ignore[arg-type]
                      inputs.digests(), lambda phase: None)
    assert failures(trial.run("litetopk")) == {}
    timed = trial.timed("litetopk")
    assert trial.check_timed("litetopk", timed.launch(timed.derive())).verdict is Verdict.PASSED
    last = [timed.launch(timed.derive()) for _ in range(20)][-1]
    assert trial.check_timed("litetopk", last).verdict is Verdict.FLAKY


# --- downstream -------------------------------------------------------------------------------------------------------


def downstream_of(eps: float, swap: int) -> Check:
    """Attention over the best 64 keys, against the same with the last one exchanged for the one `swap` places behind."""
    expected = topk_expected(PLAIN)
    ranked = expected.scores(0, 11).sort(1, descending=True)
    dense = ranked.indices[:, :64].int()
    arm = torch.cat([dense[:, :63], ranked.indices[:, 63 + swap : 64 + swap].int()], 1)
    inputs = expected.inputs
    band = Band(expected.scores, expected.kth, torch.full_like(expected.kth, eps), inputs.ks, inputs.ke, inputs.case.s_kv)
    trial = trial_of(right)
    check, _ = downstream(TopkResult(arm), TopkResult(dense), band, 0, trial.windows)
    assert check is not None
    return check


def test_a_swap_within_the_margin_is_within_the_bound_and_one_beyond_it_is_not() -> None:
    assert downstream_of(0.0, 0).margins == {"out": 0.0}
    within = downstream_of(1e9, 1)
    assert within.verdict is Verdict.PASSED and 0.01 < within.margins["out"] <= 1
    assert downstream_of(0.0, 1).verdict is Verdict.FAILED


def test_a_kernel_that_returns_nothing_to_launch_is_told_so() -> None:
    phases: list[str] = []
    trial = trial_of(right, phases=phases, prepare=lambda problem: right(problem).indices)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match=r"^made_up must return a callable that launches it, it returned a Tensor$"):
        trial.run("litetopk")
    assert phases[-1] == "prepare"


def test_rewritten_inputs_have_a_margin_of_their_own() -> None:
    """Keys that no row may see come into view when the keys are reversed, and they are not exact, whatever the case is."""
    trial = topk_trial("torch_dense", "indexer_topk:requests=4/200,topk=16,values=integer,pad_keys=50")
    indices = trial.run("dense").result.indices
    assert not bool(trial.expected.score_error("fp8", 0, 4, indices).any())
    result = TopkResult(indices)
    eps = margins(result, result, lambda row0, row1, some: trial.expected.rounding("fp8", row0, row1, some))
    assert torch.equal(eps, 2 * trial.expected.rounding("fp8", 0, 4, indices).amax(1)) and bool((eps > 0).all())
