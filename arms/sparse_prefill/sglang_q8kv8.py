"""sglang_q8kv8: sglang's FP8 sparse prefill for SM90, laid out as its DSA backend lays it out before the call.

The backend casts q and kv to e4m3, pads the heads to a multiple of 64 and the width to one of 128, and appends topk zero
rows to kv; all of that happens here once, untimed. The kernel is built by nvcc on its first use (about two minutes).
"""
from __future__ import annotations

import torch
from torch.nn.functional import pad

from arms.kernel import Launch, Limit, Outputs, Problem, Requires, SkipPromise, sparse_prefill_kernel

MODULE = "sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90"

# sglang documents the skip as bit-exact; measured, it is not (docs/evidence/q8kv8-topk-length.md). The share follows from
# the cause: a masked pair multiplies zeros, and the FP8 tensor core then truncates its accumulator to 13 fraction bits, a
# loss of 2^-14 on average where bf16 values are 2^-7 apart, so at most one element in 2^7 crosses a rounding border.
PROMISE = SkipPromise(max_ulp=1, columns=(256, 512), max_share=2.0**-7, none_nearer_zero=True)


@sparse_prefill_kernel("sglang_q8kv8", promise=PROMISE, requires=Requires(
    device="cuda", capability=((9, 0),), distribution=("sglang",), entry=f"{MODULE}:sparse_mla_q8kv8_prefill_fwd",
    dtypes=("fp8",), uncapturable="with topk_length its wrapper waits for the device, twice", limits=(
        Limit(("none", "backscan"), "tail", ("wild",), "an index at or past s_kv names one of the zero rows that the "
              "backend appends, or memory past kv: it is not masked", "sparse_prefill:dtype=fp8,s_q=24,rows=half,tail=wild"),
        Limit(("none",), "sink", ("normal", "mixed"), "attn_sink is accepted only together with topk_length",
              "sparse_prefill:dtype=fp8,s_q=8,sink=normal"))))
def sglang_q8kv8(problem: Problem) -> Launch:
    """e4m3, SM90, any head count (padded)."""
    from sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90 import sparse_mla_q8kv8_prefill_fwd

    p, h_q = problem, problem.q.shape[1]
    width = -p.indices.shape[2] % 128
    indices = pad(p.indices, (0, width), value=-1)
    q = pad(p.q.view(torch.uint8), (0, 0, 0, -h_q % 64)).view(torch.float8_e4m3fn)
    kv = pad(p.kv.view(torch.uint8), (0, 0, 0, 0, 0, indices.shape[2])).view(torch.float8_e4m3fn)
    sink = None if p.attn_sink is None else pad(p.attn_sink, (0, -h_q % 64))

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = sparse_mla_q8kv8_prefill_fwd(
            q, kv, indices, p.sm_scale, p.q_scale, p.kv_scale, p.d_v, sink, topk_length)
        return out[:, :h_q], max_logits[:, :h_q], lse[:, :h_q]

    return launch
