"""A gate's result on one screen: verdict, environments, counts, what to look at worst first, times, where the rest is.

The whole of it is Markdown: reports/gate_page.py.
"""
from __future__ import annotations

import collections
import re
import textwrap
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from harness.comparison import Change, TimeVerdict, Transition
from harness.gate_folder import STORED, GateInfo
from harness.stats import geometric_mean, percent
from harness.transitions import RANK, WORSE, in_words, was_compared
from reports.gate_page import markdown, untold, wrong_ones
from reports.gate_things import (
    HINT,
    LOUD,
    Thing,
    arms_in_words,
    case_names,
    colour,
    contracts,
    facts,
    ratio_in_words,
    ratio_of,
    stopped,
    things,
    thresholds,
    throttled,
    timed,
    unversioned,
    verdict,
    why_untimed,
)

__all__ = ["markdown", "terminal"]

SCREEN = 40  # lines
MOST = 15  # things to look at
NOTES = 5
TITLE = 19  # characters of the longest title and a space
INDENT = " " * 4
ON_TOP = ("gpu", "cpu", "driver", "torch")


def terminal(transitions: list[Transition], info: GateInfo, path: str = "", again: bool = False) -> Screen:
    """What fits on a screen. path: the gate's folder; again: it is a stored gate."""
    return Screen(transitions, info, path, again)


class Screen:
    """Lines made for the width that they are shown at; what does not fit in a line ends in an ellipsis and is whole in summary.md."""

    def __init__(self, transitions: list[Transition], info: GateInfo, path: str, again: bool) -> None:
        self.transitions, self.info, self.path, self.again = transitions, info, path, again
        self.names = case_names(transitions)
        self.page = f"{path}/summary.md" if path and Path(path, "summary.md").is_file() else f"threearm report {path} --markdown"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> list[Text]:
        """The screen, at most `width` characters wide."""
        code, said = verdict(self.transitions, self.info, self.again)
        bitwise = bool(self.info.options.get("bitwise"))
        head = [Text(line, colour(code)) for line in wrapped(said, width)]
        notes = self.info.notes[:NOTES] + ([f"... and {left:,} more notes"] if (left := len(self.info.notes) - NOTES) > 0 else [])
        head += [Text(cut(line, width), "dim") for line in [*environments(self.info), *notes]]
        head += [Text(line) for line in wrapped(counts(self.transitions, bitwise), width)]
        tail = [*self.times(width), *self.footer(code, width)]
        return [*head, *self.to_look_at(width, SCREEN - len(head) - len(tail)), *tail]

    def to_look_at(self, width: int, room: int) -> list[Text]:
        """The worst things, a line each, two where a line is short, in at most `room` lines. Where they do not fit, the least of them
        lose their second line first."""
        every = things(self.transitions, bool(self.info.options.get("bitwise")))
        if not every:
            return []
        blocks = [self.told(thing, width) for thing in every[:MOST]]
        most = max(2, room - 2)  # the heading, and what is left out
        for place in reversed(range(len(blocks))):
            if sum(map(len, blocks)) > most:
                blocks[place] = blocks[place][:1]
        shown: list[list[Text]] = []
        for block in blocks:
            if sum(map(len, [*shown, block])) > most:
                break
            shown.append(block)
        left = len(every) - len(shown)
        more = [Text(f"... and {left:,} more", "dim")] if left else []
        return [Text("to look at, worst first:"), *(line for block in shown for line in block), *more]

    def told(self, thing: Thing, width: int) -> list[Text]:
        """One thing: what, whose, where, and why."""
        name, many = self.names[thing.shown.pairing.case], len(thing.cases)
        where = f"{many} cases, {'worst' if thing.ranked else 'first'} {{}}" if many > 1 else "{}"
        style = "red" if thing.title in [change.value for change in WORSE] else "yellow"
        head = f"{thing.title:{TITLE}}{thing.arms}  "
        whole = f"{head}{where.format(name)}  {thing.why}"
        if len(whole) <= width:
            return [styled(whole, thing.title, style)]
        first = head + where.format(cut(name, max(12, width - len(head) - len(where) + 2)))
        return [styled(cut(first, width), thing.title, style), Text(cut(INDENT + thing.why, width))]

    def times(self, width: int) -> list[Text]:
        """A line a time verdict: how many, their mean, and the slowest with its interval."""
        by_verdict = timed(self.transitions)
        if not by_verdict:
            return [Text(cut(f"times: not compared: {why_untimed(self.info) or 'not asked for'}", width))]
        every = [found for group in by_verdict.values() for found in group]
        head = f"times ({contracts(every)}): {len(every):,}, {mean_of(every)}"
        lines = [Text(cut(line, width)) for line in joined([head, throttled(every), thresholds(every)], width)]
        for kind, group in by_verdict.items():
            name = f"{arms_in_words(group[:1])}  {self.names[group[0].pairing.case]}"
            mean = f"{mean_of(group)}, slowest " if len(group) > 1 else ""
            line = f"  {kind.value:10} {len(group):4,}  {mean}{ratio_in_words(group[0])}  {name}"
            lines.append(styled(cut(line, width), kind.value, "red" if kind.value in LOUD else ""))
            if kind is TimeVerdict.UNRESOLVED:
                lines += [Text(cut(INDENT + told.strip(), width)) for told in joined([stopped(group), HINT], width - len(INDENT))]
        return lines

    def footer(self, code: int, width: int) -> list[Text]:
        """Where the rest is; last, what shows all that got worse."""
        if not self.path:
            return [Text(f"exit {code}")]
        text = f"exit {code}; all of it: {self.page}; again: threearm report {self.path}"
        lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
        told = wrong_ones(self.transitions, self.info) or untold(self.transitions)
        return [Text(line) for line in [*lines, *([f"failures in full: threearm report {self.path} --failures"] if told and code else [])]]


def cut(text: str, width: int) -> str:
    """At most so many characters, the last an ellipsis where some are missing."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def joined(parts: list[str], width: int) -> list[str]:
    """Parts, those that are "" aside, in as few lines as they fit into."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f"; {part}"
        else:
            lines.append(f"  {part}" if lines else part)
    return lines


def styled(line: str, word: str, style: str) -> Text:
    """A line with its first `word` in colour."""
    text = Text(line)
    at = line.find(word)
    if style and at >= 0:
        text.stylize(style, at, at + len(word))
    return text


def mean_of(group: list[Transition]) -> str:
    """The geometric mean of those that have a ratio."""
    ratios = [ratio_of(found) for found in group if ratio_of(found)]
    return f"geomean {percent(geometric_mean(ratios))}" if ratios else "no ratio"


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many characters, which break at no blank behind a number."""
    kept = re.sub(r"(?<=[\d(]) | (?=[\d%])(?<!, )(?<!: )", "\0", text)
    return [line.replace("\0", " ") for line in textwrap.wrap(kept, width, subsequent_indent=INDENT)]


def counts(transitions: list[Transition], bitwise: bool) -> str:
    """How often each change was found that the verdict does not tell, worst first; what ran on neither side apart. "" of none."""
    found = collections.Counter(each.change for each in transitions if was_compared(each))
    told = [change for change in found if change in WORSE or (bitwise and change is Change.NUMBERS)]
    others = [in_words(change, found[change]) for change in reversed(RANK) if found[change] and change not in told]
    idle = sum(not was_compared(each) for each in transitions)
    others += [f"{idle:,} not run on either side"] if idle else []
    return f"{'the others' if told else 'in all'}: {', '.join(others)}" if others else ""


def environments(info: GateInfo) -> list[str]:
    """The machine, and a line a side: what it is, and what it has that the other has not."""
    common, differ = facts(info)
    lines = ["  ".join(f"{key} {common[key]}" for key in ON_TOP if key in common)]
    for place, (name, side) in enumerate((("base", info.base), ("candidate", info.candidate))):
        own = [f"{key} {values[place] or 'none'}" for key, values in differ.items()]
        stored = ", a stored run" if side.kind == STORED else ""
        unknown = [text] if (text := unversioned(info)) else []
        lines.append(f"{name:10} {side.what}{stored}: {', '.join([*own, *unknown]) or 'same versions'}")
    return [line for line in lines if line]
