"""A mutants matrix as a part of a page: every broken arm against the checks of its family."""
from __future__ import annotations

from cases.fault import Fault
from harness.mutants import Matrix
from harness.mutants_file import MutantsFile
from harness.record import Record
from harness.verdicts import CHECKS
from reports import mutants as report
from reports.html import machine
from reports.html.parts import BAD, GOOD, IDLE, WARN, Cell, Finding, Part, Section, render
from reports.html.run_part import FINDINGS


def of_mutants(stored: MutantsFile, anchor: str) -> Part:
    """One matrix."""
    found = stored.matrix()
    tried, survivors = found.tried(), found.survivors()
    caught = len(tried) - len(survivors)
    said = f"{caught:,} of {len(tried):,} faults caught" + (f", {len(survivors):,} SURVIVED" if survivors else "")
    said += f", {len(found.missed()):,} missed by a check that must catch them" if found.missed() else ""
    right = f"no false alarm in {sum(found.ran.values()):,} runs of right arms"
    said += f"; {len(found.accused):,} FALSE ALARMS" if found.accused else f"; {right}"
    notes = [report.how_far(found)] if found.interrupted else []
    wrong = _findings(found, anchor)
    info = stored.info
    level = BAD if found.wrong else WARN if found.interrupted else GOOD
    word = {BAD: "WRONG", WARN: "INCOMPLETE", GOOD: "OK"}[level]
    return Part(anchor, "mutants", f"on {stored.device}", level, word, said, notes,
                wrong[:FINDINGS], len(wrong),
                [*(_matrix(found, family, anchor) for family in found.families),
                 machine.about(anchor, info.command, info.machine, info.kernels, info.started, info.finished)])


def _findings(found: Matrix, anchor: str) -> list[Finding]:
    survivors = [Finding("SURVIVED", BAD, fault.name, f"no check caught it on {fault.case}", _link(anchor, fault))
                 for fault in found.survivors()]
    missed = [Finding("MISSED", BAD, fault.name, f"{' and '.join(checks)} did not catch it on {fault.case}", _link(anchor, fault))
              for fault, checks in found.missed()]
    return [*survivors, *missed, *(_alarm("HARNESS ERROR", record) for record in found.errors),
            *(_alarm("FALSE ALARM", record) for record in found.accused)]


def _alarm(word: str, record: Record) -> Finding:
    wrong = [check.name for check in record.checks if check.verdict.value != "PASSED"]
    return Finding(word, BAD, f"{record.arm} on {record.case}", ", ".join(wrong) or record.detail, "")


def _link(anchor: str, fault: Fault) -> str:
    return f"{anchor}-{fault.kernel}"


def _matrix(found: Matrix, family: str, anchor: str) -> Section:
    """Faults by checks. Only checks that caught something, or must, have a column; what else caught one (an exception, a crash) has one,
    too."""
    faults = [fault for fault in found.faults if fault.family == family]
    by = {fault: found.by(fault) for fault in faults}
    others = dict.fromkeys(name for names in by.values() for name in names if name not in CHECKS[family])
    wanted = {check for fault in faults for check in (fault.check, *fault.also)}
    columns = [check for check in (*CHECKS[family], *others) if check in wanted or any(check in names for names in by.values())]
    idle = [check for check in CHECKS[family] if not any(check in names for names in by.values())]
    tried = set(found.tried())
    rows = [(_link(anchor, fault), fault.name, IDLE if fault not in tried else GOOD if by[fault] and not found.wanting(fault) else BAD,
             [_cell(fault, check, by[fault]) for check in columns]) for fault in faults]
    legend = ["● caught by the check that must; ○ by another one; ✗ not by the check that must"]
    legend += [f"caught nothing: {', '.join(idle)}"] if idle else []
    return Section(f"{anchor}-{family}", f"{family}: faults by checks", render("mutants", columns=columns, rows=rows, legend=legend))


def _cell(fault: Fault, check: str, by: list[str]) -> Cell:
    must = check in (fault.check, *fault.also)
    if check in by:
        return Cell(GOOD, ["●" if must else "○"])
    return Cell(BAD, ["✗"]) if must else Cell("", [""])
