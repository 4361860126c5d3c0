"""A case's tensors: the same bytes on every device, and indices as the row pattern says."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from profiles import many

from arms.lengths import backscan_torch
from cases import SparsePrefillCase, parse_case, values
from cases.counter import bits, digest
from cases.inputs import make_inputs
from cases.rows import indices, row_plan
from cases.sparse_prefill import ORDERS, ROWS, SINKS, TAILS, VALUES
from cases.strategies import sparse_prefill_cases

GOLDEN = [line.split(" ", 1) for line in (Path(__file__).parent / "golden_inputs.txt").read_text(encoding="utf-8").splitlines()]
CPU = torch.device("cpu")


def rows_of(case: SparsePrefillCase) -> tuple[torch.Tensor, torch.Tensor]:
    """indices [s_q, topk] and valid counts [s_q] without the values."""
    plan = row_plan(case, CPU)
    return indices(case, plan)[:, 0].long(), plan.valid


def inside(index: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """bool [s_q, topk]: before the row's valid count."""
    return torch.arange(index.shape[1]) < valid[:, None]


# --- the same bytes everywhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("want", "text"), GOLDEN)
def test_inputs_hash_to_the_golden_table(want: str, text: str, device: str) -> None:
    assert make_inputs(parse_case(text), device).digests()["all"] == want


def test_golden_table_covers_every_pattern() -> None:
    cases = [parse_case(text) for _, text in GOLDEN]
    for key, allowed in {"rows": ROWS, "values": VALUES, "tail": TAILS, "order": ORDERS, "sink": SINKS, "dtype": ("bf16", "fp8")}.items():
        assert {getattr(case, key) for case in cases} == set(allowed), key
    assert {(case.dtype, case.values) for case in cases} == {(d, v) for d in ("bf16", "fp8") for v in VALUES}


def test_every_key_that_shapes_tensors_changes_the_hash() -> None:
    base = "sparse_prefill:s_q=12,s_kv=200,h_q=2,rows=mixed,topk=100"
    changes = ("seed=1", "holes=0.5", "lead=2", "order=ascending", "tail=wild", "values=integer", "sink=normal", "pad_rows=3",
               "metadata_rows=3", "dtype=fp8", "index_topk=50")
    hashes = {make_inputs(parse_case(text), "cpu").digests()["all"] for text in [base, *(f"{base},{change}" for change in changes)]}
    assert len(hashes) == 1 + len(changes)


@pytest.mark.parametrize("text", [GOLDEN[4][1], GOLDEN[7][1], GOLDEN[9][1], GOLDEN[13][1]])
def test_values_made_in_chunks_are_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_inputs(parse_case(text), "cpu").digests()
    monkeypatch.setattr(values, "_CHUNK", 3 * 576)
    assert make_inputs(parse_case(text), "cpu").digests() == whole


def test_draws_of_a_row_do_not_depend_on_the_other_rows() -> None:
    rows = torch.arange(50)
    assert torch.equal(bits(3, "x", rows, 70)[17:31], bits(3, "x", rows[17:31], 70))
    assert not torch.equal(bits(3, "x", rows, 70), bits(3, "y", rows, 70))
    assert not torch.equal(bits(3, "x", rows, 70), bits(4, "x", rows, 70))


def test_digest_sees_one_byte_the_dtype_and_the_shape() -> None:
    tensor = torch.arange(1002, dtype=torch.int16)
    seen = {digest(tensor), digest(tensor.view(torch.bfloat16)), digest(tensor.view(501, 2)), digest(tensor[:-1]), digest(None)}
    for at in (0, 1, 1000, 2003):
        changed = tensor.clone()
        changed.view(torch.uint8)[at] ^= 1
        seen.add(digest(changed))
    assert len(seen) == 9
    assert digest(torch.stack([tensor, tensor], 1)[:, 0]) == digest(tensor)  # strides are not part of it


def test_digest_sees_two_words_change_places() -> None:
    assert digest(torch.tensor([1, 2, 3])) != digest(torch.tensor([2, 1, 3]))


# --- indices ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=many(120))
@given(sparse_prefill_cases(max_work=1 << 14))
def test_indices_hold_to_their_plan(case: SparsePrefillCase) -> None:
    """Whatever the case: in the window and unique before the valid count, the tail's own kind after it."""
    index, valid = rows_of(case)
    plan = row_plan(case, CPU)
    before = inside(index, valid)
    named = before & (index >= 0)
    assert bool((valid <= case.limit).all()) and bool((valid <= plan.visible).all())
    assert bool((valid[case.s_q - case.pad_rows :] == 0).all())
    assert bool(((index >= plan.kv_start[:, None]) & (index < (plan.kv_start + plan.visible)[:, None]) | ~named).all())
    assert bool((plan.kv_start + plan.visible <= case.s_kv).all())
    assert bool((index[before & ~named] == -1).all())
    assert bool((index[:, : case.lead][before[:, : case.lead]] == -1).all())
    for row, keep in zip(index, named):
        assert len(row[keep].unique()) == int(keep.sum())
    tail = index[~before]
    in_range = (tail >= 0) & (tail < case.s_kv)
    assert bool({"pad": tail == -1, "wild": ~in_range, "live": in_range}[case.tail].all())


@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled"])
def test_order_of_a_row(order: str) -> None:
    index, _ = rows_of(SparsePrefillCase(s_q=5, s_kv=1000, topk=200, order=order))
    steps = index.diff(dim=1)
    if order == "shuffled":
        assert bool((steps > 0).any(1).all()) and bool((steps < 0).any(1).all())
    else:
        assert bool((steps > 0).all() if order == "ascending" else (steps < 0).all())


def test_valid_counts_of_each_row_pattern() -> None:
    def valid(rows: str, **fields: int) -> torch.Tensor:
        return rows_of(SparsePrefillCase(**{"s_q": 300, "s_kv": 1000, "topk": 257, "rows": rows, **fields}))[1]

    assert valid("full").unique().tolist() == [257]
    assert valid("full", index_topk=200).unique().tolist() == [200]
    assert valid("full", s_kv=100).unique().tolist() == [100]
    assert valid("half").unique().tolist() == [128]
    assert valid("ramp").tolist() == [*range(1, 258)] + [257] * 43
    assert valid("allpad").unique().tolist() == [0]
    short, ragged = valid("short"), valid("ragged")
    assert int(short.min()) == 1 and 60 <= int(short.max()) <= 64 and len(short.unique()) > 50
    assert int(ragged.min()) <= 5 and 250 <= int(ragged.max()) <= 257 and len(ragged.unique()) > 150


def test_mixed_rows_hold_every_border_and_end_in_padding() -> None:
    _, valid = rows_of(SparsePrefillCase(s_q=104, s_kv=1000, topk=257, rows="mixed"))
    assert {0, 1, 63, 64, 65, 127, 128, 129, 257} <= set(valid.tolist())
    assert valid[-13:].tolist() == [0] * 13
    assert int(valid[-14]) > 0 or int(valid[-15]) > 0


def test_causal_rows_see_their_own_request_up_to_themselves() -> None:
    case = parse_case("sparse_prefill:s_q=10,s_kv=512,topk=128,rows=causal,requests=3/200+1+4/7,pad_rows=2,index_topk=100")
    plan = row_plan(case, CPU)
    assert plan.kv_start.tolist() == [0] * 3 + [200] + [201] * 4 + [0, 0]
    assert plan.visible[:8].tolist() == [198, 199, 200, 1, 4, 5, 6, 7]
    assert plan.valid.tolist() == [100, 100, 100, 1, 4, 5, 6, 7, 0, 0]
    # The metadata states the whole kv length; clamping it to index_topk is for the metadata source to do.
    assert make_inputs(case, "cpu").seqlens.tolist() == [198, 199, 200, 1, 4, 5, 6, 7, 0, 0]


@pytest.mark.parametrize(("rows", "want"), [(0, [4, 5, 6, 0]), (2, [4, 5]), (6, [4, 5, 6, 0, 0, 0])])
def test_metadata_has_as_many_rows_as_asked_for(rows: int, want: list[int]) -> None:
    case = SparsePrefillCase(s_q=4, s_kv=6, topk=128, rows="causal", requests="3/6", pad_rows=1, metadata_rows=rows)
    seqlens = make_inputs(case, "cpu").seqlens
    assert seqlens.tolist() == want and seqlens.dtype == torch.int32


def test_holes_are_the_asked_share_and_make_backscan_shorter_than_metadata() -> None:
    case = SparsePrefillCase(s_q=200, s_kv=2000, h_q=1, topk=256, rows="ragged", holes=0.1)
    index, valid = rows_of(case)
    before = inside(index, valid)
    share = float((index[before] == -1).float().mean())
    assert 0.09 < share < 0.11
    assert bool((backscan_torch(index) < valid).any())
    everything, _ = rows_of(SparsePrefillCase(s_q=20, s_kv=2000, topk=256, holes=1.0))
    assert bool((everything == -1).all())


def test_wild_tails_hold_the_extremes_of_int32_and_both_sides_of_s_kv() -> None:
    case = SparsePrefillCase(s_q=20, s_kv=1000, topk=256, rows="half", tail="wild")
    index, _ = rows_of(case)
    assert set(index[:, 128:].unique().tolist()) == {-1, -2, -1000, -(1 << 31), 1000, 1001, 1256, (1 << 31) - 1}


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("lead", [0, 5])
def test_peaked_key_stands_where_it_is_asked_for(where: str, lead: int) -> None:
    case = parse_case("sparse_prefill:s_q=42,s_kv=700,topk=256,rows=causal,requests=20/300+20/40,pad_rows=2,values=peaked,"
                      f"peak_at={where},lead={lead}")
    index, valid = rows_of(case)
    plan = row_plan(case, CPU)
    for row, count, key in zip(index[:40], valid[:40].tolist(), plan.kv_start[:40].tolist()):
        at = {"first": lead, "middle": (count - 1) // 2, "last": count - 1}[where]
        assert int(row[at]) == key
        assert int((row[:count] == key).sum()) == 1


def test_named_rows_are_those_that_a_valid_entry_names() -> None:
    inputs = make_inputs(parse_case("sparse_prefill:s_q=12,s_kv=300,h_q=1,rows=mixed,tail=live,holes=0.3,topk=100"), "cpu")
    want = torch.zeros(300, dtype=torch.bool)
    for row, count in zip(inputs.indices[:, 0].tolist(), inputs.valid.tolist()):
        for key in row[:count]:
            if key >= 0:
                want[key] = True
    assert torch.equal(inputs.named, want) and bool(want.any()) and not bool(want.all())
    assert int(inputs.valid_entries.sum()) == sum(k >= 0 for r, n in zip(inputs.indices[:, 0].tolist(), inputs.valid) for k in r[: int(n)])
