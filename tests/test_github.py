"""What a GitHub job shows: annotations that are read back as they were meant, a summary within its limit, and nothing outside a job."""
from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from processes import ROOT, TINY, invoke, threearm

from harness import report_command
from harness.comparison import Change
from harness.gate_folder import GateFolder
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo
from harness.verdicts import Check, Verdict
from reports import github

GATES = ROOT / "docs" / "evidence" / "gates"
SMOKE = ROOT / "docs" / "evidence" / "runs" / "smoke"
ESCAPES = {"%0A": "\n", "%0D": "\r", "%3A": ":", "%2C": ",", "%25": "%"}
SUMMARY = "GITHUB_STEP_SUMMARY"


def read_back(line: str) -> tuple[str, str, str]:
    """Kind, title and text of a workflow command, as GitHub's runner reads it (actions/runner, ActionCommand.cs)."""
    found = re.fullmatch(r"::(error|warning) title=([^:,]*)::(.*)", line)
    assert found, line

    def unescaped(text: str) -> str:
        return re.sub("%0A|%0D|%3A|%2C|%25", lambda each: ESCAPES[each[0]], text)

    return found[1], unescaped(found[2]), unescaped(found[3])


def record(verdict: Verdict, arm: str = "k/none", detail: str = "out is wrong") -> Record:
    return Record(TINY, arm, verdict, checks=[Check("reference", verdict, detail)])


def annotated(records: list[Record], code: int = 0, said: str = "") -> list[tuple[str, str, str]]:
    return [read_back(line) for line in github.of_records(records, lambda record: ["--device", "cuda:1"], code, said)]


def test_an_annotation_says_what_and_how_to_repeat_it() -> None:
    [(kind, title, text)] = annotated([record(Verdict.FAILED, detail="100% wrong: a,b\nrows 1"), record(Verdict.PASSED)])
    assert (kind, title) == ("error", "FAILED k/none")
    assert text == (f"{TINY}: reference: 100% wrong: a,b\nrows 1\n"
                    f"repeat: threearm replay {TINY} --arm k/none --device cuda:1")


def test_a_text_cannot_leave_its_annotation() -> None:
    [line] = github.of_records([record(Verdict.FAILED, "k,x::/none", "\r\n::error::forged\x1b[2K")], lambda record: [])
    assert "\n" not in line and "\r" not in line and "\x1b" not in line
    assert read_back(line)[1] == "FAILED k,x::/none"


def test_the_most_serious_first_and_ten_of_a_kind() -> None:
    records = [record(Verdict.FLAKY, f"k{number}/none") for number in range(11)]
    records += [record(Verdict.CRASHED), *(record(Verdict.VACUOUS, f"v{number}/none") for number in range(10))]
    found = annotated(records)
    errors, warnings = ([each for each in found if each[0] == kind] for kind in ("error", "warning"))
    assert len(errors) == len(warnings) == 10
    assert errors[0][1] == "CRASHED k/none" and errors[1][1] == "FLAKY k0/none"
    assert errors[-1][1] == "3 more"  # 12 in all, 9 of them told
    assert {title.split()[0] for _, title, _ in warnings} == {"VACUOUS"}


def test_nothing_is_said_of_what_passes_and_nothing_ran_is() -> None:
    good = [record(Verdict.PASSED), Record(TINY, "k/backscan", Verdict.SKIPPED, "no GPU")]
    assert annotated(good) == []
    assert annotated([good[1]], 5, "1 SKIPPED (exit 5)") == [("error", "threearm", "1 SKIPPED (exit 5)")]
    assert annotated(good, 4, "it has not finished") == [("warning", "threearm", "it has not finished")]
    cut_short = github.of_records([record(Verdict.FAILED)], lambda record: [], 1, "INCOMPLETE", finished=False)
    assert read_back(cut_short[0])[1:] == ("threearm", "INCOMPLETE") and len(cut_short) == 2


@pytest.mark.parametrize(("name", "kinds"), [("same", set()), ("slow", {"error"}), ("change", {"error", "warning"})])
def test_a_gate_tells_what_makes_it_fail(name: str, kinds: set[str]) -> None:
    folder = GateFolder.load(GATES / name)
    found = [read_back(line) for line in github.of_transitions(folder.transitions, folder.info, again=True)]
    assert {kind for kind, _, _ in found} == kinds
    assert all(sum(kind == each for each, _, _ in found) <= 10 for kind in kinds)


def test_a_gate_that_is_void_or_bitwise_is_an_error() -> None:
    folder = GateFolder.load(GATES / "same")
    folder.info.void.append("the base's worker did not start")
    [(kind, title, text)] = [read_back(line) for line in github.of_transitions(folder.transitions, folder.info)]
    assert (kind, title) == ("error", "threearm gate") and "did not start" in text
    other = GateFolder.load(GATES / "same")
    other.transitions[0] = dataclasses.replace(other.transitions[0], change=Change.NUMBERS, detail="out: 3 of 5")
    assert [read_back(line)[0] for line in github.of_transitions(other.transitions, other.info)] == ["warning"]
    other.info.options["bitwise"] = True
    assert [read_back(line)[0] for line in github.of_transitions(other.transitions, other.info)] == ["error"]


# --- the summary ------------------------------------------------------------------------------------------------------


def test_a_page_that_fits_is_whole() -> None:
    assert github.summary("# a\nb\n", "threearm report x") == "# a\nb\n"


@pytest.mark.parametrize("room", [250, 400, 1000])
def test_a_long_page_is_cut_at_a_line_and_says_so(room: int) -> None:
    page = "# title\n```\n" + "ä line of text\n" * 200 + "```\n"
    short = github.summary(page, "threearm report runs/x --markdown", room)
    assert room - 60 < len(short.encode()) <= room
    assert "threearm report runs/x --markdown" in short
    assert sum(line.startswith("```") for line in short.splitlines()) == 2  # the block is closed
    assert {line for line in short.splitlines()[2:] if "line" in line and "step" not in line} == {"ä line of text"}


def test_no_room_is_no_summary() -> None:
    assert github.summary("x" * 100, "threearm report x", 50) == ""
    assert github.summary("x" * 100, "threearm report x", -5) == ""


def test_a_folder_is_added_to_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "summary.md"
    monkeypatch.setenv(SUMMARY, str(file))
    folder = RunFolder.load(SMOKE)
    assert report_command.after_run(folder, 0) == 0
    first = file.read_text(encoding="utf-8")
    assert "#### Where this comes from" in first and capsys.readouterr().out == ""
    folder.records[0] = dataclasses.replace(folder.records[0], verdict=Verdict.FAILED, detail="planted")
    assert report_command.after_run(folder, 1) == 1
    assert file.read_text(encoding="utf-8").startswith(first) and "planted" in file.read_text(encoding="utf-8")[len(first) :]
    assert read_back(capsys.readouterr().out.strip())[0] == "error"
    file.write_text("x" * (github.LARGEST_SUMMARY - 2000), encoding="utf-8")  # what an earlier command of the step has left
    report_command.after_run(folder, 1)
    assert file.stat().st_size <= github.LARGEST_SUMMARY and "... cut:" in file.read_text(encoding="utf-8")


def test_nothing_is_written_outside_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(SUMMARY, raising=False)
    folder = RunFolder.load(SMOKE)
    folder.records[0] = dataclasses.replace(folder.records[0], verdict=Verdict.FAILED)
    assert report_command.after_run(folder, 1) == 1
    assert capsys.readouterr().out == ""
    assert invoke("report", str(SMOKE), "--github").text.strip().endswith(f"{SUMMARY} is not set")


@pytest.mark.parametrize(("code", "then"), [(0, 5), (1, 1), (4, 4)])
def test_what_cannot_be_written_is_no_success(code: int, then: int, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(SUMMARY, "/nowhere/summary.md")
    assert report_command.after_run(RunFolder.load(SMOKE), code) == then
    assert "cannot write /nowhere/summary.md" in capsys.readouterr().err


def test_a_stored_gate_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUMMARY, str(tmp_path / "summary.md"))
    done = invoke("report", str(GATES / "slow"), "--github")
    assert done.code == 3 and done.text.count("::error title=SLOWER flash_mla/none::") == 1
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").startswith("**SLOWER (exit 3)")


def test_a_summary_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUMMARY, "/nowhere/summary.md")
    done = invoke("report", str(SMOKE), "--github")
    assert done.code == 5 and "GITHUB_STEP_SUMMARY /nowhere/summary.md: No such file" in " ".join(done.lines)


def test_a_run_in_a_job_tells_it_by_itself(tmp_path: Path) -> None:
    """The whole way, on a kernel that is broken."""
    summary, file = tmp_path / "summary.md", tmp_path / "junit.xml"
    done = threearm("run", "sparse_prefill:s_q=4,s_kv=600,h_q=2,d_qk=512,topk=512,rows=ragged", "--arm", "broken_skips_last_pair/metadata",
                    "--time", "none", "--runs", str(tmp_path / "runs"), "--junit", str(file), **{SUMMARY: str(summary)})
    assert done.code == 1
    [line] = [line for line in done.lines if line.startswith("::error")]
    assert read_back(line)[1] == "FAILED broken_skips_last_pair/metadata"
    assert "#### What did not pass" in summary.read_text(encoding="utf-8")
    assert 'failures="1"' in file.read_text(encoding="utf-8")


def test_a_summary_that_cannot_be_written_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after it, where it is exit 5; one that can be is not spoken of."""
    monkeypatch.setenv(SUMMARY, "/nowhere/summary.md")
    words = ["run", TINY, "--arm", "no_such_kernel", "--device", "cpu"]
    warned = f"warning: {SUMMARY} /nowhere/summary.md: no such folder as /nowhere; the job will have no summary"
    assert invoke(*words).lines[0] == warned
    monkeypatch.setenv(SUMMARY, str(tmp_path / "summary.md"))
    assert SUMMARY not in invoke(*words).text


def test_a_run_that_has_not_finished_says_so_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the job's summary, in an annotation, on the terminal; and which arms are missing."""
    monkeypatch.setenv(SUMMARY, str(tmp_path / "summary.md"))
    kernel = {"name": "k", "family": "sparse_prefill", "arms": ["none", "metadata"]}
    folder = RunFolder.make(tmp_path / "cut", RunInfo("2026-01-01T00:00:00+00:00", ["threearm"], [TINY], [kernel], {}, {}))
    folder.add(record(Verdict.PASSED))
    said = "INCOMPLETE: 1 of 2 arm runs are there: 1 PASSED"
    done = invoke("report", str(folder.path), "--github")
    assert done.code == 4 and f"{folder.path}: {said} (exit 4)" in done.lines
    assert read_back(done.lines[0]) == ("warning", "threearm", f"{said} (exit 4)")
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith(f"**{said}**\n\n#### Missing\n\n```\nk/metadata  {TINY}\n```")
    done = invoke("report", str(folder.path))
    assert said in done.lines and f"  k/metadata  {TINY}" in done.lines
    folder.add(record(Verdict.PASSED, "k/metadata"))
    folder.finish()
    done = invoke("report", str(folder.path), "--markdown")
    assert done.code == 0 and done.lines[0] == "**PASSED: 2 of 2 arm runs PASSED**" and "Missing" not in done.text


def test_run_info_is_not_needed_to_be_on_a_disk() -> None:
    """A folder in memory (a plug-in's) has a page, too."""
    info = RunInfo("2026-01-01T00:00:00+00:00", ["threearm"], [TINY], [], {}, {})
    folder = RunFolder(None, info)
    folder.add(record(Verdict.FAILED))
    assert report_command.suites(folder)[0].cases[0].type == "FAILED"
