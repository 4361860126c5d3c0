"""What a GitHub job shows: a step summary (Markdown), and annotations (workflow commands on stdout).

Limits and escapes are those of https://docs.github.com/actions/reference/workflow-commands-for-github-actions: a step's summary holds
1 MiB, and ten errors and ten warnings of a step are shown.
"""
from __future__ import annotations

from collections.abc import Callable

from harness.comparison import Change, Transition
from harness.gate_folder import GateInfo
from harness.record import Record
from harness.transitions import UNRESOLVED
from harness.verdicts import SEVERITY, Verdict
from reports import failure
from reports.frame import reason
from reports.gate_things import LOUD, case_names, things, verdict

LARGEST_SUMMARY = 1024 * 1024  # bytes of a step's summary
SHOWN = 10  # annotations of a kind that GitHub shows of a step
LONGEST = 1000  # characters of an annotation
CUT = "\n\n... cut: a step summary holds 1 MiB. All of it: `{again}`\n"


def summary(page: str, again: str, room: int = LARGEST_SUMMARY) -> str:
    """A Markdown page cut to `room` bytes at the end of a line; `again`: the command that shows all of it. A code block that is cut open is
    closed. "" where there is no room for a word."""
    if len(page.encode()) <= room:
        return page
    told = CUT.format(again=again)
    left = room - len(told.encode()) - len("\n```")
    if left <= 0:
        return ""
    lines = page.encode()[:left].decode(errors="ignore").split("\n")[:-1]
    fence = "\n```" if sum(line.startswith("```") for line in lines) % 2 else ""
    return "\n".join(lines) + fence + told


def of_records(records: list[Record], repeat: Callable[[Record], list[str]], code: int = 0, said: str = "",
               finished: bool = True) -> list[str]:
    """Annotations of a run: an error for what is wrong, a warning for what is VACUOUS, the most serious verdict first. code, said: the
    exit code and its reason, which comes first where no record tells it (nothing ran, the run has not finished)."""
    bad = sorted((record for record in records if record.verdict not in failure.HARMLESS), key=lambda r: -SEVERITY.index(r.verdict))
    errors: list[tuple[str, str]] = []
    warnings: list[tuple[str, str]] = []
    for record in bad:
        repeated = f"repeat: {failure.replay_line(record, repeat(record))}"
        told = (f"{record.verdict.value} {record.arm}", f"{record.case}: {reason(record)}\n{repeated}")
        (warnings if record.verdict is Verdict.VACUOUS else errors).append(told)
    if code and (not bad or not finished):
        (warnings if code == UNRESOLVED else errors).insert(0, ("threearm", said))
    return [*limited("error", errors), *limited("warning", warnings)]


def of_transitions(transitions: list[Transition], info: GateInfo, again: bool = False) -> list[str]:
    """Annotations of a gate: an error for everything that makes it fail, a warning for what is left to look at, worst first. Where the exit
    code is not 0 for another reason than these (nothing was compared, it was cut short), that reason is the first. again: a stored one."""
    own, bitwise = case_names(transitions), bool(info.options.get("bitwise"))
    code, said = verdict(transitions, info, again)
    errors: list[tuple[str, str]] = []
    warnings: list[tuple[str, str]] = []
    for thing in things(transitions, bitwise):
        loud = thing.title in LOUD or (bitwise and thing.title == Change.NUMBERS.value)
        where = own[thing.shown.pairing.case] + (f" and {len(thing.cases) - 1:,} more cases" if len(thing.cases) > 1 else "")
        (errors if loud else warnings).append((f"{thing.title} {thing.arms}", f"{where}: {thing.why}"))
    if code and (not errors or info.interrupted or info.void or not info.finished):
        (warnings if code == UNRESOLVED else errors).insert(0, ("threearm gate", said))
    return [*limited("error", errors), *limited("warning", warnings)]


def limited(kind: str, texts: list[tuple[str, str]]) -> list[str]:
    """At most SHOWN annotations of (title, text); where there are more, the last says how many."""
    if len(texts) > SHOWN:
        left = len(texts) - SHOWN + 1
        texts = [*texts[: SHOWN - 1], (f"{left:,} more", "the job's summary has them all")]
    return [annotation(kind, title, text) for title, text in texts]


def annotation(kind: str, title: str, text: str) -> str:
    """`::error title=...::...` in one line."""
    short = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return f"::{kind} title={_escaped(title, ':,')}::{_escaped(short)}"


def _escaped(text: str, more: str = "") -> str:
    """As GitHub reads it back. The per cent sign first, since it is what the others become."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return "".join(character for character in text if character.isprintable())
