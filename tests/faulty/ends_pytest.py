"""A right kernel that once ends the process that started its worker: under pytest-xdist, one of its processes."""
from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from arms.kernel import Launch, Outputs, Problem, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention

HEADS, DONE = "ENDS_PYTEST_AT", "ENDS_PYTEST_DONE"  # variables: the heads of the case where; a file that is made when it is done


@sparse_prefill_kernel("ends_pytest")
def ends_pytest(problem: Problem) -> Launch:
    def launch(topk_length: torch.Tensor | None) -> Outputs:
        done = Path(os.environ[DONE])
        if problem.q.shape[1] == int(os.environ[HEADS]) and not done.exists():
            done.touch()
            os.kill(os.getppid(), signal.SIGKILL)
        return attention(problem, topk_length)

    return launch
