"""A picture of where the bad elements of an output are: their share in each cell of a small grid, rows by heads, columns or keys.

Made where the lines of localise.py and topk_localise.py are; reports/html draws it. All of an arm's pictures together stay under LARGEST
characters of its record.
"""
from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable

import torch

from harness.locate.localise import Rows, localise
from harness.locate.topk_localise import PLACES, Places, Windows, localise_members
from harness.verdicts import SHARES, Check, Picture, Verdict

HEIGHT, WIDTH = 48, 64
"""The largest grid, in cells."""
LARGEST = 3600
FIRST = ("reference", "set", "shape")
"""The checks whose pictures are kept first where there is no room for all."""


def locate(check: Check, bad: torch.Tensor, rows: Rows, output: str = "") -> None:
    """Say in a check where its bad elements are, in lines and as a picture. bad: bool [s_q], [s_q, h_q] or [s_q, h_q, columns], with at
    least one True."""
    check.where, check.picture = localise(bad, rows), draw(bad, output)


def locate_members(check: Check, bad_rows: torch.Tensor, windows: Windows, places: Places | None = None) -> None:
    """The same for the rows and members of a choice of keys. bad_rows: bool [num_q]."""
    check.where = localise_members(bad_rows, windows, places)
    check.picture = draw_members(bad_rows, windows, places or {}) if check.where else None


def draw(bad: torch.Tensor, output: str) -> Picture:
    """The picture of bool [rows], [rows, heads] or [rows, heads, columns]. Of the last, across are heads or columns, whichever of them
    tells more: where bad elements are spread evenly over the one they may not be over the other."""
    if bad.dim() < 3:
        flat = bad.view(len(bad), -1)
        return _picture(flat.long().cpu(), 1, output, "head" if flat.shape[1] > 1 else "")
    ways = {"head": (bad.sum(2).cpu(), bad.shape[2]), "column": (bad.sum(1).cpu(), bad.shape[1])}
    across = max(ways, key=lambda way: _unevenness(*ways[way]))
    counts, depth = ways[across]
    return _picture(counts, depth, output, across, "all columns together" if across == "head" else "all heads together")


def _unevenness(counts: torch.Tensor, depth: int) -> float:
    """How far apart the shares of a picture's columns are, 0 to 1."""
    share = _shares(counts, depth, 1, WIDTH)[0]
    return float(share.max() - share.min())


def draw_members(bad_rows: torch.Tensor, windows: Windows, places: Places) -> Picture:
    """The picture of wrong members, rows by keys; without their places, of the rows alone."""
    found = {kind: at.cpu() for kind, at in places.items() if len(at)}
    if not found:
        return _picture(bad_rows.long().cpu()[:, None], 1, "rows", "")
    rows, keys = len(bad_rows), max(1, int(windows.ke.max()))
    at = torch.cat(list(found.values()))
    keys, at = max(keys, int(at[:, 1].max()) + 1), at[at[:, 1] >= 0]
    note = ""
    if any(len(each) >= PLACES for each in found.values()):  # those behind the last are not known: no row without one is shown
        note, rows = f"the first {PLACES:,} of a kind alone, of {rows:,} rows", int(at[:, 0].max()) + 1
    height, width = min(HEIGHT, rows), min(WIDTH, keys)
    cell = at[:, 0] * height // rows * width + at[:, 1] * width // keys
    counts = torch.bincount(cell, minlength=height * width).view(height, width)
    sizes = _sizes(rows, height)[:, None] * _sizes(keys, width)
    return _encoded(counts / sizes, f"keys that are {' or '.join(_in_words(kind) for kind in found)}", rows, keys, "key", note)


def _in_words(kind: str) -> str:
    return "wrong members" if kind == "do not belong" else kind


def _picture(counts: torch.Tensor, depth: int, output: str, across: str, note: str = "") -> Picture:
    rows, columns = counts.shape
    return _encoded(_shares(counts, depth, HEIGHT, WIDTH), output, rows, columns, across, note)


def _shares(counts: torch.Tensor, depth: int, height: int, width: int) -> torch.Tensor:
    """float64 [min(height, rows), min(width, columns)]: the share of bad elements in each cell. counts: int64 [rows, columns], of
    `depth` elements each."""
    rows, columns = counts.shape
    height, width = min(height, rows), min(width, columns)
    row, column = torch.arange(rows) * height // rows, torch.arange(columns) * width // columns
    summed = torch.zeros(height, columns, dtype=torch.int64).index_add_(0, row, counts)
    summed = torch.zeros(height, width, dtype=torch.int64).index_add_(1, column, summed)
    return summed.double() / (_sizes(rows, height)[:, None] * _sizes(columns, width) * depth)


def _sizes(count: int, cells: int) -> torch.Tensor:
    """int64 [cells]: how many of `count` elements fall into each cell, element i into cell i * cells // count. count may be 2^31, where a
    kernel leaves junk for a key: nothing of that length is made."""
    return ((torch.arange(cells + 1) * count + cells - 1) // cells).diff()


def _encoded(shares: torch.Tensor, output: str, rows: int, columns: int, across: str, note: str) -> Picture:
    """Shares as digits: 0 none, else the first step of SHARES that is not below the share."""
    steps = torch.tensor(SHARES, dtype=torch.float64)
    levels = torch.where(shares > 0, torch.searchsorted(steps, shares.double().clamp(max=1.0)) + 1, 0)
    digits = "".join(map(str, levels.view(-1).tolist()))
    return Picture(output, rows, columns, across, shares.shape[0], shares.shape[1],
                   base64.b64encode(zlib.compress(digits.encode(), 9)).decode(), note)


def keep_small(checks: Iterable[Check]) -> None:
    """Drop the pictures of checks that pass all the same (a promise allows the difference), and of others those for which there is no
    room: one arm's together have at most LARGEST characters."""
    room = LARGEST
    for check in sorted(checks, key=lambda check: check.name not in FIRST):
        if check.picture:
            room -= len(check.picture.cells)
            check.picture = check.picture if room >= 0 and check.verdict is not Verdict.PASSED else None
