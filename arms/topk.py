"""What an indexer top-k kernel is to the harness, and how one is registered: `@indexer_topk_kernel(...)` on one function.

The function gets a TopkProblem and returns the callable that launches the kernel; whatever it does before returning is
set-up and is not timed. A kernel is one arm: `dense` (logits, then a top-k) or `litetopk` (no logits matrix). See ADD_ARM.md.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from arms.kernel import KERNELS, Requires
from cases.indexer_topk import ACCUMULATE, HEAD_DIM

ARMS = ("dense", "litetopk")

WAYS = ("scan", "rescan", "dense", "failed")
"""How a row came to its result, the values of TopkResult.status: certified by the first scan, by a scan with a corrected
threshold, computed densely, or not certified (its indices are then all -1)."""


@dataclasses.dataclass(frozen=True)
class TopkProblem:
    """What a kernel is given, in the field's own names.

    q_fp8 e4m3 [num_q, h, 128]; k_fp8 e4m3 [s_kv, 128] with kv_scale fp32 [s_kv], the gathered keys of all requests;
    weights fp32 [num_q, h], every other scale folded in; ks, ke int32 [num_q], the half-open window of a row in gathered
    positions (ke == ks: an empty row); topk; requests: (row0, row1, kv0, kv1) of each request, on the host.

    score(r, j) = kv_scale[j] * sum_h weights[r, h] * max(0, q_fp8[r, h] . k_fp8[j]) for ks[r] <= j < ke[r].
    """

    q_fp8: torch.Tensor
    k_fp8: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    topk: int
    requests: tuple[tuple[int, int, int, int], ...]

    @property
    def num_q(self) -> int:
        return self.q_fp8.shape[0]

    @property
    def heads(self) -> int:
        return self.q_fp8.shape[1]

    @property
    def s_kv(self) -> int:
        return self.k_fp8.shape[0]

    @property
    def device(self) -> torch.device:
        return self.q_fp8.device


@dataclasses.dataclass
class TopkResult:
    """What a launch returns (or the indices alone).

    indices: int32 [num_q, topk], absolute gathered positions, the chosen ones first in any order, then -1.
    values:  fp32 [num_q, topk], the kernel's own score of each chosen entry, anything behind them; None if it has none.
    status:  int32 [num_q], an index into WAYS for each row; None for a kernel that certifies nothing.
    logits:  the kernel's own scores of rows [row0, row1) and all keys, fp32 [row1 - row0, s_kv], to judge the selection apart
             from the scoring; None where it keeps none.
    """

    indices: torch.Tensor
    values: torch.Tensor | None = None
    status: torch.Tensor | None = None
    logits: Callable[[int, int], torch.Tensor] | None = None


TopkLaunch = Callable[[], torch.Tensor | TopkResult]


UNBOUNDED = 1 << 62


def no_bound(problem: TopkProblem) -> int:
    """The memory bound of a dense kernel that declares none: all of it."""
    return UNBOUNDED


def half_of_the_scores(problem: TopkProblem) -> int:
    """The memory bound of a litetopk that declares none: half of what all scores would take, and not below 64 MiB."""
    return max(64 << 20, 2 * problem.num_q * problem.s_kv)


@dataclasses.dataclass(frozen=True)
class TopkKernel:
    """A registered indexer top-k kernel.

    arm: dense or litetopk. accumulate: how it sums a dot product, fp32 or fp8 (the Hopper tensor core's 14 bits), which
    decides its error margin. memory: bytes that a launch may hold beyond inputs and indices. place_free: it promises that the bits
    of a score depend on its row and key alone, wherever in the problem they stand.
    """

    name: str
    prepare: Callable[[TopkProblem], TopkLaunch]
    requires: Requires
    arm: str
    accumulate: str
    memory: Callable[[TopkProblem], int]
    file: str
    family: str = "indexer_topk"
    place_free: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        """The name of its only arm."""
        return (self.arm,)

    def promises(self, device: torch.device | None) -> str:
        """One line for `threearm arms`: how it sums, and the memory bound on a device at a size that tells kernels apart. None: not
        on a device that it can run on, where its bound may need what is not there."""
        if self.memory is no_bound:
            return f"{self.accumulate} sums; no memory bound"
        if device is None:
            return f"{self.accumulate} sums; a memory bound"
        try:
            bound = f"{self.memory(_sized(8192, 1 << 20, device)) / 2**30:.2f} GiB"
        except Exception as error:  # a loaded file's own function: it must not take the other kernels along
            bound = f"unknown ({type(error).__name__})"
        return f"{self.accumulate} sums; at 8192 rows, 1M keys, topk 2048 at most {bound} beyond inputs and indices"


def _sized(rows: int, keys: int, device: torch.device) -> TopkProblem:
    """A problem of this size whose tensors take no memory; not to be launched on."""
    def like(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(1, device=device).to(dtype).expand(shape)

    return TopkProblem(like(torch.float8_e4m3fn, rows, 32, HEAD_DIM), like(torch.float8_e4m3fn, keys, HEAD_DIM), like(torch.float32, keys),
                       like(torch.float32, rows, 32), like(torch.int32, rows), like(torch.int32, rows), 2048, ((0, rows, 0, keys),))


F = TypeVar("F", bound=Callable[[TopkProblem], TopkLaunch])


def indexer_topk_kernel(name: str, arm: str = "litetopk", requires: Requires = Requires(heads=(32, 64)), accumulate: str = "fp32",
                        memory: Callable[[TopkProblem], int] | None = None, place_free: bool = False) -> Callable[[F], F]:
    """Register the decorated function as kernel `name`. memory None: half_of_the_scores for a litetopk, no bound for a dense one.
    place_free: as in TopkKernel; its values are then held to it bit by bit.

    Raises ValueError if the name is taken by another file or is not made of letters, digits, '_', '-' and '.', or if arm or
    accumulate is none of the words it may be.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(f"kernel name {name!r}: allowed are letters, digits, '_', '-' and '.'")
    if memory is not None and not callable(memory):
        raise ValueError(f"memory={memory!r} of {name}: it must be a function of the problem that gives a number of bytes")
    if arm not in ARMS or accumulate not in ACCUMULATE:
        raise ValueError(f"arm={arm!r}, accumulate={accumulate!r}: allowed are {' and '.join(ARMS)}, fp32 and fp8")

    def register(prepare: F) -> F:
        file = prepare.__code__.co_filename
        if name in KERNELS and KERNELS[name].file != file:
            raise ValueError(f"kernel {name!r} is registered by {KERNELS[name].file} already")
        bound = memory or (half_of_the_scores if arm == "litetopk" else no_bound)
        KERNELS[name] = TopkKernel(name, prepare, requires, arm, accumulate, bound, file, place_free=place_free)
        return prepare

    return register


def check_problem(p: TopkProblem, most: int = 1 << 14) -> None:
    """Refuse what a kernel must not be launched on. Raises ValueError: shape, dtype, stride, device, alignment, topk above
    `most`; ks, ke outside [0, s_kv] (reads them back, so it is set-up, not part of a launch)."""
    shapes = {"q_fp8": (p.q_fp8, 3), "k_fp8": (p.k_fp8, 2)}
    for name, (tensor, dimensions) in shapes.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != dimensions:
            found = f"{list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor of {dimensions} dimensions, it is {found}")
    rows, heads = p.num_q, p.heads
    want = {"q_fp8": (p.q_fp8, (rows, heads, HEAD_DIM), torch.float8_e4m3fn), "k_fp8": (p.k_fp8, (p.s_kv, HEAD_DIM), torch.float8_e4m3fn),
            "kv_scale": (p.kv_scale, (p.s_kv,), torch.float32), "weights": (p.weights, (rows, heads), torch.float32),
            "ks": (p.ks, (rows,), torch.int32), "ke": (p.ke, (rows,), torch.int32)}
    for name, (tensor, shape, dtype) in want.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, it is a {type(tensor).__name__}")
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, it is {tensor.dtype} {list(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, its strides are {tensor.stride()}")
        if tensor.device != p.device:
            raise ValueError(f"{name} is on {tensor.device}, q_fp8 on {p.device}")
        if tensor.numel() and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must be aligned to 16 bytes, its address is {tensor.data_ptr():#x}")
    if heads not in (32, 64):
        raise ValueError(f"h={heads}: allowed are 32 and 64")
    if type(p.topk) is not int or not 1 <= p.topk <= most:
        raise ValueError(f"topk={p.topk!r}: allowed is an integer from 1 to {most}")
    bad = (p.ks < 0) | (p.ke > p.s_kv) | (p.ke < p.ks)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise ValueError(f"row {row}: its window [{int(p.ks[row])}, {int(p.ke[row])}) must lie within [0, {p.s_kv}), "
                         "and ke must not be below ks")
    _check_requests(p)


def _check_requests(p: TopkProblem) -> None:
    """requests are (row0, row1, kv0, kv1), in order, inside the rows and keys; rows may be left over. Raises ValueError."""
    row, key = 0, 0
    for number, request in enumerate(p.requests):
        if len(request) != 4 or any(type(bound) is not int for bound in request):
            raise ValueError(f"request {number} must be four integers (row0, row1, kv0, kv1), it is {request!r}")
        row0, row1, kv0, kv1 = request
        if not (row <= row0 <= row1 <= p.num_q and key <= kv0 <= kv1 <= p.s_kv):
            raise ValueError(f"request {number} is {request!r}: it must follow the one before, within {p.num_q} rows and {p.s_kv} keys")
        row, key = row1, kv1
