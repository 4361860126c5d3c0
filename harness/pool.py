"""Many cases through kernels at once: workers that stay, a crash that costs one job, outcomes as they come.

`threearm run` takes kernels one after the other, so that nothing disturbs a time; here nothing is timed against anything else, and
what counts is cases a second.
"""
from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from harness.asking import Asker, Settings
from harness.client import WorkerOptions
from harness.record import Record

AHEAD = 2  # jobs in the queue of a group for each of its workers


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel's arms on one case. Jobs of one group share workers, and never meet those of another: wheels that export the same
    C++ symbols must not come into one process."""

    case: str
    kernel: str
    arms: tuple[str, ...]
    group: str = ""


@dataclasses.dataclass
class Outcome:
    """What became of a job: a record for each arm, also when it ended the worker. seconds: from its start to its last record, a worker
    that had to be started included."""

    job: Job
    records: list[Record]
    seconds: float


class _Group:
    """A group's workers, each with a thread of its own that lives as long as the pool: a worker is ended with the thread that started
    it (PR_SET_PDEATHSIG goes by threads)."""

    def __init__(self, make: Callable[[Callable[[Record], None]], Asker], count: int, done: queue.Queue[Outcome | BaseException]) -> None:
        self.line: queue.Queue[Job | None] = queue.Queue()
        self.done = done
        self.askers: list[Asker] = []
        self.threads = [threading.Thread(target=self._work, args=(make,), daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _work(self, make: Callable[[Callable[[Record], None]], Asker]) -> None:
        records: list[Record] = []
        asker = make(lambda record: records.append(record))
        self.askers.append(asker)
        while (job := self.line.get()) is not None:
            records.clear()
            start = time.perf_counter()
            try:
                asker.run_case(job.kernel, job.case, list(job.arms))
                self.done.put(Outcome(job, list(records), time.perf_counter() - start))
            except BaseException as error:  # for whoever waits for the outcome
                self.done.put(error)
        asker.kill()

    def empty(self) -> None:
        """Forget the jobs that no worker has begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.line.get_nowait()

    def end(self) -> None:
        """End the workers, also in the middle of a job."""
        self.empty()
        for _ in self.threads:
            self.line.put(None)
        for asker in self.askers:
            asker.stop()
        for thread in self.threads:
            thread.join()


class Pool:
    """`count` workers for each group of jobs, started when the group's first job comes.

    Use it as a context manager: leaving it ends every worker. `run` and `one` raise what starting a worker raises (client.Unfit).
    """

    def __init__(self, options: WorkerOptions, settings: Settings, count: int, log: Path = Path(os.devnull)) -> None:
        self.make: Callable[[Callable[[Record], None]], Asker] = lambda add: Asker(options, settings, log, add)
        self.count = count
        self.groups: dict[str, _Group] = {}
        self.done: queue.Queue[Outcome | BaseException] = queue.Queue()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for group in self.groups.values():
            group.end()
        self.groups.clear()
        self.done = queue.Queue()

    def one(self, job: Job) -> Outcome:
        """One job, now. Not while `run` is going on."""
        return next(iter(self.run([job])))

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Outcomes in the order in which they come. Jobs are taken from the iterable as workers become free, a few ahead.

        A caller that leaves the loop early, or is interrupted in it, ends the pool.
        """
        source, out, exhausted = iter(jobs), 0, False
        try:
            while not exhausted or out:
                while not exhausted and out < AHEAD * self.count * max(1, len(self.groups)):
                    job = next(source, None)
                    if job is None:
                        exhausted = True
                    else:
                        self._group(job.group).line.put(job)
                        out += 1
                if out:
                    found = self.done.get()
                    out -= 1
                    if isinstance(found, BaseException):
                        raise found
                    yield found
        finally:
            if out:
                self.__exit__(None, None, None)

    def _group(self, name: str) -> _Group:
        if name not in self.groups:
            self.groups[name] = _Group(self.make, self.count, self.done)
        return self.groups[name]
