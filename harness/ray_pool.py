"""A pool over a Ray cluster: what harness/pool.py is on one machine. An actor has one GPU, or one core, and takes one job at a time.

The project's code and the kernel files of --load are sent along; what the kernels import must be installed on every node. A lost actor
is replaced and its case run again; a case that loses a second one is an ERROR, for it may be the case's doing.
"""
from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.asking import Settings
from harness.client import Unfit, WorkerOptions
from harness.pool import Job, Outcome
from harness.ray_cluster import device_of, first_line, last_line, reachable, staged
from harness.ray_node import Answer, Node, Taken
from harness.record import Record
from harness.verdicts import Verdict

START = 300.0
"""Seconds that the cluster may take to give a first actor: it may have to start a node, and to send the code."""
LOOK = 1.0  # seconds between two looks at the clock
FAILED_STARTS = 3  # in a row, after which no other is tried
GRACE = 5.0  # seconds for actors to end their workers


@dataclasses.dataclass
class Member:
    """One actor. groups: of the jobs that it has had, whose workers it keeps."""

    actor: Any
    where: str = "an actor that had not started"
    groups: set[str] = dataclasses.field(default_factory=set)


class RayPool:
    """`count` actors, 0 for as many as the cluster has GPUs or cores. Use it as a context manager: leaving it ends them all.

    options.device: `auto` is cuda where the cluster has GPUs. options.memory 0: what each node has. address: `local` starts a Ray on this
    machine, `auto` and HOST:PORT join one that runs. tell: called with a line for each actor that is lost. log: what workers print.
    `join` it first; `run`, `one`, `describe` and `probe` raise Unfit where a node cannot start workers.
    """

    def __init__(self, options: WorkerOptions, settings: Settings, count: int, address: str, tell: Callable[[str], None]) -> None:
        self.options, self.settings, self.count, self.address, self.tell = options, settings, count, address, tell
        self.log = Path(os.devnull)
        self.ray: Any = None
        self.code: Path | None = None
        self.about = ""  # the cluster, in words
        self.idle: list[Member] = []
        self.busy: dict[Any, tuple[Member, Job]] = {}
        self.starting: dict[Any, Member] = {}
        self.lost_once: set[Job] = set()
        self.losses = self.failed_starts = 0
        self.waiting_since = time.monotonic()

    def __enter__(self) -> RayPool:
        return self

    def join(self) -> None:
        """Connect, and start the actors. Raises Unfit where there is no such cluster."""
        try:
            load = self._connect()
            resources = self.ray.cluster_resources()
            self.options = dataclasses.replace(self.options, device=device_of(self.options.device, resources), load=load)
            self.about = (f"ray {self.ray.__version__}, {sum(node['Alive'] for node in self.ray.nodes())} nodes, "
                          f"{resources.get('CPU', 0):g} cores, {resources.get('GPU', 0):g} GPUs")
            self.count = self.count or max(1, int(resources.get("GPU" if self._on_cuda else "CPU", 1)))
            for _ in range(self.count):
                self._start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def _on_cuda(self) -> bool:
        return self.options.device.startswith("cuda")

    def _connect(self) -> tuple[str, ...]:
        """Connect, and send the code. The kernel files of --load, as nodes find them. Raises Unfit."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers unless it is told not to
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # says what it will do in a later version, in each process
        try:
            import ray
        except ImportError as error:
            raise Unfit(f"--executor ray: {error}; pip install ray") from None
        reachable(self.address)
        self.ray, self.code = ray, Path(tempfile.mkdtemp(prefix="threearm-code-"))
        load = staged(self.code, self.options.load)
        cores = max(self.count, len(os.sched_getaffinity(0)))
        here = {"num_cpus": cores, "include_dashboard": False} if self.address == "local" else {}
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.CRITICAL,
                     runtime_env={"working_dir": str(self.code)}, **here)
        except Exception as error:  # of many kinds: no such cluster, another version, no room for its files
            raise Unfit(f"--ray-address {self.address}: {first_line(error)}") from None
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray's own ends the process without a word
        return load

    def describe(self, options: WorkerOptions, cases: list[str]) -> dict[str, Any]:
        """harness.runner.describe on a node: options are the pool's. Raises Unfit, WorkerDied."""
        found: dict[str, Any] = self._ask(lambda actor: actor.describe.remote(cases))
        return found

    def probe(self, options: WorkerOptions, log: Path, name: str) -> tuple[str, str]:
        """harness.runner.probe on a node. Raises WorkerDied."""
        found: tuple[str, str] = self._ask(lambda actor: actor.probe.remote(name))
        return found

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """The answer of the first actor there is. Not while `run` is going on."""
        while not self.idle:
            self._next()
        try:
            answer: Answer = self.ray.get(question(self.idle[0].actor))
        except self.ray.exceptions.RayActorError as error:
            raise Unfit(f"{self.idle[0].where} was lost: {first_line(error)}") from None
        return answer.value()

    def one(self, job: Job) -> Outcome:
        """One job, now. Not while `run` is going on."""
        return next(iter(self.run([job])))

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Outcomes in the order in which they come. A job is taken from the iterable when an actor is free for it.

        A caller that leaves the loop early, or is interrupted in it, ends the pool.
        """
        source, again, more = iter(jobs), deque[Job](), True
        self.waiting_since = time.monotonic()
        try:
            while True:
                while self.idle and (again or more):
                    job = again.popleft() if again else next(source, None)
                    if job is None:
                        more = False
                    else:
                        self._send(job)
                if not (self.busy or again or more):
                    return
                found = self._next()
                if isinstance(found, Outcome):
                    yield found
                elif found:
                    again.append(found)
        finally:
            if self.busy:
                self.close()

    def _send(self, job: Job) -> None:
        """To an idle actor, one that has a worker of the job's group if there is one."""
        member = next((member for member in self.idle if job.group in member.groups), self.idle[0])
        self.idle.remove(member)
        member.groups.add(job.group)
        self.busy[member.actor.take.remote(job)] = member, job

    def _next(self) -> Outcome | Job | None:
        """Wait for one thing: an outcome, or a job that is to be run again, or None: an actor came, or nothing for a while."""
        refs = [*self.busy, *self.starting]
        ready, _ = self.ray.wait(refs, num_returns=1, timeout=LOOK) if refs else ([], [])
        if not ready:
            self._still_there()
            return None
        self.waiting_since = time.monotonic()
        if ready[0] in self.starting:
            self._started(ready[0])
            return None
        member, job = self.busy.pop(ready[0])
        try:
            taken: Taken = self.ray.get(ready[0])
        except self.ray.exceptions.RayTaskError:
            raise
        except self.ray.exceptions.RayError as error:
            return self._lost(member, job, first_line(error))
        self.idle.append(member)
        if taken.unfit:
            raise Unfit(taken.unfit)
        if taken.printed:
            with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as log:
                log.write(taken.printed)
        return Outcome(job, taken.records, taken.seconds)

    def _start(self) -> None:
        """Ask the cluster for one more actor."""
        kind = self.ray.remote(concurrency_groups={"control": 1})(Node)
        member = Member(kind.options(num_cpus=1, num_gpus=1 if self._on_cuda else 0).remote(
            dataclasses.replace(self.options, device="cuda" if self._on_cuda else self.options.device), self.settings))
        self.starting[member.actor.where.remote()] = member

    def _started(self, ref: Any) -> None:
        """An actor is there, or could not be made."""
        member = self.starting.pop(ref)
        try:
            member.where = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            self.failed_starts += 1
            self.tell(f"ray: an actor could not be started: {last_line(error)}")
            if self.failed_starts < FAILED_STARTS:
                self._start()
            elif not (self.idle or self.busy or self.starting):
                raise Unfit(f"no actor could be started: {last_line(error)}") from None
            return
        self.failed_starts = 0
        self.idle.append(member)

    def _lost(self, member: Member, job: Job, why: str) -> Outcome | Job:
        """An actor is gone in the middle of a job: start another. The job, to be run again; its outcome if this was the second time."""
        self.losses += 1
        with contextlib.suppress(Exception):  # it may only be out of reach
            self.ray.kill(member.actor)
        self._start()
        if job not in self.lost_once:
            self.lost_once.add(job)
            self.tell(f"ray: lost {member.where}: {why}; {job.kernel} on {job.case} is run again on another")
            return job
        self.tell(f"ray: lost {member.where}: {why}; the second time with {job.kernel} on {job.case}")
        detail = f"two actors were lost in it, the last on {member.where}: {why}"
        return Outcome(job, [Record(job.case, f"{job.kernel}/{arm}", Verdict.ERROR, detail) for arm in job.arms], 0.0)

    def _still_there(self) -> None:
        """Raises Unfit where nothing is under way, and nothing came for too long."""
        if self.busy or self.idle or (self.starting and time.monotonic() - self.waiting_since < START):
            return
        wanted = "1 core and 1 GPU" if self._on_cuda else "1 core"
        raise Unfit(f"the cluster gives no actor ({wanted} each): it has {self.about}")

    def close(self) -> None:
        """End every actor with its workers, and leave the cluster."""
        members = [*self.idle, *(member for member, _ in self.busy.values()), *self.starting.values()]
        started = [member for member in members if member not in self.starting.values()]
        with contextlib.suppress(Exception):  # the cluster may be gone
            stopped = [member.actor.stop.options(concurrency_group="control").remote() for member in started]
            if stopped:
                self.ray.wait(stopped, num_returns=len(stopped), timeout=GRACE)
        for member in members:
            with contextlib.suppress(Exception):
                self.ray.kill(member.actor)
        self.idle, self.busy, self.starting = [], {}, {}
        if self.ray is not None:
            with contextlib.suppress(Exception):
                self.ray.shutdown()
        if self.code is not None:
            shutil.rmtree(self.code, ignore_errors=True)
