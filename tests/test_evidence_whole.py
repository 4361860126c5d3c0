"""An evidence folder that lacks something, holds it twice, or holds what is none of it is never reported as a pass: on copies of the stored
evidence of an H200."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.evidence import code_of
from harness.evidence_folder import EvidenceFolder
from harness.evidence_plans import PLANS, RUN, Asked, parts_of
from harness.runfolder import RunError
from reports.evidence_compare import side_by_side
from reports.evidence_page import code_word, verdict
from tests.processes import ROOT, invoke

COMMANDS = ROOT / "docs" / "evidence" / "commands"
NAME, MAIN = "bf16-topk-length", "span"
Edit = Callable[[Path], None]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of evidence all of which passed."""
    return Path(shutil.copytree(COMMANDS / NAME, tmp_path / "copy"))


def lines(file: str, change: Callable[[list[bytes]], list[bytes]]) -> Edit:
    """Other lines of a file."""
    def edit(path: Path) -> None:
        (path / file).write_bytes(b"".join(change((path / file).read_bytes().splitlines(keepends=True))))
    return edit


def value(file: str, change: Callable[[Any], object], line: int = -1) -> Edit:
    """Another value in a JSON file, or in one line of one."""
    def edit(path: Path) -> None:
        every = (path / file).read_bytes().splitlines(keepends=True)
        found = json.loads(every[line] if line >= 0 else b"".join(every))
        change(found)
        text = json.dumps(found).encode() + b"\n"
        (path / file).write_bytes(b"".join([*every[:line], text, *every[line + 1:]]) if line >= 0 else text)
    return edit


def both(*edits: Edit) -> Edit:
    def edit(path: Path) -> None:
        for each in edits:
            each(path)
    return edit


def gone(name: str) -> Edit:
    def edit(path: Path) -> None:
        shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()
    return edit


RECORDS, INFO, PAIRS = f"{MAIN}/records.jsonl", "evidence.json", "pairs.jsonl"
LACKING = {
    "records deleted": (gone(RECORDS), "0 of 6 case-runs PASSED; in all parts 74 of 92", "span: 18 of 18 records"),
    "records emptied": (lines(RECORDS, lambda every: []), "0 of 6 case-runs", "span: 18 of 18 records"),
    "records cut": (lines(RECORDS, lambda every: every[:3]), "1 of 6 case-runs PASSED; in all parts 77 of 92", "span: 15 of 18 records"),
    "an arm left out": (lines(RECORDS, lambda every: [each for each in every if b'"arm":"flash_mla/metadata"' not in each]),
                        "3 of 6 case-runs", "span: 3 of 18 records, first flash_mla/metadata on sparse_prefill:"),
    "the last line half": (lines(RECORDS, lambda every: [*every[:-1], every[-1][:-9]]), "5 of 6 case-runs", "span: 1 of 18 records"),
    "the list cut with the records": (both(value(f"{MAIN}/run.json", lambda run: run["cases"].__delitem__(slice(1, None))),
                                           lines(RECORDS, lambda every: [*every[:3], *every[9:12]])), "2 of 6 case-runs", "span: 12 of 18"),
    "the list alone": (value(f"{MAIN}/run.json", lambda run: run["cases"].pop()), "6 of 6", "the list of its run has 12 of 18 records"),
    "a run that has not finished": (value(f"{MAIN}/run.json", lambda run: run.update(finished="")), "6 of 6",
                                    "span: its run has not finished"),
    "a part's folder and its time": (both(gone("s-kv-sweep"), value(INFO, lambda info: info["parts"][2].update(seconds=0))), "6 of 6",
                                     "s-kv-sweep: all 14 records"),
    "a part's entry": (value(INFO, lambda info: info["parts"].pop(1)), "6 of 6", "topk-length-sweep: evidence.json has no such part"),
    "the main part's entry": (value(INFO, lambda info: info["parts"].pop(0)), "0 of 6", "span: evidence.json has no such part"),
    "every part's entry": (both(value(INFO, lambda info: info["parts"].__delitem__(slice(0, 3))), gone(PAIRS)), "0 of 6",
                           "span: evidence.json has no such part"),
    "a sweep beside a count": (value(INFO, lambda info: info["parts"][0].update(count=20)), "6 of 6", "18 of 20 records"),
    "no check": (value(RECORDS, lambda record: record.update(checks=[]), 0), "6 of 6", "checks or fingerprints of 1 record that PASSED"),
    "no check against the reference": (value(RECORDS, lambda r: r.update(checks=[c for c in r["checks"] if c["name"] != "reference"]), 0),
                                       "6 of 6", "checks or fingerprints of 1 record"),
    "no fingerprints": (value(RECORDS, lambda record: record.update(outputs={}), 0), "6 of 6", "checks or fingerprints of 1 record"),
    "no time": (value(RECORDS, lambda record: record.update(time=None), 0), "6 of 6", "50 samples, contract span, of 1 record that PASSED"),
    "few samples": (value(RECORDS, lambda record: record["time"].update(us=[1.0]), 0), "6 of 6", "50 samples, contract span, of 1"),
    "samples twice": (value(RECORDS, lambda r: r["time"].update(us=r["time"]["us"] * 2), 0), "6 of 6", "50 samples, contract span, of 1"),
    "pairs deleted": (gone(PAIRS), "6 of 6", "processes: 6 of 6 comparisons"),
    "pairs cut": (lines(PAIRS, lambda every: every[:1]), "6 of 6", "processes: 5 of 6 comparisons"),
    "the last pair half": (lines(PAIRS, lambda every: [*every[:-1], every[-1][:-9]]), "6 of 6", "processes: 1 of 6 comparisons"),
    "pairs beside a count": (value(INFO, lambda info: info["parts"][3].update(count=7)), "6 of 6", "processes: 1 of 7 comparisons"),
    "no interval": (value(PAIRS, lambda pair: pair[1].update(estimate=None), 0), "6 of 6", "processes: samples, or the interval, of 1"),
    "no processes": (value(PAIRS, lambda pair: pair[1].update(processes=[], estimate=None, samples=0), 0), "6 of 6",
                     "samples, or the interval, of 1"),
    "a process less": (value(PAIRS, lambda pair: pair[1]["processes"].pop(), 0), "6 of 6", "samples, or the interval, of 1"),
}
"""What is done to the folder, and what its first line says of case-runs and of what it lacks."""
NOTHING_RAN = ("every part's entry",)
"""Those of them that leave with 5."""


@pytest.mark.parametrize("what", LACKING)
def test_what_lacks_something_is_incomplete(what: str, copy: Path) -> None:
    edit, counts, lacks = LACKING[what]
    assert code_of(EvidenceFolder.load(copy)) == 0 and EvidenceFolder.load(copy).info.finished
    edit(copy)
    folder = EvidenceFolder.load(copy)
    first = verdict(folder)
    assert folder.info.finished == "" and first.startswith(f"**INCOMPLETE: {NAME}: "), first
    assert counts in first and "it lacks " in first and lacks in first, first
    done = invoke("report", str(copy), "--markdown")
    assert done.code == (5 if what in NOTHING_RAN else 4) and done.text.startswith(first)


WAYS = {"plain": [], "markdown": ["--markdown"], "rejudged": ["--rejudge"], "failures": ["--failures"], "junit": ["--junit", "FILE"],
        "html": ["--html", "FILE"]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", ["records cut", "pairs cut"])
def test_every_report_of_it_is_none_of_a_pass(way: str, what: str, copy: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    words = [str(file) if word == "FILE" else word for word in WAYS[way]]
    assert invoke("report", str(copy), *words).code == 0
    LACKING[what][0](copy)
    done = invoke("report", str(copy), *words)
    assert done.code == 4
    if way in ("junit", "html"):
        assert "INCOMPLETE" in file.read_text()
    if way == "junit":
        assert ElementTree.parse(file).getroot().get("errors") != "0"
    if way in ("plain", "rejudged"):
        assert "incomplete: " in done.text and "  lacks " in done.text and "INCOMPLETE: " in done.text


def test_what_is_wrong_stays_the_worst_of_what_is_cut(tmp_path: Path) -> None:
    path = Path(shutil.copytree(COMMANDS / "litetopk", tmp_path / "copy"))
    gone("crossover/records.jsonl")(path)
    folder = EvidenceFolder.load(path)
    assert code_of(folder) == 1 and code_word(folder) == "FAILED"
    assert "0 of 4 case-runs" in verdict(folder) and "it lacks crossover: 8 of 8 records" in verdict(folder)


REFUSED = {
    "another name": (value(INFO, lambda info: info.update(name="nix")),
                     "this threearm knows no evidence 'nix': there is q8kv8-topk-length"),
    "records twice": (lines(RECORDS, lambda every: every * 2), "two records of flash_mla/none on "),
    "a record twice": (lines(RECORDS, lambda every: [*every, every[4]]), "two records of "),
    "a record of another part": (lines(RECORDS, lambda every: [*every, b"".join(every[:1]).replace(b"s_q=4096", b"s_q=4095")]),
                                 "is none of the part's records"),
    "a pair twice": (lines(PAIRS, lambda every: [*every, every[0]]), "a comparison is there twice"),
    "a pair of no part": (value(PAIRS, lambda pair: pair[0].update(base="other/none"), 0), "against other/none on sparse_prefill:"),
    "a pair's contract": (value(PAIRS, lambda pair: pair[1].update(contract="x"), 0), "a time of contract 'x', the part's is 'span'"),
    "a record's contract": (value(RECORDS, lambda record: record["time"].update(contract="wall"), 0), "a time of contract 'wall'"),
    "a newer comparison": (value(PAIRS, lambda pair: pair[1].update(schema=99), 0), "pairs.jsonl line 1: schema 99 is of a newer threearm"),
    "a newer pairing": (value(PAIRS, lambda pair: pair[0].update(schema=99), 2), "pairs.jsonl line 3: schema 99 is of a newer threearm"),
    "a third half": (value(PAIRS, lambda pair: pair.append({"schema": 99}), 0), "pairs.jsonl line 1: "),
    "no samples": (value(PAIRS, lambda pair: pair[1]["processes"][0][0]["bursts"][0].update(us=[]), 0), "samples in microseconds"),
    "no side": (value(PAIRS, lambda pair: pair[1]["processes"][0][0]["bursts"][0].update(side=""), 0), "must have a side"),
    "an endless sample": (value(PAIRS, lambda pair: pair[1]["processes"][0][0]["bursts"][0].update(us=[1e300]), 0), "in microseconds"),
    "a ratio of 0": (value(PAIRS, lambda pair: pair[1]["estimate"].update(ratio=0.0), 0), "a ratio within its interval"),
    "pairs without their part": (value(INFO, lambda info: info["parts"].pop()), "is of no part"),
    "a part twice": (value(INFO, lambda info: info["parts"].append(info["parts"][0])), "parts: one is there twice"),
    "another part": (value(INFO, lambda info: info["parts"][0].update(name="spam")), "has no part 'spam' of kind 'run'"),
    "another kind": (value(INFO, lambda info: info["parts"][0].update(kind="pairs")), "has no part 'span' of kind 'pairs'"),
    "no contract": (value(INFO, lambda info: info["parts"][0].update(contract="")), "span: contract '', 50 samples"),
    "0 samples": (value(INFO, lambda info: info["parts"][0].update(samples=0)), "span: contract 'span', 0 samples"),
    "reduced": (value(INFO, lambda info: info.update(reduced=True)), "reduced is true, but the device is cuda"),
    "a kernel less": (value(INFO, lambda info: info["kernels"].pop()), "is none of the part's records"),
    "a kernel without arms": (value(INFO, lambda info: info["kernels"][0].pop("arms")), "kernels: one has no family, or arms"),
    "asked for a word": (value(INFO, lambda info: info["options"]["asked"].update(processes="x")), "options: asked: "),
    "no start": (value(INFO, lambda info: info.update(started="")), "started: '' is no local time"),
    "no folder of a part": (gone("s-kv-sweep"), "s-kv-sweep is not a run folder"),
}
"""What is done to the folder, and what is said of it."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_evidence_is_refused_in_a_line(what: str, copy: Path) -> None:
    edit, says = REFUSED[what]
    edit(copy)
    with pytest.raises(RunError) as refused:
        EvidenceFolder.load(copy)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    done = invoke("report", str(copy))
    assert done.code == 2 and "Traceback" not in done.text


@pytest.mark.parametrize("name", PLANS)
def test_stored_evidence_is_whole_by_the_plan_and_by_what_its_parts_count(name: str) -> None:
    folder = EvidenceFolder.load(COMMANDS / name)
    assert folder.lacking() == [] and folder.info.finished
    for part in folder.info.parts:
        assert part.count == -1, "these were made before parts had a count"
        part.count = len(folder.runs[part.name].records) if part.kind == RUN else len(folder.pairs)
    assert folder.lacking() == []


def test_a_run_that_the_plan_of_another_day_listed_is_whole_by_its_count(copy: Path) -> None:
    value(f"{MAIN}/run.json", lambda run: run["cases"].pop())(copy)
    lines(RECORDS, lambda every: [*every[:6], *every[9:15]])(copy)
    lines(PAIRS, lambda every: [*every[:2], *every[3:5]])(copy)
    value(INFO, lambda info: (info["parts"][0].update(count=12), info["parts"][3].update(count=4)))(copy)
    records = [json.loads(each) for each in (copy / RECORDS).read_bytes().splitlines()]
    assert {record["case"] for record in records} == set(json.loads((copy / MAIN / "run.json").read_text())["cases"])
    folder = EvidenceFolder.load(copy)
    assert folder.lacking() == [] and "PASSED: bf16-topk-length: 4 of 4 case-runs" in verdict(folder)


def test_what_was_not_asked_for_is_not_lacking(copy: Path) -> None:
    value(INFO, lambda info: info["options"]["asked"].update(sweeps=False, processes=0))(copy)
    value(INFO, lambda info: info["parts"].__delitem__(slice(1, None)))(copy)
    gone(PAIRS)(copy)
    assert [part.name for part in parts_of(PLANS[NAME], False, Asked(sweeps=False, processes=0))] == [MAIN]
    folder = EvidenceFolder.load(copy)
    assert folder.lacking() == [] and folder.info.finished and code_of(folder) == 0


def test_a_folder_that_ends_without_all_has_not_finished(copy: Path) -> None:
    folder = EvidenceFolder.load(copy)
    folder.finish(complete=True)
    assert folder.info.finished
    folder.pairs.pop()
    folder.finish(complete=True)
    assert folder.info.finished == "" == json.loads((copy / INFO).read_text())["finished"]


def test_side_by_side_says_which_was_cut_short(copy: Path) -> None:
    here = EvidenceFolder.load(COMMANDS / NAME)
    assert "cut short" not in side_by_side(here, EvidenceFolder.load(copy))
    gone(PAIRS)(copy)
    assert "What is there has not finished, or was cut short." in side_by_side(here, EvidenceFolder.load(copy))
