"""topk_length as checks and records need it: backscan by every implementation at hand, and what a record keeps of a length."""
from __future__ import annotations

import sys

import torch

from arms.lengths import backscan
from cases.counter import digest
from cases.inputs import Inputs
from harness.record import Lengths


def other_backscans(inputs: Inputs) -> dict[str, torch.Tensor]:
    """backscan by the project's Triton kernel on CUDA, and by sglang's where the kernel under test has brought sglang
    in (it is not imported for this: a second wheel in the process may change what the first one runs). int32 [s_q] each."""
    if inputs.device.type != "cuda":
        return {}
    entries = inputs.indices[:, 0]
    found = {"triton": backscan(entries)}
    if "sglang" in sys.modules and entries.shape[1] % 128 == 0:  # it reads before the row otherwise; its callers pad to 128
        from sglang.kernels.ops.attention.metadata import q8kv8_topk_length_from_indices

        found["sglang"] = q8kv8_topk_length_from_indices(entries)
    return found


def summary(length: torch.Tensor | None, topk: int, pair: int) -> Lengths | None:
    """Statistics of a topk_length, int32 [s_q], over a width of topk; pair: keys that a kernel skips together."""
    if length is None:
        return None
    real = length.float()
    pairs = torch.ceil(real / pair).sum() / (len(real) * -(-topk // pair))
    return Lengths(float(real.mean()), int(real.min()), int(real.max()), float(pairs), digest(length))
