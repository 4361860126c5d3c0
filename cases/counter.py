"""Counter-based random integers that are the same bytes on every device.

A device's own generator gives another stream on another GPU, and `log`/`cos` differ by an ULP between libraries.
So every draw here is an integer hash of (seed, stream name, row, column), computed with int32 adds, xors, shifts and
wrapping multiplications, which are exact everywhere. The mixing function is the 32-bit "lowbias32" finaliser of
C. Wellons' hash-prospector (public domain); two rounds per element, one per row.
"""
from __future__ import annotations

import hashlib

import torch

_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)  # as int32
_GOLDEN = 0x9E3779B9 - (1 << 32)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical (zero-filling) right shift of int32; torch's own shift is arithmetic."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int32 that spreads every input bit over every output bit. Returns int32, same shape."""
    x = x ^ _shift_right(x, 16)
    x = x * _M1
    x = x ^ _shift_right(x, 15)
    x = x * _M2
    return x ^ _shift_right(x, 16)


def stream_key(seed: int, stream: str) -> int:
    """A signed 32-bit key for one named stream of one seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=4).digest(), "little", signed=True)


def bits(seed: int, stream: str, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Draw `columns` hashes for each row number: int32 [len(rows), columns], all 32 bits random.

    rows: int32 or int64 [n] row numbers (not necessarily contiguous, so that any slice of a tensor can be made alone).
    """
    row_hash = mix(rows.to(torch.int32) ^ stream_key(seed, stream))
    column = torch.arange(columns, dtype=torch.int32, device=rows.device) * _GOLDEN
    return mix(row_hash[:, None] + column)


def below(random_bits: torch.Tensor, bound: torch.Tensor | int) -> torch.Tensor:
    """Map random int32 to int64 in [0, bound). The bias is under bound / 2^32, irrelevant for choosing test data."""
    unsigned = random_bits.to(torch.int64) & 0xFFFFFFFF
    return (unsigned * bound) >> 32


def bell(seed: int, stream: str, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Bell-shaped integers, int32 [len(rows), columns]: four 16-bit numbers summed, minus 131070.

    Range +-131070, standard deviation 37837: 17 bits, so that a bf16 or e4m3 made from it has all its mantissa bits
    whatever its exponent, and an accumulator has something to round.
    """
    total: torch.Tensor | int = -131070
    for half in ("", "+"):
        hashes = bits(seed, stream + half, rows, columns)
        total = total + (hashes & 0xFFFF) + _shift_right(hashes, 16)
    assert isinstance(total, torch.Tensor)
    return total


def digest(tensor: torch.Tensor | None) -> str:
    """A 64-bit fingerprint of a tensor's shape, dtype and bytes, equal on every device: 16 hex digits.

    Integer arithmetic only, and a sum is independent of the order of its terms, so a GPU gives the CPU's value.
    """
    if tensor is None:
        return "-" * 16
    head = f"{tensor.dtype}{tuple(tensor.shape)}"
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, 4 - data.numel() % 4))
    words = data.view(torch.int32)
    low, high = 0, 0
    step = 1 << 26  # 256 MB of words at a time bounds the temporaries
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        place = torch.arange(start, start + part.numel(), device=part.device).to(torch.int32)
        mixed = mix(part ^ mix(place))
        low += int(mixed.to(torch.int64).sum())
        high += int(mix(mixed + _GOLDEN).to(torch.int64).sum())
    key = stream_key(0, head)
    return f"{(low ^ key) & 0xFFFFFFFF:08x}{(high + key) & 0xFFFFFFFF:08x}"
