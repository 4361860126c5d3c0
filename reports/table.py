"""What a run's records say, as tables with a legend. sparse_prefill: a table a kernel, a row a case, a column an arm. indexer_topk:
one table (topk_table.py). For a terminal, and as Markdown."""
from __future__ import annotations

import re

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from harness.record import Record, Timing
from harness.verdicts import SOURCES
from reports import topk_table
from reports.cells import CaseTable, cell, coloured, labels, margin_text, markdown_table, ratio
from reports.frame import frame

UNQUANTISED = "unquantised relative error"  # the key of Record.extra
CONTRACTS = {
    "kernel": "sum of the CUDA kernels of one call (torch.profiler), + the kernels that derive topk_length, apart",
    "span": "CUDA events around derivation and call, launch hidden",
    "wall": "host clock around derivation and call",
}
HEADINGS = ("case", *SOURCES, "none / metadata", "margin")


def _rows(records: list[Record]) -> dict[str, list[list[str]]]:
    """kernel -> rows of text: case, one cell a source, none / metadata, largest margin."""
    data = frame(records)
    own = labels(list(dict.fromkeys(record.case for record in records)))[1]
    tables: dict[str, list[list[str]]] = {}
    for (kernel, case), group in data.groupby(["kernel", "case"], sort=False):
        arms = {row["source"]: row for _, row in group.iterrows()}
        cells = [cell(arms[source]) if source in arms else "" for source in SOURCES]
        tables.setdefault(str(kernel), []).append([own[str(case)], *cells, _ratio(arms), margin_text(list(group["margin"]))])
    return tables


def _ratio(arms: dict[str, pd.Series]) -> str:
    found = ratio(arms["none"], arms["metadata"]) if {"none", "metadata"} <= set(arms) else None
    return "" if found is None else f"{found:.2f}x"


def legend(records: list[Record]) -> str:
    """What the numbers of one family are: the contract, the cache, the order, how many samples."""
    common = labels(list(dict.fromkeys(record.case for record in records)))[0]
    lines = [f"every case: {common}"] if common else []
    lines += topk_table.legend(records) if is_topk(records) else ["margin: largest error over budget against the reference (above 1 fails)"]
    distances = [record.extra[UNQUANTISED] for record in records if UNQUANTISED in record.extra]
    if distances:
        lines.append(f"fp8: out is {min(distances):.2g} to {max(distances):.2g} of its norm away from the unquantised case (not judged)")
    times = [record.time for record in records if record.time]
    if is_topk(records):
        return "\n".join([*lines, *_about_times(times, topk_table.CONTRACTS, topk_table.THROTTLED)])
    return "\n".join([*lines, *_about_times(times, CONTRACTS, "compare only within a row")])


def is_topk(records: list[Record]) -> bool:
    """Whether these records, of one family, are indexer_topk's."""
    return bool(records) and records[0].family == "indexer_topk"


def _about_times(times: list[Timing], contracts: dict[str, str], when_throttled: str) -> list[str]:
    lines = []
    for contract in sorted({t.contract for t in times}):
        of_it = [t for t in times if t.contract == contract]
        counts = sorted({len(t.us) for t in of_it})
        samples = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        orders, caches = (" or ".join(sorted(set(values))) for values in ([t.order for t in of_it], [t.cache for t in of_it]))
        lines.append(f"time in ms: contract {contract}: {contracts[contract]}; median [quartiles] of {samples} samples, {orders}, {caches}")
    wild = sum(max(t.us) > 5 * pd.Series(t.us).median() for t in times)
    if wild:
        lines.append(f"noise: {wild} of {len(times)} arms have samples of more than five times their median; is the machine busy?")
    slowed = sum(throttled(t.clocks) for t in times)
    if slowed:
        lines.append(f"clocks: {slowed} of {len(times)} arms were timed while the GPU was throttled; {when_throttled}")
    return lines


def throttled(clocks: str) -> bool:
    """Whether the throttle reasons of a timing name more than an idle GPU (bit 0)."""
    return any(int(reasons, 16) & ~1 for reasons in re.findall(r"0x[0-9a-f]+", clocks))


def by_family(records: list[Record]) -> list[list[Record]]:
    """The records of each family; one empty list of no records."""
    families = dict.fromkeys(record.family for record in records)
    return [[record for record in records if record.family == family] for family in families] or [[]]


def terminal(records: list[Record]) -> RenderableType:
    """Each family's tables, and its legend."""
    parts: list[RenderableType] = []
    for group in by_family(records):
        parts += [topk_table.terminal(group)] if is_topk(group) else _terminal_tables(group)
        parts.append(Text(legend(group), style="dim"))
    return Group(*parts)


def _terminal_tables(records: list[Record]) -> list[RenderableType]:
    return [CaseTable(kernel, list(HEADINGS[1:]), [[row[0], *map(coloured, row[1:4]), *row[4:]] for row in rows])
            for kernel, rows in _rows(records).items()]


def markdown(records: list[Record]) -> str:
    """Each family's tables as Markdown, and its legend."""
    parts: list[str] = []
    for group in by_family(records):
        if is_topk(group):
            parts.append(topk_table.markdown(group))
        else:
            parts += [f"#### {kernel}\n\n{markdown_table(list(HEADINGS), rows)}" for kernel, rows in _rows(group).items()]
        parts.append(legend(group).replace("\n", "  \n"))
    return "\n\n".join(parts)
