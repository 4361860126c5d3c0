"""The wrong keys of a choice by their scores: their ranks, whether they tie with the k-th score or share its bucket, when they come in
order of position, and the border that fits them best. What topk_localise.py says of places, this says of ranks."""
from __future__ import annotations

import dataclasses

import torch

from harness.locate.localise import best_fit
from harness.locate.topk_localise import POWERS, Windows, key_borders
from harness.topk_sets import Band, chosen_keys, look
from harness.words import counted

ROWS = 16
KEYS = 1 << 16  # keys of a kind that are held against borders


@dataclasses.dataclass
class Keys:
    """Keys of some rows, [n] each: row, key and position in its window, the window's length; rank in the row, 0 the best; arrival: how many
    keys of the window that reach the k-th score come before it; of_bucket: how many of those in the k-th score's octave; score and kth;
    wrong: bool."""

    row: torch.Tensor
    key: torch.Tensor
    position: torch.Tensor
    length: torch.Tensor
    rank: torch.Tensor
    arrival: torch.Tensor
    of_bucket: torch.Tensor
    score: torch.Tensor
    kth: torch.Tensor
    wrong: torch.Tensor


def tell_ranks(indices: torch.Tensor, band: Band, windows: Windows, bad: torch.Tensor) -> list[str]:
    """Lines on the keys that a choice drops and on those that do not belong. bad: bool [num_q], rows that are wrong in some way."""
    kinds: dict[str, list[Keys]] = {"dropped": [], "do not belong": []}
    for row in bad.nonzero()[:ROWS, 0].tolist():
        dropped, extra = _of_row(indices[row : row + 1], band, row, windows.topk)
        kinds["dropped"].append(dropped)
        kinds["do not belong"].append(extra)
    return [line for kind, parts in kinds.items() if any(bool(part.wrong.any()) for part in parts) for line in _tell(kind, parts, windows)]


def _of_row(indices: torch.Tensor, band: Band, row: int, topk: int) -> tuple[Keys, Keys]:
    """The keys that a row may choose, those that it dropped marked; and the keys that it chose, those that do not belong marked."""
    chunk = look(band, row, row + 1)
    ks, ke = band.ks[row : row + 1], band.ke[row : row + 1]
    chosen = chosen_keys(indices, ks, ke, band.s_kv)[0]
    score, kth, inside = chunk.score[0], chunk.kth[0], chunk.inside[0]
    may = inside & ~chunk.below[0] & ~score.isnan()
    short = int(chosen.sum()) < min(topk, int((inside & ~score.isnan()).sum()))
    dropped = ~chosen & (may if short else chunk.above[0])
    ordered = score.masked_fill(~inside | score.isnan(), -torch.inf).sort().values
    rank = len(ordered) - torch.searchsorted(ordered, score, right=True)
    reach = inside & (score >= kth)
    octave = inside & (score.float().view(torch.int32) >> 23 == kth.float().view(torch.int32) >> 23)

    def keys(among: torch.Tensor, wrong: torch.Tensor) -> Keys:
        at = among.nonzero()[:, 0]
        if len(at) > KEYS:
            at = torch.cat([at[wrong[at]][: KEYS // 2], at[~wrong[at]][:: max(1, len(at) * 2 // KEYS)]]).sort().values
        position = at - int(ks)
        full = torch.full_like(at, int(ke) - int(ks))
        parts = (torch.full_like(at, row), at, position, full, rank[at], reach.cumsum(0)[at], octave.cumsum(0)[at] * octave[at],
                 score[at], kth.expand(len(at)), wrong[at])
        return Keys(*(part.cpu() for part in parts))

    return keys(may, dropped), keys(chosen, chosen & (chunk.below[0] | score.isnan()))


def _tell(kind: str, parts: list[Keys], windows: Windows) -> list[str]:
    every = Keys(*(torch.cat([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Keys)))
    wrong = Keys(*(getattr(every, field.name)[every.wrong] for field in dataclasses.fields(Keys)))
    told = [f"{len(wrong.key):,} in {len(wrong.row.unique())} of {counted(len(parts), 'row')} looked at",
            f"ranks {_span(wrong.rank)} (topk {windows.topk})", f"scores {float(wrong.score.min()):.6g} to {float(wrong.score.max()):.6g}"]
    ties = float((wrong.score == wrong.kth).double().mean())
    told += [f"{ties:.0%} tie with the k-th"] if ties else []
    shared = [f"{share:.0%} share its {name}" for name, same in buckets(wrong).items() if (share := float(same.double().mean())) >= 0.5]
    told += shared[:1]  # the finest
    found = [f"{kind}, by score: {', '.join(told)}"]
    pattern = best_fit(every.wrong, borders(every, windows), f"keys that {'were ' if kind == 'dropped' else ''}{kind}", 0.6)
    return found + ([pattern] if pattern else [])


def _span(values: torch.Tensor) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}"


def buckets(keys: Keys) -> dict[str, torch.Tensor]:
    """Which keys a coarser number cannot tell from the k-th: bool [n]."""
    score, kth = keys.score.float(), keys.kth.float()
    def first(bits: int) -> torch.Tensor:
        return score.view(torch.int32) >> (32 - bits) == kth.view(torch.int32) >> (32 - bits)

    return {"first 20 bits": first(20), "fp16 value": score.half() == kth.half(), "bf16 value": score.bfloat16() == kth.bfloat16(),
            "first 12 bits": first(12), "octave": first(9)}


def borders(keys: Keys, windows: Windows) -> dict[str, torch.Tensor]:
    """Each border's name and the keys on its far side: bool [n]."""
    topk = windows.topk
    count = keys.length.clamp(max=topk)
    sets = {
        "the best key of the row": keys.rank == 0, "the last key before the cut": keys.rank == count - 1,
        "the second half of the ranks": keys.rank >= topk // 2, "the first half of the ranks": keys.rank < topk // 2,
        "keys that tie with the k-th": keys.score == keys.kth, "keys that score -inf": keys.score == -torch.inf,
        "keys that score +inf": keys.score == torch.inf, "keys that score NaN": keys.score.isnan(),
        "keys that score 0": keys.score == 0, "keys that score below 0": keys.score < 0,
    }
    sets |= {f"keys that share the k-th score's {name}": same for name, same in buckets(keys).items()}
    sets |= key_borders(keys.position, keys.length, keys.key)
    longest = int(keys.length.max())
    capacities = {f"{times} * topk": times * topk for times in (1, 2, 4, 8)} | {str(edge): edge for edge in POWERS if edge < longest}
    for name, edge in capacities.items():
        sets[f"at or past position {name} of the window (a buffer of so many keys)"] = keys.position >= edge
        sets[f"past the first {name} keys that reach the k-th score (a buffer of candidates)"] = keys.arrival > edge
        sets[f"past the first {name} keys of the k-th score's octave (a buffer of ties)"] = keys.of_bucket > edge
        if edge != topk:
            sets[f"ranks from {name} on"] = keys.rank >= edge
    return sets
