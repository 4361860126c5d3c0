"""One actor of a Ray cluster: takes a campaign's cases through kernels in workers of its own node. Needs no Ray itself."""
from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.asking import Asker, Settings
from harness.client import ROOT, Unfit, WorkerDied, WorkerOptions, default_memory
from harness.pool import Job
from harness.record import Record
from harness.runner import describe, probe
from harness.verdicts import Verdict

PRINTED = 1 << 16
"""Bytes of what a worker printed in one job that are sent back, the last ones."""


@dataclasses.dataclass
class Taken:
    """What became of a job. printed: by its worker; unfit: why no worker can be started here, or ""."""

    records: list[Record]
    seconds: float
    printed: str = ""
    unfit: str = ""


@dataclasses.dataclass
class Answer:
    """What a worker of the node was asked for once, or why it has no answer: unfit, or (verdict, detail, arm, phase) of its death."""

    found: Any = None
    unfit: str = ""
    died: tuple[str, str, str, str] | None = None

    def value(self) -> Any:
        """What was found. Raises Unfit, WorkerDied, as if the worker had been started here."""
        if self.unfit:
            raise Unfit(self.unfit)
        if self.died:
            verdict, detail, arm, phase = self.died
            raise WorkerDied(Verdict(verdict), detail, arm, phase)
        return self.found


class Node:
    """A worker process for each group of jobs that came here, one of them at work at a time: an actor has its GPU, if any, to itself.

    options: load is relative to the code that was sent; memory 0 is 85 % of what the node has.
    """

    def __init__(self, options: WorkerOptions, settings: Settings) -> None:
        self.options = dataclasses.replace(options, python=sys.executable, memory=options.memory or default_memory(),
                                           load=tuple(str(ROOT / path) for path in options.load))
        self.settings = settings
        self.log = Path(tempfile.mkdtemp(prefix="threearm-ray-")) / "worker.log"
        self.askers: dict[str, Asker] = {}
        self.records: list[Record] = []

    def where(self) -> str:
        """Host and process, for whoever is told of its loss."""
        return f"{socket.gethostname()} pid {os.getpid()}"

    def describe(self, cases: list[str]) -> Answer:
        """harness.runner.describe, here."""
        return self._answer(lambda: describe(self.options, cases))

    def probe(self, name: str) -> Answer:
        """harness.runner.probe, here."""
        return self._answer(lambda: probe(self.options, self.log, name))

    def take(self, job: Job) -> Taken:
        """Run a job. A worker that dies of it is replaced, as everywhere."""
        if job.group not in self.askers:
            self.askers[job.group] = Asker(self.options, self.settings, self.log, lambda record: self.records.append(record))
        self.records = []
        start = time.perf_counter()
        try:
            self.askers[job.group].run_case(job.kernel, job.case, list(job.arms))
        except Unfit as error:
            return Taken([], 0.0, unfit=f"{self.where()}: {error}")
        return Taken(self.records, time.perf_counter() - start, self._printed())

    def stop(self) -> None:
        """End the workers, also in the middle of a job: called from another thread than take."""
        for asker in list(self.askers.values()):
            asker.stop()
        shutil.rmtree(self.log.parent, ignore_errors=True)

    def _answer(self, question: Any) -> Answer:
        try:
            return Answer(question())
        except Unfit as error:
            return Answer(unfit=f"{self.where()}: {error}")
        except WorkerDied as death:
            return Answer(died=(death.verdict.value, death.detail, death.arm, death.phase))

    def _printed(self) -> str:
        """What workers printed since this was asked last; the file is emptied, workers append to it."""
        try:
            text = self.log.read_bytes()[-PRINTED:].decode(errors="replace")
            os.truncate(self.log, 0)
        except OSError:
            return ""
        return text
