"""Sweeps as plots: time over one number, a line an arm; of dense against litetopk also where they cross."""
from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from harness.record import Record
from reports.html import figures
from reports.html.figures import Plot
from reports.html.sweeps import LENGTH, Point, Sweep, find
from reports.sweeps import crossings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 190.0
WIDE_RANGE = 12
"""Ratio of largest to smallest from which an axis is logarithmic."""
MARKERS = "osD^vP"


def plots(records: list[Record], name: str) -> list[Plot]:
    """A plot a sweep. name: what its ids begin with."""
    return [plot(sweep, f"{name}-sweep-{number}") for number, sweep in enumerate(find(records))]


def plot(sweep: Sweep, name: str) -> Plot:
    """One sweep."""
    every = [point for points in sweep.lines.values() for point in points]
    milli = max(point.median for point in every) >= 1000
    factor, unit = (1e-3, "ms") if milli else (1.0, "us")
    kernels = {arm.rpartition("/")[0] for arm in sweep.lines}
    with figures.style():
        figure = figures.new_figure(HEIGHT)
        columns = 3 if len(kernels) == 1 else 2
        axis = figures.axes(figure, 40, 8, 12 + 11 * -(-len(sweep.lines) // columns), 30)
        axis.grid()
        for number, (arm, points) in enumerate(sweep.lines.items()):
            label = figures.short(arm if len(kernels) > 1 else arm.rpartition("/")[2], figures.WIDTH / columns - 34)
            _draw(axis, points, label + ("" if all(point.ok for point in points) else " (x: wrong)"), number, factor)
        _scale(axis, every, factor)
        crossed = _crossed(axis, sweep)
        if sweep.key == LENGTH and len({point.name for point in every}) > 1:
            _name_points(axis, max(sweep.lines.values(), key=lambda points: statistics.median(point.median for point in points)), factor)
        axis.set_xlabel(sweep.key if sweep.key != "keys" else "keys of the request")
        axis.set_ylabel(unit, labelpad=2)
        axis.legend(loc="lower left", bbox_to_anchor=(-0.16, 1.0), ncols=columns, handlelength=1.4, columnspacing=1.2, borderpad=0,
                    labelspacing=0.25)
        told = "; ".join(f"{arm} " + ", ".join(f"{point.x:g}: {figures.microseconds(point.median)}" for point in points)
                         for arm, points in sweep.lines.items())
        title = f"{', '.join(sorted(kernels))}: time over {sweep.key}" if len(kernels) == 1 else f"time over {sweep.key}"
        unnamed = "" if sweep.key != LENGTH or every[0].name else "index_topk cuts the rows to this length"
        caption = "; ".join(filter(None, [sweep.fixed, f"contract {sweep.contract}, medians with quartiles", unnamed, crossed]))
        return Plot(title, figures.svg(figure, name, f"{title}: {told}"), caption)


def _draw(axis: Axes, points: list[Point], label: str, number: int, factor: float) -> None:
    colour = figures.SERIES[number % len(figures.SERIES)]
    low, middle, high = ([value * factor for value in values] for values in zip(*map(_quartiles, points)))
    x = [point.x for point in points]
    axis.plot(x, middle, color=colour, linewidth=1.2, label=label, marker=MARKERS[number % len(MARKERS)], markersize=3.2)
    axis.vlines(x, low, high, color=colour, linewidth=1.0)
    wrong = [(x, y) for x, y, point in zip(x, middle, points) if not point.ok]
    if wrong:
        axis.plot(*zip(*wrong), linestyle="none", marker="x", markersize=6.5, markeredgewidth=1.4, color=figures.BAD)


def _quartiles(point: Point) -> tuple[float, float, float]:
    if len(point.us) < 2:
        return (point.median,) * 3
    low, middle, high = statistics.quantiles(point.us, n=4)
    return low, middle, high


def _scale(axis: Axes, every: list[Point], factor: float) -> None:
    """Logarithmic axes where a linear one would hide the small numbers; the others from 0."""
    xs, ys = [point.x for point in every], [point.median * factor for point in every]
    if min(xs) > 0 and max(xs) >= WIDE_RANGE * min(xs):
        axis.set_xscale("log", base=2)
        shown = apart(sorted(set(xs)))
        axis.set_xticks(shown, labels=[_count(x) for x in shown])
        axis.set_xticks([], minor=True)
    else:
        axis.set_xlim(0, max(xs) * 1.05 or 1)
    if min(ys) > 0 and max(ys) >= WIDE_RANGE * min(ys):
        figures.log_scale(axis, "y")
        axis.set_ylim(min(ys) / 1.4, max(ys) * 1.4)
    else:
        axis.set_ylim(0, max(ys) * 1.15)


def apart(numbers: list[float]) -> list[float]:
    """Those of ascending numbers whose labels have room on a logarithmic axis; powers of two first."""
    least = (math.log(numbers[-1]) - math.log(numbers[0])) / 9
    kept: list[float] = []
    for number in sorted(numbers, key=lambda number: (math.log2(number) % 1 != 0, number)):
        if all(abs(math.log(number) - math.log(other)) >= least for other in kept):
            kept.append(number)
    return sorted(kept)


def _count(number: float) -> str:
    """262144 is `256K`."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if number >= size and number % (size // 4) == 0:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def _crossed(axis: Axes, sweep: Sweep) -> str:
    """Mark where the dense line passes the litetopk line, if there is one of each; and say so."""
    dense, litetopk = ([points for arm, points in sweep.lines.items() if arm.endswith(f"/{kind}")] for kind in ("dense", "litetopk"))
    if len(dense) != 1 or len(litetopk) != 1:
        return ""
    below = {point.x: point.median for point in litetopk[0]}
    places = [each.keys for each in crossings([(int(p.x), p.median / below[p.x]) for p in dense[0] if p.x in below])]
    for place in places:
        axis.axvline(place, color=figures.MUTED, linewidth=0.8, linestyle=(0, (3, 2)))
    if not places:
        return "the lines do not cross here"
    return "they cross at " + ", ".join(f"{place:,.0f} {sweep.key} (interpolated)" for place in places)


def _name_points(axis: Axes, points: list[Point], factor: float) -> None:
    """The rows pattern above each point of the highest line; of points that are near each other together."""
    width = axis.get_xlim()[1] - axis.get_xlim()[0]
    groups: list[list[Point]] = []
    for point in points:
        near = groups and abs(point.x - groups[-1][0].x) < 0.05 * width
        groups = [*groups[:-1], [*groups[-1], point]] if near else [*groups, [point]]
    for group in groups:
        top = max(point.median for point in group) * factor
        at_end = group[-1].x > axis.get_xlim()[1] - 0.1 * width
        axis.annotate("/".join(dict.fromkeys(point.name for point in group)), (group[0].x, top), xytext=(4 if at_end else 0, 4),
                      textcoords="offset points", ha="right" if at_end else "center", fontsize=figures.SMALL - 0.5, color=figures.MUTED)
