"""Clocks, power and throttle reasons of a GPU, with a stand-in for NVML."""
from __future__ import annotations

import sys
import time
import types

import pytest

from harness.watch import Reading, Watch, slowed


class Nvml(types.ModuleType):
    """What is used of pynvml; clocks fall by one with each reading."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.clock = 1980
        self.fails = False

    def nvmlInit(self) -> None:
        if self.fails:
            raise RuntimeError("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self.clock -= 1
        return self.clock

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 250_000

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 0x4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=1), types.SimpleNamespace(pid=2)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_it_reads_all_the_time_from_when_it_is_told_which_gpu(nvml: Nvml) -> None:
    with Watch() as watch:
        assert not watch.readings
        watch.open("GPU-1")
        begin = time.monotonic()
        while len(watch.readings) < 6 and time.monotonic() < begin + 20:  # ten milliseconds apart, on cores that are free
            time.sleep(0.01)
        readings = watch.between(begin, time.monotonic())
    assert len(readings) >= 5 and readings[0].watts == 250.0 and readings[0].reasons == 0x4 and watch.most_mhz == 1980
    assert [r.mhz for r in readings] == sorted((r.mhz for r in readings), reverse=True)
    count = len(watch.readings)
    time.sleep(0.03)
    assert len(watch.readings) == count, "it goes on after it was left"


def test_between_has_the_reading_before_a_time_that_is_shorter_than_two_readings() -> None:
    watch = Watch()
    watch.readings = [Reading(float(at), 1000 + at, 0.0, 0) for at in range(5)]
    assert [r.mhz for r in watch.between(2.2, 2.4)] == [1002]
    assert [r.mhz for r in watch.between(1.5, 3.0)] == [1001, 1002, 1003]
    assert watch.between(-2.0, -1.0) == []


def test_strangers_are_processes_of_others(nvml: Nvml) -> None:
    with Watch() as watch:
        assert watch.strangers({1}) == []
        watch.open("GPU-1")
        assert watch.strangers({1}) == [2]
        assert watch.strangers({7, 8}) == [], "numbers of another namespace"


def test_a_gpu_that_cannot_be_read_says_why(nvml: Nvml) -> None:
    nvml.fails = True
    with Watch() as watch:
        watch.open("GPU-1")
    assert watch.problem == "NVML: RuntimeError: driver not loaded" and not watch.readings


def test_reasons_in_words() -> None:
    assert slowed(0) == slowed(0x1) == ""
    assert slowed(0x24) == "thermal slowdown and power cap"
