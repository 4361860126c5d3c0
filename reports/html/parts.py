"""What a page is made of: for each source a part with its verdict, what is wrong first, and sections in a fixed order."""
from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

from markupsafe import Markup, escape

from harness.verdicts import SHARES, Verdict

GOOD, WARN, BAD, IDLE = "good", "warn", "bad", "idle"
"""How something is coloured; it is always said in words, too."""
WORST = (GOOD, IDLE, WARN, BAD)
CODE = re.compile("`([^`]+)`")
LEVELS = {Verdict.PASSED: GOOD, Verdict.SKIPPED: IDLE, Verdict.VACUOUS: WARN}


@dataclasses.dataclass(frozen=True)
class Section:
    """One heading and what stands below it. anchor: its id."""

    anchor: str
    title: str
    body: Markup


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of what is wrong. word: the verdict or change; level: its colour; where: arms and cases; why; link: the id it leads to."""

    word: str
    level: str
    where: str
    why: str
    link: str


@dataclasses.dataclass(frozen=True)
class Part:
    """One source. anchor: the id that all of its ids begin with; kind: what it is ("run"); name: of its folder; word: its verdict in a
    word; verdict: in a line, which has that word; notes: what a reader must know; findings: what is wrong, worst first, of `found` in
    all."""

    anchor: str
    kind: str
    name: str
    level: str
    word: str
    verdict: str
    notes: list[str]
    findings: list[Finding]
    found: int
    sections: list[Section]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a matrix: its lines, the first in bold; where a click leads."""

    level: str
    lines: list[str]
    link: str = ""


def level(verdict: Verdict) -> str:
    """A verdict's colour."""
    return LEVELS.get(verdict, BAD)


@functools.cache
def environment() -> Any:
    """Jinja2 with the templates of this folder; everything that is no Markup is escaped."""
    import jinja2
    made = jinja2.Environment(loader=jinja2.PackageLoader("reports.html", "."), autoescape=True, undefined=jinja2.StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    made.filters["coded"] = coded
    return made


def coded(text: str) -> Markup:
    """Text with what stands in backticks, as Markdown has it, as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))


def render(template: str, **values: Any) -> Markup:
    """A template's text. Its values are escaped."""
    return Markup(environment().get_template(f"{template}.html.jinja").render(**values))


def section(anchor: str, title: str, template: str, **values: Any) -> Section:
    """A section from a template."""
    return Section(anchor, title, render(template, **values))


def table(head: list[str], rows: list[list[str]], caption: str = "") -> Markup:
    """A plain table; line breaks in cells are kept."""
    return render("table", head=head, rows=rows, caption=caption)


def steps() -> list[tuple[int, str]]:
    """The legend of pictures: (level, share)."""
    names = [f"up to {100 * share:.3g} %" for share in SHARES[:7]]
    return list(enumerate([*names, "more", "all"], 1))
