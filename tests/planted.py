"""Arms of a known slowness, for `--load`: a right kernel, and the same one slower by a known share. THREEARM_PLANTED names kernel and share
("torch_blocks 0.10"); the slow one is called planted_slow. On a GPU the share is added by a spinning kernel, of a length that is
measured when the arm is prepared."""
from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from arms import sparse_prefill_kernel
from arms.kernel import KERNELS, Launch, Outputs, Problem, load_package

load_package("arms.sparse_prefill")
NAME, SHARE = os.environ.get("THREEARM_PLANTED", "torch_blocks 0.10").split()
RIGHT: Any = KERNELS[NAME]
CYCLES = 2_000_000  # of the spinning kernel that its rate is taken from


def slow_on_the_cpu(launch: Launch) -> Launch:
    def slow(length: torch.Tensor | None) -> Any:
        begin = time.perf_counter()
        outputs = launch(length)
        end = begin + (time.perf_counter() - begin) * (1 + float(SHARE))
        while time.perf_counter() < end:
            pass
        return outputs

    return slow


def us_of(call: Any) -> float:
    """Microseconds of a call on the GPU, launch hidden: the median of nine."""
    taken = []
    for _ in range(9):
        torch.cuda._sleep(400_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(taken)


def slow_on_the_gpu(launch: Launch, p: Problem) -> Launch:
    """The spinning kernel's own start and the gap before it are part of the share: what one of no cycles adds is taken off."""
    rates = (us_of(lambda: torch.cuda._sleep(CYCLES)) - us_of(lambda: torch.cuda._sleep(1))) / (CYCLES - 1)
    own = us_of(lambda: launch(None))
    wanted = float(SHARE) * own - (us_of(lambda: (launch(None), torch.cuda._sleep(1))) - own)
    cycles = max(1, round(wanted / rates))

    def slow(length: torch.Tensor | None) -> Any:
        outputs = launch(length)
        torch.cuda._sleep(cycles)
        return outputs

    return slow


@sparse_prefill_kernel("planted_slow", requires=RIGHT.requires, convention=RIGHT.convention, promise=RIGHT.promise)
def planted_slow(p: Problem) -> Launch:
    launch = RIGHT.prepare(p)
    return slow_on_the_gpu(launch, p) if p.q.is_cuda else slow_on_the_cpu(launch)


def padded(p: Problem, us: float) -> Launch:
    """The right kernel, which takes a time that a clock sets: on a CPU that others use, the median of a few calls is that time still."""
    launch = RIGHT.prepare(p)

    def steady(length: torch.Tensor | None) -> Any:
        end = time.perf_counter() + us * 1e-6
        outputs = launch(length)
        while time.perf_counter() < end:
            pass
        return outputs

    return steady


@sparse_prefill_kernel("planted_600_us")
def planted_600_us(p: Problem) -> Launch:
    return padded(p, 600)


@sparse_prefill_kernel("planted_660_us")
def planted_660_us(p: Problem) -> Launch:
    return padded(p, 660)


@sparse_prefill_kernel("planted_cached", requires=RIGHT.requires, convention=RIGHT.convention, promise=RIGHT.promise)
def planted_cached(p: Problem) -> Launch:
    """Right answers without work: what the first launch gave is given again."""
    launch, kept = RIGHT.prepare(p), []

    def cached(length: torch.Tensor | None) -> Any:
        if not kept:
            kept.append(launch(length))
        return kept[0]

    return cached


def from_the_20th(p: Problem, late: Callable[[Outputs], Outputs]) -> Launch:
    """Right for as many launches as the checks make, then what `late` makes of it."""
    launch, count = RIGHT.prepare(p), [0]

    def counted(length: torch.Tensor | None) -> Outputs:
        count[0] += 1
        outputs = launch(length)
        return late(outputs) if count[0] > 20 else outputs

    return counted


@sparse_prefill_kernel("planted_stale", requires=RIGHT.requires, convention=RIGHT.convention, promise=RIGHT.promise)
def planted_stale(p: Problem) -> Launch:
    return from_the_20th(p, lambda outputs: (outputs[0] * 2, outputs[1], outputs[2]))


@sparse_prefill_kernel("planted_death", requires=RIGHT.requires, convention=RIGHT.convention, promise=RIGHT.promise)
def planted_death(p: Problem) -> Launch:
    return from_the_20th(p, lambda outputs: os._exit(3))


CACHED, DIES, STALE = 7, 11, 13
"""s_q of the case in which planted_deeds does it: pairings of one kernel share their processes, which take a second to start."""


@sparse_prefill_kernel("planted_deeds", requires=RIGHT.requires, convention=RIGHT.convention, promise=RIGHT.promise)
def planted_deeds(p: Problem) -> Launch:
    deed = {CACHED: planted_cached, DIES: planted_death, STALE: planted_stale}.get(p.q.shape[0], RIGHT.prepare)
    return deed(p)
