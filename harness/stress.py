"""A launch under stress: while a second stream keeps the GPU busy, and replayed from a CUDA graph. CUDA only, both families.

`cuda` is torch.cuda; tests hand in a stand-in.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

BUSY = 8
"""Launches beside a busy stream."""
SIDES = (2048, 8192)
"""Sides of the matrices of a short load and a long one: some 30 us and 2 ms a unit on an H200."""
MOST = 400  # units that are queued for one launch: the device takes a thousand kernels before the host has to wait
FEW = 8  # units of the long load, where the short one was not enough


class NotCaptured(Exception):
    """A CUDA graph could not be made of a launch. One line."""


class Load:
    """Work for a second stream: units of one matrix product, which takes every SM, and one copy, which takes bandwidth.
    seconds: what a unit takes."""

    def __init__(self, device: torch.device, side: int, cuda: Any = torch.cuda) -> None:
        self.cuda, self.side, self.stream = cuda, side, cuda.Stream(device=device)
        self.a, self.b, self.c = (torch.full((side, side), 2.0**-6, dtype=torch.bfloat16, device=device) for _ in range(3))
        self.source, self.sink = (torch.zeros(4 * side * side, dtype=torch.uint8, device=device) for _ in range(2))
        cuda.synchronize()
        self.queue(1)  # the first product chooses its kernel
        cuda.synchronize()
        self.seconds = max(1e-6, _seconds(lambda: self.queue(8), cuda) / 8)

    def queue(self, units: int) -> None:
        """Put this much work into the second stream, without waiting."""
        with self.cuda.stream(self.stream):
            for _ in range(units):
                torch.mm(self.a, self.b, out=self.c)
                self.sink.copy_(self.source, non_blocking=True)

    def busy(self) -> bool:
        """Whether work is left in the stream."""
        return not self.stream.query()


def while_busy(launch: Callable[[], T], device: torch.device, cuda: Any = torch.cuda) -> tuple[list[T], int]:
    """BUSY results of launch(), each queued on the current stream while a second one is at work; and beside how many of them the second
    one was at work to the end. launch() must copy what it returns (a kernel may return the same tensors every time).

    A load that a launch outlasts is made four times as long for the next: other processes on the GPU make both hard to foretell.
    """
    taken = 2 * _seconds(launch, cuda)
    load = _load(device, SIDES[0], cuda)
    if taken > MOST * load.seconds:
        load = _load(device, SIDES[1], cuda)
    enough = min(MOST, 2 + int(taken / load.seconds))
    results, covered = [], 0
    for _ in range(BUSY):
        load.queue(enough)
        results.append(launch())
        cuda.current_stream().synchronize()
        busy = load.busy()
        covered += busy
        cuda.synchronize()
        if not busy and enough == MOST and load.side == SIDES[0]:
            load, enough = _load(device, SIDES[1], cuda), FEW
        elif not busy:
            enough = min(MOST, 4 * enough)
    return results, covered


@functools.lru_cache(maxsize=2)
def _load(device: torch.device, side: int, cuda: Any) -> Load:
    """Made once a process: it would cost a small case more than everything else."""
    return Load(device, side, cuda)


def _seconds(call: Callable[[], object], cuda: Any) -> float:
    start = time.perf_counter()
    call()
    cuda.synchronize()
    return time.perf_counter() - start


def replayed(launch: Callable[[], T], update: Callable[[], None], cuda: Any = torch.cuda) -> tuple[T, Any]:
    """Capture one launch() in a CUDA graph, call update(), which writes other contents into the launch's inputs in place, and replay the
    graph. Returns what launch() returned while it was captured, which the replay has filled, and the graph: keep it as long as that.

    Raises NotCaptured where the launch cannot be captured (it waits for the device, or allocates outside of torch).
    """
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        launch()  # workspaces that a stream gets once must not be made under capture
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    try:
        with cuda.stream(side):
            graph.capture_begin()  # not torch.cuda.graph, which collects garbage first: that takes longer than all else
            try:
                result = launch()
            finally:
                graph.capture_end()  # after an error it raises another one
    except Exception as error:
        cuda.synchronize()  # raises where the capture has poisoned the context, which is then the verdict
        cause = error.__context__ or error
        raise NotCaptured(f"{type(cause).__name__}: {(str(cause).strip() or repr(cause)).splitlines()[0]}") from error
    update()
    cuda.synchronize()
    graph.replay()
    cuda.synchronize()
    return result, graph
