"""The matrix broken arm x check: as tables for a terminal, as findings in words, as Markdown."""
from __future__ import annotations

import os
import shlex
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Column, Table

from cases.fault import Fault
from harness.mutants import Matrix
from harness.record import Record
from harness.runfolder import RunInfo
from harness.verdicts import CHECKS, CUDA_CHECKS
from reports import failure
from reports.cells import markdown_table

SHOWN = 10
"""Records of accused arms that are told in full."""


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


def terminal(matrix: Matrix) -> RenderableType:
    """For each family a line a fault, then a line a check."""
    parts: list[RenderableType] = []
    for family in matrix.families:
        table = Table(Column("fault", no_wrap=True, overflow="ellipsis", max_width=40, min_width=30),
                      Column("caught by", no_wrap=True, min_width=24), Column("case", no_wrap=True, overflow="ellipsis"),
                      Column("ms", justify="right", no_wrap=True, min_width=6), title=family, title_justify="left", title_style="bold")
        for fault in matrix.faults:
            if fault.family == family:
                table.add_row(fault.name, caught_by(matrix, fault), fault.case.partition(":")[2], milliseconds(matrix.own(fault).seconds))
        checks = Table("check", Column("faults that it caught", justify="right"), Column("that it alone caught", justify="right"))
        for check, count, alone in by_check(matrix, family):
            checks.add_row(check, str(count), str(alone))
        parts += [table, checks]
    return Group(*parts)


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
    """Checks that caught nothing, in words, a line a family. None where faults were picked: then it says nothing of the checks."""
    lines = []
    for family in matrix.families if matrix.whole else ():
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
    cells = f"; {len(matrix.cells):,} pairs of fault and case" if len(matrix.cells) > len(matrix.faults) else ""
    lines = [f"{caught} of {len(tried)} faults caught, {own} of them by the check that is there for it{cells}"]
    untried = [fault.name for fault in matrix.faults if fault not in tried]
    lines += [f"not tried, as their checks need CUDA: {', '.join(untried)}"] if untried else []
    ran = ", ".join(f"{kernel} {count:,}" for kernel, count in matrix.ran.items())
    lines += [f"right arms: {len(matrix.accused)} accused; cases: {ran or 'none'} ({generated:,} generated)"]
    return lines


def findings(matrix: Matrix, generated: int, options: Callable[[Record], list[str]]) -> list[str]:
    """What is wrong, with the lines that repeat it, then idle checks and the summary. options: as reports/failure.py takes them."""
    lines = []
    for fault in matrix.survivors():
        lines.append(f"SURVIVED  {fault.name}: no check caught it on {fault.case}\n  repeat: {run_line(fault)}")
    for fault, checks in matrix.missed():
        lines.append(f"MISSED  {fault.name}: {' and '.join(checks)} did not catch it on {fault.case}, "
                     f"{', '.join(matrix.by(fault))} did\n  repeat: {run_line(fault)}")
    lines += [f"HARNESS ERROR  {record.arm}  {record.case}\n  {record.detail}" for record in matrix.errors]
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
    parts = [provenance(info), "\n".join(f"* {line}" for line in [*summary(matrix, generated), *idle(matrix)])]
    wrong = [line for line in findings(matrix, generated, lambda record: []) if line not in (*summary(matrix, generated), *idle(matrix))]
    parts += ["```\n" + "\n".join(wrong) + "\n```"] if wrong else []
    for family in matrix.families:
        rows = [fault_row(matrix, fault) for fault in matrix.faults if fault.family == family]
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
