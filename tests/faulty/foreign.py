"""Kernels whose packages (tests write them) end the process, do not import, or take no topk_length."""
from __future__ import annotations

from arms.kernel import Launch, Problem, Requires, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention


def foreign(name: str) -> None:
    """Register the portable kernel as one that needs the package."""

    @sparse_prefill_kernel(name, requires=Requires(entry=f"threearm_test_{name}:fwd"))
    def prepare(problem: Problem) -> Launch:
        return lambda topk_length: attention(problem, topk_length)


foreign("dying")
foreign("raising")
foreign("old")
