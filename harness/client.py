"""The parent's end of a worker: start it, send a request, read its lines, keep the clock, and say how it died."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.verdicts import Verdict

POLL = 0.05
"""Seconds between two looks at the worker's memory."""
GRACE = 5.0
PRINTED = 1 << 28
"""Bytes that a worker may print for one request: a kernel that prints without end fills a disk within minutes."""
KEPT = 1 << 20  # of them, when it printed more
LONGEST_LINE = 1 << 25  # bytes; an event has a few thousand
ROOT = Path(__file__).parent.parent


OURS = ("arms", "cases", "harness", "references")
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would bring our packages into another interpreter; it gets them only where WorkerOptions.environment says so."""

START = f"""
import ctypes, importlib.machinery, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: when the parent is gone, so is the worker, however deep in a launch it is
class Ours:  # our packages from here and nothing else: the folder may be the site-packages of another environment
    def find_spec(name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}]) if name in {OURS!r} else None
sys.meta_path.insert(0, Ours)
if sys.path[0] == "":
    sys.path.pop(0)  # the working directory, where anything may have the name of anything
from harness.worker import main
sys.exit(main(sys.argv[1:]))
"""


class WorkerDied(Exception):
    """The worker is gone. verdict: CRASHED, TIMEOUT or OOM; detail: one line; arm, phase: what it was doing."""

    def __init__(self, verdict: Verdict, detail: str, arm: str, phase: str) -> None:
        super().__init__(detail)
        self.verdict, self.detail, self.arm, self.phase = verdict, detail, arm, phase


class Unfit(Exception):
    """The environment cannot run workers as asked: there is no such device. One line."""


class Unloadable(Unfit):
    """What was given to be loaded is wrong, not the environment: a kernel file that does not import, or registers nothing."""


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """How workers are started. memory: bytes of resident memory a worker may use; environment: variables that decide how kernels
    run, as NAME=value; workers get them also where this process lacks them (--resume); prefix: a program, with its options, that
    starts the worker and watches it (harness/sanitize.py)."""

    device: str
    broken: bool
    load: tuple[str, ...]
    memory: int
    python: str = sys.executable
    environment: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()


def default_memory() -> int:
    """85 % of the memory available now, in bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(int(line.split()[1]) * 1024 * 0.85)
    return 1 << 62


class WorkerProcess:
    """One worker process; its stdout and stderr are appended to `log`.

    Raises Unfit or Unloadable if it cannot start as asked, WorkerDied whenever it ends or overruns its time.
    """

    def __init__(self, options: WorkerOptions, log: Path, start_limit: float = 300.0) -> None:
        self.options, self.log, self.arm, self.phase = options, log, "", "start"
        self.mark = f"THREEARM_WORKER={secrets.token_hex(8)}"  # in its environment, which whatever it starts inherits
        self.printed = printed(log)
        self.process, self.requests, self.answers = self._spawn()
        self.buffer = bytearray()
        try:
            for event in self.events(start_limit):
                if event["event"] == "ready":
                    return
                if event["event"] == "unfit":
                    raise Unfit(event["reason"])
                if event["event"] == "unloadable":
                    raise Unloadable(event["reason"])
        except BaseException:  # also an interrupt: nobody else knows of the process yet
            self.kill()
            raise

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int, int]:
        to_worker, requests = os.pipe()
        answers, from_worker = os.pipe()
        # Under another program the worker is no child of ours, and may be one of a thread that ends: the signal is ours to get rid of.
        start = START.replace("prctl(1, 9)", "prctl(1, 0)") if self.options.prefix else START
        command = [*self.options.prefix, self.options.python, "-c", start, str(to_worker), str(from_worker), self.options.device,
                   "1" if self.options.broken else "0", *self.options.load]
        inherited = {name: value for name, value in os.environ.items() if self.options.python == sys.executable or name not in FOREIGN}
        settings = dict(word.split("=", 1) for word in (*self.options.environment, self.mark))
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                command, pass_fds=(to_worker, from_worker), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**inherited, **settings}, start_new_session=True)
        os.close(to_worker)
        os.close(from_worker)
        # If memory runs out faster than the watch below sees it, the kernel should take the worker, not the parent.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000", encoding="ascii")
        return process, requests, answers

    def ask(self, limit: float, why: str = "", **request: Any) -> Iterator[dict[str, Any]]:
        """Send a request and yield its events; a worker that dies before the first one was "idle".

        limit: seconds allowed between two events (each phase has its own limit); why: what they follow from, for whoever overruns them.
        """
        self.arm, self.phase, self.printed = "", "idle", printed(self.log)
        with contextlib.suppress(BrokenPipeError):  # a worker that is gone is reported by events()
            os.write(self.requests, (json.dumps(request) + "\n").encode())
        return self.events(limit, why)

    def events(self, limit: float, why: str = "") -> Iterator[dict[str, Any]]:
        """Yield events until the caller stops. Raises WorkerDied."""
        allowed = limit
        deadline = time.monotonic() + allowed
        while True:
            line = self._line()
            if line is not None:
                try:
                    event: dict[str, Any] = json.loads(line)
                    if event["event"] == "phase":
                        self.arm, self.phase = event["arm"], event["phase"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    raise self.disturbed() from None
                allowed = limit * PHASE_FACTOR.get(self.phase, 1.0)
                deadline = time.monotonic() + allowed
                yield event
                continue
            if self.process.poll() is not None and not self._readable():
                raise self._death()
            if len(self.buffer) > LONGEST_LINE:
                raise self.disturbed()
            if self._resident() > self.options.memory:
                raise self._ended(Verdict.OOM, f"{self.options.memory / 2**30:.1f} GiB of memory exceeded")
            if printed(self.log) - self.printed > PRINTED:
                death = self._ended(Verdict.CRASHED, f"more than {PRINTED >> 20} MiB printed")
                with contextlib.suppress(OSError):
                    os.truncate(self.log, self.printed + KEPT)
                raise death
            if time.monotonic() > deadline:
                raise self._ended(Verdict.TIMEOUT, f"no answer for {allowed:.0f} s", from_what(limit, allowed, why))

    def disturbed(self) -> WorkerDied:
        """End a worker whose descriptor says what no worker says. How it died."""
        return self._ended(Verdict.CRASHED, "something else wrote to the worker's descriptor")

    def _ended(self, verdict: Verdict, what: str, more: str = "") -> WorkerDied:
        """End the worker. How it died, to be raised."""
        self.kill()
        return WorkerDied(verdict, f"{what} in phase {self.phase}{more}", self.arm, self.phase)

    def _readable(self) -> bool:
        return bool(select.select([self.answers], [], [], POLL)[0]) and self._fill()

    def _fill(self) -> bool:
        data = os.read(self.answers, 1 << 20)
        self.buffer += data
        return bool(data)

    def _line(self) -> bytes | None:
        if b"\n" not in self.buffer:
            self._readable()
        end = self.buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        return line

    def _resident(self) -> int:
        pids = carriers(self.mark) if self.options.prefix else [self.process.pid]
        return sum(map(resident, pids))

    def _death(self) -> WorkerDied:
        code = self.process.wait()
        self.kill()  # what it started may live on
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            detail = f"signal {known.get(-code, -code)} in phase {self.phase}"
        else:
            detail = f"exit code {code} in phase {self.phase}"
        last = log_tail(self.log, self.printed)
        return WorkerDied(Verdict.CRASHED, detail + (f"; last output: {last}" if last else ""), self.arm, self.phase)

    def end_process(self) -> None:
        """End the worker and whatever it started. Whoever reads its events is told that it died."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for _ in range(PASSES):  # those in sessions of their own; again, for what they started meanwhile
            pids = carriers(self.mark)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                return
            time.sleep(POLL / 10)

    def kill(self) -> None:
        """End the worker and whatever it started, and free its descriptors."""
        self.end_process()
        self.process.wait()
        for descriptor in (self.requests, self.answers):
            if descriptor >= 0:
                os.close(descriptor)
        self.requests = self.answers = -1

    def close(self) -> None:
        """Let the worker end by itself, then make sure of it."""
        if self.requests >= 0:
            os.close(self.requests)
            self.requests = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(12 * GRACE if self.options.prefix else GRACE)  # whoever watches it has a report to write
        self.kill()


PHASE_FACTOR = {"prepare": 10.0, "import": 10.0, "first launch": 10.0, "timing": 10.0, "start": 5.0}
"""Phases that may take longer than a launch: a first use compiles (nvcc needs two minutes), timing repeats."""


PASSES = 20


def carriers(mark: str) -> list[int]:
    """Processes that have the mark, NAME=value, in the environment that they were started with. One that has ended has none."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as file:  # it ended, or is somebody else's
                found += [int(entry.name)] if mark.encode() in file.read().split(b"\0") else []
    return found


def resident(pid: int) -> int:
    """Bytes of a process that are in memory; 0 where it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def from_what(limit: float, allowed: float, why: str) -> str:
    """What a deadline follows from, in brackets; "" where nobody said."""
    times = f"{allowed / limit:g} times {limit:.0f} s: " if allowed != limit else ""
    return f" ({times}{why})" if why else ""


def printed(log: Path) -> int:
    """Bytes that a log holds."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def log_tail(log: Path, since: int = 0) -> str:
    """The last non-empty line of what workers printed after so many bytes, shortened."""
    try:
        with open(log, "rb") as file:
            file.seek(max(since, log.stat().st_size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""
