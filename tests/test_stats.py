"""The statistics are proven on machines that are random numbers (tests/simulated_times.py): what is the same is never called slower, what
is 10 % slower is found, intervals hold the truth as often as they say, and an estimator that is wrong fails at this."""
from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np
import pytest
from simulated_times import AABB, ABBA, FEWEST, MACHINES, MOST, Machine, generations, heavy, normal, verdicts, verdicts_otherwise

from harness.comparison import BASE, CANDIDATE, Burst, Estimate, Round, Rule, TimeVerdict
from harness.stats import (
    clean,
    estimate,
    geometric_mean,
    judge,
    log_ratio,
    narrow,
    percent,
    quantile,
    suspect,
)
from harness.thresholds import calibrated, rule_of

SLOWER, FASTER, SAME, UNRESOLVED = TimeVerdict.SLOWER, TimeVerdict.FASTER, TimeVerdict.SAME, TimeVerdict.UNRESOLVED
RULE = Rule(0.02, 1.0)


def one(*us: float, unclean: str = "") -> Round:
    """A round in the order base, candidate, candidate, base, one sample a burst."""
    return Round([Burst(side, [each]) for side, each in zip((BASE, CANDIDATE, CANDIDATE, BASE), us)], unclean)


def seen(ratio: float, half: float, base_us: float = 1000.0, processes: int = 3) -> Estimate:
    """An estimate whose interval reaches `half` to both sides, in logs."""
    return Estimate(ratio, ratio * math.exp(-half), ratio * math.exp(half), base_us, base_us * ratio, processes, 2 * processes)


# --- the interval -----------------------------------------------------------------------------------------------------


def test_an_interval_by_hand() -> None:
    values = [0.01, 0.02, 0.06]
    found = estimate([[one(100, 100 * math.exp(v), 100 * math.exp(v), 100)] for v in values], 0.95)
    assert found is not None
    half = 4.302653 * statistics.stdev(values) / math.sqrt(3)
    assert math.log(found.ratio) == pytest.approx(0.03)
    assert (math.log(found.low), math.log(found.high)) == (pytest.approx(0.03 - half), pytest.approx(0.03 + half))
    assert (found.base_us, found.processes, found.rounds) == (100, 3, 3)
    assert found.candidate_us == pytest.approx(100 * math.exp(0.02))


def test_a_linear_drift_cancels_and_spikes_do_not_count() -> None:
    drifting = Round([Burst(side, [us, us, us * 9]) for side, us in zip((BASE, CANDIDATE, CANDIDATE, BASE), (100, 110, 121, 133.1))])
    found = estimate([[drifting]] * 2, 0.95)
    assert found is not None and found.ratio == pytest.approx(1)


def test_processes_that_agree_by_chance_give_no_narrow_interval() -> None:
    """Between processes nothing, within them much: the rounds say how far off each process's mean may be."""
    rounds = [one(100, 103, 103, 100), one(100, 97, 97, 100)]
    found = estimate([rounds] * 3, 0.95)
    assert found is not None
    spread = statistics.stdev([math.log(1.03), math.log(0.97)]) / math.sqrt(2)
    assert math.log(found.high / found.low) / 2 == pytest.approx(4.302653 * spread / math.sqrt(3))


@pytest.mark.parametrize("bad", [
    one(100, 100, 100, 100, unclean="throttled"), Round([]), one(100, 0, 100, 100), Round([Burst(BASE, [1.0]), Burst(CANDIDATE, [])]),
    Round([Burst(BASE, [1.0]), Burst(BASE, [1.0])])])
def test_what_does_not_count(bad: Round) -> None:
    good = one(100, 110, 110, 100)
    assert not clean(bad) and clean(good)
    assert estimate([[good], [bad], [bad]], 0.95) is None
    found = estimate([[good, bad], [good, bad], [bad]], 0.95)
    assert found is not None and (found.processes, found.rounds) == (2, 2) and found.ratio == pytest.approx(1.1)


def test_nothing_at_all() -> None:
    assert estimate([], 0.95) is None and estimate([[]] * 5, 0.95) is None
    assert judge(None, None, RULE)[0] is UNRESOLVED and not suspect(None, RULE) and not narrow(None, RULE)


def covered(machine: Machine, processes: int, how_often: int = 1000, change: float = 0.03) -> float:
    """The share of intervals that hold the true ratio."""
    rng = np.random.default_rng(processes)
    found = [estimate(generations(rng, machine, processes, change), 0.95) for _ in range(how_often)]
    return sum(each is not None and each.low <= 1 + change <= each.high for each in found) / how_often


@pytest.mark.parametrize("processes", [3, 5, 10])
def test_the_interval_holds_the_truth(processes: int) -> None:
    assert covered(MACHINES["normal offsets"], processes) >= 0.93


@pytest.mark.parametrize("name", ["heavy-tailed offsets", "linear drift", "spikes", "clock steps"])
def test_the_interval_holds_it_on_worse_machines(name: str) -> None:
    assert covered(MACHINES[name], 5, 400) >= 0.93


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "confirmed", "verdict", "why"), [
    (seen(1.102, 0.004), seen(1.1, 0.005), SLOWER, "+10.2 % [+9.8 %, +10.6 %], threshold 2 %; again +10.0 % [+9.5 %, +10.6 %]"),
    (seen(0.9, 0.004), seen(0.905, 0.005), FASTER, "-10.0 % [-10.4 %, -9.6 %], threshold 2 %; again -9.5 % [-10.0 %, -9.0 %]"),
    (seen(1.1, 0.004), None, UNRESOLVED, "SLOWER, but not confirmed by fresh processes"),
    (seen(1.1, 0.004), seen(1.0, 0.004), UNRESOLVED, "SLOWER, but it did not come again: +0.00 % [-0.40 %, +0.40 %]"),
    (seen(1.1, 0.004), seen(0.9, 0.004), UNRESOLVED, "did not come again"),
    (seen(1.1, 0.004), seen(1.1, 0.1), UNRESOLVED, "did not come again"),
    (seen(1.0, 0.01), None, SAME, "+0.00 % [-1.0 %, +1.0 %], threshold 2 %"),
    (seen(1.0, 0.03), None, UNRESOLVED, "the interval reaches over it; 3 pairs of processes"),
    (seen(1.02, 0.004), None, UNRESOLVED, "reaches over it"),
    (seen(1.0, 1.0), None, UNRESOLVED, "reaches over it"),  # no difference could be shown: that is not SAME
    (seen(1.2, 0.03, base_us=4.0), None, SAME, "threshold 2 % and 1 us, of 4 us"),  # 0.8 us
    (seen(1.5, 0.05, base_us=4.0), seen(1.5, 0.05, base_us=4.0), SLOWER, "again"),  # 2 us
    (seen(1.3, 0.1, base_us=4.0), None, UNRESOLVED, "reaches over it"),  # 1.2 us, at least 0.7
    (seen(0.5, 0.01, base_us=1.0), None, SAME, ""),  # half a microsecond less
    (seen(2.5, 0.01), seen(2.5, 0.01), SLOWER, "x2.5 [x2.48, x2.53]"),
])
def test_a_verdict_and_why(first: Estimate, confirmed: Estimate | None, verdict: TimeVerdict, why: str) -> None:
    found, told = judge(first, confirmed, RULE)
    assert found is verdict and why in told
    assert suspect(first, RULE) == (verdict in (SLOWER, FASTER) or "SLOWER" in told)


def test_swapping_sides_swaps_the_verdict() -> None:
    for ratio in np.exp(np.linspace(-0.06, 0.06, 41)):
        there, back = (judge(each, each, RULE)[0] for each in (seen(ratio, 0.004), seen(1 / ratio, 0.004)))
        assert {SLOWER: FASTER, FASTER: SLOWER}.get(there, there) is back


def test_narrow_knows_the_width_alone() -> None:
    for ratio in (0.5, 0.98, 1.0, 1.01, 1.02, 3.0):
        assert narrow(seen(ratio, math.log(1.02) / 2.01), RULE) and not narrow(seen(ratio, math.log(1.02) / 1.99), RULE)
    assert narrow(seen(1.0, 0.05, base_us=4.0), RULE), "a floor of a quarter of the time needs no interval of 1 %"


@pytest.mark.parametrize(("ratio", "text"), [(1.102, "+10.2 %"), (0.995, "-0.50 %"), (1.00996, "+1.0 %"), (1.0, "+0.00 %"), (2.0, "x2")])
def test_percent(ratio: float, text: str) -> None:
    assert percent(ratio) == text


# --- many comparisons -------------------------------------------------------------------------------------------------


def test_the_geometric_mean() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1) and geometric_mean([]) == 1 and geometric_mean([1.1] * 3) == pytest.approx(1.1)


# --- whole comparisons ------------------------------------------------------------------------------------------------


def rule_on(machine: Machine, rng: np.random.Generator, device: str = "cuda") -> Rule:
    """The rule that five A/A comparisons give, as `threearm calibrate` takes them."""
    found = calibrated([generations(rng, machine, FEWEST) for _ in range(5)], device)
    assert found is not None
    return rule_of(found, device)


@pytest.mark.parametrize("name", MACHINES)
def test_the_same_is_never_called_slower_or_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, rng = MACHINES[name], np.random.default_rng(1)
    found = verdicts(monkeypatch, machine, rule_on(machine, rng), rng, 200)
    assert (found[SLOWER], found[FASTER]) == (0, 0), found
    if "half of it" not in name:  # where every tenth process is off by a sixth, unseen, it says that it does not know
        assert found[SAME] >= 180, found


@pytest.mark.parametrize("name", [name for name in MACHINES if "half of it" not in name and name != "spells"])
def test_ten_percent_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, rng = MACHINES[name], np.random.default_rng(2)
    rule = rule_on(machine, rng)
    assert verdicts(monkeypatch, machine, rule, rng, 40, 0.1)[SLOWER] >= 38
    assert verdicts(monkeypatch, machine, rule, rng, 40, 1 / 1.1 - 1)[FASTER] >= 38


def test_what_was_not_seen_does_not_make_it_sure_of_the_wrong_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, rng = MACHINES["throttled, half of it seen"], np.random.default_rng(3)
    found = verdicts(monkeypatch, machine, Rule(0.02, 1.0), rng, 40, 0.1)
    assert found[SAME] == found[FASTER] == 0 and found[SLOWER] >= 20, found


# --- wrong ways, which must be caught at it ---------------------------------------------------------------------------


def bootstrap(processes: list[list[Round]], confidence: float) -> Estimate | None:
    """Wrong: resamples bursts as though each were an observation of its own. The quantiles are those of a normal mean, which is what
    many resamples would come to."""
    right = estimate(processes, confidence)
    logs = {side: [math.log(us) for rounds in processes for each in rounds for burst in each.bursts if burst.side == side
                   for us in burst.us] for side in (BASE, CANDIDATE)}
    if right is None:
        return None
    middle = statistics.fmean(logs[CANDIDATE]) - statistics.fmean(logs[BASE])
    half = 1.96 * math.sqrt(sum(statistics.variance(each) / len(each) for each in logs.values()))
    return dataclasses.replace(right, ratio=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


def between_alone(processes: list[list[Round]], confidence: float) -> Estimate | None:
    """Wrong: a normal quantile for three processes."""
    right = estimate(processes, confidence)
    if right is None:
        return None
    shrunk = math.log(right.high / right.ratio) * 1.96 / quantile(confidence, right.processes)
    return dataclasses.replace(right, low=right.ratio * math.exp(-shrunk), high=right.ratio * math.exp(shrunk))


@pytest.mark.parametrize("wrong", [bootstrap, between_alone])
def test_a_wrong_interval_does_not_hold_the_truth(wrong: object) -> None:
    rng, held = np.random.default_rng(3), 0
    for _ in range(300):
        found = wrong(generations(rng, MACHINES["normal offsets"], 3, 0.03), 0.95)  # type: ignore[operator]
        held += found.low <= 1.03 <= found.high
    assert held / 300 < 0.88


def test_a_bootstrap_over_samples_calls_the_same_slower() -> None:
    """Even with the threshold, and confirmed: it is sure of what one process happened to be."""
    machine, rng, rule = Machine(normal(0.015)), np.random.default_rng(4), Rule(0.01, 1.0)
    found = verdicts_otherwise(machine, rule, rng, 200, estimator=bootstrap)
    assert found[SLOWER] + found[FASTER] >= 2, found
    right = verdicts_otherwise(machine, rule, rng, 200)
    assert right[SLOWER] + right[FASTER] == 0, right


def test_without_turns_a_drift_is_a_difference() -> None:
    machine, rng, rule = MACHINES["linear drift"], np.random.default_rng(5), Rule(0.02, 1.0)
    drifting = [log_ratio(Round([Burst(side, [100 * 1.02**place]) for place, side in enumerate(order)])) for order in (ABBA, AABB)]
    assert drifting == [pytest.approx(0, abs=1e-9), pytest.approx(2 * math.log(1.02))]
    assert verdicts_otherwise(machine, rule, rng, 100)[SAME] >= 95
    assert verdicts_otherwise(machine, rule, rng, 100, order=AABB)[SAME] <= 5


def test_without_a_confirming_round_a_spell_is_a_difference() -> None:
    machine, rng = MACHINES["spells"], np.random.default_rng(6)
    rule = Rule(0.02, 1.0)
    hasty = verdicts_otherwise(machine, rule, rng, 200, confirm=False)
    assert hasty[SLOWER] + hasty[FASTER] >= 2, hasty
    found = verdicts_otherwise(machine, rule, rng, 200)
    assert found[SLOWER] + found[FASTER] == 0 and found[UNRESOLVED] >= 1, found


def test_stopping_on_the_verdict_makes_more_errors() -> None:
    """Of what is exactly as slow as the threshold, at most one interval in forty should be clear of it."""
    machine, rule = Machine(heavy(0.01)), Rule(0.02, 1.0)

    def errors(stop_on_verdict: bool) -> int:
        rng, clear = np.random.default_rng(7), 0
        for _ in range(400):
            taken = generations(rng, machine, FEWEST, 0.02)
            while len(taken) < MOST and not (suspect(estimate(taken), rule) if stop_on_verdict else narrow(estimate(taken), rule)):
                taken += generations(rng, machine, 1, 0.02)
            clear += suspect(estimate(taken), rule)
        return clear

    assert errors(False) <= 0.045 * 400 < 0.06 * 400 <= errors(True)
