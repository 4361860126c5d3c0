"""Every deliberately wrong indexer top-k kernel is caught by the check that is there for it, and every check catches one."""
from __future__ import annotations

import functools
import itertools

import pytest
from faults import Judged, run_fault
from hypothesis import HealthCheck, given, settings
from profiles import many
from topk_trials import run_topk

import arms.broken.indexer_topk_lite as broken
from arms.broken.fault import FAULTS
from arms.broken.problems import CROWDED, EXACT, PLAIN, RISING, TIED, TWO
from arms.kernel import load_package
from cases import IndexerTopkCase, load_suite
from cases.strategies import indexer_topk_cases
from harness.topk_trial import TopkRun
from harness.verdicts import CHECKS, CUDA_CHECKS, Verdict

load_package("arms.broken")

ELSEWHERE = {"timed-output", "raises", *CUDA_CHECKS}
"""Faults that show in the timed loop (tests of the worker), by refusing outputs (below), or on CUDA alone (test_topk_metamorphic.py)."""
CAUGHT = {name: fault for name, fault in FAULTS.items() if fault.family == "indexer_topk" and fault.check not in ELSEWHERE}
FLAKY = {"run-to-run"}
EMITTED = set(CHECKS["indexer_topk"]) - {"timed-output", *CUDA_CHECKS}
RIGHT = ("torch_dense", "litetopk_torch")
CASES = sorted({fault.case for fault in CAUGHT.values()} | {TIED, EXACT})


@pytest.fixture(autouse=True)
def launches_counted_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some faults depend on the number of the launch: it must not depend on which tests ran before."""
    monkeypatch.setattr(broken, "_launches", itertools.count())
    monkeypatch.setattr(broken, "_served", [])
    for kept in ("_threshold", "_workspace"):
        monkeypatch.setattr(broken, kept, {})
    monkeypatch.setattr(broken, "_kept", [])


@functools.cache
def unbroken(kernel: str, text: str) -> TopkRun:
    return run_topk(kernel, text)


def caught_by(run: TopkRun | Judged) -> dict[str, Verdict]:
    """Check: its verdict, where that is not PASSED."""
    return {check.name: check.verdict for check in run.checks if check.verdict is not Verdict.PASSED}


@pytest.mark.parametrize("name", CAUGHT)
def test_fault_is_caught_by_its_check(name: str) -> None:
    fault = CAUGHT[name]
    verdicts = caught_by(run_fault(name)[""])
    for check in (fault.check, *fault.also):
        assert verdicts.get(check) is (Verdict.FLAKY if check in FLAKY else Verdict.FAILED), verdicts


@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("text", CASES)
def test_right_kernels_pass_every_check_on_the_same_cases(kernel: str, text: str) -> None:
    assert caught_by(unbroken(kernel, text)) == {}


def test_every_check_catches_a_fault_and_is_run_on_the_right_kernels() -> None:
    assert {check for fault in CAUGHT.values() for check in (fault.check, *fault.also)} == EMITTED
    assert {check.name for kernel in RIGHT for text in CASES for check in unbroken(kernel, text).checks} == EMITTED


@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("text", [str(case) for case in load_suite("smoke") if case.family == "indexer_topk"])
def test_right_kernels_pass_the_smoke_suite(kernel: str, text: str) -> None:
    assert caught_by(unbroken(kernel, text)) == {}


@settings(deadline=None, max_examples=many(20), suppress_health_check=[HealthCheck.too_slow])
@given(indexer_topk_cases(max_work=1 << 14))
def test_right_kernels_pass_every_check_on_any_case(case: IndexerTopkCase) -> None:
    """They fail on no case: what the checks say of others is then theirs. VACUOUS: scores that differ, all within the margin.
    `threearm mutants` takes them through many more."""
    for kernel in RIGHT:
        assert set(caught_by(run_topk(kernel, str(case))).values()) <= {Verdict.VACUOUS}


def test_faults_within_every_margin_are_caught_by_the_scores_that_the_arm_shows() -> None:
    """Why own-scores exists: at the border of a margin the reference cannot say which key is better."""
    for fault in ("swaps_at_the_border", "values_rounded"):
        found = caught_by(run_topk(f"broken_{fault}", CROWDED))
        assert found.keys() <= {"own-scores", "values"} and found, found


def test_a_stale_cache_passes_everything_but_the_timed_loop() -> None:
    """Why timed-output exists (tests/test_topk_trial.py): up to there it is right."""
    assert caught_by(run_topk("broken_cached_after_20_topk_launches", PLAIN)) == {}


def test_a_wrong_width_is_an_error_of_the_launch() -> None:
    with pytest.raises(ValueError, match=r"indices must be torch.int32 \[6, 64\], the kernel returned torch.int32 \[6, 63\]"):
        run_topk("broken_wrong_width", PLAIN)


@pytest.mark.parametrize(("fault", "check", "text", "line"), [
    ("last_tile_of_keys_skipped", "set", RISING, "in the last, partial tile of 128 keys, counted from the window's start"),
    ("full_buffer_drops_silently", "set", "indexer_topk:requests=9/4000,topk=64", "before position 256 of the window"),
    ("last_rows_skipped", "shape", PLAIN, "past the last whole block of 4; it explains 100% of the bad rows"),
    ("offset_added_twice", "shape", TWO, "rows whose window begins after key 0; it explains 100% of the bad rows"),
    ("sees_the_future", "shape", RISING, "outside the window"), ("races", "run-to-run", PLAIN, "the last row of the batch")])
def test_a_failure_names_the_border_that_the_fault_has(fault: str, check: str, text: str, line: str) -> None:
    """The localiser on real outputs."""
    where = next(c.where for c in run_topk(f"broken_{fault}", text).checks if c.name == check)
    assert any(line in said for said in where), where
