"""A kernel that loses its last head: what a report says of it is known beforehand."""
from __future__ import annotations

import torch

from arms.kernel import Launch, Outputs, Problem, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention


@sparse_prefill_kernel("wrong_head")
def wrong_head(problem: Problem) -> Launch:
    def launch(topk_length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = attention(problem, topk_length)
        out[:, -1] = 0
        return out, max_logits, lse

    return launch
