"""Pictures of where differences are: made from masks by the worker's side, stored in a record, drawn on a page."""
from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch

from harness.locate.localise import describe_rows
from harness.locate.picture import HEIGHT, LARGEST, WIDTH, _sizes, draw, draw_members, keep_small, locate
from harness.locate.topk_localise import PLACES, Windows
from harness.record import Record
from harness.verdicts import Check, Picture, Verdict
from reports.html import picture


def mask(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def windows(rows: int, keys: int) -> Windows:
    return Windows(torch.zeros(rows, dtype=torch.int64), torch.full((rows,), keys), 16, ((0, rows, 0, keys),))


def test_bad_rows_are_where_they_are() -> None:
    bad = mask(6, 4)
    bad[2:4] = True
    drawn = draw(bad, "lse")
    assert (drawn.output, drawn.rows, drawn.columns, drawn.across) == ("lse", 6, 4, "head")
    assert picture.digits(drawn) == ["0000", "0000", "9999", "9999", "0000", "0000"]


def test_columns_are_shown_where_the_fault_is_one_of_columns() -> None:
    bad = mask(8, 4, 128)
    bad[..., 64:] = True
    drawn = draw(bad, "out")
    assert (drawn.across, drawn.columns, drawn.note) == ("column", 128, "all heads together")
    assert picture.digits(drawn) == ["0" * 32 + "9" * 32] * 8


def test_heads_are_shown_where_the_fault_is_one_of_heads() -> None:
    bad = mask(8, 4, 128)
    bad[:, 1] = True
    drawn = draw(bad, "out")
    assert (drawn.across, drawn.columns, drawn.note) == ("head", 4, "all columns together")
    assert picture.digits(drawn) == ["0900"] * 8


def test_many_rows_and_columns_become_a_small_grid_that_shows_a_single_element() -> None:
    bad = mask(8192, 4, 512)
    bad[4100, 0, 300] = True
    drawn = draw(bad, "out")
    grid = picture.digits(drawn)
    assert (len(grid), {len(line) for line in grid}) == (HEIGHT, {WIDTH})
    found = [(y, x) for y, line in enumerate(grid) for x, digit in enumerate(line) if digit != "0"]
    assert found == [(4100 * HEIGHT // 8192, 300 * WIDTH // 512)]


@pytest.mark.parametrize(("of_10000", "digit"), [(0, "0"), (1, "1"), (2, "2"), (10, "2"), (100, "3"), (101, "4"), (300, "4"), (1000, "5"),
                                                 (3000, "6"), (6000, "7"), (9999, "8"), (10000, "9")])
def test_digits_are_shares(of_10000: int, digit: str) -> None:
    cell = torch.arange(10_000) < of_10000
    drawn = draw(cell.repeat(WIDTH)[None, None], "out")
    assert set(picture.digits(drawn)[0]) == {digit}


def test_wrong_keys_are_shown_by_row_and_key() -> None:
    rows = mask(4)
    rows[3] = True
    drawn = draw_members(rows, windows(4, 32), {"dropped": torch.tensor([[3, 31], [3, 0]]), "do not belong": torch.zeros(0, 2).long()})
    assert (drawn.output, drawn.across, drawn.note) == ("keys that are dropped", "key", "")
    assert picture.digits(drawn) == ["0" * 32] * 3 + ["9" + "0" * 30 + "9"]


def test_where_not_all_wrong_keys_are_known_the_picture_says_so_and_shows_no_more_rows() -> None:
    rows, every = mask(500), torch.arange(PLACES)
    rows[:] = True
    drawn = draw_members(rows, windows(500, 64), {"dropped": torch.stack([every // 64, every % 64], 1)})
    assert drawn.rows == PLACES // 64
    assert drawn.note == "the first 4,096 of a kind alone, of 500 rows"


def test_without_places_the_rows_alone_are_shown() -> None:
    rows = mask(4)
    rows[1] = True
    drawn = draw_members(rows, windows(4, 32), {})
    assert (drawn.across, picture.digits(drawn)) == ("", ["0", "9", "0", "0"])


# --- in a record ------------------------------------------------------------------------------------------------------


def noise(seed: int) -> torch.Tensor:
    return torch.rand(4096, 64, generator=torch.Generator().manual_seed(seed)) < 0.02


def located(name: str, bad: torch.Tensor, verdict: Verdict = Verdict.FAILED) -> Check:
    check = Check(name, verdict)
    rows = len(bad)
    entries = torch.ones(rows, 16, dtype=torch.bool)
    locate(check, bad, describe_rows(None, entries, torch.full((rows,), 16)), "lse")
    return check


def test_an_arm_keeps_so_many_pictures_as_there_is_room_for_the_most_telling_first() -> None:
    checks = [located("padded", noise(1)), located("rows-permuted", noise(2)), located("batch-split", noise(3)),
              located("reference", noise(4))]
    keep_small(checks)
    assert checks[3].picture is not None
    assert checks[2].picture is None
    assert sum(len(check.picture.cells) for check in checks if check.picture) <= LARGEST
    assert all(check.where for check in checks)


def test_a_check_that_passes_by_its_promise_keeps_no_picture() -> None:
    check = located("none-vs-metadata", noise(1), Verdict.PASSED)
    keep_small([check])
    assert check.picture is None


def test_a_record_with_and_one_without_a_picture_load() -> None:
    check = located("reference", noise(1))
    record = Record("sparse_prefill:", "k/none", Verdict.FAILED, checks=[check])
    again = msgspec.json.decode(msgspec.json.encode(dataclasses.asdict(record)), type=Record)
    assert again.checks[0].picture == check.picture
    old = msgspec.json.encode(dataclasses.asdict(record)).replace(b'"picture"', b'"once"')
    assert msgspec.json.decode(old, type=Record).checks[0].picture is None


# --- drawn ------------------------------------------------------------------------------------------------------------


def test_runs_of_cells_become_rectangles() -> None:
    assert picture._path(["0990", "0990", "9000"], "9") == "M1 0h2v2h-2zM0 2h1v1h-1z"
    assert picture._path(["000"], "9") == ""


def test_what_is_no_picture_is_not_drawn() -> None:
    right = draw(mask(4, 4) | True, "lse")
    assert picture.draw(right) is not None
    for broken in ("", "????", right.cells[:-8]):
        assert picture.draw(dataclasses.replace(right, cells=broken)) is None
    assert picture.draw(dataclasses.replace(right, width=3)) is None
    assert picture.draw(None) is None


def test_axes_name_the_first_and_the_last_row() -> None:
    drawn = picture.draw(draw(mask(437, 64) | True, "lse"))
    assert drawn is not None
    assert (drawn.rows[0][1], drawn.rows[-1][1]) == ("0", "436")
    assert [label for _, label in drawn.columns] == ["0", "16", "32", "48", "63"]
    assert drawn.told.startswith("437 rows x 64 heads: bad elements in 48 of 48")


def test_a_picture_is_plain_data() -> None:
    assert msgspec.json.decode(b'{"output":"o","rows":1,"columns":1,"across":"","height":1,"width":1,"cells":""}', type=Picture).note == ""


@pytest.mark.parametrize(("count", "cells"), [(1, 1), (7, 3), (64, 64), (100, 48), (3072, 64)])
def test_every_element_falls_into_one_cell(count: int, cells: int) -> None:
    assert _sizes(count, cells).tolist() == torch.bincount(torch.arange(count) * cells // count, minlength=cells).tolist()


def test_junk_for_a_key_takes_no_memory() -> None:
    """A picture as wide as the largest int32 has as many cells as any other."""
    assert int(_sizes(1 << 31, 64).sum()) == 1 << 31
