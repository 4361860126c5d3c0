"""A run as a part of a page, and the parts of an evidence folder, which are runs and time comparisons."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from harness.evidence import code_of
from harness.evidence_folder import EvidenceFolder
from harness.runfolder import RunFolder, exit_code
from reports import evidence_page, repeating, run_line
from reports.cells import names
from reports.html import machine, records
from reports.html.parts import BAD, GOOD, IDLE, WARN, Part, Section, section, table
from reports.html.plots_groups import Interval, forest

FINDINGS = 12
"""Lines of what is wrong; all of it is below."""
MISSING = 100
"""Named of what an unfinished run lacks."""
LEVELS = {0: GOOD, 1: BAD}


def of_run(folder: RunFolder, anchor: str) -> Part:
    """One run."""
    found, code = folder.records, exit_code(folder.records)
    wrong = records.findings(anchor, found)
    return Part(anchor, "run", folder.path.name if folder.path else "in memory",
                LEVELS.get(code, WARN) if folder.info.finished or code else WARN, run_line.word(folder.info, found),
                run_line.line(folder.info, found), [], wrong[:FINDINGS], len(wrong),
                [*missing(anchor, folder), records.matrix(anchor, found), *records.failures(anchor, found, repeating.of_run(folder)),
                 *records.plots(anchor, found), *records.skipped(anchor, found), machine.of_run(anchor, folder.info),
                 *records.every_record(anchor, found, repeating.of_run(folder))])


def missing(anchor: str, folder: RunFolder) -> list[Section]:
    """What a run that has not finished lacks. [] of one that has, or lacks nothing."""
    keys = run_line.missing(folder.info, folder.records)
    rows = [[arm, case.replace(",", ", ")] for case, arm in keys[:MISSING]]
    caption = f"the first {MISSING:,} of {len(keys):,}" if len(keys) > MISSING else ""
    return [Section(f"{anchor}-missing", f"Missing ({len(keys):,})", table(["arm", "case"], rows, caption))] if keys else []


def of_evidence(folder: EvidenceFolder, anchor: str) -> Part:
    """An evidence folder: its parts one after the other, each with its title."""
    info, found = folder.info, [record for run in folder.runs.values() for record in run.records]
    said, *more = evidence_page.verdict(folder).strip("*").rstrip(".").split("; ")
    notes = [*(["; ".join(more)] if more else []), *info.notes]
    runs = [(f"{anchor}-p{number}", part.title, folder.runs[part.name])
            for number, part in enumerate(info.parts) if part.name in folder.runs]
    wrong = [finding for own, _, run in runs for finding in records.findings(own, run.records)]
    level, word = LEVELS.get(code_of(folder), WARN), evidence_page.code_word(folder)
    if level == GOOD and not info.finished:
        level = WARN
    elif level == GOOD and info.reduced:
        level, word = IDLE, "NO EVIDENCE"
    return Part(anchor, "evidence", f"{info.name} ({folder.path.name})", level, word, said, notes,
                wrong[:FINDINGS], len(wrong),
                [*of_each(runs, lambda own, run: missing(own, run)),
                 *of_each(runs, lambda own, run: [records.matrix(own, run.records)]),
                 *of_each(runs, lambda own, run: records.failures(own, run.records, repeating.of_run(run))),
                 *records.margins(anchor, found), *of_each(runs, lambda own, run: records.times(own, run.records)),
                 *records.sweeps(anchor, found), *intervals(folder, anchor),
                 machine.about(anchor, info.command, info.machine, info.kernels, info.started, info.finished),
                 *of_each(runs, lambda own, run: records.every_record(own, run.records, repeating.of_run(run)))])


def of_each(runs: list[tuple[str, str, RunFolder]], make: Callable[[str, RunFolder], list[Section]]) -> list[Section]:
    """The same sections of every part of an evidence folder, with the part's name in their titles. runs: (anchor, title, run)."""
    return [dataclasses.replace(each, title=f"{each.title}: {title}") for own, title, run in runs for each in make(own, run)]


def intervals(folder: EvidenceFolder, anchor: str) -> list[Section]:
    """Comparisons of two arms by fresh processes, as a forest plot. [] where there are none."""
    own = names(list(dict.fromkeys(pairing.case for pairing, _ in folder.pairs)))
    groups: dict[str, list[Interval]] = {}
    for pairing, time in folder.pairs:
        base, candidate = (arm.rpartition("/")[2] for arm in (pairing.base, pairing.candidate))
        groups.setdefault(own[pairing.case], []).append(Interval(f"{candidate} / {base}", time))
    drawn = forest(list(groups.items()), "Time of one arm over another", f"{anchor}-pairs",
                   "Diamond and bar: ratio and interval over pairs of fresh processes. Measured, not judged.", judged=False)
    return [section(f"{anchor}-pairs", "Time comparisons", "plots", plots=drawn)] if drawn else []
