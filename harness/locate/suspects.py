"""The faults that hypotheses.py tries on a wrong output of sparse_prefill, the plainer ones first: where two cannot be told apart on a
case, the first is named."""
from __future__ import annotations

from collections.abc import Callable

import torch

from harness.locate.hypotheses import Hypothesis, View
from harness.locate.localise import POWERS
from harness.locate.suspects_values import outputs, scales

HANDED = "the handed topk_length, which cuts entries that count"
"""Then the kernel did as it was told, and the length was derived wrongly."""

Entries = Callable[[View], torch.Tensor]


def before(end: Callable[[View], torch.Tensor]) -> Entries:
    """Entries that name a key, before int64 [n, 1]."""
    return lambda v: torch.where(v.real & (v.position < end(v)), v.entry, -1)


def where(kept: Callable[[View], torch.Tensor]) -> Entries:
    """The entries that count and are kept: bool [n, topk] (or what broadcasts to it)."""
    return lambda v: torch.where(kept(v), v.right, -1)


def put(chosen: Callable[[View], torch.Tensor], key: Callable[[View], int | torch.Tensor]) -> Entries:
    """The entries that count, and in the place of chosen ones, bool [n, topk], another key."""
    return lambda v: torch.where(chosen(v) & ~v.counts, torch.as_tensor(key(v), device=v.entry.device), v.right)


def up(x: torch.Tensor, step: int) -> torch.Tensor:
    """The next multiple of step."""
    return -(-x // step) * step


def first_one(mask: torch.Tensor) -> torch.Tensor:
    """bool, the first True of each row alone."""
    return mask & (mask.cumsum(1) == 1)


def last_one(mask: torch.Tensor) -> torch.Tensor:
    return first_one(mask.flip(1)).flip(1)


def seen(v: View) -> torch.Tensor:
    """bool [n, topk]: entries before the length."""
    return v.position < v.length


def lengths() -> list[Hypothesis]:
    """What may be done to a topk_length that is handed over."""
    ends: dict[str, Callable[[View], torch.Tensor]] = {
        HANDED: lambda v: v.length,
        "topk_length ignored": lambda v: torch.full_like(v.length, v.entry.shape[1]),
        "topk_length - 1": lambda v: v.length - 1,
        "topk_length + 1": lambda v: v.length + 1,
        "topk_length rounded up to 64": lambda v: up(v.length, 64),
        "topk_length rounded up to 128": lambda v: up(v.length, 128),
        "topk_length - 64": lambda v: v.length - 64,
        "topk_length - 128": lambda v: v.length - 128,
        "topk_length + 64": lambda v: v.length + 64,
        "topk_length + 128": lambda v: v.length + 128,
        "topk_length 0 taken as 1": lambda v: v.length.clamp(min=1),
        "topk_length 0 taken as topk": lambda v: torch.where(v.length == 0, v.entry.shape[1], v.length),
        "the topk_length of the row before": lambda v: v.every_length.roll(1)[v.rows][:, None],
        "the topk_length of the next row": lambda v: v.every_length.roll(-1)[v.rows][:, None],
        "the topk_length of the first row for all": lambda v: v.every_length[:1].expand(len(v.rows))[:, None],
        "the longest topk_length for all": lambda v: v.every_length.max().expand(len(v.rows))[:, None],
        "the shortest topk_length for all": lambda v: v.every_length.min().expand(len(v.rows))[:, None],
    }
    return [Hypothesis(name, before(end)) for name, end in ends.items()]


def ends() -> list[Hypothesis]:
    """Where a walk over the entries may begin late or stop early. The length of a row without one is topk."""
    def last_key(v: View) -> torch.Tensor:
        """int64 [n, 1]: 1 + the last entry that counts."""
        return torch.where(v.counts, v.position + 1, 0).amax(1, keepdim=True)

    kept: dict[str, Callable[[View], torch.Tensor]] = {
        "the last, partial block of 64 skipped": lambda v: v.position < v.length // 64 * 64,
        "the last, partial pair of 128 skipped": lambda v: v.position < v.length // 128 * 128,
        "the last pair of 128 skipped, in rows of more than one": lambda v: (v.length <= 128) | (v.position < (v.length - 1) // 128 * 128),
        "the last block of 64 skipped, in rows of more than one": lambda v: (v.length <= 64) | (v.position < (v.length - 1) // 64 * 64),
        "the last pair of 128 skipped": lambda v: v.position < (v.length - 1) // 128 * 128,
        "the last block of 64 skipped": lambda v: v.position < (v.length - 1) // 64 * 64,
        "the second block of the last pair skipped": lambda v: v.position < (v.length - 1) // 128 * 128 + 64,
        "the odd block of 64 at the end skipped (half a pair)":
            lambda v: v.position < torch.where(up(v.length, 64) // 64 % 2 == 1, (v.length - 1) // 64 * 64, v.length),
        "the first block of 64 skipped": lambda v: v.position >= 64,
        "the first pair of 128 skipped": lambda v: v.position >= 128,
        "the first entry skipped": lambda v: v.position >= 1,
        "the first valid entry skipped": lambda v: ~first_one(v.counts),
        "the last valid entry skipped": lambda v: ~last_one(v.counts),
        "the entry before topk_length skipped": lambda v: v.position != v.length - 1,
        "every second block of 64 skipped": lambda v: v.position // 64 % 2 == 0,
        "every second pair of 128 skipped": lambda v: v.position // 128 % 2 == 0,
        "every second entry skipped": lambda v: v.position % 2 == 0,
        "a block of 64 without a valid entry taken for the end": lambda v: _block_has(v.counts, 64).long().cumprod(1).bool(),
        "a hole taken for the end": lambda v: v.real.long().cumprod(1).bool(),
        "the count of valid entries used as the length": lambda v: v.position < v.counts.sum(1, keepdim=True),
        "rows without a hole cut by one": lambda v: v.position < last_key(v) - 1,
        "key 0 taken for a pad": lambda v: v.entry > 0,
        "the last key of kv taken for a pad": lambda v: v.entry < v.inputs.case.s_kv - 1,
        "keys of the last, partial page of 64 skipped": lambda v: v.entry < v.inputs.case.s_kv // 64 * 64,
        "blocks of 64 with a masked entry skipped": lambda v: ~_block_has(seen(v) & ~v.counts, 64),
        "blocks of 128 with a masked entry skipped": lambda v: ~_block_has(seen(v) & ~v.counts, 128),
    }
    found = [Hypothesis(name, where(keep)) for name, keep in kept.items()]
    return found + [Hypothesis(f"entries from position {edge} on dropped", where(below(edge))) for edge in (1, *POWERS)]


def below(edge: int) -> Callable[[View], torch.Tensor]:
    return lambda v: v.position < edge


def _block_has(marked: torch.Tensor, step: int) -> torch.Tensor:
    """bool [n, topk]: the entry's block holds a marked one, bool [n, topk]."""
    rows, width = marked.shape
    padded = torch.nn.functional.pad(marked, (0, -width % step))
    return padded.view(rows, -1, step).any(2).repeat_interleave(step, 1)[:, :width]


def pads() -> list[Hypothesis]:
    """What may be made of an entry that names no key."""
    def zeros(v: View) -> int:
        return v.inputs.case.s_kv

    found = {
        "-1 read as key 0": put(lambda v: seen(v) & (v.entry == -1), lambda v: 0),
        "a negative index read as key 0": put(lambda v: seen(v) & (v.entry < 0), lambda v: 0),
        "-1 read as the last key": put(lambda v: seen(v) & (v.entry == -1), lambda v: v.inputs.case.s_kv - 1),
        "an index >= s_kv clamped to the last key": put(lambda v: seen(v) & (v.entry >= v.inputs.case.s_kv),
                                                        lambda v: v.inputs.case.s_kv - 1),
        "an index >= s_kv read as key 0": put(lambda v: seen(v) & (v.entry >= v.inputs.case.s_kv), lambda v: 0),
        "an index >= s_kv taken modulo s_kv": put(lambda v: seen(v) & (v.entry >= v.inputs.case.s_kv),
                                                  lambda v: v.entry % v.inputs.case.s_kv),
        "pads before the length scored as rows of zeros": put(seen, zeros),
        "pads up to the next multiple of 64 scored as rows of zeros": put(lambda v: v.position < up(v.length, 64), zeros),
        "pads up to the next multiple of 128 scored as rows of zeros": put(lambda v: v.position < up(v.length, 128), zeros),
        "all pads scored as rows of zeros": put(lambda v: v.position >= 0, zeros),
        "pads of any kind read as key 0": put(lambda v: v.position >= 0, lambda v: 0),
        "pads of any kind read as the key before them":
            put(lambda v: v.position > 0, lambda v: torch.cat([v.entry[:, :1], v.entry[:, :-1]], 1)),
    }
    return [Hypothesis(name, entries) for name, entries in found.items()]


def keys() -> list[Hypothesis]:
    """Other keys than the ones that are named."""
    def moved(step: int) -> Entries:
        return lambda v: torch.where(v.counts, (v.entry + step) % v.inputs.case.s_kv, -1)

    def of_row(step: int) -> Entries:
        return lambda v: torch.where(v.inputs.valid_entries, v.inputs.indices[:, 0].long(), -1).roll(step, 0)[v.rows]

    def widened(step: int) -> Entries:
        def entries(v: View) -> torch.Tensor:
            after = v.inputs.indices[:, 0].long().roll(-1, 0)[v.rows][:, : -v.entry.shape[1] % step]
            return torch.cat([v.right, torch.where((after >= 0) & (after < v.inputs.case.s_kv), after, -1)], 1)

        return entries

    def cut(bits: int) -> Entries:
        return lambda v: torch.where(v.counts, v.entry & ((1 << bits) - 1), -1)

    def offset(bits: int) -> Entries:
        return lambda v: torch.where(v.counts, v.entry * v.inputs.case.d_qk % (1 << bits) // v.inputs.case.d_qk, -1)

    def row_offset(bits: int) -> Entries:
        def entries(v: View) -> torch.Tensor:
            rows = v.rows % max(1, (1 << bits) // v.entry.shape[1])
            there = v.inputs.indices[rows, 0].long()
            return torch.where((there >= 0) & (there < v.inputs.case.s_kv) & seen(v), there, -1)

        return entries

    def twice(place: int, lost: bool) -> Entries:
        """The entry at that position once more; in the place of the next one, or besides."""
        def entries(v: View) -> torch.Tensor:
            again = v.right[:, place : place + 1]
            rest = v.right.clone()
            if lost and v.right.shape[1] > 1:
                rest[:, place + 1] = torch.where(rest[:, place + 1] >= 0, again[:, 0], rest[:, place + 1])
                return rest
            return torch.cat([rest, again], 1)

        return entries

    def at_stride(step: int) -> Entries:
        """Rows of indices read as if their width were a whole number of blocks."""
        def entries(v: View) -> torch.Tensor:
            flat, width = v.inputs.indices.reshape(-1).long(), v.entry.shape[1]
            there = flat[(v.rows[:, None] * (-(-width // step) * step) + v.position) % len(flat)]
            return torch.where((there >= 0) & (there < v.inputs.case.s_kv) & seen(v), there, -1)

        return entries

    found = {
        "indices relative to their request (its first key left out)": relative,
        "indices at a stride of whole blocks of 64": at_stride(64), "indices at a stride of whole pairs of 128": at_stride(128),
        "the width rounded up to 64, where the next row's entries stand": widened(64),
        "the width rounded up to 128, where the next row's entries stand": widened(128),
        "the indices of the row before": of_row(1), "the indices of the next row": of_row(-1),
        "the key after the one that is named": moved(1), "the key before the one that is named": moved(-1),
        "the first entry read in place of the second": twice(0, True), "the first entry counted twice": twice(0, False),
        "the last valid entry counted twice": lambda v: torch.cat([v.right, torch.where(last_one(v.counts), v.right, -1).amax(1, True)], 1),
        "the second block of 64 reads the first one's entries": lambda v: _shifted_back(v, v.position // 64 == 1),
        "the second block of each pair reads the first one's entries": lambda v: _shifted_back(v, v.position // 64 % 2 == 1),
        "every block of 64 reads the entries of the one before": lambda v: _shifted_back(v, v.position >= 64),
    }
    for bits in range(8, 17):
        found[f"indices cut to {bits} bits"] = cut(bits)
    for bits in range(8, 32):
        found[f"offsets in kv (index * d_qk) cut to {bits} bits"] = offset(bits)
        found[f"offsets in indices (row * topk) cut to {bits} bits"] = row_offset(bits)
    return [Hypothesis(name, entries) for name, entries in found.items()]


def relative(v: View) -> torch.Tensor:
    """The entries that count, less the first key of the row's request."""
    starts, key = [torch.zeros(0, dtype=torch.int64)], 0
    for queries, keys in v.inputs.case.request_lengths if v.inputs.case.rows == "causal" else ():
        starts.append(torch.full((queries,), key))
        key += keys
    start = torch.nn.functional.pad(torch.cat(starts), (0, v.inputs.case.s_q))[: v.inputs.case.s_q].to(v.rows.device)
    return torch.where(v.counts, v.entry - start[v.rows][:, None], -1)


def _shifted_back(v: View, chosen: torch.Tensor) -> torch.Tensor:
    """The entries that count, at chosen positions (bool [topk]) those 64 before."""
    source = torch.where(chosen, v.position - 64, v.position)
    return torch.where(v.counts, v.right[:, source], -1)


def suspects(given: bool) -> list[Hypothesis]:
    """All of them, plain ones first. given: whether a topk_length was handed over."""
    return [*(lengths() if given else []), *ends(), *pads(), *keys(), *scales(), *outputs()]
