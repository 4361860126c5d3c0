"""Plots with a line an arm below the name of its case: every timing sample, and the intervals of time comparisons (a forest plot)."""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.comparison import TimeComparison, TimeVerdict
from harness.stats import percent
from reports.html import figures
from reports.html.figures import LINE, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 42
"""Of one figure; more are shared among several, so that paper can break between them."""
GAP = 7.0
NARROWEST, WIDEST, RIGHT, BETWEEN, TOP, BOTTOM = 40.0, 100.0, 66.0, 10.0, 12.0, 26.0
INDENT = 8.0
WIDEST_SPREAD = 0.10
"""Samples farther from their median are drawn at the edge."""
COLOURS = {TimeVerdict.SLOWER: figures.BAD, TimeVerdict.INVALID: figures.BAD, TimeVerdict.UNRESOLVED: figures.WARN,
           TimeVerdict.FASTER: figures.GOOD, TimeVerdict.SAME: figures.SERIES[0]}


@dataclasses.dataclass(frozen=True)
class Line:
    """One arm. us: its samples, in microseconds; note: what stands behind its name ("wrong")."""

    arm: str
    us: list[float]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Interval:
    """One comparison: the arm, and its times."""

    arm: str
    time: TimeComparison


Groups = list[tuple[str, list[Line]]]
"""(a case's name, its lines)"""


@dataclasses.dataclass
class Layout:
    """Where each line is, in points from the top. heads: (y, text) of names' lines; at: y of every arm, group by group; left: how wide the
    arms' names are."""

    heads: list[tuple[float, str]]
    at: list[list[float]]
    height: float
    left: float


def laid_out(groups: Sequence[tuple[str, Sequence[Line | Interval]]]) -> Layout:
    """Names above their lines."""
    heads, at, y = [], [], 0.0
    for name, lines in groups:
        for text in figures.wrapped(name, figures.WIDTH):
            heads.append((y + LINE / 2, text))
            y += LINE
        at.append([y + LINE * (number + 0.5) for number in range(len(lines))])
        y += LINE * len(lines) + GAP
    longest = max(len(line.arm) for _, lines in groups for line in lines)
    return Layout(heads, at, y, max(NARROWEST, min(WIDEST, INDENT + longest * figures.SMALL * 0.6 + 4)))


def in_parts(groups: Sequence[tuple[str, Sequence[object]]]) -> list[slice]:
    """Groups shared among figures, so that none has more than MOST_LINES lines unless one group does."""
    parts, first, count = [], 0, 0
    for number, (_, lines) in enumerate(groups):
        if count and count + len(lines) + 1 > MOST_LINES:
            parts.append(slice(first, number))
            first, count = number, 0
        count += len(lines) + 1
    return [*parts, slice(first, len(groups))]


def _frame(layout: Layout) -> Figure:
    """A figure with the names of the groups."""
    figure = figures.new_figure(layout.height + TOP + BOTTOM)
    height = layout.height + TOP + BOTTOM
    for y, text in layout.heads:
        figure.text(0, 1 - (y + TOP) / height, text, va="center", fontsize=figures.SMALL, fontweight=700, zorder=9,
                    bbox={"facecolor": figures.BACK, "edgecolor": "none", "pad": 0.5})  # over the grid of the panels
    return figure


def _panel(figure: Figure, layout: Layout, left: float, right: float, label: str) -> Axes:
    """Axes from `left` to `right` points whose y is that of the layout."""
    axis = figures.axes(figure, left, figures.WIDTH - right, TOP, BOTTOM)
    axis.set(ylim=(layout.height, 0), yticks=[], xlabel=label)
    axis.spines["left"].set_visible(False)
    axis.grid(axis="x")
    return axis


# --- samples ----------------------------------------------------------------------------------------------------------


def samples(groups: Groups, title: str, name: str, caption: str) -> list[Plot]:
    """Every sample of every line, twice: as a time, and as its distance from the line's median."""
    parts = in_parts(groups)
    return [_samples(groups[part], title + (f" ({number} of {len(parts)})" if len(parts) > 1 else ""), f"{name}-{number}", caption)
            for number, part in enumerate(parts, 1)]


def _samples(groups: Groups, title: str, name: str, caption: str) -> Plot:
    every = [line for _, lines in groups for line in lines]
    unit, factor = ("ms", 1e-3) if max(max(line.us) for line in every) >= 1000 else ("us", 1.0)
    spread = min(WIDEST_SPREAD, max(0.01, 1.1 * max(abs(us / statistics.median(line.us) - 1) for line in every for us in line.us)))
    layout = laid_out(groups)
    with figures.style():
        figure = _frame(layout)
        middle = (layout.left + figures.WIDTH - RIGHT) / 2
        times = _panel(figure, layout, layout.left, middle - BETWEEN / 2, unit)
        away = _panel(figure, layout, middle + BETWEEN / 2, figures.WIDTH - RIGHT, "% from median")
        smallest, largest = (pick(pick(line.us) for line in every) * factor for pick in (min, max))
        if largest > 10 * smallest:
            figures.log_scale(times)
            times.set_xlim(smallest / 1.3, largest * 1.3)
        else:
            times.set_xlim(0, largest * 1.05)
            times.locator_params(axis="x", nbins=4)
        away.set(xlim=(-110 * spread, 110 * spread))
        away.locator_params(axis="x", nbins=3)
        away.axvline(0, color=figures.MUTED, linewidth=0.6)
        arms = list(dict.fromkeys(line.arm for line in every))
        for (_, lines), ys in zip(groups, layout.at):
            for line, y in zip(lines, ys):
                _line(figure, (times, away), line, y, layout, factor, spread, figures.SERIES[arms.index(line.arm) % len(figures.SERIES)])
        told = "; ".join(f"{case} {line.arm} median {figures.microseconds(statistics.median(line.us))}"
                         for case, lines in groups for line in lines)
        return Plot(title, figures.svg(figure, name, f"timing samples: {told}"), caption)


def _line(figure: Figure, panels: tuple[Axes, Axes], line: Line, y: float, layout: Layout, factor: float, spread: float,
          colour: str) -> None:
    median, height = statistics.median(line.us), layout.height + TOP + BOTTOM
    low, _, high = statistics.quantiles(line.us, n=4) if len(line.us) > 1 else (median, median, median)
    times, away = panels
    figures.ticks(times, [us * factor for us in line.us], y, LINE * 0.36, colour)
    apart = [us / median - 1 for us in line.us]
    figures.ticks(away, [100 * share for share in apart if abs(share) <= spread], y, LINE * 0.28, colour)
    away.plot([100 * (low / median - 1), 100 * (high / median - 1)], [y, y], color=colour, linewidth=2.4, alpha=0.5, solid_capstyle="butt")
    beyond = sum(abs(share) > spread for share in apart)
    for side in {share > 0 for share in apart if abs(share) > spread}:
        away.plot([105 * spread * (1 if side else -1)], [y], marker=">" if side else "<", markersize=3.5, color=figures.WARN, clip_on=False)
    where = 1 - (y + TOP) / height
    figure.text(INDENT / figures.WIDTH, where, figures.short(line.arm, layout.left - INDENT), va="center", fontsize=figures.SMALL)
    text = figures.microseconds(median) + (f" {line.note}" if line.note else f" ({beyond} far)" if beyond else "")
    figure.text(1 - (RIGHT - 6) / figures.WIDTH, where, text, va="center", fontsize=figures.SMALL,
                color=figures.BAD if line.note else figures.WARN if beyond else figures.INK)


# --- intervals --------------------------------------------------------------------------------------------------------


def forest(groups: list[tuple[str, list[Interval]]], title: str, name: str, caption: str, judged: bool = True) -> list[Plot]:
    """The interval of every comparison against its threshold; groups with the slowest first. Not judged: without thresholds and
    verdicts."""
    known = [(case, [line for line in lines if line.time.estimate]) for case, lines in groups]
    known = sorted(((case, lines) for case, lines in known if lines), key=lambda group: -max(map(_ratio, group[1])))
    parts = in_parts(known) if known else []
    return [_forest(known[part], title + (f" ({number} of {len(parts)})" if len(parts) > 1 else ""), f"{name}-{number}", caption, judged)
            for number, part in enumerate(parts, 1)]


def _ratio(line: Interval) -> float:
    return line.time.estimate.ratio if line.time.estimate else 0.0


def _forest(groups: list[tuple[str, list[Interval]]], title: str, name: str, caption: str, judged: bool) -> Plot:
    every = [line.time for _, lines in groups for line in lines]
    layout = laid_out(groups)
    with figures.style():
        figure = _frame(layout)
        axis = _panel(figure, layout, layout.left + 8, figures.WIDTH - RIGHT - 22, "candidate / base")
        ends = [end for time in every if time.estimate for end in (time.estimate.low, time.estimate.high)]
        far = max(1.04, *(max(end, 1 / end) for end in ends), *(1 + 1.3 * time.rule.threshold for time in every if judged))
        axis.set_xscale("log")
        axis.set_xlim(1 / far**1.05, far**1.05)
        _percent_ticks(axis, far)
        axis.axvline(1, color=figures.INK, linewidth=0.8)
        for (_, lines), ys in zip(groups, layout.at):
            for line, y in zip(lines, ys):
                _interval(figure, axis, line, y, layout, judged)
        told = "; ".join(f"{case} {line.arm} {line.time.verdict.value} {percent(_ratio(line))}" for case, lines in groups for line in lines)
        return Plot(title, figures.svg(figure, name, f"time comparisons: {told}"), caption)


def _percent_ticks(axis: Axes, far: float) -> None:
    """Few ticks, evenly to both sides, as changes."""
    step = next((step for step in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 9.0) if 1 + step >= far**0.6), far - 1)
    places = [1 / (1 + step), 1.0, 1 + step]
    axis.set_xticks(places, labels=[percent(place) if place != 1 else "0" for place in places])
    axis.set_xticks([], minor=True)


def _interval(figure: Figure, axis: Axes, line: Interval, y: float, layout: Layout, judged: bool) -> None:
    found, rule = line.time.estimate, line.time.rule
    assert found is not None
    judged = judged or line.time.verdict is TimeVerdict.INVALID
    calm = not judged or line.time.verdict is TimeVerdict.SAME
    colour, half = COLOURS[line.time.verdict if judged else TimeVerdict.SAME], LINE * 0.42
    if judged:
        axis.fill_betweenx([y - half, y + half], 1 / (1 + rule.threshold), 1 + rule.threshold, color=figures.GRID, linewidth=0, alpha=0.5)
    axis.plot([found.low, found.high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
    axis.plot([found.ratio], [y], marker="D", markersize=3, color=colour)
    where = 1 - (y + TOP) / (layout.height + TOP + BOTTOM)
    figure.text(INDENT / figures.WIDTH, where, figures.short(line.arm, layout.left - INDENT), va="center", fontsize=figures.SMALL)
    told = f"{percent(found.ratio)} {line.time.verdict.value}" if judged else f"{found.ratio:.3f} [{found.low:.3f} {found.high:.3f}]"
    figure.text(1 - (RIGHT + 17) / figures.WIDTH, where, told, va="center", fontsize=figures.SMALL,
                color=figures.INK if calm else colour, fontweight=400 if calm else 700)
