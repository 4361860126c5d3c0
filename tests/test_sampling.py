"""Two sides timed in turns by real processes: what is sampled, what counts, what is invalid, and that a planted slow-down is found."""
from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from harness import sampling
from harness.client import Unfit, WorkerOptions
from harness.comparing import TIME_IS_UP, Interrupted, compare
from harness.comparison import BASE, CANDIDATE, Burst, Pairing, Rule, TimeVerdict
from harness.sampling import Plan, Side, burst, sample_pairs, unclean
from harness.watch import Reading, Watch

PLANTED = str(Path(__file__).parent / "planted.py")
CACHED, DIES, STALE = 7, 11, 13  # s_q of the case in which planted_deeds does it
CASE = "sparse_prefill:s_q=2,h_q=4,topk=128"
QUICK = Plan(processes=2, most=2, rounds=2, burst_ms=1.0)


def side(tmp_path: Path, **changes: object) -> Side:
    options = WorkerOptions("cpu", False, (PLANTED,), 1 << 36, environment=("OMP_NUM_THREADS=1",))
    return Side(dataclasses.replace(options, **changes), tmp_path / "worker.log")  # type: ignore[arg-type]


def rule(pairing: Pairing) -> Rule:
    return Rule(0.05, 20.0)


# --- what is sampled ---------------------------------------------------------------------------------------------------------


def test_a_generation_is_fresh_processes_and_its_rounds_are_abba_turned_round_each_time(tmp_path: Path) -> None:
    pairing = Pairing(CASE, "torch_blocks/none", "torch_blocks/metadata")
    generations = sample_pairs([pairing], side(tmp_path), side(tmp_path), QUICK, 2)[pairing]
    orders = [[["base", "candidate"].index(b.side) for b in r.bursts] for rounds in generations for r in rounds]
    assert orders == [[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0]]
    counts = {len(b.us) for rounds in generations for r in rounds for b in r.bursts}
    assert min(counts) >= sampling.FEWEST and all(b.us and min(b.us) > 0 for rounds in generations for r in rounds for b in r.bursts)
    assert not any(r.unclean for rounds in generations for r in rounds)


def test_the_two_sides_are_given_the_same_or_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = sampling.Generation._ask

    def other(self: sampling.Generation, which: str, pairing: Pairing, answer: str, **request: object) -> dict[str, object]:
        found = original(self, which, pairing, answer, **request)
        return {**found, "inputs": {"all": "0"}} if answer == "held" and which == CANDIDATE else found

    monkeypatch.setattr(sampling.Generation, "_ask", other)
    pairing = Pairing(CASE, "torch_blocks/none", "torch_blocks/none")
    found = compare([pairing], side(tmp_path), side(tmp_path), QUICK, rule)[pairing]
    assert found.verdict is TimeVerdict.INVALID and "its inputs are not the base's" in found.why


def test_a_side_that_cannot_start_is_said_at_once(tmp_path: Path) -> None:
    pairing = Pairing(CASE, "torch_blocks/none", "torch_blocks/none")
    with pytest.raises(Unfit, match="no_such"):
        compare([pairing], side(tmp_path), side(tmp_path, load=(str(tmp_path / "no_such.py"),)), QUICK, rule)


def test_another_interpreter_does_not_inherit_what_would_bring_our_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper writes down what it was given, then is our own interpreter."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    wrapper, seen = tmp_path / "python", tmp_path / "seen"
    wrapper.write_text(f'#!/bin/sh\necho "[$PYTHONPATH]" >> {seen}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    pairing = Pairing(CASE, "torch_blocks/none", "torch_blocks/none")
    told = side(tmp_path, python=str(wrapper), environment=("PYTHONPATH=/given",))
    sample_pairs([pairing], side(tmp_path, python=str(wrapper)), told, QUICK, 1)
    assert sorted(seen.read_text().split()) == ["[/given]", "[]"]


# --- what is invalid ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_and_what_does_not_end_well_is_invalid(tmp_path: Path) -> None:
    """In one go: an arm faster than light, one that ends its process, one whose timed output is not the checked one, and a right one
    between them, which has its verdict."""
    small, heads = "h_q=4,topk=128", min(1024, 32 * (os.cpu_count() or 1))  # light is as many times faster as there are cores
    cached, dead, stale, right = (Pairing(f"sparse_prefill:s_q={s_q},{size}", "torch_blocks/none", "planted_deeds/none") for s_q, size in (
        (CACHED, f"h_q={heads}"), (DIES, small), (STALE, small), (2, small)))
    checked = {"out": "what was checked"}
    found = compare([cached, dead, stale, right], side(tmp_path), side(tmp_path), QUICK, lambda _: Rule(0.9, 20.0),
                    outputs=lambda pairing: ({}, checked if pairing == stale else {}))
    assert found[cached].verdict is TimeVerdict.INVALID and "is the least for" in found[cached].why
    assert found[dead].verdict is TimeVerdict.INVALID and "candidate: CRASHED: exit code 3 in phase sample" in found[dead].why
    assert found[stale].verdict is TimeVerdict.INVALID and "candidate: out of the last timed call" in found[stale].why
    assert found[right].verdict is not TimeVerdict.INVALID and found[right].estimate is not None
    assert found[right].stopped and found[right].samples and found[right].contract == "wall"


def test_an_interrupt_leaves_what_was_sampled_until_then(tmp_path: Path) -> None:
    one, two = (Pairing(f"{CASE},seed={seed}", "torch_blocks/none", "torch_blocks/none") for seed in (1, 2))
    done = []

    def progress(number: int, most: int, what: str) -> None:
        done.append(what)
        if len(done) == 3:  # the first pairing has had its second pair of processes, the second has not
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        compare([one, two], side(tmp_path), side(tmp_path), dataclasses.replace(QUICK, processes=3), rule, progress)
    found = stopped.value.comparisons
    assert [len(found[pairing].processes) for pairing in (one, two)] == [2, 1]
    assert found[one].estimate is not None and found[two].verdict is TimeVerdict.UNRESOLVED


def test_nothing_is_timed_any_more_once_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock strikes when the second pairing has had its first pair of processes: the first two have one each, the third has none,
    and each has its verdict all the same."""
    some = [Pairing(f"{CASE},seed={seed}", "torch_blocks/none", "torch_blocks/none") for seed in (1, 2, 3)]
    struck: list[str] = []
    monkeypatch.setattr(Plan, "time_is_up", lambda plan: len(struck) >= 2)
    found = compare(some, side(tmp_path), side(tmp_path), QUICK, rule, lambda number, most, what: struck.append(what))
    assert [len(found[pairing].processes) for pairing in some] == [1, 1, 0]
    assert all(found[pairing].verdict is TimeVerdict.UNRESOLVED and found[pairing].stopped == TIME_IS_UP for pairing in some)


@pytest.mark.parametrize(("until", "up"), [(0.0, False), (-1.0, True), (60.0, False)])
def test_time_is_up_at_its_moment(until: float, up: bool) -> None:
    assert Plan(until=until and time.monotonic() + until).time_is_up() is up


# --- which rounds count ------------------------------------------------------------------------------------------------------


def bursts(base: list[int], candidate: list[int], reasons: int = 0) -> list[Burst]:
    return [Burst(name, [1.0] * 5, clocks, 300.0, reasons) for name, clocks in
            ((BASE, base), (CANDIDATE, candidate), (CANDIDATE, candidate), (BASE, base))]


def watching() -> Watch:
    watch = Watch()
    watch.most_mhz = 1980
    return watch


@pytest.mark.parametrize(("some", "why"), [
    (bursts([1980, 1980], [1980]), ""),
    (bursts([1965], [1980], reasons=0x4), ""),  # the power cap alone does not tell the sides apart
    (bursts([1980], [1700], reasons=0x4), "clocks more than 1% apart under the power cap"),
    (bursts([1980], [1955]), "clocks more than 1% apart"),
    (bursts([1980], [1980], reasons=0x20), "thermal slowdown"),
    (bursts([1980], [1980], reasons=0x88), "hardware slowdown and power brake"),
    (bursts([1300], [1300]), "clock below 75% of 1980 MHz"),
    (bursts([1980], []), "no clock was read"),
    (bursts([1980], [1980], reasons=0x1), ""),  # idle is no trouble
])
def test_a_round_counts_only_where_both_sides_had_one_clock_and_nothing_slowed_them(some: list[Burst], why: str) -> None:
    assert unclean(some, watching()) == why


def test_without_a_gpu_every_round_counts_and_with_unreadable_clocks_none() -> None:
    assert unclean(bursts([], []), Watch()) == ""
    watch = Watch()
    watch.problem = "NVML: not found"
    assert unclean(bursts([], []), watch) == "NVML: not found"


def test_a_burst_keeps_what_the_gpu_did_meanwhile() -> None:
    found = burst(BASE, [1.0], [Reading(0.0, 1980, 300.0, 0x4), Reading(0.1, 1500, 500.0, 0x20)])
    assert (found.clocks, found.watts, found.reasons) == ([1980, 1500], 400.0, 0x24)


# --- proof with real arms ----------------------------------------------------------------------------------------------------

SMALL = "sparse_prefill:s_q=2,s_kv=32,h_q=2,d_qk=512,topk=16"


@pytest.mark.perf
def test_200_comparisons_of_an_arm_with_itself_and_40_with_one_a_tenth_slower(tmp_path: Path) -> None:
    """None of the 200 is SLOWER or FASTER, whatever else the machine does, and at least 38 of the 40 are SLOWER. The arms of the 40 take a
    time that a clock sets: how often torch_blocks itself is told from one a tenth slower is the machine's doing (docs/timing.md)."""
    cases = [f"{SMALL},seed={seed}" for seed in range(200)]
    same = [Pairing(case, "torch_blocks/none", "torch_blocks/none") for case in cases]
    slower = [Pairing(case, "planted_600_us/none", "planted_660_us/none") for case in cases[:40]]
    one = side(tmp_path)
    found = compare([*same, *slower], one, one, Plan(rounds=1, burst_ms=3.0, most=4), lambda _: Rule(0.05, 10.0))
    alike = Counter(found[pairing].verdict for pairing in same)
    assert not alike[TimeVerdict.SLOWER] and not alike[TimeVerdict.FASTER] and not alike[TimeVerdict.INVALID], alike
    caught = Counter(found[pairing].verdict for pairing in slower)
    assert caught[TimeVerdict.SLOWER] >= 38, (caught, [found[p].why for p in slower if found[p].verdict is not TimeVerdict.SLOWER])
    print(alike, caught)
