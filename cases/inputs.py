"""A case made into tensors: same case, same bytes, on every device."""
from __future__ import annotations

import dataclasses
import functools
import hashlib

import torch

from cases.counter import digest
from cases.rows import indices, row_plan
from cases.sparse_prefill import SparsePrefillCase
from cases.values import Values, make_sink, make_values


@dataclasses.dataclass
class Inputs:
    """Everything an arm is given, and what only the harness knows (valid, named).

    values:   q [s_q, h_q, d_qk], kv [s_kv, 1, d_qk] in bf16, for fp8 cases also their e4m3 bytes and scales
    indices:  int32 [s_q, 1, topk]; an entry is valid iff it lies in [0, s_kv) and before the row's length
    seqlens:  int32 [metadata rows], kv_len of each row as the serving metadata states it, 0 for a padding row
    sink:     fp32 [h_q] in nats, or None
    valid:    int64 [s_q], length of each row's valid range before holes
    named:    bool [s_kv], the kv rows that a valid entry names
    """

    case: SparsePrefillCase
    values: Values
    indices: torch.Tensor
    seqlens: torch.Tensor
    sink: torch.Tensor | None
    valid: torch.Tensor
    named: torch.Tensor

    @property
    def q(self) -> torch.Tensor:
        """q as the case's dtype has it: bf16, or e4m3 to be multiplied by values.q_scale."""
        return self.values.q if self.values.q_fp8 is None else self.values.q_fp8

    @property
    def kv(self) -> torch.Tensor:
        """kv as the case's dtype has it: bf16, or e4m3 to be multiplied by values.kv_scale."""
        return self.values.kv if self.values.kv_fp8 is None else self.values.kv_fp8

    @property
    def device(self) -> torch.device:
        return self.indices.device

    @functools.cached_property
    def valid_entries(self) -> torch.Tensor:
        """bool [s_q, topk]: the entries that count, by the case's own lengths."""
        return entries_that_count(self.indices, self.valid, self.case.s_kv)

    def parts(self) -> dict[str, torch.Tensor | None]:
        """The tensors that make up the inputs, by name."""
        return {"q": self.q, "kv": self.kv, "indices": self.indices, "seqlens": self.seqlens, "attn_sink": self.sink}

    def digests(self) -> dict[str, str]:
        """Fingerprint of each part, and of all of them together under `all`."""
        each = {name: digest(tensor) for name, tensor in self.parts().items()}
        return each | {"all": hashlib.blake2b("".join(each.values()).encode(), digest_size=8).hexdigest()}


def entries_that_count(index: torch.Tensor, length: torch.Tensor | None, s_kv: int) -> torch.Tensor:
    """Which entries a kernel must use: bool [s_q, topk].

    index: int32 [s_q, 1, topk]; length: int [s_q] or None (every position counts).
    """
    entry = index[:, 0]
    counts = (entry >= 0) & (entry < s_kv)
    if length is not None:
        counts &= torch.arange(entry.shape[1], device=entry.device) < length[:, None]
    return counts


def make_inputs(case: SparsePrefillCase, device: str | torch.device) -> Inputs:
    """Make a case's tensors on a device. Raises torch's own out-of-memory error where they do not fit."""
    device = torch.device(device)
    plan = row_plan(case, device)
    index = indices(case, plan)
    counts = entries_that_count(index, plan.valid, case.s_kv)
    named = torch.zeros(case.s_kv + 1, dtype=torch.bool, device=device)
    named[torch.where(counts, index[:, 0], case.s_kv).long().view(-1)] = True
    named = named[:-1]
    # The metadata states the length before it is clamped to index_topk: the clamp is the metadata source's own work.
    kv_len = torch.where(plan.valid > 0, plan.visible, 0) if case.rows == "causal" else plan.valid
    rows = case.metadata_rows or case.s_q
    seqlens = torch.zeros(rows, dtype=torch.int32, device=device)
    seqlens[: min(rows, case.s_q)] = kv_len[:rows].to(torch.int32)
    return Inputs(case, make_values(case, plan, named), index, seqlens, make_sink(case, device), plan.valid, named)
