"""The portable indexer top-k arms: exact on small problems of every kind, their scores right, bad input refused, memory bounded."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import many
from topk_problems import FP8, assert_right, best, one_thread, problem, steered
from torch.utils._python_dispatch import TorchDispatchMode

from arms import scoring
from arms import topk as topk_module
from arms.dense import BUDGET, chunk_rows, chunks
from arms.indexer_topk import litetopk_torch, torch_dense
from arms.kernel import KERNELS
from arms.litetopk.torch_config import Config
from arms.scoring import Scorer, Tile
from arms.topk import UNBOUNDED, WAYS, TopkProblem, TopkResult, check_problem, half_of_the_scores, indexer_topk_kernel

ARMS = ("torch_dense", "litetopk_torch")
NAN, INF = math.nan, math.inf

__all__ = ["one_thread"]  # a fixture that every test of this module uses


def launch(name: str, p: TopkProblem) -> TopkResult:
    result = KERNELS[name].prepare(p)()
    assert isinstance(result, TopkResult)
    return result


def run_small(p: TopkProblem, **changes: object) -> TopkResult:
    """litetopk_torch with settings so small that a small problem meets every path."""
    return litetopk_torch.run(p, Scorer(p, Tile(4, 64)), Config(**{"sample": 32, "capacity": 4 * p.topk, "tile": 32, **changes}))


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("requests", "topk"), [
    ([(1, 1)], 1), ([(1, 1)], 8), ([(3, 3)], 2), ([(9, 4099), (5, 1023)], 64), ([(7, 300)], 512), ([(4, 2), (2, 5)][1:], 5),
    ([(12, 12)], 4), ([(1, 700), (20, 40), (3, 1500)], 33)])
def test_exact(name: str, whole: bool, requests: list[tuple[int, int]], topk: int) -> None:
    p = problem(requests, topk, whole=whole)
    assert_right(p, launch(name, p), smallest=name == "litetopk_torch")


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("heads", [32, 64])
def test_scores(name: str, heads: int) -> None:
    """Against fp64 in another order: within gamma_n of the sum of magnitudes, n = 128 + heads + 1 roundings."""
    p = problem([(9, 2100)], 16, heads)
    result = launch(name, p)
    assert result.logits is not None
    dots = torch.einsum("rhd,kd->rhk", p.q_fp8.double(), p.k_fp8.double())
    bound = torch.einsum("rhd,kd->rhk", p.q_fp8.double().abs(), p.k_fp8.double().abs())
    scores = (dots.relu() * p.weights.double()[..., None]).sum(1) * p.kv_scale
    error = (bound * p.weights.double().abs()[..., None]).sum(1) * p.kv_scale * (128 + heads + 2) * 2.0**-24
    inside = Scorer(p).inside(0, p.num_q, 0, p.s_kv)
    got = result.logits(0, p.num_q)
    assert bool(((got - scores).abs() <= error)[inside].all())
    assert bool((got[~inside] == -INF).all())


def test_a_score_has_the_same_bits_whatever_is_asked_with_it() -> None:
    p = problem([(21, 3000)], 8)
    scorer = Scorer(p)
    whole = scorer.masked(0, 21)
    for rows, keys in (((0, 21), (0, 3000)), ((3, 4), (1000, 1025)), ((7, 18), (1, 2999)), ((20, 21), (2999, 3000))):
        assert torch.equal(scorer.masked(*rows, *keys), whole[slice(*rows), slice(*keys)])


def test_products_are_of_whole_tiles_of_a_fixed_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bits cannot depend on what is asked: here a score is its place within the product that made it."""
    def places(q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
        assert (len(q), len(weights), len(k), len(kv_scale)) == (4, 4, 64, 64)
        return torch.arange(4 * 64).view(4, 64).float()

    monkeypatch.setattr(scoring, "score_tile", places)
    scorer = Scorer(problem([(11, 300)], 8), Tile(4, 64))
    whole = scorer.raw(0, 11, 0, 290)
    for rows, keys in (((3, 4), (10, 11)), ((2, 9), (63, 200)), ((5, 11), (0, 65))):
        assert torch.equal(scorer.raw(*rows, *keys), whole[slice(*rows), slice(*keys)])
    assert scorer.at(5, 8, torch.arange(70)).tolist() == [[64 * (row - 4) + place % 64 for place in range(70)] for row in (5, 6, 7)]


def test_tf32_is_off_and_the_setting_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before, used, bmm = torch.get_float32_matmul_precision(), [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a: (used.append(torch.get_float32_matmul_precision()), bmm(*a))[1])
    torch.set_float32_matmul_precision("medium")
    try:
        p = problem([(2, 50)], 4)
        assert_right(p, launch("torch_dense", p))
        assert torch.get_float32_matmul_precision() == "medium" and set(used) == {"highest"}
    finally:
        torch.set_float32_matmul_precision(before)


SPECIAL = {
    "flat": torch.full((600,), 1.25),
    "zeros": torch.zeros(600),
    "plateau": torch.tensor([0.0] * 570 + [1.0, 2.0] * 15),
    "two values": torch.tensor([1.0, 1.0 + 2.0**-23] * 300),
    "negative": -torch.rand(600, generator=torch.Generator().manual_seed(1)) - 0.1,
    "NaN everywhere": torch.full((600,), NAN),
    "NaN but five": torch.tensor([NAN] * 595 + [3.0, -1.0, 0.0, INF, -INF]),
    "NaN first": torch.tensor([NAN] * 300 + [float(i) for i in range(300)]),
    "more +inf than topk": torch.tensor([INF, 1.0] * 300),
    "few +inf": torch.tensor([INF, 2.0, -3.0] + [0.5] * 597),
    "-inf needed": torch.tensor([-INF] * 590 + [1.0] * 10),
    "-inf, NaN and a few": torch.tensor([-INF, NAN] * 296 + [1.0] * 8),
    "all -inf": torch.full((600,), -INF),
    "outlier": torch.cat([torch.tensor([1e30]), torch.rand(599, generator=torch.Generator().manual_seed(2))]),
    "largest": torch.tensor([3.4e38, -3.4e38, 1.0] * 200),
    "smallest": torch.tensor([1e-45, 2e-45, -1e-45] * 200),
    "ascending": torch.arange(1, 601).float(),
    "descending": torch.arange(600, 0, -1).float(),
}


@pytest.mark.parametrize("values", SPECIAL)
def test_special_scores(values: str) -> None:
    """Every order and every kind of number, in rows with ks above 0 and windows shorter than topk."""
    scores = SPECIAL[values]
    p = steered(scores, 40, [(5, 90), (3, 510)], factors=torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 4.0, 1.0, 0.25]))
    got = launch("torch_dense", p)
    expected = p.weights[:, :1] * scores
    for row in range(p.num_q):
        assert got.logits is not None
        window = slice(int(p.ks[row]), int(p.ke[row]))
        assert torch.equal(got.logits(row, row + 1)[0, window].nan_to_num(7.0), expected[row, window].nan_to_num(7.0))
    assert_right(p, got)
    assert_right(p, launch("litetopk_torch", p), smallest=True)
    for changes in ({}, {"gate": "margin"}, {"spread": "prefix", "buckets": 2}, {"buckets": 3, "refresh": 0}, {"rescans": 0},
                    {"spread": "shared", "floor": 0.0, "least": 1e-20, "open_short": False}, {"capacity": 40, "buckets": 4096}):
        assert_right(p, run_small(p, **changes), smallest=True)


def test_empty_problems() -> None:
    for requests in ([(0, 5)], [(3, 0)]):
        p = problem(requests, 4)
        p = dataclasses.replace(p, ks=torch.zeros_like(p.ks), ke=torch.zeros_like(p.ke))
        for name in ARMS:
            assert bool((launch(name, p).indices == -1).all())


def test_empty_rows_between_others() -> None:
    p = problem([(12, 900)], 20)
    ke = p.ke.clone()
    ke[[0, 5, 11]] = p.ks[[0, 5, 11]]
    ks, ke2 = p.ks.clone(), ke.clone()
    ks[5] = ke2[5] = 900  # an empty row at the end of the keys
    for changed in (dataclasses.replace(p, ke=ke), dataclasses.replace(p, ks=ks, ke=ke2)):
        for name in ARMS:
            assert_right(changed, launch(name, changed))


def test_rows_of_no_request_are_exact_too() -> None:
    """requests come from outside: one that does not fit the windows costs time, not keys; one outside the rows or keys is refused."""
    p = problem([(6, 800)], 16)
    for requests in ((), ((0, 3, 0, 800),), ((0, 6, 700, 9000),), ((0, 6, 5, 5),), ((2, 90, -7, 10),)):
        wrong = dataclasses.replace(p, requests=requests)
        if requests in (((0, 6, 700, 9000),), ((2, 90, -7, 10),)):
            with pytest.raises(ValueError, match=r"request 0 is .*within 6 rows and 800 keys"):
                launch("litetopk_torch", wrong)
        else:
            assert_right(wrong, launch("litetopk_torch", wrong), smallest=True)
        assert_right(wrong, run_small(wrong), smallest=True)


@settings(deadline=None, max_examples=many(150))
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 250)), min_size=1, max_size=2), st.integers(1, 60), st.integers(0, 10**6),
       st.booleans(), st.sampled_from([2, 3, 7, 255, 256, 257]), st.sampled_from(["safe", "margin"]),
       st.sampled_from(["strided", "prefix", "shared"]), st.sampled_from([0, 1, 3]), st.integers(0, 3), st.integers(1, 64))
def test_any_settings_are_exact(requests: list[tuple[int, int]], topk: int, seed: int, whole: bool, buckets: int, gate: str, spread: str,
                                refresh: int, rescans: int, sample: int) -> None:
    p = problem([(rows, rows + more) for rows, more in requests], topk, seed=seed, whole=whole)
    capacity = topk + seed % (2 * topk)
    config = {"buckets": buckets, "gate": gate, "spread": spread, "refresh": refresh, "rescans": rescans, "sample": sample}
    result = run_small(p, capacity=capacity, **config)
    assert_right(p, result, smallest=True)
    assert result.status is not None and WAYS.index("failed") not in result.status.tolist()


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(("change", "message"), [
    ({"topk": 0}, "topk=0: allowed is an integer from 1 to"), ({"topk": 1 << 15}, "topk=32768: allowed is an integer from 1 to"),
    ({"weights": torch.zeros(4, 32, dtype=torch.float64)}, "weights must be torch.float32"),
    ({"k_fp8": torch.zeros(64, 128)}, "k_fp8 must be torch.float8_e4m3fn"),
    ({"kv_scale": torch.ones(128)[::2]}, "kv_scale must be contiguous"), ({"kv_scale": torch.ones(65)[1:]}, "aligned to 16 bytes"),
    ({"ks": torch.tensor([0, 0, 9, 0], dtype=torch.int32), "ke": torch.full((4,), 8, dtype=torch.int32)}, r"row 2: its window \[9, 8\)"),
    ({"ke": torch.tensor([1, 2, 3, 65], dtype=torch.int32)}, r"row 3: its window \[0, 65\)"),
    ({"ke": torch.tensor([1, 2, 3, 4])}, "ke must be torch.int32"),
    ({"q_fp8": torch.zeros(4, 16, 128).to(FP8), "weights": torch.zeros(4, 16)}, "h=16: allowed are 32 and 64")])
def test_bad_input_is_refused_before_any_launch(name: str, change: dict[str, object], message: str) -> None:
    p = dataclasses.replace(problem([(4, 64)], 8), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        KERNELS[name].prepare(p)


@pytest.mark.parametrize(("change", "message"), [
    ({"buckets": 1}, "buckets=1: allowed is 2 to 4096"), ({"buckets": 4097}, "buckets=4097"), ({"sample": 0}, "sample=0"),
    ({"gate": "open"}, "gate='open'"), ({"spread": "random"}, "spread='random'"), ({"floor": 2.0}, "floor=2.0"), ({"rescans": -1}, "-1")])
def test_bad_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config(**change)  # type: ignore[arg-type]


def test_a_topk_above_the_capacity_is_refused() -> None:
    p = problem([(1, 50)], 8)
    with pytest.raises(ValueError, match="topk=8: allowed is 1 to the capacity, 7"):
        run_small(p, capacity=7)


class Largest(TorchDispatchMode):
    """Notes the largest tensor, in bytes, that any operation returns, the problem's own tensors and views of them left out."""

    def __init__(self, p: TopkProblem) -> None:
        super().__init__()
        self.bytes = 0
        self.inputs = {getattr(p, name).untyped_storage().data_ptr() for name in ("q_fp8", "k_fp8", "kv_scale", "weights", "ks", "ke")}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.inputs:
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


def test_litetopk_has_no_tensor_of_all_scores() -> None:
    """Even where every row goes dense: the largest is a tile of dot products, whatever the number of keys."""
    largest = []
    for keys in (1 << 11, 1 << 12):
        p = steered(torch.ones(keys), 16, [(16, keys)])
        scorer = Scorer(p, Tile(2, 64))
        with Largest(p) as mode:
            result = litetopk_torch.run(p, scorer, Config(capacity=64, sample=64, buckets=16, rescans=1))
        assert result.status is not None and set(result.status.tolist()) == {WAYS.index("dense")}
        largest.append(mode.bytes)
    assert largest[0] == largest[1] < 16 * 2048 * 4


def test_dense_keeps_to_its_budget() -> None:
    p = problem([(40, 500)], 8)
    scorer = Scorer(p, Tile(4, 64))
    with Largest(p) as mode:
        torch_dense.dense_topk(p, scorer, 8 * 500 * 4)
    assert mode.bytes <= max(8 * 500 * 4, 4 * 4 * 32 * 128)  # a chunk of logits, and a tile's queries in fp32


def test_chunks() -> None:
    assert list(chunks(10, 100, 450, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(chunks(10, 100, 0, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(chunks(10, 100, 10**9, 4)) == [(0, 10)]
    assert list(chunks(0, 100, 10**9, 4)) == []
    assert (chunk_rows(10, 100, 850, 4), chunk_rows(0, 100, 850, 4)) == (8, 0)


@pytest.mark.parametrize("name", ARMS)
def test_declared_memory(name: str) -> None:
    """litetopk's bound does not grow with the keys by more than bookkeeping; the dense arm's holds one budget of logits."""
    bound = KERNELS[name].memory
    p = problem([(64, 1 << 13)], 64)
    many = dataclasses.replace(p, k_fp8=torch.empty(1 << 20, 128, dtype=FP8))
    if name == "litetopk_torch":
        assert bound(many) == bound(p) < many.num_q * many.s_kv * 4
    else:
        assert BUDGET["cpu"] < bound(many) < 2 * BUDGET["cpu"] + 16 * many.s_kv * torch.get_num_threads()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize(("requests", "topk"), [([(64, 1 << 16)], 2048), ([(300, 20000), (9, 4099)], 512)])
def test_on_cuda(name: str, requests: list[tuple[int, int]], topk: int) -> None:
    """Exact there too, and no more memory than declared."""
    here = problem(requests, topk)
    p = TopkProblem(*(getattr(here, f.name).cuda() if f.type == "torch.Tensor" else getattr(here, f.name)
                      for f in dataclasses.fields(here)))
    ready = KERNELS[name].prepare(p)
    ready()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = ready()
    used = torch.cuda.max_memory_allocated() - before - result.indices.numel() * 4  # type: ignore[union-attr]
    assert used <= KERNELS[name].memory(p)
    result = TopkResult(result.indices.cpu(), result.values.cpu(), None, lambda a, b: logits[a:b])  # type: ignore[union-attr]
    logits = ready().logits(0, p.num_q).cpu()  # type: ignore[union-attr,misc]
    assert_right(here, result, smallest=name == "litetopk_torch")


def test_best_is_what_it_says() -> None:
    assert best(torch.tensor([1.0, NAN, 3.0, 3.0, -INF, INF]), 1, 6, 4) == [5, 2, 3, 4]
    p = problem([(2, 6)], 3)
    check_problem(p)


def test_a_litetopk_that_declares_no_memory_is_held_to_half_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arms.topk.KERNELS", {})
    p = problem([(1, 8)], 4)
    for arm, bound in (("litetopk", 64 << 20), ("dense", UNBOUNDED)):
        indexer_topk_kernel(f"silent_{arm}", arm=arm)(lambda problem: lambda: problem.ks)
        kernel: Any = topk_module.KERNELS[f"silent_{arm}"]
        assert kernel.memory(p) == bound
    large = dataclasses.replace(p, q_fp8=p.q_fp8.expand(8192, -1, -1), k_fp8=p.k_fp8[:1].expand(1 << 18, -1))
    assert half_of_the_scores(large) == 4 * 8192 * (1 << 18) // 2
