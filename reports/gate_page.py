"""A gate's result as Markdown, for a pull request: everything, in the order in which somebody asks for it."""
from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable

from harness.comparison import Change, Rule, TimeComparison, TimeVerdict, Transition
from harness.gate_folder import STORED, GateInfo
from harness.record import Record
from harness.transitions import PASSES, RANK, WORSE, is_void, risen, was_compared, was_given_up
from reports import failure
from reports.cells import labels, markdown_table
from reports.gate_things import (
    LOUD,
    Thing,
    arms_in_words,
    case_names,
    facts,
    kernels_of,
    ratio_in_words,
    things,
    timed,
    unversioned,
    verdict,
    why_untimed,
)
from reports.repeating import gate_again

Records = dict[tuple[str, str], Record]
"""By case and arm."""
Options = Callable[[str, Record], list[str]]
"""(base or candidate, record) -> what a replay line needs besides, as failure.replay_line takes it."""
SHOWN = 3  # cases of a thing
NOTES = 20
LONGEST = 60_000  # characters of the page; GitHub takes 65,536
ALL = 1 << 30


@dataclasses.dataclass(frozen=True)
class Room:
    """How much a page tells: so many failures in full, so many at all, so many rows of a table."""

    full: int = ALL
    listed: int = ALL
    rows: int = ALL


ROOMS = (Room(20), Room(10), Room(5), Room(2), Room(2, 60), Room(2, 20, 300), Room(2, 20, 100), Room(2, 10, 30), Room(1, 5, 10),
         Room(0, 2, 3))
"""Tried in this order until a page is short enough."""


def markdown(transitions: list[Transition], info: GateInfo, base: Records, candidate: Records,
             options: Options = lambda side, record: [], again: bool = False) -> str:
    """The whole page, shortened until it has no more characters than LONGEST. base, candidate: the records of both sides; again: it is of
    a stored gate."""
    text = ""
    for room in ROOMS:
        short = [f"shortened to {LONGEST:,} characters: a table has its first {room.rows} rows; all of it is in comparisons.jsonl"]
        notes = [*(short if room.rows < ALL else []), *info.notes]
        sections = [
            f"**{verdict(transitions, info, again)[1]}**", sides(info), "\n".join(f"* {note}" for note in notes[:NOTES]),
            to_look_at(transitions, info, room), *by_case(transitions, room), failures(transitions, info, base, candidate, options, room),
            numbers(transitions, room), times(transitions, info, room), not_run(transitions, room), provenance(info)]
        text = "\n\n".join(section for section in sections if section) + "\n"
        if len(text) <= LONGEST:
            break
    return text


def sides(info: GateInfo) -> str:
    """Both environments side by side: what differs in rows, what is the same in a line."""
    common, differ = facts(info)
    rows = [["", *(f"`{side.what}`{' (a stored run)' if side.kind == STORED else ''}" for side in (info.base, info.candidate))]]
    if info.base.python != info.candidate.python:
        rows.append(["interpreter", info.base.python or "none", info.candidate.python or "none"])
    rows += [[key, before or "none", after or "none"] for key, (before, after) in differ.items()]
    same = "; ".join(f"{key} {value}" for key, value in common.items())
    unknown = unversioned(info)
    told = [f"The same on both sides: {same}." if same else "", f"{unknown[0].upper()}{unknown[1:]}." if unknown else ""]
    return "\n\n".join([markdown_table(["", "base", "candidate"], rows), " ".join(filter(None, told))]).rstrip()


def to_look_at(transitions: list[Transition], info: GateInfo, room: Room) -> str:
    """Every thing, worst first."""
    own, every = case_names(transitions), things(transitions, bool(info.options.get("bitwise")))
    rows = [[loud(thing.title), thing.arms, _where(thing, own), thing.why] for thing in every[:room.rows]]
    return "#### To look at, worst first\n\n" + markdown_table(
        ["what", "arms", "cases", "why (the first case; of times and numbers the worst)"], rows) if rows else ""


def loud(word: str) -> str:
    """In bold, if it makes the gate fail."""
    return f"**{word}**" if word in LOUD else word


def _where(thing: Thing, own: dict[str, str]) -> str:
    names = [own[case] for case in dict.fromkeys([thing.shown.pairing.case, *thing.cases])]
    head = [f"{len(names)} cases:"] if len(names) > 1 else []
    return "\n".join([*head, *names[:SHOWN], *(["..."] if len(names) > SHOWN else [])])


def by_case(transitions: list[Transition], room: Room) -> list[str]:
    """A table a pair of kernels: a row a case, a column an arm, in a cell the change and the time. Where there is no room for all, those
    that make the gate fail come first."""
    tables = []
    for kernels in dict.fromkeys(map(kernels_of, transitions)):
        found = [each for each in transitions if kernels_of(each) == kernels]
        arms = list(dict.fromkeys((each.pairing.base, each.pairing.candidate) for each in found))
        common, own = labels(list(dict.fromkeys(each.pairing.case for each in found)))
        cells = {(each.pairing.case, each.pairing.base, each.pairing.candidate): _cell(each) for each in found}
        rows = [[name, *(cells.get((case, *arm), "") for arm in arms)] for case, name in own.items()]
        if len(rows) > room.rows:
            rows = sorted(rows, key=lambda row: not any("**" in text for text in row))[:room.rows]
        heads = [base.rpartition("/")[2] if base.rpartition("/")[2] == candidate.rpartition("/")[2] else f"{base}\n{candidate}"
                 for base, candidate in arms]
        title = kernels[0] if kernels[0] == kernels[1] else f"{kernels[0]} to {kernels[1]}"
        shared = f"\n\nEvery case: {common}" if common else ""
        tables.append(f"#### {title}\n\n{markdown_table(['case', *heads], rows)}{shared}")
    return tables


def _cell(found: Transition) -> str:
    """`bitwise same`, and under it `SAME +0.1 % [..]`."""
    text = loud(found.change.value) + (" (given up)" if was_given_up(found) else "")
    if not was_compared(found):
        text = "not run"
    return text if found.time is None else f"{text}\n{loud(found.time.verdict.value)} {ratio_in_words(found)}"


def failures(transitions: list[Transition], info: GateInfo, base: Records, candidate: Records, options: Options, room: Room) -> str:
    """What got worse or fails on both sides, as a section: so much of it as there is room for."""
    texts = failure_texts(transitions, info, base, candidate, options, room.full)
    if not texts:
        return ""
    shown = f" (the first {room.full} in full)" if len(texts) > room.full else ""
    if len(texts) > room.listed:
        shown = f" (the first {room.full} of {len(texts):,} in full, {room.listed} listed; all: threearm report GATE --failures)"
    return f"#### What got worse, and what fails on both sides{shown}\n\n```\n" + "\n\n".join(texts[:room.listed]) + "\n```"


def failure_texts(transitions: list[Transition], info: GateInfo, base: Records, candidate: Records, options: Options,
                  full: int = ALL) -> list[str]:
    """What got worse or fails on both sides, worst first, with the lines that repeat both sides; the first `full` with all that the checks
    found."""
    texts, wrong = [], wrong_ones(transitions, info)
    records = [candidate[key] for found in wrong[:full] if (key := (found.pairing.case, found.pairing.candidate)) in candidate]
    told = dict(zip(((record.case, record.arm) for record in records),
                    failure.describe_all(records, lambda record: options("candidate", record))))
    for number, found in enumerate(wrong):
        case, record = found.pairing.case, candidate.get((found.pairing.case, found.pairing.candidate))
        before = base.get((case, found.pairing.base))
        said = "" if found.change is Change.BROKE or (record and record.detail == found.detail) else found.detail
        lines = [f"{found.change.value}, in the base {before.verdict.value if before else 'no record'}{f': {said}' if said else ''}"]
        if record is None:
            lines.append(f"{arms_in_words([found])}  {case}\n  no record in the candidate")
        elif number < full and record.verdict in PASSES:  # what it promises is another: its checks say nothing of that
            lines.append(f"{arms_in_words([found])}  {case}\n  repeat: {failure.replay_line(record, options('candidate', record))}")
            lines += failure.describe_check(found.numbers, always=True) if found.numbers else []
        elif number < full:
            lines.append(told[case, record.arm])
            lines += failure.describe_check(found.numbers, always=True) if found.numbers else []
        else:
            lines.append(f"{arms_in_words([found])}  {case}\n  repeat: {failure.replay_line(record, options('candidate', record))}")
        lines += _before(before, options, found.change is Change.STILL_BAD and number < full)
        texts.append("\n".join(lines))
    return texts


def untold(transitions: list[Transition]) -> list[Transition]:
    """What takes a gate from exit 0 and is nothing wrong: a time that is INVALID, SLOWER or UNRESOLVED, and what could not be compared.
    The most telling first."""
    found = timed(transitions)
    times_of = [each for kind in (TimeVerdict.INVALID, TimeVerdict.SLOWER, TimeVerdict.UNRESOLVED) for each in found.get(kind, [])]
    unknown = [each for each in transitions if each.change is Change.UNKNOWN and (was_compared(each) or is_void(each))]
    return [*times_of, *(each for each in unknown if each not in times_of)]


def untold_texts(transitions: list[Transition], info: GateInfo) -> list[str]:
    """Each of these in full: what, its numbers, why, and the line that compares it again."""
    texts = []
    for found in untold(transitions):
        time, arms = found.time, arms_in_words([found])
        change = f"{found.change.value}: {found.detail}" if found.detail else found.change.value
        lines = [f"{time.verdict.value if time else found.change.value}  {arms}  {found.pairing.case}"]
        if time:
            medians = " -> ".join(f"{us} us" for us in _medians(time) if us)
            lines += [f"  {time.why}", f"  {f'medians {medians}, ' if medians else ''}contract {time.contract}, {time.cache}"]
            lines += [f"  threshold {_threshold(time.rule)}, {time.rule.floor_us:g} us, {time.rule.source}",
                      f"  pairs of processes + confirming; samples: {_sampled(time)}".replace("\n", "; ")]
        texts.append("\n".join([*lines, f"  outputs: {change}", f"  repeat: {gate_again(info, found.pairing)}"]))
    return texts


def wrong_ones(transitions: list[Transition], info: GateInfo) -> list[Transition]:
    """What got worse or fails on both sides, worst first."""
    bitwise = [Change.NUMBERS] if info.options.get("bitwise") else []
    return sorted((found for found in transitions if found.change in (*WORSE, Change.STILL_BAD, *bitwise)),
                  key=lambda found: -RANK.index(found.change))


def _before(record: Record | None, options: Options, in_full: bool) -> list[str]:
    """The line that repeats the base's record; in full where it was wrong, too."""
    if record is None or not in_full:
        return [f"  repeat the base: {failure.replay_line(record, options('base', record))}"] if record else []
    return ["in the base:", failure.describe(record, options("base", record))]


def numbers(transitions: list[Transition], room: Room) -> str:
    """Where both sides pass with other bits: what differs, by how many ULP, where, and the margins before and after."""
    own, rows = case_names(transitions), []
    for found in transitions:
        if found.change is Change.NUMBERS:
            check = found.numbers
            ulp = ", ".join(f"{step}: {count:,}" for step, count in check.ulp.items()) if check else ""
            margins = "\n".join(f"{output} {before:.2g} -> {failure.shown(found.margins_after[output])}"
                                for output, before in found.margins_before.items() if output in found.margins_after)
            rows.append([own[found.pairing.case], arms_in_words([found]), found.detail, ulp, "\n".join(check.where) if check else "",
                         f"**{margins}**" if risen(found) and "\n" not in margins else margins + ("\n**risen**" if risen(found) else "")])
    head = ["case", "arm", "what", "ULP apart", "where", "margin (1 fails), base -> candidate"]
    return "#### Numbers changed, within budget\n\n" + markdown_table(head, rows[:room.rows]) if rows else ""


def times(transitions: list[Transition], info: GateInfo, room: Room) -> str:
    """Every time with its interval, threshold and where that is from, and how much was sampled; a table a contract."""
    own = case_names(transitions)
    rows: dict[str, list[list[str]]] = {}
    for kind, group in timed(transitions).items():
        for found in group:
            time = found.time
            assert time is not None
            why = "" if kind is TimeVerdict.SAME else time.why
            rows.setdefault(f"{time.contract}, {time.cache}", []).append([
                own[found.pairing.case], arms_in_words([found]), *_medians(time), ratio_in_words(found),
                f"{loud(kind.value)}\n{why}".strip(),
                f"{_threshold(time.rule)}, {time.rule.floor_us:g} us\n{time.rule.source}", _sampled(time)])
    if not rows:
        reason = why_untimed(info)
        return f"#### Times\n\nNot compared: {reason}." if reason else ""
    tables = []
    for contract, each in rows.items():
        medians = [f"{side}, median us\n({contract})" for side in ("base", "candidate")]
        tables.append(markdown_table(["case", "arm", *medians, "change of pairs of bursts [interval]", "verdict", "threshold, floor",
                                      "pairs of processes + confirming; samples"], each[:room.rows]))
    return "\n\n".join(["#### Times", *tables])


def _medians(time: TimeComparison) -> list[str]:
    """Both medians, in microseconds."""
    medians = (time.estimate.base_us, time.estimate.candidate_us) if time.estimate else ()
    return [f"{us:,.0f}" if us >= 1000 else f"{us:.4g}" for us in medians] or ["", ""]


def _threshold(rule: Rule) -> str:
    """What a change must be to be one; and what may be called none, where that is less."""
    strict = rule.for_same().threshold
    return f"{100 * rule.threshold:.3g} %" + (f" (SAME within {100 * strict:.3g} %)" if strict < rule.threshold else "")


def _sampled(time: TimeComparison) -> str:
    """How much is behind a time, and what speaks against it."""
    unclean = sum(bool(each.unclean) for rounds in [*time.processes, *time.confirming] for each in rounds)
    throttled = f", {time.throttled:,} throttled" if time.throttled else ""
    parts = [f"{len(time.processes)} + {len(time.confirming)}; {time.samples:,}{throttled}"]
    parts += [f"{unclean} rounds not counted"] if unclean else []
    parts += [time.stopped] if time.stopped and "narrow" not in time.stopped else []
    return "\n".join([*parts, *time.notes])


def not_run(transitions: list[Transition], room: Room) -> str:
    """What ran on neither side, and why, each reason once."""
    groups: dict[tuple[str, str], list[Transition]] = {}
    for found in transitions:
        if not was_compared(found):
            groups.setdefault((found.pairing.candidate, found.detail), []).append(found)
    rows = [[arms_in_words(group), str(len(group)), why] for (_, why), group in list(groups.items())[:room.rows]]
    return "#### Not run\n\n" + markdown_table(["arm", "cases", "why"], rows) if rows else ""


def provenance(info: GateInfo) -> str:
    """Command, version, time."""
    return (f"#### Where this comes from\n\n`{shlex.join(['threearm', *info.command[1:]])}`, threearm {info.threearm or 'unknown'}, "
            f"started {info.started}, finished {info.finished or 'not'}.")
