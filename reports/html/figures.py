"""What all plots share: sizes, colours that follow the page's light or dark theme, and the way from a matplotlib figure to inline SVG.

Sizes are in points. A figure is as wide as a phone's screen and is scaled to its column, so that its text is readable everywhere.
matplotlib is imported in functions, so that the command line starts without it.
"""
from __future__ import annotations

import dataclasses
import io
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 280.0
SMALL, TEXT = 7.0, 8.0
LINE = 9.5  # height of a line of small text

INK, MUTED, GRID, BACK, GOOD, WARN, BAD = (f"#00000{number}" for number in range(1, 8))
SERIES = tuple(f"#0000{number}" for number in range(11, 17))
THEME = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--line)", BACK: "var(--back)", GOOD: "var(--good)", WARN: "var(--warn)",
         BAD: "var(--bad)", **{colour: f"var(--s{number})" for number, colour in enumerate(SERIES, 1)}}
"""Colours as drawn, none of which is seen, and what the page's style makes of them."""
SETTINGS: Any = {
    "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": TEXT, "text.color": INK, "axes.edgecolor": MUTED,
    "axes.labelcolor": INK, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4, "ytick.minor.width": 0.4, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "axes.labelsize": TEXT,
    "legend.fontsize": TEXT, "legend.frameon": False, "grid.color": GRID, "grid.linewidth": 0.5, "axes.axisbelow": True,
    "path.simplify": False, "text.parse_math": False, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none"}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
NUMBERS = re.compile(r'\b(?:d|x|y|transform|points|width|height)="[^"]*"')
DECIMALS = re.compile(r"\d+\.\d{3,}")
UNUSED = re.compile(r' id="(?:figure|axes|patch|text|line2d|xtick|ytick|matplotlib\.axis|legend|[A-Z]\w*)_\d+"')
FONT = re.compile(r"font: (?:(\d+) )?([\d.]+)px [^;\"]*")


@dataclasses.dataclass(frozen=True)
class Plot:
    """One figure. svg: without a title, which the page shows; caption: what is drawn, as text."""

    title: str
    svg: Markup
    caption: str = ""


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """A figure of so many points. To be drawn inside `style()`."""
    from matplotlib.figure import Figure
    return Figure(figsize=(width / 72, height / 72))


def style() -> Any:
    """The context in which figures are made."""
    import matplotlib
    return matplotlib.rc_context(SETTINGS)


def axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes inside margins of so many points."""
    width, height = (72 * inches for inches in figure.get_size_inches())
    return figure.add_axes((left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height))


def svg(figure: Figure, name: str, told: str) -> Markup:
    """The figure as an <svg> element. name: unlike that of every other figure of the page, as elements' ids follow from it; told: what is
    seen, for who sees nothing. The same figure gives the same text."""
    import matplotlib
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(written, format="svg", metadata=NO_METADATA)
    text = written.getvalue()
    text = text[text.index("<svg") :].strip()
    text = NUMBERS.sub(lambda found: DECIMALS.sub(lambda number: f"{float(number[0]):.2f}", found[0]), UNUSED.sub("", text))
    text = FONT.sub(lambda found: f"font-weight: {found[1] or 400}; font-size: {found[2]}px", text)
    for colour, themed in THEME.items():
        text = text.replace(colour, themed)
    head, _, rest = text.partition(">")
    head = re.sub(r' (?:width|height|xmlns[\w:]*|version)="[^"]*"', "", head)
    # matplotlib escapes the text that it writes.
    label = Markup(' role="img" aria-label="{}">').format(told)
    return Markup(head) + label + Markup(re.sub(r"\s*\n\s*", "\n", rest))


def log_scale(axis: Axes, which: str = "x") -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter
    getattr(axis, f"set_{which}scale")("log")
    line = getattr(axis, f"{which}axis")
    line.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    line.set_minor_formatter(NullFormatter())


def ticks(axis: Axes, values: Sequence[float], y: float, half: float, colour: str, width: float = 0.8) -> None:
    """A vertical tick for each value, as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path
    points = [point for value in values for point in ((value, y - half), (value, y + half))]
    if points:
        path = Path(points, [Path.MOVETO, Path.LINETO] * len(values))
        axis.add_patch(PathPatch(path, edgecolor=colour, facecolor="none", linewidth=width, alpha=0.6))


def wrapped(text: str, points: float, most: int = 3) -> list[str]:
    """Lines of small text that fit into so many points."""
    return textwrap.wrap(text.replace(",", ", "), int(points / (SMALL * 0.62)), max_lines=most, placeholder=" ...",
                         break_on_hyphens=False) or [""]


def short(text: str, points: float) -> str:
    """The text, its middle left out where it does not fit into so many points."""
    room = int(points / (SMALL * 0.6))
    return text if len(text) <= room else f"{text[: (room - 1) // 2]}…{text[-(room - 1 - (room - 1) // 2) :]}"


def microseconds(us: float) -> str:
    """`1.80 ms`, `412 us`: three figures."""
    number, unit = (us / 1e6, "s") if us >= 1e6 else (us / 1e3, "ms") if us >= 1e3 else (us, "us")
    return f"{number:.{max(0, 2 - len(str(int(number))) + 1)}f} {unit}"
