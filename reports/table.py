"""The three-arm table: a row a case, a column an arm, verdict and time in each cell. For a terminal, and as Markdown."""
from __future__ import annotations

import math
import re

import pandas as pd
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from cases.sparse_prefill import SparsePrefillCase
from harness.record import Record
from harness.verdicts import SOURCES, Verdict
from reports.frame import frame

COLOURS = {Verdict.PASSED: "green", Verdict.SKIPPED: "dim", Verdict.VACUOUS: "yellow"}
DEFAULTS = SparsePrefillCase()
UNQUANTISED = "unquantised relative error"  # the key of Record.extra
CONTRACTS = {
    "kernel": "sum of the CUDA kernels of one call (torch.profiler), + the kernels that derive topk_length, apart",
    "span": "CUDA events around derivation and call, launch hidden",
    "wall": "host clock around derivation and call",
}


def short(case: str) -> str:
    """A case without its family."""
    return case.partition(":")[2] or "(all defaults)"


def labels(cases: list[str]) -> tuple[str, dict[str, str]]:
    """What all cases share, and for each case the rest (its defaults, where it has none). Of one case, everything is its own."""
    keys = {case: [part for part in case.partition(":")[2].split(",") if part] for case in cases}
    shared = set.intersection(*map(set, keys.values())) if len(cases) > 1 else set()
    common = ",".join(part for part in keys[cases[0]] if part in shared) if cases else ""
    own = {case: [part for part in parts if part not in shared] for case, parts in keys.items()}
    differing = list(dict.fromkeys(part.partition("=")[0] for parts in own.values() for part in parts))
    plain = ",".join(f"{key}={getattr(DEFAULTS, key)}" for key in differing) or "(defaults)"
    return common, {case: ",".join(parts) or plain for case, parts in own.items()}


def cell(row: pd.Series) -> str:
    """One arm's cell: verdict, and the median with its quartiles in milliseconds where there is a time."""
    text = str(row["verdict"])
    if not _missing(row["median"]):
        text += f"\n{row['median'] / 1e3:.4g} [{row['low'] / 1e3:.4g} {row['high'] / 1e3:.4g}]"
    if not _missing(row["derive"]) and row["derive"]:
        text += f"\n+{row['derive'] / 1e3:.3g} derive"
    return text


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _rows(records: list[Record]) -> dict[str, list[list[str]]]:
    """kernel -> rows of text: case, one cell a source, none / metadata, largest margin."""
    data = frame(records)
    names = labels(list(dict.fromkeys(record.case for record in records)))[1]
    tables: dict[str, list[list[str]]] = {}
    for (kernel, case), group in data.groupby(["kernel", "case"], sort=False):
        arms = {row["source"]: row for _, row in group.iterrows()}
        cells = [cell(arms[source]) if source in arms else "" for source in SOURCES]
        margins = [m for m in group["margin"] if not _missing(m)]
        tables.setdefault(str(kernel), []).append(
            [names[str(case)], *cells, _ratio(arms), _margin(max(margins)) if margins else ""])
    return tables


def _margin(margin: float) -> str:
    return "inf" if margin >= 1e30 else f"{margin:.2g}"


def _ratio(arms: dict[str, pd.Series]) -> str:
    if not {"none", "metadata"} <= set(arms):
        return ""
    none, metadata = arms["none"]["median"], arms["metadata"]["median"]
    return "" if _missing(none) or _missing(metadata) else f"{none / metadata:.2f}x"


HEADINGS = ("case", *SOURCES, "none / metadata", "margin")


def legend(records: list[Record]) -> str:
    """What the numbers are: the contract, the cache, the order, how many samples."""
    times = [record.time for record in records if record.time]
    common = labels(list(dict.fromkeys(record.case for record in records)))[0]
    lines = [f"every case: {common}"] if common else []
    lines.append("margin: largest error over budget against the reference (above 1 fails)")
    distances = [record.extra[UNQUANTISED] for record in records if UNQUANTISED in record.extra]
    if distances:
        lines.append(f"fp8: out is {min(distances):.2g} to {max(distances):.2g} of its norm away from the unquantised case (not judged)")
    for contract in sorted({t.contract for t in times}):
        of_it = [t for t in times if t.contract == contract]
        counts = sorted({len(t.us) for t in of_it})
        samples = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        lines.append(f"time in ms: contract {contract}: {CONTRACTS[contract]}; median [quartiles] of {samples} samples, "
                     f"{of_it[0].order}, {of_it[0].cache}")
    wild = sum(max(t.us) > 5 * pd.Series(t.us).median() for t in times)
    if wild:
        lines.append(f"noise: {wild} of {len(times)} arms have samples of more than five times their median; is the machine busy?")
    slowed = sum(throttled(t.clocks) for t in times)
    if slowed:
        lines.append(f"clocks: {slowed} of {len(times)} arms were timed while the GPU was throttled; compare only within a row")
    return "\n".join(lines)


def throttled(clocks: str) -> bool:
    """Whether the throttle reasons before or after a timing name more than an idle GPU (bit 0)."""
    return any(int(reasons, 16) & ~1 for reasons in re.findall(r"0x[0-9a-f]+", clocks))


def terminal(records: list[Record]) -> RenderableType:
    """The table of each kernel, and the legend."""
    parts: list[RenderableType] = []
    for kernel, rows in _rows(records).items():
        columns = (Column(HEADINGS[0], overflow="fold"), *HEADINGS[1:])
        table = Table(*columns, title=Text(kernel), title_justify="left", title_style="bold")
        for row in rows:
            table.add_row(row[0].replace(",", ", "), *map(_coloured, row[1:4]), *row[4:])
        parts.append(table)
    return Group(*parts, Text(legend(records), style="dim"))


def _coloured(text: str) -> Text:
    verdict = text.partition("\n")[0]
    colour = COLOURS.get(Verdict(verdict), "bold red") if verdict else ""
    rendered = Text(text)
    rendered.stylize(colour, 0, len(verdict))
    return rendered


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; line breaks in cells become <br>."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(text.replace("\n", "<br>").replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join(lines)


def three_arms(records: list[Record]) -> str:
    """The table of each kernel as Markdown, with the legend."""
    parts = [f"#### {kernel}\n\n{markdown_table(list(HEADINGS), rows)}" for kernel, rows in _rows(records).items()]
    return "\n\n".join([*parts, legend(records).replace("\n", "  \n")])
