"""How a record that did not pass is told: what, how far, where, the first elements, and the line that repeats it."""
from __future__ import annotations

import collections
import re
import shlex
from collections.abc import Callable

from harness.record import Record
from harness.verdicts import SOURCES, Check, Verdict
from harness.words import counted
from reports.evidence_numbers import clocks_line, contract_line, ms
from reports.frame import reason

ARM_NAMES = re.compile(rf"\b({'|'.join(SOURCES)})\b")
ONCE = "full-width"  # the check that only the first arm with a length has
Findings = frozenset[tuple[str, str]]
HARMLESS = (Verdict.PASSED, Verdict.SKIPPED)


def replay_line(record: Record, options: list[str]) -> str:
    """The command that runs this arm on this case again. options: what the run was given besides (--device, --load); words before the
    first of them go before the command (an environment variable)."""
    at = next((number for number, word in enumerate(options) if word.startswith("--")), len(options))
    return shlex.join([*options[:at], "threearm", "replay", record.case, "--arm", record.arm, *options[at:]])


def shown(margin: float) -> str:
    """A margin; 1e30 stands for NaN or infinity where a number is expected, or the other way round."""
    return "not finite" if margin >= 1e30 else f"{margin:.3g}"


def describe_all(records: list[Record], options: Callable[[Record], list[str]]) -> list[str]:
    """Records in full; an arm whose findings are those of an arm before it is told in one line."""
    return [f"{record.verdict.value}  {record.arm}  {record.case}\n  as {first} above\n  repeat: {replay_line(record, options(record))}"
            if first else describe(record, options(record)) for record, first in zip(records, told_as(records))]


def told_as(records: list[Record]) -> list[str]:
    """For each record the arm of its kernel and case before it that has the same findings, or ""."""
    firsts: list[str] = []
    told: dict[tuple[str, str], list[tuple[str, Findings]]] = {}
    for record in records:
        found, before = findings(record), told.setdefault((record.kernel, record.case), [])
        first = next((arm for arm, others in before if found <= others and {name for name, _ in others - found} <= {ONCE}), "")
        firsts.append(first)
        if not first:
            before.append((record.arm, found))
    return firsts


def findings(record: Record) -> Findings:
    """What did not pass, (check, text), without the names of arms: equal for arms of a kernel that are wrong in the same way."""
    found = [("", f"{record.verdict.value} {record.detail} {record.note}")]
    found += [(check.name, "\n".join(describe_check(check))) for check in record.checks if check.verdict is not Verdict.PASSED]
    return frozenset((ARM_NAMES.sub("arm", name), ARM_NAMES.sub("arm", text)) for name, text in found)


def raised(record: Record) -> bool:
    """Whether the record is of an exception, whose traceback the worker printed."""
    return record.verdict is not Verdict.OOM and record.detail.partition(" in phase ")[0].isidentifier() and " in phase " in record.detail


def describe_check(check: Check, always: bool = False) -> list[str]:
    """A check's lines. Passing ones are one line with their margins; `always` shows their detail as well."""
    margins = "  ".join(f"{name} {shown(value)}" for name, value in check.margins.items())
    head = f"  {check.verdict.value:8} {check.name}"
    if check.verdict is Verdict.PASSED:
        return [f"{head}{'  margins: ' + margins if margins else ''}{'  ' + check.detail if always and check.detail else ''}"]
    share = f"  {check.bad:,} of {check.total:,} ({check.bad / check.total:.3%})" if check.bad and check.total else ""
    lines = [f"{head}  {check.detail}{share}"]
    lines += [f"             margins: {margins}"] if margins else []
    lines += [f"             where: {where}" for where in check.where]
    lines += [f"             {element}" for element in check.first]
    if check.ulp:
        lines.append("             ULP apart: " + ", ".join(f"{name}: {count:,}" for name, count in check.ulp.items()))
    return lines


def describe(record: Record, options: list[str], always: bool = False) -> str:
    """One record in full."""
    lines = [f"{record.verdict.value}  {record.arm}  {record.case}"]
    lines += [f"  {record.detail}"] if record.detail else []
    lines += [f"  note: {record.note}"] if record.note else []
    for check in record.checks:
        lines += describe_check(check, always)
    if always:
        lines += [f"  {name}: {value:.4g} (reported, not judged)" for name, value in record.extra.items()]
        lines += [f"  peak transient memory: {record.memory / 2**20:,.1f} MiB"] if record.memory is not None else []
        lines += describe_time(record)
    return "\n".join([*lines, f"  repeat: {replay_line(record, options)}"])


def describe_time(record: Record) -> list[str]:
    """What was measured, and how; [] where nothing was."""
    if not record.time:
        return []
    lines = [f"  time: {ms(record.time.us)} ms; {contract_line([record], record.family).replace('`', '')}"]
    lines += [f"  derivation of topk_length: {ms(record.time.derive_us)} ms"] if record.time.derive_us else []
    told = ", ".join(f"{name.strip()} {us:.1f}" for name, us in sorted(record.time.breakdown.items(), key=lambda each: -each[1]))
    lines += [f"  {counted(record.time.kernels, 'kernel')} a call, median us: {told}"] if told else []
    return [*lines, *(f"  {line}" for line in [clocks_line([record])] if line)]


def summary(records: list[Record]) -> str:
    """Counts of verdicts, and the reasons of skipped arms, each once."""
    counts = {verdict: sum(record.verdict is verdict for record in records) for verdict in Verdict}
    lines = [", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count) or "nothing ran"]
    failed = collections.Counter(c.name for r in records for c in r.checks if c.verdict not in HARMLESS)
    lines += ["checks that did not pass: " + ", ".join(f"{name} {count}" for name, count in failed.items())] if failed else []
    skipped: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.verdict is Verdict.SKIPPED:
            skipped.setdefault((record.kernel, reason(record)), []).append(record)
    for (kernel, why), group in skipped.items():
        sources = "/".join(dict.fromkeys(record.source for record in group))
        cases = len({record.case for record in group})
        lines.append(f"SKIPPED {kernel}/{sources}: {why} ({cases} case{'s' if cases > 1 else ''})")
    return "\n".join([*lines, *_notes(records)])


def _notes(records: list[Record]) -> list[str]:
    """What a reader must know, each arm's notes once."""
    cases: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.note:
            cases.setdefault((record.arm, record.note), []).append(record.case)
    return [f"note: {arm} on {f'{len(of)} cases' if len(of) > 1 else of[0]}: {note}" for (arm, note), of in cases.items()]
