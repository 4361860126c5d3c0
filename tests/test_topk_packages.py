"""The arms that call packages (deep_gemm, sglang), against stand-ins with the packages' signatures: what they are given, and what
becomes of what they return. The packages themselves need a GPU."""
from __future__ import annotations

import dataclasses
import importlib.machinery
import math
import os
import sys
import types
from typing import ClassVar

import pytest
import torch
from topk_problems import assert_right, best, one_thread, problem, steered

from arms.indexer_topk import deep_gemm, litetopk_sglang
from arms.kernel import KERNELS
from arms.scoring import score_tile
from arms.topk import WAYS, TopkProblem, TopkResult

__all__ = ["one_thread"]  # a fixture that every test of this module uses


def package(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> types.ModuleType:
    """Put a module with these contents, and the packages above it, where an import finds it."""
    for upto in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:upto])
        if part not in sys.modules or part == name:
            module = types.ModuleType(part)
            module.__spec__ = importlib.machinery.ModuleSpec(part, None)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, part, module)
    vars(sys.modules[name]).update(contents)
    return sys.modules[name]


class DeepGemm:
    """fp8_mqa_logits as the wheels have it: a view with a wider row, scores of the block's whole union, junk beyond it, and its checks."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def fp8_mqa_logits(self, q, kv, weights, ks, ke, clean_logits=True, max_seqlen_k=0):  # type: ignore[no-untyped-def]
        k, scale = kv
        assert not clean_logits and max_seqlen_k == 0 and all(t.is_contiguous() for t in (q, k, scale, weights, ks, ke))
        assert scale.shape == (len(k),) and scale.untyped_storage().nbytes() >= 4 * (-(-len(k) // 4) * 4)
        assert bool((ke >= ks).all()) and bool((ke <= len(k)).all()) and bool(((ke > ks) | ((ks == 0) & (ke == 0))).all())
        self.calls.append(len(q))
        width = -(-(len(k) + 256) // 256) * 256
        logits = torch.full((len(q), width), math.nan)
        for row in range(0, len(q), 4):
            rows, first, last = slice(row, row + 4), int(ks[row : row + 4].min()), int(ke[row : row + 4].max())
            logits[rows, first:last] = score_tile(q[rows], weights[rows], k[first:last], scale[first:last]) if last > first else 0.0
        return logits[:, : len(k)]


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> DeepGemm:
    module = DeepGemm()
    package(monkeypatch, "deep_gemm", fp8_mqa_logits=module.fp8_mqa_logits)
    for absent in ("sgl_kernel", "sglang"):
        monkeypatch.setitem(sys.modules, absent, None)
        monkeypatch.delitem(sys.modules, absent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=importlib.util.find_spec: (
        found(name) if name in sys.modules else None))
    return module


def relative_topk(score: torch.Tensor, lengths: torch.Tensor, topk: int, starts: torch.Tensor) -> torch.Tensor:
    """What the packaged kernels return: positions from the row's start, in no order, -1 behind them."""
    out = torch.full((len(score), topk), -1, dtype=torch.int32)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):
        chosen = [place - start for place in best(score[row], start, start + length, topk)][::-1]
        out[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return out


def ragged_fused(score, lengths, topk_indices_offset, topk, row_starts=None):  # type: ignore[no-untyped-def]
    assert topk == 2048 and score.dim() == 2 and score.stride(1) == 1
    relative = relative_topk(score, lengths, topk, row_starts)
    return torch.where(relative >= 0, relative + topk_indices_offset[:, None], relative)


def fast_topk(score, lengths, topk, row_starts=None):  # type: ignore[no-untyped-def]
    assert topk in (512, 2048) and score.stride(1) == 1
    return relative_topk(score, lengths, topk, row_starts)


def with_empty_rows(p: TopkProblem) -> TopkProblem:
    ke = p.ke.clone()
    ke[[1, 2, -1]] = p.ks[[1, 2, -1]]
    return dataclasses.replace(p, ke=ke)


@pytest.mark.parametrize("topk", [5, 512, 2048])
@pytest.mark.parametrize("budget", [1, 10 * 4 * 1280, 1 << 30])
def test_deep_gemm(gemm: DeepGemm, monkeypatch: pytest.MonkeyPatch, topk: int, budget: int) -> None:
    package(monkeypatch, "sgl_kernel", fast_topk_transform_ragged_fused=ragged_fused)
    package(monkeypatch, "sglang.kernels.ops.attention.fast_topk", fast_topk=fast_topk)
    p = with_empty_rows(problem([(7, 600), (6, 203)], topk))
    assert (deep_gemm.selector(topk) is None) == (topk == 5)
    result = deep_gemm.prepare(p, budget)()
    rows = {1: 4, 10 * 4 * 1280: 8, 1 << 30: 13}[budget]
    assert gemm.calls == [min(rows, 13 - row) for row in range(0, 13, rows)]
    assert isinstance(result, TopkResult) and (result.values is None) == (topk != 5)
    assert_right(p, result)


def test_deep_gemm_takes_torch_topk_where_the_packages_are_absent(gemm: DeepGemm) -> None:
    assert deep_gemm.selector(2048) is None and deep_gemm.selector(512) is None
    p = with_empty_rows(problem([(9, 2100)], 2048))
    result = KERNELS["deep_gemm"].prepare(p)()
    assert_right(p, result)  # type: ignore[arg-type]


def test_deep_gemm_with_scores_that_are_no_numbers(gemm: DeepGemm) -> None:
    scores = torch.tensor([math.nan, -math.inf, math.inf, 2.0] * 30)
    p = steered(scores, 100, [(5, 120)])
    assert_right(p, deep_gemm.prepare(p, 1)())  # type: ignore[arg-type]


@pytest.mark.parametrize("requests", [[(0, 8)], [(3, 0)]])
def test_deep_gemm_launches_nothing_without_rows_or_keys(gemm: DeepGemm, requests: list[tuple[int, int]]) -> None:
    p = problem(requests, 2048)
    p = dataclasses.replace(p, ks=torch.zeros_like(p.ks), ke=torch.zeros_like(p.ke))
    result = deep_gemm.prepare(p, 1 << 20)()
    assert isinstance(result, TopkResult) and bool((result.indices == -1).all()) and gemm.calls == []


@pytest.mark.parametrize("name", ["deep_gemm", "litetopk_sglang", "litetopk_sglang_sm90"])
def test_bad_input_is_refused_before_the_package_is_loaded(name: str) -> None:
    p = problem([(4, 64)], 8)
    for bad in ({"topk": 0}, {"ke": p.ks - 1}, {"kv_scale": p.kv_scale.double()}):
        with pytest.raises(ValueError, match=r"topk|ke must not be below|kv_scale"):
            KERNELS[name].prepare(dataclasses.replace(p, **bad))  # type: ignore[arg-type]


def dsa_litetopk_indexer(q_fp8, kv_fp8, kv_scales, weights, ks, ke, topk, out_indices=None, *, req_bounds,  # type: ignore[no-untyped-def]
                         num_buckets=256, sample_len=8192, cand_cap=None, refresh_every=64):
    """sglang#32094: absolute positions, unsorted, -1 behind them, in the caller's buffer."""
    assert req_bounds and all(len(bound) == 4 for bound in req_bounds)
    for row0, row1, kv0, kv1 in req_bounds:
        assert bool((ks[row0:row1] == kv0).all()) and bool((ke[row0:row1] <= kv1).all())
    logits = score_tile(q_fp8, weights, kv_fp8, kv_scales)
    relative = relative_topk(logits, ke - ks, topk, ks)
    return out_indices.copy_(torch.where(relative >= 0, relative + ks[:, None], relative))


def test_sglang_on_sm100(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, "sglang.kernels.ops.attention.dsa.litetopk", dsa_litetopk_indexer=dsa_litetopk_indexer)
    p = problem([(5, 300), (2, 40)], 64)
    launch = KERNELS["litetopk_sglang"].prepare(p)
    result = launch()
    assert isinstance(result, TopkResult) and result.status is None
    logits = score_tile(p.q_fp8, p.weights, p.k_fp8, p.kv_scale)
    assert_right(p, dataclasses.replace(result, logits=lambda row0, row1: logits[row0:row1]))
    again = launch()
    assert isinstance(again, TopkResult) and again.indices.data_ptr() != result.indices.data_ptr()


class SM90LiteTopK:
    """sglang#40461: off unless its switch is set, stateful, None for what it does not take."""

    made: ClassVar[list[SM90LiteTopK]] = []
    takes = True

    def __init__(self) -> None:
        self.enabled = os.environ.get("SGLANG_USE_SM90_LITETOPK", "0") == "1"
        self.hints: dict[object, int] = {}
        SM90LiteTopK.made.append(self)

    def observe(self, state_key, topk_indices, extent):  # type: ignore[no-untyped-def]
        assert topk_indices.dtype == torch.int32 and topk_indices.shape[1] == 2048
        assert sorted(topk_indices.flatten().tolist()) == list(range(extent)) and extent == 12288
        self.hints[state_key] = extent

    def try_run(self, state_key, q, k, scales, weights, starts, ends, select):  # type: ignore[no-untyped-def]
        assert self.enabled and self.hints.pop(state_key) <= 12288, "each launch begins with the hint of its own"
        if not self.takes or bool((starts != 0).any()) or int(ends.min()) < 12288:
            return None
        values = torch.stack([score_tile(q, weights, k, scales)[row] for row in range(len(q))])
        return select(values, ends).clone()


@pytest.fixture
def sm90(gemm: DeepGemm, monkeypatch: pytest.MonkeyPatch) -> type[SM90LiteTopK]:
    package(monkeypatch, "sglang.srt.layers.attention.dsa.sm90_litetopk", SM90LiteTopK=SM90LiteTopK)
    package(monkeypatch, "sgl_kernel", fast_topk_transform_ragged_fused=ragged_fused, fast_topk_v2=fast_topk)
    monkeypatch.setattr(SM90LiteTopK, "made", [])
    return SM90LiteTopK


@pytest.mark.parametrize(("keys", "takes", "way"), [(12300, True, "scan"), (12300, False, "dense"), (4000, True, "dense")])
def test_sglang_on_sm90(sm90: type[SM90LiteTopK], monkeypatch: pytest.MonkeyPatch, keys: int, takes: bool, way: str) -> None:
    monkeypatch.setattr(sm90, "takes", takes)
    p = problem([(3, keys)], 2048)
    launch = KERNELS["litetopk_sglang_sm90"].prepare(p)
    assert "SGLANG_USE_SM90_LITETOPK" not in os.environ and sm90.made[0].enabled
    logits = score_tile(p.q_fp8, p.weights, p.k_fp8, p.kv_scale)
    for _ in range(2):
        result = launch()
        assert isinstance(result, TopkResult) and result.status is not None
        assert [WAYS[each] for each in result.status] == [way] * 3
        assert_right(p, dataclasses.replace(result, logits=lambda row0, row1: logits[row0:row1]))


def test_the_switch_is_left_as_it_was(sm90: type[SM90LiteTopK], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_SM90_LITETOPK", "0")
    assert litetopk_sglang.switched_on(sm90).enabled and os.environ["SGLANG_USE_SM90_LITETOPK"] == "0"


def test_what_the_listing_says() -> None:
    for name in ("litetopk_sglang", "litetopk_sglang_sm90"):
        assert "not run on this hardware" in KERNELS[name].requires.note
    sm90 = KERNELS["litetopk_sglang_sm90"].requires
    assert (sm90.topk_in, sm90.keys, sm90.keys_multiple, sm90.requests_max) == ((2048,), (12288, 1 << 20), 4, 1)
