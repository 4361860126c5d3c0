"""Timing the arms of one kernel on one case, under a named contract. Runs inside the worker.

kernel  sum of the CUDA kernels one call launches, from the profiler's trace; the derivation of topk_length apart
span    CUDA events around derivation and call, the launch hidden behind a busy stream
wall    host clock around derivation and call, with a synchronisation at the end

The arms are interleaved, in turn forwards and backwards (ABBA); on CUDA the L2 is flushed before every sample by writing
twice its size. All samples are kept.
"""
from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from harness.record import Timing

CONTRACTS = ("kernel", "span", "wall")
WARM_UP = 3
HIDE_CYCLES = 200_000  # about 0.1 ms of a busy stream: more than a launch costs


class Untimed(RuntimeError):
    """The profiler lost records: not the arm's fault."""


@dataclasses.dataclass
class Timed:
    """What is timed: derive() gives the length that launch() takes."""

    derive: Callable[[], torch.Tensor | None]
    launch: Callable[[torch.Tensor | None], object]


def measure(arms: dict[str, Timed], contract: str, samples: int, device: torch.device) -> dict[str, Timing]:
    """Time every arm `samples` times. Raises ValueError if the contract cannot be had on this device, RuntimeError if the
    profiler lost records."""
    if contract not in CONTRACTS or (contract != "wall" and device.type != "cuda"):
        raise ValueError(f"contract {contract!r} cannot be timed on {device.type}")
    flush = flusher(device)
    for arm in arms.values():
        for _ in range(WARM_UP):
            arm.launch(arm.derive())
    if contract == "kernel":
        result = _kernel_times(arms, samples, flush)
    else:
        once = _span if contract == "span" else _wall
        result = {name: Timing(contract, "", "", []) for name in arms}
        for round_number in range(samples):
            for name in _order(arms, round_number):
                flush()
                result[name].us.append(once(arms[name], device))
    for timing in result.values():
        timing.cache = "L2 flushed" if device.type == "cuda" else "warm"
        timing.order = "interleaved, ABBA" if len(arms) > 1 else "alone"
    return result


def _order(arms: dict[str, Timed], round_number: int) -> list[str]:
    return list(arms) if round_number % 2 == 0 else list(reversed(arms))


def flusher(device: torch.device) -> Callable[[], object]:
    """What drives a device's inputs out of its L2: a memset of twice its size. Nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer.zero_


def wall(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of the host clock around a call and the end of what it started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter_ns() - start) / 1e3


def _wall(arm: Timed, device: torch.device) -> float:
    return wall(lambda: arm.launch(arm.derive()), device)


def _span(arm: Timed, device: torch.device) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HIDE_CYCLES)
    start.record()
    arm.launch(arm.derive())
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) * 1e3)


def _kernel_times(arms: dict[str, Timed], samples: int, flush: Callable[[], object]) -> dict[str, Timing]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for round_number in range(samples):
            for name in _order(arms, round_number):
                flush()
                with torch.profiler.record_function(f"threearm|derive|{name}|{round_number}"):
                    length = arms[name].derive()
                with torch.profiler.record_function(f"threearm|call|{name}|{round_number}"):
                    arms[name].launch(length)
        torch.cuda.synchronize()
    times = kernel_sums(_trace(profiler))
    result = {}
    for name in arms:
        calls = [times.get(("call", name, i), []) for i in range(samples)]
        derives = [times.get(("derive", name, i), []) for i in range(samples)]
        counts = {len(kernels) for kernels in calls}
        if len(counts) != 1 or 0 in counts or len({len(d) for d in derives}) != 1:
            raise Untimed(f"the profiler lost records of {name}: kernels per call {sorted(counts)}")
        result[name] = Timing("kernel", "", "", [total(k) for k in calls], [total(d) for d in derives], counts.pop(), breakdown(calls))
    return result


Launched = tuple[str, float]
"""A kernel's name and its duration in microseconds."""


def total(kernels: list[Launched]) -> float:
    """Their durations together."""
    return sum(duration for _, duration in kernels)


def breakdown(calls: list[list[Launched]]) -> dict[str, float]:
    """Median over calls of what each kernel takes in one call, by its name without template arguments."""
    per_call: dict[str, list[float]] = {}
    for number, kernels in enumerate(calls):
        for name, duration in kernels:
            short = re.split(r"<|\((?!anonymous namespace\))", name.removeprefix("void "), maxsplit=1)[0]
            times = per_call.setdefault(short, [0.0] * len(calls))
            times[number] += duration
    return {name: statistics.median(times) for name, times in per_call.items()}


def _trace(profiler: torch.profiler.profile) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events: list[dict[str, object]] = json.load(file)["traceEvents"]
    return events


def kernel_sums(events: list[dict[str, object]]) -> dict[tuple[str, str, int], list[Launched]]:
    """Kernels by (part, arm, sample): a kernel belongs to the range in which the host launched it.

    events: a Chrome trace. Copies and memsets count as kernels: they take the stream's time too.
    """
    ranges = []
    launched: dict[object, float] = {}
    kernels = []
    for event in events:
        category, args = event.get("cat"), event.get("args")
        if category == "user_annotation" and str(event["name"]).startswith("threearm|"):
            _, part, arm, sample = str(event["name"]).split("|")
            ranges.append((float(event["ts"]), float(event["dur"]), part, arm, int(sample)))  # type: ignore[arg-type]
        elif category in ("cuda_runtime", "cuda_driver") and isinstance(args, dict) and "correlation" in args:
            launched[args["correlation"]] = float(event["ts"])  # type: ignore[arg-type]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset") and isinstance(args, dict):
            kernels.append((args.get("correlation"), (str(event["name"]), float(event["dur"]))))  # type: ignore[arg-type]
    ranges.sort()
    sums: dict[tuple[str, str, int], list[Launched]] = {(part, arm, sample): [] for _, _, part, arm, sample in ranges}
    starts = torch.tensor([r[0] for r in ranges], dtype=torch.float64)
    for correlation, kernel in kernels:
        at = launched.get(correlation)
        place = -1 if at is None else int(torch.searchsorted(starts, torch.tensor(at, dtype=torch.float64), right=True)) - 1
        if place >= 0 and at is not None and at <= ranges[place][0] + ranges[place][1]:
            sums[ranges[place][2:]].append(kernel)
    return sums
