"""A check's picture as paths of an SVG: for each level one path, whose colour the page's style gives."""
from __future__ import annotations

import base64
import binascii
import dataclasses
import zlib

from harness.verdicts import Picture

WIDTH, CELL, HIGHEST, LOWEST = 240.0, 8.0, 200.0, 16.0


@dataclasses.dataclass(frozen=True)
class Drawn:
    """paths: (level, path data in cells); width, height: of the grid in pixels; sx, sy: pixels a cell; rows, columns: (position in pixels,
    label) along the axes; title, note: as text."""

    paths: list[tuple[int, str]]
    width: float
    height: float
    sx: float
    sy: float
    rows: list[tuple[float, str]]
    columns: list[tuple[float, str]]
    title: str
    across: str
    note: str
    told: str


def digits(picture: Picture) -> list[str]:
    """The grid's lines. Raises ValueError where the picture is not one."""
    try:
        text = zlib.decompress(base64.b64decode(picture.cells, validate=True)).decode("ascii")
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a picture: {error}") from None
    if len(text) != picture.width * picture.height or not text.isdigit():
        raise ValueError(f"not a picture: {len(text)} cells, not {picture.height} x {picture.width}")
    return [text[start : start + picture.width] for start in range(0, len(text), picture.width)]


def draw(picture: Picture | None) -> Drawn | None:
    """None where there is none, or where it cannot be read."""
    try:
        grid = digits(picture) if picture else []
    except ValueError:
        return None
    if not grid or picture is None:
        return None
    width = min(WIDTH, max(CELL * 3, 24.0 * picture.width))
    height = max(LOWEST, min(HIGHEST, CELL * picture.height))
    bad_rows = sum(line.strip("0") != "" for line in grid)
    what = {"head": "heads", "column": "columns", "key": "keys"}.get(picture.across, "")
    size = f"{picture.rows:,} rows" + (f" x {picture.columns:,} {what}" if what else "")
    return Drawn(
        [(level, _path(grid, str(level))) for level in range(1, 10) if any(str(level) in line for line in grid)],
        width, height, width / picture.width, height / picture.height, _ticks(picture.rows, height, 5),
        _ticks(picture.columns, width, 4) if what else [], f"{picture.output or 'where'}: {size}", what, picture.note,
        f"{size}: bad elements in {bad_rows} of {len(grid)} bands of rows and "
        f"{sum(any(line[at] != '0' for line in grid) for at in range(picture.width))} of {picture.width} bands of columns")


def _path(grid: list[str], digit: str) -> str:
    """Rectangles over the runs of a digit in each line; equal runs of lines below each other are one."""
    open_runs: dict[tuple[int, int], int] = {}
    parts: list[str] = []
    for y, line in enumerate([*grid, ""]):
        runs, at = set(), 0
        while (at := line.find(digit, at)) >= 0:
            end = at + len(line[at:]) - len(line[at:].lstrip(digit))
            runs.add((at, end))
            at = end
        for start, end in sorted(run for run in open_runs if run not in runs):
            top = open_runs.pop((start, end))
            parts.append(f"M{start} {top}h{end - start}v{y - top}h-{end - start}z")
        for run in runs:
            open_runs.setdefault(run, y)
    return "".join(parts)


def _ticks(count: int, length: float, most: int) -> list[tuple[float, str]]:
    """Numbers of rows or columns beside the middle of where they are: the first, the last, and round ones between."""
    if count <= most:
        return [((number + 0.5) / count * length, str(number)) for number in range(count)]
    step = next(size * 10**power for power in range(12) for size in (1, 2, 5) if count / (size * 10**power) <= most)
    if count & (count - 1) == 0:  # of a power of two, so are the steps
        step = max(1, count // (1 << (most.bit_length() - 1)))
    places = [number for number in range(0, count, step) if count - 1 - number >= step / 2 or number == 0]
    return [((number + 0.5) / count * length, f"{number:,}") for number in [*places, count - 1]]
