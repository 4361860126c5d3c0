"""Takes cases through kernels: one fresh worker a kernel, one record an arm and case, whatever becomes of the worker.

A kernel has its worker to itself: a wheel that poisons a context, or exports the same C++ symbols as another one (two builds
of FlashMLA do), is then no other kernel's trouble.
"""
from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cases import Case, family_of, parse_case
from harness.client import WorkerDied, WorkerOptions, WorkerProcess
from harness.record import Record, Timing
from harness.runfolder import RunFolder
from harness.verdicts import Check, Verdict, worst


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides how cases are run. contract "" times nothing, "auto" is the family's own; timeout 0 lets it follow from
    the case's work; time_wrong: arms whose answer is wrong are timed, too."""

    contract: str = ""
    samples: int = 30
    fp64: bool = False
    timeout: float = 0.0
    time_wrong: bool = False


AUTO_ON_CUDA = {"sparse_prefill": "kernel", "indexer_topk": "span"}
"""Contract `auto`. An indexer kernel is many launches and may read counts back in between: what they cost together is its time."""


def contract_of(family: str, contract: str, device: str) -> str:
    """The contract that `contract` stands for in a family, on a device."""
    if contract != "auto":
        return contract
    return AUTO_ON_CUDA[family] if device.startswith("cuda") else "wall"


Progress = Callable[[str, str, str], None]
"""Called with case, arm and phase as they change."""


class Runner:
    """Runs what is planned and writes records into a folder. describe() must have been asked for the kernels."""

    def __init__(self, folder: RunFolder, options: WorkerOptions, settings: Settings, kernels: list[dict[str, Any]],
                 progress: Progress) -> None:
        self.folder, self.options, self.settings, self.kernels, self.progress = folder, options, settings, kernels, progress
        self.worker: WorkerProcess | None = None
        self.finished = folder.done()
        self.log = folder.path / "worker.log" if folder.path else Path(os.devnull)

    def run(self) -> None:
        """Every kernel on every case. A record that is there already is not made again."""
        try:
            for kernel in self.kernels:
                self._run_kernel(kernel)
                self._end_worker()
        finally:
            if self.worker is not None:
                self.worker.kill()
        self.folder.finish()

    def _run_kernel(self, kernel: dict[str, Any]) -> None:
        name, why_not, none_only = kernel["name"], kernel["why_not"], ""
        if not why_not and kernel["imports"] and self._pending(kernel):
            try:
                why_not, none_only = probe(self.options, self.log, name)
            except WorkerDied as death:
                self._add_all(kernel, death.verdict, f"importing {kernel['imports']}: {death.detail}")
                return
        for case in cases_of(kernel, self.folder.info.cases):
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
        """One kernel on one case. An arm that ends the worker gets its verdict, and a fresh worker takes the others."""
        dead: set[str] = set()
        idle_deaths = 0
        while True:
            todo = [arm for arm in arms if arm not in dead]
            if all((case, f"{name}/{arm}") in self.finished for arm in todo):
                return
            try:
                self._ask(name, case, todo)
                return
            except WorkerDied as death:
                self.worker = None
                idle_deaths += death.phase == "idle"
                if death.phase == "idle" and idle_deaths < 3:
                    continue  # it died of something earlier: not this case's doing
                culprit = death.arm.rpartition("/")[2]
                record = Record(case, f"{name}/{culprit}", death.verdict, death.detail)
                if culprit in todo and death.phase != "timing":
                    dead.add(culprit)
                    self._add(record)
                else:  # not one arm's doing: the case cannot be made here, or timing ended the worker
                    for other in todo:
                        self._add(dataclasses.replace(record, arm=f"{name}/{other}"))
                    return

    def _ask(self, name: str, case: str, arms: list[str]) -> None:
        """Send one request and turn its events into records. Whatever is known is written, also when the worker dies."""
        waiting: dict[str, Record] = {}
        limit = self.settings.timeout or seconds_allowed(parse_case(case), self.options.device)
        contract = contract_of(family_of(case), self.settings.contract, self.options.device)
        request = {"op": "run_case", "text": case, "name": name, "arms": arms, "contract": contract,
                   "samples": self.settings.samples, "fp64": self.settings.fp64, "time_wrong": self.settings.time_wrong}
        try:
            for event in self._worker().ask(limit, **request):
                if event["event"] == "phase":
                    self.progress(case, event["arm"] or name, event["phase"])
                elif event["event"] == "checked":
                    record = msgspec.convert(event["record"], Record)
                    if event["timed"]:
                        waiting[record.arm] = record  # its time is still to come
                    else:
                        self._add(record)
                elif event["event"] == "timed":
                    self._add(with_time(waiting.pop(event["arm"]), event["timing"], event["check"]))
                elif event["event"] == "untimed":
                    waiting = {arm: dataclasses.replace(r, note=f"not timed: {event['reason']}") for arm, r in waiting.items()}
                elif event["event"] == "broken":
                    for arm in (f"{name}/{arm}" for arm in arms):
                        known = waiting.pop(arm, Record(case, arm, Verdict.ERROR))
                        self._add(dataclasses.replace(known, verdict=Verdict(event["verdict"]), detail=event["detail"]))
                    self._end_worker()  # it may be short of memory, or about to die
                    return
                elif event["event"] == "done":
                    return
        except WorkerDied as death:
            waiting = {arm: dataclasses.replace(r, note="not timed: another arm ended the worker") for arm, r in waiting.items()}
            if death.phase == "timing":
                waiting = {arm: dataclasses.replace(r, verdict=death.verdict, detail=death.detail) for arm, r in waiting.items()}
            raise
        finally:
            for record in waiting.values():
                self._add(record)

    def _add(self, record: Record) -> None:
        key = (record.case, record.arm)
        if key not in self.finished:
            self.finished.add(key)
            self.folder.add(record)

    def _worker(self) -> WorkerProcess:
        if self.worker is None:
            self.worker = WorkerProcess(self.options, self.log)
        return self.worker

    def _end_worker(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None


def with_time(record: Record, timing: dict[str, Any], check: dict[str, Any]) -> Record:
    """The record with its time and the check of the timed loop's output."""
    checks = [*record.checks, msgspec.convert(check, Check)]
    return dataclasses.replace(record, checks=checks, verdict=worst([c.verdict for c in checks]), time=msgspec.convert(timing, Timing))


def cases_of(kernel: dict[str, Any], cases: list[str]) -> list[str]:
    """The cases of the kernel's family: it meets no other, and has no record for them."""
    return [case for case in cases if family_of(case) == kernel["family"]]


def seconds_allowed(case: Case, device: str) -> float:
    """How long one phase may take without a sign of life: 60 s, plus a pessimistic rate for the work of a dozen launches."""
    return 60 + 12 * case.work / (1e12 if device.startswith("cuda") else 2e9)


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
    worker = WorkerProcess(options, log)
    try:
        for event in worker.ask(60.0, op="probe", name=name):
            if event["event"] == "probed":
                return event["problem"], event["none_only"]
            if event["event"] == "broken":
                return event["detail"], ""
    finally:
        worker.close()
    raise AssertionError("unreachable: events() ends only by an exception")
