"""How near passing checks came to failing: a strip of every margin (error over budget) against 1.0, by check and output."""
from __future__ import annotations

from harness.record import Record
from harness.verdicts import Verdict
from reports.html import figures
from reports.html.figures import LINE, Plot

LEAST = 1e-6
"""Smaller margins are drawn here."""
LABEL, NUMBER = 104.0, 58.0
WIDE = 40.0
"""How far a check's name may reach into the plot, where it has a line of its own."""


def of_checks(records: list[Record]) -> dict[str, dict[tuple[str, str], list[float]]]:
    """Margins of passing checks, by kernel, then by (check, output), as they come."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for record in records:
        for check in record.checks:
            if check.verdict is Verdict.PASSED:
                for output, margin in check.margins.items():
                    found.setdefault(record.kernel, {}).setdefault((check.name, output), []).append(margin)
    return found


def plots(records: list[Record], name: str) -> list[Plot]:
    """A plot a kernel. name: what its ids begin with."""
    return [_plot(kernel, rows, f"{name}-margins-{number}") for number, (kernel, rows) in enumerate(of_checks(records).items())]


def _plot(kernel: str, rows: dict[tuple[str, str], list[float]], name: str) -> Plot:
    checks = list(dict.fromkeys(check for check, _ in rows))
    lines: list[tuple[str, list[float] | None]] = []
    for check in checks:
        lines.append((check, None))
        lines += [(output, margins) for (of, output), margins in rows.items() if of == check]
    least = min((margin for margins in rows.values() for margin in margins if margin > LEAST), default=0.1)
    low = max(LEAST, min(10.0 ** -2, least / 1.5))
    with figures.style():
        figure = figures.new_figure(LINE * len(lines) + 42)
        axis = figures.axes(figure, LABEL, NUMBER, 14, 28)
        figures.log_scale(axis)
        axis.set(xlim=(low, 1.6), ylim=(len(lines) - 0.4, -0.6), yticks=[], xlabel="error / budget")
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x")
        axis.axvline(1.0, color=figures.BAD, linewidth=1.2)
        axis.text(1.0, -0.75, "1 fails", color=figures.BAD, ha="center", va="bottom", fontsize=figures.SMALL)
        for y, (label, margins) in enumerate(lines):
            left, right = axis.get_yaxis_transform(), axis.get_yaxis_transform()
            inside = 0 if margins is None else 8
            room = LABEL + (WIDE if margins is None else 0.0) - inside - 4
            axis.text(-(LABEL - inside) / (figures.WIDTH - LABEL - NUMBER), y, figures.short(label, room), transform=left, va="center",
                      fontsize=figures.SMALL, fontweight=700 if margins is None else 400)
            if margins is not None:
                worst = max(margins)
                colour = figures.WARN if worst > 0.5 else figures.SERIES[0]
                figures.ticks(axis, [max(low, margin) for margin in margins], y, 0.33, colour)
                axis.text(1.03, y, f"{worst:.2g} of {len(margins):,}", transform=right, va="center", fontsize=figures.SMALL,
                          fontweight=700 if worst > 0.5 else 400)
        told = "; ".join(f"{check} {output} at most {max(margins):.2g}" for (check, output), margins in rows.items())
        return Plot(kernel, figures.svg(figure, name, f"margins of {kernel}: {told}"),
                    "A tick for every passing check; right: the largest, of how many. Smaller ones than the axis has are at its left end.")
