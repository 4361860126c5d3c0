"""What many folders say of the same cases over time, as a pandas frame: a row a record, or a side of a comparison of times.

Times are comparable within one machine and one contract alone, and the two sides of a gate are two environments; `series` names those, so
that nobody connects others.
"""
from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.comparison import Pairing, TimeComparison
from harness.gate_folder import GateFolder
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo
from harness.stored import Stored
from harness.transitions import margins
from harness.verdicts import Verdict

MARGIN = "margin "
"""How the columns of margins begin: `margin out` is the error over budget of `out` against the reference."""
COLUMNS = ["date", "folder", "part", "side", "machine", "version", "threearm", "case", "arm", "verdict", "contract", "samples",
           "median_us", "low_us", "high_us", "memory"]
BIGGEST = 1e30  # what a record holds in place of infinity
IN_TURNS = "in turns"
SMALL, SMALL_SHARE = 1e-3, 1e-2
"""A margin that moves by less than this part of its budget, or of itself, stays where it is."""


def frame(folders: list[Stored]) -> pd.DataFrame:
    """All rows by date, oldest first. Columns: COLUMNS, and `margin OUTPUT` for every output that has one.

    date: UTC, when the run began; part: base, candidate, or an evidence's part; side: base or candidate of a gate, whose two environments
    differ, else ""; machine: the GPU's name, or the CPU's; version: of the kernel's package, threearm: its own version and commit, "" where
    not known; verdict: "" of a time that was compared apart from its record; contract: what was timed and how, `span, L2 flushed, in turns`
    where processes took turns, "" if nothing was; median_us, low_us, high_us: median and quartiles; memory: peak transient bytes."""
    rows = pd.DataFrame([row for folder in folders for row in _rows(folder)])
    every = [*COLUMNS, *sorted(name for name in rows.columns if name.startswith(MARGIN))]
    rows = rows.reindex(columns=every)
    rows["date"] = pd.to_datetime(rows["date"], utc=True, format="ISO8601")
    for name in ("samples", "median_us", "low_us", "high_us", "memory", *every[len(COLUMNS) :]):
        rows[name] = pd.to_numeric(rows[name]).astype("float64")
    return rows.sort_values(["date", "folder", "part", "case", "arm"], kind="stable", ignore_index=True)


def _rows(folder: Stored) -> Iterator[dict[str, Any]]:
    if isinstance(folder, RunFolder):
        yield from _of_run(folder, str(folder.path), "")
    elif isinstance(folder, GateFolder):
        yield from ({**row, "side": row["part"]} for row in _of_gate(folder))
    else:
        for name, run in folder.runs.items():
            yield from _of_run(run, str(folder.path), name)
        info = folder.info
        about = RunFolder(None, RunInfo(info.started, info.command, [], info.kernels, info.machine, {}))
        yield from _of_pairs(str(folder.path), folder.pairs, {"base": about, "candidate": about}, "")


def _of_gate(folder: GateFolder) -> Iterator[dict[str, Any]]:
    for name, run in folder.sides.items():
        yield from _of_run(run, str(folder.path), name, folder.info.threearm)
    timed = [(found.pairing, found.time) for found in folder.transitions if found.time]
    yield from _of_pairs(str(folder.path), timed, folder.sides, folder.info.threearm)


def machine_of(machine: dict[str, str]) -> str:
    """The GPU's name, or the CPU's."""
    return machine.get("gpu") or machine.get("cpu", "unknown")


def _of_run(run: RunFolder, folder: str, part: str, threearm: str = "") -> Iterator[dict[str, Any]]:
    for record in run.records:
        yield {**_about(run, folder, part, record.kernel, threearm), "case": record.case, "arm": record.arm,
               "verdict": record.verdict.value, "memory": record.memory, **_time(record),
               **{MARGIN + output: margin if margin < BIGGEST else float("inf") for output, margin in margins(record).items()}}


def _about(run: RunFolder, folder: str, part: str, kernel: str, threearm: str) -> dict[str, Any]:
    versions = {each["name"]: each.get("version") or "" for each in run.info.kernels}
    return {"date": run.info.started, "folder": folder, "part": part, "side": "", "machine": machine_of(run.info.machine),
            "version": versions.get(kernel, ""), "threearm": run.info.machine.get("threearm", threearm)}


def _time(record: Record) -> dict[str, Any]:
    return {"contract": f"{record.time.contract}, {record.time.cache}", **_quartiles(record.time.us)} if record.time else {"contract": ""}


def _quartiles(us: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else us * 3
    return {"samples": len(us), "median_us": median, "low_us": low, "high_us": high}


def _of_pairs(folder: str, pairs: list[tuple[Pairing, TimeComparison]], runs: dict[str, RunFolder],
              threearm: str) -> Iterator[dict[str, Any]]:
    """Both sides of every comparison, by all samples of its clean rounds; an arm that stands on both sides is told twice, by part."""
    for pairing, time in pairs:
        if not time.estimate:
            continue
        bursts = [burst for rounds in time.processes for each in rounds if not each.unclean for burst in each.bursts]
        for side, arm in (("base", pairing.base), ("candidate", pairing.candidate)):
            us = [sample for burst in bursts if burst.side == side for sample in burst.us]
            if us:
                yield {**_about(runs[side], folder, side, arm.rpartition("/")[0], threearm), "case": pairing.case, "arm": arm,
                       "verdict": "", "contract": f"{time.contract}, {time.cache}, {IN_TURNS}", **_quartiles(us)}


# --- what is to be told -----------------------------------------------------------------------------------------------


def outputs(rows: pd.DataFrame) -> list[str]:
    """The outputs of which some row has a margin."""
    return [name.removeprefix(MARGIN) for name in rows.columns if name.startswith(MARGIN) and rows[name].notna().any()]


def warnings(rows: pd.DataFrame) -> list[str]:
    """Why not all rows can be compared: other machines, other contracts, the sides of gates."""
    timed = rows[rows["contract"] != ""]
    machines, contracts = list(rows["machine"].unique()), list(timed["contract"].unique())
    told = []
    if len(machines) > 1:
        told.append(f"{len(machines)} machines ({'; '.join(machines)}): times of one say nothing of another's, each has a line of its own")
    if len(contracts) > 1:
        told.append(f"{len(contracts)} contracts ({'; '.join(contracts)}): they time different things, each has a line of its own")
    if (rows["side"] != "").any():
        told.append("the base and the candidate of a gate are two environments: each has a line of its own")
    return told


def who(rows: pd.DataFrame) -> pd.Series:
    """Of each row, whose it is: `k/none`; `k/none candidate` of a gate; `k/none FAILED`, since what gives a wrong answer is another arm."""
    bad = rows["verdict"].map(lambda verdict: "" if verdict in ("", Verdict.PASSED.value) else f" {verdict}")
    return rows["arm"] + rows["side"].map(lambda side: f" {side}" if side else "") + bad


def series(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str], pd.DataFrame]]:
    """(who, machine, contract) and its timed rows, oldest first: what a line may connect."""
    timed = rows[rows["median_us"].notna()]
    for key, group in timed.groupby([who(timed), "machine", "contract"], sort=False):
        yield (str(key[0]), str(key[1]), str(key[2])), group


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Cases and arms with more than one record, of a gate each side for itself, by how much their margins moved, the most first; one whose
    verdict changed is before all.

    Columns: case, arm, side, records, verdicts (each once, in order of time), folders (where each verdict came first), output (whose margin
    moved most), first, last, least, most, moved (most - least, in budgets; NaN where there is no margin)."""
    found = []
    judged = rows[(rows["verdict"] != "") & (rows["verdict"] != Verdict.SKIPPED.value)]
    for (case, arm, side), group in judged.groupby(["case", "arm", "side"], sort=False):
        if len(group) < 2:
            continue
        spans = {name: _span(group[MARGIN + name].dropna()) for name in outputs(group)}
        output = max(spans, key=lambda name: spans[name]["moved"], default="")
        firsts = group.drop_duplicates("verdict")
        found.append({"case": case, "arm": arm, "side": side, "records": len(group), "verdicts": list(firsts["verdict"]),
                      "folders": list(firsts["folder"]), "output": output, **spans.get(output, {})})
    table = pd.DataFrame(found, columns=["case", "arm", "side", "records", "verdicts", "folders", "output", "first", "last", "least",
                                         "most", "moved"])
    return table.assign(changed=_changed(table)).sort_values(["changed", "moved"], ascending=False, kind="stable",
                                                             ignore_index=True).drop(columns="changed")


def moved(table: pd.DataFrame) -> pd.DataFrame:
    """Of `compared`, what has another verdict, or a margin that moved by more than SMALL of its budget and SMALL_SHARE of itself."""
    far = table["moved"] >= (table["most"] * SMALL_SHARE).clip(lower=SMALL)
    return table[_changed(table) | far].reset_index(drop=True)


def _changed(table: pd.DataFrame) -> pd.Series:
    return table["verdicts"].map(len).astype("int64") > 1


def _span(values: pd.Series) -> dict[str, float]:
    least, most = float(values.min()), float(values.max())
    return {"first": float(values.iloc[0]), "last": float(values.iloc[-1]), "least": least, "most": most,
            "moved": most - least if most > least else 0.0}
