"""The speed of light: the least time in which a GPU could have done the work. Worker side.

A time below it is no fast kernel but one that did not do the work. So every figure here errs towards too little work and too fast a
machine: only what no right kernel can leave out is counted, at the highest clock, and as much of the bytes as the L2 holds is taken to be
there already (a flush need not have driven out every line).
"""
from __future__ import annotations

import dataclasses
import os

import torch

from cases.indexer_inputs import IndexerInputs
from cases.inputs import Inputs
from cases.sparse_prefill import D_V

FLOPS_PER_SM_AND_CLOCK = {9: (4096, 8192), 10: (8192, 16384)}
"""Dense tensor-core operations of one SM in one clock by compute capability, for (bf16, fp8): 989 and 1,979 TFLOP/s of an H100 SXM are 132
SMs at 1.83 GHz, 2.25 and 4.5 PFLOP/s of a B200 148 SMs at 1.86 GHz (NVIDIA's data sheets)."""
CPU_FLOPS_PER_CORE = 16e12
"""No core has more: AMX does 2,048 bf16 operations a clock, at less than 8 GHz."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What no right kernel can leave out. bytes: read at least once; flops: a multiplication and an addition are two."""

    bytes: int
    flops: float
    fp8: bool


@dataclasses.dataclass(frozen=True)
class Machine:
    """bandwidth: bytes a second; cache: bytes of L2; flops: operations a second in (bf16, fp8)."""

    bandwidth: float
    cache: int
    flops: tuple[float, float]


def sparse_prefill_work(inputs: Inputs) -> Work:
    """q of the rows that have a key, kv of every key that is named, the indices of valid entries; Q K^T and P V for those."""
    case = inputs.case
    pairs = int(inputs.valid_entries.sum())
    rows = int(inputs.valid_entries.any(1).sum())
    size = inputs.kv.element_size()
    read = (rows * case.h_q + int(inputs.named.sum())) * case.d_qk * size + 4 * pairs
    return Work(read, 2.0 * case.h_q * pairs * (case.d_qk + D_V), case.dtype == "fp8")


def indexer_topk_work(inputs: IndexerInputs) -> Work:
    """The scores of every key in the rows that have more keys than they may choose; the others choose all they have."""
    case = inputs.case
    width = (inputs.ke - inputs.ks).long().clamp(min=0)
    choose = width > case.topk
    heads, columns = inputs.q_fp8.shape[1:]
    seen = torch.zeros(len(inputs.k_fp8) + 1, dtype=torch.int32, device=inputs.device)
    seen.index_add_(0, inputs.ks[choose].long(), torch.ones_like(inputs.ks[choose]))
    seen.index_add_(0, inputs.ke[choose].long(), -torch.ones_like(inputs.ke[choose]))
    keys = int((seen.cumsum(0) > 0).sum())
    read = keys * (columns + 4) + int(choose.sum()) * heads * (columns + 4)
    return Work(read, 2.0 * heads * columns * float(width[choose].sum()), True)


def machine(device: torch.device) -> Machine | None:
    """What a device can do at most; None for a GPU whose tensor cores are not in the table."""
    if device.type != "cuda":
        flops = CPU_FLOPS_PER_CORE * (os.cpu_count() or 1)
        return Machine(float("inf"), 0, (flops, flops))
    found = torch.cuda.get_device_properties(device)
    if found.major not in FLOPS_PER_SM_AND_CLOCK or not hasattr(found, "memory_clock_rate"):  # an older torch does not tell
        return None
    clocks = found.multi_processor_count * found.clock_rate * 1e3
    bf16, fp8 = FLOPS_PER_SM_AND_CLOCK[found.major]
    bandwidth = 2 * found.memory_clock_rate * 1e3 * found.memory_bus_width / 8
    return Machine(bandwidth, found.L2_cache_size, (clocks * bf16, clocks * fp8))


def least(work: Work, on: Machine | None) -> tuple[float, str]:
    """The least microseconds that the work takes on a machine, and what of. (0, why) where that is not known."""
    if on is None:
        return 0.0, "not known for this GPU"
    peak = on.flops[1 if work.fp8 else 0]
    moving = max(0, work.bytes - on.cache) / on.bandwidth * 1e6
    computing = work.flops / peak * 1e6
    if moving > computing:
        return moving, f"{work.bytes - on.cache:,} bytes beyond the L2 at {on.bandwidth / 1e12:.2f} TB/s"
    return computing, f"{work.flops:.3g} operations at {peak / 1e12:,.0f} TFLOP/s"
