"""`threearm history`: margins and times of cases over many stored folders."""
from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from cases import CaseError, format_case, parse_case
from harness import history as past
from harness.marks import what_it_is
from harness.options import NOTHING_RAN, console, errors, fail, say
from harness.report_command import before_work, write
from harness.runfolder import RunError
from harness.stored import Stored, folders_below, open_folder

MOST = 30  # rows of the table of what moved

Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders of runs, gates or evidence, or folders that hold such.")]


def history(paths: Paths, case: Annotated[str, typer.Option("--case", help="One case over time; without it, which cases moved.")] = "",
            arm: Annotated[str, typer.Option("--arm", help="kernel or kernel/arm.")] = "",
            parquet: Annotated[Path | None, typer.Option(help="Write every row here, as Parquet.")] = None,
            html: Annotated[Path | None, typer.Option(help="Write one page that needs nothing else.")] = None,
            plot: Annotated[Path | None, typer.Option(help="Draw the case here, as SVG.")] = None) -> None:
    """Margins and times of one case over many runs; without --case, which cases' margins moved. Says nothing of what is right or slower."""
    from reports import history as told

    before_work({"--parquet": parquet, "--html": html, "--plot": plot}, on_github=False)
    if parquet and importlib.util.find_spec("pyarrow") is None:
        fail("--parquet needs pyarrow: pip install pyarrow")
    if plot and not case:
        fail("--plot draws one case: name it with --case")
    text = canonical(case) if case else ""
    rows = past.frame(read(paths))
    if arm:
        rows = rows[(rows["arm"] == arm) | (rows["arm"].str.rpartition("/")[0] == arm)]
    if text:
        rows = rows[rows["case"] == text]
    if not len(rows):
        fail(f"no record{f' of {text}' if text else ''}{f' by {arm}' if arm else ''} in {', '.join(map(str, paths))}", NOTHING_RAN)
    rows = rows.reset_index(drop=True)
    for line in past.warnings(rows):
        errors.print(f"warning: {line}", markup=False, highlight=False)
    if text:
        console.print(told.terminal_over_time(text, rows))
        tables, note, drawn = [told.filled(told.OVER_TIME, told.over_time(rows))], "", told.plot(text, rows) if plot or html else ""
    else:
        every = past.compared(rows)
        table = past.moved(every)
        for each in told.terminal_moved(table, MOST):
            console.print(each)
        note = told.how_many(len(rows), len(every), len(table))
        say(note + (f"; {len(table) - MOST:,} more are in --html" if len(table) > MOST else ""))
        tables, drawn = told.moved_tables(table), ""
    if plot:
        write(plot, drawn.encode(), "--plot")
    if html:
        write(html, told.page(text or "Cases whose margins moved", rows, tables, drawn, note).encode(), "--html")
    if parquet:
        try:
            rows.to_parquet(parquet, engine="pyarrow", index=False)
        except OSError as error:
            fail(f"--parquet {parquet}: {error}", NOTHING_RAN)


def canonical(case: str) -> str:
    """A case in its shortest form, as records have it, or one line and exit 2."""
    try:
        return format_case(parse_case(case))
    except CaseError as error:
        fail(f"--case: {error}")


def read(paths: list[Path]) -> list[Stored]:
    """Every folder at or below the paths. One that cannot be read is told and left out; none at all is exit 2."""
    found: list[Stored] = []
    for path in paths:
        below = folders_below(path)
        if not below:
            fail(f"{path} holds no folder of a run, a gate or evidence: {what_it_is(path)}")
        for each in below:
            try:
                found.append(open_folder(each))
            except RunError as error:
                errors.print(f"not read: {error}", markup=False, highlight=False)
    if not found:
        fail("no folder could be read")
    return found
