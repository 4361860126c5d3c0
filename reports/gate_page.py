"""A gate's result as Markdown, for a pull request: everything, in the order in which somebody asks for it."""
from __future__ import annotations

import shlex
from collections.abc import Callable

from harness.comparison import Change, Rule, TimeComparison, TimeVerdict, Transition
from harness.gate_folder import STORED, GateInfo
from harness.record import Record
from harness.transitions import PASSES, RANK, WORSE, risen, was_compared
from reports import failure
from reports.cells import labels, markdown_table
from reports.gate_things import Thing, arms_in_words, case_names, facts, kernels_of, ratio_in_words, things, timed, verdict

Records = dict[tuple[str, str], Record]
"""By case and arm."""
Options = Callable[[str, Record], list[str]]
"""(base or candidate, record) -> what a replay line needs besides, as failure.replay_line takes it."""
SHOWN = 3  # cases of a thing
FULL = 20  # failures told in full; GitHub takes 65,536 characters


def markdown(transitions: list[Transition], info: GateInfo, base: Records, candidate: Records,
             options: Options = lambda side, record: []) -> str:
    """The whole page. base, candidate: the records of both sides."""
    sections = [
        f"**{verdict(transitions, info)[1]}**", sides(info), "\n".join(f"* {note}" for note in info.notes), to_look_at(transitions, info),
        *by_case(transitions), failures(transitions, info, base, candidate, options), numbers(transitions), times(transitions, info),
        not_run(transitions), provenance(info)]
    return "\n\n".join(section for section in sections if section) + "\n"


def sides(info: GateInfo) -> str:
    """Both environments side by side: what differs in rows, what is the same in a line."""
    common, differ = facts(info)
    rows = [["", *(f"`{side.what}`{' (a stored run)' if side.kind == STORED else ''}" for side in (info.base, info.candidate))]]
    if info.base.python != info.candidate.python:
        rows.append(["interpreter", info.base.python or "none", info.candidate.python or "none"])
    rows += [[key, before or "none", after or "none"] for key, (before, after) in differ.items()]
    same = "; ".join(f"{key} {value}" for key, value in common.items())
    return markdown_table(["", "base", "candidate"], rows) + (f"\n\nThe same on both sides: {same}." if same else "")


def to_look_at(transitions: list[Transition], info: GateInfo) -> str:
    """Every thing, worst first."""
    own, every = case_names(transitions), things(transitions, bool(info.options.get("bitwise")))
    rows = [[f"**{thing.title}**" if thing.title in {change.value for change in WORSE} else thing.title, thing.arms,
             _where(thing, own), thing.why] for thing in every]
    return "#### To look at, worst first\n\n" + markdown_table(
        ["what", "arms", "cases", "why (the first case; of times and numbers the worst)"], rows) if rows else ""


def _where(thing: Thing, own: dict[str, str]) -> str:
    names = [own[case] for case in dict.fromkeys([thing.shown.pairing.case, *thing.cases])]
    head = [f"{len(names)} cases:"] if len(names) > 1 else []
    return "\n".join([*head, *names[:SHOWN], *(["..."] if len(names) > SHOWN else [])])


def by_case(transitions: list[Transition]) -> list[str]:
    """A table a pair of kernels: a row a case, a column an arm, in a cell the change and the time."""
    tables = []
    for kernels in dict.fromkeys(map(kernels_of, transitions)):
        found = [each for each in transitions if kernels_of(each) == kernels]
        arms = list(dict.fromkeys((each.pairing.base, each.pairing.candidate) for each in found))
        common, own = labels(list(dict.fromkeys(each.pairing.case for each in found)))
        cells = {(each.pairing.case, each.pairing.base, each.pairing.candidate): _cell(each) for each in found}
        rows = [[name, *(cells.get((case, *arm), "") for arm in arms)] for case, name in own.items()]
        heads = [base.rpartition("/")[2] if base.rpartition("/")[2] == candidate.rpartition("/")[2] else f"{base}\n{candidate}"
                 for base, candidate in arms]
        title = kernels[0] if kernels[0] == kernels[1] else f"{kernels[0]} to {kernels[1]}"
        shared = f"\n\nEvery case: {common}" if common else ""
        tables.append(f"#### {title}\n\n{markdown_table(['case', *heads], rows)}{shared}")
    return tables


def _cell(found: Transition) -> str:
    """`bitwise same`, and under it `SAME +0.1 % [..]`."""
    text = f"**{found.change.value}**" if found.change in WORSE else found.change.value
    if not was_compared(found):
        text = "not run"
    return text if found.time is None else f"{text}\n{found.time.verdict.value} {ratio_in_words(found)}"


def failures(transitions: list[Transition], info: GateInfo, base: Records, candidate: Records, options: Options) -> str:
    """What got worse or fails on both sides, in full, with the lines that repeat both sides."""
    wrong = sorted((found for found in transitions if found.change in (*WORSE, Change.STILL_BAD)),
                   key=lambda found: -RANK.index(found.change))
    texts = []
    records = [candidate[key] for found in wrong if (key := (found.pairing.case, found.pairing.candidate)) in candidate]
    told = dict(zip(((record.case, record.arm) for record in records),
                    failure.describe_all(records, lambda record: options("candidate", record))))
    for number, found in enumerate(wrong):
        case, record = found.pairing.case, candidate.get((found.pairing.case, found.pairing.candidate))
        before = base.get((case, found.pairing.base))
        said = "" if found.change is Change.BROKE or (record and record.detail == found.detail) else found.detail
        lines = [f"{found.change.value}, in the base {before.verdict.value if before else 'no record'}{f': {said}' if said else ''}"]
        if record is None:
            lines.append(f"{arms_in_words([found])}  {case}\n  no record in the candidate")
        elif number < FULL and record.verdict in PASSES:  # what it promises is another: its checks say nothing of that
            lines.append(f"{arms_in_words([found])}  {case}\n  repeat: {failure.replay_line(record, options('candidate', record))}")
            lines += failure.describe_check(found.numbers, always=True) if found.numbers else []
        elif number < FULL:
            lines.append(told[case, record.arm])
            lines += failure.describe_check(found.numbers, always=True) if found.numbers else []
        else:
            lines.append(f"  repeat: {failure.replay_line(record, options('candidate', record))}")
        lines += _before(before, options, found.change is Change.STILL_BAD and number < FULL)
        texts.append("\n".join(lines))
    shown = f" (the first {FULL} in full)" if len(texts) > FULL else ""
    return f"#### What got worse, and what fails on both sides{shown}\n\n```\n" + "\n\n".join(texts) + "\n```" if texts else ""


def _before(record: Record | None, options: Options, in_full: bool) -> list[str]:
    """The line that repeats the base's record; in full where it was wrong, too."""
    if record is None or not in_full:
        return [f"  repeat the base: {failure.replay_line(record, options('base', record))}"] if record else []
    return ["in the base:", failure.describe(record, options("base", record))]


def numbers(transitions: list[Transition]) -> str:
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
    return "#### Numbers changed, within budget\n\n" + markdown_table(head, rows) if rows else ""


def times(transitions: list[Transition], info: GateInfo) -> str:
    """Every time with its interval, threshold and where that is from, and how much was sampled; a table a contract."""
    own = case_names(transitions)
    rows: dict[str, list[list[str]]] = {}
    for kind, group in timed(transitions).items():
        for found in group:
            time = found.time
            assert time is not None
            why = "" if kind is TimeVerdict.SAME else time.why
            rows.setdefault(f"{time.contract}, {time.cache}", []).append([
                own[found.pairing.case], arms_in_words([found]), *_medians(time), ratio_in_words(found), f"{kind.value}\n{why}".strip(),
                f"{_threshold(time.rule)}, {time.rule.floor_us:g} us\n{time.rule.source}", _sampled(time)])
    if not rows:
        reason = info.options.get("time")
        return f"#### Times\n\nNot compared: {reason}." if reason else ""
    tables = []
    for contract, each in rows.items():
        medians = [f"{side}, us\n({contract})" for side in ("base", "candidate")]
        tables.append(markdown_table(["case", "arm", *medians, "change [interval]", "verdict", "threshold, floor",
                                      "pairs of processes + confirming; samples"], each))
    return "\n\n".join(["#### Times", *tables])


def _medians(time: TimeComparison) -> list[str]:
    """Both medians, in microseconds."""
    return [f"{us:,.4g}" for us in (time.estimate.base_us, time.estimate.candidate_us)] if time.estimate else ["", ""]


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


def not_run(transitions: list[Transition]) -> str:
    """What ran on neither side, and why, each reason once."""
    groups: dict[tuple[str, str], list[Transition]] = {}
    for found in transitions:
        if not was_compared(found):
            groups.setdefault((found.pairing.candidate, found.detail), []).append(found)
    rows = [[arms_in_words(group), str(len(group)), why] for (_, why), group in groups.items()]
    return "#### Not run\n\n" + markdown_table(["arm", "cases", "why"], rows) if rows else ""


def provenance(info: GateInfo) -> str:
    """Command, version, time."""
    return (f"#### Where this comes from\n\n`{shlex.join(['threearm', *info.command[1:]])}`, threearm {info.threearm or 'unknown'}, "
            f"started {info.started}, finished {info.finished or 'not'}.")
