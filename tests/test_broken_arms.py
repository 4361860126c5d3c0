"""Every deliberately wrong kernel is caught by the check that is there for it, and every check catches one.

So each check can fail, and each fault that the project claims to see has a kernel that has it.
"""
from __future__ import annotations

import functools
import itertools

import pytest
from faults import Judged, run_fault
from trials import run_arms

import arms.broken.sparse_prefill_state as broken
from arms.broken.fault import FAULTS
from arms.broken.problems import FULL, HALF, POISON
from arms.kernel import KERNELS, load_package
from harness.trial import ArmRun
from harness.verdicts import CHECKS, CUDA_CHECKS, Verdict

load_package("arms.broken")

ELSEWHERE = {"timed-output", "raises", *CUDA_CHECKS}
"""Faults that show in the timed loop (tests of the worker), by refusing the outputs (below), or on CUDA alone (test_stress.py)."""
CAUGHT = {name: fault for name, fault in FAULTS.items() if fault.family == "sparse_prefill" and fault.check not in ELSEWHERE}
FLAKY = {"run-to-run"}
EMITTED = set(CHECKS["sparse_prefill"]) - {"timed-output", *CUDA_CHECKS}
CASES = sorted({fault.case for fault in CAUGHT.values()} | {POISON})


@pytest.fixture(autouse=True)
def launches_counted_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some faults depend on the number of the launch: it must not depend on which tests ran before."""
    monkeypatch.setattr(broken, "_launches", itertools.count())
    monkeypatch.setattr(broken, "_served", [])
    monkeypatch.setattr(broken, "_workspace", {})


@functools.cache
def unbroken(text: str) -> dict[str, ArmRun]:
    return run_arms("torch_blocks", text)


def caught_by(runs: dict[str, ArmRun] | dict[str, Judged]) -> dict[str, set[Verdict]]:
    """Check: its verdicts other than PASSED, over the arms."""
    found: dict[str, set[Verdict]] = {}
    for run in runs.values():
        for check in run.checks:
            if check.verdict is not Verdict.PASSED:
                found.setdefault(check.name, set()).add(check.verdict)
    return found


def test_table_holds_every_broken_kernel() -> None:
    assert {name for name in KERNELS if name.startswith("broken_")} == FAULTS.keys()
    assert all(KERNELS[name].family == fault.family for name, fault in FAULTS.items())


@pytest.mark.parametrize("name", CAUGHT)
def test_fault_is_caught_by_its_check(name: str) -> None:
    fault = CAUGHT[name]
    verdicts = caught_by(run_fault(name))
    for check in (fault.check, *fault.also):
        assert verdicts.get(check) == {Verdict.FLAKY if check in FLAKY else Verdict.FAILED}, verdicts


@pytest.mark.parametrize("text", CASES)
def test_unbroken_kernel_passes_every_check_on_the_same_cases(text: str) -> None:
    assert caught_by(unbroken(text)) == {}


def test_every_check_catches_a_fault_and_is_run_on_the_unbroken_kernel() -> None:
    assert {check for fault in CAUGHT.values() for check in (fault.check, *fault.also)} == EMITTED
    assert {check.name for text in CASES for run in unbroken(text).values() for check in run.checks} == EMITTED


def test_nan_of_an_unnamed_key_shows_in_a_case_that_is_poisoned_itself() -> None:
    assert caught_by(run_arms("broken_nan_of_unnamed_key", POISON)).keys() == {"nan-leak", "reference", "unnamed-changed"}


def test_a_failure_names_the_rows_that_the_fault_touches() -> None:
    """The localiser on real outputs: rows of 192 entries in a width of 384 skip a pair."""
    check = next(c for c in run_arms("broken_skip_moves_left_half", HALF)["backscan"].checks if c.name == "none-vs-backscan")
    assert "elements outside the promised rows and columns" in check.detail and "more than" not in check.detail
    assert check.where[2] == "columns 0..255 (256 of 512)"
    check = next(c for c in run_arms("broken_skip_moves_two_ulp", HALF)["metadata"].checks if c.name == "none-vs-metadata")
    assert "more than 1 ULP" in check.detail and set(check.ulp) == {"2"}


def test_a_stale_cache_passes_everything_but_the_timed_loop() -> None:
    """Why timed-output exists: up to there it is right."""
    assert caught_by(run_arms("broken_cached_after_20_launches", HALF)) == {}


def test_a_wrong_shape_is_an_error_of_the_launch() -> None:
    with pytest.raises(ValueError, match=r"out must be torch.bfloat16 \[6, 2, 512\], the kernel returned torch.bfloat16 \[6, 1, 512\]"):
        run_arms("broken_wrong_shape", FULL)
