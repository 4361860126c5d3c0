"""The parent's end of a worker: start it, send a request, read its lines, keep the clock, and say how it died."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
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
ROOT = Path(__file__).parent.parent


START = f"""
import ctypes, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: when the parent is gone, so is the worker, however deep in a launch it is
sys.path[0] = {str(ROOT)!r}  # not -m: that puts the working directory first, where anything may have the name of one of ours
from harness.worker import main
sys.exit(main(sys.argv[1:]))
"""


class WorkerDied(Exception):
    """The worker is gone. verdict: CRASHED, TIMEOUT or OOM; detail: one line; arm, phase: what it was doing."""

    def __init__(self, verdict: Verdict, detail: str, arm: str, phase: str) -> None:
        super().__init__(detail)
        self.verdict, self.detail, self.arm, self.phase = verdict, detail, arm, phase


class Unfit(Exception):
    """The environment cannot run workers as asked: no such device, a file to load that does not import. One line."""


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """How workers are started. memory: bytes of resident memory a worker may use; environment: variables that decide how kernels
    run, as NAME=value; workers get them also where this process lacks them (--resume)."""

    device: str
    broken: bool
    load: tuple[str, ...]
    memory: int
    python: str = sys.executable
    environment: tuple[str, ...] = ()


def default_memory() -> int:
    """85 % of the memory available now, in bytes."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(int(line.split()[1]) * 1024 * 0.85)
    return 1 << 62


class WorkerProcess:
    """One worker process; its stdout and stderr are appended to `log`.

    Raises Unfit if it cannot start as asked, WorkerDied whenever it ends or overruns its time.
    """

    def __init__(self, options: WorkerOptions, log: Path, start_limit: float = 300.0) -> None:
        self.options, self.log, self.arm, self.phase = options, log, "", "start"
        self.process, self.requests, self.answers = self._spawn()
        self.buffer = b""
        try:
            for event in self.events(start_limit):
                if event["event"] == "ready":
                    return
                if event["event"] == "unfit":
                    raise Unfit(event["reason"])
        except BaseException:  # also an interrupt: nobody else knows of the process yet
            self.kill()
            raise

    def _spawn(self) -> tuple[subprocess.Popen[bytes], int, int]:
        to_worker, requests = os.pipe()
        answers, from_worker = os.pipe()
        command = [self.options.python, "-c", START, str(to_worker), str(from_worker), self.options.device,
                   "1" if self.options.broken else "0", *self.options.load]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        settings = dict(word.split("=", 1) for word in self.options.environment)
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                command, pass_fds=(to_worker, from_worker), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": path, **settings}, start_new_session=True)
        os.close(to_worker)
        os.close(from_worker)
        # If memory runs out faster than the watch below sees it, the kernel should take the worker, not the parent.
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000", encoding="ascii")
        return process, requests, answers

    def ask(self, limit: float, **request: Any) -> Iterator[dict[str, Any]]:
        """Send a request and yield its events; a worker that dies before the first one was "idle".

        limit: seconds allowed between two events (each phase has its own limit).
        """
        self.arm, self.phase = "", "idle"
        with contextlib.suppress(BrokenPipeError):  # a worker that is gone is reported by events()
            os.write(self.requests, (json.dumps(request) + "\n").encode())
        return self.events(limit)

    def events(self, limit: float) -> Iterator[dict[str, Any]]:
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
                except (ValueError, TypeError, KeyError):
                    self.kill()
                    raise WorkerDied(Verdict.CRASHED, f"something else wrote to the worker's descriptor in phase {self.phase}",
                                     self.arm, self.phase) from None
                allowed = limit * PHASE_FACTOR.get(self.phase, 1.0)
                deadline = time.monotonic() + allowed
                yield event
                continue
            if self.process.poll() is not None and not self._readable():
                raise self._death()
            if self._resident() > self.options.memory:
                self.kill()
                detail = f"{self.options.memory / 2**30:.1f} GiB of memory exceeded in phase {self.phase}"
                raise WorkerDied(Verdict.OOM, detail, self.arm, self.phase)
            if time.monotonic() > deadline:
                self.kill()
                raise WorkerDied(Verdict.TIMEOUT, f"no answer for {allowed:.0f} s in phase {self.phase}", self.arm, self.phase)

    def _readable(self) -> bool:
        return bool(select.select([self.answers], [], [], POLL)[0]) and self._fill()

    def _fill(self) -> bool:
        data = os.read(self.answers, 1 << 20)
        self.buffer += data
        return bool(data)

    def _line(self) -> bytes | None:
        if b"\n" not in self.buffer:
            self._readable()
        line, newline, rest = self.buffer.partition(b"\n")
        if not newline:
            return None
        self.buffer = rest
        return line

    def _resident(self) -> int:
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _death(self) -> WorkerDied:
        code = self.process.wait()
        self.kill()  # what it started may live on
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            detail = f"signal {known.get(-code, -code)} in phase {self.phase}"
        else:
            detail = f"exit code {code} in phase {self.phase}"
        last = log_tail(self.log)
        return WorkerDied(Verdict.CRASHED, detail + (f"; last output: {last}" if last else ""), self.arm, self.phase)

    def end_process(self) -> None:
        """End the worker and whatever it started. Whoever reads its events is told that it died."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

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
            self.process.wait(GRACE)
        self.kill()


PHASE_FACTOR = {"prepare": 10.0, "import": 10.0, "first launch": 10.0, "timing": 10.0, "start": 5.0}
"""Phases that may take longer than a launch: a first use compiles (nvcc needs two minutes), timing repeats."""


def log_tail(log: Path) -> str:
    """The last non-empty line of a worker's output, shortened."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    return lines[-1][:200] if lines else ""
