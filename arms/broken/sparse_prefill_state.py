"""Deliberately wrong sparse_prefill kernels, continued: memory, state, determinism, inputs (see sparse_prefill.py)."""
from __future__ import annotations

import itertools

import torch

from arms.broken.fault import declare
from arms.broken.problems import FULL, HALF, MIXED
from arms.broken.register import Length, broken
from arms.broken.sparse_prefill import next_bf16
from arms.kernel import Launch, Outputs, Problem, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import REQUIRES, attention
from cases.fault import Fault


@broken("one_element_unwritten", "written", FULL, boundary="columns 511 (1 of 512)")
def one_element_unwritten(p: Problem, length: Length) -> Outputs:
    """It holds what memory held: a stale 1, or what the harness poisons memory with."""
    out, max_logits, lse = attention(p, length)
    unwritten = torch.empty_like(out)
    out.view(-1)[-1] = unwritten.view(-1)[-1] if bool(unwritten.isnan().all()) else 1.0
    return out, max_logits, lse


@broken("one_head_stale", "written", HALF, reports=("TL7",), boundary="heads 1 (1 of 2)")
def one_head_stale(p: Problem, length: Length) -> Outputs:
    out, max_logits, lse = attention(p, length)
    stale = torch.empty_like(lse)
    lse[:, -1] = stale[:, -1]
    return out, max_logits, lse


_launches = itertools.count()


@broken("race", "run-to-run", HALF, boundary="the last row")
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


@broken("nan_of_unnamed_key", "nan-leak", HALF, reports=("SP14",))
def nan_of_unnamed_key(p: Problem, length: Length) -> Outputs:
    """A masked entry's row is loaded and multiplied by zero."""
    out, max_logits, lse = attention(p, length)
    leak = p.kv[-1, 0, : p.d_v].float() * 0 + p.kv[0, 0, : p.d_v].float() * 0
    return (out.float() + leak).bfloat16(), max_logits, lse


@broken("nan_of_a_padding_row", "nan-leak", MIXED)
def nan_of_a_padding_row(p: Problem, length: Length) -> Outputs:
    """A tile of query rows shares a number, times zero: what q of a padding row holds reaches the next row."""
    out, max_logits, lse = attention(p, length)
    leak = p.q.float().sum((1, 2)).roll(1)[:, None, None] * 0
    return (out.float() + leak).bfloat16(), max_logits, lse


_served: list[Problem] = []  # the problem of the launches that came in a row, once for each


@broken("cached_after_20_launches", "timed-output", HALF, reports=("HT16",))
def cached_after_20_launches(p: Problem, length: Length) -> Outputs:
    """Right while it is checked, where other problems come between; the launches after 20 on one problem return an old buffer."""
    out, max_logits, lse = attention(p, length)
    _served[:] = [*(before for before in _served if before is p), p]
    return (out if len(_served) <= 20 else torch.zeros_like(out)), max_logits, lse


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


@broken("stale_workspace", "after-another", MIXED, boundary="rows without a valid key")
def stale_workspace(p: Problem, length: Length) -> Outputs:
    """Keeps one out per shape, zero at first, and leaves the rows without a valid key as the last problem left them."""
    out, max_logits, lse = attention(p, length)
    kept = _workspace.setdefault(tuple(out.shape), torch.zeros_like(out))
    written = max_logits[:, 0] > -float("inf")
    kept[written] = out[written]
    return kept.clone(), max_logits, lse


declare(Fault("broken_first_half_cached", "sparse_prefill", "reads-inputs", FULL, boundary="the first half of the rows"))


@sparse_prefill_kernel("broken_first_half_cached", requires=REQUIRES)
def first_half_cached(p: Problem) -> Launch:
    """Computes the first half of the rows in its first launch with a length and gives them again, whatever q and kv hold by then."""
    kept: dict[object, Outputs] = {}

    def launch(length: Length) -> Outputs:
        found = attention(p, length)
        before = kept.setdefault(None if length is None else tuple(length.tolist()), found)
        half = len(p.q) // 2
        out, max_logits, lse = (torch.cat([a[:half], b[half:]]) for a, b in zip(before, found))
        return out, max_logits, lse

    return launch


@broken("loads_key_0_for_a_pad", "nan-leak", MIXED, boundary="rows with a masked entry before the length")
def loads_key_0_for_a_pad(p: Problem, length: Length) -> Outputs:
    """A pad is clamped to key 0 and multiplied by zero: right unless key 0 holds NaN."""
    out, max_logits, lse = attention(p, length)
    padded = (p.indices[:, 0] < 0).any(1)[:, None, None]
    return torch.where(padded, out + p.kv[0, 0, : p.d_v].float() * 0, out.float()).bfloat16(), max_logits, lse
