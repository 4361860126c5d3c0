"""One worker that is asked to take cases through a kernel, and replaced when it dies: its events become records."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cases import Case, family_of, parse_case
from harness.client import WorkerDied, WorkerOptions, WorkerProcess
from harness.record import Record, Timing
from harness.verdicts import Check, Verdict, worst


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides how cases are run. contract "" times nothing, "auto" is the family's own; timeout 0 lets it follow from
    the case's work; time_wrong: arms whose answer is wrong are timed, too; launches: back to back for run-to-run, 0 for a few."""

    contract: str = ""
    samples: int = 30
    fp64: bool = False
    timeout: float = 0.0
    time_wrong: bool = False
    launches: int = 0


AUTO_ON_CUDA = {"sparse_prefill": "kernel", "indexer_topk": "span"}
"""Contract `auto`. An indexer kernel is many launches and may read counts back in between: what they cost together is its time."""

Progress = Callable[[str, str, str], None]
"""Called with case, arm and phase as they change."""


def contract_of(family: str, contract: str, device: str) -> str:
    """The contract that `contract` stands for in a family, on a device."""
    if contract != "auto":
        return contract
    return AUTO_ON_CUDA[family] if device.startswith("cuda") else "wall"


def seconds_allowed(case: Case, device: str, launches: int = 0) -> float:
    """How long one phase may take without a sign of life: 60 s, plus a pessimistic rate for the work of a dozen launches, or of as many
    as are made back to back."""
    return 60 + max(12, launches) * case.work / (1e12 if device.startswith("cuda") else 2e9)


class Asker:
    """Takes cases through kernels in a worker process that it starts when it is first needed and replaces when it dies.

    add: called with each record as it is known.
    """

    def __init__(self, options: WorkerOptions, settings: Settings, log: Path, add: Callable[[Record], None],
                 progress: Progress = lambda case, arm, phase: None) -> None:
        self.options, self.settings, self.log, self.add, self.progress = options, settings, log, add, progress
        self.worker: WorkerProcess | None = None
        self.stopped = False

    def run_case(self, name: str, case: str, arms: list[str]) -> None:
        """One kernel on one case. An arm that ends the worker gets its verdict, and a fresh worker takes those that have none yet."""
        known: set[str] = set()
        dead: set[str] = set()
        idle_deaths = 0

        def keep(record: Record) -> None:
            if record.arm not in known:
                known.add(record.arm)
                self.add(record)

        while todo := [arm for arm in arms if arm not in dead]:
            if all(f"{name}/{arm}" in known for arm in todo):
                return
            try:
                self._ask(name, case, todo, keep)
                return
            except WorkerDied as death:
                self.worker = None
                if self.stopped:
                    return
                idle_deaths += death.phase == "idle"
                if death.phase == "idle" and idle_deaths < 3:
                    continue  # it died of something earlier: not this case's doing
                culprit = death.arm.rpartition("/")[2]
                record = Record(case, f"{name}/{culprit}", death.verdict, death.detail)
                if culprit in todo and death.phase != "timing":
                    dead.add(culprit)
                    keep(record)
                else:  # not one arm's doing: the case cannot be made here, or timing ended the worker
                    for other in todo:
                        keep(dataclasses.replace(record, arm=f"{name}/{other}"))
                    return

    def _ask(self, name: str, case: str, arms: list[str], keep: Callable[[Record], None]) -> None:
        """Send one request and turn its events into records. Whatever is known is kept, also when the worker dies."""
        waiting: dict[str, Record] = {}
        limit = self.settings.timeout or seconds_allowed(parse_case(case), self.options.device, self.settings.launches)
        contract = contract_of(family_of(case), self.settings.contract, self.options.device)
        request = {"op": "run_case", "text": case, "name": name, "arms": arms, "contract": contract,
                   "samples": self.settings.samples, "fp64": self.settings.fp64, "time_wrong": self.settings.time_wrong,
                   "launches": self.settings.launches}
        try:
            for event in self._worker().ask(limit, **request):
                if event["event"] == "phase":
                    self.progress(case, event["arm"] or name, event["phase"])
                elif event["event"] == "checked":
                    record = msgspec.convert(event["record"], Record)
                    if event["timed"]:
                        waiting[record.arm] = record  # its time is still to come
                    else:
                        keep(record)
                elif event["event"] == "timed":
                    keep(with_time(waiting.pop(event["arm"]), event["timing"], event["check"]))
                elif event["event"] == "untimed":
                    waiting = {arm: dataclasses.replace(r, note=f"not timed: {event['reason']}") for arm, r in waiting.items()}
                elif event["event"] == "broken":
                    for arm in (f"{name}/{arm}" for arm in arms):
                        found = waiting.pop(arm, Record(case, arm, Verdict.ERROR))
                        keep(dataclasses.replace(found, verdict=Verdict(event["verdict"]), detail=event["detail"]))
                    self.close()  # it may be short of memory, or about to die
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
                keep(record)

    def _worker(self) -> WorkerProcess:
        if self.worker is None:
            self.worker = WorkerProcess(self.options, self.log)
        return self.worker

    def close(self) -> None:
        """Let the worker end by itself."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def stop(self) -> None:
        """End the worker from another thread than the one that is asking it; run_case then returns with what it has."""
        self.stopped = True
        worker = self.worker
        if worker is not None:
            worker.end_process()

    def kill(self) -> None:
        """End the worker at once."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


def with_time(record: Record, timing: dict[str, Any], check: dict[str, Any]) -> Record:
    """The record with its time and the check of the timed loop's output."""
    checks = [*record.checks, msgspec.convert(check, Check)]
    return dataclasses.replace(record, checks=checks, verdict=worst([c.verdict for c in checks]), time=msgspec.convert(timing, Timing))
