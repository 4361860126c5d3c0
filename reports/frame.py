"""Records as a pandas frame: one row an arm and case, with the numbers a table needs."""
from __future__ import annotations

import pandas as pd

from harness.record import Record
from harness.verdicts import Verdict


def frame(records: list[Record]) -> pd.DataFrame:
    """Columns: case, kernel, source, verdict, margin (worst of the reference check), median, low, high (us, quartiles),
    derive (us, median), contract, pairs (share of the pairs run), detail."""
    return pd.DataFrame([_row(record) for record in records], columns=COLUMNS)


COLUMNS = ["case", "kernel", "source", "verdict", "margin", "median", "low", "high", "derive", "contract", "pairs", "detail"]


def _row(record: Record) -> dict[str, object]:
    row: dict[str, object] = {
        "case": record.case, "kernel": record.kernel, "source": record.source, "verdict": record.verdict.value,
        "margin": margin(record), "pairs": record.lengths.pairs_run if record.lengths else 1.0, "detail": reason(record)}
    if record.time:
        times = pd.Series(record.time.us)
        row |= {"median": times.median(), "low": times.quantile(0.25), "high": times.quantile(0.75),
                "contract": record.time.contract}
        if record.time.derive_us:
            row["derive"] = pd.Series(record.time.derive_us).median()
    return row


def margin(record: Record) -> float | None:
    """The largest error over budget of the reference check, or None where it did not run."""
    return max((max(c.margins.values()) for c in record.checks if c.name == "reference" and c.margins), default=None)


def reason(record: Record) -> str:
    """Why the record has its verdict, in one line: its own detail, or that of the checks that gave it."""
    if record.detail or record.verdict is Verdict.PASSED:
        return record.detail
    return "; ".join(f"{c.name}: {c.detail}" for c in record.checks if c.verdict is record.verdict)
