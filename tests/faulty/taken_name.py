"""A kernel of the same name as a built-in one, and wrong: it must never stand in for it."""
from __future__ import annotations

from arms.kernel import Launch, Problem, sparse_prefill_kernel


@sparse_prefill_kernel("torch_blocks")
def torch_blocks(problem: Problem) -> Launch:
    raise AssertionError("the impostor ran")
