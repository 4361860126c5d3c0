"""Verdicts made again from what is stored, by today's rules. Pure functions, parent side; docs/records.md has the rules in words.

Numbers decide: a check's margins, its bad elements and their ULP against what the kernel promises. What a stored verdict rests on that no
number holds (an exception, a message) stands as it was stored.
"""
from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

from harness.comparison import SIDES, Estimate, Pairing, Round, TimeComparison, TimeVerdict
from harness.gate_folder import GateFolder
from harness.record import Record
from harness.stats import estimate, judge, quantile
from harness.transitions import transition
from harness.verdicts import Check, Verdict, worst

MEASURED = ("reference",)
"""Checks that margins alone decide, both ways."""
OF_ITSELF = ("run-to-run", "busy-stream", "timed-output")
"""Checks of an arm against itself, whose finding is FLAKY."""
NEEDED = {"sparse_prefill": "reference", "indexer_topk": "shape"}
"""The check that an arm which passes must have, by family."""
STANDING = (Verdict.CRASHED, Verdict.TIMEOUT, Verdict.OOM, Verdict.ERROR, Verdict.SKIPPED)
PROMISE = re.compile(r"(\d+) bf16 ULP, columns (\d+)\.\.(\d+), at most ([\d.]+)% of them")
ROOM = re.compile(r"% of (\d+) elements where the promise allows it")
COLUMNS = re.compile(r"columns (\d+)\.\.(\d+)")
TO = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16}
"""The most ULP of each step of a histogram; the others have no end."""
ROUNDED = 0.01
"""Microseconds to which samples that were put aside may have been rounded (docs/evidence/gates)."""
OWN_SCORE = ", own score "


@dataclasses.dataclass
class Rejudged:
    """A record and what it is judged to be now. told: why, a line a check, where anything is another than stored."""

    stored: Record
    now: Record
    told: list[str] = dataclasses.field(default_factory=list)

    @property
    def differs(self) -> bool:
        return bool(self.told)


def record_again(stored: Record, kernel: dict[str, Any], fresh: Iterable[Check] = (), campaign: bool = False) -> Rejudged:
    """A record judged anew. kernel: as run.json describes it; fresh: checks made anew from saved outputs, in place of the stored ones of
    their names; campaign: the record is of a fuzz campaign, which keeps no more of what passed than its margins."""
    made = {check.name: check for check in fresh}
    now, told = [], []
    for check in stored.checks:
        new = made.pop(check.name, None)
        verdict, why = check_again(check, kernel) if new is None else outputs_again(check, new)
        again = dataclasses.replace(new or check, verdict=verdict)
        if verdict is not check.verdict:
            told.append(f"{check.name}: stored {check.verdict.value}, rejudged {verdict.value}: {why}")
            again.detail = f"{again.detail}; rejudged: {why}" if new is None else again.detail
        now.append(again)
    for check in made.values():
        now.append(check)
        told += [f"{check.name}: not stored, judged {check.verdict.value}: {check.detail}"] if check.verdict is not Verdict.PASSED else []
    verdict, why = verdict_again(stored, now, campaign)
    if verdict is not stored.verdict and not told:
        told.append(why)
    return Rejudged(stored, dataclasses.replace(stored, checks=now, verdict=verdict), told)


def verdict_again(stored: Record, checks: list[Check], campaign: bool) -> tuple[Verdict, str]:
    """A record's verdict: the worst of its checks', or that which its detail tells of (it ended, it raised) if that is worse. A pass
    without the check against what is right is none."""
    verdict = worst([check.verdict for check in checks])
    if stored.verdict is not Verdict.PASSED and (stored.detail or (not checks and stored.verdict in STANDING)):
        verdict = worst([verdict, stored.verdict])
    if campaign and stored.verdict is Verdict.PASSED and verdict in (Verdict.SKIPPED, Verdict.PASSED):
        return Verdict.PASSED, ""
    needed = NEEDED.get(stored.family, "")
    if verdict in (Verdict.PASSED, Verdict.SKIPPED) and stored.verdict is not Verdict.SKIPPED and needed not in [c.name for c in checks]:
        return Verdict.ERROR, f"stored {stored.verdict.value}, but the record has no check {needed!r}: nothing says that it is right"
    return verdict, f"the record: stored {stored.verdict.value}, but the worst of its checks is {verdict.value}"


# --- one check --------------------------------------------------------------------------------------------------------


def check_again(check: Check, kernel: dict[str, Any]) -> tuple[Verdict, str]:
    """A check's verdict by its numbers, and why it is not what was stored."""
    over = [f"{name} {margin:.3g}" for name, margin in check.margins.items() if not 0 <= margin <= 1]
    wrong = Verdict.FLAKY if check.name in OF_ITSELF else Verdict.FAILED
    if over:
        return _at_least(check, wrong), f"margins above 1: {', '.join(over)}"
    if check.name in MEASURED and check.margins and not check.bad and check.verdict is Verdict.FAILED:
        return Verdict.PASSED, "every margin is at most 1"
    if not check.bad:
        return check.verdict, ""
    broken = promise_broken(check, kernel.get("promise", "")) if ROOM.search(check.detail) else [f"{check.bad:,} elements are wrong"]
    return (_at_least(check, wrong) if broken else check.verdict), "; ".join(broken)


def _at_least(check: Check, verdict: Verdict) -> Verdict:
    """The worse of what was stored and this; what is FLAKY is not made FAILED."""
    return check.verdict if check.verdict is Verdict.FLAKY else worst([check.verdict, verdict])


def promise_broken(check: Check, promise: str) -> list[str]:
    """What a kernel's promise on skipped pairs says against the elements that differ, as far as a record holds it: how many ULP, in
    which columns, how many, and that no other output differs."""
    found = PROMISE.search(promise)
    if not found:
        return [f"{check.bad:,} elements differ, and the kernel promises {promise or 'nothing that is known'}"]
    most, first, last, share = int(found[1]), int(found[2]), int(found[3]), float(found[4]) / 100 + 5e-5  # as it is rounded
    room = ROOM.search(check.detail)
    elements = int(room[1]) if room else 0
    expected = share * elements
    columns = [COLUMNS.match(line) for line in check.where]
    broken = {
        f"more than {most} ULP": any(TO.get(step, math.inf) > most for step in check.ulp),
        f"{check.bad:,} differ, more than {share:.2%} of {elements:,}": check.bad > expected + 8 * math.sqrt(expected),
        "the ULP do not account for the elements that differ": sum(check.ulp.values()) != check.bad,
        f"outside columns {first}..{last}": any(at and not first <= int(at[1]) <= int(at[2]) <= last for at in columns),
        "lse or max_logits differ": "equal: max_logits, lse" not in check.detail,
    }
    return [rule for rule, is_broken in broken.items() if is_broken]


def outputs_again(stored: Check, new: Check) -> tuple[Verdict, str]:
    """The verdict of a check that was made anew from saved outputs. Of an arm that exposes its own scores, which are not saved, a stored
    verdict on `values` may rest on those: it is not lifted."""
    if stored.name == "values" and new.verdict is Verdict.PASSED and any(OWN_SCORE in line for line in stored.first):
        return stored.verdict, ""
    margins = ", ".join(f"{name} {stored.margins.get(name, 0):.3g} -> {margin:.3g}" for name, margin in new.margins.items())
    return new.verdict, "; ".join(filter(None, [new.detail, f"margins {margins}" if margins else ""]))


# --- a gate -----------------------------------------------------------------------------------------------------------


def gate_again(folder: GateFolder) -> list[str]:
    """Put what a gate's records and samples say now in place of its transitions. Returns a line for each that says something else."""
    before, after = folder.records("base"), folder.records("candidate")
    kernels = [{kernel["name"]: kernel for kernel in side.kernels} for side in (folder.info.base, folder.info.candidate)]
    told, now = [], []
    for stored in folder.transitions:
        pairing = stored.pairing
        base, candidate = before.get((pairing.case, pairing.base)), after.get((pairing.case, pairing.candidate))
        if stored.numbers is None and base and candidate and unlike_beside_pads(base, candidate):
            candidate = dataclasses.replace(candidate, outputs=base.outputs)
        own = [by_name.get(arm.rpartition("/")[0]) for by_name, arm in zip(kernels, (pairing.base, pairing.candidate))]
        again = transition(pairing, base, candidate, stored.numbers, own[0], own[1])
        found = stored if (again.change, again.base, again.candidate) == (stored.change, stored.base, stored.candidate) else again
        if found is not stored:
            told.append(f"stored {stored.change.value}, rejudged {again.change.value}  {pairing.candidate}  {pairing.case}: {again.detail}")
        if stored.time:
            time, why = time_again(stored.time)
            if why:
                told.append(f"{why}  {pairing.candidate}  {pairing.case}")
            found = dataclasses.replace(found, time=time)
        now.append(found)
    folder.transitions = now
    return told


def pairs_again(pairs: list[tuple[Pairing, TimeComparison]]) -> list[str]:
    """Put what paired times say now in place of what was stored. Returns a line for each that says something else."""
    told = []
    for place, (pairing, stored) in enumerate(pairs):
        now, why = time_again(stored)
        pairs[place] = pairing, now
        told += [f"{why}  {pairing.candidate}  {pairing.case}"] if why else []
    return told


def unlike_beside_pads(base: Record, candidate: Record) -> bool:
    """Whether two choices differ beside -1 alone, as far as fingerprints tell: a gate compares their tensors and calls them the same."""
    differ = {name for name in {**base.outputs, **candidate.outputs} if base.outputs.get(name) != candidate.outputs.get(name)}
    return base.family == "indexer_topk" and differ == {"values"}


def time_again(stored: TimeComparison) -> tuple[TimeComparison, str]:
    """A comparison of times judged anew from its samples, by its own rule; and what is another than stored, or "".

    Where the stored interval is that of the samples but for their rounding, it is what is judged. INVALID stands where samples do not show
    why: a side ended, or its last call gave other outputs."""
    first, told = estimate_again(stored.estimate, stored.processes, stored.rule.confidence)
    confirmed, again = estimate_again(stored.confirmed, stored.confirming, stored.rule.confidence)
    verdict, why = judge(first, confirmed, stored.rule)
    least = too_fast(stored)
    if least or stored.verdict is TimeVerdict.INVALID:
        verdict, why = TimeVerdict.INVALID, least or stored.why
    elif first is None:
        why = stored.why
    now = dataclasses.replace(stored, verdict=verdict, why=why, estimate=first, confirmed=confirmed)
    if verdict is not stored.verdict:
        return now, f"time stored {stored.verdict.value}, rejudged {verdict.value}: {why}"
    return now, f"time {verdict.value}: the stored interval is not that of the samples: {why}" if told or again else ""


def estimate_again(stored: Estimate | None, processes: list[list[Round]], confidence: float) -> tuple[Estimate | None, bool]:
    """The estimate from samples, or the stored one if that is the same but for rounding; and whether it is another."""
    found = estimate(processes, confidence) if processes else None
    if alike(stored, found, confidence, samples_of(processes)):
        return stored, False
    return found, True


def samples_of(processes: list[list[Round]], side: str = "") -> list[float]:
    """All times of a side, or of both, in microseconds."""
    bursts = (burst for rounds in processes for each in rounds for burst in each.bursts)
    return [us for burst in bursts if side in ("", burst.side) for us in burst.us]


def too_fast(stored: TimeComparison) -> str:
    """Which side's median is below the speed of light, or ""."""
    for side in SIDES:
        us = samples_of(stored.processes, side)
        if us and statistics.median(us) < stored.least_us:
            return f"{side}: {statistics.median(us):.4g} us, but {stored.least_us:.4g} us is the least for {stored.least_of}"
    return ""


def alike(one: Estimate | None, other: Estimate | None, confidence: float, samples: list[float]) -> bool:
    """Whether two estimates are one; of samples that are all rounded to ROUNDED us, but for that: a burst's median then moves by half of
    it, a process's value by as much on either side, and the interval by Student's t times that."""
    if one is None or other is None:
        return one is other
    if (one.processes, one.rounds) != (other.processes, other.rounds):
        return False
    rounded = all(us == round(us, 2) for us in samples)
    step = ROUNDED / min(other.base_us, other.candidate_us) if rounded else 1e-9
    room = step * (1 + quantile(confidence, other.processes))
    times = (one.base_us, other.base_us), (one.candidate_us, other.candidate_us)
    ratios = (one.ratio, other.ratio), (one.low, other.low), (one.high, other.high)
    return all(abs(a / b - 1) <= step for a, b in times) and all(abs(a / b - 1) <= room for a, b in ratios)
