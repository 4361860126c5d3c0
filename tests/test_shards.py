"""Parts of a case list: dealt the same everywhere, put together to what a whole run leaves, refused where they are no parts of one."""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import ROOT, TINY, TINY_TOPK, invoke, threearm

from cases import parse_case
from cases.suites import override
from harness.asking import Settings
from harness.client import WorkerOptions
from harness.record import Record, Timing
from harness.runfolder import RunError, RunFolder, RunInfo, output_name
from harness.shards import Shard, merge, parse_shard
from harness.verdicts import Verdict

CASES = [str(override(parse_case(TINY), f"h_q={h_q}")) for h_q in range(1, 6)]
SOURCES = ("none", "metadata")
KERNEL: dict[str, Any] = {"name": "k", "family": "sparse_prefill", "arms": list(SOURCES), "version": "1.0", "why_not": "", "imports": "",
                          "refused": {}}
MACHINE = {"gpu": "NVIDIA H200", "driver": "580", "threearm": "0.1.0, commit a"}


def test_every_case_is_in_one_part() -> None:
    for count in range(1, 8):
        parts = [Shard(index, count).of(CASES) for index in range(1, count + 1)]
        assert sorted(case for part in parts for case in part) == sorted(CASES)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert Shard(2, 3).of(CASES) == [CASES[1], CASES[4]]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1 / 2", "١/٢", "1/99999"])
def test_what_is_no_part_is_refused(text: str) -> None:
    assert parse_shard("2/4") == Shard(2, 4)
    with pytest.raises(ValueError, match="it must be i/n"):
        parse_shard(text)


def record(case: str, source: str, verdict: Verdict = Verdict.PASSED, out: str = "aa", timed: bool = False) -> Record:
    ran = verdict is not Verdict.SKIPPED
    return Record(case, f"k/{source}", verdict, inputs={"all": "cc"} if ran else {}, outputs={"out": out} if ran else {},
                  time=Timing("kernel", "flushed", "interleaved", [1.0]) if timed else None)


def part(root: Path, index: int, count: int = 2, timed: bool = False, **changed: Any) -> RunFolder:
    """A part's folder, all of it passed. changed: kernel, machine, settings, whole, schema."""
    options = {"worker": dataclasses.asdict(WorkerOptions("cuda", False, (), 1 << 30)), "shard": f"{index}/{count}",
               "settings": dataclasses.asdict(changed.get("settings", Settings("kernel" if timed else ""))),
               "whole": changed.get("whole", CASES), "unavailable": {"other": "needs SM100"}}
    info = RunInfo(f"2026-01-01T00:00:0{index}+00:00", ["threearm", "run"], Shard(index, count).of(CASES),
                   [{**KERNEL, **changed.get("kernel", {})}], {**MACHINE, **changed.get("machine", {})}, options, changed.get("schema", 1),
                   "2026-01-01T00:00:09+00:00")
    folder = RunFolder.make(root / f"part{len(list(root.iterdir()))}", info)
    for case in info.cases:
        for source in info.kernels[0]["arms"]:
            folder.add(dataclasses.replace(record(case, source, timed=timed), arm=f"{info.kernels[0]['name']}/{source}"))
    return folder


def test_parts_together_are_what_a_whole_run_leaves(tmp_path: Path) -> None:
    merged = merge([part(tmp_path, 2, timed=True), part(tmp_path, 1, timed=True)], ["threearm", "merge"])
    assert [(r.case, r.source) for r in merged.records] == [(case, source) for case in CASES for source in SOURCES]
    assert (merged.info.cases, merged.missing, merged.notes) == (CASES, [], [])
    assert merged.info.kernels == [KERNEL] and merged.info.machine == MACHINE
    assert merged.info.started == "2026-01-01T00:00:01+00:00"
    assert [each["shard"] for each in merged.info.options["merged"]["parts"]] == ["2/2", "1/2"]
    assert merged.info.options["unavailable"] == {"other": "needs SM100"} and "shard" not in merged.info.options
    assert all(not record.note for record in merged.records)


def with_options(folder: RunFolder, **options: Any) -> RunFolder:
    folder.info.options.update(options)
    return folder


def test_a_record_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    """Left out it would be a failure that nobody hears of."""
    one, two = part(tmp_path, 1), part(tmp_path, 2)
    two.add(record(CASES[1], "zzz", Verdict.FAILED))
    with pytest.raises(RunError, match=r"has a record of k/zzz on .*, which is not in its list"):
        merge([one, two], [])


def test_parts_of_another_device_or_with_another_kernel_file_are_refused(tmp_path: Path) -> None:
    one, two, cpu = part(tmp_path, 1), part(tmp_path, 2), part(tmp_path, 2)
    cpu.info.options["worker"]["device"] = "cpu"
    with pytest.raises(RunError, match=r"was run with device cpu, .* with cuda"):
        merge([one, cpu], [])
    with_options(one, loaded={"/a/k.py": "aa"})
    merge([one, two], [])  # an older folder, which does not say
    merge([one, with_options(two, loaded={"/b/k.py": "aa"})], [])
    with pytest.raises(RunError, match=r"was run with kernel files \['bb'\]"):
        merge([one, with_options(two, loaded={"/a/k.py": "bb"})], [])


def test_what_no_part_has_is_missing(tmp_path: Path) -> None:
    merged = merge([part(tmp_path, 1, 3), part(tmp_path, 3, 3)], [])
    assert merged.missing == [(case, f"k/{source}") for case in (CASES[1], CASES[4]) for source in SOURCES]
    other = part(tmp_path, 2, 3, kernel={"name": "l"})
    assert {arm for _, arm in merge([part(tmp_path, 1, 3), other], []).missing} == {"k/none", "k/metadata", "l/none", "l/metadata"}


def test_arms_are_of_all_parts(tmp_path: Path) -> None:
    merged = merge([part(tmp_path, 1, kernel={"arms": ["metadata"]}), part(tmp_path, 2)], [])
    assert merged.info.kernels[0]["arms"] == ["metadata", "none"]
    assert merged.missing == [(case, "k/none") for case in CASES[::2]]


@pytest.mark.parametrize(("changed", "said"), [
    ({"whole": [*CASES, TINY_TOPK]}, f"is of another case list than .*: {TINY_TOPK} is in one of them alone"),
    ({"whole": CASES[::-1]}, "the same cases in another order"),
    ({"schema": 0}, "has schema 0, .* has 1"),
    ({"kernel": {"version": "1.1"}}, "k has version 1.1 in .*part1, 1.0 in .*part0"),
    ({"settings": Settings(samples=99)}, "was run with samples 99, .* with 30"),
    ({"settings": Settings("wall")}, "was run with contract wall")])
def test_what_belongs_not_together_is_refused_in_a_line(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError, match=said) as caught:
        merge([part(tmp_path, 1), part(tmp_path, 2, **changed)], [])
    assert "\n" not in str(caught.value) and "part1" in str(caught.value)


@pytest.mark.parametrize("changed", [{"machine": {"threearm": "0.1.0, commit b"}}, {"machine": {"driver": "570"}}])
def test_another_revision_or_driver_is_told(tmp_path: Path, changed: dict[str, Any]) -> None:
    merged = merge([part(tmp_path, 1), part(tmp_path, 2, **changed)], [])
    (name, value), = changed["machine"].items()
    assert merged.notes == [f"the parts differ in {name}: {MACHINE[name]} | {value}"]
    assert merged.info.machine[name] == f"{MACHINE[name]} | {value}"


def test_a_kernel_that_one_part_cannot_run_is_as_the_other_has_it(tmp_path: Path) -> None:
    """Its version is unknown where its package is not installed."""
    without = part(tmp_path, 1, kernel={"version": "", "why_not": "package k is not installed"})
    assert merge([without, part(tmp_path, 2)], []).info.kernels[0] == KERNEL


def with_record(root: Path, index: int, added: Record) -> RunFolder:
    folder = part(root, index)
    folder.add(added)
    return folder


@pytest.mark.parametrize(("twice", "said"), [
    (record(CASES[0], "none"), ""), (record(CASES[0], "none", Verdict.SKIPPED), ""),
    (record(CASES[0], "none", out="bb"), "its outputs differ: out"),
    (record(CASES[0], "none", Verdict.FLAKY), "is PASSED in the first, FLAKY in the second"),
    (dataclasses.replace(record(CASES[0], "none"), inputs={"all": "dd"}), "its inputs differ: all")])
def test_a_record_that_is_there_twice_must_be_the_same(tmp_path: Path, twice: Record, said: str) -> None:
    folders = [part(tmp_path, 1), with_record(tmp_path, 2, twice)]
    if said:
        with pytest.raises(RunError, match=f"k/none on {CASES[0]} is in .*part0 and in .*part1, and {said}"):
            merge(folders, [])
    else:
        assert merge(folders, []).records == merge(folders[::-1], []).records
        assert merge(folders[::-1], []).records[0].verdict is Verdict.PASSED


def test_times_of_different_gpus_are_kept_apart(tmp_path: Path) -> None:
    def parts(timed: bool) -> list[RunFolder]:
        return [part(tmp_path, 1, timed=timed), part(tmp_path, 2, timed=timed, machine={"gpu": "NVIDIA H100"})]

    assert merge(parts(False), []).records
    with pytest.raises(RunError, match=r"times of different machines: NVIDIA H200 in .*, NVIDIA H100 in .*; --times-apart keeps both"):
        merge(parts(True), [])
    merged = merge(parts(True), [], times_apart=True)
    assert {r.case: r.note for r in merged.records} == {
        case: f"timed on NVIDIA {'H100' if case in CASES[1::2] else 'H200'}" for case in CASES}
    assert any("compare them within a case alone" in note for note in merged.notes)


def test_times_of_one_case_are_of_one_machine(tmp_path: Path) -> None:
    """Another kernel's time on another GPU would stand in the same row, and the ratio below it."""
    one, other = part(tmp_path, 1, timed=True), part(tmp_path, 1, timed=True, kernel={"name": "l"}, machine={"gpu": "NVIDIA H100"})
    other.records[:] = [dataclasses.replace(record, arm=record.arm.replace("k/", "l/")) for record in other.records]
    with pytest.raises(RunError, match="times of one case must be of one machine"):
        merge([one, other], [], times_apart=True)


def test_the_command_writes_a_run_folder(tmp_path: Path) -> None:
    folders = [part(tmp_path, 1), part(tmp_path, 2)]
    for folder, text in zip(folders, ("first", "second")):
        assert folder.path
        (folder.path / "worker.log").write_text(f"the {text} printed\n")
        saved = folder.output_file(folder.records[0])
        assert saved
        saved.parent.mkdir()
        saved.write_text(text)
    into = tmp_path / "new" / "whole"
    done = invoke("merge", *(str(folder.path) for folder in folders), "--into", str(into))
    assert done.code == 0 and "10 PASSED" in done.lines and f"records: {into}" in done.lines, done.text
    stored = RunFolder.load(into)
    assert len(stored.records) == 10 and stored.info.finished and stored.missing() == []
    assert (into / "outputs" / output_name(folders[1].records[0])).read_text() == "second"
    log = (into / "worker.log").read_text()
    assert "the first printed" in log and f"=== {folders[1].path}\nthe second printed" in log
    again = invoke("merge", str(folders[0].path), "--into", str(into))
    assert again.code == 2 and "File exists" in again.text


def failed(folder: RunFolder) -> None:
    assert folder.path
    lines = (folder.path / "records.jsonl").read_bytes().splitlines()
    changed = {**json.loads(lines[0]), "verdict": "FAILED"}
    (folder.path / "records.jsonl").write_bytes(b"\n".join([msgspec.json.encode(changed), *lines[1:], b""]))


@pytest.mark.parametrize(("change", "code"), [(lambda folder: None, 4), (failed, 1)])
def test_a_part_that_is_missing_is_no_success(tmp_path: Path, change: Callable[[RunFolder], None], code: int) -> None:
    one = part(tmp_path, 1)
    change(one)
    done = invoke("merge", str(one.path), "--into", str(tmp_path / "whole"))
    assert done.code == code and f"  k/none  {CASES[1]}" in done.lines
    assert "incomplete: 6 of 10 arm runs are there" in done.lines
    assert RunFolder.load(tmp_path / "whole").info.finished == ""


@pytest.mark.parametrize(("folder", "said"), [
    ("gates/slow", "it is a gate's folder; run folders in it: base, candidate"),
    ("commands/litetopk", "it is an evidence folder; run folders in it: crossover, scale"),
    ("nothing", "there is no such path"), ("README.md", "it is a file"), ("gates", "it holds 4 of them; name one, such as ")])
def test_what_is_no_run_is_told_for_what_it_is(folder: str, said: str, tmp_path: Path) -> None:
    path = ROOT / "docs" / "evidence" / folder
    done = invoke("merge", str(path), "--into", str(tmp_path / "whole"))
    assert done.code == 2 and len(done.lines) == 1 and f"{path} is not a run folder: {said}" in done.text


@pytest.mark.parametrize(("words", "said"), [
    (["report", "runs/nope"], "there is no such path"), (["history", "nope"], "there is no such path"),
    (["report", "docs/evidence/runs"], "it holds 20 of them; name one, such as docs/evidence/runs/timing-fp8-span"),
    (["report", "docs/images"], "it has no evidence.json or gate.json or run.json"),
    (["evidence", "litetopk", "--compare", "docs/evidence/gates/slow"], "is not an evidence folder: it is a gate's folder"),
    (["evidence", "litetopk", "--compare", "docs/evidence/runs/edge"], "is not an evidence folder: it is a run's folder")])
def test_another_folder_than_asked_for(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = invoke(*words)
    assert done.code == 2 and len(done.lines) == 1 and said in done.text


def test_a_case_list_in_two_parts_and_the_rest_gone_on_with(tmp_path: Path) -> None:
    """Real runs: one part is merged alone, and what it lacks is then run."""
    (tmp_path / "list.txt").write_text("\n".join([*CASES[:3], TINY_TOPK]))
    arguments = ["run", "--suite", str(tmp_path / "list.txt"), "--arm", "torch_blocks", "--arm", "torch_dense", "--device", "cpu", "--time",
                 "none", "--runs", str(tmp_path / "runs")]
    first = threearm(*arguments, "--shard", "1/2")
    assert first.code == 0 and "6 PASSED" in first.lines
    assert threearm("merge", str(next((tmp_path / "runs").iterdir())), "--into", str(tmp_path / "whole")).code == 4
    rest = threearm("run", "--resume", str(tmp_path / "whole"))
    assert rest.code == 0 and "10 PASSED" in rest.lines
    stored = RunFolder.load(tmp_path / "whole")
    assert stored.missing() == [] and stored.info.finished
    for text, said in (("5/5", "of 4 cases none is left"), ("3/2", "it must be i/n")):
        refused = invoke(*arguments, "--shard", text)
        assert refused.code == 2 and len(refused.lines) == 1 and said in refused.text
