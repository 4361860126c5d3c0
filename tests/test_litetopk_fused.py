"""The fused arms: their frame (sample, certificate, rescan, dense) and the Triton kernels, interpreted on the CPU.

Small problems: the interpreter takes a second for a few programs. On a GPU the same arms are judged by the suites, and test_fused_cuda.py.
"""
from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from topk_problems import assert_right, problem, steered

pytest.importorskip("triton", reason="Triton is not installed: the fused arms are not tried")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled: see test_fused_cuda.py", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels' modules are imported (which this one alone does) and when they are called

from arms.litetopk.certify import certified
from arms.litetopk.layout import Layout, layout_of
from arms.litetopk.sample import Sample, plan_sample, sample_length
from arms.litetopk.scan_triton import TritonScanner
from arms.litetopk.select_triton import seed, select
from arms.topk import WAYS, TopkProblem, TopkResult

del os.environ["TRITON_INTERPRET"]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def ways(result: TopkResult) -> list[str]:
    assert result.status is not None
    return [WAYS[status] for status in result.status.tolist()]


def launch(p: TopkProblem, splits: int = 0) -> TopkResult:
    return certified(p, TritonScanner(p, splits), plan_sample(p))


@pytest.mark.parametrize("name, p", {
    "ragged": problem([(3, 300), (2, 100)], 16), "few keys": problem([(1, 1), (2, 2), (3, 3)], 8), "64 heads": problem([(5, 700)], 20, 64),
    "exact ties": problem([(5, 900)], 16, whole=True)}.items(), ids=lambda x: x if isinstance(x, str) else "")
def test_the_triton_arm_is_exact(name: str, p: TopkProblem) -> None:
    result = launch(p)
    assert_right(p, result)
    assert "failed" not in ways(result)


def test_splits_share_the_keys_of_a_block() -> None:
    p = problem([(3, 1500)], 16)
    result = launch(p, splits=4)
    assert_right(p, result)
    assert torch.equal(launch(p).indices.sort().values, result.indices.sort().values)


def test_a_sample_that_misleads_is_corrected() -> None:
    """Thresholds that are far too high: the counts say so, and the rows are scanned again."""
    class Misled(TritonScanner):
        def seed(self, scores: torch.Tensor, sample: Sample, factor: float) -> torch.Tensor:
            return super().seed(scores, sample, factor) if factor > 1 else torch.full((self.p.num_q,), 1e30)

    p = problem([(2, 1500)], 16)
    result = certified(p, Misled(p), plan_sample(p))
    assert ways(result) == ["rescan"] * 2
    assert_right(p, result)


def test_too_many_candidates_are_cut_by_the_kth_that_was_stored() -> None:
    """An open gate on more keys than there is room for."""
    class Open(TritonScanner):
        def seed(self, scores: torch.Tensor, sample: Sample, factor: float) -> torch.Tensor:
            return torch.full((self.p.num_q,), -torch.inf)

    p = problem([(2, 1500)], 16)
    result = certified(p, Open(p), plan_sample(p))
    assert ways(result) == ["rescan"] * 2
    assert_right(p, result)


def test_more_ties_than_room_go_dense_without_another_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    scans = []
    scan = TritonScanner.candidates
    monkeypatch.setattr(TritonScanner, "candidates", lambda self, t: scans.append(1) or scan(self, t))
    p = steered(torch.full((1500,), 0.5), 16)
    result = launch(p)
    assert ways(result) == ["dense"] and scans == [1]
    assert_right(p, result)


def test_nan_is_never_chosen_and_infinities_are_in_order() -> None:
    scores = torch.linspace(-1, 1, 1300)
    scores[[3, 700, 1299]] = torch.nan
    scores[[5, 900]] = torch.inf
    scores[7] = -torch.inf
    p = steered(scores, 16)
    result = launch(p)
    assert_right(p, result)
    assert {5, 900} <= set(result.indices[0].tolist())


# Seed and select alone.


def packed(values: list[float], places: list[int]) -> torch.Tensor:
    return (torch.tensor(values).view(torch.int32).long() << 32) | torch.tensor(places)


def chosen(layout: Layout, candidate: torch.Tensor, count: list[int], topk: int, threshold: float) -> tuple[list[int], int, float]:
    index, _, status, bound = select(candidate[None], torch.tensor([count], dtype=torch.int32), torch.tensor([threshold]), topk, layout)
    return index[0].tolist(), int(status), float(bound)


LAYOUT = Layout(1, 12, 4)


def test_select_takes_the_smallest_positions_of_equal_scores() -> None:
    candidate = torch.zeros(16, dtype=torch.int64)
    candidate[:5] = packed([2.0, 1.0, 1.0, 1.0, 3.0], [50, 40, 10, 30, 20])
    index, status, _ = chosen(LAYOUT, candidate, [5, 0], 4, 0.0)
    assert (sorted(index), status) == ([10, 20, 30, 50], 0)


def test_select_reads_the_ties_behind_the_others() -> None:
    candidate = torch.zeros(16, dtype=torch.int64)
    candidate[:2], candidate[12:15] = packed([2.0, 3.0], [5, 6]), packed([1.0, 1.0, 1.0], [9, 7, 8])
    index, status, _ = chosen(LAYOUT, candidate, [2, 3], 4, 1.0)
    assert (sorted(index), status) == ([5, 6, 7, 8], 0)


@pytest.mark.parametrize("count, threshold, certified_", [
    ([3, 0], 0.0, False),  # fewer than topk passed a closed gate
    ([3, 0], -torch.inf, True),  # all there are
    ([13, 0], 0.0, False),  # one was lost
    ([3, 9], 0.0, True),  # five ties were lost: any four will do
    ([3, 9], -torch.inf, True)])
def test_the_certificate(count: list[int], threshold: float, certified_: bool) -> None:
    candidate = packed([float(i + 1) for i in range(16)], list(range(16)))
    index, status, _ = chosen(LAYOUT, candidate, count, 4, threshold)
    assert (status == 0) is certified_
    assert (index == [-1] * 4) is not certified_


def test_the_bound_is_a_threshold_that_topk_stored_keys_reach() -> None:
    candidate = packed([float(i + 1) for i in range(16)], list(range(16)))
    assert chosen(LAYOUT, candidate, [13, 0], 4, 0.0)[2] == 9.0
    assert chosen(LAYOUT, candidate, [3, 0], 4, 0.0)[2] != chosen(LAYOUT, candidate, [3, 0], 4, 0.0)[2]  # NaN


def test_seed_gives_the_rank_that_the_sigmas_ask_for() -> None:
    p = dataclasses.replace(problem([(1, 4096)], 16), topk=64)
    sample = Sample(torch.arange(0, 4096, 4, dtype=torch.int32), torch.tensor([0]).int(), torch.tensor([1024]).int(), 1024)
    scores = torch.arange(1024.0).flip(0)[None]
    # 16 of the sample are expected; 5 sigmas: ((5 + sqrt(25 + 64)) / 2)^2 = 52.1
    assert float(seed(scores, sample, p, Layout(1, 500, 12), 1.0)) == 1023.0 - 52
    assert float(seed(scores, sample, p, Layout(1, 5000, 12), 1.0)) == -torch.inf  # all of the row's keys find room
    assert float(seed(torch.full_like(scores, torch.nan), sample, p, Layout(1, 500, 12), 1.0)) == -torch.inf


def test_the_sample_is_spread_over_the_request() -> None:
    p = problem([(2, 5000), (1, 700)], 16)
    sample = plan_sample(p)
    first, second = sample.position[:1024], sample.position[1024:]
    assert len(second) == sample_length(700) == 700 and second.tolist() == list(range(5000, 5700))
    assert len(set(first.tolist())) == 1024 and int(first.min()) < 10 and 4990 < int(first.max()) < 5000
    assert int(first.diff().max()) < 2 * 5000 / 1024 + 1
    assert sample.first.tolist() == [0, 0, 1024] and sample.last.tolist() == [1024, 1024, 1724]


def test_rows_of_no_request_have_no_sample() -> None:
    p = problem([(2, 300)], 16)
    padded = dataclasses.replace(p, q_fp8=torch.cat([p.q_fp8, p.q_fp8[:1]]), weights=torch.cat([p.weights, p.weights[:1]]),
                                 ks=torch.cat([p.ks, p.ks.new_zeros(1)]), ke=torch.cat([p.ke, p.ke.new_zeros(1)]))
    assert plan_sample(padded).last.tolist() == [300, 300, 0]
    result = launch(padded)
    assert_right(padded, result)
    assert ways(result) == ["scan"] * 3


def test_room_for_candidates() -> None:
    assert layout_of(problem([(1, 10)], 2048)).width == 16384
    assert layout_of(problem([(1, 10)], 2048), lanes=128) == Layout(128, 128, 0)
    assert layout_of(problem([(1, 10)], 1)).width == 1024


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: the CUDA sources are not compiled")
def test_the_cuda_sources_compile(tmp_path: Path) -> None:
    from arms.litetopk.cuda_library import FLAGS, SOURCES

    built = subprocess.run(["nvcc", *FLAGS, "-o", tmp_path / "out.so", *SOURCES], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "warning" not in built.stderr
