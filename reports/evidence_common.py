"""What stands under every table of an evidence page: the contract, the clocks, the line that repeats a timing; and intervals over fresh
processes."""
from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.asking import Settings
from harness.client import WorkerOptions
from harness.comparison import Pairing, TimeComparison, TimeVerdict
from harness.evidence_folder import EvidenceFolder, Paired
from harness.options import replay_options, stored_options
from harness.record import Record
from harness.verdicts import Verdict
from reports.evidence_naming import naming
from reports.evidence_numbers import (
    clocks_line,
    contract_line,
    filled_table,
    percent,
    times,
)

NO_FIGURE = "published: no figure at these shapes"
AGAIN = "again: "
"""Before the line that repeats a timing."""


def under(folder: EvidenceFolder, part: str, records: Sequence[Record] | None = None, *more: str) -> str:
    """What the rows share, the contract, the clocks and the line that repeats a timing. records: those that the table shows, all of the
    part by default."""
    run = folder.runs.get(part)
    shown = (run.records if run else []) if records is None else records
    if run is None or not shown:
        return ""
    last = next((record for record in reversed(shown) if record.time), None)
    cases = naming([folder], (record.case for record in shown)).line()
    again = f"{AGAIN}`{repeat_line(last, *stored_options(run))}`" if last else ""
    return "\n\n" + "  \n".join(line for line in (cases, contract_line(shown, shown[0].family), *more, clocks_line(shown), again) if line)


def repeat_line(record: Record, options: WorkerOptions | None, settings: Settings | None) -> str:
    """The command that judges and times one record again."""
    words = replay_options(record, options, settings)
    variables = [word for word in words if "=" in word and not word.startswith("-") and word.split("=")[0].isupper()]
    timing = ["--time", settings.contract, "--samples", str(settings.samples)] if settings and settings.contract else []
    rest = [word for word in words if word not in variables]
    timing = [] if "--time" in rest else timing
    timing += ["--time-wrong"] if settings and settings.time_wrong and record.verdict is not Verdict.PASSED else []
    return shlex.join([*variables, "threearm", "replay", record.case, "--arm", record.arm, *rest, *timing])


def comparison_of(folder: EvidenceFolder, case: str, candidate: str, base: str = "") -> TimeComparison | None:
    """What was measured of a candidate on a case, against any base or this one."""
    return next((found for pairing, found in folder.pairs
                 if (pairing.case, pairing.candidate) == (case, candidate) and base in ("", pairing.base)), None)


def paired_ratio(folder: EvidenceFolder, case: str, candidate: str, base: str = "") -> str:
    """Base over candidate with its interval over processes, the other way round than it is stored."""
    found = comparison_of(folder, case, candidate, base)
    if found is None or found.verdict is TimeVerdict.INVALID or found.estimate is None:
        return _not_measured(found)
    estimate = found.estimate
    return f"{times(1 / estimate.ratio)} [{1 / estimate.high:.3f} {1 / estimate.low:.3f}]"


def paired_saving(folder: EvidenceFolder, case: str, candidate: str) -> str:
    """1 − candidate / base with its interval over processes."""
    found = comparison_of(folder, case, candidate)
    if found is None or found.verdict is TimeVerdict.INVALID or found.estimate is None:
        return _not_measured(found)
    estimate = found.estimate
    return f"{percent(1 - estimate.ratio)} [{percent(1 - estimate.high)} {percent(1 - estimate.low)}]"


def _not_measured(found: TimeComparison | None) -> str:
    return "" if found is None else f"**{found.verdict.value if found.verdict is TimeVerdict.INVALID else 'none'}**: {found.why}"


def about_pairs(folder: EvidenceFolder) -> str:
    """What stands behind an interval over processes."""
    if not folder.pairs:
        return ""
    found = [comparison for _, comparison in folder.pairs]
    counts = sorted({len(comparison.processes) for comparison in found})
    contracts = " / ".join(dict.fromkeys(f"`{c.contract}`, {c.cache}" for c in found))
    count = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (f"by fresh processes: contract {contracts}; {count} pairs of processes, a number fixed beforehand, in turns (ABBA); Student's "
            "t over processes; no verdict, which is `threearm gate`'s")


def processes(folder: EvidenceFolder) -> str:
    """Every comparison by fresh processes: medians, the interval, what counts, notes."""
    names = naming([folder], (pairing.case for pairing, _ in folder.pairs))
    rows = [_process_row(pairing, found, names.own) for pairing, found in folder.pairs]
    head = ["case", "base", "candidate", "base, ms", "candidate, ms", "candidate / base [95 %]", "processes, clean rounds",
            "samples, throttled", "SM clock, MHz", "notes"]
    return filled_table(head, rows) + f"\n\n{names.line()}  \n{about_pairs(folder)}" if rows else ""


def _process_row(pairing: Pairing, found: TimeComparison, own: dict[str, str]) -> list[str]:
    estimate = found.estimate
    valid = estimate is not None and found.verdict is not TimeVerdict.INVALID
    numbers = ["", "", _not_measured(found), ""]
    if valid and estimate:
        rounds = sum(map(len, found.processes))
        numbers = [f"{estimate.base_us / 1e3:.4g}", f"{estimate.candidate_us / 1e3:.4g}",
                   f"{estimate.ratio:.4f} [{estimate.low:.4f} {estimate.high:.4f}]", f"{estimate.processes}, {estimate.rounds} of {rounds}"]
    clocks = [mhz for rounds in found.processes for each in rounds for burst in each.bursts for mhz in burst.clocks]
    return [own[pairing.case], pairing.base, pairing.candidate, *numbers, f"{found.samples:,}, {found.throttled:,}",
            f"{min(clocks)} to {max(clocks)}" if clocks else "", "; ".join(found.notes)]


def invalid(pairs: Sequence[Paired]) -> list[str]:
    """Comparisons whose times are none, and why."""
    return [f"{pairing.base} against {pairing.candidate} on {pairing.case}: {found.why}" for pairing, found in pairs
            if found.verdict is TimeVerdict.INVALID]
