"""A case over time, and which cases moved: for a terminal, as a plot (SVG), and as one HTML page."""
from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from rich.table import Column, Table
from rich.text import Text

from harness.history import MARGIN, SMALL, SMALL_SHARE, outputs, series, warnings, who
from harness.verdicts import Verdict
from harness.words import counted
from reports.cells import CaseTable, labels, short
from reports.failure import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#777777", "#99999955"  # seen on a light page and on a dark one
COLOURS = ("#3b7dd8", "#d9822b", "#2e9e5b", "#c2479b", "#8a6fd1", "#b5a100")
MARKERS = "osD^vP*X"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title><style>
:root { color-scheme: light dark } body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem }
div { overflow-x: auto } table { border-collapse: collapse; font-size: 13px } svg { max-width: 100%; height: auto }
th, td { border-bottom: 1px solid #9997; padding: .3em .6em; text-align: left; vertical-align: top; overflow-wrap: break-word }
h1 { font-size: 1.2rem; overflow-wrap: anywhere } h2 { font-size: 1rem; overflow-wrap: anywhere }
@media print { div { overflow: visible } } </style></head><body><h1>{{ title }}</h1>
{% for line in warnings %}<p><strong>{{ line }}</strong></p>{% endfor %}
{% if plot %}<div>{{ plot | safe }}</div>{% endif %}
{% for table in tables %}<div>{% if table.title %}<h2>{{ table.title }}</h2>{% endif %}
<table><thead><tr>{% for name in table.head %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endfor %}
{% if note %}<p>{{ note }}</p>{% endif %}</body></html>
"""
OVER_TIME = ["date", "folder, part", "machine", "version, threearm", "arm", "verdict", "margins", "median us [quartiles]", "contract"]
MOVED = ["case", "arm", "records", "verdicts", "output", "margin, first -> last", "least .. most"]
WHOLE = ("date", "arm", "verdict")  # columns whose cells stay on one line
HALF_A_LINE = 60  # characters of a legend
EDGE_SIZE = 7  # of a mark at the upper edge
NAMED = 2  # folders that a line of the plot names


class Cells(NamedTuple):
    """A table of a page. title: "" for none."""

    title: str
    head: list[str]
    rows: list[list[str]]


class MarginLine(NamedTuple):
    """Margins of a line of the plot, oldest first. margins: infinity is drawn at the upper edge."""

    label: str
    dates: list[Any]
    margins: list[float]


def places(folders: Iterable[str]) -> dict[str, str]:
    """A short name of each folder: below what all have in common; of a single one, its last."""
    every = list(dict.fromkeys(folders))
    top = os.path.commonpath([os.path.dirname(each) or "." for each in map(os.path.abspath, every)]) if every else ""
    return {each: Path(os.path.abspath(each)).relative_to(top).as_posix() for each in every}


def filled(head: list[str], rows: list[list[str]]) -> Cells:
    """A table without the columns that are empty in every row."""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    return Cells("", [head[place] for place in kept], [[row[place] for place in kept] for row in rows])


def over_time(rows: pd.DataFrame) -> list[list[str]]:
    """The cells of one case's table, a row a record, in the order of time: OVER_TIME."""
    named = places(rows["folder"])
    return [[f"{row['date']:%Y-%m-%d %H:%M}", _joined(named[row["folder"]], row["part"]), row["machine"],
             _joined(row["version"], row["threearm"]), row["arm"], row["verdict"], margins_in_words(row, rows), times_in_words(row),
             row["contract"]] for _, row in rows.iterrows()]


def _joined(*words: str) -> str:
    return ", ".join(filter(None, words))


def margins_in_words(row: pd.Series, rows: pd.DataFrame) -> str:
    """`out 0.31, lse 0.002`"""
    return ", ".join(f"{name} {_margin(row[MARGIN + name])}" for name in outputs(rows) if not math.isnan(row[MARGIN + name]))


def _margin(value: float) -> str:
    return "not finite" if math.isinf(value) else shown(value)


def times_in_words(row: pd.Series) -> str:
    """`28.6 [28.4 28.9]`, or ""."""
    return "" if math.isnan(row["median_us"]) else f"{row['median_us']:.4g} [{row['low_us']:.4g} {row['high_us']:.4g}]"


def which_moved(table: pd.DataFrame) -> list[list[str]]:
    """The cells of the table of cases that moved: MOVED, the case in full. Of a verdict that changed, with the folder where each came
    first."""
    named = places(folder for folders in table["folders"] for folder in folders)
    cells = []
    for _, row in table.iterrows():
        where = [f"{verdict} ({named[folder]})" if len(row["verdicts"]) > 1 else verdict
                 for verdict, folder in zip(row["verdicts"], row["folders"])]
        first, last, least, most = (_margin(row[name]) if row["output"] else "" for name in ("first", "last", "least", "most"))
        change = f"{first} -> {last}" if first != last else f"{first} at both ends" if least != most else first
        cells.append([row["case"], f"{row['arm']} {row['side']}".strip(), str(row["records"]), " -> ".join(where), row["output"], change,
                      f"{least} .. {most}" if least != most else ""])
    return cells


def moved_tables(table: pd.DataFrame) -> list[Cells]:
    """What moved, a table a family, what its cases have in common told in the title."""
    cells, tables = which_moved(table), []
    for family in dict.fromkeys(row[0].partition(":")[0] for row in cells):
        mine = [row for row in cells if row[0].partition(":")[0] == family]
        common, own = labels(list(dict.fromkeys(row[0] for row in mine)))
        tables.append(Cells(f"{family}: how far margins moved{f', every case: {common}' if common else ''}", MOVED,
                            [[own[row[0]], *row[1:]] for row in mine]))
    return tables


def how_many(rows: int, compared: int, moved: int) -> str:
    """`20 rows; of 5 pairs of case and arm with more than one record, 2 moved`, and what of the others."""
    still = compared - moved
    return (f"{counted(rows, 'row')}; of {counted(compared, 'pair')} of case and arm with more than one record {moved:,} moved"
            + (f"; {still:,} kept their verdict, and margins to {SMALL:g} of a budget or {SMALL_SHARE:.0%} of themselves" if still else ""))


def terminal_over_time(case: str, rows: pd.DataFrame) -> Table:
    """One case's table; what is the same in every row is told above it."""
    cells = over_time(rows)
    common = [place for place in range(len(OVER_TIME)) if len(cells) > 1 and len({row[place] for row in cells}) == 1]
    told = [case, *(f"{OVER_TIME[place]}: {cells[0][place]}" for place in common if cells[0][place])]
    kept = [place for place in range(len(OVER_TIME)) if place not in common]
    columns = [Column(OVER_TIME[place], overflow="fold", no_wrap=OVER_TIME[place] in WHOLE) for place in kept]
    table = Table(*columns, title=Text("\n".join(told)), title_justify="left")
    for row in cells:
        table.add_row(*(row[place].replace(", ", "\n") if OVER_TIME[place] == "margins" else row[place] for place in kept))
    return table


def terminal_moved(table: pd.DataFrame, most: int) -> list[CaseTable]:
    """The first rows of the table of cases that moved, a table a family."""
    return [CaseTable(title, head[1:], [list(row) for row in rows]) for title, head, rows in moved_tables(table.head(most))]


def plot(case: str, rows: pd.DataFrame) -> str:
    """An SVG of one case: times, a line an arm, machine and contract, with their quartiles; and margins, a line an arm, machine and
    output, against 1. The sides of a gate, and what gave a wrong answer, have lines of their own; a margin that is not finite, and a wrong
    arm that has none, is a mark at the upper edge. The same rows give the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "threearm", "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
                     "xtick.color": INK, "ytick.color": INK, "grid.color": GRID, "font.size": 9, "savefig.transparent": True,
                     "text.parse_math": False}
    judged = margin_lines(rows, outputs(rows))
    timed = bool(rows["median_us"].notna().any())
    with matplotlib.rc_context(settings):
        panels = max(1, timed + bool(judged))
        figure = Figure(layout="constrained")
        axes = list(figure.subplots(panels, 1, squeeze=False, sharex=True)[:, 0])
        figure.suptitle(short(case), fontsize=10, wrap=True)
        if timed:
            _draw_times(axes[0], rows)
        if judged:
            _draw_margins(axes[-1], judged)
        for axis in axes:
            axis.grid(True)
            axis.tick_params(axis="x", rotation=20, labelbottom=True)
        listed = sum(map(_legend, axes))
        figure.set_size_inches(9, 3.3 * panels + 0.17 * listed)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = written.getvalue()
    return text[text.index("<svg") :]


def _legend(axis: Axes) -> int:
    """What its lines are, below it, in two columns where that fits. How many rows that takes."""
    names = axis.get_legend_handles_labels()[1]
    columns = 2 if max(map(len, names), default=0) <= HALF_A_LINE else 1
    if names:
        axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=columns)
    return -(-len(names) // columns)


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place // len(COLOURS) % len(MARKERS)], "markersize": 4}


def _draw_times(axis: Axes, rows: pd.DataFrame) -> None:
    every, named = list(series(rows)), places(rows["folder"])
    machines, contracts = ({key[place] for key, _ in every} for place in (1, 2))
    for place, ((arm, machine, contract), group) in enumerate(every):
        name = ", ".join([arm, *([machine] if len(machines) > 1 else []), *([contract] if len(contracts) > 1 else [])])
        name += _where(group, named)
        middle = group["median_us"]
        axis.errorbar(group["date"], middle, yerr=[middle - group["low_us"], group["high_us"] - middle],
                      label=name, linewidth=1, capsize=2, **_style(place))
    axis.set(ylabel="median us, quartiles", ylim=(0, None),
             title=f"{' '.join(machines)}, {' '.join(contracts)}" if len(machines) == len(contracts) == 1 else None)


def _draw_margins(axis: Axes, lines: list[MarginLine]) -> None:
    from matplotlib.ticker import FuncFormatter

    edge = EDGE_SIZE
    for place, (label, dates, values) in enumerate(lines):
        style = _style(place)
        axis.plot(dates, [value if math.isfinite(value) else math.nan for value in values], label=label, linewidth=1, **style)
        above = [date for date, value in zip(dates, values) if math.isinf(value)]
        if above:
            axis.plot(above, [1] * len(above), transform=axis.get_xaxis_transform(), clip_on=False, linestyle="none",
                      markerfacecolor="none", **{**style, "markersize": edge})
            edge += 3  # one around the other, where several are on one day
    axis.axhline(1, color=INK, linewidth=1, linestyle="--")
    axis.set(ylabel="error over budget (above 1 fails)", yscale="log")
    if not any(math.isfinite(value) for _, _, values in lines for value in values):
        axis.set_ylim(0.1, 10)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.3e}"[0] in "25" else ""))


def margin_lines(rows: pd.DataFrame, names: list[str]) -> list[MarginLine]:
    """Every line: whose (harness.history.who), output and machine. Arms of a kernel whose margins are the same share one. Margins of 0
    have no place on a log scale; of a record that is no pass and has nothing else there, infinity stands for the margin."""
    several, named = rows["machine"].nunique() > 1, places(rows["folder"])
    lines: dict[tuple[Any, ...], list[str]] = {}
    judged = rows[~rows["verdict"].isin(["", Verdict.SKIPPED.value])]
    columns = [MARGIN + name for name in names]
    lacking = ~(judged[columns] > 0).any(axis=1) & (judged["verdict"] != Verdict.PASSED.value)
    for (_, arm, machine), group in judged.groupby([who(judged), "arm", "machine"], sort=False):
        kernel, _, source = arm.rpartition("/")
        about = who(group).iloc[0].removeprefix(arm) + (f", {machine}" if several else "")
        for name in names:
            known = group[group[MARGIN + name] > 0]
            values = tuple(known[MARGIN + name])
            told = name + (" not finite (upper edge)" if math.inf in values else "")
            lines.setdefault((told, kernel, about, _where(known, named), tuple(known["date"]), values), []).append(source)
        without = group[lacking[group.index]]
        key = ("no margin (upper edge)", kernel, about, _where(without, named), tuple(without["date"]), (math.inf,) * len(without))
        lines.setdefault(key, []).append(source)
    return [MarginLine(f"{told}, {kernel}/{','.join(sources)}{about}{where}", list(dates), list(values))
            for (told, kernel, about, where, dates, values), sources in lines.items() if values]


def _where(rows: pd.DataFrame, named: dict[str, str]) -> str:
    """` (faulty)`: the folders that rows are from, where there are others too and few of these."""
    mine = list(dict.fromkeys(rows["folder"].map(named)))
    return f" ({', '.join(mine)})" if 0 < len(mine) <= NAMED and len(mine) < len(named) else ""


def page(title: str, rows: pd.DataFrame, tables: list[Cells], drawn: str = "", note: str = "") -> str:
    """One HTML page that needs nothing else: what cannot be compared, the plot, the tables, what they leave out."""
    import jinja2

    environment = jinja2.Environment(autoescape=True)
    spaced = [Cells(table.title, table.head, [[cell.replace(",", ", ") if "=" in cell else cell for cell in row] for row in table.rows])
              for table in tables]  # cases may break between keys
    return environment.from_string(PAGE).render(title=title, warnings=warnings(rows), plot=drawn, tables=spaced, note=note)
