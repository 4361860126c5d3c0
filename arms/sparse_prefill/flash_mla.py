"""flash_mla: flash_mla_sparse_fwd of sgl-flash-mla; its legacy kernels on SM90, its current ones (d_qk=512 only) on SM100."""
from __future__ import annotations

from arms.kernel import Launch, Limit, Problem, Requires, sparse_prefill_kernel

LEGACY = ((9, 0),)
ENTRY = "flash_mla:flash_mla_sparse_fwd"


@sparse_prefill_kernel("flash_mla", requires=Requires(
    device="cuda", capability=LEGACY, distribution=("sgl-flash-mla",), entry=ENTRY, dtypes=("bf16",), heads=(64, 128),
    topk_multiple=128))
def flash_mla(problem: Problem) -> Launch:
    """bf16, SM90. The wheel's default is the SM100 side, so legacy is asked for by name."""
    from flash_mla import flash_mla_sparse_fwd

    p = problem
    return lambda topk_length: flash_mla_sparse_fwd(
        p.q, p.kv, p.indices, p.sm_scale, p.d_v, p.attn_sink, topk_length, use_legacy=True)


@sparse_prefill_kernel("flash_mla_sm100", requires=Requires(
    device="cuda", capability=((10, 0), (10, 3)), distribution=("sgl-flash-mla",), entry=ENTRY, dtypes=("bf16",),
    heads=(64, 128), d_qk=(512,), topk_multiple=128, note="nobody has run this arm yet", limits=(
        Limit(("metadata",), "tail", ("live",), "an index past the length in the last block is loaded, then masked: "
              "it may leak NaN (documented upstream)", "sparse_prefill:s_q=24,d_qk=512,rows=ragged,tail=live,values=poison"),)))
def flash_mla_sm100(problem: Problem) -> Launch:
    """bf16, SM100."""
    from flash_mla import flash_mla_sparse_fwd

    p = problem
    return lambda topk_length: flash_mla_sparse_fwd(
        p.q, p.kv, p.indices, p.sm_scale, p.d_v, p.attn_sink, topk_length, use_legacy=False)


