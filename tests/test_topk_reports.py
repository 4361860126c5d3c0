"""The indexer's table: which arms a ratio may be of, how rows came to their results, and both families in one run."""
from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from harness.record import Record, Timing
from harness.runfolder import RunFolder, RunInfo
from harness.verdicts import Check, Verdict
from reports import evidence, failure, table, topk_table
from reports.frame import frame, margin

ROOT = Path(__file__).parent.parent
SHORT = "indexer_topk:requests=8/8192,topk=512"
LONG = "indexer_topk:requests=8/65536,topk=512"
PREFILL = "sparse_prefill:s_q=32,topk=512"


def record(arm: str, case: str = LONG, ms: float = 0.0, contract: str = "span", verdict: Verdict = Verdict.PASSED,
           ways: dict[str, int] | None = None, memory: int | None = None) -> Record:
    """A record, timed if it has a time."""
    time = Timing(contract, "L2 flushed", "alone", [ms * 900, ms * 1000, ms * 1100], clocks="1980 MHz -> 1755 MHz") if ms else None
    checks = [Check("set", verdict, "found", margins={"best left out": 0.25, "worst chosen": 0.5}), Check("shape", Verdict.PASSED)]
    return Record(case, arm, verdict, checks=checks, time=time, ways=ways or {}, memory=memory)


def rendered(records: list[Record], width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table.terminal(records))
    return console.file.getvalue()  # type: ignore[attr-defined]


def ratio_of(records: list[Record]) -> str:
    """The ratio's cell of the only row, or "" where the table has no such column."""
    head, rows = topk_table.table_of(records)
    assert head[-1] == "margin" and len(head) == len(rows[0])
    return rows[0][-2] if head[-2] == "dense / litetopk" else ""


def test_a_column_a_kernel_dense_first_and_a_row_a_case() -> None:
    records = [record("litetopk_a/litetopk", SHORT, 2.0), record("litetopk_a/litetopk", LONG, 20.0),
               record("torch_dense/dense", SHORT, 3.0), record("torch_dense/dense", LONG, 25.0)]
    head, rows = topk_table.table_of(records)
    assert head == ["case", "torch_dense\ndense", "litetopk_a\nlitetopk", "dense / litetopk", "margin"]
    assert rows == [["requests=8/8192", "PASSED\n3\n[2.85 3.15]", "PASSED\n2\n[1.9 2.1]", "1.50x", "0.5"],
                    ["requests=8/65536", "PASSED\n25\n[23.75 26.25]", "PASSED\n20\n[19 21]", "1.25x", "0.5"]]


def test_the_ratio_is_of_the_fastest_of_each_and_names_them() -> None:
    records = [record("a/dense", ms=25.0), record("b/dense", ms=20.0), record("c/litetopk", ms=30.0), record("d/litetopk", ms=16.0)]
    assert ratio_of(records) == "1.25x\nb\n/ d"


@pytest.mark.parametrize(("others", "why"), [
    ([record("d/litetopk", ms=5.0, verdict=Verdict.FAILED)], "it did not pass"),
    ([record("d/litetopk", ms=5.0, verdict=Verdict.FLAKY)], "its last timed call was another"),
    ([record("d/litetopk", ms=5.0, verdict=Verdict.VACUOUS)], "nothing was shown of it"),
    ([record("d/litetopk", ms=5.0, contract="kernel")], "another contract"),
    ([record("d/litetopk")], "not timed"),
    ([], "not run"),
    ([record("d/dense", ms=5.0)], "no litetopk"),
])
def test_there_is_no_ratio_of_what_did_not_pass_or_was_timed_otherwise(others: list[Record], why: str) -> None:
    assert ratio_of([record("b/dense", ms=20.0), *others]) == "", why


def test_a_wrong_arm_that_is_faster_lends_nothing_to_the_ratio() -> None:
    records = [record("b/dense", ms=20.0), record("c/litetopk", ms=16.0), record("d/litetopk", ms=1.0, verdict=Verdict.FAILED)]
    assert ratio_of(records) == "1.25x"


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.FLAKY])
def test_a_wrong_dense_is_a_base_only_where_no_right_one_is_and_is_called_so(verdict: Verdict) -> None:
    wrong, right = record("b/dense", ms=20.0, verdict=verdict), record("c/litetopk", ms=16.0)
    assert ratio_of([wrong, right]) == "1.25x wrong dense\nb\n/ c"
    assert ratio_of([wrong, record("a/dense", ms=32.0), right]) == "2.00x"


def test_three_arms_have_no_ratio_of_what_did_not_pass_either() -> None:
    def arm(source: str, verdict: Verdict, contract: str = "kernel") -> Record:
        return dataclasses.replace(record(f"k/{source}", PREFILL, 2.0, contract, verdict), checks=[])

    cells = [line for verdict, contract in ((Verdict.PASSED, "kernel"), (Verdict.FLAKY, "kernel"), (Verdict.PASSED, "span"))
             for line in rendered([arm("none", Verdict.PASSED), arm("metadata", verdict, contract)]).splitlines() if "s_q=32" in line]
    assert ["1.00x" in line for line in cells] == [True, False, False]


def test_rows_by_way_are_told_unless_every_row_was_scanned_once() -> None:
    plain = record("c/litetopk", ways={"scan": 8, "rescan": 0, "dense": 0, "failed": 0})
    mixed = record("c/litetopk", SHORT, ways={"scan": 1000, "rescan": 2, "dense": 1, "failed": 0})
    rows = topk_table.table_of([plain, mixed, record("b/dense")])[1]
    assert rows[0][2] == "PASSED"
    assert rows[1][2] == "PASSED\n1,000 scan, 2 rescan, 1 dense"
    assert list(frame([plain, mixed])["ways"]) == ["", "1,000 scan, 2 rescan, 1 dense"]


def test_the_page_has_ways_memory_and_clocks() -> None:
    records = [record("b/dense", ms=20.0, memory=33 << 20), record("c/litetopk", ms=16.0, ways={"scan": 8}, memory=1 << 19)]
    page = evidence.page(RunInfo("", ["threearm"], [LONG], [], {}, {}), records)
    assert "| requests=8/65536,topk=512 | b/dense | PASSED |  | 33.0 | 1980 MHz -> 1755 MHz |" in page
    assert "| requests=8/65536,topk=512 | c/litetopk | PASSED | 8 scan | 0.5 | 1980 MHz -> 1755 MHz |" in page
    assert "| 1.25x | 0.5 |" in page
    assert list(frame(records)["memory"]) == [33 << 20, 1 << 19]


def test_arms_that_are_missing_or_skipped_keep_their_columns() -> None:
    records = [record("b/dense"), Record(SHORT, "c/litetopk", Verdict.SKIPPED, "takes topk 2048, the case has 512")]
    assert topk_table.table_of(records)[1] == [["requests=8/65536", "PASSED", "", "0.5"], ["requests=8/8192", "", "SKIPPED", ""]]
    assert "SKIPPED c/litetopk: takes topk 2048" in failure.summary(records)


def test_both_families_have_their_tables_and_their_legends() -> None:
    prefill = [dataclasses.replace(record(f"k/{source}", PREFILL, 2.0, "kernel"), checks=[]) for source in ("none", "metadata")]
    records = [*prefill, record("b/dense", ms=20.0), record("c/litetopk", ms=16.0)]
    for text in (rendered(records), table.markdown(records)):
        assert text.index("none / metadata") < text.index("1.00x") < text.index("derive topk_length") < text.index("dense / litetopk")
        assert text.count("1.25x") == 1
        assert text.count("margin: ") == 2
        assert "span: CUDA events around the call, launch hidden" in " ".join(text.split())
        assert "alone, L2 flushed" in " ".join(text.split())


def test_seven_arms_fit_a_terminal_without_losing_a_time() -> None:
    names = ["deep_gemm", "torch_dense", "litetopk_cuda", "litetopk_sglang", "litetopk_torch", "litetopk_triton", "litetopk_windowed"]
    arms = [f"{name}/{'litetopk' if 'lite' in name else 'dense'}" for name in names]
    text = rendered([record(arm, ms=1.5 + number) for number, arm in enumerate(arms)], 180)
    assert all(f"[{(1.5 + number) * 0.95:.4g} {(1.5 + number) * 1.05:.4g}]" in text for number in range(7))


@pytest.mark.parametrize("folder", sorted((ROOT / "docs/evidence/runs").iterdir()), ids=lambda path: path.name)
def test_stored_runs_of_any_age_can_be_shown(folder: Path) -> None:
    stored = RunFolder.load(folder)
    assert stored.records
    assert all(kernel["family"] and kernel["arms"] for kernel in stored.info.kernels)
    assert rendered(stored.records)
    assert evidence.page(stored.info, stored.records)


def test_margin_is_of_the_choice_and_the_values_alone() -> None:
    """downstream's and own-scores' margins have other bounds: 0.4 of an exact case, 7e8 of a failure."""
    def check(name: str, value: float) -> Check:
        return Check(name, Verdict.PASSED, margins={"a": value, "b": value / 2})

    checks = [check("set", 0.25), check("values", 0.375), check("downstream", 7e8), check("own-scores", 0.5), check("memory", 0.9)]
    assert margin(Record(LONG, "c/litetopk", Verdict.PASSED, checks=checks)) == 0.375
    assert margin(Record(LONG, "c/litetopk", Verdict.PASSED, checks=checks[2:])) is None
    told = "margin: largest error over its bound, of the chosen set and the returned values (above 1 fails)"
    assert told in table.legend([record("b/dense")])


def test_the_ratio_and_the_ways_are_explained_only_where_there_are_any() -> None:
    dense, plain = record("b/dense", ms=20.0), record("c/litetopk", ways={"scan": 8, "rescan": 0})
    assert "dense / litetopk" not in rendered([dense, plain]) + table.markdown([dense, plain])
    assert "rows by way" not in table.legend([dense, plain])
    lite = record("c/litetopk", ms=16.0, ways={"scan": 7, "rescan": 1})
    assert "dense / litetopk: the fastest dense arm" in table.legend([dense, lite])
    assert "rows by way, where not every row" in table.legend([dense, lite])
    head, rows = topk_table.table_of([dense, lite, record("b/dense", SHORT), record("c/litetopk", SHORT)])
    assert head[-2] == "dense / litetopk" and [row[-2] for row in rows] == ["1.25x", ""]


@pytest.mark.parametrize("width", [80, 100, 130])
def test_no_key_of_a_case_is_broken(width: int) -> None:
    cases = ["indexer_topk:requests=16/2048+8/1024+16/20480,topk=256,weights=mixed", SHORT]
    arms = ("torch_dense/dense", "deep_gemm/dense", "litetopk_torch/litetopk", "litetopk_windowed/litetopk")
    text = rendered([record(arm, case, ms=3.456) for case in cases for arm in arms], width)
    assert max(map(len, text.splitlines())) <= width
    assert {"requests=16/2048+8/1024+16/20480,", "topk=256,", "weights=mixed"} <= set(text.split())
    first = "".join(line.split("│")[1].strip() for line in rendered(
        [record("b/dense", "indexer_topk:requests=" + "+".join(["1/1023"] * 9)), record("b/dense")], width).splitlines() if line[0] == "│")
    assert "+".join(["1/1023"] * 9) in first  # longer than a column may be: folded, not cut off


def test_a_table_without_times_has_cases_on_one_line_where_there_is_room() -> None:
    text = rendered([record("b/dense"), record("b/dense", "indexer_topk:requests=8/8192,topk=512,values=integer,weights=mixed")], 80)
    assert "requests=8/8192, values=integer, weights=mixed" in text
