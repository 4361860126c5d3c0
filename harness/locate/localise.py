"""Where the violating elements are: rows, heads, columns, and which boundary of the problem explains the rows best.

What a person does by looking at a printed array: name the set, then try each length and block border against it.
"""
from __future__ import annotations

import dataclasses

import torch

POWERS = (64, 128, 256, 512, 1024, 2048, 4096)  # of lengths and positions: blocks, pairs, pages, buffers
EDGES = (8, 16, 32, *POWERS, 6144)  # of row numbers, heads and columns
NEARLY_ALL = 0.9  # beyond it what is bad has no border, but exceptions


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of each query row, on the CPU: the length handed over (topk where none), and the count of entries that count.

    has_holes, has_pads, has_outside: bool [s_q]: the row has a hole; an entry before the length that does not count; one of those that
    is at or past s_kv. None where it is not known. given: whether a length was handed over at all.
    """

    length: torch.Tensor
    counting: torch.Tensor
    topk: int
    has_holes: torch.Tensor
    has_pads: torch.Tensor | None = None
    has_outside: torch.Tensor | None = None
    given: bool = True


def describe_rows(length: torch.Tensor | None, valid_entries: torch.Tensor, valid: torch.Tensor,
                  entries: torch.Tensor | None = None) -> Rows:
    """length: int32 [s_q] or None; valid_entries: bool [s_q, topk]; valid: int64 [s_q], the range before holes; entries: int32
    [s_q, topk], the indices."""
    topk = valid_entries.shape[1]
    counting = valid_entries.sum(1).cpu()
    lengths = torch.full_like(counting, topk) if length is None else length.cpu().long()
    seen = torch.arange(topk, device=valid_entries.device) < lengths.to(valid_entries.device)[:, None]
    masked = seen & ~valid_entries
    outside = None if entries is None else (masked & (entries >= 0)).any(1).cpu()
    return Rows(lengths, counting, topk, counting < valid.cpu(), masked.any(1).cpu(), outside, length is not None)


def localise(bad: torch.Tensor, rows: Rows) -> list[str]:
    """Lines that say where the bad elements are. bad: bool [s_q, h_q] or [s_q, h_q, columns], with at least one True."""
    over = tuple(range(2, bad.dim()))
    pairs = bad.any(-1) if over else bad
    bad_rows, bad_heads = pairs.any(1).cpu(), pairs.any(0).cpu()
    lines = [f"rows {ranges(bad_rows)}", *_along("heads", bad_heads)]
    if over:
        lines += _along("columns", bad.any(0).any(0).cpu())
    boundary = explain(bad_rows, rows)
    return [*lines, boundary] if boundary else lines


def _along(what: str, bad: torch.Tensor) -> list[str]:
    """Which heads or columns are bad, and the border between them and the others where the ranges do not show one."""
    line = f"{what} {ranges(bad)}"
    number = torch.arange(len(bad))
    sets = {f"odd {what}": number % 2 == 1, f"even {what}": number % 2 == 0}
    for edge in EDGES:
        sets |= {f"{what} from {edge} on": number >= edge, f"{what} below {edge}": number < edge}
    pattern = best_fit(bad, sets, f"bad {what}", 0.9) if "," in line else ""
    return [line, pattern] if pattern else [line]


def ranges(mask: torch.Tensor) -> str:
    """True positions as ranges, with the count: `256..511 (256 of 512)`, at most four ranges, then how many more."""
    positions = mask.nonzero()[:, 0].tolist()
    if len(positions) == len(mask):
        return f"all {len(mask)}"
    spans: list[list[int]] = []
    for at in positions:
        if spans and at == spans[-1][1] + 1:
            spans[-1][1] = at
        else:
            spans.append([at, at])
    shown = ", ".join(f"{a}" if a == b else f"{a}..{b}" for a, b in spans[:4])
    more = f", {len(spans) - 4} more ranges" if len(spans) > 4 else ""
    return f"{shown}{more} ({len(positions)} of {len(mask)})"


def candidates(rows: Rows) -> dict[str, torch.Tensor]:
    """Each boundary's name and the rows it would make wrong: bool [s_q]. Where two fit equally well the first is named."""
    length, topk = rows.length, rows.topk
    sets = {
        "rows without a valid key": rows.counting == 0,
        "rows with a hole": rows.has_holes,
        "rows that end before topk (topk_length < topk)": length < topk,
        "rows where a 128-key pair is skipped": -(-length // 128) < -(-topk // 128),
        "rows whose length is no multiple of 64 (partial block)": length % 64 != 0,
        "rows whose length is no multiple of 128 (partial pair)": length % 128 != 0,
        "rows with an odd number of 64-key blocks": -(-length // 64) % 2 == 1,
    }
    sets |= {f"rows longer than {edge}": length > edge for edge in POWERS if edge < topk}
    if rows.has_pads is not None:
        sets["rows with a masked entry before the length"] = rows.has_pads
    if rows.has_outside is not None:
        sets["rows with an index that is no key before the length"] = rows.has_outside
    return sets | {"rows of length 1": length == 1, "rows with one valid key": rows.counting == 1}


def by_number(rows: int) -> dict[str, torch.Tensor]:
    """The same for borders between rows by their number alone. On a few rows some of them fits nearly anything, so it must fit well."""
    number = torch.arange(rows)
    sets = {"the first row": number == 0, "the last row": number == rows - 1}
    sets |= {f"rows from {edge} on": number >= edge for edge in EDGES if edge < rows}
    for group in (4, 64, 128):
        sets[f"the last rows, past the last whole {group}"] = number >= rows - rows % group
    return sets | {"every other row, from row 1": number % 2 == 1, "every other row, from row 0": number % 2 == 0}


def explain(bad_rows: torch.Tensor, rows: Rows) -> str:
    """The boundary whose rows agree best with the bad ones, if they agree well and not every row is bad."""
    sets = by_number(len(bad_rows))
    return best_fit(bad_rows, candidates(rows), least=0.9) or best_fit(bad_rows, sets, least=0.9) or best_fit(bad_rows, candidates(rows))


def best_fit(bad: torch.Tensor, sets: dict[str, torch.Tensor], what: str = "bad rows", least: float = 0.5) -> str:
    """The named set that overlaps most with the bad ones, as a line of text; "" if none overlaps by `least`, or nearly all are bad.
    A border separates: sets that hold everything are passed over, and those beyond which most are bad as well.

    bad and each set: bool [n], over the same n things; what: what they are.
    """
    if int(bad.sum()) > NEARLY_ALL * len(bad):
        return ""
    best, score = "", 0.0
    for name, members in sets.items():
        outside = int((~members).sum())
        if not outside or 2 * int((bad & ~members).sum()) > outside:  # no border: everything is on its far side, or both sides are bad
            continue
        both, either = int((members & bad).sum()), int((members | bad).sum())
        if either and both / either > score:
            best, score = name, both / either
    if score < least:
        return ""
    explained = int((sets[best] & bad).sum()) / int(bad.sum())
    return f"pattern: {best}; it explains {explained:.0%} of the {what}, {score:.0%} overlap"
