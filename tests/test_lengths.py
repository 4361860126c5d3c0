"""topk_length from its three sources: backscan in every implementation, and what the metadata hands over."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from profiles import many
from trials import inputs_of

from arms.lengths import SOURCES, backscan, backscan_torch, metadata_lengths
from cases import parse_case
from cases.inputs import make_inputs
from cases.rows import indices, row_plan
from cases.strategies import sparse_prefill_cases
from harness.checks import lengths as judge
from harness.lengths import other_backscans
from harness.locate.localise import describe_rows
from harness.verdicts import Check, Verdict

ROOT = Path(__file__).parent.parent
WIDTHS = (100, 128, 192, 256, 2048)
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1


def with_valid_at(topk: int, *positions: int, value: int = 3) -> torch.Tensor:
    """One row of -1, with `value` at some positions."""
    row = torch.full((1, topk), -1, dtype=torch.int32)
    row[0, list(positions)] = value
    return row


BACKSCAN = {
    "trailing pads": (with_valid_at(200, *range(70)), 70),
    "leading hole": (with_valid_at(200, *range(64, 100)), 100),
    "holes inside": (with_valid_at(200, 0, 5, 99), 100),
    "holes at the end of the valid range": (with_valid_at(200, 0, 1, 50), 51),
    "all pad": (with_valid_at(200), 1),
    "full": (with_valid_at(200, *range(200)), 200),
    "one valid at 0": (with_valid_at(200, 0), 1),
    "one valid at the end": (with_valid_at(200, 199), 200),
    "width 1, valid": (with_valid_at(1, 0), 1),
    "width 1, pad": (with_valid_at(1), 1),
    "key 0 counts": (with_valid_at(200, 6, value=0), 7),
    "ids at or past s_kv count": (with_valid_at(200, 150, value=INT_MAX), 151),
    "other negatives do not": (torch.tensor([[4, -1, 7, -2, INT_MIN, -1]], dtype=torch.int32), 3),
    **{f"length {n}": (with_valid_at(256, *range(n)), n) for n in (63, 64, 65, 127, 128, 129, 255)},
}


def sweep(topk: int) -> torch.Tensor:
    """Rows [n, topk] with the last valid entry at every border, and rows with holes, wild tails and nothing."""
    ends = sorted({end for end in (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, topk - 1, topk) if end <= topk})
    position = torch.arange(topk)
    packed = torch.stack([torch.where(position < end, position, -1) for end in ends])
    holes = torch.where(position % 7 == 3, packed, -1)
    lead = torch.where(position < 64, -1, packed)
    wild = torch.where(packed < 0, torch.where(position % 2 == 0, INT_MIN, -2), INT_MAX)
    return torch.cat([packed, holes, lead, wild]).to(torch.int32)


@pytest.mark.parametrize("name", BACKSCAN)
def test_backscan(name: str) -> None:
    row, want = BACKSCAN[name]
    for scan in (backscan_torch, backscan):  # on the CPU they are one function
        got = scan(row)
        assert got.tolist() == [want] and got.dtype == torch.int32


@settings(deadline=None, max_examples=many(60))
@given(sparse_prefill_cases(max_work=1 << 13))
def test_backscan_is_the_naive_scan_and_never_cuts_a_valid_key(case: object) -> None:
    rows = indices(case, row_plan(case, torch.device("cpu")))[:, 0]  # type: ignore[arg-type]
    want = [max([1, *(at + 1 for at, index in enumerate(row) if index >= 0)]) for row in rows.tolist()]
    assert backscan_torch(rows).tolist() == want


@pytest.mark.parametrize("topk", WIDTHS)
def test_sweep_holds_what_its_name_says(topk: int) -> None:
    scanned = set(backscan_torch(sweep(topk)).tolist())
    assert {1, 64, topk} <= scanned and bool((sweep(topk) == INT_MIN).any())


def test_triton_backscan_equals_torch_in_the_interpreter() -> None:
    """In a process of its own: triton reads TRITON_INTERPRET when it is imported."""
    code = f"""
import torch
from arms.backscan_triton import backscan_triton
from arms.lengths import backscan_torch
from test_lengths import sweep
for topk in {WIDTHS}:
    rows = sweep(topk)
    wider = torch.full((len(rows), topk + 37), 5, dtype=torch.int32)  # valid entries beside each row: reading them shows
    wider[:, :topk] = rows
    for given in (rows, wider[:, :topk], rows.repeat_interleave(2, 0)[::2]):
        got = backscan_triton(given)
        assert got.dtype == torch.int32
        assert torch.equal(got, backscan_torch(rows)), (topk, given.stride(), got, backscan_torch(rows))
print("equal")
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


@pytest.mark.cuda
@pytest.mark.parametrize("topk", WIDTHS)
def test_every_backscan_on_the_gpu_is_the_same(topk: int) -> None:
    inputs = make_inputs(parse_case(f"sparse_prefill:s_q=40,h_q=1,s_kv=4096,topk={topk},rows=mixed,holes=0.2,tail=wild"), "cuda")
    rows = sweep(topk).cuda()
    inputs.indices = torch.cat([inputs.indices, rows[:, None]])
    found = other_backscans(inputs)
    assert "triton" in found
    for name, got in found.items():
        assert torch.equal(got.cpu(), backscan_torch(inputs.indices[:, 0].cpu())), name
    wider = torch.full((len(rows), topk + 37), 5, dtype=torch.int32, device="cuda")
    wider[:, :topk] = rows
    assert torch.equal(backscan(wider[:, :topk]), backscan_torch(rows))


# --- metadata ---------------------------------------------------------------------------------------------------------


def test_metadata_is_clamped_and_keeps_zero() -> None:
    seqlens = torch.tensor([0, 1, 127, 128, 129, 5000], dtype=torch.int32)
    got = metadata_lengths(seqlens, 128, 6)
    assert got is not None and got.tolist() == [0, 1, 127, 128, 128, 128] and got.dtype == torch.int32
    assert seqlens.tolist() == [0, 1, 127, 128, 129, 5000]


@pytest.mark.parametrize("s_q", [5, 7])
def test_metadata_of_another_row_count_is_not_handed_over(s_q: int) -> None:
    assert metadata_lengths(torch.ones(6, dtype=torch.int32), 128, s_q) is None


def test_sources_of_a_case() -> None:
    inputs = inputs_of("sparse_prefill:s_q=6,s_kv=300,h_q=1,topk=64,rows=causal,requests=2/200+2,pad_rows=2,index_topk=50")
    derived = {name: source.prepare(inputs)() for name, source in SOURCES.items()}
    assert list(derived) == ["none", "backscan", "metadata"]
    assert derived["none"] is None
    assert derived["backscan"].tolist() == [50, 50, 1, 2, 1, 1]
    assert derived["metadata"].tolist() == [50, 50, 1, 2, 0, 0]


@pytest.mark.parametrize("rows", [3, 5])
def test_the_guard_of_a_case_falls_back_to_none(rows: int) -> None:
    inputs = inputs_of(f"sparse_prefill:s_q=4,s_kv=20,h_q=1,topk=8,metadata_rows={rows}")
    assert SOURCES["metadata"].prepare(inputs)() is None


# --- the check on lengths ---------------------------------------------------------------------------------------------


def judged(text: str, source: str, length: torch.Tensor) -> Check:
    inputs = inputs_of(text)
    check = judge(source, length, {"torch": backscan_torch(inputs.indices[:, 0])}, inputs.valid_entries, inputs.indices,
                  describe_rows(length, inputs.valid_entries, inputs.valid))
    assert check is not None
    return check


@pytest.mark.parametrize("extra", ["", ",holes=0.3", ",tail=wild", ",lead=5", ",tail=live,holes=0.3", ",holes=1.0"])
def test_right_lengths_pass(extra: str) -> None:
    text = f"sparse_prefill:s_q=26,s_kv=300,h_q=1,topk=200,rows=mixed{extra}"
    inputs = inputs_of(text)
    for source in ("backscan", "metadata"):
        length = SOURCES[source].prepare(inputs)()
        assert length is not None and judged(text, source, length).verdict is Verdict.PASSED


@pytest.mark.parametrize(("source", "step", "extra", "problem"), [
    ("backscan", 1, "", "the handed backscan is not 1 + last index >= 0"),
    ("backscan", -1, "", "the handed backscan is not 1 + last index >= 0"),
    ("metadata", -1, "", "a valid entry lies at or past the length"),
    ("metadata", -1, ",tail=live", "a valid entry lies at or past the length"),
    ("metadata", 1, "", "max(metadata, 1) != backscan on a row without holes")])
def test_a_wrong_length_in_one_row_is_found(source: str, step: int, extra: str, problem: str) -> None:
    text = f"sparse_prefill:s_q=20,s_kv=300,h_q=1,topk=200,rows=half{extra}"
    length = SOURCES[source].prepare(inputs_of(text))()
    assert length is not None
    length = length.clone()
    length[7] += step
    check = judged(text, source, length)
    assert check.verdict is Verdict.FAILED and check.detail == problem and check.bad == 1
    assert check.where[0] == "rows 7 (1 of 20)" and check.first[0].startswith("[7] ")


def test_another_implementation_that_differs_is_named() -> None:
    inputs = inputs_of("sparse_prefill:s_q=4,s_kv=20,h_q=1,topk=8,rows=half")
    scan = backscan_torch(inputs.indices[:, 0])
    check = judge("backscan", scan, {"torch": scan, "triton": scan, "theirs": scan + (torch.arange(4) == 2)}, inputs.valid_entries,
                  inputs.indices, describe_rows(scan, inputs.valid_entries, inputs.valid))
    assert check is not None and check.verdict is Verdict.FAILED
    assert check.detail == "backscan by theirs is not 1 + last index >= 0" and check.bad == 1


def test_no_length_is_not_judged() -> None:
    inputs = inputs_of("sparse_prefill:s_q=4,s_kv=20,h_q=1,topk=8")
    rows = describe_rows(None, inputs.valid_entries, inputs.valid)
    assert judge("none", None, {}, inputs.valid_entries, inputs.indices, rows) is None
