"""A GPU's clock, power and throttle reasons, read all the time while others are timed on it. Parent side, by NVML.

Readings outside the busy time say nothing: an idle GPU lowers its clock, and a power cap bites within tens of milliseconds. So a
thread reads every few milliseconds (a reading takes microseconds), and whoever timed something asks for the readings in between.
"""
from __future__ import annotations

import bisect
import contextlib
import dataclasses
import threading
import time
from types import TracebackType
from typing import Any

EVERY = 0.004
"""Seconds between two readings."""
POWER_CAP, SLOWDOWN = 0x4, {0x8: "hardware slowdown", 0x20: "thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons. The others (idle, application clocks, sync boost, display) are settings, no trouble."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """at: time.monotonic. mhz: SM clock; watts: power draw; reasons: throttle reasons as bits."""

    at: float
    mhz: int
    watts: float
    reasons: int


class Watch:
    """Reads one GPU, once it is told which, until it is left. problem: why there are no readings, or "". Use it as a context manager."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.problem, self.most_mhz, self._nvml, self._handle = "", 0, None, None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, uuid: str) -> None:
        """Begin to read the GPU of this UUID, unless it is being read; nothing for ""."""
        if not uuid or self._handle or self.problem:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
            self.most_mhz = pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
            self.read()
        except Exception as error:  # no library, no driver, a container that hides it: all mean that nothing can be read
            self.problem = f"NVML: {type(error).__name__}: {error}"
            return
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def read(self) -> None:
        """Take one reading. Raises pynvml.NVMLError."""
        nvml: Any = self._nvml
        self.readings.append(Reading(
            time.monotonic(), nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3, nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)))

    def _go_on(self) -> None:
        while not self._over.wait(EVERY):
            try:
                self.read()
            except Exception as error:
                self.problem = f"NVML: {type(error).__name__}: {error}"
                return

    def between(self, begin: float, end: float) -> list[Reading]:
        """The readings of that time, and the one just before it."""
        first = bisect.bisect_left(self.readings, begin, key=lambda reading: reading.at)
        last = bisect.bisect_right(self.readings, end, key=lambda reading: reading.at)
        return self.readings[max(0, first - 1):last]

    def strangers(self, ours: set[int]) -> list[int]:
        """Processes that compute on this GPU and are not `ours`. [] where that cannot be told: in a container they are hidden, or named as
        the host knows them, which shows in that ours are not among them."""
        nvml: Any = self._nvml
        with contextlib.suppress(Exception):
            there = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
            return sorted(there - ours) if there & ours else []
        return []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Read no more."""
        self._over.set()
        if self._thread:
            self._thread.join()


def slowed(reasons: int) -> str:
    """What slowed the GPU, in words, or "": throttle reasons that are no setting."""
    found = [name for bit, name in SLOWDOWN.items() if reasons & bit]
    return " and ".join([*found, *(["power cap"] if reasons & POWER_CAP else [])])


def in_words(readings: list[Reading]) -> str:
    """Clocks, power and all throttle reasons of some readings, or "" of none."""
    if not readings:
        return ""
    mhz, watts, reasons = [r.mhz for r in readings], [r.watts for r in readings], 0
    for reading in readings:
        reasons |= reading.reasons
    return f"{min(mhz)} to {max(mhz)} MHz, {min(watts):.0f} to {max(watts):.0f} W, throttle reasons {reasons:#x}"
