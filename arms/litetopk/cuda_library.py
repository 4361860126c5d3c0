"""Builds scan.cu and select.cu with nvcc, and calls what the arms that use them share: seed and select."""
from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from arms.kernel import find_program
from arms.litetopk.layout import SIGMAS, Layout, Selected
from arms.litetopk.sample import Sample
from arms.topk import TopkProblem

SOURCES = [Path(__file__).with_name(name) for name in ("scan.cu", "select.cu")]
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC")


class BuildError(RuntimeError):
    """nvcc is missing or refuses the sources."""


@functools.cache
def library() -> ctypes.CDLL:
    """The sources, compiled once for each version of them into the user's cache. Raises BuildError."""
    nvcc = find_program("nvcc")
    if nvcc is None:
        raise BuildError("nvcc is not on PATH nor in CUDA_HOME: the CUDA arms are compiled where they run")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    key = hashlib.blake2b(b"".join(map(Path.read_bytes, SOURCES)) + " ".join(FLAGS).encode() + version.encode(), digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "threearm"
    target = cache / f"litetopk-{key}.so"
    if not target.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # renamed when whole: two workers may build at once
            made = Path(folder) / "litetopk.so"
            built = subprocess.run([nvcc, *FLAGS, "-o", str(made), *map(str, SOURCES)], capture_output=True, text=True, check=False)
            if built.returncode:
                raise BuildError(f"nvcc: {(built.stderr or built.stdout).strip()[-500:]}")
            made.replace(target)
    return ctypes.CDLL(str(target))


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """A tensor's address, 0 for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def call(function: str, device: torch.device, *arguments: Any) -> None:
    """Launch one of the library's functions on the device's current stream. Raises RuntimeError with its cudaError_t, and BuildError.

    arguments: tensors (or None) are passed as addresses, ints as C ints; anything else must be a ctypes value.
    """
    def c_value(value: Any) -> Any:
        if value is None or isinstance(value, torch.Tensor):
            return pointer(value)
        return ctypes.c_int(value) if isinstance(value, int) else value

    with torch.cuda.device(device):
        code = getattr(library(), function)(*map(c_value, arguments), ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream))
    if code:
        raise RuntimeError(f"{function}: CUDA error {code}")


class SelectsByCuda:
    """Seed and select by select.cu, for a scanner with one lane of candidates."""

    p: TopkProblem
    layout: Layout

    def seed(self, scores: torch.Tensor, sample: Sample, factor: float) -> torch.Tensor:
        p = self.p
        threshold = torch.empty(p.num_q, device=p.device)
        call("seed_rows", p.device, scores, ctypes.c_longlong(scores.stride(0)), sample.position, sample.first, sample.last, p.ks, p.ke,
             threshold, p.num_q, p.topk, self.layout.holds_any, sample.width, ctypes.c_float(SIGMAS), ctypes.c_float(factor))
        return threshold

    def select(self, candidate: torch.Tensor, count: torch.Tensor, threshold: torch.Tensor) -> Selected:
        p = self.p
        index = torch.empty(p.num_q, p.topk, dtype=torch.int32, device=p.device)
        value = torch.empty(p.num_q, p.topk, device=p.device)
        status = torch.empty(p.num_q, dtype=torch.int32, device=p.device)
        bound = torch.empty(p.num_q, device=p.device)
        call("select_rows", p.device, candidate, count, threshold, index, value, status, bound, p.num_q, p.topk, self.layout.segment,
             self.layout.ties)
        return index, value, status, bound
