"""The gate's flow: every case through both sides in turn, what became of each arm, and then the times of what passed on both.

Parent side. A side is live (a worker of its environment) or stored (the records and saved outputs of a run). docs/gate.md explains it.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.client import WorkerOptions
from harness.comparing import Interrupted, compare
from harness.comparison import BASE, CANDIDATE, SIDES, Change, Pairing, Rule, TimeComparison, Transition
from harness.gate_folder import GateFolder
from harness.record import Record
from harness.runfolder import RunFolder
from harness.runner import Runner, cases_of
from harness.sampling import Plan
from harness.sampling import Side as TimedSide
from harness.transitions import transition
from harness.verdicts import Check, Verdict

NO_OUTPUTS = "no saved outputs: threearm run --save-outputs"
Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what is under way."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kernel of the base and one of the candidate, each as a worker describes it, with the arms of it that take part; None where a side
    does not know it. arms: (base arm, candidate arm) of each comparison."""

    base: dict[str, Any] | None
    candidate: dict[str, Any] | None
    arms: tuple[tuple[str, str], ...]

    @property
    def any(self) -> dict[str, Any]:
        """The kernel of the side that has it."""
        return self.candidate or self.base or {}

    @property
    def names(self) -> tuple[str, str]:
        return (self.base or self.any)["name"], (self.candidate or self.any)["name"]


class Live:
    """A side that is an environment: its workers run what is asked. folder: where its records go."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.folder = runner, runner.folder
        self.problems: tuple[str, str] | None = None

    def begin(self, kernel: dict[str, Any]) -> None:
        """Get ready for another kernel: a fresh worker, after a look at whether its package can be imported."""
        self.runner.asker.close()
        self.problems = self.runner.imported(kernel)

    def take(self, kernel: dict[str, Any], case: str) -> None:
        """The kernel's arms on one case."""
        if self.problems is not None:
            self.runner.take(kernel, case, self.problems)

    def outputs(self, record: Record) -> tuple[Path | None, str]:
        """The file with a record's outputs, which is written now; or why there is none."""
        file = self.folder.output_file(record)
        assert file is not None
        try:
            file.parent.mkdir(exist_ok=True)
        except OSError as error:
            return None, f"cannot write {file.parent}: {error.strerror}"
        problem = self.runner.asker.save(record, file)
        return (None, problem) if problem else (file, "")

    def end(self) -> None:
        """No worker is left."""
        self.runner.asker.kill()


class Stored:
    """A side that is a run which is over. folder: where the records that take part are copied to."""

    def __init__(self, run: RunFolder, folder: RunFolder) -> None:
        self.run, self.folder = run, folder
        self.records = {(record.case, record.arm): record for record in run.records}

    def begin(self, kernel: dict[str, Any]) -> None:
        """Nothing is to be made ready."""

    def take(self, kernel: dict[str, Any], case: str) -> None:
        """Copy what the run has of a kernel on a case."""
        for arm in kernel["arms"]:
            record = self.records.get((case, f"{kernel['name']}/{arm}"))
            if record:
                self.folder.add(dataclasses.replace(record, time=None))

    def outputs(self, record: Record) -> tuple[Path | None, str]:
        """The file with a record's outputs, or why there is none."""
        file = self.run.output_file(record)
        if file is None or not file.is_file():
            return None, NO_OUTPUTS
        return file, ""

    def end(self) -> None:
        """Nothing is held."""


Side = Live | Stored


@dataclasses.dataclass(frozen=True)
class Timing:
    """How the times of what passed on both sides are compared."""

    base: WorkerOptions
    candidate: WorkerOptions
    plan: Plan
    rule_of: Callable[[Pairing], Rule]


class Gate:
    """Takes cases through both sides and writes what it finds into a folder. timing: None where nothing is timed."""

    def __init__(self, folder: GateFolder, base: Side, candidate: Side, pairs: list[Pair], timing: Timing | None, keep_outputs: bool,
                 progress: Progress) -> None:
        self.folder, self.base, self.candidate, self.pairs, self.timing = folder, base, candidate, pairs, timing
        self.keep_outputs, self.progress = keep_outputs, progress
        self.total = sum(len(self.cases(pair)) * len(pair.arms) for pair in pairs)

    def cases(self, pair: Pair) -> list[str]:
        """The cases of a pair's family."""
        return cases_of(pair.any, self.folder.info.cases)

    def run(self) -> None:
        """All of it. Raises RunError where the disk takes no more and Unfit where a side cannot start workers; what is known is kept."""
        try:
            for pair in self.pairs:
                self._pair(pair)
        finally:
            self.base.end()
            self.candidate.end()
        if self.timing:
            self._times(self.timing)
        for side in (self.base, self.candidate):
            side.folder.finish()

    def _pair(self, pair: Pair) -> None:
        if pair.base:
            self.base.begin(pair.base)
        if pair.candidate:
            self.candidate.begin(pair.candidate)
        for case in self.cases(pair):
            if pair.base:
                self.base.take(pair.base, case)
            if pair.candidate:
                self.candidate.take(pair.candidate, case)
            before, after = self.folder.records(BASE), self.folder.records(CANDIDATE)
            for mine, theirs in pair.arms:
                pairing = Pairing(case, f"{pair.names[0]}/{mine}", f"{pair.names[1]}/{theirs}")
                self._judge(pairing, before.get((case, pairing.base)), after.get((case, pairing.candidate)), pair)

    def _judge(self, pairing: Pairing, base: Record | None, candidate: Record | None, pair: Pair) -> None:
        """What became of one arm on one case; its outputs are compared where their fingerprints are not the same."""
        numbers, problem = None, ""
        if base and candidate and comparable(base, candidate):
            numbers, problem = self._numbers(base, candidate)
            if problem:
                self._note(f"outputs not compared: {problem}")
        if numbers and numbers.verdict is Verdict.PASSED and base and candidate:  # other bits only where they mean nothing
            candidate, numbers = dataclasses.replace(candidate, outputs=base.outputs), None
        found = transition(pairing, base, candidate, numbers, pair.base, pair.candidate)
        if problem and found.change is Change.NUMBERS:
            found.detail += f" ({problem})"
        self.folder.add(found)
        self.progress(len(self.folder.transitions), self.total, f"{pairing.candidate}  {found.change.value}  {pairing.case}")

    def _numbers(self, base: Record, candidate: Record) -> tuple[Check | None, str]:
        """How far the outputs of two records are apart: one side saves them, a live one compares. Or why that is not known."""
        sides = [(self.candidate, candidate, CANDIDATE), (self.base, base, BASE)]
        judge = next((each for each in sides if isinstance(each[0], Live)), None)
        if judge is None:
            return None, "both sides are stored runs"
        other = next(each for each in sides if each is not judge)
        file, problem = other[0].outputs(other[1])
        if file is None:
            return None, problem
        live = judge[0]
        assert isinstance(live, Live)
        check, problem = live.runner.asker.compare(judge[1], file, (judge[2], other[2]))
        if self.keep_outputs:
            problem = problem or live.outputs(judge[1])[1]
        elif isinstance(other[0], Live):
            file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: somebody else's
                file.parent.rmdir()
        return check, problem

    def _note(self, text: str) -> None:
        if text not in self.folder.info.notes:
            self.folder.info.notes.append(text)

    def _times(self, timing: Timing) -> None:
        """Time what passed on both sides, and put the verdicts into the transitions."""
        passed = {found.pairing: found for found in self.folder.transitions if both_passed(found)}
        if not passed:
            self.folder.info.options["time"] = "nothing passed on both sides"
            return
        before, after = self.folder.records(BASE), self.folder.records(CANDIDATE)

        def outputs(pairing: Pairing) -> tuple[dict[str, str], dict[str, str]]:
            return before[pairing.case, pairing.base].outputs, after[pairing.case, pairing.candidate].outputs

        logs = [Path(self.folder.path, side, "worker.log") for side in SIDES]
        sides = TimedSide(timing.base, logs[0]), TimedSide(timing.candidate, logs[1])

        def keep(found: dict[Pairing, TimeComparison]) -> None:
            for pairing, compared in found.items():
                passed[pairing].time = compared

        try:
            keep(compare(list(passed), *sides, timing.plan, timing.rule_of, self.progress, outputs))
        except Interrupted as interruption:
            keep(interruption.comparisons)
            raise


def comparable(base: Record, candidate: Record) -> bool:
    """Whether two records have outputs of the same inputs that are not known to be the same."""
    if not base.outputs or not candidate.outputs or base.inputs != candidate.inputs:
        return False
    return base.outputs != candidate.outputs or base.ways != candidate.ways


def both_passed(found: Transition) -> bool:
    """Whether an arm's time is worth something on both sides."""
    return found.base is Verdict.PASSED and found.candidate is Verdict.PASSED and not found.detail.startswith("inputs differ")
