"""What the checks of a record found, read for a comparison with another record: what failed, NaN, another convention. Parent side.

Read from what checks say, as docs/records.md has it, so that records of a run that is long over can be read as well.
"""
from __future__ import annotations

import math
import re

from harness.record import Record
from harness.verdicts import Check, Verdict

AGAINST_REFERENCE = ("reference", "set", "values")
"""Checks whose margins are errors over budgets against the reference."""

TELLING = ("reference", "sentinels", "shape", "set", "values", "status", "lengths")
"""Checks of the outputs themselves: the first of these that failed is quoted."""
NEW_NAN = "new NaN: "
"""What worker_outputs.compare begins with, where a NaN is on one side alone."""
EXPLAINED = "explained by: "
SHOWN = 3  # names of checks in one line
HARMLESS = (Verdict.PASSED, Verdict.SKIPPED, Verdict.VACUOUS)
CONVENTIONAL = {"reference", "sentinels"}
STATISTICS = {"lse", "max_logits"}
BASE_2 = re.compile(EXPLAINED + r"((?:lse|max_logits|lse and max_logits) in base 2); under it 100% ")
FACTORS = {"in base 2": 1 / math.log(2), "in base 2 no more, though taken for it": math.log(2)}


def failing(record: Record) -> list[Check]:
    """The checks that did not pass, those of the outputs themselves first."""
    found = [check for check in record.checks if check.verdict not in HARMLESS]
    return sorted(found, key=lambda check: TELLING.index(check.name) if check.name in TELLING else len(TELLING))


def flaky(record: Record) -> list[Check]:
    """The checks that found the arm to differ from itself."""
    return [check for check in record.checks if check.verdict is Verdict.FLAKY]


def in_short(checks: list[Check], like: str = "") -> str:
    """`reference, padded, set and 2 more (like topk_length - 64): what the first one says`; "" of none. like: what the localiser would
    explain it with."""
    if not checks:
        return ""
    names, more = [check.name for check in checks[:SHOWN]], len(checks) - SHOWN
    return f"{', '.join(names)}{f' and {more} more' if more > 0 else ''}{f' (like {like})' if like else ''}: {checks[0].detail}"


def explanation(record: Record) -> str:
    """The fault that the localiser finds to explain what failed, or ""."""
    lines = [line for check in failing(record) for line in check.where if line.startswith(EXPLAINED)]
    return lines[0].removeprefix(EXPLAINED).partition("; ")[0] if lines else ""


def nan_in(record: Record) -> list[str]:
    """The outputs in which the arm returned NaN where a number is right, as far as the checks of its outputs show (each has five of its
    wrong elements)."""
    found = []
    for check in failing(record):
        if check.name in ("reference", "sentinels", "nan-leak") and any("  got nan" in line for line in check.first):
            found.append(_output(check))
        if check.name == "values" and any("value nan" in line for line in check.first):
            found.append("values")
    return list(dict.fromkeys(found))


def nan_told(numbers: Check | None) -> list[str]:
    """The outputs of which a comparison of the two sides' tensors says that the candidate alone has a NaN."""
    return re.findall(r"(\w+) has [\d,]+ in candidate alone", numbers.detail) if numbers and NEW_NAN in numbers.detail else []


def _output(check: Check) -> str:
    """The output whose wrong elements a check shows."""
    named = [line[3:-1] for line in check.where if line.startswith("in ") and line.endswith(":")]
    if named:
        return "out" if named[0] == "out row norm" else named[0]
    said = re.search(r"(\w+) is not ", check.detail)
    return said.group(1) if said else "out"


def other_convention(record: Record) -> str:
    """How the arm's outputs are right but for the convention: a statistic in another base, another value for a row without a key. "" where
    they are not, or anything else is wrong."""
    found = {check.name: check for check in failing(record)}
    if not found or not set(found) <= CONVENTIONAL:
        return ""
    return _sentinels(found) if "sentinels" in found else _base(found["reference"])


def _base(reference: Check) -> str:
    """That lse or max_logits differ from what is right by the factor between two bases, and out is within its budget."""
    wrong = {name for name, margin in reference.margins.items() if margin > 1}
    if not wrong or not wrong <= STATISTICS:
        return ""
    told = next((found.group(1) for line in reference.where if (found := BASE_2.match(line))), "")
    if told:
        return f"another base: {told}"
    ratios = [got / want for want, got in map(_want_and_got, reference.first) if want]
    for name, factor in FACTORS.items():
        if ratios and all(math.isclose(ratio, factor, rel_tol=1e-4) for ratio in ratios):
            return f"another base: {' and '.join(sorted(wrong))} {name}"
    return ""


def _want_and_got(line: str) -> tuple[float, float]:
    """The two values of an element as a check shows it; (0, 0) where it shows none."""
    found = re.search(r"  want (\S+)  got (\S+)", line)
    return (float(found.group(1)), float(found.group(2))) if found else (0.0, 0.0)


def _sentinels(found: dict[str, Check]) -> str:
    """That rows without a valid key, and nothing else, have another lse or max_logits than the harness's convention; their out is 0."""
    sentinels, reference = found["sentinels"], found.get("reference")
    outputs = set(re.findall(r"(\w+) is not ", sentinels.detail))
    if not outputs or not outputs <= STATISTICS or (reference and _wrong_elements(reference) != sentinels.bad):
        return ""
    return f"another sentinel: {sentinels.detail}{_now(sentinels)}"


def _now(sentinels: Check) -> str:
    """What stands there now, by the elements shown."""
    values = {f"{got:g}" for _, got in map(_want_and_got, sentinels.first)}
    return f", but {values.pop()}" if len(values) == 1 else ""


def _wrong_elements(reference: Check) -> int:
    """How many elements are over budget, rows' norms aside."""
    counts = dict(re.findall(r"(\w[\w ]*?) in ([\d,]+) of", reference.detail.removeprefix("over budget: ")))
    return sum(int(count.replace(",", "")) for name, count in counts.items() if name != "out row norm")


def other_findings(base: Record, candidate: Record) -> str:
    """What two failing records found differently, check by check: `reference 12 -> 96 wrong, padded no more`; "" if nothing."""
    before, after = ({check.name: check for check in failing(record)} for record in (base, candidate))
    told = [f"{name} no more" for name in before if name not in after]
    for name, check in after.items():
        if name in before and before[name].bad != check.bad:
            told.append(f"{name} {before[name].bad:,} -> {check.bad:,} wrong")
        elif name in before and before[name].detail != check.detail:
            told.append(f"{name} says otherwise")
    if not told and base.detail != candidate.detail:
        told = [f"was {base.detail}"]
    return ", ".join(told)
