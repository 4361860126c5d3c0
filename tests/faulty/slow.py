"""A right kernel that takes its time, so that a run can be stopped in its middle. Says what it was asked for."""
from __future__ import annotations

import time

import torch

from arms.kernel import Launch, Outputs, Problem, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention


@sparse_prefill_kernel("slow")
def slow(problem: Problem) -> Launch:
    print(f"prepare h_q={problem.q.shape[1]}", flush=True)  # checks vary rows and width, never heads

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        time.sleep(0.02)
        return attention(problem, topk_length)

    return launch
