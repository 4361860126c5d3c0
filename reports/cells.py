"""What tables are made of: short names of cases, the text of a cell, Markdown."""
from __future__ import annotations

import math

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from cases import FAMILIES, family_of
from harness.verdicts import Verdict

WHOLE = 34
"""A key=value of up to so many characters is never broken in a table."""
UNLIMITED = 10_000
COLOURS = {Verdict.PASSED: "green", Verdict.SKIPPED: "dim", Verdict.VACUOUS: "yellow"}


def short(case: str) -> str:
    """A case without its family."""
    return case.partition(":")[2] or "(all defaults)"


def labels(cases: list[str]) -> tuple[str, dict[str, str]]:
    """What all cases share, and for each case the rest (its defaults, where it has none). Of one case, everything is its own.

    The cases are of one family."""
    keys = {case: [part for part in case.partition(":")[2].split(",") if part] for case in cases}
    shared = set.intersection(*map(set, keys.values())) if len(cases) > 1 else set()
    common = ",".join(part for part in keys[cases[0]] if part in shared) if cases else ""
    own = {case: [part for part in parts if part not in shared] for case, parts in keys.items()}
    differing = list(dict.fromkeys(part.partition("=")[0] for parts in own.values() for part in parts))
    defaults = FAMILIES[family_of(cases[0])]() if differing else None
    plain = ",".join(f"{key}={getattr(defaults, key)}" for key in differing) or "(defaults)"
    return common, {case: ",".join(parts) or plain for case, parts in own.items()}


def names(cases: list[str]) -> dict[str, str]:
    """The label of each case among those of its family."""
    families = dict.fromkeys(map(family_of, cases))
    return {case: name for family in families
            for case, name in labels([case for case in cases if family_of(case) == family])[1].items()}


def missing(value: object) -> bool:
    """Whether a frame's cell is empty."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def cell(row: pd.Series, between: str = " ") -> str:
    """One arm's cell: verdict, where there is a time the median with its quartiles in milliseconds, and how rows came to their
    result where not all did by one scan. between: stands between median and quartiles."""
    text = str(row["verdict"])
    if not missing(row["median"]):
        text += f"\n{row['median'] / 1e3:.4g}{between}[{row['low'] / 1e3:.4g} {row['high'] / 1e3:.4g}]"
    if not missing(row["derive"]) and row["derive"]:
        text += f"\n+{row['derive'] / 1e3:.3g} derive"
    return text + (f"\n{row['ways']}" if row["ways"] else "")


def margin_text(margins: list[float]) -> str:
    """The largest margin; 1e30 stands for NaN or infinity where a number is expected."""
    known = [margin for margin in margins if not missing(margin)]
    if not known:
        return ""
    return "inf" if max(known) >= 1e30 else f"{max(known):.2g}"


def ratio(above: pd.Series, below: pd.Series) -> float | None:
    """Median over median; None unless both arms passed, were timed under one contract and took more than nothing."""
    passed = {above["verdict"], below["verdict"]} == {Verdict.PASSED.value}
    if not passed or missing(above["median"]) or missing(below["median"]) or above["contract"] != below["contract"]:
        return None
    return float(above["median"] / below["median"]) if below["median"] > 0 else None


class CaseTable:
    """A table whose first column holds cases: it gets what the others leave, and at least what the longest key=value needs (up to
    WHOLE characters). Only then do the others wrap; nothing is cut off.

    title; head: the other columns' headings; rows: a case with its keys joined by commas, and the other cells.
    """

    def __init__(self, title: str, head: list[str], rows: list[list[str | Text]]) -> None:
        self.table = Table(*(Column(name, overflow="fold") for name in ["case", *head]),
                           title=Text(title), title_justify="left", title_style="bold")
        spaced = [str(row[0]).replace(",", ", ") for row in rows]
        for case, row in zip(spaced, rows):
            self.table.add_row(case, *row[1:])
        words = [len(word) for case in spaced for word in case.split()]
        self.least, self.most = min(max(words, default=0), WHOLE), max(map(len, ["case", *spaced]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = self.table.columns[0]
        first.width = 0
        others = Measurement.get(console, options.update(width=UNLIMITED), self.table).maximum
        first.width = max(self.least, min(self.most, options.max_width - others))
        yield self.table


def coloured(text: str) -> Text:
    """A cell with its verdict in colour."""
    verdict = text.partition("\n")[0]
    colour = COLOURS.get(Verdict(verdict), "bold red") if verdict else ""
    rendered = Text(text)
    rendered.stylize(colour, 0, len(verdict))
    return rendered


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; line breaks in cells become <br>."""
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(text.replace("\n", "<br>").replace("|", "\\|") for text in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])
