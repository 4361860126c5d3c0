"""What a gate found, in words: its verdict, the two environments, and the things to look at, each once. For a terminal and for Markdown."""
from __future__ import annotations

import collections
import dataclasses
import re

from harness.comparison import Change, TimeComparison, TimeVerdict, Transition
from harness.gate_folder import GateInfo
from harness.stats import in_words as interval
from harness.transitions import RANK, TITLES, UNRESOLVED, WORSE, WRONG, is_void, outcome, risen, was_compared
from harness.words import counted
from reports.cells import names

INTERRUPTED = 130
MARGIN = "margin risen"
ARMS = re.compile(r"\b(none|backscan|metadata|dense|litetopk)\b")
NUMBER = re.compile(r"[\d.,]+")
ORDER = (TimeVerdict.INVALID.value, TimeVerdict.SLOWER.value, Change.UNKNOWN.value, TimeVerdict.UNRESOLVED.value, Change.STILL_BAD.value,
         Change.NEW_ARM.value, MARGIN, Change.NUMBERS.value)
"""What is to be looked at after that which got worse, worst first."""


RANKED = (TimeVerdict.SLOWER.value, TimeVerdict.UNRESOLVED.value, Change.NUMBERS.value)
"""Of what the worst is shown, not the first, and all that a pair of kernels has is told together."""
LOUD = {*(change.value for change in WORSE), TimeVerdict.SLOWER.value, TimeVerdict.INVALID.value}
"""What makes the gate fail."""
HINT = "what helps: --seconds, --processes, a quieter machine, threearm calibrate"
SHOWN = 3  # kernels named in a line
ULP_STEPS = ("1", "2", "3-4", "5-8", "9-16", "more", "not finite")


@dataclasses.dataclass
class Thing:
    """One thing to look at: the same change of a kernel's arms, for the same reason, on one or many cases. shown: one of them, why: what
    is said of it; it is the worst where `ranked`."""

    title: str
    found: list[Transition]
    shown: Transition
    why: str
    ranked: bool

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(each.pairing.case for each in self.found))

    @property
    def arms(self) -> str:
        return arms_in_words(self.found)


def verdict(transitions: list[Transition], info: GateInfo, again: bool = False) -> tuple[int, str]:
    """The exit code, and the first line of every report: the verdict and its reason. again: of a stored gate; one that was cut short is 1
    if something got worse, else 4."""
    code, reason = outcome(transitions, bool(info.options.get("bitwise")), info.void, bool(info.options.get("named")))
    lacking = " and ".join(info.options.get("lacking", []))
    if lacking and code == 0:
        code, reason = UNRESOLVED, f"{lacking}; of what is there: {reason}"
    if not info.interrupted and (not again or info.finished or info.void):
        return code, f"{TITLES[code]} (exit {code}): {reason}"
    cut_short = (WRONG if code == WRONG else UNRESOLVED) if again else INTERRUPTED
    how, far = "interrupted" if info.interrupted else "cut short, or still running,", sum(map(was_compared, transitions))
    so_far = f"; so far {TITLES[code]}: {reason}" if far else ""
    return cut_short, f"INCOMPLETE (exit {cut_short}): {how} after {counted(far, 'comparison')}{so_far}"


def colour(code: int) -> str:
    """How the verdict is shown."""
    return {0: "bold green", WRONG: "bold red", UNRESOLVED: "bold yellow", INTERRUPTED: "bold yellow"}.get(code, "bold red")


# --- the two sides ----------------------------------------------------------------------------------------------------


def facts(info: GateInfo) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """What the two sides' machines and packages have in common, and where they differ: base's and candidate's, "" where one has none."""
    base, candidate = ({**machine, **{name: version for name, version in versions(side.kernels).items() if version not in machine.values()}}
                       for side in (info.base, info.candidate) if (machine := side.machine) is not None)
    keys = dict.fromkeys([*base, *candidate])
    common = {key: base[key] for key in keys if key in base and base[key] == candidate.get(key)}
    return common, {key: (base.get(key, ""), candidate.get(key, "")) for key in keys if key not in common}


def versions(kernels: list[dict[str, object]]) -> dict[str, str]:
    """The versions of kernels that come in a package."""
    return {f"{kernel['name']}'s": str(kernel["version"]) for kernel in kernels if kernel.get("version")}


def unversioned(info: GateInfo) -> str:
    """`no version known of k`: the kernels that come in no package that either side could name a version of; "" of none."""
    kernels = [*info.base.kernels, *info.candidate.kernels]
    known = {kernel["name"] for kernel in kernels if kernel.get("version")}
    found = list(dict.fromkeys(kernel["name"] for kernel in kernels if kernel["name"] not in known))
    more = f" and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
    return f"no version known of {', '.join(found[:SHOWN])}{more}" if found else ""


# --- names ------------------------------------------------------------------------------------------------------------


def kernels_of(found: Transition) -> tuple[str, str]:
    """The kernels of base and candidate."""
    return found.pairing.base.rpartition("/")[0], found.pairing.candidate.rpartition("/")[0]


def arms_in_words(found: list[Transition]) -> str:
    """Arms of one pair of kernels: `k/none,metadata`, `a=b/none`, `a/dense=b/litetopk`."""
    (base, candidate), kernels = kernels_of(found[0]), []
    pairs = dict.fromkeys((each.pairing.base.rpartition("/")[2], each.pairing.candidate.rpartition("/")[2]) for each in found)
    if all(mine == theirs for mine, theirs in pairs):
        kernels = [base if base == candidate else f"{base}={candidate}"]
        return f"{kernels[0]}/{','.join(mine for mine, _ in pairs)}"
    return ", ".join(f"{base}/{mine}={candidate}/{theirs}" for mine, theirs in pairs)


def case_names(transitions: list[Transition]) -> dict[str, str]:
    """The label of each case: what it does not share with the others of its family."""
    return names(list(dict.fromkeys(found.pairing.case for found in transitions)))


# --- things to look at ------------------------------------------------------------------------------------------------


def things(transitions: list[Transition], bitwise: bool = False) -> list[Thing]:
    """What somebody must look at, worst first, each once: what got worse; times that did; what could not be told; what failed before; what
    came near its budget; other numbers."""
    groups: dict[tuple[str, tuple[str, str], str], Thing] = {}
    for found in transitions:
        for title, why in _titles(found):
            ranked = title in RANKED and (title == Change.NUMBERS.value or ratio_of(found) > 0)
            key = (title, kernels_of(found), "" if ranked else signature(why))
            thing = groups.setdefault(key, Thing(title, [], found, why, ranked))
            thing.found.append(found)
            if ranked and how_bad(title, found) > how_bad(title, thing.shown):
                thing.shown, thing.why = found, why
    first = [change.value for change in reversed(RANK) if change in WORSE or (bitwise and change is Change.NUMBERS)]
    order = [*first, *(title for title in ORDER if title not in first)]
    return sorted(groups.values(), key=lambda thing: order.index(thing.title))


def _titles(found: Transition) -> list[tuple[str, str]]:
    """(title, why) of what is to be looked at in one comparison."""
    told = []
    unremarkable = found.change in (Change.SAME, Change.FIXED, Change.NEW_ARM)
    if not unremarkable and (was_compared(found) or is_void(found)):
        told.append((found.change.value, found.detail))
    if risen(found):
        told.append((MARGIN, risen(found)))
    if found.time and found.time.verdict in (TimeVerdict.INVALID, TimeVerdict.SLOWER, TimeVerdict.UNRESOLVED):
        told.append((found.time.verdict.value, found.time.why))
    return told


def signature(why: str) -> str:
    """What is the same in the same finding of another arm or on another case: what is said before the numbers."""
    return NUMBER.sub("", ARMS.sub("arm", why.partition(": ")[0].partition("; ")[0]))


def how_bad(title: str, found: Transition) -> float:
    """What is the largest where it is the worst: the ratio of a time, the farthest that numbers are apart."""
    if title != Change.NUMBERS.value:
        return ratio_of(found)
    steps = [step for step, name in enumerate(ULP_STEPS) if found.numbers and found.numbers.ulp.get(name)]
    return max(steps, default=-1) + (found.numbers.bad / max(1, found.numbers.total) / 2 if found.numbers else 0.0)


def ratio_of(found: Transition) -> float:
    """Candidate over base, 0 where there is none."""
    return found.time.estimate.ratio if found.time and found.time.estimate else 0.0


# --- times ------------------------------------------------------------------------------------------------------------


def timed(transitions: list[Transition]) -> dict[TimeVerdict, list[Transition]]:
    """The comparisons that have a time verdict, by verdict, the most telling verdict first, the slowest comparison first."""
    order = (TimeVerdict.INVALID, TimeVerdict.SLOWER, TimeVerdict.UNRESOLVED, TimeVerdict.FASTER, TimeVerdict.SAME)
    by_verdict = {kind: [found for found in transitions if found.time and found.time.verdict is kind] for kind in order}
    return {kind: sorted(found, key=ratio_of, reverse=True) for kind, found in by_verdict.items() if found}


def contracts(transitions: list[Transition]) -> str:
    """`span, L2 flushed`: what was timed, of all of them."""
    return " / ".join(dict.fromkeys(f"{found.time.contract}, {found.time.cache}" for found in transitions if found.time))


def thresholds(transitions: list[Transition]) -> str:
    """`thresholds: 30 of 90 calibrated, else 3 %`"""
    rules = [found.time.rule for found in transitions if found.time]
    others = [rule for rule in rules if not rule.source.startswith("calibrated")]
    rest = " or ".join(dict.fromkeys(f"{100 * rule.threshold:.3g} %" for rule in others))
    return f"thresholds: {len(rules) - len(others):,} of {len(rules):,} calibrated" + (f", else {rest}" if rest else "")


def stopped(transitions: list[Transition]) -> str:
    """`sampling stopped: time cap of 5 s (8), 9 pairs of processes (2)`: why no more was sampled."""
    reasons = collections.Counter(found.time.stopped for found in transitions if found.time and found.time.stopped)
    return f"sampling stopped: {', '.join(f'{why} ({count:,})' for why, count in reasons.most_common())}" if reasons else ""


def why_untimed(info: GateInfo) -> str:
    """Why there are no times. A gate that was cut short says how it would have taken them."""
    return str(info.options.get("time") or "") if info.finished else "the gate did not get so far"


def throttled(transitions: list[Transition]) -> str:
    """The share of samples taken while the GPU was slowed, or ""."""
    times: list[TimeComparison] = [found.time for found in transitions if found.time]
    slowed, samples = sum(time.throttled for time in times), sum(time.samples for time in times)
    return f"{100 * slowed / samples:.2g} % of {samples:,} samples throttled" if slowed else ""


def ratio_in_words(found: Transition) -> str:
    """`+10.2 % [+9.8 %, +10.6 %]`, or why there is none."""
    return interval(found.time.estimate) if found.time and found.time.estimate else "no interval"
