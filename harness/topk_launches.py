"""How the result of a launch is taken, and launches under conditions that must not change it: guard bands, a busy GPU, a CUDA graph."""
from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from arms.topk import TopkKernel, TopkProblem, TopkResult
from harness import stress
from harness.guard import Guards
from harness.topk_inplace import DATA, rewritten
from harness.trial import made_ready, synchronize
from harness.verdicts import Check, Verdict

Same = Callable[[str, TopkResult, str, Verdict], Check]
"""(name of the check, a result, where it is from, verdict if it differs) -> whether it is the case's own choice."""


def taken(raw: Any, p: TopkProblem) -> TopkResult:
    """A launch's result, once the device is done. Raises ValueError: shape, dtype."""
    synchronize(p.device)
    return copied(raw, p)


def copied(raw: Any, p: TopkProblem) -> TopkResult:
    """A launch's result, copied on the current stream (a kernel may return the same tensors every time). Raises ValueError: shape,
    dtype."""
    result = raw if isinstance(raw, TopkResult) else TopkResult(raw)
    wide, thin = (p.num_q, p.topk), (p.num_q,)
    want = {"indices": (wide, torch.int32), "values": (wide, torch.float32), "status": (thin, torch.int32)}
    copies: dict[str, torch.Tensor | None] = {}
    for name, (shape, dtype) in want.items():
        tensor = getattr(result, name)
        if tensor is None and name != "indices":
            copies[name] = None
        elif not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, the kernel returned {type(tensor).__name__}")
        elif tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, the kernel returned {tensor.dtype} {list(tensor.shape)}")
        else:
            copies[name] = tensor.clone()
    assert copies["indices"] is not None
    return TopkResult(copies["indices"], copies["values"], copies["status"], result.logits)


def in_a_row(launch: Callable[[], Any], p: TopkProblem, count: int) -> tuple[Iterator[TopkResult], str]:
    """Results of so many launches without a wait between them, and how they were made: one by one where they share a buffer, in which
    only the last would be left."""
    raw = [without_logits(launch()) for _ in range(count)]
    synchronize(p.device)
    places = {(x.indices if isinstance(x, TopkResult) else x).data_ptr() for x in (raw[0], raw[-1])}
    if len(places) < min(2, count):
        return (taken(launch(), p) for _ in range(count)), "one by one, since they share a buffer"
    return (taken(x, p) for x in raw), "back to back"


def without_logits(raw: Any) -> Any:
    """A launch's result without what gives the scores, which may hold them."""
    return dataclasses.replace(raw, logits=None) if isinstance(raw, TopkResult) else raw


def reason_of(error: Exception, device: torch.device) -> str:
    """Why a kernel that takes the case raised on a variation of it: one line. Raises the error again where the kernel has run out of
    memory, or the error of a CUDA context that it has poisoned."""
    text = (str(error).strip() or repr(error)).splitlines()[0]
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        raise error
    synchronize(device)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text}"


def guarded(kernel: TopkKernel, p: TopkProblem, same: Same) -> Check:
    """The kernel made ready and launched with bands around everything: NaN around the data, a row that sees all keys before and behind the
    windows, NaN in and around what it makes itself."""
    guards = Guards(p.device)
    fill = {**dict.fromkeys(DATA, math.nan), "ks": 0, "ke": p.s_kv}
    q, k, scale, weights, ks, ke = (guards.around(name, getattr(p, name), value) for name, value in fill.items())
    problem = TopkProblem(q, k, scale, weights, ks, ke, p.topk, p.requests)
    with guards.memory():
        raw = made_ready(kernel, problem)()
    return guards.judge(same("guards", taken(raw, p), "between guard bands", Verdict.FAILED))


def beside_a_busy_stream(launch: Callable[[], Any], p: TopkProblem, same: Same) -> Check:
    """stress.BUSY launches while another stream is at work. Results are taken on the launch's own stream, without waiting for others."""
    results, covered = stress.while_busy(lambda: copied(launch(), p), p.device)
    for number, result in enumerate(results, 1):
        check = same("busy-stream", result, f"launch {number} beside a busy stream", Verdict.FLAKY)
        if check.verdict is not Verdict.PASSED:
            return check
    check.detail = f"{len(results)} launches, beside {covered} of them a second stream was at work to the end; the last: {check.detail}"
    return check


def replayed_from_a_graph(launch: Callable[[], Any], p: TopkProblem, same: Same, declared: str) -> Check | None:
    """A launch captured while q, keys, scales and weights hold other numbers, replayed after the case's own were written in place. None
    where no graph can be made of it and the kernel has declared that of some launches at least."""
    own = {name: getattr(p, name).clone() for name in DATA}

    def update() -> None:
        for name, tensor in own.items():
            getattr(p, name).copy_(tensor)

    try:
        with rewritten(p):
            raw, graph = stress.replayed(launch, update)
            result = taken(raw, p)
    except stress.NotCaptured as why:
        if declared:
            return None
        return Check("graph-replay", Verdict.FAILED, f"cannot be captured in a CUDA graph, which the kernel does not declare: {why}")
    check = same("graph-replay", result, "the graph's replay", Verdict.FAILED)
    check.detail = f"captured on other numbers, replayed on the case's: {check.detail}"
    del graph  # its memory holds the result until here
    return check
