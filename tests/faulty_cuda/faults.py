"""Kernels that do to the GPU what a broken kernel does; loaded by tests/test_worker_cuda.py."""
from __future__ import annotations

import torch

from arms import Launch, Outputs, Problem, Requires, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention

CUDA = Requires(device="cuda")


@sparse_prefill_kernel("faulty_access", requires=CUDA)
def faulty_access(problem: Problem) -> Launch:
    """An index past the end: a device-side assertion, after which every CUDA call of the process fails."""
    def launch(length: torch.Tensor | None) -> Outputs:
        problem.kv[torch.full((1,), 1 << 30, device=problem.kv.device)].float().sum().item()
        return attention(problem, length)

    return launch


@sparse_prefill_kernel("faulty_hang", requires=CUDA)
def faulty_hang(problem: Problem) -> Launch:
    """Keeps the GPU busy for hours."""
    def launch(length: torch.Tensor | None) -> Outputs:
        for _ in range(1000):
            torch.cuda._sleep(1 << 40)
        return attention(problem, length)

    return launch


@sparse_prefill_kernel("faulty_memory", requires=CUDA)
def faulty_memory(problem: Problem) -> Launch:
    """Asks for more memory than any GPU has."""
    def launch(length: torch.Tensor | None) -> Outputs:
        torch.empty(1 << 46, dtype=torch.uint8, device=problem.kv.device)
        return attention(problem, length)

    return launch
