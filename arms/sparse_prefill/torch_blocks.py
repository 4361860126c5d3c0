"""torch_blocks: the portable kernel. It works as the SM90 kernels do, 64 keys a block, two blocks a pair, so it runs anywhere.

Online softmax with a finite floor for the running maximum, P rounded to bf16 or e4m3 before the second product, the
denominator from unrounded P, and pairs past ceil(topk_length / 64) really skipped, so early exit saves time on a CPU too.
"""
from __future__ import annotations

import dataclasses
import math

import torch

from arms.kernel import Launch, Outputs, Problem, Requires, sparse_prefill_kernel

BLOCK = 64
FLOOR = -1e30  # of the running maximum: a leading block without a valid key leaves no NaN behind
GROUP = {"cpu": 4, "cuda": 256}  # rows per matrix product; always this many, so that a row's bits do not depend on its batch


@dataclasses.dataclass
class State:
    """Running maximum [s_q, h_q], denominator [s_q, h_q] and unnormalised output [s_q, h_q, 512], all fp32; keys [s_kv + 1, d_qk]: kv's
    rows and one of zeros, which stands for whatever is masked."""

    highest: torch.Tensor
    total: torch.Tensor
    out: torch.Tensor
    keys: torch.Tensor


REQUIRES = Requires(uncapturable="it waits for the device to learn which rows have a pair left")


@sparse_prefill_kernel("torch_blocks", requires=REQUIRES)
def torch_blocks(problem: Problem) -> Launch:
    """Any dtype, head count, width and device."""
    return lambda topk_length: attention(problem, topk_length)


def attention(problem: Problem, topk_length: torch.Tensor | None) -> Outputs:
    """One launch. topk_length: int32 [s_q] or None. Returns out bf16, max_logits and lse fp32 (nats)."""
    s_q, h_q = problem.q.shape[:2]
    device = problem.q.device
    state = State(torch.full((s_q, h_q), FLOOR, device=device), torch.zeros(s_q, h_q, device=device),
                  torch.zeros(s_q, h_q, problem.d_v, device=device),
                  torch.cat([problem.kv[:, 0], torch.zeros_like(problem.kv[:1, 0])]))
    topk = problem.indices.shape[2]
    pair = 2 * BLOCK
    pairs = torch.full((s_q,), -(-topk // pair), device=device) if topk_length is None else -(-topk_length // pair)
    for start in range(0, topk, pair):
        active = (pairs > start // pair).nonzero()[:, 0]
        for rows in active.split(GROUP[device.type]) if len(active) else ():
            for first in range(start, min(start + pair, topk), BLOCK):
                add_block(problem, state, rows, first, topk_length)
    return finish(problem, state)


def add_block(problem: Problem, state: State, rows: torch.Tensor, first: int, topk_length: torch.Tensor | None) -> None:
    """Fold the 64 entries from position `first` of some rows into the state."""
    padded = torch.nn.functional.pad(rows, (0, GROUP[rows.device.type] - len(rows)), value=int(rows[0]))
    index = problem.indices[padded, 0, first : first + BLOCK].long()
    # A last block that is narrower is filled up: products of other shapes have other bits, and a wider topk must not show.
    index = torch.nn.functional.pad(index, (0, BLOCK - index.shape[1]), value=-1)  # [rows, 64]
    counts = (index >= 0) & (index < problem.kv.shape[0])
    if topk_length is not None:
        position = torch.arange(first, first + index.shape[1], device=index.device)
        counts &= position < topk_length[padded][:, None]
    # A masked entry is not loaded, so nothing that it names can leak. (Filling in zeros afterwards takes as long as a product.)
    k = state.keys[torch.where(counts, index, len(problem.kv))].float()
    score = torch.bmm(problem.q[padded].float(), k.mT) * (problem.sm_scale * problem.q_scale * problem.kv_scale)
    score = score.masked_fill_(~counts[:, None], -math.inf)
    highest = torch.maximum(state.highest[padded], score.amax(-1))
    rescale = torch.exp(state.highest[padded] - highest)
    p = torch.exp(score - highest[..., None])
    rounded = p.to(torch.float8_e4m3fn if problem.fp8 else torch.bfloat16).float()
    product = torch.bmm(rounded, k[..., : problem.d_v])
    n = len(rows)
    state.highest[rows] = highest[:n]
    state.total[rows] = (state.total[padded] * rescale + p.sum(-1))[:n]
    state.out[rows] = (state.out[padded] * rescale[..., None] + product)[:n]


def finish(problem: Problem, state: State) -> Outputs:
    """Normalise, apply kv_scale and the sink, and write the sentinels of rows without a valid key."""
    empty = state.total == 0
    lse = state.highest + state.total.log()
    factor = problem.kv_scale / state.total
    if problem.attn_sink is not None:
        factor = factor * torch.sigmoid(lse - problem.attn_sink)
    out = torch.empty(state.out.shape, dtype=torch.bfloat16, device=state.out.device)
    out.copy_((state.out * factor[..., None]).masked_fill_(empty[..., None], 0.0))
    return out, state.highest.masked_fill(empty, -math.inf), lse.masked_fill(empty, math.inf)
