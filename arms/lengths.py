"""The three topk_length sources: what turns one kernel into three arms.

none      no length; the kernel walks the whole width and masks
backscan  1 + position of the last non-negative index, at least 1: derived from the indices, once per call
metadata  min(kv_len, index_topk) from the serving metadata, precomputed; handed over only if it has a row per query row
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from cases.inputs import Inputs


@dataclasses.dataclass(frozen=True)
class Source:
    """A topk_length source.

    prepare(inputs) does what happens once per batch and returns derive(), which is what a layer's call pays:
    int32 [s_q] on the inputs' device, or None.
    """

    prepare: Callable[[Inputs], Callable[[], torch.Tensor | None]]


def backscan_torch(indices: torch.Tensor) -> torch.Tensor:
    """1 + last position with an index >= 0, at least 1. indices: int32 [s_q, topk]. Returns int32 [s_q]."""
    position = torch.arange(1, indices.shape[1] + 1, dtype=torch.int32, device=indices.device)
    return torch.where(indices >= 0, position, 1).amax(1)


def backscan(indices: torch.Tensor) -> torch.Tensor:
    """The same by a Triton kernel on CUDA, by torch elsewhere."""
    if indices.is_cuda:
        from arms.backscan_triton import backscan_triton

        return backscan_triton(indices)
    return backscan_torch(indices)


def metadata_lengths(seqlens: torch.Tensor, index_topk: int, s_q: int) -> torch.Tensor | None:
    """What the serving backend hands over: seqlens clamped to [0, index_topk], or None unless it has s_q rows.

    seqlens: int32 [rows], 0 for padding rows. The guard is sglang's: a row count that does not match the (padded)
    token count means that the metadata was built for another batch shape.
    """
    if seqlens.shape[0] != s_q:
        return None
    return seqlens.clamp(0, index_topk)


def _prepare_metadata(inputs: Inputs) -> Callable[[], torch.Tensor | None]:
    lengths = metadata_lengths(inputs.seqlens, inputs.case.limit, inputs.case.s_q)
    return lambda: lengths


SOURCES: dict[str, Source] = {
    "none": Source(lambda inputs: lambda: None),
    "backscan": Source(lambda inputs: lambda: backscan(inputs.indices[:, 0])),
    "metadata": Source(_prepare_metadata),
}
