"""Runs, gates and paired times as JUnit XML, which every CI server reads.

The format has no standard; this is what Jenkins, GitLab and pytest agree on: testsuites > testsuite > testcase > failure | error | skipped,
with counts that add up. Only PASSED is a pass: FAILED, FLAKY, VACUOUS, CRASHED, TIMEOUT and OOM are failures of that type, ERROR is an
error. What a command's exit code says, the file says, too: where that is not 0 and no testcase tells why, one is added which does.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from xml.etree import ElementTree

from harness.comparison import Change, Pairing, TimeComparison, TimeVerdict, Transition
from harness.gate_folder import GateInfo
from harness.record import Record
from harness.runfolder import RunInfo
from harness.stats import in_words as interval
from harness.transitions import WORSE, was_compared
from harness.verdicts import Verdict
from reports import failure, run_line
from reports.frame import reason
from reports.gate_page import Options, Records, failure_texts
from reports.gate_things import facts, ratio_in_words

FAILURE, ERROR, SKIPPED = "failure", "error", "skipped"
NO_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, in no spelling."""
UNKNOWN_TIMES = (TimeVerdict.SLOWER, TimeVerdict.UNRESOLVED, TimeVerdict.INVALID)
Repeat = Callable[[Record], list[str]]
"""What a record's replay line needs besides, as failure.describe takes it."""


@dataclasses.dataclass
class Case:
    """One testcase. outcome: "" for a pass, or failure, error or skipped, of that type, told in one line and in full. out: what a reader
    of a pass must know."""

    group: str
    name: str
    seconds: float = 0.0
    outcome: str = ""
    type: str = ""
    message: str = ""
    text: str = ""
    out: str = ""


@dataclasses.dataclass
class Suite:
    """One testsuite. started: ISO 8601 or ""; properties: of the machine."""

    name: str
    started: str
    properties: dict[str, str]
    cases: list[Case]


def document(suites: Iterable[Suite], code: int = 0, why: str = "") -> bytes:
    """The whole file. code, why: the exit code of what the suites tell of and its reason: one that is not 0 is never told as a success."""
    every = list(suites)
    if code and not any(case.outcome in (FAILURE, ERROR) for suite in every for case in suite.cases):
        every.append(Suite("threearm", "", {}, [Case("threearm", "verdict", 0.0, ERROR, f"exit {code}", why or f"exit code {code}", why)]))
    root = ElementTree.Element("testsuites", {"name": "threearm", **_counts([case for suite in every for case in suite.cases])})
    for suite in every:
        root.append(_suite(suite))
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _counts(cases: list[Case]) -> dict[str, str]:
    kinds = {"tests": None, "failures": FAILURE, "errors": ERROR, "skipped": SKIPPED}
    counts = {name: str(sum(kind in (None, case.outcome) for case in cases)) for name, kind in kinds.items()}
    return {**counts, "time": f"{sum(case.seconds for case in cases):.3f}"}


def _suite(suite: Suite) -> ElementTree.Element:
    element = ElementTree.Element("testsuite", {"name": clean(suite.name), **_counts(suite.cases)})
    if suite.started:
        element.set("timestamp", clean(suite.started))
    if suite.properties:
        properties = ElementTree.SubElement(element, "properties")
        for name, value in suite.properties.items():
            ElementTree.SubElement(properties, "property", {"name": clean(name), "value": clean(value)})
    for case in suite.cases:
        _case(element, case)
    return element


def _case(suite: ElementTree.Element, case: Case) -> None:
    element = ElementTree.SubElement(suite, "testcase", {"classname": clean(case.group), "name": clean(case.name),
                                                         "time": f"{case.seconds:.3f}"})
    if case.outcome:
        told = {"message": clean(case.message)} if case.outcome == SKIPPED else {"type": clean(case.type), "message": clean(case.message)}
        ElementTree.SubElement(element, case.outcome, told).text = clean(case.text)
    if case.out:
        ElementTree.SubElement(element, "system-out").text = clean(case.out)


def clean(text: str) -> str:
    """Text that XML can hold: other characters as \\x1b or \\ud800, so that nothing that a kernel said is lost."""
    return NO_XML.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


# --- a run ------------------------------------------------------------------------------------------------------------


def of_run(info: RunInfo, records: list[Record], repeat: Repeat, part: str = "") -> list[Suite]:
    """A testsuite a kernel, and one that says so of a run that has not finished. part: what the run is within something larger, to tell
    its kernels from those of other parts.

    A testcase's time is launching and judging its arm; the first arm of a case also carries making the inputs and the reference."""
    suites: dict[str, Suite] = {}
    met: set[tuple[str, str]] = set()
    for record in records:
        name = f"{part}.{record.kernel}" if part else record.kernel
        suite = suites.setdefault(record.kernel, Suite(name, info.started, info.machine, []))
        first = (record.kernel, record.case) not in met
        met.add((record.kernel, record.case))
        shared = sum(record.seconds.get(name, 0.0) for name in ("inputs", "reference")) if first else 0.0
        suite.cases.append(_of_record(record, repeat, shared, part))
    return [*suites.values(), *([_unfinished(info, records, part)] if not info.finished else [])]


def _unfinished(info: RunInfo, records: list[Record], part: str) -> Suite:
    """An error of its own: what is there may have passed, but it is not all."""
    said = f"{run_line.INCOMPLETE}: {run_line.how_far(info, records)}"
    missing = run_line.missing(info, records)
    text = "\n".join([said, *(["missing:", *run_line.named(missing, len(missing))] if missing else [])])
    return Suite(f"{part}.threearm" if part else "threearm", info.started, {},
                 [Case(".".join(filter(None, [part, "threearm"])), "all of the run", 0.0, ERROR, run_line.INCOMPLETE, said, text)])


def _of_record(record: Record, repeat: Repeat, shared: float, part: str) -> Case:
    group = ".".join(filter(None, [part, record.family, record.kernel]))
    case = Case(group, f"{record.case} [{record.source}]", shared + record.seconds.get("arm", 0.0), out=record.note)
    if record.verdict is Verdict.PASSED:
        return case
    case.type, case.message = record.verdict.value, reason(record) or record.verdict.value
    case.outcome = {Verdict.SKIPPED: SKIPPED, Verdict.ERROR: ERROR}.get(record.verdict, FAILURE)
    case.text = failure.describe(record, repeat(record))
    return case


# --- a gate -----------------------------------------------------------------------------------------------------------


def of_gate(transitions: list[Transition], info: GateInfo, base: Records, candidate: Records, options: Options) -> list[Suite]:
    """A testsuite a pair of kernels, a testcase a pairing. A failure is what takes the gate from exit 0: what got worse, a time that is
    SLOWER, UNRESOLVED or INVALID, what could not be compared. What failed before and still does passes, and says so."""
    common, differ = facts(info)
    properties = {**common, **{f"{side} {key}": pair[place] for place, side in enumerate(("base", "candidate"))
                               for key, pair in differ.items() if pair[place]},
                  "base": info.base.what, "candidate": info.candidate.what}
    suites: dict[tuple[str, str], Suite] = {}
    for found in transitions:
        kernels = found.pairing.base.rpartition("/")[0], found.pairing.candidate.rpartition("/")[0]
        name = kernels[0] if kernels[0] == kernels[1] else f"{kernels[0]} to {kernels[1]}"
        suite = suites.setdefault(kernels, Suite(name, info.started, properties, []))
        suite.cases.append(_of_transition(found, info, base, candidate, options))
    return list(suites.values())


def _of_transition(found: Transition, info: GateInfo, base: Records, candidate: Records, options: Options) -> Case:
    pairing = found.pairing
    arms = pairing.candidate if pairing.base == pairing.candidate else f"{pairing.base} to {pairing.candidate}"
    source = pairing.candidate.rpartition("/")[2] if pairing.base == pairing.candidate else arms
    time = found.time
    case = Case(f"{pairing.case.partition(':')[0]}.{pairing.candidate.rpartition('/')[0]}", f"{pairing.case} [{source}]",
                time.seconds if time else 0.0)
    line = found.change.value + (f": {found.detail}" if found.detail else "")
    timed = f"{time.verdict.value} {ratio_in_words(found)}: {time.why}" if time else ""
    if not was_compared(found):
        case.outcome, case.message = SKIPPED, found.detail
    elif found.change in WORSE or (info.options.get("bitwise") and found.change is Change.NUMBERS):
        case.outcome, case.type, case.message = FAILURE, found.change.value, line
        case.text = "\n\n".join([*failure_texts([found], info, base, candidate, options), *([timed] if timed else [])])
    elif found.change is Change.UNKNOWN:
        case.outcome, case.type, case.message = FAILURE, found.change.value, line
    elif time and time.verdict in UNKNOWN_TIMES:
        case.outcome, case.type, case.message, case.text = FAILURE, time.verdict.value, timed, line
    case.out = "" if case.outcome else "\n".join(filter(None, [line, timed]))
    return case


# --- paired times -----------------------------------------------------------------------------------------------------


def of_pairs(name: str, pairs: list[tuple[Pairing, TimeComparison]], started: str, properties: dict[str, str]) -> Suite:
    """Times of one arm against another, where no change is asked for: all but one that is INVALID passes."""
    cases = []
    for pairing, time in pairs:
        told = interval(time.estimate) if time.estimate else time.why
        case = Case(name, f"{pairing.case} [{pairing.base} to {pairing.candidate}]", time.seconds, out=told)
        if time.verdict is TimeVerdict.INVALID:
            case.outcome, case.type, case.message, case.out = FAILURE, time.verdict.value, time.why, ""
        cases.append(case)
    return Suite(name, started, properties, cases)
