"""The fused arms on a GPU, on shapes that their blocks, tiles and splits make awkward. The suites judge them in full."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from topk_problems import assert_right, problem, steered

from arms.kernel import KERNELS, load_package
from arms.topk import TopkProblem, TopkResult

load_package("arms.indexer_topk")
pytestmark = pytest.mark.sm90
ARMS = ("litetopk_cuda", "litetopk_windowed", "litetopk_triton")


def on_gpu(p: TopkProblem) -> TopkProblem:
    return dataclasses.replace(p, **{field.name: getattr(p, field.name).cuda() for field in dataclasses.fields(p)
                                     if isinstance(getattr(p, field.name), torch.Tensor)})


def run(name: str, p: TopkProblem) -> TopkResult:
    result = KERNELS[name].prepare(on_gpu(p))()  # type: ignore[arg-type]
    assert isinstance(result, TopkResult) and result.logits is not None and result.status is not None
    logits = result.logits
    return TopkResult(result.indices.cpu(), None, result.status.cpu(), lambda row0, row1: logits(row0, row1).cpu())


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("requests", [[(1, 1), (2, 2), (3, 3), (5, 5)], [(9, 4099), (5, 1023)], [(13, 20001)], [(1, 100000)],
                                      [(600, 3000), (7, 255), (1, 257)]], ids=str)
@pytest.mark.parametrize("name", ARMS)
def test_awkward_shapes_are_exact(name: str, requests: list[tuple[int, int]], heads: int) -> None:
    p = problem(requests, 512, heads)
    result = run(name, p)
    assert_right(p, result)
    assert result.status is not None and int(result.status.max()) < 3


@pytest.mark.parametrize("name", ARMS)
def test_flat_rows_are_exact(name: str) -> None:
    p = steered(torch.full((70000,), 0.5), 512, [(8, 70000)])
    assert_right(p, run(name, p))


@pytest.mark.parametrize("name", ARMS)
def test_nan_and_infinities(name: str) -> None:
    scores = torch.linspace(-1, 1, 30000)
    scores[[3, 700, 29999]], scores[[5, 900]], scores[7] = torch.nan, torch.inf, -torch.inf
    p = steered(scores, 512, [(8, 30000)])
    assert_right(p, run(name, p))


@pytest.mark.parametrize("name", ("litetopk_cuda", "litetopk_windowed"))
def test_equal_runs_choose_equal_sets(name: str) -> None:
    p = on_gpu(problem([(40, 50000)], 512))
    launch = KERNELS[name].prepare(p)  # type: ignore[arg-type]
    first = launch().indices.sort().values  # type: ignore[union-attr]
    assert all(torch.equal(first, launch().indices.sort().values) for _ in range(20))  # type: ignore[union-attr]
