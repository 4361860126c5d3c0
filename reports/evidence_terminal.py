"""An evidence folder on a terminal: the page without its long tables. What is to be copied, commands and names, is never cut or wrapped."""
from __future__ import annotations

import re
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.measure import Measurement
from rich.table import Table

from harness.evidence_folder import EvidenceFolder
from harness.options import console as screen
from harness.options import say
from harness.verdicts import Verdict
from reports import failure
from reports.cells import UNLIMITED, WHOLE
from reports.evidence_common import AGAIN, invalid
from reports.evidence_compare import side_by_side
from reports.evidence_page import bad_records, blocks, code_word, left_out, machine_line, verdict, why

SHOWN_FAILURES = 10
NAMED = ("case", "arm", "kernel")
"""Headings of columns whose words are to be copied."""
COMMAND = re.compile(rf"(?:  \n|\n\n|\A){AGAIN}`(.*)`(?: *(?:\n|\Z))")
"""A line of the page that repeats a timing."""
FIRST_CELL = re.compile(r"(?m)^\| [^|\n]*=[^|\n]* \|")
"""Of a row that begins with a case."""


class Folding(TableElement):
    """A table whose cells are broken where there is no room, instead of cut; those that name something after a word."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                narrow = Measurement.get(console, options.update(width=UNLIMITED), part).maximum > options.max_width
                for column in part.columns:
                    column.overflow = "fold"
                    if narrow and str(column.header) in NAMED:
                        column.width = min(WHOLE, max(len(word) for cell in [column.header, *column.cells] for word in str(cell).split()))
            yield part


class Page(Markdown):
    """Markdown with such tables."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": Folding}


def show(folder: EvidenceFolder, other: EvidenceFolder | None = None) -> None:
    """Print it. other: another folder of the same name, to stand beside it."""
    for part in parts(folder, other):
        if isinstance(part, str):
            say(part)
        else:
            screen.print(part)


def parts(folder: EvidenceFolder, other: EvidenceFolder | None) -> list[str | Page]:
    """What is printed one after the other: text as it is, pages within the width."""
    colour = "bold green" if code_word(folder) == Verdict.PASSED.value else "bold red"
    found: list[str | Page] = [Page(verdict(folder), style=colour), Page(machine_line(folder).replace("`", ""), style="dim")]
    found += [piece for text in blocks(folder, short=True) for piece in pieces(text)]
    found += failures(folder)
    found += pieces(side_by_side(folder, other)) if other else []
    titles = ", ".join(left_out(folder))
    return [*found, *([f"left out here: {titles}; all of it: threearm report {folder.path} --markdown"] if titles else [])]


def pieces(text: str) -> list[str | Page]:
    """A block of the page, with the lines that repeat a timing taken out of their paragraphs. A case may be broken after its commas."""
    found: list[str | Page] = []
    spaced = FIRST_CELL.sub(lambda cell: cell[0].replace(",", ", "), text.replace("<br>", " "))
    for place, part in enumerate(COMMAND.split(spaced)):
        if part.strip():
            found.append(f"{AGAIN}{part}" if place % 2 else Page(part))
    return found


def failures(folder: EvidenceFolder) -> list[str]:
    """What did not pass, the first few, as lines."""
    bad, times = bad_records(folder), invalid(folder.pairs)
    if not bad and not times:
        return []
    lines = ["What did not pass"]
    for record, repeat in bad[:SHOWN_FAILURES]:
        lines += [f"{record.verdict.value}  {record.arm}  {record.case}", f"  {why(record)}",
                  f"  repeat: {failure.replay_line(record, repeat(record))}"]
    room = SHOWN_FAILURES - len(bad[:SHOWN_FAILURES])
    lines += [f"INVALID  {found}" for found in times[:room]]
    more = len(bad) + len(times) - SHOWN_FAILURES
    return [*lines, *([f"... and {more} more that did not pass: threearm report {folder.path} --failures"] if more > 0 else [])]
