"""Shared by tests: the command line run as a person runs it, and a look at the processes that it left behind.

Every process that a test starts carries a mark in its environment, which its children inherit, so that a worker is
found whoever its parent has become, and nobody else's worker is.
"""
from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from typer.testing import CliRunner

from harness import cli

ROOT = Path(__file__).parent.parent
FAULTY = ROOT / "tests" / "faulty"
MARK = "THREEARM_TEST_MARK"
TINY = "sparse_prefill:s_q=2,s_kv=32,h_q=2,d_qk=512,topk=16"
"""The smallest case that is not a special one; in its shortest form, as records have it."""
TINY_TOPK = "indexer_topk:requests=2/40,topk=16"
"""The same of the other family."""

os.environ.pop("GITHUB_STEP_SUMMARY", None)  # in a job of ours: the runs that tests start are none of its summary


@dataclasses.dataclass
class Done:
    """A command that ended: its exit code, and what it wrote to stdout and stderr, in the order written."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


def new_mark() -> str:
    return uuid.uuid4().hex


def environment(mark: str, **more: str) -> dict[str, str]:
    """This process's environment with the mark. One thread: small products on shared cores are slower with two."""
    return {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, **more}


def start(arguments: list[str], mark: str) -> subprocess.Popen[str]:
    """Start the command line and do not wait for it."""
    return subprocess.Popen([sys.executable, "threearm.py", *arguments], cwd=ROOT, env=environment(mark), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def threearm(*arguments: str, seconds: float = 60.0, prefix: tuple[str, ...] = ("threearm.py",), cwd: Path = ROOT,
             **more: str) -> Done:
    """Run the command line to its end; more: environment variables. No test is passed by a traceback, so none may come."""
    done = subprocess.run([sys.executable, *prefix, *arguments], cwd=cwd, env=environment(new_mark(), **more), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    assert "Traceback" not in done.stdout, done.stdout
    return Done(done.returncode, done.stdout)


def invoke(*arguments: str) -> Done:
    """The command line in this process: for what starts no worker."""
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return Done(result.exit_code, result.output)


def marked(mark: str) -> dict[int, str]:
    """Processes that carry the mark, by id, with their command lines. This one and those that have ended are not among them."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:  # it ended while we looked, or is not ours to look at
            continue
    return found


def left_behind(mark: str, seconds: float = 5.0) -> list[str]:
    """Command lines of the processes with the mark that are still there after some seconds. They are ended, so that a
    test that fails leaves nothing either."""
    until = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.05)
    left = marked(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return list(left.values())
