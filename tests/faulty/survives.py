"""A fault in name only, which no check can catch; and a kernel that takes itself for right and is not."""
from __future__ import annotations

from arms import Outputs, Problem, sparse_prefill_kernel
from arms.broken.register import Length, broken
from arms.kernel import Launch
from arms.sparse_prefill.torch_blocks import attention

TINY = "sparse_prefill:s_q=2,s_kv=32,h_q=2,d_qk=512,topk=16"


@broken("nothing_at_all", "reference", TINY)
def nothing_at_all(p: Problem, length: Length) -> Outputs:
    return attention(p, length)


@broken("declared_for_another_check", "sentinels", TINY)
def declared_for_another_check(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return -out, max_logits, lse


@sparse_prefill_kernel("thinks_it_is_right")
def thinks_it_is_right(p: Problem) -> Launch:
    def launch(length: Length) -> Outputs:
        out, max_logits, lse = attention(p, length)
        return out, max_logits, lse + 1

    return launch
