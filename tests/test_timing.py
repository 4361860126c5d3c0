"""Timing: which kernel belongs to which call, that nothing lost goes unnoticed, the order of the arms, and the wall clock."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import timing
from harness.timing import Timed, kernel_sums, measure

CPU = torch.device("cpu")
Event = dict[str, Any]


def a_range(part: str, arm: str, sample: int, ts: float, dur: float) -> Event:
    return {"cat": "user_annotation", "name": f"threearm|{part}|{arm}|{sample}", "ts": ts, "dur": dur, "args": {}}


def a_kernel(correlation: int, launched: float, dur: float, cat: str = "kernel", by: str = "cuda_runtime",
             name: str = "void attend<64>(int*)") -> list[Event]:
    """A launch on the host and, much later, what it ran on the GPU."""
    return [{"cat": by, "name": "launch", "ts": launched, "dur": 1.0, "args": {"correlation": correlation}},
            {"cat": cat, "name": name, "ts": launched + 1e6, "dur": dur, "args": {"correlation": correlation}}]


def durations(events: list[Event]) -> dict[tuple[str, str, int], list[float]]:
    return {key: [duration for _, duration in kernels] for key, kernels in kernel_sums(events).items()}


# --- reading a trace --------------------------------------------------------------------------------------------------


def test_a_kernel_belongs_to_the_range_in_which_it_was_launched() -> None:
    events = [a_range("call", "none", 0, 100.0, 50.0), a_range("derive", "none", 0, 40.0, 50.0),
              *a_kernel(1, 110.0, 7.0), *a_kernel(2, 120.0, 8.0), *a_kernel(3, 60.0, 2.0)]
    assert durations(events) == {("call", "none", 0): [7.0, 8.0], ("derive", "none", 0): [2.0]}


def test_kernels_launched_outside_every_range_are_ignored() -> None:
    events = [a_range("call", "none", 0, 100.0, 50.0), a_range("call", "none", 1, 300.0, 50.0),
              *a_kernel(1, 99.9, 7.0), *a_kernel(2, 150.1, 7.0), *a_kernel(3, 299.0, 7.0), *a_kernel(4, 351.0, 7.0)]
    assert durations(events) == {("call", "none", 0): [], ("call", "none", 1): []}


def test_both_ends_of_a_range_belong_to_it() -> None:
    events = [a_range("call", "none", 0, 100.0, 50.0), *a_kernel(1, 100.0, 7.0), *a_kernel(2, 150.0, 8.0)]
    assert durations(events) == {("call", "none", 0): [7.0, 8.0]}


def test_driver_launches_copies_and_memsets_count() -> None:
    """Triton and cute launch through the driver; a memset takes the stream's time as a kernel does."""
    events = [a_range("call", "none", 0, 100.0, 50.0), *a_kernel(1, 110.0, 1.0, by="cuda_driver"),
              *a_kernel(2, 111.0, 2.0, cat="gpu_memset"), *a_kernel(3, 112.0, 4.0, cat="gpu_memcpy")]
    assert durations(events) == {("call", "none", 0): [1.0, 2.0, 4.0]}


def test_events_of_others_are_ignored() -> None:
    events = [a_range("call", "none", 0, 100.0, 50.0), *a_kernel(1, 110.0, 7.0),
              {"cat": "user_annotation", "name": "theirs", "ts": 105.0, "dur": 20.0, "args": {}},
              {"cat": "gpu_user_annotation", "name": "threearm|call|none|0", "ts": 9e5, "dur": 5.0, "args": {}},
              {"cat": "kernel", "name": "orphan", "ts": 9e5, "dur": 5.0, "args": {"correlation": 77}},
              {"cat": "kernel", "name": "no correlation", "ts": 9e5, "dur": 5.0, "args": {}},
              {"ph": "M", "name": "process_name", "args": {"name": "python"}},
              {"cat": "cpu_op", "name": "aten::zeros", "ts": 110.0, "dur": 1.0}]
    assert durations(events) == {("call", "none", 0): [7.0]}


@pytest.mark.parametrize(("name", "short"), [
    ("void attend<64, true>(int const*)", "attend"), ("at::native::fill(int*)", "at::native::fill"), ("triton_scan", "triton_scan"),
    ("void (anonymous namespace)::pack<4>(int*)", "(anonymous namespace)::pack"),
    ("void at::native::(anonymous namespace)::fill(int*)", "at::native::(anonymous namespace)::fill")])
def test_breakdown_names_each_kernel_without_its_arguments(name: str, short: str) -> None:
    calls = [[(name, 1.0), ("other", 5.0), (name, 2.0)], [(name, 3.0)], [(name, 9.0), ("other", 6.0)]]
    assert timing.breakdown(calls) == {short: 3.0, "other": 5.0}


def test_no_events_no_sums() -> None:
    assert kernel_sums([]) == {}


# --- the kernel contract over a trace ---------------------------------------------------------------------------------


def idle() -> Timed:
    return Timed(lambda: None, lambda length: None)


def trace_of(arms: list[str], samples: int, kernels: Callable[[str, str, int], int]) -> list[Event]:
    """A trace of the whole measurement. kernels: how many kernels a part of a sample launched; the i-th lasts i us."""
    events, at, correlation = [], 0.0, 0
    for sample in range(samples):
        for arm in arms:
            for part in ("derive", "call"):
                events.append(a_range(part, arm, sample, at, 50.0))
                for number in range(kernels(part, arm, sample)):
                    correlation += 1
                    events += a_kernel(correlation, at + number, number + 1.0)
                at += 100.0
    return events


def kernel_times(monkeypatch: pytest.MonkeyPatch, kernels: Callable[[str, str, int], int]) -> dict[str, timing.Timing]:
    """The kernel contract without a GPU: everything but the profiler's own recording."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(timing, "_trace", lambda profiler: trace_of(["none", "backscan"], 3, kernels))
    return timing._kernel_times({"none": idle(), "backscan": idle()}, 3, lambda: None)


@pytest.mark.filterwarnings("ignore")  # the profiler says that there is no CUDA
def test_kernel_contract_sums_each_call_and_keeps_the_derivation_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    times = kernel_times(monkeypatch, lambda part, arm, sample: 2 if part == "call" else int(arm == "backscan"))
    assert times["none"].us == [3.0] * 3 and times["none"].derive_us == [0.0] * 3
    assert times["backscan"].us == [3.0] * 3 and times["backscan"].derive_us == [1.0] * 3
    assert {(t.contract, t.kernels) for t in times.values()} == {("kernel", 2)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", [("call", "none", 1), ("derive", "backscan", 2)])
def test_a_lost_record_is_an_error_and_not_a_shorter_time(lost: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=f"the profiler lost records of {lost[1]}"):
        kernel_times(monkeypatch, lambda *at: 1 if at == lost else 2)


@pytest.mark.filterwarnings("ignore")
def test_an_arm_without_a_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="lost records of none"):
        kernel_times(monkeypatch, lambda part, arm, sample: 0)


# --- order, samples, wall clock ---------------------------------------------------------------------------------------


def test_arms_take_turns_forwards_and_backwards_and_every_sample_is_kept() -> None:
    calls: list[str] = []

    def arm(name: str) -> Timed:
        return Timed(lambda: calls.append(f"derive {name}"), lambda length: calls.append(name))

    times = measure({name: arm(name) for name in "ABC"}, "wall", 5, CPU)
    warm_up = 3 * timing.WARM_UP
    launched = [name for name in calls if len(name) == 1]
    assert "".join(launched[:warm_up]) == "AAABBBCCC"
    assert "".join(launched[warm_up:]) == "ABC" + "CBA" + "ABC" + "CBA" + "ABC"
    assert all(calls[at + 1] == name[-1] for at, name in enumerate(calls) if name.startswith("derive"))
    assert {name: len(t.us) for name, t in times.items()} == {"A": 5, "B": 5, "C": 5}
    assert {(t.contract, t.cache, t.order, t.clocks) for t in times.values()} == {("wall", "warm", "interleaved, ABBA", "")}


def test_derived_length_is_what_is_launched() -> None:
    length, given = torch.tensor([3]), []
    measure({"metadata": Timed(lambda: length, given.append)}, "wall", 2, CPU)
    assert len(given) == timing.WARM_UP + 2 and all(one is length for one in given)


@pytest.mark.perf
def test_wall_time_is_that_of_derivation_and_call() -> None:
    def sleeper(derive: float, call: float) -> Timed:
        return Timed(lambda: time.sleep(derive), lambda length: time.sleep(call))

    times = measure({"short": sleeper(0.0, 0.002), "long": sleeper(0.003, 0.005)}, "wall", 7, CPU)
    assert min(times["short"].us) >= 2000 and min(times["long"].us) >= 8000
    ratio = statistics.median(times["long"].us) / statistics.median(times["short"].us)
    assert 2 < ratio < 6  # 4, less what waking up costs on a busy machine


@pytest.mark.parametrize("contract", ["kernel", "span", "cycles", ""])
def test_a_contract_that_this_device_cannot_have_is_refused(contract: str) -> None:
    with pytest.raises(ValueError, match=f"contract '{contract}' cannot be timed on cpu"):
        measure({"none": idle()}, contract, 1, CPU)


@pytest.mark.cuda
@pytest.mark.perf
@pytest.mark.parametrize("contract", ["kernel", "span", "wall"])
def test_a_gpu_product_eight_times_as_large_takes_longer_under_each_contract(contract: str) -> None:
    device = torch.device("cuda")
    # not torch.randn on the device: where an earlier test broke a graph's capture, its generator no longer answers
    small, large = (torch.full((n, n), 0.5, device=device) for n in (2048, 4096))
    times = measure({"small": Timed(lambda: None, lambda _: small @ small), "large": Timed(lambda: None, lambda _: large @ large)},
                    contract, 5, device)
    assert statistics.median(times["large"].us) > 2 * statistics.median(times["small"].us)
    assert {t.cache for t in times.values()} == {"L2 flushed"}
    if contract == "kernel":
        assert min(t.kernels for t in times.values()) >= 1
