"""An evidence folder as one Markdown page for a pull request: the verdict, then every block of numbers with what it is. For a terminal:
evidence_terminal.py."""
from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterable

from cases import family_of
from harness.evidence_folder import EvidenceFolder
from harness.evidence_plans import PLANS, RUN, parts_of
from harness.record import Record
from harness.verdicts import Verdict, worst
from harness.words import counted
from reports import evidence, evidence_curves, evidence_prefill, failure
from reports.evidence_common import invalid, processes
from reports.evidence_compare import side_by_side
from reports.evidence_numbers import filled_table
from reports.repeating import of_run

LONGEST_WHY = 200
ROOM_FOR_FAILURES = 15_000
"""Characters for what did not pass in full: GitHub takes 65,536 in all."""
LACKING = 3
"""Things that are not there that the first line names."""
TELLING = ("reference", "set", "timed-output")
"""The checks that say most about a wrong result."""
NOT_OF_THE_RUN = ("--runs", "--out", "--compare", "--junit")
"""Options of a command line that do not decide what it measures; each has a value."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of the page. long: left out on a terminal. folded: closed until a reader opens it."""

    title: str
    text: Callable[[EvidenceFolder], str]
    long: bool = False
    folded: bool = False


SWEEPS = (Block("Time against topk_length", evidence_curves.length_sweep, long=True),
          Block("Time against the number of keys", evidence_curves.keys_sweep, long=True))
BLOCKS = {
    "q8kv8-topk-length": (
        Block("Time: none against the length arms", evidence_prefill.kernel_time),
        Block("What the wrapper costs", evidence_prefill.wrapper),
        Block("Source equivalence", evidence_prefill.equivalence),
        Block("Early exit: where arms that skip differ from arms that walk masked pairs", evidence_prefill.early_exit,
              long=True),
        Block("Rows without a valid key", evidence_prefill.sentinels, long=True), *SWEEPS),
    "bf16-topk-length": (Block("What metadata saves", evidence_prefill.savings), *SWEEPS),
    "litetopk": (Block("Dense against LiteTopk", evidence_curves.dense_against_litetopk),),
}
COMMON = (Block("By fresh processes", processes, long=True, folded=True),
          Block("Useful work over every timing, and its share of the peak", evidence_curves.roofline, long=True, folded=True))


def page(folder: EvidenceFolder, other: EvidenceFolder | None = None) -> str:
    """The whole page. other: another folder of the same name, to stand beside it."""
    parts = [verdict(folder), machine_line(folder), *blocks(folder, short=False)]
    parts += [failures(folder), side_by_side(folder, other) if other else "", skipped(folder), provenance(folder)]
    return "\n\n".join(part for part in parts if part) + "\n"


def left_out(folder: EvidenceFolder) -> list[str]:
    """The titles of the blocks that have something to say and are too long for a terminal."""
    return [block.title for block in _all(folder) if block.long and block.text(folder)]


def _all(folder: EvidenceFolder) -> Iterable[Block]:
    return (*BLOCKS.get(folder.info.name, ()), *COMMON)


def blocks(folder: EvidenceFolder, short: bool) -> list[str]:
    """The blocks that have something to say, with their titles. short: without the long ones."""
    found = ((block, block.text(folder)) for block in _all(folder) if not (short and block.long))
    return [f"<details><summary>{block.title}</summary>\n\n{text}\n\n</details>" if block.folded else f"#### {block.title}\n\n{text}"
            for block, text in found if text]


# --- the verdict ------------------------------------------------------------------------------------------------------


def records_of(folder: EvidenceFolder) -> list[Record]:
    """Of all parts."""
    return [record for run in folder.runs.values() for record in run.records]


def code_word(folder: EvidenceFolder) -> str:
    """The worst verdict of all that ran; FAILED also for a time that is none; INCOMPLETE of what was cut short and has nothing worse."""
    ran: list[Verdict] = [record.verdict for record in records_of(folder) if record.verdict is not Verdict.SKIPPED]
    found = worst(ran) if ran else Verdict.SKIPPED
    if found is Verdict.PASSED and invalid(folder.pairs):
        found = Verdict.FAILED
    cut_short = not folder.info.finished and found in (Verdict.PASSED, Verdict.SKIPPED)
    return "INCOMPLETE" if cut_short else "NOTHING RAN" if not ran else found.value


def verdict(folder: EvidenceFolder) -> str:
    """The first line: whether it is of reduced shapes, the verdict, how many case-runs passed, which arms are wrong."""
    info, main = folder.info, PLANS[folder.info.name].main
    run = folder.runs.get(main)
    counts = case_runs(run.records if run else [], folder.planned(main))
    ran = [record for record in records_of(folder) if record.verdict is not Verdict.SKIPPED]
    passed, planned = sum(record.verdict is Verdict.PASSED for record in ran), arm_runs(folder)
    head = "Reduced shapes on a CPU: no evidence of a GPU kernel. " if info.reduced else ""
    told = [f"{counts[0]} of {counts[1]} case-runs PASSED", f"in all parts {passed:,} of {planned:,} arm runs"]
    told[-1] += " PASSED"
    told += [f"{arm}: {why}" for arm, why in told_arms(ran).items()]
    times = invalid(folder.pairs)
    told += [f"{counted(len(times), 'time')} by fresh processes INVALID: {times[0]}"] if times else []
    if not info.finished:
        told.append("interrupted" if info.interrupted else "it has not finished, or was cut short")
        told += lacks(folder)
    return f"**{head}{code_word(folder)}: {info.name}: {'; '.join(told)}.**"


def lacks(folder: EvidenceFolder) -> list[str]:
    """What is not there, the first few things. [] where all of it is."""
    found = folder.lacking()
    more = [f"and {counted(len(found) - LACKING, 'thing')} more"] if len(found) > LACKING else []
    return [f"it lacks {', '.join([*found[:LACKING], *more])}"] if found else []


def arm_runs(folder: EvidenceFolder) -> int:
    """How many records there are when all parts are whole, but for those that are SKIPPED."""
    names = [part.name for part in parts_of(PLANS[folder.info.name], folder.info.reduced, folder.info.asked()) if part.kind == RUN]
    planned = {(name, *key) for name in names for key in folder.planned(name)}
    records = {(name, r.case, r.arm): r for name, run in folder.runs.items() for r in run.records}
    return sum(key not in records or records[key].verdict is not Verdict.SKIPPED for key in {**dict.fromkeys(planned), **records})


def case_runs(records: list[Record], planned: list[tuple[str, str]]) -> tuple[int, int]:
    """How many (kernel, case) passed with every arm that is not SKIPPED, of how many that have one. planned: (case, arm) of all that are to
    run; one without a record has not passed. Indexer kernels have one arm each: a case is one run of all of them."""
    verdicts: dict[tuple[str, str], Verdict | None] = {**dict.fromkeys(planned), **{(r.case, r.arm): r.verdict for r in records}}
    groups: dict[tuple[str, str], list[Verdict | None]] = {}
    for (case, arm), found in verdicts.items():
        if found is not Verdict.SKIPPED:
            groups.setdefault(("" if family_of(case) == "indexer_topk" else arm.rpartition("/")[0], case), []).append(found)
    return sum(all(each is Verdict.PASSED for each in found) for found in groups.values()), len(groups)


def told_arms(ran: list[Record]) -> dict[str, str]:
    """Where something did not pass, every arm: on how many cases it passed, or did not and by which checks. {} where all did."""
    if all(record.verdict is Verdict.PASSED for record in ran):
        return {}
    found: dict[str, str] = {}
    for arm in dict.fromkeys(record.arm for record in ran):
        own = [record for record in ran if record.arm == arm]
        bad = [record for record in own if record.verdict is not Verdict.PASSED]
        found[arm] = f"PASSED on {len({record.case for record in own})} cases"
        if bad:
            checks = dict.fromkeys(check.name for record in bad for check in record.checks if check.verdict is not Verdict.PASSED)
            kinds = " and ".join(dict.fromkeys(record.verdict.value for record in bad))
            cases, of = len({record.case for record in bad}), len({record.case for record in own})
            found[arm] = f"{kinds} on {cases} of {of} cases" + (f" ({', '.join(checks)})" if checks else "")
    return found


Bad = tuple[Record, Callable[[Record], list[str]]]
"""A record that did not pass, and what the line that repeats it needs besides."""


def bad_records(folder: EvidenceFolder) -> list[Bad]:
    """What did not pass, of all parts."""
    return [(record, of_run(run)) for run in folder.runs.values() for record in run.records if record.verdict not in failure.HARMLESS]


def failures(folder: EvidenceFolder) -> str:
    """What did not pass: a row a record, then the lines that repeat them; in full, as many as there is room for."""
    bad = bad_records(folder)
    rows = [[str(place), record.arm, record.case, record.verdict.value, why(record)] for place, (record, _) in enumerate(bad, 1)]
    rows += [["", found.partition(" on ")[0], "", "INVALID", found] for found in invalid(folder.pairs)]
    if not rows:
        return ""
    repeats = "\n".join(f"{failure.replay_line(record, repeat(record))}  # {place}" for place, (record, repeat) in enumerate(bad, 1))
    told = f"\n\nto repeat them, by number:\n\n```\n{repeats}\n```" if bad else ""
    return f"#### What did not pass\n\n{filled_table(['', 'arm', 'case', 'verdict', 'why'], rows)}{told}{in_full(folder, bad)}"


def why(record: Record) -> str:
    """In a line: the record's own detail, or what the check that says most has to say, and the names of the others."""
    bad = [check for check in record.checks if check.verdict is not Verdict.PASSED]
    if not bad:
        return record.detail[:LONGEST_WHY]
    told = next((check for name in TELLING for check in bad if check.name == name), bad[0])
    others = [check.name for check in bad if check is not told]
    return f"{told.name}: {told.detail[:LONGEST_WHY]}" + (f"; also {', '.join(others)}" if others else "")


def in_full(folder: EvidenceFolder, bad: list[Bad]) -> str:
    """The first of them with every check, so many that the page can still be pasted."""
    texts: list[str] = []
    for record, repeat in bad:
        texts.append(failure.describe(record, repeat(record)))
        if sum(map(len, texts)) > ROOM_FOR_FAILURES:
            texts.pop()
            break
    if not texts:
        return ""
    told = f"the first {len(texts)} of {len(bad)}" if len(texts) < len(bad) else "all"
    fenced = "\n".join(texts).replace("```", "` ` `")
    return (f"\n\n<details><summary>In full: {told}; every one: threearm report {folder.path.name} --failures</summary>\n\n"
            f"```\n{fenced}\n```\n\n</details>")


def skipped(folder: EvidenceFolder) -> str:
    """Arms that were not run, and why; and parts that were left out."""
    table = evidence.skipped(records_of(folder))
    said: dict[tuple[str, str], int] = {}
    for record in records_of(folder):
        if record.note:
            said[record.arm, record.note] = said.get((record.arm, record.note), 0) + 1
    notes = "  \n".join([*folder.info.notes, *(f"{arm} on {counted(count, 'case')}: {note}" for (arm, note), count in said.items())])
    return "\n\n".join(part for part in (table, f"#### Notes\n\n{notes}" if notes else "") if part)


# --- where it comes from ----------------------------------------------------------------------------------------------


def machine_line(folder: EvidenceFolder) -> str:
    """GPU or CPU, driver, power limit, versions, commit: one line."""
    machine = folder.info.machine
    first = [f"{machine[key]}" for key in ("gpu", "cpu") if key in machine][:1]
    told = [f"{key} {machine[key]}" for key in ("driver", "power limit", "max SM clock", "cuda", "torch", "triton") if key in machine]
    versions = [f"{kernel['name']} {kernel['version']}" for kernel in folder.info.kernels if kernel.get("version")]
    told += [*versions, f"threearm {machine.get('threearm', 'of unknown version')}"]
    return f"`{'; '.join([*first, *told])}`"


def provenance(folder: EvidenceFolder) -> str:
    """How to repeat all of it, when it was, what each part took, and the machine in full."""
    info = folder.info
    took = ", ".join(f"{part.name} {part.seconds:.0f} s" for part in info.parts if part.seconds)
    contracts = ", ".join(f"{part.name} `{part.contract}` {part.samples}" for part in info.parts if part.kind == RUN and part.contract)
    machine = "; ".join(f"{key} {value}" for key, value in info.machine.items())
    return (f"#### Where this comes from\n\nrepeat: `{shlex.join(['threearm', *command(info.command)])}`  \nstarted {info.started}, "
            f"finished {info.finished or 'not'}; {took}  \ncontract and samples by part: {contracts}  \n{machine}.")


def command(words: list[str]) -> list[str]:
    """A command line without the program, and without where its results were put."""
    kept: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word in NOT_OF_THE_RUN:
            next(rest, None)
        elif word.partition("=")[0] not in NOT_OF_THE_RUN:
            kept.append(word)
    return kept
