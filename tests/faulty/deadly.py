"""Kernels that take their process with them, never return, raise, or lie. tests/test_faults_survived.py and tests/test_worker.py say
what must become of each.

`deadly` does one deed in the case whose s_q names it, and in one arm alone, so one run shows every death and that the arms
and cases around it are unharmed. Whoever comes back from a deed returns a wrong out, but for HARMLESS ones.
"""
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from arms.kernel import Launch, Outputs, Problem, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention

CHUNK, MOST = 1 << 24, 96  # fp32 elements, 64 MiB; and 6 GiB in all, so that a watch that sleeps harms no machine
FLOOD = 1 << 17  # bytes: more than a pipe holds that nobody reads


def segfault() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def exit_at_once() -> None:
    os._exit(1)


def exit_by_exception() -> None:
    sys.exit(5)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loop() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1000)


def allocate() -> None:
    """Every page is touched, so that it counts as resident."""
    held = [torch.ones(CHUNK) for _ in range(MOST)]
    raise RuntimeError(f"nobody stopped {len(held)} allocations")


def leave_a_child() -> None:
    """A child that outlives the process."""
    subprocess.Popen(["sleep", "100"])
    segfault()


def leave_a_daemon() -> None:
    """A child in a session of its own, which no signal to the process' group reaches."""
    subprocess.Popen(["sleep", "100"], start_new_session=True)


def leave_a_daemon_and_die() -> None:
    leave_a_daemon()
    segfault()


def at_the_reply(write: Callable[[Any, str], object]) -> None:
    """Have the worker die when it is about to reply with this arm's record; write(out, line) before that."""
    worker = sys.modules["harness.worker"].Worker
    send = worker.send

    def last(self: Any, event: str, **fields: Any) -> None:
        if event == "checked" and fields["record"]["arm"] == "deadly/none":
            write(self.out, json.dumps({"event": event, **fields}))
            self.out.flush()
            os._exit(6)
        send(self, event, **fields)

    worker.send = last


def die_before_the_reply() -> None:
    at_the_reply(lambda out, line: None)


def die_in_the_reply() -> None:
    at_the_reply(lambda out, line: out.write(line[: len(line) // 2]))


def die_after_the_reply() -> None:
    at_the_reply(lambda out, line: out.write(line + "\n"))


def be_done_at_once() -> None:
    """The worker says that it is done with the case, and has never sent this arm's record."""
    worker = sys.modules["harness.worker"].Worker
    send = worker.send

    def other(self: Any, event: str, **fields: Any) -> None:
        if event != "checked" or fields["record"]["arm"] != "deadly/none":
            send(self, event, **fields)

    worker.send = other


def print_without_end() -> None:
    while True:
        os.write(1, b"a line that a kernel prints\n" * 4096)


def write_without_end() -> None:
    """Into every descriptor that is not its own, and no line is ever ended."""
    others = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    while True:
        for descriptor in others:
            with contextlib.suppress(OSError):
                os.write(descriptor, bytes(1 << 16))


def fail() -> None:
    raise RuntimeError("deliberate\nand a second line")


def fail_without_words() -> None:
    raise ValueError(" \n")


def forge() -> None:
    """Say in the worker's own words that every arm passed and that the case is done, and flood what is read of it."""
    for source in ("none", "backscan", "metadata"):
        record = {"case": "", "arm": f"deadly/{source}", "verdict": "PASSED", "checks": [{"name": "reference", "verdict": "PASSED"}]}
        lines = json.dumps({"event": "checked", "record": record}) + "\n" + json.dumps({"event": "done"}) + "\n"
        print(lines, flush=True)
        print(lines, file=sys.stderr, flush=True)
        os.write(1, lines.encode())
    os.write(2, b"\xff\x00" * (FLOOD // 2))


# Whoever comes back is launched on one row less as well, which should be no deed's number.
DEEDS = {11: segfault, 12: abort, 13: exit_at_once, 14: exit_by_exception, 15: kill_itself, 16: loop, 17: sleep, 18: allocate,
         19: leave_a_child, 20: fail, 21: fail_without_words, 22: forge, 25: leave_a_daemon, 27: leave_a_daemon_and_die,
         29: die_before_the_reply, 31: die_in_the_reply, 33: die_after_the_reply, 35: be_done_at_once,
         37: print_without_end, 39: write_without_end}
HARMLESS = (25, 33, 35)  # to what comes out
ON_LENGTH_0 = {23: exit_at_once}  # of the three arms, metadata alone hands over a 0


@sparse_prefill_kernel("deadly")
def deadly(problem: Problem) -> Launch:
    s_q = problem.q.shape[0]

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = attention(problem, topk_length)
        if s_q in DEEDS and topk_length is None:
            DEEDS[s_q]()
            if s_q not in HARMLESS:
                out.zero_()
        if s_q in ON_LENGTH_0 and topk_length is not None and int(topk_length.min()) == 0:
            ON_LENGTH_0[s_q]()
        return out, max_logits, lse

    return launch


@sparse_prefill_kernel("deadly_in_prepare")
def deadly_in_prepare(problem: Problem) -> Launch:
    segfault()
    raise AssertionError("unreachable")


@sparse_prefill_kernel("raises_in_prepare")
def raises_in_prepare(problem: Problem) -> Launch:
    raise KeyError("layout")


@sparse_prefill_kernel("deadly_by_signal_40")
def deadly_by_signal_40(problem: Problem) -> Launch:
    """A real-time signal has no name in Python's signal module."""
    return lambda topk_length: os.kill(os.getpid(), 40)  # type: ignore[return-value]


@sparse_prefill_kernel("raises_no_unicode")
def raises_no_unicode(problem: Problem) -> Launch:
    """The text of an exception may hold half a character: a file name's bytes."""
    raise ValueError("a file name \udcff of bytes")


@sparse_prefill_kernel("scribbles")
def scribbles(problem: Problem) -> Launch:
    """Writes to descriptors that are not its own, as code does that closed one twice."""

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.write(int(descriptor), b"[\n")
        return attention(problem, topk_length)

    return launch
