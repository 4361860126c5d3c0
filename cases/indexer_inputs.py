"""An indexer_topk case made into tensors: same case, same bytes, on every device."""
from __future__ import annotations

import dataclasses
import hashlib

import torch

from cases.counter import below, bits, digest
from cases.indexer_topk import IndexerTopkCase
from cases.indexer_values import make_indexer_values

# Prime and larger than a request's rows can usefully be: position -> stride * position + shift is then a permutation.
_PRIMES = (1299709, 2750159, 3497861, 4256233, 5800079, 6700417)


@dataclasses.dataclass
class IndexerInputs:
    """Everything an arm is given.

    q_fp8:     e4m3 [num_q, h, 128]
    k_fp8:     e4m3 [s_kv, 128], the gathered keys of all requests
    kv_scale:  fp32 [s_kv]
    weights:   fp32 [num_q, h], every other scale folded in
    ks, ke:    int32 [num_q], the half-open window of a row in gathered positions; ke = ks: an empty row
    requests:  (row0, row1, kv0, kv1) of each request; rows past the last one are padding
    """

    case: IndexerTopkCase
    q_fp8: torch.Tensor
    k_fp8: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    requests: tuple[tuple[int, int, int, int], ...]

    @property
    def device(self) -> torch.device:
        return self.q_fp8.device

    def parts(self) -> dict[str, torch.Tensor | None]:
        """The tensors that make up the inputs, by name."""
        return {"q_fp8": self.q_fp8, "k_fp8": self.k_fp8, "kv_scale": self.kv_scale, "weights": self.weights, "ks": self.ks, "ke": self.ke}

    def digests(self) -> dict[str, str]:
        """Fingerprint of each part, and of all of them together under `all`."""
        each = {name: digest(tensor) for name, tensor in self.parts().items()}
        return each | {"all": hashlib.blake2b("".join(each.values()).encode(), digest_size=8).hexdigest()}


def make_indexer_inputs(case: IndexerTopkCase, device: str | torch.device) -> IndexerInputs:
    """Make a case's tensors on a device. Raises torch's own out-of-memory error where they do not fit."""
    device = torch.device(device)
    values = make_indexer_values(case, device)
    ks, ke = make_windows(case, device)
    return IndexerInputs(case, values.q_fp8, values.k_fp8, values.kv_scale, values.weights, ks, ke, case.bounds)


def make_windows(case: IndexerTopkCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """ks and ke of every row: int32 [num_q] each."""
    starts, ends = [], []
    for number, (row0, row1, kv0, kv1) in enumerate(case.bounds):
        position = _positions(case, number, row1 - row0, device)
        end = torch.full_like(position, kv1) if case.window == "full" else kv1 - (row1 - row0) + position + 1
        start = (end - (case.span or kv1)).clamp(min=kv0)
        none = below(bits(case.seed, "empty", torch.arange(row0, row1, device=device), 1)[:, 0], 1 << 30) < round(case.empty * (1 << 30))
        starts.append(start)
        ends.append(torch.where(none, start, end))
    padding = torch.zeros(case.pad_rows, dtype=torch.int64, device=device)
    return torch.cat([*starts, padding]).to(torch.int32), torch.cat([*ends, padding]).to(torch.int32)


def _positions(case: IndexerTopkCase, request: int, rows: int, device: torch.device) -> torch.Tensor:
    """Which of its request's last positions each row is: int64 [rows], a permutation of 0..rows-1."""
    row = torch.arange(rows, device=device)
    if case.order == "ascending":
        return row
    if case.order == "descending":
        return rows - 1 - row
    draw = bits(case.seed, "order", torch.full((1,), request, device=device), 2)
    stride = torch.tensor(_PRIMES, device=device)[below(draw[:, 0], len(_PRIMES))]
    return (row * stride + below(draw[:, 1], rows)) % rows
