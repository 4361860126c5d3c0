"""One arm, prepared and held ready to be timed in bursts. Worker side; harness/sampling.py says whose turn it is.

span  CUDA events around derivation and call. The launch is hidden: the stream is kept busy for longer than the host needs to queue
      it, and a whole burst is queued before anything waits. The L2 is flushed before every sample.
wall  host clock around derivation and call, with a synchronisation at the end.
"""
from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from harness.timing import WARM_UP, Timed, flusher, wall

CONTRACTS = ("span", "wall")
LONG_SLEEP_US = 5_000  # under it, what the host needs to queue a launch is seen by itself
LEAST_HIDDEN_US = 50
MOST_HIDDEN_US = 5_000


@dataclasses.dataclass
class Held:
    """An arm ready to be timed. us: what one call takes, roughly. host_us: what queueing it takes the host. hidden: whether the launch
    can be hidden, which it cannot where the arm waits for the device in between."""

    timed: Timed
    contract: str
    device: torch.device
    flush: Callable[[], object]
    us: float = 0.0
    host_us: float = 0.0
    hidden: bool = True
    last: Any = None

    def burst(self, count: int) -> tuple[list[float], float, float]:
        """`count` samples in microseconds, and when the burst began and ended (time.monotonic, which processes share)."""
        gc.collect()
        gc.disable()  # a collection in one side's samples is no property of its kernel
        try:
            begin = time.monotonic()
            us = self._spans(count) if self.contract == "span" else [self._wall() for _ in range(count)]
            return us, begin, time.monotonic()
        finally:
            gc.enable()

    def _call(self) -> None:
        self.last = self.timed.launch(self.timed.derive())

    def _wall(self) -> float:
        self.flush()
        return wall(self._call, self.device)

    def _spans(self, count: int) -> list[float]:
        cycles = _cycles(self._hide_us(), self.device)
        events = []
        for _ in range(count):
            self.flush()
            torch.cuda._sleep(cycles)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize(self.device)
        return [float(start.elapsed_time(end)) * 1e3 for start, end in events]

    def _hide_us(self) -> float:
        """How long the stream is kept busy before a sample: half as long again as the host takes, which varies."""
        return min(MOST_HIDDEN_US, max(LEAST_HIDDEN_US, 1.5 * self.host_us)) if self.hidden else LEAST_HIDDEN_US

    def settle(self) -> None:
        """Warm up, and find out what a call takes and whether its launch can be hidden."""
        for _ in range(WARM_UP):
            self._call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._look_at_the_launch()
        self.us = sorted(self.burst(3)[0])[1]

    def _look_at_the_launch(self) -> None:
        """Queue calls behind a long sleep. A host that comes back only when the sleep is over waited for the device."""
        taken = []
        for _ in range(3):
            torch.cuda._sleep(_cycles(LONG_SLEEP_US, self.device))
            begin = time.perf_counter_ns()
            self._call()
            taken.append((time.perf_counter_ns() - begin) / 1e3)
            torch.cuda.synchronize(self.device)
        self.host_us = sorted(taken)[1]
        self.hidden = self.host_us < 0.8 * LONG_SLEEP_US


def held(timed: Timed, contract: str, flush: bool, device: torch.device) -> Held:
    """Prepare `timed` for bursts. Raises ValueError if the contract cannot be had on this device, and what the kernel raises."""
    if contract not in CONTRACTS or (contract == "span" and device.type != "cuda"):
        raise ValueError(f"contract {contract!r} cannot be timed in bursts on {device.type}")
    found = Held(timed, contract, device, flusher(device) if flush else _nothing)
    found.settle()
    return found


def _nothing() -> None:
    return None


def _cycles(us: float, device: torch.device) -> int:
    """Cycles at the highest clock, so that a slower one sleeps longer."""
    return int(us * 1e-6 * torch.cuda.get_device_properties(device).clock_rate * 1e3)
