"""Kernels that take their process with them, never return, raise, or lie. tests/test_worker.py says what must become of each.

`deadly` does one deed in the case whose s_q names it, and in one arm alone, so one run shows every death and that the arms
and cases around it are unharmed. Whoever comes back from a deed returns a wrong out.
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


DEEDS = {11: segfault, 12: abort, 13: exit_at_once, 14: exit_by_exception, 15: kill_itself, 16: loop, 17: sleep, 18: allocate,
         19: leave_a_child, 20: fail, 21: fail_without_words, 22: forge}
ON_LENGTH_0 = {23: exit_at_once}  # of the three arms, metadata alone hands over a 0


@sparse_prefill_kernel("deadly")
def deadly(problem: Problem) -> Launch:
    s_q = problem.q.shape[0]

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = attention(problem, topk_length)
        if s_q in DEEDS and topk_length is None:
            DEEDS[s_q]()
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
