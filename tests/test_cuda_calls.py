"""What the CUDA arms hand to their library, against the signatures in the sources: ctypes itself checks nothing."""
from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from topk_problems import problem

from arms.litetopk import cuda_library, scan_cuda, windowed
from arms.litetopk.layout import layout_of
from arms.litetopk.sample import plan_sample

KINDS = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


def signatures() -> dict[str, list[Any]]:
    """The exported functions' parameter types."""
    found = {}
    for source in cuda_library.SOURCES:
        exported = source.read_text().partition('extern "C" {')[2]
        for name, parameters in re.findall(r"^int (\w+)\(([^)]*)\) {", exported, re.M):
            kinds = [re.sub(r"\s*\w+$", "", " ".join(p.split())) if "*" not in p else "*" for p in parameters.split(",")]
            found[name] = [KINDS.get(kind, ctypes.c_void_p) for kind in kinds]
    return found


class Recorder:
    """Stands in for the library: every call is compared with the signature, and nothing is launched."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            self.called.append(name)
            assert [type(argument) for argument in arguments] == signatures()[name], name
            return 0

        return function


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(cuda_library, "library", lambda: recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(multi_processor_count=132))

    def fp8_mqa_logits(q: torch.Tensor, kv: Any, weights: Any, ks: torch.Tensor, ke: torch.Tensor, clean_logits: bool) -> torch.Tensor:
        assert bool((ks[ke <= ks] == 0).all()) and not clean_logits
        return torch.zeros(len(q), len(kv[0]) + 256)[:, : len(kv[0])]

    monkeypatch.setitem(sys.modules, "deep_gemm", types.SimpleNamespace(fp8_mqa_logits=fp8_mqa_logits))
    return recorder


def test_every_function_has_a_signature() -> None:
    assert set(signatures()) == {"swizzle", "scan_keys", "seed_rows", "select_rows", "gate_rows"}
    assert signatures()["swizzle"] == [ctypes.c_void_p] * 2 + [ctypes.c_longlong] * 2 + [ctypes.c_void_p]


@pytest.mark.parametrize("scanner", [scan_cuda.CudaScanner, windowed.WindowedScanner])
def test_the_calls_are_those_of_the_sources(recorder: Recorder, scanner: Any) -> None:
    p = problem([(3, 300), (2, 100)], 16)
    made, sample = scanner(p, layout_of(p)), plan_sample(p)
    scores = made.sample_scores(sample)
    threshold = made.seed(scores, sample, 1.0)
    candidate, count = made.candidates(threshold)
    assert candidate.shape == (5, made.layout.width) and count.shape == (5, 2) and int(count.abs().max()) == 0
    made.select(candidate, count, threshold)
    assert made.logits(0, 2).shape == (2, p.s_kv)
    assert made.of_rows(torch.tensor([4])).p.num_q == 1
    gate = {scan_cuda.CudaScanner: "scan_keys", windowed.WindowedScanner: "gate_rows"}[scanner]
    assert {gate, "seed_rows", "select_rows"} <= set(recorder.called)


def test_an_error_of_the_library_is_raised(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_library, "library", lambda: types.SimpleNamespace(swizzle=lambda *_: 700))
    with pytest.raises(RuntimeError, match="swizzle: CUDA error 700"):
        scan_cuda.swizzled(torch.zeros(3, 128).to(torch.float8_e4m3fn))
