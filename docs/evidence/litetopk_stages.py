"""Stage times of litetopk_cuda beside the dense path, one CUDA-event median of five calls each, warm: the stage table of litetopk.md.

    python3 docs/evidence/litetopk_stages.py        on an SM90 GPU, with deep_gemm and sgl_kernel installed
"""
from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import deep_gemm
import sgl_kernel
import torch

from arms.litetopk.certify import certified
from arms.litetopk.layout import layout_of
from arms.litetopk.sample import plan_sample
from arms.litetopk.scan_cuda import CudaScanner
from arms.topk import TopkProblem

ROWS, HEADS, TOPK = 8192, 32, 2048


def problem(keys: int) -> TopkProblem:
    """The last rows of a prompt: normal q and k, weights of both signs, scales from 0.75 to 1.25."""
    draw = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda")

    q = normal(ROWS, HEADS, 128).to(torch.float8_e4m3fn)
    k = torch.cat([normal(min(1 << 17, keys - i), 128).to(torch.float8_e4m3fn).view(torch.uint8) for i in range(0, keys, 1 << 17)])
    scale = torch.rand(keys, generator=draw, device="cuda") * 0.5 + 0.75
    ke = torch.arange(keys - ROWS + 1, keys + 1, dtype=torch.int32, device="cuda")
    return TopkProblem(q, k.view(torch.float8_e4m3fn), scale, normal(ROWS, HEADS) * (HEADS * 128) ** -0.5, torch.zeros_like(ke), ke, TOPK,
                       ((0, ROWS, 0, keys),))


def ms(call: Callable[[], object]) -> float:
    """Median of five, after one."""
    call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def stages(keys: int) -> dict[str, float]:
    """Each stage alone, the whole launch, and the two kernels of the dense path."""
    p = problem(keys)
    sample = plan_sample(p)
    scanner = CudaScanner(p, layout_of(p))
    scores = scanner.sample_scores(sample)
    threshold = scanner.seed(scores, sample, 1.0)
    found = scanner.candidates(threshold)
    nothing = torch.full_like(threshold, math.nan)
    times = {"copies": ms(lambda: CudaScanner(p, layout_of(p))), "sample": ms(lambda: scanner.sample_scores(sample)),
             "seed": ms(lambda: scanner.seed(scores, sample, 1.0)), "scan": ms(lambda: scanner.candidates(threshold)),
             "scan, nothing passes": ms(lambda: scanner.candidates(nothing)),
             "select": ms(lambda: scanner.select(found[0], found[1], threshold)), "passes a row": float(found[1].float().sum(1).mean())}
    times["whole"] = ms(lambda: certified(p, CudaScanner(p, layout_of(p)), sample))

    def logits() -> torch.Tensor:
        made: torch.Tensor = deep_gemm.fp8_mqa_logits(p.q_fp8, (p.k_fp8, p.kv_scale), p.weights, p.ks, p.ke, clean_logits=False)
        return made

    times["dense logits"] = ms(logits)
    dense = logits()
    times["dense top-k"] = ms(lambda: sgl_kernel.fast_topk_transform_ragged_fused(dense, p.ke - p.ks, p.ks, TOPK, p.ks))
    return times


if __name__ == "__main__":
    for keys in (32768, 65536, 98304, 131072, 262144, 524288, 1048576):
        print(keys, "  ".join(f"{name} {value:.4g}" for name, value in stages(keys).items()), flush=True)
        torch.cuda.empty_cache()
