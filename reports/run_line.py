"""A run in one line, as every report of one begins: the verdict, counts, and, where it has not finished, how much there is and what is
missing."""
from __future__ import annotations

from harness.record import Record
from harness.runfolder import RunFolder, RunInfo
from harness.verdicts import Verdict, worst

NAMED = 10  # of what is missing
INCOMPLETE, NOTHING_RAN = "INCOMPLETE", "NOTHING RAN"


def word(info: RunInfo, records: list[Record]) -> str:
    """The worst verdict of all that ran; INCOMPLETE of what has not finished and has nothing worse."""
    ran: list[Verdict] = [record.verdict for record in records if record.verdict is not Verdict.SKIPPED]
    found = worst(ran) if ran else Verdict.PASSED
    if found is Verdict.PASSED and not info.finished:
        return INCOMPLETE
    return found.value if ran else NOTHING_RAN


def line(info: RunInfo, records: list[Record]) -> str:
    """`PASSED: 24 of 24 arm runs PASSED`, `FAILED: 1 of 4 arm runs FAILED, 3 PASSED; 2 SKIPPED`, `INCOMPLETE: 9 of 18 arm runs are there:
    9 PASSED`. An arm run is one arm on one case, a record; what was skipped did not run."""
    counts = {verdict: sum(record.verdict is verdict for record in records) for verdict in reversed(Verdict)}
    skipped = counts.pop(Verdict.SKIPPED)
    ran, head = len(records) - skipped, word(info, records)
    told = [f"{count:,} {verdict.value}" for verdict, count in counts.items() if count]
    also = f"; {skipped:,} SKIPPED" if skipped else ""
    if head == INCOMPLETE:
        return f"{INCOMPLETE}: {how_far(info, records)}{': ' if told else ''}{', '.join(told)}{also}"
    if not told:
        return f"{NOTHING_RAN}{also}"
    first, _, others = told[0].partition(" ")
    text = f"{head}: {first} of {ran:,} arm runs {others}" + "".join(f", {each}" for each in told[1:]) + also
    return text if info.finished else f"{text}; {INCOMPLETE}: {how_far(info, records)}"


def how_far(info: RunInfo, records: list[Record]) -> str:
    """`9 of 18 arm runs are there`, of a run that has not finished."""
    left = len(missing(info, records))
    if left:
        return f"{len(records):,} of {len(records) + left:,} arm runs are there"
    return f"{len(records):,} arm runs are there, and it has not finished"


def missing(info: RunInfo, records: list[Record]) -> list[tuple[str, str]]:
    """(case, arm) of every record that is still to come; [] of a run that has finished."""
    folder = RunFolder(None, info)
    folder.records = records
    return [] if info.finished else folder.missing()


def named(keys: list[tuple[str, str]], most: int = NAMED) -> list[str]:
    """A line an arm and case, the first of them, and how many more there are."""
    more = [f"... and {len(keys) - most:,} more"] if len(keys) > most else []
    return [*(f"{arm}  {case}" for case, arm in keys[:most]), *more]
