"""indexer_topk: one table, a row a case and a column a kernel, and what the fastest dense arm takes over the fastest litetopk arm."""
from __future__ import annotations

import pandas as pd

from harness.record import Record
from harness.verdicts import Verdict
from reports.cells import CaseTable, cell, coloured, labels, margin_text, markdown_table, missing, names
from reports.frame import frame, ways

ORDER = ("dense", "litetopk")
RATIO = "dense / litetopk"


def table_of(records: list[Record]) -> tuple[list[str], list[list[str]]]:
    """Headings (case; kernel and arm of each column, dense first; ratio, where any case has one; margin) and rows of text."""
    data = frame(records)
    own = labels(list(dict.fromkeys(record.case for record in records)))[1]
    columns = sorted(dict.fromkeys((record.kernel, record.source) for record in records), key=lambda arm: ORDER.index(arm[1]))
    rows = []
    for case, group in data.groupby("case", sort=False):
        arms = {(row["kernel"], row["source"]): row for _, row in group.iterrows()}
        cells = [cell(arms[arm], "\n") if arm in arms else "" for arm in columns]
        rows.append([own[str(case)], *cells, dense_over_litetopk(list(arms.values())), margin_text(list(group["margin"]))])
    head = ["case", *(f"{kernel}\n{arm}" for kernel, arm in columns), RATIO, "margin"]
    if any(row[-2] for row in rows):
        return head, rows
    return [*head[:-2], head[-1]], [[*row[:-2], row[-1]] for row in rows]


def dense_over_litetopk(arms: list[pd.Series]) -> str:
    """The fastest dense over the fastest litetopk of one case, and which they are where there are several. "" unless the litetopk
    passed and every time of the case was taken under one contract. A dense arm that did not pass counts where none did, and is named."""
    timed = [arm for arm in arms if not missing(arm["median"])]
    right = [arm for arm in timed if arm["verdict"] == Verdict.PASSED.value]
    litetopk, dense = ([arm for arm in right if arm["source"] == kind] for kind in ("litetopk", "dense"))
    wrong = not dense
    dense = dense or [arm for arm in timed if arm["source"] == "dense"]
    if not litetopk or not dense or len({arm["contract"] for arm in timed}) > 1:
        return ""
    above, below = (min(kind, key=lambda arm: arm["median"]) for kind in (dense, litetopk))
    text = f"{above['median'] / below['median']:.2f}x" + (" wrong dense" if wrong else "")
    return text if len(dense + litetopk) == len(ORDER) and not wrong else f"{text}\n{above['kernel']}\n/ {below['kernel']}"


def terminal(records: list[Record]) -> CaseTable:
    """The table for a terminal."""
    head, rows = table_of(records)
    plain = 2 if RATIO in head else 1  # columns at the end that hold no verdict
    return CaseTable("indexer_topk", head[1:], [[row[0], *map(coloured, row[1:-plain]), *row[-plain:]] for row in rows])


def markdown(records: list[Record]) -> str:
    """The table as Markdown."""
    return "#### indexer_topk\n\n" + markdown_table(*table_of(records))


ABOUT_RATIO = (
    f"{RATIO}: the fastest dense arm that passed over the fastest litetopk arm that passed, by median; where no dense arm passed, the "
    "fastest that was timed (--time-wrong); each kernel has a process of its own, so they are timed one after the other")
ABOUT_WAYS = "rows by way, where not every row was certified by its first scan: scan, rescan, dense, failed"
ABOUT_MARGIN = "margin: largest error over its bound, of the chosen set and the returned values (above 1 fails)"
CONTRACTS = {
    "kernel": "sum of the CUDA kernels of one call (torch.profiler)",
    "span": "CUDA events around the call, launch hidden",
    "wall": "host clock around the call",
}
THROTTLED = "compare only where the clocks agree (threearm report --markdown shows them)"


def legend(records: list[Record]) -> list[str]:
    """What the columns mean, of those that the table has."""
    lines = [ABOUT_RATIO] if RATIO in table_of(records)[0] else []
    return [*lines, *([ABOUT_WAYS] if any(map(ways, records)) else []), ABOUT_MARGIN]


def resources(records: list[Record]) -> str:
    """Markdown: how many rows of an arm came to their result which way, the peak of transient memory, clocks while it was timed."""
    shown = [record for record in records if record.ways or record.memory is not None]
    own = names(list(dict.fromkeys(record.case for record in shown)))
    rows = []
    for record in shown:
        by_way = ", ".join(f"{count:,} {way}" for way, count in record.ways.items() if count)
        memory = "" if record.memory is None else f"{record.memory / 2**20:,.1f}"
        rows.append([own[record.case], record.arm, record.verdict.value, by_way, memory, record.time.clocks if record.time else ""])
    head = ["case", "arm", "verdict", "rows by way", "peak transient memory, MiB", "clocks while it was timed"]
    return "#### Rows by way, memory, clocks\n\n" + markdown_table(head, rows) if rows else ""
