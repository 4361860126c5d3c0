"""Deliberately wrong sparse_prefill kernels that are right on the case as it stands, or nearly: a variation of the problem shows them.

The last two need CUDA: a GPU that others keep busy, and a CUDA graph.
"""
from __future__ import annotations

import dataclasses
import math

import torch

from arms.broken.fault import declare
from arms.broken.problems import FP8, FULL, HALF
from arms.broken.register import Length, broken
from arms.broken.sparse_prefill import next_bf16
from arms.kernel import Launch, Outputs, Problem, Requires, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import REQUIRES, attention
from cases.fault import Fault


@broken("stops_at_the_first_pad", "indices-permuted", HALF)
def stops_at_the_first_pad(p: Problem, length: Length) -> Outputs:
    """Right on rows that are packed to the front."""
    ended = (p.indices < 0).cummax(2).values
    return attention(dataclasses.replace(p, indices=p.indices.masked_fill(ended, -1)), length)


@broken("row_stride_of_whole_pairs", "padded", FULL, reports=("SP20",))
def row_stride_of_whole_pairs(p: Problem, length: Length) -> Outputs:
    """The width is rounded up to 128 where a row's indices begin."""
    rows, _, width = p.indices.shape
    whole = torch.nn.functional.pad(p.indices.flatten(), (0, rows * (-width % 128)), value=-1)
    return attention(dataclasses.replace(p, indices=whole.view(rows, 1, -1)[:, :, :width].contiguous()), length)


@broken("length_of_whole_blocks", "cut-at-length", FULL, reports=("SP15",))
def length_of_whole_blocks(p: Problem, length: Length) -> Outputs:
    """The length is rounded up to 64 keys, which shows where live indices stand past it."""
    return attention(p, None if length is None else (length + 63) // 64 * 64)


def next_fp32(x: torch.Tensor) -> torch.Tensor:
    """The next fp32 number."""
    return torch.nextafter(x, torch.full_like(x, math.inf))


@broken("first_row_rounds_otherwise", "rows-permuted", FULL, also=("batch-split",))
def first_row_rounds_otherwise(p: Problem, length: Length) -> Outputs:
    """One ULP of lse, in whichever row comes first."""
    out, max_logits, lse = attention(p, length)
    lse[0] = next_fp32(lse[0])
    return out, max_logits, lse


@broken("odd_batch_rounds_otherwise", "batch-split", FULL)
def odd_batch_rounds_otherwise(p: Problem, length: Length) -> Outputs:
    """One ULP of lse, in batches of an odd number of rows: as if they were split into other tiles."""
    out, max_logits, lse = attention(p, length)
    return out, max_logits, next_fp32(lse) if len(lse) % 2 else lse


@broken("sm_scale_taken_for_granted", "q-scaled", FULL)
def sm_scale_taken_for_granted(p: Problem, length: Length) -> Outputs:
    return attention(dataclasses.replace(p, sm_scale=p.q.shape[-1] ** -0.5), length)


@broken("scales_in_bf16", "scales-traded", FP8)
def scales_in_bf16(p: Problem, length: Length) -> Outputs:
    """Within the fp8 budgets, which contain 2^-9 of a score."""
    q_scale, kv_scale = (scale.bfloat16().float() for scale in (p.q_scale, p.kv_scale))
    return attention(dataclasses.replace(p, q_scale=q_scale, kv_scale=kv_scale), length)


declare(Fault("broken_length_of_its_first_launch", "sparse_prefill", "cut-at-length", HALF))


@sparse_prefill_kernel("broken_length_of_its_first_launch", requires=REQUIRES)
def length_of_its_first_launch(p: Problem) -> Launch:
    """The lengths that the launch was first given hold for all that come."""
    kept: list[torch.Tensor] = []

    def launch(length: Length) -> Outputs:
        if length is not None:
            kept.append(length.clone())
        return attention(p, kept[0] if length is not None else None)

    return launch


@broken("maximum_over_masked_keys", "unnamed-changed", HALF)
def maximum_over_masked_keys(p: Problem, length: Length) -> Outputs:
    """The running maximum is also taken over pads, which are read as key 0: far above the rest it leaves P at 0. NaN is passed over."""
    out, max_logits, lse = attention(p, length)
    masked = p.q.float() @ p.kv[0, 0].float() * (p.sm_scale * p.q_scale * p.kv_scale)
    lost = (p.indices[:, 0] < 0).any(1)[:, None] & (masked > lse + 100)
    return out.masked_fill(lost[..., None], 0.0), max_logits, lse


def room(x: torch.Tensor) -> int:
    """Elements of x's memory before its first one."""
    return int(x.storage_offset())


@broken("writes_past_its_output", "guards", FULL, reports=("TL9",))
def writes_past_its_output(p: Problem, length: Length) -> Outputs:
    """One element. Only where memory that torch knows lies behind it: elsewhere this would harm the process."""
    out, max_logits, lse = attention(p, length)
    end = room(out) + out.numel()
    if (end + 1) * out.element_size() <= out.untyped_storage().nbytes():
        out.as_strided((1,), (1,), end).fill_(1.0)
    return out, max_logits, lse


@broken("reads_the_row_before_kv", "guards", HALF, reports=("SP25", "PC2"))
def reads_the_row_before_kv(p: Problem, length: Length) -> Outputs:
    """A pad loads kv[-1] and multiplies it by 0. Only where memory that torch knows lies before kv."""
    out, max_logits, lse = attention(p, length)
    columns = p.kv.shape[2]
    if room(p.kv) < columns:
        return out, max_logits, lse
    before = p.kv.as_strided((p.d_v,), (1,), room(p.kv) - columns).float() * 0
    return torch.where((p.indices < 0).any(2)[..., None], out.float() + before, out.float()).bfloat16(), max_logits, lse


_quickest = [math.inf]


@sparse_prefill_kernel("broken_loses_a_race_when_busy", requires=dataclasses.replace(REQUIRES, device="cuda"))
def loses_a_race_when_busy(p: Problem) -> Launch:
    """Stands for a race that is lost only while other work holds the SMs: one ULP where some copies take twice as long as they can."""
    memory = torch.zeros(1 << 24, dtype=torch.uint8, device=p.q.device)

    def launch(length: Length) -> Outputs:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(8):
            memory.add_(1)
        end.record()
        end.synchronize()
        taken = begin.elapsed_time(end)
        late = taken > 2 * _quickest[0]
        _quickest[0] = min(taken, _quickest[0])
        out, max_logits, lse = attention(p, length)
        return (next_bf16(out) if late else out), max_logits, lse

    return launch


@sparse_prefill_kernel("broken_length_frozen_in_a_graph", requires=Requires(device="cuda"))
def length_frozen_in_a_graph(p: Problem) -> Launch:
    """A graph that is captured keeps the lengths of the launch before."""
    kept: list[torch.Tensor] = []

    def launch(length: Length) -> Outputs:
        if length is not None and not torch.cuda.is_current_stream_capturing():
            kept[:] = [length.clone()]
        return at_once(p, None if length is None else kept[0])

    return launch


def at_once(p: Problem, length: Length) -> Outputs:
    """All keys of all rows in one product: right, and a CUDA graph can be made of it. For bf16 without a sink, and small cases."""
    index = p.indices[:, 0].long()
    counts = (index >= 0) & (index < len(p.kv))
    if length is not None:
        counts &= torch.arange(index.shape[1], device=index.device) < length[:, None]
    k = torch.where(counts[..., None], p.kv[torch.where(counts, index, 0), 0].float(), 0.0)
    score = (torch.bmm(p.q.float(), k.mT) * p.sm_scale).masked_fill(~counts[:, None], -math.inf)
    lse = score.logsumexp(-1)
    out = torch.bmm(torch.exp(score - lse[..., None]).nan_to_num(0.0), k[..., : p.d_v]).bfloat16()
    return out, score.amax(-1), lse.masked_fill(lse == -math.inf, math.inf)


declare(Fault("broken_loses_a_race_when_busy", "sparse_prefill", "busy-stream", HALF, reports=("SP8",)))
declare(Fault("broken_length_frozen_in_a_graph", "sparse_prefill", "graph-replay", HALF, reports=("SP20",)))
