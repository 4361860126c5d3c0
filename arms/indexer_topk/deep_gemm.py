"""deep_gemm: the dense path of serving. DeepGEMM's fp8_mqa_logits over chunks of rows, then the top-k that sglang calls for that width.

topk 2048: sglang-kernel's fast_topk_transform_ragged_fused; 512: sglang's fast_topk (built by nvcc on its first use); any other
width, and where those packages are absent: torch.topk. fast_topk is known to be inexact, and takes a NaN for a large number.
"""
from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import torch

from arms.dense import BUDGET, TopkWriter, choosing_bytes, chunk_rows, chunks
from arms.kernel import Limit, Requires
from arms.topk import TopkLaunch, TopkProblem, TopkResult, check_problem, indexer_topk_kernel

ROWS = 4  # a block of the SM90 kernel at 32 heads: chunks begin at whole blocks and logits are allocated in them
ALIGN = 256  # the row stride of the logits is this many floats more than s_kv, rounded up to a multiple of it
MASK_COLUMNS = 1 << 15
KEPT = 36 << 20  # bytes that the packages keep once they have run: measured, 32 MiB
ONE_CALL = 34 << 30  # bytes of logits: 8192 rows by a million keys

Select = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [rows, s_kv], lengths int32 [rows], row_starts int32 [rows]) -> int32 [rows, topk], absolute positions, then -1."""


def selector(topk: int) -> Select | None:
    """The packaged top-k of this width, or None for torch.topk. Imports it."""
    if topk == 2048 and importlib.util.find_spec("sgl_kernel") is not None:
        from sgl_kernel import fast_topk_transform_ragged_fused

        # Its indices are relative to the row's start and it adds the offset: with the start as offset they are absolute.
        return lambda logits, lengths, starts: fast_topk_transform_ragged_fused(
            score=logits, lengths=lengths, topk_indices_offset=starts, topk=topk, row_starts=starts)
    if topk == 512 and importlib.util.find_spec("sglang") is not None:
        from sglang.kernels.ops.attention.fast_topk import fast_topk

        def select(logits: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            relative = fast_topk(logits, lengths, topk, row_starts=starts)
            return torch.where(relative >= 0, relative + starts[:, None], relative)

        return select
    return None


def row_bytes(s_kv: int) -> int:
    """Bytes of one row of the logits as DeepGEMM allocates them."""
    return 4 * (-(-(s_kv + ALIGN) // ALIGN) * ALIGN)


def memory(p: TopkProblem, budget: int = ONE_CALL) -> int:
    """Bytes beyond inputs and indices: one chunk of logits (twice where torch.topk makes it contiguous), padded scales, windows, what
    the choice holds."""
    rows = chunk_rows(p.num_q, row_bytes(p.s_kv), budget, ROWS)
    choice = rows * row_bytes(p.s_kv) + choosing_bytes(p, rows) + 16 * rows * MASK_COLUMNS
    return (rows + ROWS) * row_bytes(p.s_kv) + choice + 8 * (p.s_kv + 4) + 32 * p.num_q + KEPT


INFINITE = Limit(("dense", "litetopk"), "values", ("inf",),
                 "DeepGEMM scales partial sums over heads: an infinite kv_scale gives NaN where they differ in sign or one is 0",
                 "indexer_topk:requests=17/300,topk=64,values=inf,weights=mixed,share=0.5")
REQUIRES = Requires(device="cuda", capability=((9, 0), (10, 0)), distribution=("sgl-deep-gemm", "deep-gemm"),
                    entry="deep_gemm:fp8_mqa_logits", heads=(32, 64), limits=(INFINITE,),
                    uncapturable="where torch.topk chooses, it reads back which rows choose a genuine -inf",
                    note="top-k of sglang-kernel at 2048, of sglang at 512, else torch.topk")


@indexer_topk_kernel("deep_gemm", arm="dense", accumulate="fp8", memory=memory, requires=REQUIRES)
def deep_gemm(problem: TopkProblem) -> TopkLaunch:
    """All rows in one call, up to 34 GiB of logits: the dense path at its fastest, which a LiteTopk is to be compared with."""
    return prepare(problem, ONE_CALL)


@indexer_topk_kernel("deep_gemm_chunked", arm="dense", accumulate="fp8", requires=REQUIRES,
                     memory=lambda p: memory(p, BUDGET["cuda"]))
def deep_gemm_chunked(problem: TopkProblem) -> TopkLaunch:
    """In chunks of serving's 512 MiB of logits: from some length on a chunk has too few rows to fill the GPU."""
    return prepare(problem, BUDGET["cuda"])


def prepare(problem: TopkProblem, budget: int) -> TopkLaunch:
    """The launch with at most `budget` bytes of logits at a time (and at least four rows). Raises what check_problem raises."""
    check_problem(problem)
    p = DeepGemm.set_up(problem)
    select = selector(problem.topk)
    if select is None or not (problem.s_kv and problem.num_q):
        return lambda: torch_topk(p, budget)
    return lambda: packaged_topk(p, select, budget)


@dataclasses.dataclass(frozen=True)
class DeepGemm:
    """A problem as fp8_mqa_logits must be given it, and the lengths of its windows, int32 [num_q]."""

    problem: TopkProblem
    lengths: torch.Tensor

    @classmethod
    def set_up(cls, p: TopkProblem) -> DeepGemm:
        """Windows of empty rows become [0, 0): elsewhere the kernel's unsigned block count may underflow."""
        empty = p.ke <= p.ks
        clean = dataclasses.replace(p, ks=p.ks.masked_fill(empty, 0), ke=p.ke.masked_fill(empty, 0))
        return cls(clean, clean.ke - clean.ks)

    def logits(self, row0: int, row1: int) -> torch.Tensor:
        """fp32 [row1 - row0, s_kv], a strided view. Outside a row's window it holds other rows' scores or unwritten memory. The scales
        are followed by zeros up to a multiple of four, which the kernel loads at once."""
        from deep_gemm import fp8_mqa_logits

        p, rows = self.problem, slice(row0, row1)
        scale = torch.nn.functional.pad(p.kv_scale, (0, -p.s_kv % 4))[: p.s_kv]
        logits: torch.Tensor = fp8_mqa_logits(
            p.q_fp8[rows], (p.k_fp8, scale), p.weights[rows], p.ks[rows], p.ke[rows], clean_logits=False)
        return logits

    def masked(self, row0: int, row1: int) -> torch.Tensor:
        """The logits with -inf outside the windows."""
        p = self.problem
        if not (p.s_kv and row1 > row0):
            return torch.full((row1 - row0, p.s_kv), -torch.inf, device=p.device)
        logits = self.logits(row0, row1)
        starts, ends = p.ks[row0:row1, None], p.ke[row0:row1, None]
        for key0 in range(0, p.s_kv, MASK_COLUMNS):
            part = logits[:, key0 : key0 + MASK_COLUMNS]
            position = torch.arange(key0, key0 + part.shape[1], dtype=torch.int32, device=p.device)
            part.masked_fill_((position < starts) | (position >= ends), -torch.inf)
        return logits


def packaged_topk(d: DeepGemm, select: Select, budget: int) -> TopkResult:
    """One launch. As in serving, the junk outside the windows stays: the top-k is told the windows."""
    p = d.problem
    indices = torch.empty((p.num_q, p.topk), dtype=torch.int32, device=p.device)
    for row0, row1 in chunks(p.num_q, row_bytes(p.s_kv), budget, ROWS):
        rows = slice(row0, row1)
        indices[rows] = select(d.logits(row0, row1), d.lengths[rows], p.ks[rows])
    return TopkResult(indices, logits=d.masked)


def torch_topk(d: DeepGemm, budget: int) -> TopkResult:
    """One launch with torch.topk over masked logits."""
    p = d.problem
    writer = TopkWriter(p, d.masked)
    for row0, row1 in chunks(p.num_q, row_bytes(p.s_kv), budget, ROWS):
        writer.choose(d.masked(row0, row1), row0)
    writer.finish()
    return TopkResult(writer.indices, writer.values, logits=d.masked)
