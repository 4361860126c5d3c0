"""Deliberately wrong sparse_prefill kernels, each a few lines on top of torch_blocks and named for its fault.

They exist to show that the checks can fail: each names the check that must catch it, and tests/test_broken_arms.py runs them.
They are registered with --broken, or when one is named with --arm, and never otherwise.
"""
from __future__ import annotations

import dataclasses
import math

import torch

from arms.broken.problems import FP8, FULL, HALF, HOLES, LIVE, MIXED, NARROW, SINK, SINKS, STEEP, WILD
from arms.broken.register import Length, broken, broken_source
from arms.kernel import Outputs, Problem, SkipPromise
from arms.lengths import backscan_torch
from arms.sparse_prefill.torch_blocks import attention


def next_bf16(x: torch.Tensor, steps: int = 1) -> torch.Tensor:
    """The bf16 value `steps` ULP further from zero."""
    return (x.view(torch.int16) + steps).view(torch.bfloat16)


# --- what is computed -------------------------------------------------------------------------------------------------


@broken("zero_output", "reference", FULL, boundary="out is zero")
def zero_output(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return torch.zeros_like(out), max_logits, lse


@broken("negated", "reference", FULL, boundary="out negated")
def negated(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return -out, max_logits, lse


@broken("drops_last_key", "reference", FULL, boundary="the last valid entry skipped")
def drops_last_key(p: Problem, length: Length) -> Outputs:
    last = backscan_torch(p.indices[:, 0]).long() - 1
    if length is not None:
        last = torch.minimum(last, length.long().clamp(min=1) - 1)
    indices = p.indices.clone()
    indices[:, 0].scatter_(1, last[:, None], -1)
    return attention(dataclasses.replace(p, indices=indices), length)


@broken("doubles_first_key", "reference", FULL, boundary="the first entry read in place of the second")
def doubles_first_key(p: Problem, length: Length) -> Outputs:
    indices = p.indices.clone()
    indices[:, 0, 1] = torch.where(indices[:, 0, 1] >= 0, indices[:, 0, 0], indices[:, 0, 1])
    return attention(dataclasses.replace(p, indices=indices), length)


@broken("reads_pad_as_key_0", "reference", HALF, reports=("TL8",), boundary="-1 read as key 0")
def reads_pad_as_key_0(p: Problem, length: Length) -> Outputs:
    return attention(dataclasses.replace(p, indices=torch.where(p.indices == -1, 0, p.indices)), length)


@broken("reads_past_kv", "reference", WILD, reports=("SP2", "SP34"), boundary="an index >= s_kv clamped to the last key")
def reads_past_kv(p: Problem, length: Length) -> Outputs:
    """An index at or past s_kv is taken for the last row, as a clamp would."""
    return attention(dataclasses.replace(p, indices=p.indices.clamp(max=p.kv.shape[0] - 1)), length)


@broken("rows_rolled", "reference", HALF, boundary="outputs of the row before")
def rows_rolled(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return out.roll(1, 0), max_logits.roll(1, 0), lse.roll(1, 0)


@broken("right_half_scaled", "reference", HALF, boundary="columns from 256 on")
def right_half_scaled(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    out[..., 256:] *= 1.02
    return out, max_logits, lse


@broken("denominator_of_rounded_p", "reference", FULL)
def denominator_of_rounded_p(p: Problem, length: Length) -> Outputs:
    """Stands for a denominator summed from rounded P: lse is off by 2^-12."""
    out, max_logits, lse = attention(p, length)
    return out, max_logits, lse + 2.0**-8 / 16


@broken("one_nan", "reference", FULL, boundary="columns 511 (1 of 512)")
def one_nan(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    out[-1, -1, -1] = math.nan
    return out, max_logits, lse


# --- statistics, sentinels, sink --------------------------------------------------------------------------------------


@broken("lse_base_2", "reference", FULL, reports=("SP3",), boundary="lse in base 2")
def lse_base_2(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return out, max_logits, lse / math.log(2)


@broken("empty_lse_minus_inf", "sentinels", MIXED, reports=("PC1",), boundary="rows without a valid key")
def empty_lse_minus_inf(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return out, max_logits, torch.where(lse == math.inf, -math.inf, lse)


@broken("empty_row_stale", "sentinels", MIXED, boundary="rows without a valid key")
def empty_row_stale(p: Problem, length: Length) -> Outputs:
    """With topk_length 0 the row's out is never written."""
    out, max_logits, lse = attention(p, length)
    if length is not None:
        out[length == 0] = 1.0
    return out, max_logits, lse


@broken("max_logits_unscaled", "reference", FULL, boundary="max_logits not scaled by sm_scale")
def max_logits_unscaled(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return out, max_logits / p.sm_scale, lse


@broken("sink_dropped", "reference", SINK, boundary="the sink left out")
def sink_dropped(p: Problem, length: Length) -> Outputs:
    return attention(dataclasses.replace(p, attn_sink=None), length)


@broken("sink_in_lse", "reference", SINK, boundary="the sink in lse")
def sink_in_lse(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    if p.attn_sink is not None:
        lse = torch.where(lse == math.inf, lse, torch.logaddexp(lse, p.attn_sink))
    return out, max_logits, lse


# --- topk_length ------------------------------------------------------------------------------------------------------


@broken("ignores_length", "reference", LIVE, reports=("SP13", "TL7", "TL10"), boundary="topk_length ignored")
def ignores_length(p: Problem, length: Length) -> Outputs:
    return attention(p, None)


@broken("length_minus_one", "reference", HALF, boundary="topk_length - 1")
def length_minus_one(p: Problem, length: Length) -> Outputs:
    return attention(p, None if length is None else length - 1)


@broken("length_plus_one", "reference", LIVE, boundary="topk_length + 1")
def length_plus_one(p: Problem, length: Length) -> Outputs:
    return attention(p, None if length is None else length + 1)


@broken("length_of_next_row", "none-vs-backscan", HOLES, boundary="the topk_length of the row before")
def length_of_next_row(p: Problem, length: Length) -> Outputs:
    return attention(p, None if length is None else length.roll(1))


@broken("skips_last_pair", "none-vs-metadata", HALF, boundary="the last pair of 128 skipped, in rows of more than one")
def skips_last_pair(p: Problem, length: Length) -> Outputs:
    """A row of more than one pair loses its last one."""
    return attention(p, None if length is None else torch.where(length > 128, (length - 1) // 128 * 128, length))


@broken("length_0_differs", "backscan-vs-metadata", MIXED)
def length_0_differs(p: Problem, length: Length) -> Outputs:
    """One ULP, in launches in which some row has length 0: metadata, not backscan."""
    out, max_logits, lse = attention(p, length)
    return (out if length is None or int(length.min()) > 0 else next_bf16(out)), max_logits, lse


@broken("full_width_differs", "full-width", HALF)
def full_width_differs(p: Problem, length: Length) -> Outputs:
    """One ULP, when every length is topk."""
    out, max_logits, lse = attention(p, length)
    full = length is not None and int(length.min()) == p.indices.shape[2]
    return (next_bf16(out) if full else out), max_logits, lse


@broken("skip_moves_left_half", "none-vs-backscan", HALF, promise=SkipPromise(max_ulp=1, columns=(256, 512), max_share=1.0),
        reports=("SP35",), boundary="columns 0..255")
def skip_moves_left_half(p: Problem, length: Length) -> Outputs:
    """Promises 1 ULP in the right half where a pair is skipped, and moves the left half."""
    out, max_logits, lse = attention(p, length)
    if length is not None:
        out[length < p.indices.shape[2] - 128, :, :256] = next_bf16(out[length < p.indices.shape[2] - 128, :, :256])
    return out, max_logits, lse


@broken("skip_moves_two_ulp", "none-vs-metadata", HALF, promise=SkipPromise(max_ulp=1, columns=(256, 512), max_share=1.0),
        reports=("SP35",), boundary="columns 256..511")
def skip_moves_two_ulp(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    if length is not None:
        rows = length < p.indices.shape[2] - 128
        out[rows, :, 256:] = next_bf16(out[rows, :, 256:], 2)
    return out, max_logits, lse


broken_source("backscan_off_by_one", "lengths", FULL, "backscan", lambda inputs: (backscan_torch(inputs.indices[:, 0]) - 1).clamp(min=1),
              boundary="the length is one less than it should be")
broken_source("backscan_stops_at_hole", "lengths", HOLES, "backscan",
              lambda inputs: ((inputs.indices[:, 0] >= 0).cumprod(1).sum(1)).clamp(min=1).int(), reports=("TL1",),
              boundary="the length is the entries before the first hole")
broken_source("backscan_counts_valid", "lengths", HOLES, "backscan", lambda inputs: (inputs.indices[:, 0] >= 0).sum(1).clamp(min=1).int(),
              reports=("TL1", "TL6"), boundary="the length is the count of valid entries")
broken_source("metadata_cuts_keys", "lengths", FULL, "metadata", lambda inputs: inputs.seqlens.clamp(0, inputs.case.limit // 2),
              boundary="the length is half of topk at most")
broken_source("metadata_of_next_row", "backscan-vs-metadata", HOLES, "metadata",
              lambda inputs: inputs.seqlens.clamp(0, inputs.case.limit).roll(1), boundary="the length is that of the row before")
broken_source("metadata_clamped_to_1", "lengths", LIVE, "metadata", lambda inputs: inputs.seqlens.clamp(1, 1),
              boundary="the length is 1 at most")


@broken("scales_rounded_to_powers_of_two", "reference", FP8, boundary="q_scale and kv_scale rounded up to powers of two")
def scales_rounded_to_powers_of_two(p: Problem, length: Length) -> Outputs:
    q_scale, kv_scale = (torch.exp2(scale.log2().ceil()) for scale in (p.q_scale, p.kv_scale))
    return attention(dataclasses.replace(p, q_scale=q_scale, kv_scale=kv_scale), length)


@broken("sink_of_64_heads", "reference", SINKS, boundary="heads from 64 on")
def sink_of_64_heads(p: Problem, length: Length) -> Outputs:
    """The second 64 heads take the first ones' sinks."""
    if p.attn_sink is not None:
        p = dataclasses.replace(p, attn_sink=p.attn_sink[torch.arange(len(p.attn_sink)) % 64])
    return attention(p, length)


@broken("no_running_maximum", "reference", STEEP)
def no_running_maximum(p: Problem, length: Length) -> Outputs:
    """Stands for P = exp(s) without a maximum taken off, which overflows fp32 from 88 nats on."""
    out, max_logits, lse = attention(p, length)
    overflows = (max_logits > 88)[..., None]
    return out.masked_fill(overflows, math.nan), max_logits, lse


@broken("reads_past_the_row", "reference", NARROW, reports=("SP39",), boundary="the width rounded up to 64")
def reads_past_the_row(p: Problem, length: Length) -> Outputs:
    """The width is rounded up to a block, and the next row's first indices are taken for this one's."""
    more = torch.cat([p.indices[1:, :, : -p.indices.shape[2] % 64], p.indices[:1, :, : -p.indices.shape[2] % 64]])
    return attention(dataclasses.replace(p, indices=torch.cat([p.indices, more], 2)), length)
