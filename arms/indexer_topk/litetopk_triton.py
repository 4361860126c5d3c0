"""litetopk_triton: the fused LiteTopk in Triton, for Hopper and, interpreted (TRITON_INTERPRET=1), for small problems on the CPU."""
from __future__ import annotations

import os

from arms.kernel import Requires
from arms.litetopk.certify import READS_BACK, certified
from arms.litetopk.layout import transient_bytes
from arms.litetopk.sample import plan_sample
from arms.topk import TopkLaunch, TopkProblem, check_problem, indexer_topk_kernel

MOST = 2048  # topk: a program of the select kernel holds 8 times as many candidates
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@indexer_topk_kernel("litetopk_triton", accumulate="fp32" if INTERPRETED else "fp8", memory=transient_bytes, place_free=True,
                     requires=Requires(device="any" if INTERPRETED else "cuda", capability=((9, 0),), heads=(32, 64),
                                       distribution=("triton",), entry="triton:jit", topk_max=MOST, uncapturable=READS_BACK))
def litetopk_triton(p: TopkProblem) -> TopkLaunch:
    """SM90; the CPU where TRITON_INTERPRET=1."""
    from arms.litetopk.scan_triton import TritonScanner  # here: it imports Triton

    check_problem(p, MOST)
    sample = plan_sample(p)
    return lambda: certified(p, TritonScanner(p), sample)
