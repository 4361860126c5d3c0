"""Every deliberately wrong indexer top-k kernel is caught by the check that is there for it, and every check catches one."""
from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from topk_trials import run_topk

import arms.broken.indexer_topk_lite as broken
from arms.kernel import KERNELS, load_package
from cases import IndexerTopkCase, load_suite
from cases.strategies import indexer_topk_cases
from harness.topk_trial import TopkRun
from harness.verdicts import Verdict

load_package("arms.broken")

PLAIN = "indexer_topk:requests=6/300,topk=64"
ANY = "indexer_topk:requests=6/300,topk=64,scales=any,weights=mixed"
EXACT = "indexer_topk:requests=6/300,topk=64,values=integer,weights=mixed"
HEADS = "indexer_topk:requests=3/300,topk=64,h=64"
TWO = "indexer_topk:requests=4/260+5/200,topk=48,values=integer"
SHORT = "indexer_topk:requests=12/40+5/90,topk=32,empty=0.2,pad_rows=1"
SHIFTED = "indexer_topk:requests=4/260+5/200,topk=48,values=shifted,sigma=30"
RISING = "indexer_topk:requests=4/400,topk=32,values=ascending"
FLAT = "indexer_topk:requests=4/300,topk=64,values=flat"
TIED = "indexer_topk:requests=5/400,topk=64,values=integer,ties=runs"
PLATEAU = "indexer_topk:requests=5/600,topk=48,values=plateau,share=0.9"
NAN = "indexer_topk:requests=6/300,topk=64,values=nan"
INF = "indexer_topk:requests=17/300,topk=64,values=inf,weights=mixed,share=0.5"
MINUS_INF = "indexer_topk:requests=6/300,topk=64,values=inf,weights=negative,share=0.9"
LONG = "indexer_topk:requests=5/3000,topk=40"
CROWDED = "indexer_topk:requests=2/9000,topk=2000"
LONG_EXACT = "indexer_topk:requests=5/3000,topk=600,values=integer"
DIGITS = "indexer_topk:requests=65/3000,topk=1030,values=digits,weights=mixed"
SCALE_DIGITS = f"{DIGITS},scales=any"
ONE = "indexer_topk:requests=1/700,topk=40"

CAUGHT = {
    "drops_one_member": ("shape", PLAIN),
    "names_a_key_twice": ("shape", PLAIN),
    "pads_with_0": ("shape", SHORT),
    "pads_with_minus_2": ("shape", SHORT),
    "pad_before_a_key": ("shape", SHORT),
    "relative_to_ks": ("shape", TWO),
    "offset_added_twice": ("shape", TWO),
    "sees_the_future": ("shape", RISING),
    "sees_what_is_before_ks": ("shape", SHIFTED),
    "last_rows_skipped": ("shape", PLAIN),
    "ties_of_the_kth_dropped": ("shape", PLATEAU),
    "nan_empties_the_row": ("shape", NAN),
    "genuine_minus_inf_lost": ("shape", MINUS_INF),
    "absolute_weights": ("set", ANY),
    "no_relu": ("set", PLAIN),
    "kv_scale_forgotten": ("set", ANY),
    "kv_scale_of_the_next_key": ("set", EXACT),
    "one_head_dropped": ("set", PLAIN),
    "second_32_heads_dropped": ("set", HEADS),
    "heads_of_the_next_row": ("set", PLAIN),
    "last_columns_dropped": ("set", PLAIN),
    "best_key_dropped": ("set", PLAIN),
    "smallest_chosen": ("set", PLAIN),
    "ranked_by_bf16": ("set", LONG),
    "ranked_by_fp16": ("set", LONG_EXACT),
    "infinite_score_skipped": ("set", INF),
    "nan_chosen": ("nan-chosen", NAN),
    "last_tile_of_keys_skipped": ("set", RISING),
    "int32_overflow": ("set", LONG),
    "gate_of_request_0": ("shape", SHIFTED),
    "gate_counts_twice": ("shape", PLAIN),
    "gate_of_a_short_sample": ("shape", "indexer_topk:requests=4/400,topk=64,values=descending"),
    "full_buffer_drops_silently": ("set", RISING),
    "tie_buffer_overflows": ("set", LONG),
    "flat_row_emits_nothing": ("shape", FLAT),
    "boundary_ranked_by_16_bits": ("set", LONG),
    "swaps_at_the_border": ("own-scores", CROWDED),
    "values_of_other_keys": ("values", PLAIN),
    "values_rounded": ("values", PLAIN),
    "certifies_what_is_wrong": ("status", RISING),
    "gives_up_the_last_row": ("status", PLAIN),
    "gives_up_and_keeps_keys": ("status", PLAIN),
    "pads_unwritten": ("written", SHORT),
    "values_unwritten": ("written", PLAIN),
    "status_unwritten": ("written", PLAIN),
    "holds_all_scores": ("memory", LONG),
    "keeps_a_workspace": ("memory", PLAIN),
    "races": ("run-to-run", PLAIN),
    "writes_its_weights": ("inputs-unchanged", PLAIN),
    "writes_its_windows": ("inputs-unchanged", SHORT),
    "threshold_of_the_launch_before": ("after-another", ONE),
    "tail_of_the_launch_before": ("after-another", SHORT),
    "weights_in_fp16": ("set", DIGITS),
    "kv_scale_in_fp16": ("set", SCALE_DIGITS),
    "ranked_by_20_bits": ("set", DIGITS),
    "shows_zeros_for_its_scores": ("values", PLAIN),
    "chooses_in_set_up": ("reads-inputs", PLAIN),
    "keeps_its_keys": ("reads-inputs", PLAIN),
}
"""Fault: the check that must catch it, and a case that shows it. Many are caught by others as well."""

ALSO_CAUGHT = {"best_key_dropped": ("dense-vs-litetopk", PLAIN), "one_head_dropped": ("downstream", PLAIN)}
"""Checks that hold the arm against torch_dense catch what `set` catches; they differ in what they take for right."""

ONLY_IN_THE_WORKER = {"cached_after_20_topk_launches", "wrong_width"}

EMITTED = {"shape", "set", "nan-chosen", "own-scores", "values", "status", "written", "memory", "run-to-run", "inputs-unchanged",
           "after-another", "reads-inputs", "dense-vs-litetopk", "downstream"}
RIGHT = ("torch_dense", "litetopk_torch")
CASES = sorted({text for _, text in CAUGHT.values()} | {TIED, EXACT})


@pytest.fixture(autouse=True)
def launches_counted_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some faults depend on the number of the launch: it must not depend on which tests ran before."""
    monkeypatch.setattr(broken, "_launches", itertools.count())
    monkeypatch.setattr(broken, "_served", itertools.count())
    for kept in ("_threshold", "_workspace"):
        monkeypatch.setattr(broken, kept, {})
    monkeypatch.setattr(broken, "_kept", [])


@functools.cache
def unbroken(kernel: str, text: str) -> TopkRun:
    return run_topk(kernel, text)


def caught_by(run: TopkRun) -> dict[str, Verdict]:
    """Check: its verdict, where that is not PASSED."""
    return {check.name: check.verdict for check in run.checks if check.verdict is not Verdict.PASSED}


def test_table_holds_every_broken_kernel() -> None:
    registered = {name.removeprefix("broken_") for name, kernel in KERNELS.items()
                  if name.startswith("broken_") and kernel.family == "indexer_topk"}
    assert registered == set(CAUGHT) | ONLY_IN_THE_WORKER


@pytest.mark.parametrize(("fault", "check", "text"), [(fault, *rest) for table in (CAUGHT, ALSO_CAUGHT) for fault, rest in table.items()])
def test_fault_is_caught_by_its_check(fault: str, check: str, text: str) -> None:
    verdicts = caught_by(run_topk(f"broken_{fault}", text))
    assert verdicts.get(check) is (Verdict.FLAKY if check == "run-to-run" else Verdict.FAILED), verdicts


@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("text", CASES)
def test_right_kernels_pass_every_check_on_the_same_cases(kernel: str, text: str) -> None:
    assert caught_by(unbroken(kernel, text)) == {}


def test_every_check_catches_a_fault_and_is_run_on_the_right_kernels() -> None:
    assert {check for table in (CAUGHT, ALSO_CAUGHT) for check, _ in table.values()} == EMITTED
    assert {check.name for kernel in RIGHT for text in CASES for check in unbroken(kernel, text).checks} == EMITTED


@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("text", [str(case) for case in load_suite("smoke") if case.family == "indexer_topk"])
def test_right_kernels_pass_the_smoke_suite(kernel: str, text: str) -> None:
    assert caught_by(unbroken(kernel, text)) == {}


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(indexer_topk_cases(max_work=1 << 15))
def test_right_kernels_pass_every_check_on_any_case(case: IndexerTopkCase) -> None:
    """They fail on no case: what the checks say of others is then theirs. VACUOUS: scores that differ, all within the margin."""
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
