"""Records as a pandas frame: one row an arm and case, with the numbers a table needs."""
from __future__ import annotations

import pandas as pd

from harness.record import Record
from harness.verdicts import Verdict


def frame(records: list[Record]) -> pd.DataFrame:
    """Columns: case, kernel, source (the arm within its kernel), verdict, margin (worst, see `margin`), median, low, high (us,
    quartiles), derive (us, median), contract, pairs (share of the pairs run), ways (text, "" if every row was certified by its first
    scan), memory (peak transient bytes), detail."""
    return pd.DataFrame([_row(record) for record in records], columns=COLUMNS)


COLUMNS = ["case", "kernel", "source", "verdict", "margin", "median", "low", "high", "derive", "contract", "pairs", "ways",
           "memory", "detail"]


MEASURED = {"sparse_prefill": ("reference",), "indexer_topk": ("set", "values")}
"""The checks whose margins a table shows, by family."""


def _row(record: Record) -> dict[str, object]:
    row: dict[str, object] = {
        "case": record.case, "kernel": record.kernel, "source": record.source, "verdict": record.verdict.value,
        "margin": margin(record), "pairs": record.lengths.pairs_run if record.lengths else 1.0,
        "ways": ways(record), "memory": record.memory, "detail": reason(record)}
    if record.time:
        times = pd.Series(record.time.us)
        row |= {"median": times.median(), "low": times.quantile(0.25), "high": times.quantile(0.75),
                "contract": record.time.contract}
        if record.time.derive_us:
            row["derive"] = pd.Series(record.time.derive_us).median()
    return row


def ways(record: Record) -> str:
    """How many rows came to their result which way, or "" if by the first scan all of them."""
    counts = {way: count for way, count in record.ways.items() if count}
    return ", ".join(f"{count:,} {way}" for way, count in counts.items()) if counts.keys() - {"scan"} else ""


def margin(record: Record) -> float | None:
    """The largest error over budget, or None where nothing was measured: of sparse_prefill's reference check, of the set that an
    indexer_topk kernel chose and of the values it returned. Other checks' margins are in the record."""
    judged = [c for c in record.checks if c.margins and c.name in MEASURED.get(record.family, ())]
    return max((max(check.margins.values()) for check in judged), default=None)


def reason(record: Record) -> str:
    """Why the record has its verdict, in one line: its own detail, or that of the checks that gave it."""
    if record.detail or record.verdict is Verdict.PASSED:
        return record.detail
    return "; ".join(f"{c.name}: {c.detail}" for c in record.checks if c.verdict is record.verdict)
