"""Where the wrong members of a choice are: requests, rows, window lengths, positions in the window, and the border that fits best."""
from __future__ import annotations

import dataclasses

import torch

from harness.locate.localise import EDGES, best_fit, ranges

TILE = 128
POWERS = tuple(1 << power for power in range(8, 21))
SAMPLED_ROWS = 64
TELLING = 1 / 3  # a border that most of the wrong members lie behind says something if at most this share of all keys does
PLACES = 4096  # wrong members of one kind that are looked at

Places = dict[str, torch.Tensor]
"""What is wrong with some members ("dropped"), and where they are: int64 [n, 2], (row, key)."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """What is known of each row, on the CPU. ks, ke int64 [num_q]; requests: (row0, row1, kv0, kv1) of each."""

    ks: torch.Tensor
    ke: torch.Tensor
    topk: int
    requests: tuple[tuple[int, int, int, int], ...]

    @property
    def length(self) -> torch.Tensor:
        """int64 [num_q]: keys in the window."""
        return (self.ke - self.ks).clamp(min=0)


def localise_members(bad_rows: torch.Tensor, windows: Windows, places: Places | None = None) -> list[str]:
    """Lines that say where the bad rows and members are. bad_rows: bool [num_q]."""
    bad_rows = bad_rows.cpu()
    if not bool(bad_rows.any()):
        return []
    length = windows.length[bad_rows]
    keys = "key" if bool((length == 1).all()) else "keys"
    lines = [f"rows {ranges(bad_rows)}", *_of_requests(bad_rows, windows), f"windows of {_span(length)} {keys} (topk {windows.topk})"]
    sets, numbers = row_sets(windows), by_number(windows)
    pattern = best_fit(bad_rows, sets | numbers, least=0.9) or best_fit(bad_rows, sets)
    lines += [pattern] if pattern else []
    return lines + [line for kind, at in (places or {}).items() if len(at) for line in _keys(kind, at.cpu(), windows)]


def _span(values: torch.Tensor) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _of_requests(bad_rows: torch.Tensor, windows: Windows) -> list[str]:
    if len(windows.requests) < 2:
        return []
    parts = []
    for number, (row0, row1, kv0, kv1) in enumerate(windows.requests):
        if bool(bad_rows[row0:row1].any()):
            parts.append(f"request {number} (keys {kv0}..{kv1 - 1}): its rows {ranges(bad_rows[row0:row1])}")
    more = f"; {len(parts) - 4} more requests" if len(parts) > 4 else ""
    return ["; ".join(parts[:4]) + more]


def row_sets(windows: Windows) -> dict[str, torch.Tensor]:
    """Each border's name and the rows that it would make wrong: bool [num_q]."""
    length = windows.length
    sets = {
        "rows without a key": length == 0,
        "rows with fewer keys than topk": length < windows.topk,
        "rows with exactly topk keys": length == windows.topk,
        "rows with more keys than topk": length > windows.topk,
        "rows whose window begins after key 0": windows.ks > 0,
        "rows whose window is no multiple of 4": length % 4 != 0,
        "rows whose window is no multiple of 64": length % 64 != 0,
        f"rows whose window is no multiple of {TILE}": length % TILE != 0,
    }
    number = torch.arange(len(length))
    for number_of, (row0, row1, _, _) in enumerate(windows.requests[:64]):
        sets[f"the rows of request {number_of}"] = (number >= row0) & (number < row1)
    sets |= {f"rows of more than {times} * topk keys": length > times * windows.topk for times in (2, 4, 8)}
    return sets | {f"rows of more than {edge} keys": length > edge for edge in POWERS}


def by_number(windows: Windows) -> dict[str, torch.Tensor]:
    """The same for borders between rows by their number alone. On a few rows some of them fits nearly anything, so it must fit well."""
    num_q = len(windows.ks)
    number = torch.arange(num_q)
    firsts = [row0 for row0, row1, _, _ in windows.requests if row1 > row0]
    lasts = [row1 - 1 for row0, row1, _, _ in windows.requests if row1 > row0]
    sets = {
        "the last rows of the batch, past the last whole block of 4": number >= num_q - num_q % 4,
        "the first row of the batch": number == 0, "the last row of the batch": number == num_q - 1,
        "the first row of each request": torch.isin(number, torch.tensor(firsts)),
        "the last row of each request": torch.isin(number, torch.tensor(lasts)), "every other row": number % 2 == 1,
    }
    sets |= {f"rows from {edge} on": number >= edge for edge in EDGES if edge < num_q}
    return sets | {f"the first rows of each {size}": number % size == 0 for size in (4, 8, 64)}


def key_borders(position: torch.Tensor, length: torch.Tensor, key: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each border's name and which keys lie on its far side. position: key - ks; length: of the key's window; all int64 [n]."""
    end = key - position + length
    borders = {
        "the first key of the window": position == 0,
        "the last key of the window": position == length - 1,
        f"the first {TILE} keys of the window": position < TILE,
        f"the last {TILE} keys of the window": position >= length - TILE,
        f"the last, partial tile of {TILE} keys, counted from the window's start": position >= length // TILE * TILE,
        f"the last, partial tile of {TILE} keys, counted from key 0": key >= end // TILE * TILE,
        f"the first tile of {TILE} keys, counted from key 0": key // TILE == (key - position) // TILE,
        "the last, partial page of 64 keys, counted from key 0": key >= end // 64 * 64,
        "outside the window": (position < 0) | (position >= length),
        "the second half of the window": position >= length // 2,
        "the first half of the window": position < length // 2,
    }
    for edge in POWERS:
        borders |= {f"at or past position {edge} of the window": position >= edge, f"before position {edge} of the window": position < edge}
    return borders


def _keys(kind: str, places: torch.Tensor, windows: Windows) -> list[str]:
    row, key = places[:, 0], places[:, 1]
    position, length = key - windows.ks[row], windows.length[row]
    lines = [f"{kind}: positions {_span(position)} of their windows, keys {_span(key)}"
             + (f" (of the first {len(places)})" if len(places) >= PLACES else "")]
    some = row.unique()[:SAMPLED_ROWS]
    share = torch.linspace(0, 1, 512, dtype=torch.float64)
    spread = (share * (windows.length[some, None] - 1).clamp(min=0)).round().long()  # positions all over the same windows
    usual = key_borders(spread.view(-1), windows.length[some].repeat_interleave(512), (spread + windows.ks[some, None]).view(-1))
    here = key_borders(position, length, key)
    fitting = {name: float(usual[name].double().mean()) for name, inside in here.items() if float(inside.double().mean()) >= 0.9}
    if fitting:
        name = min(fitting, key=lambda border: fitting[border])
        if fitting[name] <= TELLING:
            lines.append(f"pattern: {float(here[name].double().mean()):.0%} of them are {_as_place(name)}, "
                         f"where {fitting[name]:.0%} of the keys are")
    return lines


def _as_place(name: str) -> str:
    return name if name.startswith(("at", "before", "outside")) else f"in {name}"
