"""Deliberately wrong sparse_prefill kernels, continued: blocks, pairs and offsets, where a row ends, what a pad counts for
(see sparse_prefill.py)."""
from __future__ import annotations

import dataclasses
import math

import torch

from arms.broken.problems import FULL, HALF, HOLES, LIVE, LIVE_MIXED, ODD, SHORT_ROWS
from arms.broken.register import Length, broken
from arms.kernel import Outputs, Problem
from arms.sparse_prefill.torch_blocks import attention


def only(p: Problem, kept: torch.Tensor) -> Problem:
    """The problem with a pad in place of every entry that is not kept, bool [s_q, topk]."""
    return dataclasses.replace(p, indices=torch.where(kept[:, None], p.indices, -1))


def up_to_block(length: torch.Tensor, block: int) -> torch.Tensor:
    """The length rounded up to whole blocks."""
    return -(-length // block) * block


# --- where a row ends -------------------------------------------------------------------------------------------------


@broken("length_minus_a_block", "reference", HALF, boundary="topk_length - 64")
def length_minus_a_block(p: Problem, length: Length) -> Outputs:
    return attention(p, None if length is None else length - 64)


@broken("length_plus_a_block", "reference", LIVE, boundary="topk_length + 64")
def length_plus_a_block(p: Problem, length: Length) -> Outputs:
    return attention(p, None if length is None else length + 64)


@broken("last_block_not_masked", "reference", LIVE_MIXED, reports=("SP15",), boundary="topk_length rounded up to 64")
def last_block_not_masked(p: Problem, length: Length) -> Outputs:
    """Lanes at and past topk_length count, up to the end of their block."""
    return attention(p, None if length is None else up_to_block(length, 64))


@broken("length_0_taken_for_1", "sentinels", LIVE_MIXED, boundary="topk_length 0 taken as 1")
def length_0_taken_for_1(p: Problem, length: Length) -> Outputs:
    """What stands first in a row that has nothing is read."""
    return attention(p, None if length is None else length.clamp(min=1))


@broken("stops_at_the_first_hole", "reference", HOLES, boundary="a hole taken for the end")
def stops_at_the_first_hole(p: Problem, length: Length) -> Outputs:
    """A -1 is taken for the end of its row."""
    return attention(only(p, (p.indices[:, 0] >= 0).cumprod(1).bool()), length)


@broken("ends_at_a_block_of_pads", "reference", "sparse_prefill:s_q=6,s_kv=300,h_q=2,lead=128",
        boundary="a block of 64 without a valid entry taken for the end")
def ends_at_a_block_of_pads(p: Problem, length: Length) -> Outputs:
    """A row is left at its first block without a valid entry."""
    blocks = torch.nn.functional.pad(p.indices[:, 0] >= 0, (0, -p.indices.shape[2] % 64)).unflatten(1, (-1, 64))
    going_on = blocks.any(2).cumprod(1).bool()[..., None].expand(blocks.shape).flatten(1)
    return attention(only(p, going_on[:, : p.indices.shape[2]]), length)


# --- blocks and pairs -------------------------------------------------------------------------------------------------


@broken("last_pair_half_processed", "reference", FULL, boundary="the second block of the last pair skipped")
def last_pair_half_processed(p: Problem, length: Length) -> Outputs:
    """With a length, the second block of a row's last pair is left out."""
    return attention(p, None if length is None else torch.minimum(length, up_to_block(length, 128) - 64))


@broken("odd_block_dropped", "reference", ODD, reports=("SP17",), boundary="the last, partial pair of 128 skipped")
def odd_block_dropped(p: Problem, length: Length) -> Outputs:
    """Pairs of 64-key blocks only: a last block without a partner is never walked."""
    kept = torch.arange(p.indices.shape[2], device=p.indices.device) < p.indices.shape[2] // 128 * 128
    return attention(only(p, kept.expand(p.indices.shape[0], -1)), length)


@broken("first_block_twice", "reference", FULL, boundary="the second block of 64 reads the first one's entries")
def first_block_twice(p: Problem, length: Length) -> Outputs:
    """The second block's loads have not arrived: the first one's keys are still there."""
    indices = p.indices.clone()
    indices[..., 64:128] = p.indices[..., : max(0, min(64, p.indices.shape[2] - 64))]
    return attention(dataclasses.replace(p, indices=indices), length)


# --- offsets ----------------------------------------------------------------------------------------------------------


@broken("kv_offset_overflows", "reference", HALF, reports=("ML8",), boundary="offsets in kv (index * d_qk) cut to 20 bits")
def kv_offset_overflows(p: Problem, length: Length) -> Outputs:
    """Stands for index * d_qk in 32 bits, with 20: kv rows past the border are read from the front."""
    wrapped = p.indices.long() * p.kv.shape[2] % (1 << 20) // p.kv.shape[2]
    valid = (p.indices >= 0) & (p.indices < p.kv.shape[0])
    return attention(dataclasses.replace(p, indices=torch.where(valid, wrapped, p.indices).int()), length)


@broken("row_offset_overflows", "reference", HOLES, boundary="offsets in indices (row * topk) cut to 11 bits")
def row_offset_overflows(p: Problem, length: Length) -> Outputs:
    """Stands for row * topk in 32 bits, with 11: rows past the border read the first rows' indices."""
    rows = torch.arange(p.indices.shape[0], device=p.indices.device)
    return attention(dataclasses.replace(p, indices=p.indices[rows % max(1, (1 << 11) // p.indices.shape[2])]), length)


# --- what counts ------------------------------------------------------------------------------------------------------


@broken("zero_rows_scored", "reference", HALF, also=("none-vs-backscan",), reports=("SP11",),
        boundary="pads before the length scored as rows of zeros")
def zero_rows_scored(p: Problem, length: Length) -> Outputs:
    """A pad is a row of zeros with a score of 0: it is in the denominator of every row that has a key."""
    out, max_logits, lse = attention(p, length)
    position = torch.arange(p.indices.shape[2], device=out.device)
    walked = position < (torch.full_like(p.indices[:, 0, 0], len(position)) if length is None else length)[:, None]
    pads = (walked & (p.indices[:, 0] < 0)).sum(1, keepdim=True).float()
    polluted = torch.where(lse == math.inf, lse, torch.logaddexp(lse, pads.log()))
    return (out.float() * torch.exp(lse - polluted).nan_to_num(1.0)[..., None]).bfloat16(), max_logits, polluted


@broken("denominator_of_bf16_p", "reference", SHORT_ROWS)
def denominator_of_bf16_p(p: Problem, length: Length) -> Outputs:
    """The denominator is summed from P as the second product reads it, in bf16."""
    out, max_logits, lse = attention(p, length)
    index = p.indices[:, 0].long()
    valid = (index >= 0) & (index < p.kv.shape[0])
    k = p.kv[torch.where(valid, index, 0), 0].float()
    score = torch.einsum("rhd,rjd->rhj", p.q.float(), k) * (p.sm_scale * p.q_scale * p.kv_scale)
    weight = torch.exp(score - max_logits[..., None]).masked_fill(~valid[:, None], 0.0)
    share = (weight.sum(-1) / weight.bfloat16().float().sum(-1)).nan_to_num(1.0)
    return (out.float() * share[..., None]).bfloat16(), max_logits, lse - share.log()
