"""JUnit XML: every verdict in its place, counts that add up, and never a success where the command's exit code is none."""
from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from processes import ROOT, TINY, invoke

from harness import report_command
from harness.comparison import Change, TimeVerdict
from harness.gate_folder import GateFolder
from harness.mutants_file import MutantsFile, save
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo
from harness.stored import folders_below, open_folder
from harness.verdicts import Check, Verdict
from reports import junit

STORED = folders_below(ROOT / "docs" / "evidence")
GATES = ROOT / "docs" / "evidence" / "gates"
INFO = RunInfo("2026-01-01T00:00:00+00:00", ["threearm", "run"], [TINY], [], {"gpu": "NVIDIA H200", "torch": "2.11.0"}, {},
               finished="2026-01-01T00:01:00+00:00")
WRONG = "\x00\x1b[31m<b>&]]>\x7f ☃ \ud800"
"""What a kernel may say: characters that XML has not, markup, and half of a pair."""


def record(verdict: Verdict, arm: str = "k/none", detail: str = "") -> Record:
    check = Check("reference", verdict, "out is too far off", {"out": 2.0})
    return Record(TINY, arm, verdict, detail, [check] if verdict in (Verdict.PASSED, Verdict.FAILED, Verdict.VACUOUS) else [],
                  seconds={"inputs": 1.0, "reference": 2.0, "arm": 0.25})


def xml(records: list[Record], code: int = 0) -> ElementTree.Element:
    return ElementTree.fromstring(junit.document(junit.of_run(INFO, records, lambda record: ["--device", "cuda"]), code))


def check_counts(root: ElementTree.Element) -> None:
    """That what readers of JUnit add up does add up: pytest's, Jenkins' and GitLab's take these attributes."""
    assert root.tag == "testsuites"
    for group in [root, *root.findall("testsuite")]:
        cases = group.findall(".//testcase")
        counted = {"tests": len(cases), "failures": len(group.findall(".//failure")), "errors": len(group.findall(".//error")),
                   "skipped": len(group.findall(".//skipped"))}
        assert {name: int(group.attrib[name]) for name in counted} == counted
        seconds = sum(float(case.attrib["time"]) for case in cases)
        assert float(group.attrib["time"]) == pytest.approx(seconds, abs=0.001 * len(cases) + 1e-3)
    for case in root.findall(".//testcase"):
        assert case.attrib["name"] and case.attrib["classname"]
        assert [child.tag for child in case] in ([], ["failure"], ["error"], ["skipped"], ["system-out"], ["failure", "system-out"],
                                                 ["error", "system-out"], ["skipped", "system-out"])
        assert all(child.attrib["message"] for child in case if child.tag != "system-out")


@pytest.mark.parametrize(("verdict", "tag"), [
    (Verdict.PASSED, ""), (Verdict.SKIPPED, "skipped"), (Verdict.ERROR, "error"), *((verdict, "failure") for verdict in (
        Verdict.VACUOUS, Verdict.FLAKY, Verdict.FAILED, Verdict.OOM, Verdict.TIMEOUT, Verdict.CRASHED))])
def test_only_a_pass_is_one(verdict: Verdict, tag: str) -> None:
    root = xml([record(verdict, detail="why not")])
    check_counts(root)
    case = root.find("testsuite/testcase")
    assert case is not None and [child.tag for child in case] == ([tag] if tag else [])
    if tag:
        assert case[0].get("type") == (None if tag == "skipped" else verdict.value)
        assert f"threearm replay {TINY} --arm k/none --device cuda" in (case[0].text or "")
        assert "why not" in case[0].attrib["message"]


def test_a_suite_a_kernel_and_a_case_an_arm() -> None:
    root = xml([record(Verdict.PASSED, "k/none"), record(Verdict.FAILED, "k/backscan"), record(Verdict.PASSED, "other/none")])
    assert [suite.attrib["name"] for suite in root] == ["k", "other"]
    case = root[0].findall("testcase")[1]
    assert (case.attrib["classname"], case.attrib["name"]) == ("sparse_prefill.k", f"{TINY} [backscan]")
    properties = {each.attrib["name"]: each.attrib["value"] for each in root[0].findall("properties/property")}
    assert properties == INFO.machine
    # what is made once for a case is counted once
    assert [float(case.attrib["time"]) for case in root.findall(".//testcase")] == [3.25, 0.25, 3.25]


def test_anything_that_a_kernel_says_can_be_read_back() -> None:
    failing = record(Verdict.FAILED)
    failing.checks[0].detail = WRONG
    failing.note, failing.detail = WRONG, WRONG
    root = xml([failing, record(Verdict.SKIPPED, "k/backscan", WRONG)])
    check_counts(root)
    said = "\\x00\\x1b[31m<b>&]]>\x7f ☃ \\ud800"
    found = root.find(".//failure")
    assert found is not None and said in (found.text or "") and said in found.attrib["message"]
    assert root.find(".//skipped").attrib["message"] == said  # type: ignore[union-attr]


def test_an_exit_code_that_no_testcase_shows_is_told() -> None:
    """All skipped is exit 5: a CI server that reads the file alone must not call it a success."""
    skipped = [record(Verdict.SKIPPED, detail="no GPU")]
    assert xml(skipped).find(".//error") is None
    root = xml(skipped, code=5)
    check_counts(root)
    assert root.find(".//error").attrib["type"] == "exit 5"  # type: ignore[union-attr]
    failed = xml([record(Verdict.FAILED)], code=1)
    assert failed.find(".//error") is None and len(failed) == 1


@pytest.mark.parametrize(("verdict", "failures"), [(Verdict.PASSED, 0), (Verdict.FAILED, 1)])
def test_what_a_run_lacks_is_an_error_with_its_names(verdict: Verdict, failures: int) -> None:
    """Of one that has a failure besides, too."""
    kernel = {"name": "k", "family": "sparse_prefill", "arms": ["none", "backscan", "metadata"]}
    info = RunInfo(INFO.started, INFO.command, [TINY], [kernel], INFO.machine, {})
    root = ElementTree.fromstring(junit.document(junit.of_run(info, [record(verdict)], lambda record: []), 4))
    check_counts(root)
    [error] = root.findall(".//error")
    assert error.attrib == {"type": "INCOMPLETE", "message": "INCOMPLETE: 1 of 3 arm runs are there"}
    assert [arm in (error.text or "") for arm in ("k/none", "k/backscan", "k/metadata")] == [False, True, True]
    assert len(root.findall(".//failure")) == failures
    info.finished = INFO.finished
    assert not ElementTree.fromstring(junit.document(junit.of_run(info, [record(verdict)], lambda record: []))).findall(".//error")


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_stored_folders_fail_in_xml_as_they_do_on_the_command_line(path: Path) -> None:
    folder = open_folder(path)
    code = report_command.code_again(folder)
    root = ElementTree.fromstring(junit.document(report_command.suites(folder), code, report_command.why([folder], [code])))
    check_counts(root)
    assert bool(root.findall(".//failure") + root.findall(".//error")) is bool(code)
    if isinstance(folder, RunFolder):
        assert len(root.findall(".//testcase")) == len(folder.records) + (not folder.info.finished)
    names = [(suite.attrib["name"], case.attrib["name"]) for suite in root for case in suite.findall("testcase")]
    assert len(set(names)) == len(names)


def gate_xml(folder: GateFolder) -> ElementTree.Element:
    return ElementTree.fromstring(junit.document(report_command.suites(folder)))


def test_a_gate_fails_where_it_counts() -> None:
    same, slow, change = (GateFolder.load(GATES / name) for name in ("same", "slow", "change"))
    assert not gate_xml(same).findall(".//failure")
    assert {each.attrib["type"] for each in gate_xml(slow).findall(".//failure")} == {"SLOWER"}
    found = gate_xml(change).findall(".//failure")
    assert {each.attrib["type"] for each in found} == {"promise changed"} and len(found) == len(change.transitions)
    assert any("UNRESOLVED" in (each.text or "") for each in found)
    same.transitions[0] = dataclasses.replace(same.transitions[0], change=Change.BROKE, detail="reference: out is too far off", time=None)
    found = gate_xml(same).findall(".//failure")
    assert [each.attrib["type"] for each in found] == ["PASS->FAIL"] and "repeat the base: threearm replay" in (found[0].text or "")


@pytest.mark.parametrize(("change", "fails"), [(Change.NUMBERS, False), (Change.STILL_BAD, False), (Change.FIXED, False),
                                               (Change.UNKNOWN, True), (Change.GONE, True), (Change.HANG, True)])
def test_what_became_of_an_arm(change: Change, fails: bool) -> None:
    folder = GateFolder.load(GATES / "same")
    folder.transitions = [dataclasses.replace(folder.transitions[0], change=change, detail="something", time=None)]
    root = gate_xml(folder)
    assert bool(root.findall(".//failure")) is fails
    assert fails or change.value in (root.findtext(".//system-out") or "")


def test_other_bits_fail_a_bitwise_gate() -> None:
    folder = GateFolder.load(GATES / "same")
    folder.transitions = [dataclasses.replace(folder.transitions[0], change=Change.NUMBERS, time=None)]
    folder.info.options["bitwise"] = True
    assert gate_xml(folder).findall(".//failure")


def test_paired_times_fail_where_they_are_none() -> None:
    pairs = [(found.pairing, found.time) for found in GateFolder.load(GATES / "slow").transitions[:2] if found.time]
    good = ElementTree.fromstring(junit.document([junit.of_pairs("pairs", pairs, "", {})]))
    check_counts(good)
    assert not good.findall(".//failure") and "% [+" in (good.findtext(".//system-out") or "")
    pairs[1] = pairs[1][0], dataclasses.replace(pairs[1][1], verdict=TimeVerdict.INVALID, why="a side ended")
    [found] = ElementTree.fromstring(junit.document([junit.of_pairs("pairs", pairs, "", {})])).findall(".//failure")
    assert found.attrib == {"type": "INVALID", "message": "a side ended"}


# --- the command ------------------------------------------------------------------------------------------------------


def test_several_folders_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "all.xml"
    done = invoke("report", str(GATES / "slow"), str(ROOT / "docs/evidence/runs/timing-fp8"), "--junit", str(file))
    assert done.code == 3 and "10 of 10 times are SLOWER" in done.text and "PASSED: 15 of 15 arm runs PASSED (exit 0)" in done.text
    root = ElementTree.parse(file).getroot()
    check_counts(root)
    assert int(root.attrib["tests"]) == 25


@pytest.mark.parametrize(("words", "told"), [
    (["--junit", "/nowhere/x.xml"], "--junit /nowhere/x.xml: no such folder as /nowhere"),
    (["--junit", "/tmp"], "--junit /tmp: it is a folder"), (["--html", "/tmp"], "--html /tmp: it is a folder"),
    (["--junit", "/proc/x.xml"], "--junit /proc/x.xml: ")])
def test_a_file_that_cannot_be_written_is_one_line(words: list[str], told: str) -> None:
    done = invoke("report", str(GATES / "slow"), *words)
    assert done.code in (2, 5) and told in done.text


@pytest.mark.parametrize("words", [
    ["run", "--junit"], ["gate", "--base", "x", "--candidate", "y", "--junit"], ["gate", "--base", "x", "--candidate", "y", "--markdown"],
    ["evidence", "litetopk", "--out"], ["evidence", "litetopk", "--junit"], ["history", str(GATES), "--html"], ["mutants", "--html"],
    ["mutants", "--json"], ["calibrate", "--out"], ["report", str(GATES / "slow"), "--html"]])
def test_a_folder_as_a_file_is_refused_before_the_work(words: list[str], tmp_path: Path) -> None:
    done = invoke(*words, str(tmp_path))
    assert done.code == 2 and " ".join(done.lines).endswith(f"{words[-1]} {tmp_path}: it is a folder")


@pytest.mark.parametrize(("option", "first"), [("--markdown", "**SLOWER (exit 3)"), ("--failures", "SLOWER (exit 3)")])
def test_what_is_shown_and_what_is_written_come_together(option: str, first: str, tmp_path: Path) -> None:
    file, page = tmp_path / "x.xml", tmp_path / "x.html"
    alone = invoke("report", str(GATES / "slow"), option)
    done = invoke("report", str(GATES / "slow"), option, "--html", str(page), "--junit", str(file))
    assert done == alone and done.code == 3 and done.text.startswith(first)
    assert file.stat().st_size and page.stat().st_size
    both = invoke("report", str(GATES / "slow"), "--markdown", "--failures")
    assert both.code == 2 and "give one of --markdown and --failures" in both.text


def test_several_folders_are_not_shown_on_a_terminal() -> None:
    done = invoke("report", str(GATES / "slow"), str(GATES / "same"))
    assert done.code == 2 and "--html and --junit alone" in done.text


def test_a_page_of_several_and_of_a_matrix(tmp_path: Path) -> None:
    page, stored = tmp_path / "page.html", tmp_path / "mutants.json"
    save(stored, MutantsFile(INFO, 0, [], "cpu", True, [], [], [], {}, [], {}, 0, 0, False))
    words = ["report", str(ROOT / "docs/evidence/runs/timing-fp8"), str(GATES / "slow"), "--mutants", str(stored)]
    assert (done := invoke(*words)).code == 2 and "--html and --junit alone" in done.text
    assert (done := invoke(*words[:2], *words[3:])).code == 2 and "--mutants is a part of --html" in done.text
    assert (done := invoke(*words, "--html", str(page))).code == 3, done.text
    assert page.stat().st_size > 10_000
    stored.write_text("{}")
    assert (done := invoke(*words, "--html", str(page))).code == 2 and "is no file of `threearm mutants --json`" in " ".join(done.lines)


def test_a_gate_writes_it_too(tmp_path: Path) -> None:
    """Two stored runs need no worker; the second is the first with a failure."""
    good, bad, file = tmp_path / "good", tmp_path / "bad", tmp_path / "gate.xml"
    for path, verdict in ((good, Verdict.PASSED), (bad, Verdict.FAILED)):
        kernel = {"name": "k", "family": "sparse_prefill", "arms": ["none"], "why_not": "", "version": "1", "refused": {}}
        run = RunFolder.make(path, RunInfo(INFO.started, INFO.command, [TINY], [kernel], INFO.machine, {}))
        run.add(record(verdict))
        run.finish()
        run.guard.close()
    done = invoke("gate", "--base", str(good), "--candidate", str(bad), "--runs", str(tmp_path / "runs"), "--junit", str(file))
    root = ElementTree.parse(file).getroot()
    check_counts(root)
    assert bool(root.findall(".//failure") + root.findall(".//error")) and done.code != 0
