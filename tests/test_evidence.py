"""threearm evidence, on a CPU at reduced shapes: what its page says, what it leaves behind, and that nothing wrong passes. The page of real
records is held against what docs/evidence says of them."""
from __future__ import annotations

import re
import shlex
import signal
import time
from pathlib import Path

import msgspec
import pytest

from harness.comparison import TimeVerdict
from harness.evidence import code_of
from harness.evidence_folder import EvidenceFolder, EvidenceInfo, PartInfo
from harness.evidence_plans import PLANS
from harness.record import Record
from harness.runfolder import RunError, RunFolder
from reports import evidence_page
from reports.evidence_compare import NO_VERDICT, side_by_side
from tests.processes import ROOT, Done, invoke, left_behind, new_mark, start, threearm

STORED = ROOT / "docs" / "evidence" / "runs"
NAMES = list(PLANS)
Made = dict[str, tuple[Done, EvidenceFolder]]
Broken = tuple[Done, EvidenceFolder, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Each evidence once; all at the same time, since their times are not looked at."""
    root = tmp_path_factory.mktemp("evidence")
    mark = new_mark()
    started = {name: start(["evidence", name, "--device", "cpu", "--samples", "2", "--runs", str(root / name),
                            "--out", str(root / f"{name}.md"), "--junit", str(root / f"{name}.xml")], mark) for name in NAMES}
    printed = {name: process.communicate(timeout=120)[0] for name, process in started.items()}
    assert left_behind(mark) == []
    found = {}
    for name, process in started.items():
        assert "Traceback" not in printed[name], printed[name]
        folder, = (root / name).iterdir()
        assert (root / f"{name}.md").read_text() == (folder / "summary.md").read_text()
        assert "<testsuite" in (root / f"{name}.xml").read_text()
        found[name] = Done(process.returncode, printed[name]), EvidenceFolder.load(folder)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_evidence_passes_here_and_says_first_that_its_shapes_are_reduced(made: Made, name: str) -> None:
    done, folder = made[name]
    page = evidence_page.page(folder)
    assert done.code == 0, done.text
    assert page == (folder.path / "summary.md").read_text()
    first = page.splitlines()[0]
    assert first.startswith(f"**Reduced shapes on a CPU: no evidence of a GPU kernel. PASSED: {name}: ")
    passed, of = map(int, re.search(r"(\d+) of (\d+) case-runs PASSED", first).groups())  # type: ignore[union-attr]
    assert passed == of == len(PLANS[name].part(PLANS[name].main).cases(True))
    assert folder.info.finished and folder.info.reduced and all(part.seconds > 0 for part in folder.info.parts)
    assert [part.count for part in folder.info.parts] == [*(len(run.records) for run in folder.runs.values()), len(folder.pairs)]
    assert "What did not pass" not in page
    assert first.replace("*", "")[:60] in done.text.replace("\n", " ")


@pytest.mark.parametrize("name", NAMES)
def test_under_every_table_of_times_stands_what_they_are_and_how_to_repeat_them(made: Made, name: str) -> None:
    page = evidence_page.page(made[name][1])
    timed = (block for block in re.split(r"\n(?=#####? )", page) if re.search(r"\| .* (ms|us) \|", block))
    blocks = [block for block in timed if "useful TFLOP |" not in block]
    assert blocks
    for block in blocks:
        assert "contract `wall`: host clock" in block or "by fresh processes: contract `wall`" in block, block
    assert len(re.findall(r"again: `threearm replay \S+ --arm \S+ --time wall --samples 2`", page)) >= 1
    assert re.search(r"`.*cores.*; torch .*; threearm .*`", page.splitlines()[2])
    assert f"repeat: `threearm evidence {name} --device cpu --samples 2`" in page
    assert len(page) < 65_536


def test_a_replay_line_of_the_page_works(made: Made) -> None:
    line = re.findall(r"again: `(threearm replay [^`]*)`", evidence_page.page(made["q8kv8-topk-length"][1]))[-1]
    done = threearm(*shlex.split(line)[1:])
    assert done.code == 0
    assert re.search(r"\n  time: [\d.]+ \[[\d.]+ [\d.]+\] ms; contract wall: .*; median \[quartiles of the samples\] of 2 samples",
                     done.text)


def test_q8kv8_tells_sources_early_exit_and_rows_without_a_key(made: Made) -> None:
    page = evidence_page.page(made["q8kv8-topk-length"][1])
    assert "| torch_blocks | none and metadata | 4 | 4 bitwise | 4 bitwise | 4 bitwise |" in page
    assert re.search(r"\| torch_blocks \| rows=mixed,pad_rows=2 \| 2 \| none-vs-metadata \| \d+ of 16 \| none: bitwise equal", page)
    assert re.search(r"\| torch_blocks/metadata \| 0 \| 2 \| \d+ \| PASSED \|", page)
    assert "left out without a GPU: wrapper-span (contract `span`)" in page
    assert "| index_topk=129 | 2 |" in page and "Early-exit model, least squares over 4 lengths" in page
    assert "published: none / metadata" not in page and "published: no figure at these shapes" in page
    assert "medians of derivation and call together" in page and "derivation apart" not in page, "the contract is wall"


def test_bf16_tells_the_expected_saving_beside_the_measured(made: Made) -> None:
    folder = made["bf16-topk-length"][1]
    rows = [line for line in evidence_page.page(folder).splitlines() if re.match(r"\| s_q=(\d+),s_kv=\1,rows=ramp \| [\d.]+ \[", line)]
    assert len(rows) == 2 and all("| 50.0 % |" in row for row in rows), rows
    assert len(folder.pairs) == 3
    for pairing, found in folder.pairs:
        assert (pairing.base, pairing.candidate) == ("torch_blocks/none", "torch_blocks/metadata")
        assert found.verdict is TimeVerdict.UNRESOLVED and found.why.startswith("measured, not judged: ") and not found.confirming
        assert found.estimate and found.estimate.low < found.estimate.ratio < found.estimate.high


def test_litetopk_tells_memory_and_the_crossover(made: Made) -> None:
    folder = made["litetopk"][1]
    page = evidence_page.page(folder)
    assert re.findall(r"(?m)^\| requests=4/(\d+) \| [\d.]+ \[", page) == ["128", "256", "512", "1024"]
    assert "wrong" not in page, "nothing is"
    assert "Crossover" in page and "13.05" not in page
    assert {pairing.candidate for pairing, _ in folder.pairs} == {"litetopk_torch/litetopk"} and len(folder.pairs) == 4
    assert all(record.memory for run in folder.runs.values() for record in run.records)


def test_a_stored_evidence_is_reported_again(made: Made) -> None:
    folder = made["litetopk"][1]
    again = invoke("report", str(folder.path), "--markdown")
    assert (again.code, again.text) == (0, (folder.path / "summary.md").read_text())
    shown = invoke("report", str(folder.path))
    assert shown.code == 0 and "Dense against LiteTopk" in shown.text and "left out here: By fresh processes" in shown.text


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    """An arm that skips the last pair, beside the evidence of a right one."""
    root = tmp_path_factory.mktemp("broken")
    done = threearm("evidence", "bf16-topk-length", "--arm", "broken_skips_last_pair", "--no-sweeps", "--device", "cpu", "--samples", "2",
                    "--runs", str(root / "runs"), "--out", str(root / "page.md"), "--compare", str(made["bf16-topk-length"][1].path))
    folder, = (root / "runs").iterdir()
    return done, EvidenceFolder.load(folder), (root / "page.md").read_text()


def test_a_broken_arm_fails_and_the_first_line_names_it(broken: Broken) -> None:
    done, _, page = broken
    assert done.code == 1
    first = page.splitlines()[0]
    assert "FAILED: bf16-topk-length: " in first and "3 of 3" not in first
    assert re.search(r"broken_skips_last_pair/metadata: FAILED on \d of 3 cases \(.*reference", first)
    assert "#### What did not pass" in page and "repeat: threearm replay " in page
    assert "<summary>In full: " in page


def test_what_is_to_be_copied_from_a_terminal_is_whole(broken: Broken) -> None:
    done, _, page = broken
    told = page.partition("to repeat them, by number:")[2].partition("#### ")[0]
    repeats = re.findall(r"(?m)^(threearm replay .*)  # \d+$", told)
    assert len(repeats) >= 2
    lines = done.text.splitlines()
    assert all(f"  repeat: {line}" in lines for line in repeats)
    assert [f"again: {line}" in lines for line in re.findall(r"again: `(.*)`", page)] == [True]
    assert "…" not in done.text


def test_a_wrong_arm_has_no_time_and_no_interval(broken: Broken) -> None:
    _, folder, _ = broken
    wrong = {(record.case, record.arm) for record in folder.runs["span"].records if record.verdict is not record.verdict.PASSED}
    assert wrong
    assert not any(record.time for record in folder.runs["span"].records if (record.case, record.arm) in wrong)
    assert not any((pairing.case, pairing.candidate) in wrong for pairing, _ in folder.pairs)


def test_two_evidences_stand_side_by_side_without_a_verdict(broken: Broken) -> None:
    page = broken[2]
    assert "(there)" in page and NO_VERDICT in page
    assert "not there" in page, "another kernel's arms are said to be missing"
    assert "topk-length-sweep: only there" in page


def test_side_by_side_tells_medians_ratio_and_bits(made: Made) -> None:
    here = made["litetopk"][1]
    there = EvidenceFolder.load(here.path)
    for record in there.runs["scale"].records:
        assert record.time
        record.time.us = [2 * us for us in record.time.us]
    there.runs["crossover"].records[0].outputs["set"] = "other"
    text = side_by_side(here, there)
    assert text.count("| 2.00x |") == 4 and text.count("| 1.00x |") == 4
    assert text.count("bitwise same") == 7 and "set differ" in text
    there.runs["scale"].records[0].time.contract = "span"  # type: ignore[union-attr]
    assert "span / wall: not comparable" in side_by_side(here, there)


def test_a_time_that_is_none_makes_the_evidence_fail(made: Made) -> None:
    folder = EvidenceFolder.load(made["litetopk"][1].path)
    assert code_of(folder) == 0
    folder.pairs[0][1].verdict, folder.pairs[0][1].why = TimeVerdict.INVALID, "below the speed of light"
    assert code_of(folder) == 1
    page = evidence_page.page(folder)
    assert "FAILED: litetopk" in page.splitlines()[0] and "1 time by fresh processes INVALID" in page.splitlines()[0]
    assert "**INVALID**: below the speed of light" in page


def test_an_interrupted_evidence_keeps_what_it_has_and_says_so(tmp_path: Path) -> None:
    mark = new_mark()
    process = start(["evidence", "litetopk", "--device", "cpu", "--runs", str(tmp_path)], mark)
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(file.stat().st_size for file in tmp_path.glob("*/scale/records.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "incomplete: " in text and "Traceback" not in text, text
    assert left_behind(mark) == []
    path, = tmp_path.iterdir()
    folder = EvidenceFolder.load(path)
    assert folder.info.interrupted and not folder.info.finished and folder.runs["scale"].records
    assert "INCOMPLETE: litetopk" in evidence_page.page(folder).splitlines()[0]
    assert invoke("report", str(path)).code == 4


# --- real records -----------------------------------------------------------------------------------------------------


def stored(name: str, parts: dict[str, tuple[str, str]]) -> EvidenceFolder:
    """Runs of an H200 that are stored in docs, as the parts of an evidence folder: part -> (run, what its cases' arms must hold)."""
    runs = {part: RunFolder.load(STORED / run) for part, (run, _) in parts.items()}
    for part, (_, kernel) in parts.items():
        runs[part].records = [record for record in runs[part].records if kernel in record.arm and wanted(record)]
    first = next(iter(runs.values())).info
    infos = [PartInfo(part, part, "run", "kernel", 30, 1.0) for part in parts]
    told = EvidenceInfo(name, first.started, first.command, first.machine, False, infos, first.kernels, finished="then")
    folder = EvidenceFolder(ROOT, told)
    folder.runs = runs
    return folder


def wanted(record: Record) -> bool:
    """Not the timing suite's two other row patterns."""
    return "s_q=4096,s_kv=65536" not in record.case or not re.search(r"rows=(ramp|ragged)", record.case)


def test_the_page_of_real_q8kv8_runs_has_the_figures_of_docs_evidence() -> None:
    folder = stored("q8kv8-topk-length", {"kernel-time": ("timing-fp8", "q8kv8"), "equivalence": ("q8kv8-suite", ""),
                                          "wrapper-span": ("timing-fp8-span", "q8kv8"), "wrapper-wall": ("timing-fp8-span", "q8kv8")})
    page = evidence_page.page(folder)
    assert page.startswith("**PASSED: q8kv8-topk-length: 24 of 24 case-runs PASSED; in all parts ")
    table = {line.split(" | ")[0]: line for line in page.splitlines() if re.match(r"\| rows=(full|half|short) \| [\d,]+ \|", line)}
    for rows, ratio, alone, published in (("full", "0.99x", "1.00x", "1.00x"), ("half", "1.90x", "1.92x", "1.95x"),
                                          ("short", "4.60x", "4.71x", "4.7x")):
        assert f"| {ratio} | {alone}<br>" in table[f"| rows={rows}"] and table[f"| rows={rows}"].endswith(f"| {published} |")
    assert "| sglang_q8kv8 | none and metadata | 24 | 3 bitwise, 21 by rule | 24 bitwise | 24 bitwise |" in page
    assert "| sglang_q8kv8 | backscan and metadata | 24 | 20 bitwise, 4 by rule |" in page
    assert re.search(r"\| rows=short \| sglang_q8kv8/metadata \| 7 \| 414.6 \| 483.1 \[.*\] \| .* \| \+68.5 \|", page)
    assert "+0.0 |" in page  # the span's times stand in for wall's here
    assert "contract `kernel`: sum of the CUDA kernels of one call (torch.profiler)" in page and "30 samples in one process" in page
    assert "256..511 (256 of 512)" in page and "| sglang_q8kv8/metadata | 0 | 13 | 1638 | PASSED |" in page


def test_the_page_of_real_indexer_runs_marks_the_wrong_dense_and_fails() -> None:
    folder = stored("litetopk", {"scale": ("litetopk-scale-time-wrong", "")})
    page = evidence_page.page(folder)
    assert code_of(folder) == 1
    assert "deep_gemm/dense: FAILED on 5 of 7 cases (" in page.splitlines()[0]
    assert "litetopk_cuda/litetopk: PASSED on 5 cases" in page.splitlines()[0]
    row = next(line for line in page.splitlines() if line.startswith("| requests=8192/262144 | "))
    assert "**wrong**" in row and "1.31x<br>**wrong dense**" in row and row.endswith("| 13.05 / 10.61 (1.23x) |")
    assert "about 36,000 keys, between 32,768 (0.96x) and 65,536 (1.24x), above which litetopk is faster" in page
    assert page.count("| deep_gemm/dense | indexer_topk:requests=8192/") >= 5 and len(page) < 65_536


# --- usage ------------------------------------------------------------------------------------------------------------


def test_without_a_name_every_evidence_is_listed_in_a_line() -> None:
    done = invoke("evidence")
    assert done.code == 0 and [line.split()[0] for line in done.lines] == NAMES


@pytest.mark.parametrize(("arguments", "says"), [
    (["litetop"], "unknown evidence 'litetop': did you mean 'litetopk'? there is q8kv8-topk-length, bf16-topk-length, litetopk"),
    (["litetopk", "--out", "/no/such/page.md"], "--out /no/such/page.md: no such folder as /no/such"),
    (["litetopk", "--out", "/tmp"], "--out /tmp: it is a folder"),
    (["litetopk", "--junit", "/tmp"], "--junit /tmp: it is a folder"),
    (["litetopk", "--out", "one.md", "--junit", "./one.md"], "--junit one.md: --out is the same file"),
    (["litetopk", "--processes", "1"], "--processes 1: an interval needs 2 or more; 0 takes none"),
    (["litetopk", "--compare", "/no/such"], "/no/such is not an evidence folder")])
def test_what_cannot_be_asked_for_is_one_line(arguments: list[str], says: str) -> None:
    done = invoke("evidence", *arguments)
    assert done.code == 2 and len(done.lines) == 1 and says in done.text


def test_other_evidence_is_not_compared(made: Made) -> None:
    done = invoke("evidence", "litetopk", "--compare", str(made["bf16-topk-length"][1].path))
    assert done.code == 2 and "it is evidence of bf16-topk-length, not of litetopk" in done.text


# --- the folder -------------------------------------------------------------------------------------------------------


def info() -> EvidenceInfo:
    return EvidenceInfo("litetopk", "2026-01-03T00:00:00+00:00", ["threearm"], {}, True, [PartInfo("scale", "x", "run", "wall", 1)], [])


def test_a_newer_folder_is_refused_and_a_cut_line_does_not_count(tmp_path: Path) -> None:
    folder = EvidenceFolder.create(tmp_path, info())
    (folder.path / "pairs.jsonl").write_bytes(b'[{"case": "x", "ba')
    assert EvidenceFolder.load(folder.path).pairs == []
    newer = msgspec.structs.replace(folder.info, schema=99)
    (folder.path / "evidence.json").write_bytes(msgspec.json.encode(newer))
    with pytest.raises(RunError, match="schema 99 is of a newer threearm"):
        EvidenceFolder.load(folder.path)


def test_a_part_that_is_said_to_be_done_must_be_there(tmp_path: Path) -> None:
    folder = EvidenceFolder.create(tmp_path, info())
    assert EvidenceFolder.load(folder.path).runs == {}
    folder.info.part("scale").seconds = 1.0
    folder.save_info()
    with pytest.raises(RunError, match="scale is not a run folder"):
        EvidenceFolder.load(folder.path)


def test_nothing_that_ran_is_no_pass(tmp_path: Path) -> None:
    folder = EvidenceFolder.create(tmp_path, info())
    assert code_of(folder) == 5
    assert "NOTHING RAN" in evidence_page.verdict(folder) or "INCOMPLETE" in evidence_page.verdict(folder)
