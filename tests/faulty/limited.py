"""Two kernels that declare a limit: one has it, one has outgrown it. tests/test_limits.py says what `threearm limits` must make of them."""
from __future__ import annotations

import torch

from arms.kernel import Launch, Limit, Outputs, Problem, Requires, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention

CASE = "sparse_prefill:s_q=3,s_kv=128,h_q=2,topk=64,sink=normal"


def no_sink(case: str = CASE) -> Requires:
    return Requires(limits=(Limit(("none",), "sink", ("normal", "mixed"), "takes no sink without a length", case),))


@sparse_prefill_kernel("limited", requires=no_sink())
def limited(problem: Problem) -> Launch:
    def launch(topk_length: torch.Tensor | None) -> Outputs:
        if topk_length is None and problem.attn_sink is not None:
            raise ValueError("no sink without a length")
        return attention(problem, topk_length)

    return launch


@sparse_prefill_kernel("outgrown", requires=no_sink())
def outgrown(problem: Problem) -> Launch:
    return lambda topk_length: attention(problem, topk_length)
