"""A case over time, and which cases moved: for a terminal, as a plot (SVG), and as one HTML page."""
from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.table import Column, Table
from rich.text import Text

from harness.history import MARGIN, outputs, series, warnings
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
h1 { font-size: 1.2rem; overflow-wrap: anywhere }
@media print { div { overflow: visible } } </style></head><body><h1>{{ title }}</h1>
{% for line in warnings %}<p><strong>{{ line }}</strong></p>{% endfor %}
{% if plot %}<div>{{ plot | safe }}</div>{% endif %}
<div><table><thead><tr>{% for name in head %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div></body></html>
"""
OVER_TIME = ["date", "machine", "version, threearm", "arm", "verdict", "margins", "median us [quartiles]", "contract"]
MOVED = ["case", "arm", "records", "verdicts", "output", "margin, first -> last", "least .. most"]


def over_time(rows: pd.DataFrame) -> list[list[str]]:
    """The cells of one case's table, a row a record, in the order of time: OVER_TIME."""
    return [[f"{row['date']:%Y-%m-%d %H:%M}", row["machine"], ", ".join(filter(None, [row["version"], row["threearm"]])), row["arm"],
             row["verdict"], margins_in_words(row, rows), times_in_words(row), row["contract"]] for _, row in rows.iterrows()]


def margins_in_words(row: pd.Series, rows: pd.DataFrame) -> str:
    """`out 0.31, lse 0.002`"""
    return ", ".join(f"{name} {_margin(row[MARGIN + name])}" for name in outputs(rows) if not math.isnan(row[MARGIN + name]))


def _margin(value: float) -> str:
    return "not finite" if math.isinf(value) else shown(value)


def times_in_words(row: pd.Series) -> str:
    """`28.6 [28.4 28.9]`, or ""."""
    return "" if math.isnan(row["median_us"]) else f"{row['median_us']:.4g} [{row['low_us']:.4g} {row['high_us']:.4g}]"


def which_moved(table: pd.DataFrame) -> list[list[str]]:
    """The cells of the table of cases that moved: MOVED, the case in full."""
    return [[row["case"], row["arm"], str(row["records"]), " -> ".join(row["verdicts"]), row["output"],
             f"{_margin(row['first'])} -> {_margin(row['last'])}" if row["output"] else "",
             f"{_margin(row['least'])} .. {_margin(row['most'])}" if row["output"] else ""] for _, row in table.iterrows()]


def terminal_over_time(case: str, rows: pd.DataFrame) -> Table:
    """One case's table; what is the same in every row is told above it."""
    cells = over_time(rows)
    common = [place for place in range(len(OVER_TIME)) if len(cells) > 1 and len({row[place] for row in cells}) == 1]
    told = [case, *(f"{OVER_TIME[place]}: {cells[0][place]}" for place in common if cells[0][place])]
    kept = [place for place in range(len(OVER_TIME)) if place not in common]
    table = Table(*(Column(OVER_TIME[place], overflow="fold") for place in kept), title=Text("\n".join(told)), title_justify="left")
    for row in cells:
        table.add_row(*(row[place].replace(", ", "\n") if OVER_TIME[place] == "margins" else row[place] for place in kept))
    return table


def terminal_moved(table: pd.DataFrame, most: int) -> list[CaseTable]:
    """The first rows of the table of cases that moved, a table a family."""
    cells = which_moved(table.head(most))
    families = dict.fromkeys(row[0].partition(":")[0] for row in cells)
    tables = []
    for family in families:
        mine = [row for row in cells if row[0].partition(":")[0] == family]
        common, own = labels(list(dict.fromkeys(row[0] for row in mine)))
        title = f"{family}: how far margins moved{f', every case: {common}' if common else ''}"
        tables.append(CaseTable(title, MOVED[1:], [[own[row[0]], *row[1:]] for row in mine]))
    return tables


def plot(case: str, rows: pd.DataFrame) -> str:
    """An SVG of one case: times, a line an arm, machine and contract, with their quartiles; and margins, a line an arm, machine and
    output, against 1. The same rows give the same text."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "threearm", "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
                     "xtick.color": INK, "ytick.color": INK, "grid.color": GRID, "font.size": 9, "savefig.transparent": True,
                     "text.parse_math": False}
    judged = [name for name in outputs(rows) if (rows[MARGIN + name] > 0).any()]
    timed = bool(rows["median_us"].notna().any())
    with matplotlib.rc_context(settings):
        panels = max(1, timed + bool(judged))
        figure = Figure(figsize=(9, 3.6 * panels), layout="constrained")
        axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
        figure.suptitle(short(case), fontsize=10, wrap=True)
        if timed:
            _draw_times(axes[0], rows)
        if judged:
            _draw_margins(axes[-1], rows, judged)
        for axis in axes:
            axis.grid(True)
            axis.tick_params(axis="x", rotation=20)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = written.getvalue()
    return text[text.index("<svg") :]


def _style(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place // len(COLOURS) % len(MARKERS)], "markersize": 4}


def _draw_times(axis: Axes, rows: pd.DataFrame) -> None:
    every = list(series(rows))
    machines, contracts = ({key[place] for key, _ in every} for place in (1, 2))
    for place, ((arm, machine, contract), group) in enumerate(every):
        name = ", ".join([arm, *([machine] if len(machines) > 1 else []), *([contract] if len(contracts) > 1 else [])])
        middle = group["median_us"]
        axis.errorbar(group["date"], middle, yerr=[middle - group["low_us"], group["high_us"] - middle],
                      label=name, linewidth=1, capsize=2, **_style(place))
    axis.set(ylabel="median us, quartiles", ylim=(0, None),
             title=f"{' '.join(machines)}, {' '.join(contracts)}" if len(machines) == len(contracts) == 1 else None)


def _draw_margins(axis: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    from matplotlib.ticker import FuncFormatter

    for place, (label, dates, values) in enumerate(margin_lines(rows, names)):
        axis.plot(dates, values, label=label, linewidth=1, **_style(place))
    axis.axhline(1, color=INK, linewidth=1, linestyle="--")
    axis.set(ylabel="error over budget (above 1 fails)", yscale="log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:.3e}"[0] in "25" else ""))


def margin_lines(rows: pd.DataFrame, names: list[str]) -> list[tuple[str, list[Any], list[float]]]:
    """(label, dates, margins) of every line: an arm, output and machine. Arms of a kernel whose margins are the same share one."""
    several = rows["machine"].nunique() > 1
    lines: dict[tuple[Any, ...], list[str]] = {}
    for (arm, machine), group in rows.groupby(["arm", "machine"], sort=False):
        for name in names:
            known = group[(group[MARGIN + name] > 0) & ~group[MARGIN + name].map(math.isinf)]
            if len(known):
                kernel, _, source = arm.rpartition("/")
                key = (kernel, name, machine, tuple(known["date"]), tuple(known[MARGIN + name]))
                lines.setdefault(key, []).append(source)
    return [(f"{name}, {kernel}/{','.join(sources)}" + (f", {machine}" if several else ""), list(dates), list(values))
            for (kernel, name, machine, dates, values), sources in lines.items()]


def page(title: str, rows: pd.DataFrame, head: list[str], cells: list[list[str]], drawn: str = "") -> str:
    """One HTML page that needs nothing else: what cannot be compared, the plot, the table."""
    import jinja2

    environment = jinja2.Environment(autoescape=True)
    spaced = [[cell.replace(",", ", ") if "=" in cell else cell for cell in row] for row in cells]  # cases may break between keys
    return environment.from_string(PAGE).render(title=title, warnings=warnings(rows), plot=drawn, head=head, rows=spaced)
