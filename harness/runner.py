"""Takes cases through kernels: one fresh worker a kernel, one record an arm and case, whatever becomes of the worker.

A kernel has its worker to itself: a wheel that poisons a context, or exports the same C++ symbols as another one (two builds
of FlashMLA do), is then no other kernel's trouble.
"""
from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from cases import family_of
from harness.asking import Asker, Progress, Settings
from harness.client import WorkerDied, WorkerOptions, WorkerProcess
from harness.record import Record
from harness.runfolder import RunError, RunFolder
from harness.verdicts import Verdict


class Runner:
    """Runs what is planned and writes records into a folder. describe() must have been asked for the kernels."""

    def __init__(self, folder: RunFolder, options: WorkerOptions, settings: Settings, kernels: list[dict[str, Any]],
                 progress: Progress, log: Path | None = None) -> None:
        self.folder, self.options, self.settings, self.kernels, self.progress = folder, options, settings, kernels, progress
        self.finished = folder.done()
        self.log = log or (folder.path / "worker.log" if folder.path else Path(os.devnull))
        self.asker = Asker(options, settings, self.log, self._add, progress)

    def run(self) -> None:
        """Every kernel on every case. A record that is there already is not made again."""
        try:
            for kernel in self.kernels:
                self._run_kernel(kernel)
                self.asker.close()
        finally:
            self.asker.kill()
            self.asker.watch.close()
        self.folder.finish()

    def _run_kernel(self, kernel: dict[str, Any]) -> None:
        problems = self.imported(kernel)
        if problems is None:
            return
        for case in cases_of(kernel, self.folder.info.cases):
            self.take(kernel, case, problems)

    def imported(self, kernel: dict[str, Any]) -> tuple[str, str] | None:
        """Import a kernel's package: why the kernel cannot run, why it has a none arm alone, "" where nothing. None if importing it ends
        the process; all its records are then made."""
        if kernel["why_not"] or not kernel["imports"] or not self._pending(kernel):
            return kernel["why_not"], ""
        try:
            return probe(self.options, self.log, kernel["name"])
        except WorkerDied as death:
            self._add_all(kernel, death.verdict, f"importing {kernel['imports']}: {death.detail}")
            return None

    def take(self, kernel: dict[str, Any], case: str, problems: tuple[str, str]) -> None:
        """A kernel's arms on one case. problems: what `imported` said."""
        name, (why_not, none_only) = kernel["name"], problems
        skipped = dict(kernel["refused"][case])
        for arm in kernel["arms"]:
            reason = why_not or skipped.get(arm) or (none_only if arm != "none" else "")
            if reason:
                skipped[arm] = reason
                self._add(Record(case, f"{name}/{arm}", Verdict.SKIPPED, reason))
        self._run_case(name, case, [arm for arm in kernel["arms"] if arm not in skipped])

    def _pending(self, kernel: dict[str, Any]) -> bool:
        return any((case, f"{kernel['name']}/{arm}") not in self.finished
                   for case in cases_of(kernel, self.folder.info.cases) for arm in kernel["arms"])

    def _add_all(self, kernel: dict[str, Any], verdict: Verdict, detail: str) -> None:
        for case in cases_of(kernel, self.folder.info.cases):
            for arm in kernel["arms"]:
                self._add(Record(case, f"{kernel['name']}/{arm}", verdict, detail))

    def _run_case(self, name: str, case: str, arms: list[str]) -> None:
        """One kernel on one case. What an earlier run has recorded is kept; the arms go together, since they are compared."""
        if any((case, f"{name}/{arm}") not in self.finished for arm in arms):
            self.asker.run_case(name, case, arms)
        if self.settings.save_outputs:
            self._save_outputs(name, case)

    def _save_outputs(self, name: str, case: str) -> None:
        """Keep the outputs of a kernel's records of a case that have some, for a gate to compare with. Raises RunError."""
        for record in self.folder.records:
            file = self.folder.output_file(record)
            if record.case == case and record.kernel == name and record.outputs and file and not file.is_file():
                file.parent.mkdir(exist_ok=True)
                problem = self.asker.save(record, file)
                if problem:
                    raise RunError(f"cannot save the outputs of {record.arm} on {record.case}: {problem}")

    def _add(self, record: Record) -> None:
        key = (record.case, record.arm)
        if key not in self.finished:
            self.finished.add(key)
            self.folder.add(record)


def cases_of(kernel: dict[str, Any], cases: list[str]) -> list[str]:
    """The cases of the kernel's family: it meets no other, and has no record for them."""
    return [case for case in cases if family_of(case) == kernel["family"]]


def describe(options: WorkerOptions, cases: list[str]) -> dict[str, Any]:
    """Ask a worker for its machine and kernels. Raises Unfit, or WorkerDied with the last thing the worker printed."""
    with tempfile.TemporaryDirectory() as folder:
        worker = WorkerProcess(options, Path(folder) / "worker.log")
        try:
            for event in worker.ask(120.0, op="describe", cases=cases):
                if event["event"] == "described":
                    return event
                if event["event"] == "broken":
                    raise WorkerDied(Verdict(event["verdict"]), event["detail"], "", "describe")
        finally:
            worker.close()
    raise AssertionError("unreachable: events() ends only by an exception")


def probe(options: WorkerOptions, log: Path, name: str) -> tuple[str, str]:
    """Import a kernel's package in a worker of its own: why it cannot run, why it has a none arm alone; "" where nothing.

    Raises WorkerDied if the import ends the process.
    """
    worker = WorkerProcess(dataclasses.replace(options, prefix=()), log)
    try:
        for event in worker.ask(60.0, op="probe", name=name):
            if event["event"] == "probed":
                return event["problem"], event["none_only"]
            if event["event"] == "broken":
                return event["detail"], ""
    finally:
        worker.close()
    raise AssertionError("unreachable: events() ends only by an exception")
