"""A gate as a part of a page: what changed, what got worse with pictures, and the intervals of times."""
from __future__ import annotations

from harness.comparison import Change, TimeVerdict, Transition
from harness.gate_folder import GateFolder
from harness.record import Record
from harness.transitions import SLOWER, WORSE, WRONG, was_compared
from harness.verdicts import Verdict
from reports import failure, repeating
from reports.cells import labels, names
from reports.gate_page import failure_texts, wrong_ones
from reports.gate_things import LOUD, Thing, arms_in_words, contracts, kernels_of, ratio_in_words, things, timed, verdict, why_untimed
from reports.html import machine, records
from reports.html.parts import BAD, GOOD, IDLE, WARN, Cell, Finding, Part, Section, render, section, steps, table
from reports.html.plots_groups import Interval, forest
from reports.html.records import LONGEST, Failure, seen, shortened
from reports.html.run_part import FINDINGS

LEVELS = {0: GOOD, WRONG: BAD, SLOWER: BAD}
CALM = (Change.SAME, Change.FIXED)


def of_gate(folder: GateFolder, anchor: str) -> Part:
    """One gate, as it is stored."""
    found, info = folder.transitions, folder.info
    code, said = verdict(found, info, again=True)
    links = {id(each): f"{anchor}-t{number}" for number, each in enumerate(found)}
    every = things(found, bool(info.options.get("bitwise")))
    candidate = folder.sides["candidate"].records
    return Part(anchor, "gate", folder.path.name, LEVELS.get(code, WARN), said.partition(" (exit")[0], said, info.notes,
                [_finding(thing, found, links) for thing in every[:FINDINGS]], len(every),
                [_matrix(anchor, found, links), *_worse(anchor, folder, links), *_plain_records(anchor, folder),
                 *records.plots(anchor, candidate), *_times(anchor, folder), machine.of_gate(anchor, info),
                 *_every(anchor, folder, links)])


def level(change: Change) -> str:
    """A change's colour."""
    return BAD if change in WORSE else GOOD if change in CALM else IDLE if change is Change.NEW_ARM else WARN


def _finding(thing: Thing, found: list[Transition], links: dict[int, str]) -> Finding:
    own = names(list(dict.fromkeys(each.pairing.case for each in found)))[thing.shown.pairing.case]
    many = f"{len(thing.cases)} cases, {'worst' if thing.ranked else 'first'} {own}" if len(thing.cases) > 1 else own
    return Finding(thing.title, BAD if thing.title in LOUD else WARN, f"{thing.arms} on {many}".replace(",", ", "),
                   shortened(thing.why, LONGEST), links[id(thing.shown)])


def _matrix(anchor: str, found: list[Transition], links: dict[int, str]) -> Section:
    """A table a pair of kernels: cases by arms, the change and the time."""
    tables = []
    for kernels in dict.fromkeys(map(kernels_of, found)):
        group = [each for each in found if kernels_of(each) == kernels]
        arms = list(dict.fromkeys(_arm(each) for each in group))
        common, own = labels(list(dict.fromkeys(each.pairing.case for each in group)))
        cells = {(each.pairing.case, _arm(each)): _cell(each, links[id(each)]) for each in group}
        rows = [(name.replace(",", ", "), [cells.get((case, arm)) for arm in arms]) for case, name in own.items()]
        head = kernels[0] if kernels[0] == kernels[1] else f"{kernels[0]} to {kernels[1]}"
        tables.append(render("matrix", family="", heads=[(head, len(arms))], arms=arms, rows=rows, common=common.replace(",", ", "),
                             legend=["time: candidate over base, with its interval"] if any(each.time for each in group) else []))
    return Section(f"{anchor}-matrix", "From base to candidate", render("joined", parts=tables))


def _arm(found: Transition) -> str:
    base, candidate = (arm.rpartition("/")[2] for arm in (found.pairing.base, found.pairing.candidate))
    return base if base == candidate else f"{base} to {candidate}"


def _cell(found: Transition, link: str) -> Cell:
    if not was_compared(found):
        return Cell(IDLE, ["not run"], link)
    """The change, and under it the time; where that is what is wrong, it comes first."""
    of_time = [found.time.verdict.value, ratio_in_words(found)] if found.time else []
    slow = found.time is not None and found.time.verdict in (TimeVerdict.SLOWER, TimeVerdict.INVALID)
    unknown = found.time is not None and found.time.verdict is TimeVerdict.UNRESOLVED
    of_change = level(found.change)
    if of_change == GOOD and (slow or unknown):
        return Cell(BAD if slow else WARN, [*of_time, found.change.value], link)
    return Cell(BAD if slow else of_change, [found.change.value, *of_time], link)


def _worse(anchor: str, folder: GateFolder, links: dict[int, str]) -> list[Section]:
    """What got worse or fails on both sides, with pictures of the candidate's outputs and of what differs from the base's."""
    found, candidate = wrong_ones(folder.transitions, folder.info), folder.records("candidate")
    if not found:
        return []
    texts = failure_texts(folder.transitions, folder.info, folder.records("base"), candidate, repeating.of_gate(folder))
    own, shown = names(list(dict.fromkeys(each.pairing.case for each in found))), []
    for number, (each, text) in enumerate(zip(found, texts)):
        record = candidate.get((each.pairing.case, each.pairing.candidate)) or Record(each.pairing.case, each.pairing.candidate,
                                                                                     Verdict.SKIPPED)
        checks = [*record.checks, *([each.numbers] if each.numbers else [])]
        shown.append(Failure(links[id(each)], record, own[each.pairing.case], BAD if each.change in WORSE else WARN, text,
                             shortened(f"{each.change.value}: {each.detail}", LONGEST), "", seen(checks), number))
    return [section(f"{anchor}-failures", f"What got worse, and what fails on both sides ({len(found)})", "failures", failures=shown,
                    steps=steps())]


def _plain_records(anchor: str, folder: GateFolder) -> list[Section]:
    """Where both sides pass with other bits: what differs."""
    own, rows = names(list(dict.fromkeys(each.pairing.case for each in folder.transitions))), []
    for each in folder.transitions:
        if each.change is Change.NUMBERS and each.numbers:
            margins = "\n".join(f"{output} {before:.2g} to {failure.shown(each.margins_after[output])}"
                                for output, before in each.margins_before.items() if output in each.margins_after)
            rows.append([own[each.pairing.case], arms_in_words([each]), each.detail,
                         ", ".join(f"{step}: {count:,}" for step, count in each.numbers.ulp.items()), margins])
    head = ["case", "arm", "what", "ULP apart", "margin (1 fails)"]
    return [Section(f"{anchor}-numbers", "Numbers changed, within budget", table(head, rows))] if rows else []


def _times(anchor: str, folder: GateFolder) -> list[Section]:
    """The forest plot, or why there is none."""
    compared = [each for group in timed(folder.transitions).values() for each in group]
    if not compared:
        why = why_untimed(folder.info)
        return [Section(f"{anchor}-times-compared", "Times", render("nothing", text=f"Not compared: {why}."))] if why else []
    own = names(list(dict.fromkeys(each.pairing.case for each in folder.transitions)))
    groups: dict[str, list[Interval]] = {}
    many = len({kernels_of(each) for each in compared}) > 1
    for each in folder.transitions:
        if each.time:
            arm = f"{kernels_of(each)[1]}/{_arm(each)}" if many else _arm(each)
            groups.setdefault(own[each.pairing.case], []).append(Interval(arm, each.time))
    drawn = forest(list(groups.items()), "Candidate over base", f"{anchor}-forest",
                   f"{contracts(compared)}. Diamond and bar: ratio and interval; grey: what the threshold allows; slowest case first.")
    return [section(f"{anchor}-times-compared", "Times", "plots", plots=drawn)]


def _every(anchor: str, folder: GateFolder, links: dict[int, str]) -> list[Section]:
    """The comparisons that are not told above, each with what is known of it. [] of none."""
    told = {id(each) for each in wrong_ones(folder.transitions, folder.info)}
    own, shown = names(list(dict.fromkeys(each.pairing.case for each in folder.transitions))), []
    for each in folder.transitions:
        if id(each) not in told:
            record = Record(each.pairing.case, each.pairing.candidate, each.candidate or Verdict.SKIPPED)
            shown.append(Failure(links[id(each)], record, own[each.pairing.case], _cell(each, "").level, _in_full(each)))
    return [section(f"{anchor}-all", f"Every other comparison ({len(shown)})", "failures", failures=shown, steps=[])] if shown else []


def _in_full(each: Transition) -> str:
    lines = [f"{each.change.value}{f': {each.detail}' if each.detail else ''}", f"{arms_in_words([each])}  {each.pairing.case}",
             f"base {each.base.value if each.base else 'no record'}, candidate {each.candidate.value if each.candidate else 'no record'}"]
    for side, margins in (("base", each.margins_before), ("candidate", each.margins_after)):
        told = "  ".join(f"{name} {failure.shown(value)}" for name, value in margins.items())
        lines += [f"margins of the {side}: {told}"] if margins else []
    lines += failure.describe_check(each.numbers, always=True) if each.numbers else []
    return "\n".join([*lines, *([f"time: {each.time.verdict.value}: {each.time.why}"] if each.time else [])])
