"""`threearm report --rejudge`: a stored folder judged anew, by its numbers and, where outputs were saved, by those. Says what differs."""
from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from cases import parse_case
from harness.asking import Settings, deadline
from harness.client import Unfit, WorkerDied, WorkerOptions, WorkerProcess, default_memory
from harness.gate_folder import GateFolder
from harness.options import PAUSE, NowAndThen, errors, fail, progress_bar, stored_options
from harness.record import Record
from harness.rejudge import Rejudged, gate_again, pairs_again, record_again
from harness.runfolder import RunFolder
from harness.stored import Stored
from harness.transitions import UNRESOLVED
from harness.verdicts import Check
from harness.words import counted

LONGEST = 90  # characters of a line of progress


def rejudge_folder(folder: Stored) -> int:
    """Put what the stored records, samples and outputs say today in place of what was stored, in memory; the folder is not changed.

    Tells on stderr what differs and which outputs cannot be judged, and why. Returns 4 if there are such, else 0."""
    runs = {"": folder} if isinstance(folder, RunFolder) else folder.sides if isinstance(folder, GateFolder) else folder.runs
    told: list[str] = []
    refused: list[str] = []
    for name, run in runs.items():
        lines, problems = rejudge_run(run)
        told += [f"{name}: {line}" if name else line for line in lines]
        refused += problems
    if isinstance(folder, GateFolder):
        told += gate_again(folder)
    elif not isinstance(folder, RunFolder):
        told += pairs_again(folder.pairs)
    for line in [*told, *(f"not judged: {problem}" for problem in refused)]:
        errors.print(line, markup=False, highlight=False)
    records = sum(len(run.records) for run in runs.values())
    verdict = f"{counted(len(told), 'finding')} by today's rules" if told else "by today's rules all is as it was stored"
    errors.print(f"rejudged {folder.path}: {counted(records, 'record')}; {verdict}", markup=False, highlight=False)
    return UNRESOLVED if refused else 0


def rejudge_run(run: RunFolder) -> tuple[list[str], list[str]]:
    """Judge a run's records anew. Returns what differs, a line a finding, and which saved outputs cannot be judged, and why."""
    kernels = {kernel["name"]: kernel for kernel in run.info.kernels}
    fresh, refused = outputs_checks(run)
    found = [record_again(record, kernels.get(record.kernel, {}), fresh.get(place, ()), "fuzz" in run.info.options)
             for place, record in enumerate(run.records)]
    run.records = [each.now for each in found]
    return [line for each in found if each.differs for line in in_lines(each)], refused


def in_lines(found: Rejudged) -> list[str]:
    """`stored PASSED, rejudged FAILED  arm  case`, and why."""
    stored, now = found.stored.verdict, found.now.verdict
    head = f"stored {stored.value}, rejudged {now.value}" if stored is not now else f"{now.value} as stored, but"
    return [f"{head}  {found.now.arm}  {found.now.case}\n" + "\n".join(f"  {line}" for line in found.told)]


# --- saved outputs ----------------------------------------------------------------------------------------------------


def outputs_checks(run: RunFolder) -> tuple[dict[int, list[Check]], list[str]]:
    """The checks of a run's saved outputs, by the record's place; and which cannot be judged, and why. Nothing where none were saved."""
    if run.path is None or not (run.path / "outputs").is_dir():
        return {}, []
    todo, refused = {}, []
    for place, record in enumerate(run.records):
        file = run.output_file(record)
        if record.outputs and file and file.is_file():
            todo[place] = (record, file)
        elif record.outputs:
            refused.append(f"{record.arm}  {record.case}: its outputs were not saved, or are gone")
    options, settings = stored_options(run)
    settings = settings or Settings()
    judge = _Judge(dataclasses.replace(cpu_options(options), memory=default_memory()), settings)
    made: dict[int, list[Check]] = {}
    told = NowAndThen(PAUSE)
    with progress_bar(errors) as bar, judge:
        task = bar.add_task("judging saved outputs", total=len(todo))
        for done, (place, (record, file)) in enumerate(sorted(todo.items(), key=lambda item: item[1][0].case)):
            bar.update(task, completed=done, description=f"{record.arm}  {record.case}"[:LONGEST])
            told.say(f"judging saved outputs: {done} of {len(todo)}")
            checks, problem = judge.checks(record, file)
            if problem:
                refused.append(f"{record.arm}  {record.case}: {problem}")
            else:
                made[place] = checks
    return made, refused


def cpu_options(stored: WorkerOptions | None) -> WorkerOptions:
    """How a worker is started that launches nothing: on the CPU, with the run's kernel files that are still there."""
    here = tuple(file for file in (stored.load if stored else ()) if Path(file).is_file())
    return WorkerOptions("cpu", bool(stored and stored.broken), here, 0)


class _Judge:
    """A worker that judges saved outputs, replaced when it dies."""

    def __init__(self, options: WorkerOptions, settings: Settings) -> None:
        self.options, self.settings = options, settings
        self.worker: WorkerProcess | None = None

    def __enter__(self) -> _Judge:
        self.scratch = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.worker:
            self.worker.close()
        self.scratch.cleanup()

    def checks(self, record: Record, file: Path) -> tuple[list[Check], str]:
        """The checks made of a record's outputs, or why there are none. Exit 2 where no worker can start as asked."""
        limit, why = deadline(parse_case(record.case), self.options, self.settings)
        try:
            self.worker = self.worker or WorkerProcess(self.options, Path(self.scratch.name) / "worker.log")
            for event in self.worker.ask(limit, why, op="rejudge", text=record.case, arm=record.arm, path=str(file.resolve()),
                                         inputs=record.inputs, outputs=record.outputs, ways=record.ways, fp64=self.settings.fp64):
                if event["event"] == "rejudged":
                    return msgspec.convert(event.get("checks", []), list[Check]), event["problem"]
                if event["event"] == "broken":
                    return [], event["detail"]
        except WorkerDied as death:
            self.worker = None
            return [], death.detail
        except Unfit as error:
            fail(str(error))
        raise AssertionError("unreachable: ask() ends only by an exception")
