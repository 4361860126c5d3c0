"""A run as Markdown for a pull request: verdict, what is missing, tables, what each check said, early-exit numerics, sentinels, machine."""
from __future__ import annotations

import collections
import shlex
import statistics

from harness.record import Record
from harness.runfolder import RunInfo
from harness.verdicts import Check, Verdict, worst
from reports import failure, run_line
from reports.cells import markdown_table, names
from reports.evidence_numbers import filled_table
from reports.table import markdown
from reports.topk_table import resources

MANY = 6  # cases, above which a table shows one of them
SKIP_CHECKS = ("none-vs-backscan", "none-vs-metadata", "backscan-vs-metadata")


def page(info: RunInfo, records: list[Record]) -> str:
    """The whole page."""
    parts = (markdown, failures, launched, check_matrix, resources, early_exit, sentinels, cost, skipped)
    sections = [f"**{run_line.line(info, records)}**", missing(info, records), *(part(records) for part in parts), provenance(info)]
    return "\n\n".join(section for section in sections if section) + "\n"


def missing(info: RunInfo, records: list[Record]) -> str:
    """What a run that has not finished lacks, the first of it by name."""
    named = run_line.named(run_line.missing(info, records))
    return "#### Missing\n\n```\n" + "\n".join(named) + "\n```" if named else ""


def failures(records: list[Record]) -> str:
    """What did not pass, in full."""
    bad = [record for record in records if record.verdict not in failure.HARMLESS]
    texts = failure.describe_all(bad, lambda record: [])
    return "#### What did not pass\n\n```\n" + "\n".join(texts) + "\n```" if bad else ""


def launched(records: list[Record]) -> str:
    """Contract kernel: what one call launches, by kernel name, and what the derivation takes. Of many cases, the first."""
    timed = [record for record in records if record.time and record.time.breakdown]
    cases = list(dict.fromkeys(record.case for record in timed))
    shown, own = cases if len(cases) <= MANY else cases[:1], names(cases)
    rows = []
    for record in timed:
        if record.case in shown and record.time:
            parts = sorted(record.time.breakdown.items(), key=lambda item: -item[1])
            derive = statistics.median(record.time.derive_us) if record.time.derive_us else 0.0
            rows.append([own[record.case], record.arm, str(record.time.kernels), f"{derive:.1f}" if derive else "",
                         ", ".join(f"{name.strip()} {us:.1f}" for name, us in parts), record.time.clocks])
    head = ["case", "arm", "kernels a call", "derivation, us", "the call's kernels, median us", "clocks while the case was timed"]
    return "#### What a call launches\n\n" + markdown_table(head, rows) if rows else ""


def cost(records: list[Record]) -> str:
    """What judging cost: seconds for inputs, reference, and each kernel's arms together, the dearest case first."""
    own = names(list(dict.fromkeys(record.case for record in records)))
    sums: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.seconds:
            inputs, reference = (record.seconds.get(part, 0.0) for part in ("inputs", "reference"))
            entry = sums.setdefault((record.kernel, record.case), [inputs, reference, 0.0])
            entry[2] += record.seconds.get("arm", 0.0)
    dearest = sorted(sums.items(), key=lambda item: -sum(item[1]))[:5]
    rows = [[kernel, own[case], *(f"{value:.3f}" for value in values)] for (kernel, case), values in dearest]
    head = ["kernel", "case", "inputs and their hashes, s", "reference, s", "all arms: launches and checks, s"]
    return "#### What judging cost (the five dearest)\n\n" + markdown_table(head, rows) if rows else ""


def check_matrix(records: list[Record]) -> str:
    """Per kernel and check: how many arm runs passed and did not, and the largest margins."""
    rows = []
    for kernel in dict.fromkeys(record.kernel for record in records):
        found: dict[str, list[Check]] = {}
        for record in records:
            for check in record.checks if record.kernel == kernel else ():
                found.setdefault(check.name, []).append(check)
        for name, checks in found.items():
            passed = sum(check.verdict is Verdict.PASSED for check in checks)
            outputs = dict.fromkeys(output for check in checks for output in check.margins)
            margins = ", ".join(f"{o} {max(c.margins.get(o, 0.0) for c in checks):.2g}" for o in outputs)
            rows.append([kernel, name, f"{passed} of {len(checks)}", margins or "equality"])
    return "#### Checks\n\n" + markdown_table(["kernel", "check", "arm runs that passed", "largest margin (1 fails)"], rows) if rows else ""


def without_seed(case: str) -> str:
    """A case's text without its seed: cases that differ in nothing else are told together."""
    return ",".join(part for part in case.split(",") if not part.startswith("seed=")).rstrip(":")


def early_exit(records: list[Record]) -> str:
    """Where arms that skip and arms that walk masked pairs differ: how many elements, by how much, in which columns."""
    own = names(list(dict.fromkeys(without_seed(record.case) for record in records)))
    groups: dict[tuple[str, str, str], list[Check]] = {}
    for record in records:
        for check in record.checks:
            if check.name in SKIP_CHECKS and " rows skip" in check.detail:  # a kernel that promises equality
                groups.setdefault((record.kernel, own[without_seed(record.case)], check.name), []).append(check)
    rows = []
    for (kernel, case, name), checks in groups.items():
        skips, of = (sum(int(c.detail.split()[word]) for c in checks) for word in (0, 2))
        apart = sum((collections.Counter(c.ulp) for c in checks), collections.Counter())
        columns = dict.fromkeys(where.removeprefix("columns ") for c in checks for where in c.where if where.startswith("columns"))
        rows.append([kernel, case, str(len(checks)), name, f"{skips:,} of {of:,}",
                     ", ".join(f"{count:,} by {step} ULP" for step, count in apart.items()) or "none: bitwise equal",
                     next(iter(columns), ""), worst([c.verdict for c in checks]).value])
    head = ["kernel", "case", "seeds", "arms", "rows that skip a pair", "elements of out that differ", "columns (first seed)", "verdict"]
    return "#### Early exit\n\n" + filled_table(head, rows) if rows else ""


def sentinels(records: list[Record]) -> str:
    """Rows without a valid key, by arm: how many, what topk_length they were given, what came out."""
    rows = []
    for record in records:
        for check in record.checks:
            if check.name == "sentinels":
                count, _, rest = check.detail.partition(" rows without a valid key, topk_length ")
                rows.append((record.kernel, record.source, rest, check.verdict.value, int(count) if count.isdigit() else 0))
    table = []
    for key in dict.fromkeys(row[:4] for row in rows):
        counts = [row[4] for row in rows if row[:4] == key]
        table.append([f"{key[0]}/{key[1]}", key[2], str(len(counts)), str(sum(counts)), key[3]])
    head = ["arm", "topk_length of the row", "cases", "rows", "out 0, max_logits -inf, lse +inf"]
    return "#### Rows without a valid key\n\n" + markdown_table(head, table) if table else ""


def skipped(records: list[Record]) -> str:
    """Arms that were not run, and why."""
    why: dict[tuple[str, str], int] = {}
    for record in records:
        if record.verdict is Verdict.SKIPPED:
            key = (record.arm, record.detail)
            why[key] = why.get(key, 0) + 1
    rows = [[arm, str(count), reason] for (arm, reason), count in why.items()]
    return "#### Not run\n\n" + markdown_table(["arm", "cases", "reason"], rows) if rows else ""


def provenance(info: RunInfo) -> str:
    """Machine, versions, command (where the folder was put aside), time."""
    machine = "; ".join(f"{key} {value}" for key, value in info.machine.items())
    return (f"#### Where this comes from\n\n`{command_line(info.command)}`, started {info.started}, "
            f"finished {info.finished or 'not'}.  \n{machine}.")


def command_line(command: list[str]) -> str:
    """A stored command as one that repeats it; where its folder was put is left out."""
    words = command[1:]
    if "--runs" in words:
        at = words.index("--runs")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["threearm", *words])
