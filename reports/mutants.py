"""The matrix broken arm x check: as tables for a terminal, as findings in words, as Markdown."""
from __future__ import annotations

import os
import shlex
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from cases.fault import Fault
from harness.mutants import ACCUSED, Matrix, can_show
from harness.pool import Outcome
from harness.record import Record
from harness.runfolder import RunInfo
from harness.verdicts import CHECKS, CUDA_CHECKS, Verdict
from harness.words import counted
from reports import failure
from reports.cells import markdown_table

SHOWN = 10
"""Records of accused arms that are told in full."""
READABLE = 24
"""Characters that a case's column has at least, as far as cases are that long; narrower ones take too many lines."""
BORDER = 3
"""What a column's border and padding take; a table has one more character."""
LEGEND = """+4: so many other checks caught it too
ms: the whole case, with inputs, reference and every arm; left out where there is no room
idle: a check that caught no fault; accused: a right arm that some check did not pass, or that ended its worker"""


def caught_by(matrix: Matrix, fault: Fault) -> str:
    """The check that must catch it, where it did, and how many more."""
    if fault not in matrix.tried():
        return "not tried: needs CUDA"
    checks = matrix.by(fault)
    if not checks:
        return "nothing"
    return checks[0] + (f" +{len(checks) - 1}" if len(checks) > 1 else "")


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


class FaultTable:
    """A line a fault: name, what caught it, its case, milliseconds. Where the case has too little room beside the others, ms is left
    out; where it still has, the case stands below the name. Nothing is cut off."""

    def __init__(self, title: str, rows: list[tuple[str, str, str, str]]) -> None:
        self.title, self.rows = title, [(name, found, case.replace(",", ", "), ms) for name, found, case, ms in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        name, found, _, ms = (max(map(len, column)) for column in zip(("fault", "caught by", "case", "ms"), *self.rows))
        cases = ["case", *(row[2] for row in self.rows)]
        word, case = max(len(word) for case in cases for word in case.split()), max(map(len, cases))
        least = name + found + max(word, min(case, READABLE)) + 3 * BORDER + 1
        beside = least <= options.max_width
        timed = least + ms + BORDER <= options.max_width
        heads = [Column("fault" if beside else "fault, case", no_wrap=beside, overflow="fold"),
                 Column("caught by", no_wrap=beside, overflow="fold"),
                 *([Column("case", overflow="fold")] if beside else []), *([Column("ms", justify="right", no_wrap=True)] if timed else [])]
        table = Table(*heads, title=Text(self.title), title_justify="left", title_style="bold")
        for name_, found_, case_, ms_ in self.rows:
            table.add_row(*([name_, found_, case_] if beside else [f"{name_}\n{case_}", found_]), *([ms_] if timed else []))
        yield table


def shown(matrix: Matrix, family: str) -> list[Fault]:
    """The faults of a family that have a row; after an interrupt those that were tried."""
    return [fault for fault in (matrix.tried() if matrix.interrupted else matrix.faults) if fault.family == family]


def terminal(matrix: Matrix) -> RenderableType:
    """For each family a line a fault, then a line a check; and what they mean."""
    parts: list[RenderableType] = []
    for family in matrix.families:
        rows = [(fault.name, caught_by(matrix, fault), fault.case.partition(":")[2], milliseconds(matrix.own(fault).seconds))
                for fault in shown(matrix, family)]
        checks = Table("check", Column("faults that it caught", justify="right"), Column("that it alone caught", justify="right"))
        for check, count, alone in by_check(matrix, family):
            checks.add_row(check, str(count), str(alone))
        parts += [FaultTable(family, rows)] if rows else []
        parts += [checks] if checks.row_count else []
    return Group(*parts, *([Text(LEGEND, style="dim")] if parts else []))


def how_far(matrix: Matrix) -> str:
    """Where an interrupt came."""
    return f"interrupted after {matrix.done:,} of {counted(matrix.total, 'pair')} of kernel and case"


def by_check(matrix: Matrix, family: str) -> list[tuple[str, int, int]]:
    """(check, faults that it caught, faults that nothing else caught) of every check that caught one, the most successful first."""
    faults = [fault for fault in matrix.faults if fault.family == family]
    names = [*CHECKS[family], *dict.fromkeys(check for fault in faults for check in matrix.by(fault) if check not in CHECKS[family])]
    rows = []
    for check in names:
        found = matrix.caught_by(family, check)
        rows.append((check, len(found), sum(matrix.by(fault) == [check] for fault in found)))
    return sorted((row for row in rows if row[1]), key=lambda row: -row[1])


def idle(matrix: Matrix) -> list[str]:
    """Checks that caught nothing, in words, a line a family. None where not all faults were tried: then it says nothing of the checks."""
    lines = []
    for family in matrix.families if matrix.whole and not matrix.interrupted else ():
        checks = matrix.idle(family)
        no_gpu = [check for check in checks if check in CUDA_CHECKS and not matrix.device.startswith("cuda")]
        caught_none = [check for check in checks if check not in no_gpu]
        lines += [f"idle in {family}: {', '.join(caught_none)}"] if caught_none else []
        lines += [f"idle in {family}, as they need CUDA: {', '.join(no_gpu)}"] if no_gpu else []
    return lines


def summary(matrix: Matrix, generated: int) -> list[str]:
    """How many faults were caught and how, on how many cases right arms ran."""
    tried = matrix.tried()
    caught, own = (len(tried) - len(matrix.survivors()), len(tried) - len(matrix.survivors()) - len(matrix.missed()))
    cells = f"; {counted(len(matrix.cells), 'pair')} of fault and case" if len(matrix.cells) > len(matrix.faults) else ""
    lines = [f"{caught} of {counted(len(tried), 'fault')} caught, {own} of them by the check that is there for it{cells}"]
    possible = can_show(matrix.faults, matrix.device)
    unfit = [fault.name for fault in matrix.faults if fault not in possible]
    lines += [f"not tried, as their checks need CUDA: {', '.join(unfit)}"] if unfit else []
    left = len(possible) - len(tried)
    lines += [f"not tried before the interrupt: {counted(left, 'fault')}"] if left else []
    ran = ", ".join(f"{kernel} {count:,}" for kernel, count in matrix.ran.items())
    few = "" if matrix.whole and not matrix.interrupted else f"tried on {counted(len(matrix.met), 'case')} only; "
    drawn = "" if matrix.interrupted else f" ({generated:,} generated)"
    lines += [f"right arms: {len(matrix.accused)} accused; {few}cases: {ran or 'none'}{drawn}"]
    return lines


def news(matrix: Matrix, outcome: Outcome, options: Callable[[Record], list[str]]) -> list[str]:
    """What the job that came last shows to be wrong, a line each. A fault is told on its own case: with --complete one that survives
    so far may still be caught on another, and is then missed."""
    own = [fault for fault in matrix.faults if (fault.kernel, fault.case) == (outcome.job.kernel, outcome.job.case)]
    lines = [not_caught(matrix, fault) for fault in own if matrix.wanting(fault)]
    lines += [harness_error(record).replace("\n", "") for record in outcome.records if record.verdict is Verdict.ERROR]
    if outcome.job.kernel not in matrix.names:
        lines += [f"FALSE ALARM  {record.verdict.value}  {failure.replay_line(record, options(record))}"
                  for record in outcome.records if record.verdict in ACCUSED]
    return lines


def not_caught(matrix: Matrix, fault: Fault) -> str:
    """That a fault survived, or which checks missed it."""
    found = matrix.by(fault)
    if not found:
        return f"SURVIVED  {fault.name}: no check caught it on {fault.case}"
    return f"MISSED  {fault.name}: {' and '.join(matrix.wanting(fault))} did not catch it on {fault.case}, {', '.join(found)} did"


def harness_error(record: Record) -> str:
    return f"HARNESS ERROR  {record.arm}  {record.case}\n  {record.detail}"


def findings(matrix: Matrix, generated: int, options: Callable[[Record], list[str]]) -> list[str]:
    """What is wrong, with the lines that repeat it, then idle checks and the summary. options: as reports/failure.py takes them."""
    lines = []
    for fault in [*matrix.survivors(), *(fault for fault, _ in matrix.missed())]:
        lines.append(f"{not_caught(matrix, fault)}\n  repeat: {run_line(fault)}")
    lines += map(harness_error, matrix.errors)
    lines += [f"FALSE ALARM  {text}" for text in failure.describe_all(matrix.accused[:SHOWN], options)]
    rest = matrix.accused[SHOWN:]
    lines += [f"FALSE ALARM  {failure.replay_line(record, options(record))}" for record in rest]
    return lines + idle(matrix) + summary(matrix, generated)


def run_line(fault: Fault) -> str:
    """The command that shows a fault on its own case."""
    return shlex.join(["threearm", "run", fault.case, "--arm", fault.kernel, "--time", "wall" if fault.check == "timed-output" else "none"])


# --- Markdown ---------------------------------------------------------------------------------------------------------


def page(info: RunInfo, matrix: Matrix, generated: int) -> str:
    """The whole matrix, with where it comes from."""
    stopped = [f"**{how_far(matrix)}**"] if matrix.interrupted else []
    parts = [provenance(info), "\n".join(f"* {line}" for line in [*stopped, *summary(matrix, generated), *idle(matrix)])]
    wrong = [line for line in findings(matrix, generated, lambda record: []) if line not in (*summary(matrix, generated), *idle(matrix))]
    parts += ["```\n" + "\n".join(wrong) + "\n```"] if wrong else []
    for family in matrix.families:
        rows = [fault_row(matrix, fault) for fault in shown(matrix, family)]
        parts.append(f"### {family}: faults\n\n" + markdown_table(
            ["fault", "its check", "also caught by", "its case", "caught on", "ms"], rows))
        checks = [[check, str(count), str(alone)] for check, count, alone in by_check(matrix, family)]
        parts.append(f"### {family}: checks\n\n" + markdown_table(["check", "faults that it caught", "that it alone caught"], checks))
    return "\n\n".join(parts) + "\n"


def fault_row(matrix: Matrix, fault: Fault) -> list[str]:
    """fault, its check, the others that caught it, its case, on how many of how many cases, milliseconds on its own."""
    found = matrix.by(fault)
    own = fault.check if fault.check in found else f"**{fault.check}: no**"
    caught, tried = matrix.cases(fault)
    case, others = fault.case.partition(":")[2], ", ".join(check for check in found if check != fault.check)
    if fault not in matrix.tried():
        return [fault.name, fault.check, "", case, "not tried: needs CUDA", ""]
    return [fault.name, own, others, case, f"{caught} of {tried}", milliseconds(matrix.own(fault).seconds)]


def provenance(info: RunInfo) -> str:
    """Command, time, machine, versions."""
    machine = "; ".join(f"{key} {value}" for key, value in info.machine.items())
    return (f"`{shlex.join(['threearm', *info.command[1:]])}`, {os.cpu_count()} cores, started {info.started}, "
            f"finished {info.finished}.  \n{machine}.")
