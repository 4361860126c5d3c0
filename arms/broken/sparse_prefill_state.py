"""Deliberately wrong sparse_prefill kernels, continued: memory, state, determinism, inputs (see sparse_prefill.py)."""
from __future__ import annotations

import itertools

import torch

from arms.broken.problems import FULL, HALF, MIXED
from arms.broken.register import Length, broken
from arms.broken.sparse_prefill import next_bf16
from arms.kernel import Outputs, Problem
from arms.sparse_prefill.torch_blocks import attention


@broken("one_element_unwritten", "written", FULL)
def one_element_unwritten(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    unwritten = torch.empty_like(out)
    out.view(-1)[-1] = unwritten.view(-1)[-1]
    return out, max_logits, lse


@broken("one_head_stale", "written", HALF)
def one_head_stale(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    stale = torch.empty_like(lse)
    lse[:, -1] = stale[:, -1]
    return out, max_logits, lse


_launches = itertools.count()


@broken("race", "run-to-run", HALF)
def race(p: Problem, length: Length) -> Outputs:
    """Every third launch differs by one ULP in one element."""
    out, max_logits, lse = attention(p, length)
    if next(_launches) % 3 == 2:
        out[-1, -1, -1] = next_bf16(out[-1, -1, -1:])[0]
    return out, max_logits, lse


@broken("writes_its_indices", "inputs-unchanged", HALF)
def writes_its_indices(p: Problem, length: Length) -> Outputs:
    """Compacts the pads of its caller's indices in place: -2 for -1, which means the same."""
    result = attention(p, length)
    p.indices[p.indices == -1] = -2
    return result


@broken("nan_of_unnamed_key", "nan-leak", HALF)
def nan_of_unnamed_key(p: Problem, length: Length) -> Outputs:
    """A masked entry's row is loaded and multiplied by zero."""
    out, max_logits, lse = attention(p, length)
    leak = p.kv[-1, 0, : p.d_v].float() * 0 + p.kv[0, 0, : p.d_v].float() * 0
    return (out.float() + leak).bfloat16(), max_logits, lse


_served = itertools.count()


@broken("cached_after_20_launches", "timed-output", HALF)
def cached_after_20_launches(p: Problem, length: Length) -> Outputs:
    """Right while it is checked; later launches return an old buffer."""
    out, max_logits, lse = attention(p, length)
    return (out if next(_served) % 60 < 40 else torch.zeros_like(out)), max_logits, lse


@broken("wrong_shape", "raises", FULL)
def wrong_shape(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    return out[:, :-1], max_logits, lse


@broken("writes_its_lengths", "inputs-unchanged", MIXED)
def writes_its_lengths(p: Problem, length: Length) -> Outputs:
    """Clamps its caller's topk_length in place, to 1 at least."""
    result = attention(p, length)
    if length is not None:
        length.clamp_(min=1)
    return result


_workspace: dict[tuple[int, ...], torch.Tensor] = {}


@broken("stale_workspace", "after-another", MIXED)
def stale_workspace(p: Problem, length: Length) -> Outputs:
    """Keeps one out per shape, zero at first, and leaves the rows without a valid key as the last problem left them."""
    out, max_logits, lse = attention(p, length)
    kept = _workspace.setdefault(tuple(out.shape), torch.zeros_like(out))
    written = max_logits[:, 0] > -float("inf")
    kept[written] = out[written]
    return kept.clone(), max_logits, lse


@broken("loads_key_0_for_a_pad", "nan-leak", MIXED)
def loads_key_0_for_a_pad(p: Problem, length: Length) -> Outputs:
    """A pad is clamped to key 0 and multiplied by zero: right unless key 0 holds NaN."""
    out, max_logits, lse = attention(p, length)
    padded = (p.indices[:, 0] < 0).any(1)[:, None, None]
    return torch.where(padded, out + p.kv[0, 0, : p.d_v].float() * 0, out.float()).bfloat16(), max_logits, lse
