"""The matrix broken arm x check: what is run, what counts as caught, what makes the exit code; and the command, on a few faults."""
from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from processes import TINY, TINY_TOPK, invoke, threearm
from rich.console import Console

from cases import family_of, parse_case
from cases.fault import Fault
from cases.fits import Fits
from harness import mutants_command
from harness.mutants import TIMED, Matrix, Plan, cases_of_plan, caught, generated
from harness.mutants_command import chosen
from harness.pool import Job, Outcome
from harness.record import Record
from harness.verdicts import CHECKS, Check, Verdict
from reports import mutants as report

OTHER = "sparse_prefill:s_q=3,s_kv=32,h_q=2,topk=16"
LARGE = "sparse_prefill:s_q=4096,topk=2048"
ZERO = Fault("broken_zero", "sparse_prefill", "reference", TINY)
RACE = Fault("broken_race", "sparse_prefill", "run-to-run", TINY, ("written",))
STALE = Fault("broken_stale", "sparse_prefill", TIMED, OTHER)
DROP = Fault("broken_drop", "indexer_topk", "shape", TINY_TOPK)
FAULTS = [ZERO, RACE, STALE, DROP]


def record(arm: str, verdict: Verdict, case: str = TINY, **checks: Verdict) -> Record:
    """An arm's record with these checks, `_` for `-`."""
    named = [Check(name.replace("_", "-"), of) for name, of in checks.items()]
    return Record(case, arm, verdict, checks=named, seconds={"inputs": 0.25, "reference": 0.25, "arm": 0.5} if checks else {})


def outcome(kernel: str, *records: Record, case: str = TINY) -> Outcome:
    return Outcome(Job(case, kernel, ("none",)), list(records), 7.0)


def filled(*outcomes: Outcome, faults: list[Fault] = FAULTS, device: str = "cpu") -> Matrix:
    matrix = Matrix(faults, device)
    for each in outcomes:
        matrix.add(each)
    return matrix


# --- what is run ------------------------------------------------------------------------------------------------------


def described(name: str, family: str, imports: str = "", **refused: str) -> dict[str, Any]:
    arms = ["none", "metadata"] if family == "sparse_prefill" else ["litetopk"]
    fits = {field.name: field.default for field in dataclasses.fields(Fits)}
    return {"name": name, "family": family, "arms": arms, "imports": imports, "refused": {OTHER: refused}, "fits": fits}


def plan(complete: bool, faults: list[Fault] = FAULTS, drawn: dict[str, list[str]] | None = None) -> Plan:
    right = [described("blocks", "sparse_prefill", none="live tail"), described("packaged", "sparse_prefill", "package:function")]
    return Plan(faults, right, {fault.kernel: described(fault.kernel, fault.family) for fault in faults}, drawn or {}, complete)


def test_sampled_every_fault_meets_its_own_case_and_right_arms_all_of_them() -> None:
    jobs = list(plan(False, drawn={"blocks": [LARGE]}).jobs())
    assert [(job.kernel, job.case) for job in jobs] == [
        ("broken_drop", TINY_TOPK), ("broken_zero", TINY), ("broken_race", TINY), ("blocks", TINY), ("packaged", TINY),
        ("blocks", OTHER), ("packaged", OTHER), ("blocks", LARGE)]
    assert [job.arms for job in jobs if job.kernel == "blocks"] == [("none", "metadata"), ("metadata",), ("none", "metadata")]
    assert {job.group for job in jobs} == {"", "packaged"}


def test_what_shows_in_the_timed_loop_is_run_by_itself() -> None:
    assert [(job.kernel, job.case) for job in plan(False).timed()] == [("broken_stale", OTHER)]


def test_complete_every_fault_meets_every_small_case_of_its_family() -> None:
    faults = [*FAULTS, Fault("broken_large", "sparse_prefill", "reference", LARGE)]
    met: dict[str, set[str]] = {}
    for job in plan(True, faults).jobs():
        met.setdefault(job.kernel, set()).add(job.case)
    assert {TINY, OTHER} < met["broken_zero"] == met["broken_race"] and LARGE not in met["broken_zero"] and LARGE in met["broken_large"]
    assert met["blocks"] == met["broken_large"] and "broken_stale" not in met
    assert {family_of(case) for case in met["broken_drop"]} == {"indexer_topk"} and len(met["broken_drop"]) > 5


def test_cases_are_of_the_faults_families_and_by_family() -> None:
    assert cases_of_plan([ZERO, DROP, STALE], False) == [TINY_TOPK, TINY, OTHER]
    assert {family_of(case) for case in cases_of_plan([DROP], True)} == {"indexer_topk"}


def test_generated_cases_are_the_same_for_a_seed_and_what_the_kernel_takes() -> None:
    one, other = described("one", "sparse_prefill"), described("other", "indexer_topk")
    one["fits"]["heads"] = [64]
    first = generated([one, other], 61, 0)
    assert generated([other], 30, 0)["other"] == first["other"] != generated([other], 30, 1)["other"]
    assert [len(set(first[name])) for name in ("one", "other")] == [31, 30]
    assert all("h_q" not in case and family_of(case) == "sparse_prefill" for case in first["one"])  # 64 is the default
    assert {family_of(case) for case in first["other"]} == {"indexer_topk"}
    assert all(str(parse_case(case)) == case for cases in first.values() for case in cases)


# --- what comes of it -------------------------------------------------------------------------------------------------


def test_what_counts_as_caught() -> None:
    found = caught([record("k/none", Verdict.FAILED, written=Verdict.PASSED, reference=Verdict.FAILED, padded=Verdict.VACUOUS),
                    record("k/metadata", Verdict.FLAKY, run_to_run=Verdict.FLAKY, reference=Verdict.FAILED)])
    assert found == {"reference": Verdict.FAILED, "run-to-run": Verdict.FLAKY}
    ended = {Verdict.FAILED: "raises", Verdict.CRASHED: "crash", Verdict.TIMEOUT: "time limit", Verdict.OOM: "memory limit"}
    for verdict, name in ended.items():
        assert caught([record("k/none", verdict)]) == {name: verdict}
    assert caught([record("k/none", Verdict.ERROR), record("k/metadata", Verdict.SKIPPED)]) == {}


def test_all_is_well_when_every_fault_is_caught_by_its_checks() -> None:
    matrix = filled(
        outcome("broken_zero", record("broken_zero/none", Verdict.FAILED, reference=Verdict.FAILED)),
        outcome("broken_race", record("broken_race/none", Verdict.FAILED, padded=Verdict.FAILED, run_to_run=Verdict.FLAKY,
                                      written=Verdict.FAILED)),
        outcome("broken_stale", record("broken_stale/none", Verdict.FLAKY, OTHER, timed_output=Verdict.FLAKY), case=OTHER),
        outcome("broken_drop", record("broken_drop/litetopk", Verdict.FAILED, TINY_TOPK, shape=Verdict.FAILED), case=TINY_TOPK),
        outcome("blocks", record("blocks/none", Verdict.VACUOUS, reference=Verdict.VACUOUS)))
    assert (matrix.survivors(), matrix.missed(), matrix.accused, matrix.errors, matrix.wrong) == ([], [], [], [], False)
    assert matrix.by(RACE) == ["run-to-run", "written", "padded"] and matrix.own(RACE).seconds == 1.0
    assert matrix.ran == {"blocks": 1} and matrix.cases(RACE) == (1, 1)
    assert "reference" not in matrix.idle("sparse_prefill") and "guards" in matrix.idle("sparse_prefill")
    assert report.by_check(matrix, "sparse_prefill")[0] == ("run-to-run", 1, 0)
    assert ("reference", 1, 1) in report.by_check(matrix, "sparse_prefill")


def test_a_fault_that_nothing_catches_survives() -> None:
    matrix = filled(outcome("broken_zero", record("broken_zero/none", Verdict.PASSED, reference=Verdict.PASSED)), faults=[ZERO])
    assert matrix.survivors() == [ZERO] and matrix.wrong
    assert report.findings(matrix, 0, lambda record: [])[0] == (
        f"SURVIVED  zero: no check caught it on {TINY}\n  repeat: threearm run {TINY} --arm broken_zero --time none")
    assert filled(faults=[ZERO]).survivors() == [ZERO]  # also one that was not run at all


def test_a_fault_that_its_own_checks_miss_is_missed() -> None:
    caught_elsewhere = outcome("broken_race", record("broken_race/none", Verdict.FAILED, OTHER, written=Verdict.FAILED), case=OTHER)
    own = outcome("broken_race", record("broken_race/none", Verdict.FLAKY, run_to_run=Verdict.FLAKY))
    matrix = filled(own, caught_elsewhere, faults=[RACE])
    assert matrix.survivors() == [] and matrix.missed() == [(RACE, ["written"])] and matrix.wrong
    assert matrix.cases(RACE) == (2, 2)


def test_an_arm_that_raises_is_caught_and_takes_what_its_job_took() -> None:
    fault = Fault("broken_shape", "sparse_prefill", "raises", TINY)
    matrix = filled(outcome("broken_shape", record("broken_shape/none", Verdict.FAILED)), faults=[fault])
    assert not matrix.wrong and matrix.own(fault).seconds == 7.0
    assert report.by_check(matrix, "sparse_prefill") == [("raises", 1, 1)]


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.FLAKY, Verdict.CRASHED, Verdict.TIMEOUT, Verdict.OOM])
def test_a_right_arm_that_is_accused_is_a_false_alarm(verdict: Verdict) -> None:
    matrix = filled(outcome("blocks", record("blocks/none", verdict)), faults=[])
    assert matrix.accused and matrix.wrong
    assert f"repeat: threearm replay {TINY} --arm blocks/none" in report.findings(matrix, 0, lambda record: [])[0]


def test_the_harness_s_own_fault_is_no_catch() -> None:
    matrix = filled(outcome("broken_zero", record("broken_zero/none", Verdict.ERROR)), faults=[ZERO])
    assert matrix.survivors() == [ZERO] and len(matrix.errors) == 1


def test_faults_of_checks_that_need_cuda_do_not_survive_a_cpu_run() -> None:
    fault = Fault("broken_stream", "sparse_prefill", "busy-stream", TINY)
    assert filled(faults=[fault]).survivors() == [] and filled(faults=[fault], device="cuda").survivors() == [fault]
    assert report.fault_row(filled(faults=[fault]), fault)[4] == report.caught_by(filled(faults=[fault]), fault) == "not tried: needs CUDA"
    said = "\n".join([*report.idle(filled(faults=[fault])), *report.summary(filled(faults=[fault]), 0)])
    assert "as they need CUDA: busy-stream, graph-replay" in said and "not tried, as their checks need CUDA: stream" in said


@pytest.mark.parametrize(("width", "timed", "beside"), [(130, True, True), (102, True, True), (101, False, True), (94, False, True),
                                                        (93, False, False), (80, False, False), (60, False, False), (40, False, False)])
def test_the_table_fits_and_cuts_nothing_off(width: int, timed: bool, beside: bool) -> None:
    fault = Fault("broken_" + "a_long_name_" * 3, "sparse_prefill", "backscan-vs-metadata",
                  "sparse_prefill:s_q=6,s_kv=3000,h_q=2,d_qk=512,topk=384,requests=6/150+4/150,holes=0.1,tail=wild")
    names = {name.replace("-", "_"): Verdict.FAILED for name in CHECKS["sparse_prefill"]}
    matrix = filled(outcome(fault.kernel, record("x/none", Verdict.FAILED, fault.case, **names), case=fault.case), faults=[fault])
    lines = printed(matrix, width).splitlines()[1:]
    assert max(map(len, lines)) <= width
    faults = "\n".join(lines[: lines.index(next(line for line in lines if line.startswith("└")))])
    text = "".join(faults.split("│")).replace(" ", "").replace("\n", "")
    assert "…" not in faults and (" ms " in faults) == timed and ("┃ case " in faults) == beside
    if width >= 80:
        assert fault.name in text and f"backscan-vs-metadata +{len(names) - 1} " in faults
        assert all(word in faults for word in fault.case.partition(":")[2].split(","))
    shown = fault.name + fault.case.partition(":")[2]
    assert [text.count(mark) for mark in "_=/"] == [shown.count(mark) for mark in "_=/"]


def printed(matrix: Matrix, width: int = 130) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(report.terminal(matrix))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_case_of_defaults_alone_has_a_row() -> None:
    assert "│ zero " in printed(filled(faults=[dataclasses.replace(ZERO, case="sparse_prefill:")]), 40)


def test_the_table_has_a_legend() -> None:
    assert "+4: so many other checks caught it too\nms: the whole case" in printed(filled(faults=[ZERO]))
    assert "idle: a check that caught no fault; accused: a right arm that some check did not pass" in printed(filled(faults=[ZERO]))


def test_counts_are_told_in_grammar() -> None:
    good = outcome("broken_zero", record("broken_zero/none", Verdict.FAILED, reference=Verdict.FAILED))
    right = [outcome("blocks", record("blocks/none", Verdict.PASSED)), outcome("other", record("other/none", Verdict.PASSED))]
    matrix = filled(good, *right, faults=[ZERO])
    assert report.summary(matrix, 0) == ["1 of 1 fault caught, 1 of them by the check that is there for it",
                                         "right arms: 0 accused; cases: blocks 1, other 1 (0 generated)"]
    matrix.whole = False
    assert report.summary(matrix, 0)[-1] == "right arms: 0 accused; tried on 1 case only; cases: blocks 1, other 1 (0 generated)"
    matrix.add(outcome("blocks", case=OTHER))
    assert report.summary(matrix, 1)[-1] == "right arms: 0 accused; tried on 2 cases only; cases: blocks 2, other 1 (1 generated)"


# --- as it is found, and interrupted ----------------------------------------------------------------------------------

SURVIVES = outcome("broken_zero", record("broken_zero/none", Verdict.PASSED, reference=Verdict.PASSED))
MISSES = outcome("broken_race", record("broken_race/none", Verdict.FLAKY, run_to_run=Verdict.FLAKY))
CAUGHT = outcome("broken_drop", record("broken_drop/litetopk", Verdict.FAILED, TINY_TOPK, shape=Verdict.FAILED), case=TINY_TOPK)
ACCUSES = outcome("blocks", record("blocks/none", Verdict.FAILED))
BREAKS = outcome("blocks", record("blocks/none", Verdict.ERROR))


@pytest.mark.parametrize(("came", "line"), [
    (SURVIVES, f"SURVIVED  zero: no check caught it on {TINY}"),
    (MISSES, f"MISSED  race: written did not catch it on {TINY}, run-to-run did"),
    (ACCUSES, f"FALSE ALARM  FAILED  threearm replay {TINY} --arm blocks/none --device cuda"),
    (BREAKS, f"HARNESS ERROR  blocks/none  {TINY}  "),
    (CAUGHT, ""), (outcome("blocks", record("blocks/none", Verdict.PASSED)), ""), (outcome("broken_zero", case=OTHER), "")])
def test_what_is_wrong_is_told_at_once(came: Outcome, line: str) -> None:
    assert report.news(filled(came), came, lambda record: ["--device", "cuda"]) == ([line] if line else [])


def interrupt(monkeypatch: pytest.MonkeyPatch, *came: Outcome) -> None:
    """The command is interrupted after these outcomes. No worker is started."""
    def until_interrupted(*_: Any) -> Iterator[Outcome]:
        yield from came
        raise KeyboardInterrupt

    monkeypatch.setattr(mutants_command, "ask_worker", lambda *_: (FAULTS, {"device": "cpu", "kernels": [], "machine": {}}))
    monkeypatch.setattr(mutants_command, "planned", lambda *_: plan(False))
    monkeypatch.setattr(mutants_command, "outcomes", until_interrupted)


def test_an_interrupt_shows_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, CAUGHT)
    done = invoke("mutants", "--device", "cpu")
    assert done.code == 130 and done.lines[0] == "interrupted after 1 of 8 pairs of kernel and case"
    assert "│ drop " in done.text and "│ zero " not in done.text and "SURVIVED" not in done.text and "idle in" not in done.text
    assert done.lines[-3:] == ["1 of 1 fault caught, 1 of them by the check that is there for it",
                               "not tried before the interrupt: 3 faults",
                               "right arms: 0 accused; tried on 0 cases only; cases: none"]
    page = invoke("mutants", "--device", "cpu", "--markdown")
    assert page.code == 130 and "* **interrupted after 1 of 8 pairs of kernel and case**\n* 1 of 1 fault caught" in page.text
    assert "| drop |" in page.text and "| zero |" not in page.text


def test_an_interrupt_after_something_wrong_exits_1_and_before_anything_130(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, SURVIVES, MISSES, ACCUSES)
    done = invoke("mutants", "--device", "cpu")
    words = ("SURVIVED  ", "MISSED  ", "FALSE ALARM  ")
    assert done.code == 1 and [done.text.count(word) for word in words] == [2, 2, 2]
    assert max(map(done.text.index, words)) < done.text.index("interrupted after 3 of 8")
    interrupt(monkeypatch)
    done = invoke("mutants", "--device", "cpu")
    assert done.code == 130 and done.lines[:2] == ["interrupted after 0 of 8 pairs of kernel and case",
                                                   "0 of 0 faults caught, 0 of them by the check that is there for it"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_tells_what_catches_what() -> None:
    """The right arms come after a fault that wrote into their case's inputs, in the same worker."""
    faults = ["--arm", "zero_output", "--arm", "writes_its_indices", "--arm", "broken_wrong_width"]
    done = threearm("mutants", *faults, "--right", "2", "--workers", "1", "--device", "cpu")
    assert done.code == 0, done.text
    assert "3 of 3 faults caught, 3 of them by the check that is there for it" in done.lines
    assert any(line.startswith("right arms: 0 accused; tried on ") and line.endswith("(2 generated)") for line in done.lines)
    rows = [" ".join(line.split()) for line in done.lines]
    for row in ("│ zero_output │ reference", "│ wrong_width │ raises"):
        assert any(line.startswith(row) for line in rows), done.text
    assert "idle in" not in done.text


def test_survivors_missed_faults_and_false_alarms_are_told_and_exit_1() -> None:
    arguments = ["mutants", "--load", "tests/faulty/survives.py", "--arm", "nothing_at_all", "--arm", "declared_for_another_check",
                 "--workers", "1", "--device", "cpu", "--markdown"]
    done = threearm(*arguments)
    assert done.code == 1 and "1 of 2 faults caught, 0 of them by the check that is there for it" in done.text
    assert f"SURVIVED  nothing_at_all: no check caught it on {TINY}" in done.text
    assert "MISSED  declared_for_another_check: sentinels did not catch it" in done.text
    assert f"repeat: threearm replay {TINY} --arm thinks_it_is_right/metadata" in done.text
    assert "### sparse_prefill: faults" in done.text and "| **sentinels: no** |" in done.text and "`threearm mutants --load" in done.text


@pytest.mark.parametrize(("family", "arms", "message"), [
    ("", ["zer"], "--arm zer: no such fault; did you mean 'zero'?"), ("", ["what"], "--arm what: no such fault; `threearm arms --broken`"),
    ("attention", None, "--family attention: families are sparse_prefill and indexer_topk"),
    ("indexer_topk", ["broken_zero"], "--family indexer_topk: none of the faults named is of it")])
def test_what_is_not_there_is_usage(family: str, arms: list[str] | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_:
        chosen(FAULTS, family, arms)
    assert exit_.value.exit_code == 2 and capsys.readouterr().err.startswith(f"threearm: {message}")


def test_faults_are_chosen_by_family_and_name() -> None:
    assert chosen(FAULTS, "", None) == FAULTS and chosen(FAULTS, "indexer_topk", None) == [DROP]
    assert chosen(FAULTS, "", ["race", "broken_zero"]) == [ZERO, RACE]
