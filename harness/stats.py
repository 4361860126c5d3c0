"""What times say: an interval for candidate / base, and one of four verdicts. Pure functions; docs/timing.md derives them.

The unit is the process. Samples of one process share its memory placement, its clocks and its code's addresses, so that a thousand of
them are one observation of what is asked: would the ratio come out the same the next time somebody starts these programs.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit

from harness.comparison import BASE, CANDIDATE, Burst, Estimate, Round, Rule, TimeVerdict
from harness.words import counted

FEWEST = 2
"""Processes that an interval needs."""


def estimate(processes: Sequence[Sequence[Round]], confidence: float = 0.95) -> Estimate | None:
    """Candidate over base, from the rounds of each pair of fresh processes; None with fewer than two that have a clean round.

    A process's value is the mean over its clean rounds of `log_ratio`. The interval is Student's t over processes, with the larger of
    two estimates of a process's variance: that between processes, and that which the rounds within them let expect; so three processes
    that agree by chance give no false, narrow interval.
    """
    kept = [rounds for rounds in ([each for each in process if clean(each)] for process in processes) if rounds]
    if len(kept) < FEWEST:
        return None
    ratios = [[log_ratio(each) for each in rounds] for rounds in kept]
    values = [statistics.fmean(process) for process in ratios]
    within = [statistics.variance(process) / len(process) for process in ratios if len(process) > 1]
    variance = max(statistics.variance(values), statistics.fmean(within) if within else 0.0)
    middle = statistics.fmean(values)
    half = quantile(confidence, len(values)) * math.sqrt(variance / len(values))
    bursts = [burst for rounds in kept for each in rounds for burst in each.bursts]
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), median_us(bursts, BASE),
                    median_us(bursts, CANDIDATE), len(values), sum(map(len, kept)))


def clean(one: Round) -> bool:
    """Whether a round counts: nothing spoke against it when it was taken, and both sides have times above 0."""
    sides = {burst.side for burst in one.bursts}
    return not one.unclean and sides == {BASE, CANDIDATE} and all(burst.us and statistics.median(burst.us) > 0 for burst in one.bursts)


def log_ratio(one: Round) -> float:
    """A clean round's log of candidate over base: mean over the bursts of each side of the log of their median. In the order base,
    candidate, candidate, base a drift that is linear in time takes as much from one side as from the other."""
    logs = {side: [math.log(statistics.median(burst.us)) for burst in one.bursts if burst.side == side] for side in (BASE, CANDIDATE)}
    return statistics.fmean(logs[CANDIDATE]) - statistics.fmean(logs[BASE])


def median_us(bursts: Sequence[Burst], side: str) -> float:
    """Median over a side's bursts of their medians, in microseconds. For people to read: verdicts rest on the ratio."""
    return statistics.median(statistics.median(burst.us) for burst in bursts if burst.side == side)


def quantile(confidence: float, processes: int) -> float:
    """Student's t for a two-sided interval over so many processes: 4.30 for three at 95 %."""
    return float(stdtrit(processes - 1, 0.5 + confidence / 2))


# --- verdicts ---------------------------------------------------------------------------------------------------------


def judge(first: Estimate | None, confirmed: Estimate | None, rule: Rule) -> tuple[TimeVerdict, str]:
    """The verdict, and in words why. first: all processes but those of the confirming round; confirmed: those alone."""
    if first is None:
        return TimeVerdict.UNRESOLVED, f"fewer than {FEWEST} processes have a round that counts"
    told = f"{in_words(first)}, {rule_in_words(first, rule)}"
    direction = side_of(first, rule)
    if direction is None:
        if same(first, rule):
            return TimeVerdict.SAME, told
        over = "it" if rule.for_same() == rule else f"{rule.widest * 100:g} %, the most that is called SAME on a noisy machine"
        return TimeVerdict.UNRESOLVED, f"{told}: the interval reaches over {over}; {counted(first.processes, 'pair')} of processes"
    if confirmed is None:
        return TimeVerdict.UNRESOLVED, f"{told}: {direction.value}, but not confirmed by fresh processes"
    if side_of(confirmed, rule) is not direction:
        return TimeVerdict.UNRESOLVED, f"{told}: {direction.value}, but it did not come again: {in_words(confirmed)}"
    return direction, f"{told}; again {in_words(confirmed)}"


def side_of(found: Estimate, rule: Rule) -> TimeVerdict | None:
    """SLOWER or FASTER where the whole interval says so, None where it does not."""
    if found.low > 1 and beyond(found.low, found.base_us, rule):
        return TimeVerdict.SLOWER
    if found.high < 1 and beyond(found.high, found.base_us, rule):
        return TimeVerdict.FASTER
    return None


def same(found: Estimate, rule: Rule) -> bool:
    """Whether the whole interval lies where a change is none. That is shown, not what is left when no difference could be. Under a
    threshold that is wide because the machine was noisy, what goes beyond the default is not SAME but UNRESOLVED."""
    strict = rule.for_same()
    return not beyond(found.low, found.base_us, strict) and not beyond(found.high, found.base_us, strict)


def beyond(ratio: float, base_us: float, rule: Rule) -> bool:
    """Whether a ratio would be a change: past the threshold, and by more microseconds than the floor. 1 + t and 1 / (1 + t) are
    equally far, so that swapping base and candidate swaps the verdict."""
    return abs(math.log(ratio)) > math.log1p(rule.threshold) and abs(ratio - 1) * base_us > rule.floor_us


def suspect(found: Estimate | None, rule: Rule) -> bool:
    """Whether a confirming round is worth its time: the interval alone would be SLOWER or FASTER."""
    return found is not None and side_of(found, rule) is not None


def narrow(found: Estimate | None, rule: Rule) -> bool:
    """Whether sampling may stop: the interval's half-width is at most half of what a change must be.

    It must stop on this and never on a verdict. Who looks after every process and stops at the first interval that is clear has many
    chances to be wrong by luck, and takes the luckiest; the width does not know which way the ratio leans.
    """
    if found is None:
        return False
    needed = max(rule.for_same().threshold, rule.floor_us / found.base_us)
    return math.log(found.high / found.low) / 2 <= math.log1p(needed) / 2


# --- words ------------------------------------------------------------------------------------------------------------


def in_words(found: Estimate) -> str:
    """`+10.2 % [+9.8 %, +10.6 %]`"""
    return f"{percent(found.ratio)} [{percent(found.low)}, {percent(found.high)}]"


def percent(ratio: float) -> str:
    """1.102 is `+10.2 %`; two decimals below 1 %. Past a doubling as a factor."""
    change = (ratio - 1) * 100
    if ratio >= 2:
        return f"x{ratio:.3g}"
    return f"{change:+.{1 if abs(change) >= 0.995 else 2}f} %"


def rule_in_words(found: Estimate, rule: Rule) -> str:
    """The threshold, and the floor where that is what counts."""
    text = f"threshold {rule.threshold * 100:.3g} %"
    if rule.threshold >= 0.05:  # below that the two are the same to a reader
        text += f" (faster: {percent(1 / (1 + rule.threshold))})"
    if rule.floor_us > rule.threshold * found.base_us:
        text += f" and {rule.floor_us:g} us, of {found.base_us:.3g} us"
    return text


# --- many comparisons -------------------------------------------------------------------------------------------------


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of ratios, each counted once; 1 of none. To be shown beside the worst, which it hides."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else 1.0
