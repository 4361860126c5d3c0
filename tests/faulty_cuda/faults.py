"""A kernel that does to the GPU what a broken kernel does: in the case whose s_q names the deed, and in its none arm alone.

tests/test_faults_survived.py says what must become of each.
"""
from __future__ import annotations

import torch

from arms import Launch, Outputs, Problem, Requires, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention


class Beyond:
    """Says of a tensor's memory that it is 256 GiB long."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {"shape": (1 << 36,), "typestr": "<f4", "data": (tensor.data_ptr(), False), "version": 2}


def read_beyond(kv: torch.Tensor) -> None:
    """An illegal memory access, after which every CUDA call of the process fails."""
    last = torch.as_tensor(Beyond(kv), device=kv.device)[-1:]
    (last + 1).sum().item()


def assert_on_the_device(kv: torch.Tensor) -> None:
    """An index past the end: a device-side assertion, which poisons the context as well."""
    kv[torch.full((1,), 1 << 30, device=kv.device)].float().sum().item()


def spin(kv: torch.Tensor) -> None:
    """Keeps the GPU busy for hours."""
    for _ in range(1000):
        torch.cuda._sleep(1 << 40)


def take_too_much(kv: torch.Tensor) -> None:
    """Asks for more memory than any GPU has."""
    torch.empty(1 << 46, dtype=torch.uint8, device=kv.device)


DEEDS = {11: read_beyond, 12: assert_on_the_device, 13: spin, 14: take_too_much}


@sparse_prefill_kernel("deadly_on_gpu", requires=Requires(
    device="cuda", uncapturable="it waits for the device to learn which rows have a pair left"))
def deadly_on_gpu(problem: Problem) -> Launch:
    def launch(length: torch.Tensor | None) -> Outputs:
        if length is None:
            DEEDS.get(problem.q.shape[0], lambda kv: None)(problem.kv)
        return attention(problem, length)

    return launch
