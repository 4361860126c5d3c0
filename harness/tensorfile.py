"""Tensors in a file, in the safetensors format: what https://github.com/huggingface/safetensors describes, so that anything reads it.

A writer of its own, as workers have torch and the standard library alone. The format: eight bytes, little endian, the header's size; the
header, JSON: for each tensor its dtype, shape and place among the bytes that follow; the tensors' bytes.
"""
from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes: what the format allows
AT_ONCE = 1 << 26  # bytes read in one go


class TensorFileError(Exception):
    """A file that holds no tensors as this format has them: one line."""


def write(path: str, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> int:
    """Write tensors, on any device, and `about`, a few words on them. Returns the file's bytes; never leaves half a file under `path`.

    Raises OSError, and TypeError for a dtype that the format does not have.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each lies at a multiple of its element
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        if tensor.dtype not in NAMES:
            raise TypeError(f"{name}: {tensor.dtype} cannot be written as safetensors")
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            for name in order:
                _write_bytes(file, tensors[name])
        os.replace(temporary, path)
    except BaseException:
        _forget(temporary)
        raise
    return 8 + len(head) + end


def read(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, on the CPU, and what was written about them. Raises OSError and TensorFileError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, start = _header(file, size, path)
        about = header.pop("__metadata__", {})
        tensors = {}
        for name, dtype, shape, begin, end in _entries(header, size - start, path):
            file.seek(start + begin)
            tensors[name] = _read_bytes(file, end - begin, path).view(dtype).view(shape)
    return tensors, about


def _header(file: BinaryIO, size: int, path: str) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' bytes begin."""
    first = file.read(8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if not 2 <= length <= min(size - 8, LARGEST_HEADER):
        raise TensorFileError(f"{path} is no safetensors file, or is cut short")
    try:
        header = json.loads(file.read(length))
    except ValueError:
        raise TensorFileError(f"{path} is no safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise TensorFileError(f"{path} is no safetensors file: its header is no object")
    return header, 8 + length


def _entries(header: dict[str, Any], room: int, path: str) -> Iterator[tuple[str, torch.dtype, list[int], int, int]]:
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            fits = 0 <= begin <= end <= room and end - begin == math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        except (KeyError, TypeError, ValueError):
            fits = False
        if not fits:
            raise TensorFileError(f"{path}: {name} is not where, or not what, the header says, or the file is cut short")
        yield name, dtype, shape, begin, end


def _write_bytes(file: BinaryIO, tensor: torch.Tensor) -> None:
    """A tensor's bytes in row order, without a copy where it lies on the CPU already. (numpy, which torch would use, may be absent.)"""
    flat = tensor.detach().cpu().contiguous()
    if flat.numel():
        file.write((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))


def _read_bytes(file: BinaryIO, count: int, path: str) -> torch.Tensor:
    """uint8 [count]: the next bytes of a file, in memory of their own."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    held = bytearray(count)
    view = memoryview(held)
    done = 0
    while done < count:
        got = file.readinto(view[done : done + AT_ONCE])  # type: ignore[attr-defined]
        if not got:
            raise TensorFileError(f"{path} is cut short")
        done += got
    return torch.frombuffer(held, dtype=torch.uint8)


def _forget(path: str) -> None:
    """Delete a file that may not be there."""
    try:
        os.unlink(path)
    except OSError:
        return
