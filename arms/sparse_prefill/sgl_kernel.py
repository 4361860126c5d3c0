"""sgl_kernel: flash_mla_sparse_fwd of sglang-kernel (called sgl-kernel before 0.4). Old ones take no topk_length: none arm alone."""
from __future__ import annotations

import torch

from arms.kernel import Convention, Launch, Outputs, Problem, Requires, sparse_prefill_kernel


@sparse_prefill_kernel("sgl_kernel", convention=Convention(log_base=2.0), requires=Requires(
    device="cuda", capability=((9, 0), (10, 0), (10, 3)), distribution=("sglang-kernel", "sgl-kernel"),
    entry="sgl_kernel.flash_mla:flash_mla_sparse_fwd", dtypes=("bf16",), heads=(64, 128), topk_multiple=128))
def sgl_kernel(problem: Problem) -> Launch:
    """bf16. max_logits and lse come in base 2, as its docstring says and as measured on 0.4.4 (docs/evidence/README.md)."""
    from sgl_kernel.flash_mla import flash_mla_sparse_fwd

    p = problem

    def launch(topk_length: torch.Tensor | None) -> Outputs:
        extra = {} if topk_length is None else {"topk_length": topk_length}
        if p.attn_sink is not None:
            extra["attn_sink"] = p.attn_sink
        outputs: Outputs = flash_mla_sparse_fwd(p.q, p.kv, p.indices, p.sm_scale, p.d_v, **extra)
        return outputs

    return launch
