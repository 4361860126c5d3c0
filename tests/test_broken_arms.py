"""Every deliberately wrong kernel is caught by the check that is there for it, and every check catches one.

So each check can fail, and each fault that the project claims to see has a kernel that has it.
"""
from __future__ import annotations

import functools
import itertools

import pytest
from trials import run_arms

import arms.broken.sparse_prefill_state as broken
from arms.kernel import KERNELS, load_package
from harness.trial import ArmRun
from harness.verdicts import Verdict

load_package("arms.broken")

FULL = "sparse_prefill:s_q=6,s_kv=300,h_q=2"
HALF = "sparse_prefill:s_q=6,s_kv=3000,h_q=2,topk=384,rows=half"
MIXED = "sparse_prefill:s_q=26,s_kv=300,h_q=2,rows=mixed"
HOLES = "sparse_prefill:s_q=16,s_kv=300,h_q=2,rows=ragged,holes=0.1"
SINK = "sparse_prefill:s_q=8,s_kv=300,h_q=4,rows=ragged,sink=normal"
WILD = "sparse_prefill:s_q=8,s_kv=300,h_q=2,rows=half,tail=wild"
LIVE = "sparse_prefill:s_q=8,s_kv=300,h_q=2,rows=half,tail=live"
FP8 = "sparse_prefill:dtype=fp8,s_q=6,s_kv=300,h_q=2,scales=any"
SINKS = "sparse_prefill:s_q=3,s_kv=300,h_q=128,d_qk=512,sink=normal"
STEEP = "sparse_prefill:s_q=6,s_kv=300,h_q=2,values=large,sm_scale=0.25"
NARROW = "sparse_prefill:s_q=6,s_kv=300,h_q=2,topk=100,rows=ragged"
POISON = "sparse_prefill:s_q=3,s_kv=3000,h_q=2,rows=half,values=poison"

CAUGHT = {
    "zero_output": ("reference", FULL),
    "negated": ("reference", FULL),
    "drops_last_key": ("reference", FULL),
    "doubles_first_key": ("reference", FULL),
    "reads_pad_as_key_0": ("reference", HALF),
    "reads_past_kv": ("reference", WILD),
    "rows_rolled": ("reference", HALF),
    "right_half_scaled": ("reference", HALF),
    "denominator_of_rounded_p": ("reference", FULL),
    "one_nan": ("reference", FULL),
    "lse_base_2": ("reference", FULL),
    "empty_lse_minus_inf": ("sentinels", MIXED),
    "empty_row_stale": ("sentinels", MIXED),
    "max_logits_unscaled": ("reference", FULL),
    "sink_dropped": ("reference", SINK),
    "sink_in_lse": ("reference", SINK),
    "ignores_length": ("reference", LIVE),
    "length_minus_one": ("reference", HALF),
    "length_plus_one": ("reference", LIVE),
    "length_of_next_row": ("none-vs-backscan", HOLES),
    "skips_last_pair": ("none-vs-metadata", HALF),
    "length_0_differs": ("backscan-vs-metadata", MIXED),
    "full_width_differs": ("full-width", HALF),
    "skip_moves_left_half": ("none-vs-backscan", HALF),
    "skip_moves_two_ulp": ("none-vs-metadata", HALF),
    "backscan_off_by_one": ("lengths", FULL),
    "backscan_stops_at_hole": ("lengths", HOLES),
    "backscan_counts_valid": ("lengths", HOLES),
    "metadata_cuts_keys": ("lengths", FULL),
    "metadata_of_next_row": ("backscan-vs-metadata", HOLES),
    "metadata_clamped_to_1": ("lengths", LIVE),
    "one_element_unwritten": ("written", FULL),
    "one_head_stale": ("written", HALF),
    "race": ("run-to-run", HALF),
    "writes_its_indices": ("inputs-unchanged", HALF),
    "nan_of_unnamed_key": ("nan-leak", HALF),
    "scales_rounded_to_powers_of_two": ("reference", FP8),
    "sink_of_64_heads": ("reference", SINKS),
    "no_running_maximum": ("reference", STEEP),
    "reads_past_the_row": ("reference", NARROW),
    "writes_its_lengths": ("inputs-unchanged", MIXED),
    "stale_workspace": ("after-another", MIXED),
    "loads_key_0_for_a_pad": ("nan-leak", MIXED),
}
"""Fault: the check that must catch it, and a case that shows it. Many are caught by others as well."""

ONLY_IN_THE_WORKER = {"cached_after_20_launches", "wrong_shape"}
"""By the check of the timed loop's output (tests of the worker), and by refusing the outputs (below)."""

EMITTED = {"reference", "sentinels", "lengths", "backscan-vs-metadata", "none-vs-metadata", "none-vs-backscan", "full-width",
           "run-to-run", "inputs-unchanged", "written", "nan-leak", "after-another"}
CASES = sorted({text for _, text in CAUGHT.values()} | {POISON})


@pytest.fixture(autouse=True)
def launches_counted_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some faults depend on the number of the launch: it must not depend on which tests ran before."""
    monkeypatch.setattr(broken, "_launches", itertools.count())
    monkeypatch.setattr(broken, "_served", itertools.count())
    monkeypatch.setattr(broken, "_workspace", {})


@functools.cache
def unbroken(text: str) -> dict[str, ArmRun]:
    return run_arms("torch_blocks", text)


def caught_by(runs: dict[str, ArmRun]) -> dict[str, set[Verdict]]:
    """Check: its verdicts other than PASSED, over the arms."""
    found: dict[str, set[Verdict]] = {}
    for run in runs.values():
        for check in run.checks:
            if check.verdict is not Verdict.PASSED:
                found.setdefault(check.name, set()).add(check.verdict)
    return found


def test_table_holds_every_broken_kernel() -> None:
    registered = {name.removeprefix("broken_") for name, kernel in KERNELS.items()
                  if name.startswith("broken_") and kernel.family == "sparse_prefill"}
    assert registered == set(CAUGHT) | ONLY_IN_THE_WORKER


@pytest.mark.parametrize("fault", CAUGHT)
def test_fault_is_caught_by_its_check(fault: str) -> None:
    check, text = CAUGHT[fault]
    verdicts = caught_by(run_arms(f"broken_{fault}", text))
    assert verdicts.get(check) == {Verdict.FLAKY if check == "run-to-run" else Verdict.FAILED}


@pytest.mark.parametrize("text", CASES)
def test_unbroken_kernel_passes_every_check_on_the_same_cases(text: str) -> None:
    assert caught_by(unbroken(text)) == {}


def test_every_check_catches_a_fault_and_is_run_on_the_unbroken_kernel() -> None:
    assert {check for check, _ in CAUGHT.values()} == EMITTED
    assert {check.name for text in CASES for run in unbroken(text).values() for check in run.checks} == EMITTED


def test_nan_of_an_unnamed_key_shows_in_a_case_that_is_poisoned_itself() -> None:
    assert caught_by(run_arms("broken_nan_of_unnamed_key", POISON)).keys() == {"nan-leak", "reference"}


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
