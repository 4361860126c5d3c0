"""Deliberately wrong sparse_prefill kernels, continued: symptoms of public reports that no other one shows (docs/public-bugs.md).

A report tells a symptom and not the code behind it, so these show the symptom, at a size that a CPU can run: a border at 4096 rows may
stand at 128 here. Where that is so the docstring says it.
"""
from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from arms.broken.fault import declare
from arms.broken.problems import FULL, HALF, HOLES, LIVE_MIXED, MIXED, NARROW, ODD
from arms.broken.register import Length, broken, broken_source
from arms.kernel import Launch, Outputs, Problem, sparse_prefill_kernel
from arms.lengths import Source
from arms.sparse_prefill.torch_blocks import attention
from cases.fault import Fault

MASKED_FRONT = "sparse_prefill:s_q=6,s_kv=300,h_q=2,lead=128"

# --- now and then -----------------------------------------------------------------------------------------------------

_launches = itertools.count()


def now_and_then() -> bool:
    """True in every third launch of this module's kernels: of four in a row, at least one is right and one is wrong."""
    return next(_launches) % 3 == 2


@broken("nan_in_a_band_now_and_then", "run-to-run", HALF, reports=("SP6", "SP22"), boundary="columns 0..63 (64 of 512)")
def nan_in_a_band_now_and_then(p: Problem, length: Length) -> Outputs:
    """A validity flag is overwritten while it is still read: the first columns of one row are NaN."""
    out, max_logits, lse = attention(p, length)
    if now_and_then():
        out[-1, :, :64] = math.nan
    return out, max_logits, lse


@broken("half_of_the_heads_blown_up_now_and_then", "run-to-run", HALF, reports=("SP8", "SP10"), boundary="heads 1 (1 of 2)")
def half_of_the_heads_blown_up_now_and_then(p: Problem, length: Length) -> Outputs:
    """A running maximum is overwritten early: one row's second half of the heads is rescaled by it."""
    out, max_logits, lse = attention(p, length)
    if now_and_then():
        out[-1, p.q.shape[1] // 2 :] *= 1000
    return out, max_logits, lse


@broken("stale_values_now_and_then", "run-to-run", HALF, reports=("SP9",), boundary="the last row")
def stale_values_now_and_then(p: Problem, length: Length) -> Outputs:
    """V has not arrived when it is multiplied: the last row is made of the one before's."""
    out, max_logits, lse = attention(p, length)
    if now_and_then():
        out[-1] = out[-2:][0]
    return out, max_logits, lse


# --- shapes that nobody tried -----------------------------------------------------------------------------------------


@broken("fewer_than_64_heads_start_nothing", "written", FULL, also=("reference",), reports=("SP12",))
def fewer_than_64_heads_start_nothing(p: Problem, length: Length) -> Outputs:
    """The grid is heads // 64 blocks. Fresh memory is taken for zeros here, so that what is found does not depend on luck."""
    outputs = attention(p, length)
    if p.q.shape[1] >= 64:
        return outputs
    out, max_logits, lse = (torch.empty_like(x) for x in outputs)
    return tuple(torch.where(x.isnan(), x, 0.0) for x in (out, max_logits, lse))  # type: ignore[return-value]


@broken("width_not_instantiated", "raises", ODD, reports=("SP17",))
def width_not_instantiated(p: Problem, length: Length) -> Outputs:
    if p.indices.shape[2] & (p.indices.shape[2] - 1):
        raise RuntimeError(f"no kernel for topk {p.indices.shape[2]}")
    return attention(p, length)


@broken("width_above_the_keys_refused", "raises", "sparse_prefill:s_q=6,s_kv=200,h_q=2", reports=("SP19",))
def width_above_the_keys_refused(p: Problem, length: Length) -> Outputs:
    if p.indices.shape[2] > p.kv.shape[0]:
        raise RuntimeError("topk must not exceed the number of keys")
    return attention(p, length)


@broken("rope_part_where_there_is_none", "reference", "sparse_prefill:s_q=6,s_kv=300,h_q=2,d_qk=512", reports=("SP28",))
def rope_part_where_there_is_none(p: Problem, length: Length) -> Outputs:
    """The last 64 columns are added once more as the tail, also where d_qk is 512 and has none."""
    q = p.q.clone()
    q[..., 448:] *= 2 if p.q.shape[2] == 512 else 1
    return attention(dataclasses.replace(p, q=q), length)


@broken("nan_at_16_heads_and_16_pages", "reference", "sparse_prefill:s_q=3,s_kv=300,h_q=16,index_topk=250", reports=("SP31",))
def nan_at_16_heads_and_16_pages(p: Problem, length: Length) -> Outputs:
    """16 heads, 16 pages of 16 keys, the last one not full: 241 to 255 keys."""
    out, max_logits, lse = attention(p, length)
    count = (p.indices[:, 0] >= 0).sum(1)
    if p.q.shape[1] == 16:
        out[(count > 240) & (count < 256)] = math.nan
    return out, max_logits, lse


@broken("nan_in_larger_batches", "reference", "sparse_prefill:s_q=130,s_kv=100,h_q=1,topk=64", reports=("SP32",),
        boundary="rows from 128 on")
def nan_in_larger_batches(p: Problem, length: Length) -> Outputs:
    """The first 128 rows are right, and no unit test had more."""
    out, max_logits, lse = attention(p, length)
    out[128:] = math.nan
    return out, max_logits, lse


@broken("length_unheeded_past_row_64", "reference", "sparse_prefill:s_q=70,s_kv=300,h_q=1,rows=half,tail=live,topk=128", reports=("SP15",),
        boundary="rows from 64 on")
def length_unheeded_past_row_64(p: Problem, length: Length) -> Outputs:
    row = torch.arange(p.q.shape[0], device=p.q.device)
    return attention(p, None if length is None else torch.where(row < 64, length, p.indices.shape[2]))


# --- requests and rows ------------------------------------------------------------------------------------------------


@broken("second_request_reads_the_first", "reference",
        "sparse_prefill:s_q=10,s_kv=300,h_q=2,rows=causal,requests=6/150+4/150", reports=("SP4",),
        boundary="indices relative to their request")
def second_request_reads_the_first(p: Problem, length: Length) -> Outputs:
    """Stands for a caller that flattens two requests and adds no offset: keys of the second half are those of the first."""
    inside = (p.indices >= 0) & (p.indices < p.kv.shape[0])
    return attention(dataclasses.replace(p, indices=torch.where(inside, p.indices % (p.kv.shape[0] // 2), p.indices)), length)


@broken("rows_at_a_stride_of_whole_blocks", "reference", NARROW, reports=("SP20",), boundary="indices at a stride of whole blocks of 64")
def rows_at_a_stride_of_whole_blocks(p: Problem, length: Length) -> Outputs:
    """A row of indices is looked for at a stride that another layout has: its width rounded up to 64."""
    s_q, _, topk = p.indices.shape
    place = torch.arange(s_q)[:, None] * (topk + -topk % 64) + torch.arange(topk)
    wrong = p.indices.reshape(-1)[place.to(p.indices.device) % p.indices.numel()]
    return attention(dataclasses.replace(p, indices=wrong[:, None]), length)


@broken("chunk_sees_what_its_first_row_sees", "reference", "sparse_prefill:s_q=7,s_kv=128,h_q=2,rows=causal,requests=7/100,topk=128",
        reports=("SP21",))
def chunk_sees_what_its_first_row_sees(p: Problem, length: Length) -> Outputs:
    """Keys newer than the first row's are lost to all others, as they are when a chunk of one token is what was tried."""
    seen = p.indices <= p.indices[0].amax()
    return attention(dataclasses.replace(p, indices=torch.where(seen, p.indices, -1)), length)


# --- what is masked ---------------------------------------------------------------------------------------------------


@broken("nan_of_a_masked_first_block", "reference", MASKED_FRONT, reports=("SP16", "PC5", "PC6"))
def nan_of_a_masked_first_block(p: Problem, length: Length) -> Outputs:
    """A running maximum of -inf taken off itself: the whole row is NaN if its first 64 entries are pads and it has a key at all."""
    out, max_logits, lse = attention(p, length)
    out[(p.indices[:, 0, :64] < 0).all(1) & (max_logits[:, 0] > -math.inf)] = math.nan
    return out, max_logits, lse


@broken("pad_passes_the_upper_bound", "reference", HOLES, also=("none-vs-backscan",), reports=("SP25", "PC2", "PC3"),
        boundary="-1 read as the last key")
def pad_passes_the_upper_bound(p: Problem, length: Length) -> Outputs:
    """Only `index < s_kv` is tested. Stands for kv[-1], which is some other tensor's memory, with the last key."""
    last = p.kv.shape[0] - 1
    return attention(dataclasses.replace(p, indices=torch.where(p.indices == -1, last, p.indices)), length)


@broken("empty_row_is_nan", "sentinels", MIXED, reports=("SP30", "PC1"), boundary="rows without a valid key")
def empty_row_is_nan(p: Problem, length: Length) -> Outputs:
    """0 / 0 where a row has no key."""
    out, max_logits, lse = attention(p, length)
    return out.masked_fill((max_logits == -math.inf)[..., None], math.nan), max_logits, lse


@broken("loads_past_the_length", "reference", "sparse_prefill:s_q=14,s_kv=3000,h_q=2,rows=mixed,values=poison,tail=live", reports=("SP40",),
        boundary="rows whose length is no multiple of 64 (partial block)")
def loads_past_the_length(p: Problem, length: Length) -> Outputs:
    """In a row's last block of 64, keys that live entries past topk_length name are loaded, and multiplied by zero."""
    out, max_logits, lse = attention(p, length)
    if length is None:
        return out, max_logits, lse
    position = torch.arange(p.indices.shape[2], device=out.device)
    loaded = (position >= length[:, None]) & (position < (-(-length // 64) * 64)[:, None])
    rows = p.kv[p.indices[:, 0].clamp(0, p.kv.shape[0] - 1).long(), 0, : p.d_v].float() * 0
    return (out.float() + torch.where(loaded[..., None], rows, 0.0).sum(1, keepdim=True)).bfloat16(), max_logits, lse


# --- numbers ----------------------------------------------------------------------------------------------------------


@broken("halves_merged_in_base_2", "reference", FULL, reports=("SP18",))
def halves_merged_in_base_2(p: Problem, length: Length) -> Outputs:
    """Two halves of a row merged by an lse in base e that is taken for one in base 2."""
    whole, half = attention(p, length), p.indices.shape[2] // 2
    parts = [dataclasses.replace(p, indices=p.indices.clone()) for _ in range(2)]
    parts[0].indices[..., half:] = parts[1].indices[..., :half] = -1
    (left, _, lse0), (right, _, lse1) = (attention(part, length) for part in parts)
    share = torch.sigmoid((lse0 - lse1).nan_to_num(0.0) * math.log(2))[..., None]
    return (left.float() * share + right.float() * (1 - share)).bfloat16(), whole[1], whole[2]


class EightBitP(Problem):
    """The same problem to a kernel that rounds P to e4m3 whatever q and kv are."""

    fp8 = True


@broken("p_in_fp8", "reference", "sparse_prefill:s_q=2,s_kv=600,h_q=2,topk=512,values=peaked", reports=("SP5", "SP33", "SP36"))
def p_in_fp8(p: Problem, length: Length) -> Outputs:
    """bf16 q and kv with P in e4m3, as after a bump that trades accuracy for speed: P below 2^-10 vanishes, the denominator keeps it."""
    return attention(EightBitP(**vars(p)), length)


@broken("long_rows_lose_bits", "reference", "sparse_prefill:dtype=fp8,s_q=2,s_kv=500,h_q=2,topk=320,values=integer", reports=("SP27",))
def long_rows_lose_bits(p: Problem, length: Length) -> Outputs:
    """Stands for an accumulator of 13 bits that long rows overrun: past 256 keys, out has 6 bits of its 8, cut towards zero."""
    out, max_logits, lse = attention(p, length)
    long = (p.indices[:, 0] >= 0).sum(1) > 256
    out[long] = (out[long].view(torch.int16) & ~3).view(torch.bfloat16)
    return out, max_logits, lse


# --- topk_length ------------------------------------------------------------------------------------------------------

broken_source("metadata_one_past_the_width", "lengths", FULL, "metadata", lambda inputs: inputs.seqlens + 1, reports=("SP23", "SP39"),
              boundary="the length is one more than it should be")
broken_source("metadata_of_fewer_rows", "lengths", "sparse_prefill:s_q=8,s_kv=300,h_q=2,metadata_rows=6", "metadata",
              lambda inputs: torch.nn.functional.pad(inputs.seqlens, (0, inputs.case.s_q - len(inputs.seqlens))), reports=("TL9",))


declare(Fault("broken_negative_length_is_unsigned", "sparse_prefill", "reference", LIVE_MIXED, boundary="rows without a valid key",
              reports=("TL2",)))


@sparse_prefill_kernel("broken_negative_length_is_unsigned", sources={
    "metadata": Source(lambda inputs: lambda: torch.where(inputs.seqlens == 0, -1, inputs.seqlens.clamp(max=inputs.case.limit)))})
def negative_length_is_unsigned(problem: Problem) -> Launch:
    """A padding row's length comes as -1, which is more than any width when it is read without its sign."""
    return lambda length: attention(problem, None if length is None else torch.where(length < 0, problem.indices.shape[2], length))
