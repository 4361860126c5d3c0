"""litetopk_sglang: sglang's own LiteTopk, where the installed sglang has it; no release had when this was written (0.5.23 has none).

SM100 from sglang#32094 (`dsa_litetopk_indexer`, any topk), SM90 from sglang#40461 (`SM90LiteTopK`, topk 2048, one request).
"""
from __future__ import annotations

import os
from typing import Any

import torch

from arms.dense import BUDGET
from arms.indexer_topk import deep_gemm
from arms.kernel import Requires
from arms.topk import WAYS, TopkLaunch, TopkProblem, TopkResult, check_problem, indexer_topk_kernel

SM100 = "sglang.kernels.ops.attention.dsa.litetopk:dsa_litetopk_indexer"
SM90 = "sglang.srt.layers.attention.dsa.sm90_litetopk:SM90LiteTopK"
SWITCH = "SGLANG_USE_SM90_LITETOPK"
HOT = 12288  # columns of the SM90 kernel's sample: the shortest request that it takes
TOPK = 2048
CAPACITY = 49152  # candidates a row of the SM90 kernel, 8 bytes each
NOT_RUN = "not run on this hardware by anyone yet"


def sm100_memory(p: TopkProblem) -> int:
    """Bytes beyond inputs and indices: candidates (8 bytes), histogram of 256 buckets, sample logits of 8192 keys (twice: as
    DeepGEMM pads them, and contiguous), values, a few numbers a row."""
    capacity = max(4 * p.topk, 1 << 14)
    return p.num_q * (8 * capacity + 4 * 256 + 2 * 4 * (8192 + 512) + 4 * p.topk + 64) + 8 * (p.s_kv + 4)


def sm90_memory(p: TopkProblem) -> int:
    """Bytes beyond inputs and indices: candidates, sample scores and histogram of each row, three index matrices, permuted keys and
    their bookkeeping; or the dense path, where that is larger."""
    rows = p.num_q * (8 * CAPACITY + 4 * HOT + 4 * 256 + 3 * 4 * TOPK + 64)
    keys = p.s_kv * (128 + 4 + 16) + 2 * p.s_kv // 8192 * 1537 + (1 << 20)
    return max(rows + keys, deep_gemm.memory(p, BUDGET["cuda"]))


@indexer_topk_kernel("litetopk_sglang", accumulate="fp8", memory=sm100_memory, requires=Requires(
    device="cuda", capability=((10, 0),), distribution=("sglang",), entry=SM100, heads=(32,), note=NOT_RUN))
def litetopk_sglang(problem: TopkProblem) -> TopkLaunch:
    """SM100. Exact only while a row's candidates fit its buffer, which the function does not tell: no status."""
    check_problem(problem)
    from sglang.kernels.ops.attention.dsa.litetopk import dsa_litetopk_indexer

    p = problem
    bounds = list(p.requests)

    def launch() -> TopkResult:
        out = torch.empty((p.num_q, p.topk), dtype=torch.int32, device=p.device)
        return TopkResult(dsa_litetopk_indexer(
            p.q_fp8, p.k_fp8, p.kv_scale, p.weights, p.ks, p.ke, p.topk, out, req_bounds=bounds))

    return launch


@indexer_topk_kernel("litetopk_sglang_sm90", accumulate="fp8", memory=sm90_memory, requires=Requires(
    device="cuda", capability=((9, 0),), distribution=("sglang",), entry=SM90, heads=(32,),
    topk_in=(TOPK,), keys=(HOT, 1 << 20), keys_multiple=4, requests_max=1, note=NOT_RUN,
    uncapturable="it reads its counts back, to go to the dense arm where they do not hold"))
def litetopk_sglang_sm90(problem: TopkProblem) -> TopkLaunch:
    """SM90. Calls that it does not take (a row with fewer than 12288 keys), or whose counts fail its own check, go to the dense arm
    whole, as in serving.

    It needs the columns that the chunk before chose most. A problem has no chunk before, so each launch hands it the first 12288
    columns: the hint depends on no launch before, and `observe` is part of the time.
    """
    check_problem(problem)
    from sglang.srt.layers.attention.dsa.sm90_litetopk import SM90LiteTopK

    adapter = switched_on(SM90LiteTopK)
    dense = deep_gemm.prepare(problem, BUDGET["cuda"])
    p = problem
    hint = torch.arange(HOT, dtype=torch.int32, device=p.device).view(-1, TOPK)

    def launch() -> TopkResult:
        adapter.observe("threearm", hint, HOT)
        out = adapter.try_run("threearm", p.q_fp8, p.k_fp8, p.kv_scale, p.weights, p.ks, p.ke, select)
        if out is not None:
            return TopkResult(out, status=ways(p, "scan"))
        result = dense()
        assert isinstance(result, TopkResult)
        return TopkResult(result.indices, result.values, ways(p, "dense"), result.logits)

    return launch


def ways(p: TopkProblem, way: str) -> torch.Tensor:
    """The status of rows that all went one way: int32 [num_q]."""
    return torch.full((p.num_q,), WAYS.index(way), dtype=torch.int32, device=p.device)


def switched_on(adapter: Any) -> Any:
    """An instance of sglang's adapter of our own. It reads its switch from the environment when it is made; choosing the arm is
    switching it on."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        return adapter()
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def select(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Ranks candidates as serving does: fp32 [rows, capacity], int32 [rows] -> slots int32 [rows, 2048]. Inherits fast_topk's faults."""
    from sgl_kernel import fast_topk_v2

    slots: torch.Tensor = fast_topk_v2(values, counts, TOPK, row_starts=torch.zeros_like(counts))
    return slots
