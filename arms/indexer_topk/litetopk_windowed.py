"""litetopk_windowed: DeepGEMM scores one window of keys at a time, and what passes the gate is kept."""
from __future__ import annotations

from arms.indexer_topk.deep_gemm import INFINITE
from arms.kernel import Requires
from arms.litetopk.certify import READS_BACK, certified
from arms.litetopk.cuda_library import library
from arms.litetopk.layout import layout_of, transient_bytes
from arms.litetopk.sample import plan_sample
from arms.litetopk.windowed import NARROWEST, WINDOW_BYTES, WindowedScanner
from arms.topk import TopkLaunch, TopkProblem, check_problem, indexer_topk_kernel

MOST = 4096  # topk


def memory(p: TopkProblem) -> int:
    """Bytes beyond inputs and indices: what every fused arm holds, and a window of logits while the next one is made."""
    return transient_bytes(p) + 2 * max(WINDOW_BYTES, 4 * NARROWEST * p.num_q)


@indexer_topk_kernel("litetopk_windowed", accumulate="fp8", memory=memory, place_free=True,
                     requires=Requires(device="cuda", capability=((9, 0),), heads=(32, 64), distribution=("sgl-deep-gemm", "deep-gemm"),
                                       entry="deep_gemm:fp8_mqa_logits", program="nvcc", topk_max=MOST, limits=(INFINITE,),
                                       uncapturable=READS_BACK))
def litetopk_windowed(p: TopkProblem) -> TopkLaunch:
    """SM90. Raises arms.litetopk.cuda_library.BuildError where nvcc is missing."""
    check_problem(p, MOST)
    library()
    layout, sample = layout_of(p), plan_sample(p)
    return lambda: certified(p, WindowedScanner(p, layout), sample)
