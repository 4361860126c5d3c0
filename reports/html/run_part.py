"""A run as a part of a page, and the parts of an evidence folder, which are runs and time comparisons."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from harness.evidence import code_of
from harness.evidence_folder import EvidenceFolder
from harness.record import Record
from harness.runfolder import RunFolder, exit_code
from harness.verdicts import Verdict
from reports import repeating
from reports.cells import names
from reports.html import machine, records
from reports.html.parts import BAD, GOOD, WARN, Part, Section, section
from reports.html.plots_groups import Interval, forest

FINDINGS = 12
"""Lines of what is wrong; all of it is below."""
LEVELS = {0: GOOD, 1: BAD}


def verdict(found: list[Record]) -> str:
    """`24 of 24 case-runs PASSED`, or what else there is, worst first. What was skipped does not count."""
    counts = {kind: sum(record.verdict is kind for record in found) for kind in Verdict}
    ran = len(found) - counts[Verdict.SKIPPED]
    bad = [f"{counts[kind]:,} {kind.value}" for kind in reversed(Verdict) if counts[kind] and kind not in (Verdict.PASSED, Verdict.SKIPPED)]
    skipped = f"; {counts[Verdict.SKIPPED]:,} SKIPPED" if counts[Verdict.SKIPPED] else ""
    passed = f"{counts[Verdict.PASSED]:,} of {ran:,} case-runs PASSED"
    return (", ".join([*bad, passed]) if ran else "nothing ran") + skipped


def of_run(folder: RunFolder, anchor: str) -> Part:
    """One run."""
    found, code = folder.records, exit_code(folder.records)
    notes = [] if folder.info.finished else [f"This run has not finished: {len(found):,} records so far."]
    wrong = records.findings(anchor, found)
    return Part(anchor, "run", folder.path.name if folder.path else "in memory", WARN if notes and not code else LEVELS.get(code, WARN),
                verdict(found), notes, wrong[:FINDINGS], len(wrong),
                [records.matrix(anchor, found), *records.failures(anchor, found, repeating.of_run(folder)), *records.plots(anchor, found),
                 *records.skipped(anchor, found), machine.of_run(anchor, folder.info),
                 *records.every_record(anchor, found, repeating.of_run(folder))])


def of_evidence(folder: EvidenceFolder, anchor: str) -> Part:
    """An evidence folder: its parts one after the other, each with its title."""
    info, found = folder.info, [record for run in folder.runs.values() for record in run.records]
    notes = ["Reduced shapes on a CPU: they show that everything works, and are no evidence on times."] if info.reduced else []
    notes += ["It was interrupted." if info.interrupted else "It has not finished."] if not info.finished else []
    notes += [f"Part {part.name} did not get to its end: {part.problem}" for part in info.parts if part.problem] + info.notes
    runs = [(f"{anchor}-p{number}", part.title, folder.runs[part.name])
            for number, part in enumerate(info.parts) if part.name in folder.runs]
    wrong = [finding for own, _, run in runs for finding in records.findings(own, run.records)]
    level = LEVELS.get(code_of(folder), WARN)
    return Part(anchor, "evidence", f"{info.name} ({folder.path.name})", WARN if level == GOOD and not info.finished else level,
                verdict(found), notes, wrong[:FINDINGS], len(wrong),
                [*of_each(runs, lambda own, run: [records.matrix(own, run.records)]),
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
