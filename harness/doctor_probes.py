"""What `threearm doctor` tries on the device itself. Worker side; harness/doctor.py says what the figures mean.

Each probe does one thing that evidence rests on: it times, counts launches, copies, flushes. One that raises says why and harms no other.
"""
from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from harness.holding import held
from harness.machine import gpu_uuid
from harness.roofline import machine
from harness.timing import Timed, Untimed, flusher, measure

Facts = dict[str, Any]
LAUNCHES = 20
COPY_SECONDS = 0.5
"""How long copying goes on: clocks need some tenths of a second to come up, and a power cap to bite."""


def build(device: torch.device) -> Facts:
    """What torch was built for, and which GPU it sees."""
    facts: Facts = {"pid": os.getpid(), "device": device.type, "torch": torch.__version__, "cuda": torch.version.cuda or "",
                    "driver_seen": os.path.exists("/dev/nvidiactl"), "cuda_usable": torch.cuda.is_available(),
                    "gpus": torch.cuda.device_count()}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
        facts |= {"uuid": gpu_uuid(device), "gpu": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}",
                  "built_for": torch.cuda.get_arch_list(), "free": free, "total": total}
    return facts


def profiler(device: torch.device) -> Facts:
    """Launch one kernel under the profiler, as contract kernel does. kernels: how many it saw in each call; lost: why it has no times."""
    one = torch.zeros(1, device=device)
    try:
        timing = measure({"probe": Timed(lambda: None, lambda length: one.add_(1))}, "kernel", LAUNCHES, device)["probe"]
    except Untimed as error:
        return {"kernels": 0, "lost": str(error)}
    return {"kernels": timing.kernels, "lost": ""}


def launch(device: torch.device) -> Facts:
    """What queueing a launch takes the host, in microseconds, and whether the stream can be kept busy for longer than that."""
    one = torch.zeros(1, device=device)
    found = held(Timed(lambda: None, lambda length: one.add_(1)), "span", False, device)
    return {"host_us": found.host_us, "hidden": found.hidden, "span_us": found.us}


def copying(device: torch.device) -> Facts:
    """Copy within the device for a while. bandwidth, peak: bytes a second, peak 0 where it is not known; begin, end: time.monotonic of
    the second half, when the clock is up."""
    free, _ = torch.cuda.mem_get_info(device)
    source = torch.zeros(min(1 << 30, free // 8), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    start = time.monotonic()
    while time.monotonic() < start + COPY_SECONDS:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(8):
            target.copy_(source)
        last.record()
        last.synchronize()
        seconds.append(first.elapsed_time(last) / 1e3 / 8)
    end, best = time.monotonic(), machine(device)
    return {"bandwidth": 2 * source.numel() / min(seconds), "peak": best.bandwidth if best else 0.0, "begin": (start + end) / 2, "end": end}


def events(device: torch.device) -> Facts:
    """The smallest step between two times of the event timer, in microseconds; 0 where all are one."""
    one, times = torch.zeros(1, device=device), set()
    for count in range(200):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(1 + count % 7):
            one.add_(1)
        last.record()
        last.synchronize()
        times.add(first.elapsed_time(last) * 1e3)
    ordered = sorted(times)
    return {"step_us": min((b - a for a, b in itertools.pairwise(ordered)), default=0.0)}


def flushing(device: torch.device) -> Facts:
    """How long reading a third of the L2 takes, in microseconds: just after it was read, and after a flush."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    held_in_l2 = torch.ones(size // 3 // 4, device=device)
    flush = flusher(device)

    def read(before: Callable[[], object]) -> float:
        samples: list[float] = []
        for _ in range(LAUNCHES):
            held_in_l2.sum()
            before()
            torch.cuda._sleep(200_000)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            held_in_l2.sum()
            last.record()
            last.synchronize()
            samples.append(float(first.elapsed_time(last)) * 1e3)
        return statistics.median(samples)

    return {"warm_us": read(lambda: None), "flushed_us": read(flush), "l2": size}


PROBES: dict[str, Callable[[torch.device], Facts]] = {
    "build": build, "profiler": profiler, "launch": launch, "copying": copying, "events": events, "flushing": flushing}


def examine(name: str, device: torch.device) -> Facts:
    """A probe's facts, or {"raised": why there are none}."""
    try:
        return PROBES[name](device)
    except Exception as error:  # whatever stops one of them is what there is to tell
        return {"raised": f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"}
