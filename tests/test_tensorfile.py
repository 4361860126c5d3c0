"""Our safetensors files against the safetensors package, and what becomes of damaged ones."""
from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harness.compare import bits_differ
from harness.tensorfile import DTYPES, TensorFileError, read, write


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of each dtype: bits of all kinds (NaN among them), odd sizes, one that is not contiguous, empty and scalar ones."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 5, 8), dtype=torch.uint8, generator=generator)
        tensors[name] = raw.view(dtype)
    tensors["turned"] = torch.arange(12, dtype=torch.int32).view(3, 4).t()
    tensors["none"] = torch.empty(0, 7, dtype=torch.bfloat16)
    tensors["one"] = torch.tensor(3.5)
    tensors["nan"] = torch.tensor([float("nan"), -0.0, float("inf")])
    return tensors


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and not bool(bits_differ(a[name], b[name]).any())
               for name in a)


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    path, tensors = str(tmp_path / "ours"), every_dtype()
    size = write(path, tensors, {"case": "a=b", "word": "é"})
    assert size == Path(path).stat().st_size
    assert equal(load_file(path), tensors)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"case": "a=b", "word": "é"}


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    path, tensors = str(tmp_path / "theirs"), {name: tensor.contiguous() for name, tensor in every_dtype().items()}
    save_file(tensors, path, {"by": "them"})
    found, about = read(path)
    assert equal(found, tensors) and about == {"by": "them"}


def test_there_and_back(tmp_path: Path) -> None:
    path, tensors = str(tmp_path / "file"), every_dtype()
    write(path, tensors, {})
    assert equal(read(path)[0], tensors)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def header(**entry: object) -> bytes:
    text = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize("content", [
    b"", b"1234567", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 3) + b"{]}", struct.pack("<Q", 2) + b"[]",
    header() + b"1234567", header(dtype="F31") + b"12345678", header(shape=[3]) + b"12345678", header(data_offsets=[4, 8]) + b"12345678",
    header(data_offsets=[0]) + b"12345678", header(shape="long") + b"12345678", header(shape=[-2], data_offsets=[0, -8]) + b"12345678",
], ids=str)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(TensorFileError) as raised:
        read(str(path))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_every_cut_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(str(path), {"a": torch.arange(3), "b": torch.ones(3, dtype=torch.bool)}, {})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(TensorFileError):
            read(str(path))


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="x: torch"):
        write(str(tmp_path / "file"), {"x": torch.zeros(1, dtype=torch.complex64)}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file size is a full disk without needing one. What was there before stays."""
    path = tmp_path / "file"
    write(str(path), {"x": torch.zeros(3)}, {})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError):
            write(str(path), {"x": torch.zeros(1 << 16)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and path.read_bytes() == before
