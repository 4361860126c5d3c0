"""Choices of keys held against scores: which members were dropped, which do not belong, how two choices differ.

All go over the rows in chunks, so that no [num_q, s_kv] is ever held: at 8192 rows by 1M keys a chunk is 64 rows. A choice is
int32 [num_q, topk]: absolute key positions, then -1.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from harness.locate.topk_localise import PLACES, Places

LEVEL = 2.0**-16
"""Scores this near to the k-th, relative to it, tie as far as fp32 can tell: 128 ULPs, where one sum over heads alone loses several."""
ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Scores looked at in one chunk."""
BLOCK = {"cpu": 8, "cuda": 64}
"""Rows of a chunk are a multiple of this: the reference and the arms score whole blocks of rows."""
SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Band:
    """What choices are held against: scores, and how near the k-th a key must be for either choice to be right.

    scores: (row0, row1) -> fp32 or fp64 [row1 - row0, s_kv], NaN where the score is NaN; what it holds outside the windows is not
    looked at. kth [num_q]: the lowest score that must be in; eps [num_q] >= 0, in units of score; ks, ke int32 [num_q].
    """

    scores: Callable[[int, int], torch.Tensor]
    kth: torch.Tensor
    eps: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    s_kv: int


@dataclasses.dataclass
class Chunk:
    """Rows [row0, row1) of a band. inside: bool [rows, s_kv], the windows. above, below: keys of the window that have to be chosen
    and that must not be. A NaN is neither."""

    row0: int
    row1: int
    score: torch.Tensor
    kth: torch.Tensor
    inside: torch.Tensor
    above: torch.Tensor
    below: torch.Tensor


def chunks(num_q: int, s_kv: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """(row0, row1) so that row1 - row0 rows of s_kv scores are one chunk's worth."""
    block = BLOCK[device.type]
    step = max(1, ELEMENTS[device.type] // max(1, s_kv) // block) * block
    for row0 in range(0, num_q, step):
        yield row0, min(row0 + step, num_q)


def windows(ks: torch.Tensor, ke: torch.Tensor, s_kv: int) -> torch.Tensor:
    """bool [rows, s_kv]: the keys that each row may attend."""
    position = torch.arange(s_kv, device=ks.device, dtype=torch.int32)
    return (position >= ks[:, None]) & (position < ke[:, None])


def in_window(indices: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which entries of int32 [rows, topk] are keys of their row's window: bool, and int64 indices with 0 in place of the others."""
    named = (indices >= ks[:, None]) & (indices < ke[:, None])
    return named, torch.where(named, indices, 0).long()


def chosen_keys(indices: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, s_kv: int) -> torch.Tensor:
    """bool [rows, s_kv] of int32 [rows, topk]; entries outside a row's window are left out."""
    within = (indices >= ks[:, None]) & (indices < ke[:, None])
    mask = torch.zeros(len(indices), s_kv + 1, dtype=torch.bool, device=indices.device)
    mask.scatter_(1, torch.where(within, indices, s_kv).long(), True)
    return mask[:, :-1]


def look(band: Band, row0: int, row1: int) -> Chunk:
    """Score a chunk and sort its keys. Differences are taken first, so that an exact tie is one whatever eps is; infinities of one
    sign tie (their difference is a NaN, which is neither above nor below)."""
    rows = slice(row0, row1)
    score, kth, eps = band.scores(row0, row1), band.kth[rows, None], band.eps[rows, None]
    inside = windows(band.ks[rows], band.ke[rows], band.s_kv)
    gap = score - kth
    return Chunk(row0, row1, score, kth, inside, (gap > eps) & inside, (gap < -eps) & inside)


@dataclasses.dataclass
class Tally:
    """What a choice is, row by row (all [num_q], on the device).

    dropped: int64, keys that had to be in and are not; extra: int64, chosen keys that must not be; nan: int64, chosen keys whose
    score is NaN; hits: int64, chosen keys that score at least the k-th. lost, deficit: by how much the best key left out is above
    the k-th, and the lowest chosen one below it (0 or more). bool: decides, rows in which some choice of keys would be wrong;
    level, rows whose valid scores all tie with the k-th (see LEVEL); unread, rows with a NaN among their scores. scores:
    [num_q, topk], of each entry, 0 for one that is no key of its row's window.
    """

    dropped: torch.Tensor
    extra: torch.Tensor
    nan: torch.Tensor
    hits: torch.Tensor
    lost: torch.Tensor
    deficit: torch.Tensor
    decides: torch.Tensor
    level: torch.Tensor
    unread: torch.Tensor
    scores: torch.Tensor

    @property
    def wrong(self) -> torch.Tensor:
        """bool [num_q]."""
        return (self.dropped > 0) | (self.extra > 0) | (self.nan > 0)


def tally(indices: torch.Tensor, band: Band) -> Tally:
    """Hold a choice against a band, in one pass over the scores."""
    rows = chunks(len(indices), band.s_kv, indices.device)
    parts = [_tally_rows(indices[row0:row1], look(band, row0, row1), band) for row0, row1 in rows]
    return Tally(*(torch.cat(column) for column in zip(*parts)))


def _tally_rows(indices: torch.Tensor, chunk: Chunk, band: Band) -> tuple[torch.Tensor, ...]:
    score, rows = chunk.score, slice(chunk.row0, chunk.row1)
    chosen = chosen_keys(indices, band.ks[rows], band.ke[rows], band.s_kv)
    left_out = chunk.inside & ~chosen
    unread = score.isnan()
    named, index = in_window(indices, band.ks[rows], band.ke[rows])
    zero = torch.zeros((), dtype=score.dtype, device=score.device)
    gap = torch.where(score == chunk.kth, zero, score - chunk.kth)  # equal infinities are no distance apart
    apart = (gap.abs() > LEVEL * chunk.kth.abs()) | ((score != chunk.kth) & ~gap.isfinite())
    return (
        (chunk.above & left_out).sum(1), (chunk.below & chosen).sum(1), (chosen & unread).sum(1), (chosen & (score >= chunk.kth)).sum(1),
        torch.where(left_out & ~unread, gap, zero).amax(1), zero - torch.where(chosen & ~unread, gap, zero).amin(1),
        (chunk.above | chunk.below).any(1), ~(chunk.inside & ~unread & apart).any(1), (chunk.inside & unread).any(1),
        torch.where(named, score.gather(1, index), zero),
    )


@dataclasses.dataclass
class Difference:
    """How two choices differ. moved: rows with the same keys in another order; rows: bool [num_q], those with other keys;
    keys: how many keys only one of them has; far: bool [num_q], rows where that cannot be explained by keys within the band."""

    moved: int
    rows: torch.Tensor
    keys: int
    far: torch.Tensor
    far_keys: int
    first: list[str]
    places: Places


def compare(a: torch.Tensor, b: torch.Tensor, band: Band, labels: tuple[str, str]) -> Difference:
    """Two choices of the same rows, whatever their order. Rows in which they are equal cost no scores.

    Keys that only one of them has must be within eps of the k-th; a row with another number of keys, or with entries that are
    neither -1 nor a key of its window in one choice alone, is far.
    """
    rows = (a.sort(1).values != b.sort(1).values).any(1)
    found = Difference(int(((a != b).any(1) & ~rows).sum()), rows, 0, torch.zeros_like(rows), 0, [], {})
    for row0, row1 in chunks(len(a), band.s_kv, a.device):
        if bool(rows[row0:row1].any()):
            _compare_rows(a[row0:row1], b[row0:row1], look(band, row0, row1), band, labels, found)
    return found


def _compare_rows(a: torch.Tensor, b: torch.Tensor, chunk: Chunk, band: Band, labels: tuple[str, str], found: Difference) -> None:
    rows = slice(chunk.row0, chunk.row1)
    ks, ke = band.ks[rows], band.ke[rows]
    mine, theirs = (chosen_keys(x, ks, ke, band.s_kv) for x in (a, b))
    only_one = mine ^ theirs
    far = only_one & (chunk.above | chunk.below | chunk.score.isnan())
    keys, stray = [(mask.sum(1)) for mask in (mine, theirs)], [_stray(x, ks, ke) for x in (a, b)]
    uneven = (keys[0] != keys[1]) | (stray[0] != stray[1])
    found.keys += int(only_one.sum())
    found.far_keys += int(far.sum())
    found.far[rows] |= far.any(1) | uneven
    for label, mask in zip(labels, (mine, theirs)):
        add_places(found.places, f"only in {label}", far & mask, chunk.row0)
    for row, key in far.nonzero()[: SHOWN - len(found.first)].tolist():
        who = labels[0] if bool(mine[row, key]) else labels[1]
        found.first.append(f"{at(chunk, band, row, key)}: only in {who}")
    for row in uneven.nonzero()[: SHOWN - len(found.first), 0].tolist():
        counts = ", ".join(f"{label} has {int(n[row])} keys and {int(s[row])} stray entries" for label, n, s in zip(labels, keys, stray))
        found.first.append(f"[row {chunk.row0 + row}]: {counts}")


def add_places(places: Places, kind: str, mask: torch.Tensor, row0: int) -> None:
    """Add the (row, key) of bool [rows, s_kv] to those of one kind, up to PLACES of them. row0: the number of its first row."""
    known = places.get(kind, torch.empty(0, 2, dtype=torch.int64))
    found = mask.nonzero()[: PLACES - len(known)].cpu()
    found[:, 0] += row0
    places[kind] = torch.cat([known, found])


def _stray(indices: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: entries that are neither -1 nor a key of the row's window, and repeated ones."""
    ordered = indices.sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)
    return ((indices != -1) & ((indices < ks[:, None]) | (indices >= ke[:, None]))).sum(1) + again.sum(1)


def at(chunk: Chunk, band: Band, row: int, key: int) -> str:
    """Where a key is and how it scores, as text. row: within the chunk."""
    number = chunk.row0 + row
    return (f"[row {number}, key {key} = ks + {key - int(band.ks[number])}] score {float(chunk.score[row, key]):.9g}, "
            f"k-th {float(chunk.kth[row, 0]):.9g}, margin {float(band.eps[number]):.3g}")
