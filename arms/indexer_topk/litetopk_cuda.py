"""litetopk_cuda: the fused LiteTopk for Hopper. Everything in CUDA C++: arms/litetopk/scan.cu and select.cu."""
from __future__ import annotations

from arms.kernel import Requires
from arms.litetopk.certify import READS_BACK, certified
from arms.litetopk.cuda_library import library
from arms.litetopk.layout import layout_of, transient_bytes
from arms.litetopk.sample import plan_sample
from arms.litetopk.scan_cuda import CudaScanner
from arms.topk import TopkLaunch, TopkProblem, check_problem, indexer_topk_kernel

MOST = 4096  # topk


@indexer_topk_kernel("litetopk_cuda", accumulate="fp8", memory=transient_bytes, place_free=True,
                     requires=Requires(device="cuda", capability=((9, 0),), heads=(32, 64), program="nvcc", topk_max=MOST,
                                       uncapturable=READS_BACK))
def litetopk_cuda(p: TopkProblem) -> TopkLaunch:
    """SM90. Raises arms.litetopk.cuda_library.BuildError where nvcc is missing."""
    check_problem(p, MOST)
    library()
    layout, sample = layout_of(p), plan_sample(p)
    return lambda: certified(p, CudaScanner(p, layout), sample)
