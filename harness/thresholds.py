"""When a change of time is one: thresholds from comparisons of a program with itself (A/A), kept with the machine that they hold for.

Parent side. docs/timing.md says why each number is what it is.
"""
from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from harness.comparison import Estimate, Pairing, Round, Rule
from harness.runfolder import as_json, replace_file
from harness.stats import estimate, same, suspect
from harness.words import counted

SCHEMA = 1
ON_CUDA = ("gpu", "driver", "power limit", "max SM clock", "ECC")
ON_CPU = ("cpu",)
LEAST = {"cuda": 0.01, "cpu": 0.03}
"""No threshold is lower. cuda: an SM clock moves in steps of 15 MHz, 0.8 % of 1,980. cpu: nobody here sets or sees its clocks."""
DEFAULT = {"cuda": 0.03, "cpu": 0.10}
"""Where nothing was calibrated."""
FLOOR_US = {"cuda": 1.0, "cpu": 20.0}
"""A change of less is none. cuda: events resolve 0.5 us, and a time has two ends. cpu: what waking a second thread costs."""
STEP = 1e-4
"""Thresholds are rounded up to 0.01 %."""


class ThresholdError(Exception):
    """Thresholds that cannot be used here: one line."""


@dataclasses.dataclass(frozen=True)
class CaseThreshold:
    """What A/A comparisons of one arm on one case showed, under one contract.

    threshold, floor_us: as in Rule. comparisons: how many, of `processes` pairs of fresh processes each. fired: how many would have been
    suspected of a change under the threshold that the others give, unresolved: how many would have been neither that nor SAME;
    by_default: how many were not SAME under the default rule. largest: how far from 1 an interval reached, detectable: the smallest
    change that shifts each of the intervals clear of the threshold; both relative. median_us: of the arm. incomplete: comparisons that
    do not count, as a process had no clean round. made: when.
    """

    threshold: float
    floor_us: float
    comparisons: int
    fired: int
    largest: float
    detectable: float
    unresolved: int = 0
    by_default: int = 0
    incomplete: int = 0
    processes: int = 0
    median_us: float = 0.0
    contract: str = ""
    made: str = ""


class Thresholds(msgspec.Struct):
    """The file. cases: by `case|kernel/arm`. made, command: of the last calibration that was written into it."""

    fingerprint: dict[str, str]
    made: str = ""
    command: list[str] = []
    cases: dict[str, CaseThreshold] = {}
    schema: int = SCHEMA


# --- from comparisons to a threshold ----------------------------------------------------------------------------------


def kind(device: str) -> str:
    """cuda or cpu."""
    return "cuda" if device.startswith("cuda") else "cpu"


def default_rule(device: str) -> Rule:
    """The rule where nothing was calibrated."""
    return Rule(DEFAULT[kind(device)], FLOOR_US[kind(device)])


def reach(found: Estimate) -> float:
    """How far from 1 the interval of an A/A comparison goes, in logs."""
    return max(abs(math.log(found.low)), abs(math.log(found.high)))


def threshold_over(found: Sequence[Estimate], device: str) -> float:
    """The smallest threshold under which all of these are SAME, but at least LEAST; rounded up."""
    largest = math.expm1(max(map(reach, found), default=0.0))
    return max(LEAST[kind(device)], round(math.ceil(largest / STEP) * STEP, 4))


def calibrated(comparisons: Sequence[Sequence[Sequence[Round]]], device: str, contract: str = "", made: str = "",
               confidence: float = 0.95) -> CaseThreshold | None:
    """The threshold from A/A comparisons, each the rounds of its pairs of processes; None if none of them counts.

    A comparison counts if each of its processes has a clean round: with one process less the interval is three times as wide, and
    the threshold would be about that.
    """
    estimates = [estimate(each, confidence) for each in comparisons]
    found = [each for each, taken in zip(estimates, comparisons) if each is not None and each.processes == len(taken)]
    if not found:
        return None
    floor_us, default = FLOOR_US[kind(device)], default_rule(device)
    threshold = threshold_over(found, device)
    alone = [Rule(threshold_over([*found[:place], *found[place + 1:]], device), floor_us, confidence) for place in range(len(found))]
    fired = sum(map(suspect, found, alone))
    unresolved = sum(not same(each, rule) for each, rule in zip(found, alone)) - fired
    median_us, largest = statistics.median(each.base_us for each in found), max(map(reach, found))
    needed = max(math.log1p(threshold), math.log1p(floor_us / median_us)) + largest
    return CaseThreshold(threshold, floor_us, len(found), fired, math.expm1(largest), math.expm1(needed), unresolved,
                         sum(not same(each, default) for each in found), len(comparisons) - len(found),
                         max(each.processes for each in found), median_us, contract, made)


def rule_of(found: CaseThreshold, device: str) -> Rule:
    """The rule that a calibrated arm gives, with its A/A comparisons in words."""
    told = f"calibrated: {counted(found.comparisons, 'A/A comparison')}, {found.fired} fired, sees {found.detectable * 100:.2g} %"
    return Rule(found.threshold, found.floor_us, source=told, widest=default_rule(device).threshold)


def key(case: str, arm: str) -> str:
    """An arm on a case, as the file names it."""
    return f"{case}|{arm}"


def rule_for(stored: Thresholds | None, pairing: Pairing, device: str, contract: str = "") -> Rule:
    """The rule for a pairing: of two arms that were calibrated the larger threshold, else the default, if that is no smaller.

    contract: how it is timed; a threshold from another contract does not count. "" takes any.
    """
    default = default_rule(device)
    if stored is None:
        return default
    arms = dict.fromkeys((pairing.base, pairing.candidate))
    found = [stored.cases[key(pairing.case, arm)] for arm in arms if key(pairing.case, arm) in stored.cases]
    found = [each for each in found if not contract or each.contract == contract]
    if not found:
        return default
    largest = max(found, key=lambda each: each.threshold)
    if len(found) < len(arms) and largest.threshold < default.threshold:
        return default
    return rule_of(largest, device)


# --- the file ---------------------------------------------------------------------------------------------------------


def fingerprint(machine: Mapping[str, str]) -> dict[str, str]:
    """What of a machine's description decides how times scatter: the GPU and its settings, or the CPU."""
    return {name: machine[name] for name in (ON_CUDA if "gpu" in machine else ON_CPU) if name in machine}


def load(path: Path, machine: Mapping[str, str]) -> Thresholds:
    """Read thresholds for use on this machine. Raises ThresholdError if the file cannot be read, or is of another machine."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=Thresholds)
    except OSError as error:
        raise ThresholdError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ThresholdError(f"{path} holds no thresholds: {error}") from None
    except UnicodeDecodeError:
        raise ThresholdError(f"{path} holds no thresholds: it is no text") from None
    if stored.schema != SCHEMA:
        raise ThresholdError(f"{path} has schema {stored.schema}; this version reads {SCHEMA}")
    wrong = next((name for name, each in stored.cases.items() if not usable(each)), None)
    if wrong:
        raise ThresholdError(f"{path}: {wrong}: threshold and floor must be numbers above 0")
    here = fingerprint(machine)
    differing = [name for name in dict.fromkeys((*here, *stored.fingerprint)) if here.get(name) != stored.fingerprint.get(name)]
    if differing:
        told = "; ".join(f"{name} {stored.fingerprint.get(name, 'none')}, here {here.get(name, 'none')}" for name in differing)
        raise ThresholdError(f"{path} is of another machine: {told}")
    return stored


def usable(found: CaseThreshold) -> bool:
    """Whether a stored threshold is one."""
    return all(math.isfinite(value) and value > 0 for value in (found.threshold, found.floor_us))


def save(stored: Thresholds, path: Path) -> None:
    """Write the file as a whole or not at all. Raises ThresholdError."""
    try:
        replace_file(path, as_json(stored))
    except OSError as error:
        raise ThresholdError(f"cannot write {path}: {error.strerror}") from None
