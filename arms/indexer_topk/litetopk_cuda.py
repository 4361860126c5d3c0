"""litetopk_cuda: the fused LiteTopk for Hopper. Everything in CUDA C++: arms/litetopk/scan.cu and select.cu."""
from __future__ import annotations

from arms.kernel import Requires
from arms.topk import TopkLaunch, TopkProblem, check_problem, indexer_topk_kernel

MOST = 4096  # topk


def memory(p: TopkProblem) -> int:
    """Bytes beyond inputs and indices: candidates, sample scores, the swizzled copies of q and k, and rows that go dense."""
    from arms.litetopk.layout import transient_bytes

    return transient_bytes(p)


@indexer_topk_kernel("litetopk_cuda", accumulate="fp8", memory=memory,
                     requires=Requires(device="cuda", capability=((9, 0),), heads=(32, 64), program="nvcc", topk_max=MOST))
def litetopk_cuda(p: TopkProblem) -> TopkLaunch:
    """SM90. Raises arms.litetopk.cuda_library.BuildError where nvcc is missing."""
    from arms.litetopk.certify import certified
    from arms.litetopk.cuda_library import library
    from arms.litetopk.layout import layout_of
    from arms.litetopk.sample import plan_sample
    from arms.litetopk.scan_cuda import CudaScanner

    check_problem(p, MOST)
    library()
    layout, sample = layout_of(p), plan_sample(p)
    return lambda: certified(p, CudaScanner(p, layout), sample)
