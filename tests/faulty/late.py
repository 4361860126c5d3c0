"""A kernel that is right while it is checked and goes wrong in the timed loop, as the case's s_q says.

A worker launches a prepared kernel at most 9 times an arm before it is timed, so the 30th launch is a timed one.
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import torch

from arms.kernel import Launch, Outputs, Problem, SkipPromise, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention

CHECKED = 30


def zero(outputs: Outputs) -> Outputs:
    return torch.zeros_like(outputs[0]), outputs[1], outputs[2]


def shift_lse(outputs: Outputs) -> Outputs:
    return outputs[0], outputs[1], outputs[2] + 1


def fail(outputs: Outputs) -> Outputs:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def fail_oddly(outputs: Outputs) -> Outputs:
    raise KeyError("plan")


def leave(outputs: Outputs) -> Outputs:
    os._exit(9)


SPOIL: dict[int, Callable[[Outputs], Outputs]] = {11: zero, 12: shift_lse, 13: fail, 14: fail_oddly, 15: leave}


@sparse_prefill_kernel("late")
def late(problem: Problem) -> Launch:
    launches = itertools.count()
    spoil = SPOIL.get(problem.q.shape[0], lambda outputs: outputs)

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        outputs = attention(problem, topk_length)
        return spoil(outputs) if next(launches) > CHECKED else outputs

    return launch


@sparse_prefill_kernel("reuses_its_buffer")
def reuses_its_buffer(problem: Problem) -> Launch:
    """Returns the same tensors at every launch; every other launch is one ULP off in one element."""
    kept: list[torch.Tensor] = []
    launches = itertools.count()

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        outputs = attention(problem, topk_length)
        if not kept:
            kept.extend(outputs)
        for buffer, value in zip(kept, outputs):
            buffer.copy_(value)
        kept[0].view(torch.int16)[-1, -1, -1] += next(launches) % 2
        return kept[0], kept[1], kept[2]

    return launch


@sparse_prefill_kernel("keeps_its_buffer", promise=SkipPromise(max_ulp=1, columns=(0, 512), max_share=1.0))
def keeps_its_buffer(problem: Problem) -> Launch:
    """Right: it promises that out may move by 1 ULP where a pair is skipped, and returns the same tensors every time."""
    buffer = torch.empty(problem.q.shape[0], problem.q.shape[1], problem.d_v, dtype=torch.bfloat16)

    def launch(length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = attention(problem, length)
        buffer.copy_(out)
        if length is not None:
            skips = -(-length // 128) < -(-problem.indices.shape[2] // 128)
            buffer[skips] = (buffer[skips].view(torch.int16) + 1).view(torch.bfloat16)
        return buffer, max_logits, lse

    return launch
