"""What became of an arm from base to candidate, told from its two records, and what all of them together come to: the gate's exit code.

Pure functions, parent side. The change is told by its cause, not by all that follows from it: an arm that races is nondeterministic,
whatever else its checks found. docs/gate.md explains the words.
"""
from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from harness.comparison import Change, Pairing, TimeVerdict, Transition
from harness.findings import (
    AGAINST_REFERENCE,
    explanation,
    failing,
    flaky,
    in_short,
    nan_in,
    nan_told,
    other_convention,
    other_findings,
)
from harness.record import Record
from harness.verdicts import Check, Verdict
from harness.words import counted

RANK = list(Change)
WORSE = RANK[RANK.index(Change.PROMISE) :]
"""Changes for which something got wrong: exit code 1."""

PASSES = (Verdict.PASSED, Verdict.VACUOUS)
ENDED = {Verdict.CRASHED: Change.CRASH, Verdict.TIMEOUT: Change.HANG, Verdict.OOM: Change.OOM}
NOT_RUN = "not run on either side: "
"""How the detail begins of what ran nowhere."""
INPUTS_DIFFER = "inputs differ"
"""How the detail of a comparison begins that is void."""
GIVEN_UP = "given up"
"""How the detail of a SKIPPED record begins whose arm hung or crashed on earlier cases."""
LONGEST, NAMED = 160, 2  # characters of a reason, and kernels with their reason, in the verdict's line
HIGH, RISEN = 0.9, 0.2  # a margin to warn of; one that doubled counts from here on: a fifth of the budget is healthy

OK, WRONG, SLOWER, UNRESOLVED, VOID = 0, 1, 3, 4, 5
TITLES = {OK: "OK", WRONG: "WORSE", SLOWER: "SLOWER", UNRESOLVED: "UNRESOLVED", VOID: "VOID"}


def transition(pairing: Pairing, base: Record | None, candidate: Record | None, numbers: Check | None = None,
               base_kernel: dict[str, Any] | None = None, candidate_kernel: dict[str, Any] | None = None) -> Transition:
    """One pairing's change. base, candidate: the records, None where there is none; numbers: how far the outputs are apart, where they were
    compared; base_kernel, candidate_kernel: as a worker describes them (name, promise, convention), None where that is not known."""
    change, detail = _change(as_it_ended(base), as_it_ended(candidate), numbers)
    declared = _declared(base_kernel or {}, candidate_kernel or {})
    if declared and _ran(base) and _ran(candidate) and change not in WORSE and not detail.startswith(INPUTS_DIFFER):
        change, detail = Change.PROMISE, f"{declared}; the outputs: {change.value}{f' ({detail})' if detail else ''}"
    return Transition(pairing, change, detail, base.verdict if base else None, candidate.verdict if candidate else None,
                      margins(base), margins(candidate), numbers)


def margins(record: Record | None) -> dict[str, float]:
    """Error over budget against the reference, by output."""
    checks = record.checks if record else []
    return {output: margin for check in checks if check.name in AGAINST_REFERENCE for output, margin in check.margins.items()}


def _ran(record: Record | None) -> bool:
    return record is not None and record.verdict is not Verdict.SKIPPED


def as_it_ended(record: Record | None) -> Record | None:
    """A record of an arm that was given up counts as what it was given up for."""
    if record is None or record.verdict is not Verdict.SKIPPED or not record.detail.startswith(GIVEN_UP):
        return record
    return dataclasses.replace(record, verdict=Verdict.TIMEOUT if "hung" in record.detail else Verdict.CRASHED)


def _declared(base: dict[str, Any], candidate: dict[str, Any]) -> str:
    """What the two kernels declare differently of what they return, or "". Another convention is always told, since whoever calls the
    kernel sees it, though the harness brings both to one. The promise is compared only of one and the same kernel."""
    told = []
    for what in ("convention", "promise"):
        before, after = base.get(what), candidate.get(what)
        if before and after and before != after and (what == "convention" or base.get("name") == candidate.get("name")):
            told.append(f"{what}: {before} -> {after}")
    return "; ".join(told)


def _change(base: Record | None, candidate: Record | None, numbers: Check | None) -> tuple[Change, str]:
    if base is None or base.verdict is Verdict.SKIPPED:
        if candidate is None or candidate.verdict is Verdict.SKIPPED:
            return Change.UNKNOWN, f"{NOT_RUN}{_reason(candidate) or _reason(base) or 'no record'}"
        before = f"not run in the base: {base.detail}" if base else "no record in the base"
        return (Change.NEW_ARM, before) if candidate.verdict in PASSES else (Change.NEW_WRONG, f"{_told(candidate)} ({before})")
    if candidate is None or candidate.verdict is Verdict.SKIPPED:
        before = "" if base.verdict in PASSES else f" (in the base it was {base.verdict.value})"
        return Change.GONE, (f"skipped: {candidate.detail}" if candidate else "no record in the candidate") + before
    names = _other_inputs(base, candidate)
    if names:
        return Change.UNKNOWN, f"{INPUTS_DIFFER}: {', '.join(names)}"
    if base.verdict is Verdict.ERROR:
        return Change.UNKNOWN, f"the base is not known: the harness's own error: {base.detail}"
    if candidate.verdict not in PASSES:
        return _candidate_fails(base, candidate, numbers)
    if base.verdict in PASSES:
        return _both_pass(base, candidate, numbers)
    if candidate.verdict is Verdict.VACUOUS:
        return Change.UNKNOWN, f"the base fails and the candidate is vacuous; {_told(base)}"
    return Change.FIXED, f"was {_told(base)}"


def _reason(record: Record | None) -> str:
    return record.detail if record else ""


def _other_inputs(base: Record, candidate: Record) -> list[str]:
    """The input tensors whose fingerprints are not equal; [] where a side has none, because its arm ended before they were told."""
    if not base.inputs or not candidate.inputs:
        return []
    names = [name for name in {**base.inputs, **candidate.inputs} if base.inputs.get(name) != candidate.inputs.get(name)]
    return [name for name in names if name != "all"] or names


def _both_pass(base: Record, candidate: Record, numbers: Check | None) -> tuple[Change, str]:
    vacuous = [side for side, record in (("base", base), ("candidate", candidate)) if record.verdict is Verdict.VACUOUS]
    no_check = f"vacuous in {' and '.join(vacuous)}: no check could have failed"
    if not base.outputs or not candidate.outputs:
        return Change.UNKNOWN, "no fingerprints of the outputs"
    if nan_told(numbers):
        return Change.NAN, f"NaN in {', '.join(nan_told(numbers))}, though both sides pass: {numbers.detail if numbers else ''}"
    differ = [name for name in {**base.outputs, **candidate.outputs} if base.outputs.get(name) != candidate.outputs.get(name)]
    if not differ:
        return Change.SAME, no_check if vacuous else ""
    if vacuous:
        return Change.UNKNOWN, f"other bits in {', '.join(differ)}, and {no_check}"
    if numbers and numbers.detail:
        return Change.NUMBERS, numbers.detail
    what = "the same keys in another order" if "indices" in differ and "set" not in differ else f"other bits in {', '.join(differ)}"
    return Change.NUMBERS, f"{what}: how far is not known, the outputs were not compared"


def _candidate_fails(base: Record, candidate: Record, numbers: Check | None) -> tuple[Change, str]:
    if candidate.verdict in ENDED:
        if base.verdict is candidate.verdict:
            return Change.STILL_BAD, _told(candidate)
        before = "" if base.verdict in PASSES else f" (before: {_told(base)})"
        return ENDED[candidate.verdict], (candidate.detail or candidate.verdict.value) + before
    if base.verdict in ENDED or not (base.checks or base.verdict in PASSES):
        same = base.verdict is candidate.verdict and base.detail == candidate.detail
        return Change.STILL_BAD, _told(candidate) if same else f"was {_told(base)}; is {_told(candidate)}"
    if flaky(candidate) and not flaky(base):
        return Change.NONDETERMINISM, _nondeterminism(candidate)
    nan = list(dict.fromkeys([*(name for name in nan_in(candidate) if name not in nan_in(base)), *nan_told(numbers)]))
    if nan:
        return Change.NAN, f"NaN in {', '.join(nan)}: {in_short(failing(candidate))}"
    if base.verdict in PASSES:
        convention = other_convention(candidate)
        return (Change.PROMISE, convention) if convention else (Change.BROKE, _told(candidate, with_verdict=False))
    return _still_fails(base, candidate)


def _nondeterminism(candidate: Record) -> str:
    """The checks that found it; what else failed may follow from it."""
    found = flaky(candidate)
    others = [check.name for check in failing(candidate) if check not in found]
    nan = "; NaN in some launches" if any(" nan" in line for check in found for line in check.first) else ""
    return in_short(found) + nan + (f"; also failed: {', '.join(others)}" if others else "")


def _still_fails(base: Record, candidate: Record) -> tuple[Change, str]:
    """Both judged by checks, and both found wrong: worse where a check fails that did not."""
    before = {check.name for check in failing(base)}
    new = [check for check in failing(candidate) if check.name not in before]
    if new or not candidate.checks:
        also = in_short(new) or candidate.detail
        return Change.BROKE, f"{also} (before only: {', '.join(sorted(before))})"
    told = other_findings(base, candidate)
    return Change.STILL_BAD, _told(candidate) + (f"; other findings: {told}" if told else "; the same findings")


def _told(record: Record, with_verdict: bool = True) -> str:
    """A record that did not pass, in one line: its verdict, the checks that did not pass, and what the most telling one says."""
    if record.verdict is Verdict.ERROR:
        return f"ERROR, the harness's own unless the kernel changed torch's settings: {record.detail}"
    text = in_short(failing(record), explanation(record)) if record.checks else record.detail
    return f"{record.verdict.value} {text}" if with_verdict else text


# --- what a reader must be warned of ----------------------------------------------------------------------------------


def risen(found: Transition) -> str:
    """Margins that came near the budget, or doubled and count: `out 0.31 -> 0.95`; "" where none did, or the outputs are the same."""
    if found.change is not Change.NUMBERS:
        return ""
    pairs = {output: (found.margins_before.get(output), after) for output, after in found.margins_after.items()}
    told = [f"{output} {before:.3g} -> {after:.3g}" for output, (before, after) in pairs.items() if before is not None and after > before
            and ((after > HIGH >= before) or (after >= RISEN and after >= 2 * before))]
    return ", ".join(told)


def is_void(found: Transition) -> bool:
    """Whether the two sides were given other inputs."""
    return found.change is Change.UNKNOWN and found.detail.startswith(INPUTS_DIFFER)


def was_compared(found: Transition) -> bool:
    """Whether any side ran."""
    return any(verdict not in (None, Verdict.SKIPPED) for verdict in (found.base, found.candidate)) or found.change in WORSE


def was_given_up(found: Transition) -> bool:
    """Whether the candidate's arm was not asked any more, since it hung or crashed on earlier cases."""
    return found.candidate is Verdict.SKIPPED and found.change in (Change.HANG, Change.CRASH)


# --- all together -----------------------------------------------------------------------------------------------------


PLURALS = {Change.NEW_ARM: "new arms", Change.NEW_WRONG: "new arms fail", Change.PROMISE: "promises changed", Change.GONE: "arms gone",
           Change.HANG: "new hangs", Change.CRASH: "new crashes"}


def in_words(change: Change, count: int, given_up: int = 0) -> str:
    """`1 new hang`, `5 numbers changed`, `9 new hangs, 7 of them given up`."""
    text = f"{count:,} {PLURALS.get(change, change.value) if count > 1 else change.value}"
    return f"{text}, {given_up:,} of them given up" if given_up else text


def exit_code(transitions: list[Transition], bitwise: bool = False, void: Sequence[str] = (), named: bool = False) -> int:
    """0 nothing worse, 1 something got wrong, 3 slower, 4 not resolved, 5 nothing compared or other inputs; the worst wins, in the order
    5, 1, 3, 4."""
    return outcome(transitions, bitwise, void, named)[0]


def outcome(transitions: list[Transition], bitwise: bool = False, void: Sequence[str] = (), named: bool = False) -> tuple[int, str]:
    """The exit code, and its reason in words. bitwise: other bits count as something wrong; void: why nothing can be said at all; named:
    somebody asked for these kernels, so that one which ran nowhere must be told."""
    compared = [found for found in transitions if was_compared(found)]
    if void:
        return VOID, f"no comparison: {void[0]}{f' (and {len(void) - 1:,} more)' if len(void) > 1 else ''}"
    if not compared:
        why = transitions[0].detail.removeprefix(NOT_RUN) if transitions else ""
        return VOID, "nothing was compared" + (f": {why}" if why else "")
    of = counted(len(compared), "comparison")
    other = [found for found in compared if is_void(found)]
    if other:
        names = other[0].detail.partition(": ")[2]
        return VOID, f"no comparison: the two sides were given other inputs in {len(other):,} of {of} ({names})"
    wrong = _counts(compared, lambda found: found.change in WORSE or (bitwise and found.change is Change.NUMBERS))
    times = collections.Counter(found.time.verdict for found in compared if found.time)
    invalid = times[TimeVerdict.INVALID]
    slower, unresolved = (f"{times[kind]:,} {kind.value}" if times[kind] else "" for kind in (TimeVerdict.SLOWER, TimeVerdict.UNRESOLVED))
    unknown = _counts(compared, lambda found: found.change is Change.UNKNOWN)
    bare = untested(transitions if named else compared, named)
    if not wrong and not any(map(met, compared)):
        return VOID, f"no arm ran on both sides: {compared[0].detail}"
    if wrong or invalid:
        kinds = {change for change, _ in wrong}
        left = collections.Counter(found.change for found in compared if was_given_up(found))
        what = [in_words(change, count, left[change]) for change, count in wrong] + ([counted(invalid, "invalid time")] if invalid else [])
        count = sum(1 for found in compared if found.change in kinds or (found.time and found.time.verdict is TimeVerdict.INVALID))
        besides = "".join(f"; besides, {text}" for text in (slower, bare) if text)
        return WRONG, f"{count:,} of {of} got worse: {', '.join(what)}{besides}"
    if slower:
        return SLOWER, f"the answers are as good as before; {times[TimeVerdict.SLOWER]:,} of {sum(times.values()):,} times are SLOWER" + (
            f"; besides, {bare}" if bare else "")
    if unknown or unresolved or bare:
        what = [*(in_words(change, count) for change, count in unknown), *([f"times {unresolved}"] if unresolved else [])]
        told = f"nothing is known to be worse in {of}" + (f", but not everything could be told: {', '.join(what)}" if what else "")
        return UNRESOLVED, f"{bare}; {told}" if bare else told
    return OK, f"nothing got worse in {of}" + _warnings(compared)


def met(found: Transition) -> bool:
    """Whether both sides ran."""
    return not {None, Verdict.SKIPPED} & {found.base, found.candidate}


def untested(transitions: list[Transition], named: bool) -> str:
    """The pairs of kernels of which nothing passed on either side, and why: a kernel that cannot be imported anywhere fails as it did
    before, and nothing is known of it. named: also those that ran on one side alone. "" where there is none."""
    pairs: dict[tuple[str, str], list[Transition]] = {}
    for found in transitions:
        pairs.setdefault((found.pairing.base.rpartition("/")[0], found.pairing.candidate.rpartition("/")[0]), []).append(found)
    told = []
    for (base, candidate), group in pairs.items():
        if named and any(map(was_compared, group)) and not any(map(met, group)) and not any(found.change in WORSE for found in group):
            told.append(f"{candidate} ran on one side alone: {group[0].detail[:LONGEST]}")
        elif not any(Verdict.PASSED in (found.base, found.candidate) for found in group):
            name, why = base if base == candidate else f"{base}={candidate}", group[0].detail.removeprefix(NOT_RUN)
            judged = any(Verdict.FAILED in (each.base, each.candidate) and (each.margins_before or each.margins_after) for each in group)
            why = why if len(why) <= LONGEST else f"{why[:LONGEST - 1]}…"
            told.append(f"{f'{name} passed on neither side' if judged else f'nothing was tested of {name}'}{f': {why}' if why else ''}")
    return "; ".join(told[:NAMED]) + (f"; and so of {len(told) - NAMED:,} more" if len(told) > NAMED else "")


def _counts(transitions: list[Transition], wanted: Callable[[Transition], bool]) -> list[tuple[Change, int]]:
    """(change, how often) of those wanted, worst first."""
    counts = collections.Counter(found.change for found in transitions if wanted(found))
    return [(change, counts[change]) for change in reversed(RANK) if counts[change]]


def _warnings(compared: list[Transition]) -> str:
    """What is no reason to stop, yet must be known."""
    numbers, bad = (sum(found.change is change for found in compared) for change in (Change.NUMBERS, Change.STILL_BAD))
    new = [found for found in compared if found.change is Change.NEW_ARM]
    told = [f"{in_words(Change.NEW_ARM, len(new))}, {new[0].detail[:LONGEST]}" if new else "",
            f"{numbers:,} gave other numbers, within budget" if numbers else "", f"{bad:,} failed before and still do" if bad else ""]
    return "".join(f"; {text}" for text in told if text)
