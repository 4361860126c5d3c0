"""The whole of a comparison of times: how many processes, when to stop, what is confirmed, what is invalid. Parent side."""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from cases import family_of
from harness.comparison import BASE, CANDIDATE, SIDES, Pairing, Round, Rule, TimeComparison, TimeVerdict
from harness.sampling import AUTO, Plan, Progress, Sampled, Side, one_generation
from harness.stats import estimate, judge, narrow, suspect
from harness.watch import Watch, slowed

TIME_IS_UP = "time is up (--within)"


def compare(pairings: list[Pairing], base: Side, candidate: Side, plan: Plan, rule_of: Callable[[Pairing], Rule],
            progress: Progress = lambda done, of, what: None,
            outputs: Callable[[Pairing], tuple[dict[str, str], dict[str, str]]] | None = None) -> dict[Pairing, TimeComparison]:
    """The whole procedure: `plan.processes` generations for all pairings; more for those whose interval is still wide, while they have
    time; the same again with fresh ones for those that look faster or slower.

    outputs: the fingerprints of the checked outputs of both sides, which the last timed call must have given, too. Raises Unfit where a
    side cannot start workers as asked, and Interrupted, with what there is, where it is.
    """
    todo = {pairing: Sampled(pairing) for pairing in pairings}

    def looks_changed(sampled: Sampled) -> bool:
        rule = rule_of(sampled.pairing)
        return not sampled.died and suspect(estimate(sampled.generations, rule.confidence), rule)

    with Watch() as watch:
        run = _Sampling({BASE: base, CANDIDATE: candidate}, plan, rule_of, watch, progress)

        def judged() -> dict[Pairing, TimeComparison]:
            return {pairing: _judged(s, rule_of(pairing), plan, candidate, watch, outputs(pairing) if outputs else None)
                    for pairing, s in todo.items() if s.generations or s.died or s.stopped}

        try:
            run.sample(list(todo.values()), "generations")
            run.sample([sampled for sampled in todo.values() if looks_changed(sampled)], "confirming")
        except KeyboardInterrupt:
            raise Interrupted(judged()) from None
        return judged()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in the middle. comparisons: what can be said of what was sampled until then."""

    def __init__(self, comparisons: dict[Pairing, TimeComparison]) -> None:
        super().__init__()
        self.comparisons = comparisons


@dataclasses.dataclass
class _Sampling:
    """What sampling needs to know, whichever round it is for."""

    sides: dict[str, Side]
    plan: Plan
    rule_of: Callable[[Pairing], Rule]
    watch: Watch
    progress: Progress

    def sample(self, some: list[Sampled], phase: str) -> None:
        """Generations of fresh processes for each of `some` until it is over. phase: where a Sampled keeps them."""
        before = {sampled.pairing: sampled.seconds for sampled in some}
        number = 0
        while some := [s for s in some if not self._over(s, getattr(s, phase), s.seconds - before[s.pairing])]:
            for sampled, rounds in one_generation(some, self.sides, self.plan, number, self.watch):
                if rounds:
                    getattr(sampled, phase).append(rounds)
                self.progress(number, self.plan.most, f"timing, {phase}, processes {number + 1}  {sampled.pairing.case}")
                if self.plan.time_is_up():
                    break
            number += 1

    def _over(self, sampled: Sampled, generations: list[list[Round]], seconds: float) -> bool:
        """Whether no more is to be sampled of a pairing; why is then in `stopped`. It never looks at the verdict: whoever goes on until
        something shows finds something."""
        plan, rule = self.plan, self.rule_of(sampled.pairing)
        sampled.stopped = ""
        if sampled.died:
            sampled.stopped = "a side could not be timed"
        elif len(generations) >= plan.processes:
            if narrow(estimate(generations, rule.confidence), rule):
                sampled.stopped = "the interval is narrow enough"
            elif len(generations) >= plan.most:
                sampled.stopped = f"{len(generations)} pairs of processes"
            elif seconds >= plan.seconds:
                sampled.stopped = f"time cap of {plan.seconds:g} s"
        if not sampled.stopped and plan.time_is_up():
            sampled.stopped = TIME_IS_UP
        return bool(sampled.stopped)


def _judged(sampled: Sampled, rule: Rule, plan: Plan, side: Side, watch: Watch,
            checked: tuple[dict[str, str], dict[str, str]] | None) -> TimeComparison:
    """The verdict on a pairing, with all that it came from."""
    every = [found for rounds in [*sampled.generations, *sampled.confirming] for round_ in rounds for found in round_.bursts]
    first = estimate(sampled.generations, rule.confidence)
    confirmed = estimate(sampled.confirming, rule.confidence) if sampled.confirming else None
    verdict, why = judge(first, confirmed, rule)
    if first is None:
        reasons = dict.fromkeys(r.unclean for rounds in sampled.generations for r in rounds if r.unclean)
        why = f"no interval: {sampled.died or '; '.join(reasons) or 'nothing sampled'}"
    invalid = sampled.died or _too_fast(sampled) or _other_outputs(sampled, checked)
    if invalid:
        verdict, why = TimeVerdict.INVALID, invalid
    held = sampled.held.get(CANDIDATE, {})
    device = side.options.device.partition(":")[0]
    sampled.note(watch.problem)
    return TimeComparison(
        verdict, why, rule, AUTO[device] if plan.contract == "auto" else plan.contract,
        "warm" if device == "cpu" or not plan.flush else "L2 flushed", sampled.generations, sampled.confirming, first, confirmed,
        sampled.stopped, held.get("least_us", 0.0), held.get("least_of", ""), samples=sum(len(found.us) for found in every),
        throttled=sum(len(found.us) for found in every if slowed(found.reasons)), seconds=sampled.seconds, notes=sampled.notes)


def _too_fast(sampled: Sampled) -> str:
    """Which side's median is below the speed of light, or ""."""
    for side, held in sampled.held.items():
        us = [sample for rounds in sampled.generations for r in rounds for found in r.bursts if found.side == side for sample in found.us]
        if us and (middle := statistics.median(us)) < held["least_us"]:
            return f"{side}: {middle:.4g} us, but {held['least_us']:.4g} us is the least for {held['least_of']}"
    return ""


def _other_outputs(sampled: Sampled, checked: tuple[dict[str, str], dict[str, str]] | None) -> str:
    """Which side's last timed call gave other outputs than the checked one, or "". A choice of keys may differ by ties: a note."""
    if checked is None:
        return ""
    for side, want in zip(SIDES, checked):
        for got in sampled.outputs[side]:
            other = [name for name, fingerprint in got.items() if want.get(name, fingerprint) != fingerprint]
            if other and family_of(sampled.pairing.case) == "indexer_topk":
                sampled.note(f"{side}: the last timed call chose other keys than the checked one, as ties may make it")
            elif other:
                return f"{side}: {' and '.join(other)} of the last timed call are not what was checked"
    return ""
