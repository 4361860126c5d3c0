"""Margins and times over many folders: what a line may connect, which cases moved, and what is written for other programs."""
from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from processes import ROOT, TINY, invoke

from harness import history
from harness.evidence_folder import EvidenceFolder, EvidenceInfo
from harness.gate_folder import GateFolder
from harness.record import Record, Timing
from harness.runfolder import RunFolder, RunInfo
from harness.stored import folders_below, open_folder
from harness.verdicts import Check, Verdict
from reports import history as told

EVIDENCE = ROOT / "docs" / "evidence"
OTHER = TINY.replace("topk=16", "topk=8")


def run(path: Path, day: int, gpu: str = "NVIDIA H200", contract: str = "span", us: float = 100.0, margin: float = 0.2,
        verdict: Verdict = Verdict.PASSED, cases: tuple[str, ...] = (TINY,)) -> Path:
    """A run folder of one arm on that day of January."""
    kernels = [{"name": "k", "family": "sparse_prefill", "arms": ["none"], "version": f"1.{day}"}]
    info = RunInfo(f"2026-01-{day:02}T12:00:00+02:00", ["threearm"], list(cases), kernels, {"gpu": gpu, "threearm": f"commit {day}"}, {})
    folder = RunFolder.make(path, info)
    for case in cases:
        check = Check("reference", verdict, margins={"out": margin, "lse": 0.1})
        folder.add(Record(case, "k/none", verdict, checks=[check], time=Timing(contract, "L2 flushed", "", [us, 1.1 * us, 1.2 * us])))
    folder.finish()
    folder.guard.close()
    return path


def rows(*paths: Path) -> pd.DataFrame:
    return history.frame([open_folder(each) for path in paths for each in folders_below(path)])


def test_a_row_a_record_oldest_first(tmp_path: Path) -> None:
    run(tmp_path / "b", 1)
    run(tmp_path / "a", 2, us=50.0, margin=0.4)
    found = rows(tmp_path)
    assert list(found["date"]) == [pd.Timestamp("2026-01-01T10:00Z"), pd.Timestamp("2026-01-02T10:00Z")]
    first = found.iloc[0]
    assert (first["machine"], first["version"], first["threearm"], first["verdict"]) == ("NVIDIA H200", "1.1", "commit 1", "PASSED")
    assert (first["low_us"], first["median_us"], first["high_us"]) == pytest.approx((105, 110, 115))
    assert list(found["margin out"]) == [0.2, 0.4] and list(found["margin lse"]) == [0.1, 0.1]


def test_no_line_joins_machines_or_contracts(tmp_path: Path) -> None:
    run(tmp_path / "1", 1)
    run(tmp_path / "2", 2, gpu="NVIDIA B200")
    run(tmp_path / "3", 3, contract="kernel")
    run(tmp_path / "4", 4)
    run(tmp_path / "5", 5, verdict=Verdict.FAILED, margin=3.0)
    found = rows(tmp_path)
    lines = {key: len(group) for key, group in history.series(found)}
    assert lines == {("k/none", "NVIDIA H200", "span, L2 flushed"): 2, ("k/none", "NVIDIA B200", "span, L2 flushed"): 1,
                     ("k/none", "NVIDIA H200", "kernel, L2 flushed"): 1, ("k/none FAILED", "NVIDIA H200", "span, L2 flushed"): 1}
    machines, contracts = history.warnings(found)
    assert "2 machines (NVIDIA H200; NVIDIA B200)" in machines and "2 contracts (span, L2 flushed; kernel, L2 flushed)" in contracts
    assert history.warnings(rows(tmp_path / "1", tmp_path / "4")) == []
    assert {line.label: len(line.dates) for line in told.margin_lines(found, ["out"])} == {
        "out, k/none, NVIDIA H200": 3, "out, k/none, NVIDIA B200 (2)": 1, "out, k/none FAILED, NVIDIA H200 (5)": 1}


def test_what_moved_most_is_first_and_a_changed_verdict_before_all(tmp_path: Path) -> None:
    both = (TINY, OTHER)
    run(tmp_path / "1", 1, cases=both)
    run(tmp_path / "2", 2, margin=0.7, cases=both[:1])
    run(tmp_path / "3", 3, margin=0.3, verdict=Verdict.FAILED, cases=both[1:])
    found = history.moved(history.compared(rows(tmp_path)))
    assert list(found["case"]) == [OTHER, TINY]
    assert list(found["verdicts"]) == [["PASSED", "FAILED"], ["PASSED"]]
    assert list(found["output"]) == ["out", "out"] and list(found["moved"]) == pytest.approx([0.1, 0.5])
    assert told.which_moved(found)[1] == [TINY, "k/none", "2", "PASSED", "out", "0.2 -> 0.7", "0.2 .. 0.7"]
    assert told.which_moved(found)[0][3] == "PASSED (1) -> FAILED (3)"
    assert history.moved(history.compared(rows(tmp_path / "1"))).empty


@pytest.mark.parametrize(("before", "after", "verdict", "moves"), [
    (0.491, 0.4911, Verdict.PASSED, False), (0.491, 0.495, Verdict.PASSED, False), (0.491, 0.497, Verdict.PASSED, True),
    (1e-4, 9e-4, Verdict.PASSED, False), (1e-4, 2e-3, Verdict.PASSED, True), (0.491, 0.491, Verdict.FAILED, True),
    (0.491, 1e30, Verdict.PASSED, True)])
def test_what_did_not_move_is_not_among_what_moved(tmp_path: Path, before: float, after: float, verdict: Verdict, moves: bool) -> None:
    run(tmp_path / "1", 1, margin=before)
    run(tmp_path / "2", 2, margin=after, verdict=verdict)
    every = history.compared(rows(tmp_path))
    found = history.moved(every)
    assert len(every) == 1 and len(found) == moves
    for row in told.which_moved(found):
        first, arrow, last = row[5].partition(" -> ")
        assert not arrow or first != last, row


def test_the_sides_of_a_gate_are_not_one_arm() -> None:
    """A gate whose candidate is wrong: nothing moved from one of its sides to the other."""
    faulty, same = EVIDENCE / "gates" / "faulty", EVIDENCE / "gates" / "same"
    assert history.moved(history.compared(rows(faulty))).empty
    found = rows(faulty, same)
    table = history.moved(history.compared(found))
    assert len(table) and set(table["side"]) == {"candidate"}
    assert all(row[1].endswith(" candidate") and row[3].startswith("PASSED (same) -> ") and "(faulty)" in row[3]
               for row in told.which_moved(table))
    assert {who.split()[1] for (who, _, _), _ in history.series(found)} == {"base", "candidate"}
    assert "two environments" in history.warnings(found)[-1] and len(history.warnings(found[found["side"] == ""])) == 0


def test_a_failure_is_in_the_plot_whatever_its_margin_is() -> None:
    both = rows(EVIDENCE / "gates" / "faulty", EVIDENCE / "gates" / "same")
    found = both[both["case"] == "sparse_prefill:s_q=130,rows=ragged,tail=wild,values=poison"]
    lines = {line.label: line.margins for line in told.margin_lines(found, history.outputs(found))}
    arms = "flash_mla/backscan,metadata,none"
    assert lines[f"out not finite (upper edge), {arms} candidate FAILED (faulty)"] == [float("inf")]
    assert len(lines[f"out, {arms} base"]) == 2 and len(lines[f"out, {arms} candidate (same)"]) == 1
    assert len(lines[f"lse, {arms} candidate FAILED (faulty)"]) == 1, "what a wrong arm has right is joined to no pass"
    drawn = told.plot("sparse_prefill:s_q=130", found)
    assert "not finite (upper edge)" in drawn and "candidate FAILED (faulty)" in drawn
    assert {row[1] for row in told.over_time(found)} == {"faulty, base", "faulty, candidate", "same, base", "same, candidate"}


def test_a_record_without_a_margin_is_in_the_plot_too(tmp_path: Path) -> None:
    folder = RunFolder.load(run(tmp_path / "1", 1))
    crashed = dataclasses.replace(folder.records[0], verdict=Verdict.CRASHED, checks=[], time=None)
    skipped = dataclasses.replace(crashed, verdict=Verdict.SKIPPED)
    folder.records = [crashed, skipped, dataclasses.replace(crashed, verdict=Verdict.PASSED)]
    found = history.frame([folder])
    assert [(line.label, line.margins) for line in told.margin_lines(found, history.outputs(found))] == [
        ("no margin (upper edge), k/none CRASHED", [float("inf")])]
    assert "no margin (upper edge), k/none CRASHED" in told.plot(TINY, found)


def test_columns_that_are_empty_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder.load(run(tmp_path / "1", 1))
    found = history.frame([folder])
    assert told.filled(told.OVER_TIME, told.over_time(found)).head == told.OVER_TIME
    folder.records = [dataclasses.replace(folder.records[0], time=None)]
    found = history.frame([folder])
    table = told.filled(told.OVER_TIME, told.over_time(found))
    assert table.head == told.OVER_TIME[:-2] and [len(row) for row in table.rows] == [len(table.head)]


def test_a_margin_that_is_not_finite_is_one(tmp_path: Path) -> None:
    run(tmp_path / "1", 1)
    run(tmp_path / "2", 2, margin=1e30, verdict=Verdict.FAILED)
    found = rows(tmp_path)
    assert found["margin out"].iloc[1] == float("inf")
    assert told.over_time(found)[1][6] == "lse 0.1, out not finite"
    ElementTree.fromstring(told.plot(TINY, found))


def test_both_sides_of_a_gate_with_its_times() -> None:
    path = EVIDENCE / "gates" / "slow"
    folder = GateFolder.load(path)
    found = rows(path)
    assert len(found) == 20 + 20  # records, and sides of comparisons
    timed = found[found["median_us"].notna()]
    assert set(timed["contract"]) == {"span, L2 flushed, in turns"} and set(timed["part"]) == {"base", "candidate"}
    first = folder.transitions[0]
    mine = timed[(timed["case"] == first.pairing.case)].set_index("part")["median_us"]
    assert first.time and first.time.estimate
    assert mine["candidate"] / mine["base"] == pytest.approx(first.time.estimate.ratio, rel=0.01)


def test_the_parts_of_evidence(tmp_path: Path) -> None:
    gate = GateFolder.load(EVIDENCE / "gates" / "slow")
    info = EvidenceInfo("litetopk", "2026-01-03T00:00:00+00:00", ["threearm"], {"gpu": "NVIDIA H200"}, False, [], [])
    folder = EvidenceFolder(tmp_path, info)
    folder.runs["kernel-time"] = RunFolder.load(run(tmp_path / "part", 3))
    folder.pairs = [(found.pairing, found.time) for found in gate.transitions[:2] if found.time]
    found = history.frame([folder])
    assert set(found["part"]) == {"kernel-time", "base", "candidate"} and len(found) == 5


def test_every_stored_folder_has_rows() -> None:
    found = rows(EVIDENCE)
    assert len(found["folder"].unique()) == len(folders_below(EVIDENCE))
    assert history.outputs(found)[:2] == ["best left out", "lse"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Path:
    run(tmp_path / "runs" / "1", 1)
    run(tmp_path / "runs" / "2", 2, gpu="NVIDIA B200", us=60.0)
    return tmp_path / "runs"


def test_one_case_as_a_table_and_files(two: Path, tmp_path: Path) -> None:
    page, svg, parquet = tmp_path / "page.html", tmp_path / "case.svg", tmp_path / "rows.parquet"
    done = invoke("history", str(two), "--case", TINY, "--arm", "k", "--html", str(page), "--plot", str(svg), "--parquet", str(parquet))
    assert done.code == 0, done.text
    assert "warning: 2 machines" in done.text and "110 [105 115]" in done.text and "66 [63 69]" in done.text
    drawn = svg.read_text(encoding="utf-8")
    ElementTree.fromstring(drawn)
    assert "k/none, NVIDIA H200" in drawn and "k/none, NVIDIA B200" in drawn
    text = page.read_text(encoding="utf-8")
    assert drawn in text and "2 machines" in text and "http" not in text.replace("http://www.w3.org", "")
    pd.testing.assert_frame_equal(pd.read_parquet(parquet), rows(two), check_dtype=False)


def test_a_plot_is_the_same_again(two: Path) -> None:
    assert told.plot(TINY, rows(two)) == told.plot(TINY, rows(two))


def test_what_a_folder_says_cannot_become_markup(tmp_path: Path) -> None:
    run(tmp_path / "runs", 1, gpu="<script>alert(1)</script>$x^2$")
    found = rows(tmp_path / "runs")
    drawn = told.plot(TINY, found)
    assert "<script" not in told.page(TINY, found, [told.filled(told.OVER_TIME, told.over_time(found))], drawn)


def test_without_a_case_they_are_ranked(two: Path) -> None:
    run(two / "3", 3, margin=0.9)
    done = invoke("history", str(two))
    assert done.code == 0 and "0.2 -> 0.9" in done.text
    assert done.lines[-1] == "3 rows; of 1 pair of case and arm with more than one record 1 moved"


def test_the_page_of_what_moved_has_nothing_else(two: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    still = invoke("history", str(two), "--html", str(page))
    assert still.code == 0
    assert still.lines[-1].endswith("0 moved; 1 kept their verdict, and margins to 0.001 of a budget or 1% of themselves")
    text = page.read_text(encoding="utf-8")
    assert "<table" not in text and "1 kept their verdict" in text
    run(two / "3", 3, margin=0.9)
    assert invoke("history", str(two), "--html", str(page)).code == 0
    assert "0.2 -&gt; 0.9" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--case", "sparse_prefill:nonsense=1"], 2, "--case: "), (["--plot", "x.svg"], 2, "--plot draws one case"),
    (["--case", OTHER], 5, "no record of"), (["--arm", "nobody"], 5, "no record by nobody"),
    (["--html", "/nowhere/x.html"], 2, "no such folder as /nowhere"), (["--html", "/tmp"], 2, "--html /tmp: it is a folder"),
    (["--case", TINY, "--plot", "/tmp"], 2, "--plot /tmp: it is a folder"), (["--parquet", "/tmp"], 2, "--parquet /tmp: it is a folder")])
def test_what_cannot_be_told_is_one_line(two: Path, words: list[str], code: int, said: str) -> None:
    done = invoke("history", str(two), *words)
    assert done.code == code and said in done.text


def test_a_folder_that_cannot_be_read_is_told(two: Path, tmp_path: Path) -> None:
    (two / "2" / "records.jsonl").write_text("{}\n", encoding="utf-8")
    done = invoke("history", str(two), "--case", TINY)
    assert done.code == 0 and "not read:" in done.text and "110 [105 115]" in done.text
    assert invoke("history", str(tmp_path / "nothing")).code == 2


def test_without_pyarrow_it_says_what_to_install(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = invoke("history", str(two), "--parquet", str(tmp_path / "x"))
    assert done.code == 2 and "pip install pyarrow" in done.text


def test_frames_of_no_times_are_frames(tmp_path: Path) -> None:
    folder = RunFolder.load(run(tmp_path / "1", 1))
    folder.records = [dataclasses.replace(folder.records[0], time=None)]
    found = history.frame([folder])
    assert found["median_us"].isna().all() and list(history.series(found)) == []
    ElementTree.fromstring(told.plot(TINY, found))
