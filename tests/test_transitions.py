"""What became of an arm, told from two records: made by hand, and by the checks from kernels that are wrong on purpose."""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from faults import from_the_beginning
from topk_trials import topk_trial
from trials import expected_of, sources_of

from arms.broken.fault import FAULTS
from arms.broken.problems import ANY, FULL, HALF, MIXED, SINK
from arms.kernel import KERNELS, Convention, Outputs, load_package
from arms.sparse_prefill.torch_blocks import attention
from cases import parse_case
from cases.counter import digest
from cases.inputs import make_inputs
from harness import worker_outputs
from harness.comparison import Change, Estimate, Pairing, Rule, TimeComparison, TimeVerdict, Transition
from harness.findings import NEW_NAN
from harness.record import Record
from harness.transitions import WORSE, exit_code, margins, outcome, risen, transition
from harness.trial import KernelTrial
from harness.verdicts import Check, Verdict, worst

load_package("arms.broken")
CASE, ARM = "sparse_prefill:s_q=6", "k/none"
ENDS = {Verdict.CRASHED: Change.CRASH, Verdict.TIMEOUT: Change.HANG, Verdict.OOM: Change.OOM}


def passed(bits: str = "1", **changes: object) -> Record:
    checks = [Check("run-to-run", Verdict.PASSED), Check("reference", Verdict.PASSED, margins={"out": 0.25, "lse": 0.125})]
    found = Record(CASE, ARM, Verdict.PASSED, checks=checks, inputs={"all": "i", "q": "q", "kv": "kv"}, outputs={"out": bits, "lse": "1"})
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def failed(*checks: Check) -> Record:
    found = checks or (Check("reference", Verdict.FAILED, "over budget: out in 3 of 64", margins={"out": 2.0}, bad=3, total=64),)
    return passed("bad", verdict=worst([check.verdict for check in found]), checks=list(found))


def ended(verdict: Verdict, detail: str = "signal SIGSEGV in phase launch") -> Record:
    return Record(CASE, ARM, verdict, detail)


def change(base: Record | None, candidate: Record | None, numbers: Check | None = None) -> Change:
    return transition(Pairing(CASE, ARM, ARM), base, candidate, numbers).change


def detail(base: Record | None, candidate: Record | None, numbers: Check | None = None) -> str:
    return transition(Pairing(CASE, ARM, ARM), base, candidate, numbers).detail


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_the_same_bits_are_the_same() -> None:
    found = transition(Pairing(CASE, ARM, ARM), passed(), passed())
    assert (found.change, found.detail, found.base, found.candidate) == (Change.SAME, "", Verdict.PASSED, Verdict.PASSED)
    assert found.margins_before == found.margins_after == {"out": 0.25, "lse": 0.125}


def test_other_bits_that_pass_are_other_numbers() -> None:
    assert change(passed(), passed("2")) is Change.NUMBERS
    assert detail(passed(), passed("2")).startswith("other bits in out: how far is not known")
    numbers = Check("numbers", Verdict.FAILED, "out differs in 1 of 64", ulp={"1": 1})
    found = transition(Pairing(CASE, ARM, ARM), passed(), passed("2"), numbers)
    assert (found.detail, found.numbers) == (numbers.detail, numbers)
    moved = [passed(outputs={"indices": bits, "set": "1"}) for bits in "ab"]
    assert detail(*moved).startswith("the same keys in another order")


def test_a_nan_that_only_the_outputs_show_is_one() -> None:
    assert NEW_NAN == worker_outputs.NEW_NAN
    numbers = Check("numbers", Verdict.FAILED, f"{NEW_NAN}lse has 2 in candidate alone; lse differs in 2 of 64")
    assert change(passed(), passed("2"), numbers) is Change.NAN
    assert change(passed(), failed(), numbers) is Change.NAN
    gone = Check("numbers", Verdict.FAILED, f"{NEW_NAN}lse has 2 in base alone; lse differs in 2 of 64")
    assert change(passed(), passed("2"), gone) is Change.NUMBERS


def test_inputs_that_differ_make_it_void_whatever_came_out() -> None:
    other = {"all": "j", "q": "p", "kv": "kv"}
    for candidate in (passed(inputs=other), dataclasses.replace(failed(), inputs=other)):
        found = transition(Pairing(CASE, ARM, ARM), passed(), candidate)
        assert (found.change, found.detail) == (Change.UNKNOWN, "inputs differ: q")
        assert exit_code([found]) == 5
    assert change(passed(), ended(Verdict.CRASHED)) is Change.CRASH  # it ended before it told its inputs


@pytest.mark.parametrize(("base", "candidate", "expected"), [
    (failed(), passed(), Change.FIXED),
    (ended(Verdict.CRASHED), passed(), Change.FIXED),
    (passed(), failed(), Change.BROKE),
    (passed(), Record(CASE, ARM, Verdict.FAILED, "TypeError in phase prepare: no"), Change.BROKE),
    (passed(), Record(CASE, ARM, Verdict.ERROR, "RuntimeError in phase reference: no"), Change.BROKE),
    (Record(CASE, ARM, Verdict.ERROR, "no"), passed(), Change.UNKNOWN),
    (Record(CASE, ARM, Verdict.ERROR, "no"), failed(), Change.UNKNOWN),
    (failed(), failed(), Change.STILL_BAD),
    (ended(Verdict.CRASHED), failed(), Change.STILL_BAD),
    (passed(), None, Change.GONE),
    (passed(), ended(Verdict.SKIPPED, "not installed"), Change.GONE),
    (failed(), None, Change.GONE),
    (None, passed(), Change.NEW_ARM),
    (ended(Verdict.SKIPPED, "not installed"), passed(), Change.NEW_ARM),
    (None, failed(), Change.NEW_WRONG),
    (ended(Verdict.SKIPPED, "not installed"), failed(), Change.NEW_WRONG),
    (None, None, Change.UNKNOWN),
    (ended(Verdict.SKIPPED), ended(Verdict.SKIPPED), Change.UNKNOWN),
    (passed(verdict=Verdict.VACUOUS), passed("2", verdict=Verdict.VACUOUS), Change.UNKNOWN),
    (passed(), passed("2", verdict=Verdict.VACUOUS), Change.UNKNOWN),
    (passed(verdict=Verdict.VACUOUS), passed(verdict=Verdict.VACUOUS), Change.SAME),
    (passed(verdict=Verdict.VACUOUS), failed(), Change.BROKE),
    (failed(), passed(verdict=Verdict.VACUOUS), Change.UNKNOWN),
    (passed(checks=[]), passed(checks=[]), Change.SAME),  # a stored run may hold no checks
    (passed(outputs={}), passed(), Change.UNKNOWN),
])
def test_by_verdict(base: Record | None, candidate: Record | None, expected: Change) -> None:
    assert change(base, candidate) is expected


@pytest.mark.parametrize(("verdict", "expected"), ENDS.items())
def test_an_arm_that_ends_its_worker(verdict: Verdict, expected: Change) -> None:
    for before in (passed(), failed(), passed(verdict=Verdict.VACUOUS)):
        assert change(before, ended(verdict)) is expected
    assert change(ended(verdict), ended(verdict)) is Change.STILL_BAD
    for other in set(ENDS) - {verdict}:
        assert change(ended(other), ended(verdict)) is expected


def test_an_arm_that_was_given_up_counts_as_what_it_was_given_up_for() -> None:
    hung, crashed = (ended(Verdict.SKIPPED, f"given up: {what} on 2 cases before") for what in ("hung", "crashed"))
    assert change(passed(), hung) is Change.HANG
    assert change(passed(), crashed) is Change.CRASH
    assert change(hung, hung) is Change.STILL_BAD
    assert change(hung, passed()) is Change.FIXED


def test_what_fails_on_both_sides_is_compared_check_by_check() -> None:
    more = Check("reference", Verdict.FAILED, "over budget: out in 9 of 64", bad=9, total=64)
    assert detail(failed(), failed()).endswith("; the same findings")
    assert "other findings: reference 3 -> 9 wrong" in detail(failed(), failed(more))
    padded = Check("padded", Verdict.FAILED, "differs")
    assert change(failed(), failed(more, padded)) is Change.BROKE  # a check that did not fail does
    assert detail(failed(), failed(more, padded)) == "padded: differs (before only: reference)"
    assert "padded no more" in detail(failed(more, padded), failed(more))


def test_nondeterminism_is_told_before_what_follows_from_it() -> None:
    flaky = Check("run-to-run", Verdict.FLAKY, "out differs in 1", first=["[0]  launch 1 0.5  launch 3 nan"])
    other = Check("after-another", Verdict.FAILED, "out differs in 1")
    assert change(passed(), failed(flaky, other)) is Change.NONDETERMINISM
    assert detail(passed(), failed(flaky, other)) == "run-to-run: out differs in 1; NaN in some launches; also failed: after-another"
    assert change(failed(other), failed(flaky, other)) is Change.NONDETERMINISM
    assert change(failed(flaky), failed(flaky)) is Change.STILL_BAD


def nan_check(name: str = "reference", line: str = "[5]  want -0.1  got nan  budget 0.1") -> Check:
    return Check(name, Verdict.FAILED, "over budget: out in 1 of 64", margins={"out": 1e30}, first=[line], where=["in out:"])


def test_nan_is_new_where_the_base_had_none() -> None:
    assert change(passed(), failed(nan_check())) is Change.NAN
    assert detail(passed(), failed(nan_check())).startswith("NaN in out: reference:")
    assert change(failed(), failed(nan_check())) is Change.NAN
    assert change(failed(nan_check()), failed(nan_check())) is Change.STILL_BAD
    assert change(passed(), failed(nan_check(line="[5]  want nan  got 0.1  budget 0.1"))) is Change.BROKE
    assert change(passed(), failed(nan_check(line="[5]  want 1  got inf  budget 0.1"))) is Change.BROKE
    lent = nan_check("nan-leak", "[0]  before 1  with NaN in kv nan")  # put into the inputs
    assert change(passed(), failed(lent)) is Change.BROKE


KERNEL = {"name": "k", "promise": "bitwise", "convention": "lse in nats"}


@pytest.mark.parametrize(("other", "same", "worse"), [
    ({"promise": "within two budgets"}, Change.PROMISE, Change.BROKE),
    ({"convention": "lse in base 2"}, Change.PROMISE, Change.BROKE),
    ({"convention": "lse in base 2", "name": "other"}, Change.PROMISE, Change.BROKE),
    ({"promise": "within two budgets", "name": "other"}, Change.SAME, Change.BROKE),
    ({"convention": ""}, Change.SAME, Change.BROKE),
    ({}, Change.SAME, Change.BROKE),
])
def test_what_a_kernel_declares(other: dict[str, str], same: Change, worse: Change) -> None:
    pairing = Pairing(CASE, ARM, ARM)
    assert transition(pairing, passed(), passed(), None, KERNEL, {**KERNEL, **other}).change is same
    assert transition(pairing, passed(), failed(), None, KERNEL, {**KERNEL, **other}).change is worse
    assert transition(pairing, None, None, None, KERNEL, {**KERNEL, **other}).change is Change.UNKNOWN


@pytest.mark.parametrize(("before", "after", "told"), [
    (0.31, 0.95, "out 0.31 -> 0.95"), (0.92, 0.95, ""), (0.2, 0.41, "out 0.2 -> 0.41"), (0.01, 0.05, ""), (0.5, 0.8, ""), (0.95, 0.3, "")])
def test_margins_that_rise(before: float, after: float, told: str) -> None:
    found = Transition(Pairing(CASE, ARM, ARM), Change.NUMBERS, margins_before={"out": before}, margins_after={"out": after})
    assert risen(found) == told
    assert risen(dataclasses.replace(found, change=Change.SAME)) == ""


# --- the exit code ----------------------------------------------------------------------------------------------------


def made(kind: Change, time: TimeVerdict | None = None) -> Transition:
    timed = None
    if time:
        timed = TimeComparison(time, "", Rule(0.02, 1.0), "wall", "warm", [], estimate=Estimate(1.1, 1.09, 1.11, 10.0, 11.0, 3, 6))
    return Transition(Pairing(CASE, ARM, ARM), kind, base=Verdict.PASSED, candidate=Verdict.PASSED, time=timed)


SAME, SLOW = made(Change.SAME), made(Change.SAME, TimeVerdict.SLOWER)
UNSURE, INVALID = made(Change.SAME, TimeVerdict.UNRESOLVED), made(Change.SAME, TimeVerdict.INVALID)
VOID = dataclasses.replace(made(Change.UNKNOWN), detail="inputs differ: q")
NEW = dataclasses.replace(made(Change.NEW_ARM), base=Verdict.SKIPPED, detail="not run in the base: not installed")
IDLE = Transition(Pairing(CASE, ARM, ARM), Change.UNKNOWN, base=Verdict.SKIPPED, candidate=Verdict.SKIPPED)


def of_j(*verdicts: Verdict, kind: Change = Change.STILL_BAD, detail: str = "", margins: dict[str, float] | None = None) -> Transition:
    """Of another kernel than the others."""
    return Transition(Pairing(CASE, "j/none", "j/none"), kind, detail, *verdicts, margins_before=margins or {}, margins_after=margins or {})


NEVER = of_j(Verdict.FAILED, Verdict.FAILED, detail="FAILED ModuleNotFoundError in phase prepare: No module named 'x'")
WRONG = of_j(Verdict.FAILED, Verdict.FAILED, detail="FAILED reference: over budget", margins={"out": 2.0})
BLIND = of_j(Verdict.VACUOUS, Verdict.VACUOUS, kind=Change.SAME, detail="vacuous in base and candidate")


@pytest.mark.parametrize(("found", "code", "said"), [
    ([NEVER], 4, "nothing was tested of j: FAILED ModuleNotFoundError in phase prepare: No module named 'x'; nothing is known to be worse"),
    ([SAME, NEVER, NEVER], 4, "nothing was tested of j: FAILED ModuleNotFoundError"),
    ([SAME, WRONG], 4, "j passed on neither side: FAILED reference"),
    ([SAME, BLIND], 4, "nothing was tested of j: vacuous"),
    ([NEVER, of_j(Verdict.PASSED, Verdict.PASSED, kind=Change.SAME)], 0, "1 failed before and still do"),
    ([NEVER, of_j(Verdict.FAILED, Verdict.PASSED, kind=Change.FIXED)], 0, "1 failed before and still do"),
    ([SLOW, NEVER], 3, "1 of 1 times are SLOWER; besides, nothing was tested of j"),
    ([made(Change.CRASH), NEVER], 1, "1 new crash; besides, nothing was tested of j"),
    ([], 5, "nothing was compared"),
    ([IDLE], 5, "nothing was compared"),
    ([SAME, IDLE], 0, "nothing got worse in 1 comparison"),
    ([SAME, made(Change.NUMBERS)], 0, "1 gave other numbers, within budget"),
    ([SAME, made(Change.STILL_BAD)], 0, "1 failed before and still do"),
    ([made(Change.NEW_ARM), made(Change.FIXED)], 0, "nothing got worse in 2 comparisons"),
    ([dataclasses.replace(made(Change.NEW_WRONG), candidate=Verdict.FAILED)], 1, "1 of 1 comparison got worse: 1 new arm fails"),
    ([NEW], 5, "no arm ran on both sides: not run in the base: not installed"),
    ([SAME, NEW], 0, "nothing got worse in 2 comparisons; 1 new arm, not run in the base: not installed"),
    ([SAME, made(Change.UNKNOWN)], 4, "1 not comparable"),
    ([UNSURE, SAME], 4, "times 1 UNRESOLVED"),
    ([UNSURE, SLOW], 3, "1 of 2 times are SLOWER"),
    ([SLOW, made(Change.CRASH), made(Change.CRASH), made(Change.NAN)], 1,
     "3 of 4 comparisons got worse: 2 new crashes, 1 new NaN; besides, 1 SLOWER"),
    ([INVALID, SLOW], 1, "1 of 2 comparisons got worse: 1 invalid time"),
    ([made(Change.CRASH), VOID], 5, "other inputs in 1 of 2 comparisons (q)"),
])
def test_the_worst_decides(found: list[Transition], code: int, said: str) -> None:
    assert exit_code(found) == code
    assert said in outcome(found)[1]


def test_a_kernel_that_was_asked_for_and_ran_on_one_side_alone_is_told() -> None:
    other = dataclasses.replace(NEW, pairing=Pairing(CASE, "q/none", "q/none"))
    assert outcome([SAME, other]) == (0, "nothing got worse in 2 comparisons; 1 new arm, not run in the base: not installed")
    code, said = outcome([SAME, other], named=True)
    assert code == 4 and said.startswith("q ran on one side alone: not run in the base: not installed; nothing is known to be worse")


@pytest.mark.parametrize("kind", Change)
def test_every_change_has_its_code(kind: Change) -> None:
    code = 1 if kind in WORSE else 4 if kind is Change.UNKNOWN else 0
    assert exit_code([SAME, made(kind)]) == code
    assert exit_code([SAME, made(kind)], bitwise=True) == (1 if kind is Change.NUMBERS else code)
    assert exit_code([SAME, made(kind)], void=["no such device"]) == 5
    assert [each.name for each in WORSE] == ["PROMISE", "GONE", "NEW_WRONG", "NONDETERMINISM", "NAN", "BROKE", "OOM", "HANG", "CRASH"]


# --- from real runs ---------------------------------------------------------------------------------------------------


def run(name: str, text: str, kernel: object = None, source: str = "none") -> Record:
    """The record of one arm of a kernel on a case, as a worker makes it; of one that raises, without checks."""
    from_the_beginning()
    known = kernel or KERNELS[name]
    if text.startswith("indexer_topk"):
        trial = topk_trial(name, text)
        source, digests = trial.kernel.arm, trial.digests
    else:
        inputs = make_inputs(parse_case(text), "cpu")
        source, digests = sources_of(text)[0] if "tail=live" in text else source, inputs.digests()
        trial = KernelTrial(known, inputs, expected_of(text), digests, lambda phase: None)  # type: ignore[arg-type, assignment]
    try:
        found = trial.run(source)
    except Exception as error:
        return Record(text, f"k/{source}", Verdict.FAILED, f"{type(error).__name__} in phase launch: {error}", inputs=digests)
    return Record(text, f"k/{source}", worst([check.verdict for check in found.checks]), checks=found.checks, inputs=digests,
                  outputs={name: digest(tensor) for name, tensor in found.tensors.items()})


def after(name: str, text: str, kernel: object = None, source: str = "none") -> Transition:
    """From a right kernel to this one."""
    right = run("torch_dense" if text.startswith("indexer_topk") else "torch_blocks", text, source=source)
    assert right.verdict is Verdict.PASSED
    return transition(Pairing(text, right.arm, right.arm), right, run(name, text, kernel, source))


EXPECTED = {
    "lse_base_2": Change.PROMISE, "empty_lse_minus_inf": Change.PROMISE, "one_nan": Change.NAN, "empty_row_is_nan": Change.NAN,
    "nan_of_a_masked_first_block": Change.NAN, "race": Change.NONDETERMINISM, "races": Change.NONDETERMINISM,
    "nan_in_a_band_now_and_then": Change.NONDETERMINISM, "plateau_races": Change.NONDETERMINISM, "zero_output": Change.BROKE,
    "max_logits_unscaled": Change.BROKE, "sink_in_lse": Change.BROKE, "nan_of_unnamed_key": Change.BROKE,
    "length_0_taken_for_1": Change.BROKE, "writes_its_indices": Change.BROKE, "wrong_shape": Change.BROKE, "nan_chosen": Change.BROKE,
    "values_of_other_keys": Change.BROKE, "gives_up_the_last_row": Change.BROKE}


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_a_broken_kernel_is_told_as_what_it_is(name: str, expected: Change) -> None:
    fault = FAULTS[f"broken_{name}"]
    found = after(fault.kernel, fault.case)
    assert found.change is expected, found.detail
    assert exit_code([found]) == 1


def test_what_is_said_of_real_faults() -> None:
    assert after("broken_lse_base_2", FULL).detail == "another base: lse in base 2"
    assert after("broken_lse_base_2", SINK).change is Change.PROMISE
    sentinel = after("broken_empty_lse_minus_inf", MIXED).detail
    assert sentinel.startswith("another sentinel: rows without a valid key") and sentinel.endswith("lse is not inf in 10, but -inf")
    assert after("broken_one_nan", FULL).detail.startswith("NaN in out: reference")
    assert "(like topk_length - 64)" in after("broken_length_minus_a_block", HALF, source="metadata").detail
    assert after("broken_race", HALF).detail.startswith("run-to-run: out differs in 1")


def changed(name: str, convention: Convention = Convention(), **factors: float) -> object:
    """torch_blocks with statistics multiplied, as a kernel that is not registered."""
    def launch(problem: object, length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = attention(problem, length)  # type: ignore[arg-type]
        return out * factors.get("out", 1.0), max_logits * factors.get("max_logits", 1.0), lse * factors.get("lse", 1.0)

    return dataclasses.replace(KERNELS["torch_blocks"], name=name, convention=convention,  # type: ignore[call-arg]
                               prepare=lambda problem: lambda length: launch(problem, length))


@pytest.mark.parametrize(("factors", "expected"), [
    ({"lse": math.log(2)}, Change.PROMISE), ({"lse": math.log(2), "max_logits": math.log(2)}, Change.PROMISE),
    ({"lse": 1 / math.log(2), "max_logits": 1 / math.log(2)}, Change.PROMISE), ({"max_logits": 1 / math.log(2)}, Change.PROMISE),
    ({"lse": 0.69}, Change.BROKE), ({"lse": 1.01}, Change.BROKE), ({"lse": math.log(2), "out": 1.5}, Change.BROKE)])
def test_another_base_in_either_direction(factors: dict[str, float], expected: Change) -> None:
    """A wheel that is taken to return base 2 and no more does gives ln 2 times what is right."""
    found = after("changed", FULL, changed("changed", **factors))
    assert found.change is expected, found.detail


def test_a_right_kernel_against_itself_and_against_another() -> None:
    for text, name in ((MIXED, "torch_blocks"), (ANY, "torch_dense")):
        assert after(name, text).change is Change.SAME
    found = after("changed", MIXED, changed("changed", out=1.0009765625))  # within the budget, other bits
    assert found.change in (Change.NUMBERS, Change.SAME)
    assert set(margins(run("torch_blocks", MIXED))) == {"out", "max_logits", "lse", "out row norm"}
