"""Where the violating elements are: rows, heads, columns, and which boundary of the problem explains the rows best.

What a person does by looking at a printed array: name the set, then try each length and block border against it.
"""
from __future__ import annotations

import dataclasses

import torch

D_V = 512


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of each query row, on the CPU: the length handed over (topk where none), and the count of entries that count."""

    length: torch.Tensor
    counting: torch.Tensor
    topk: int
    has_holes: torch.Tensor


def describe_rows(length: torch.Tensor | None, valid_entries: torch.Tensor, valid: torch.Tensor) -> Rows:
    """length: int32 [s_q] or None; valid_entries: bool [s_q, topk]; valid: int64 [s_q], the range before holes."""
    topk = valid_entries.shape[1]
    counting = valid_entries.sum(1).cpu()
    lengths = torch.full_like(counting, topk) if length is None else length.cpu().long()
    return Rows(lengths, counting, topk, counting < valid.cpu())


def localise(bad: torch.Tensor, rows: Rows) -> list[str]:
    """Lines that say where the bad elements are. bad: bool [s_q, h_q] or [s_q, h_q, columns], with at least one True."""
    over = tuple(range(2, bad.dim()))
    pairs = bad.any(-1) if over else bad
    bad_rows, bad_heads = pairs.any(1).cpu(), pairs.any(0).cpu()
    lines = [f"rows {ranges(bad_rows)}", f"heads {ranges(bad_heads)}"]
    if over:
        lines.append(f"columns {ranges(bad.any(0).any(0).cpu())}")
    boundary = explain(bad_rows, rows)
    return [*lines, boundary] if boundary else lines


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
    """Each boundary's name and the rows it would make wrong: bool [s_q]."""
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
    for edge in (64, 128, 256, 512, 1024, 2048):
        if edge < topk:
            sets[f"rows longer than {edge}"] = length > edge
    return sets


def explain(bad_rows: torch.Tensor, rows: Rows) -> str:
    """The boundary whose rows agree best with the bad ones, if they agree well and not every row is bad."""
    return best_fit(bad_rows, candidates(rows))


def best_fit(bad_rows: torch.Tensor, sets: dict[str, torch.Tensor]) -> str:
    """The named set of rows that overlaps most with the bad ones, as a line of text; "" if none does by half, or every row is bad."""
    if bool(bad_rows.all()):
        return ""
    best, score = "", 0.0
    for name, members in sets.items():
        both, either = int((members & bad_rows).sum()), int((members | bad_rows).sum())
        if either and both / either > score:
            best, score = name, both / either
    if score < 0.5:
        return ""
    explained = int((sets[best] & bad_rows).sum()) / int(bad_rows.sum())
    return f"pattern: {best}; it explains {explained:.0%} of the bad rows, {score:.0%} overlap"
