"""A run's folder: what is written is read back, and what cannot be is one line."""
from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import TINY

from harness.record import Lengths, Record, Timing
from harness.runfolder import RunError, RunFolder, RunInfo, exit_code
from harness.verdicts import SOURCES, Check, Verdict


def info() -> RunInfo:
    return RunInfo("2026-01-01T00:00:00+00:00", ["threearm", "run"], [TINY], [], {"gpu": "NVIDIA H200"}, {})


def full_record(arm: str = "k/none") -> Record:
    """A record with every field set."""
    check = Check("reference", Verdict.FAILED, "out: error is 2 times its budget", margins={"out": 2.0, "lse": 0.1}, bad=3, total=64,
                  first=["[0, 0, 0]  want 1  got 2  budget 0.5"], where=["rows 1 (1 of 2)"], ulp={"1": 2, "not finite": 1})
    time = Timing("wall", "warm", "interleaved, ABBA", [1.0, 2.5], [0.5], 2, breakdown={"fwd": 1.0}, clocks="1980 MHz")
    return Record(TINY, arm, Verdict.FAILED, "größer\tals \"1\"\n☃", [check], {"q": "ab", "all": "cd"}, {"out": "ef"},
                  Lengths(1.5, 0, 16, 0.25, "01"), "guard", {"unquantised relative error": 0.01}, {"scan": 7, "rescan": 1}, 1 << 40,
                  time, {"arm": 0.5})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A folder with three records."""
    made = RunFolder.create(tmp_path / "a folder", info())
    for source in SOURCES:
        made.add(full_record(f"k/{source}"))
    return made


def records_file(folder: RunFolder) -> Path:
    assert folder.path
    return folder.path / "records.jsonl"


def reload(folder: RunFolder, repair: bool = False) -> RunFolder:
    assert folder.path
    if repair:
        folder.guard.close()  # as when the process that wrote it is gone
    return RunFolder.load(folder.path, repair)


def test_records_come_back_as_they_went(folder: RunFolder) -> None:
    again = reload(folder)
    assert again.records == folder.records
    assert again.info == folder.info
    assert again.done() == {(TINY, f"k/{source}") for source in SOURCES}
    assert len(records_file(folder).read_bytes().splitlines()) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not_can_be_read_again(folder: RunFolder, value: float) -> None:
    """An fp8 arm whose out holds a NaN has a NaN for its distance to the unquantised case."""
    folder.add(dataclasses.replace(full_record("other/none"), extra={"unquantised relative error": value}))
    assert [record.arm for record in reload(folder).records][-1] == "other/none"


def test_a_folder_that_is_being_written_is_not_resumed(folder: RunFolder) -> None:
    assert folder.path
    with pytest.raises(RunError, match="another process is writing to"):
        RunFolder.load(folder.path, repair=True)


@pytest.mark.parametrize("keep", [1, 200, -1])
def test_a_cut_last_line_is_dropped(folder: RunFolder, keep: int) -> None:
    file = records_file(folder)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:keep])
    before = file.stat().st_size
    assert reload(folder).records == folder.records[:2]
    assert file.stat().st_size == before, "reading alone must not touch a file that may still be written"
    again = reload(folder, repair=True)
    assert again.records == folder.records[:2]
    again.add(full_record("k/metadata"))
    assert reload(folder).records == folder.records


@pytest.mark.parametrize("bad", [b"{", b"", b"nonsense", b"\xff\xfe", b'{"case": 1}', b'{"case":"c","arm":"a","verdict":"FINE"}'])
def test_a_bad_line_is_named(folder: RunFolder, bad: bytes) -> None:
    file = records_file(folder)
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([lines[0], bad, lines[2], b""]))
    with pytest.raises(RunError) as caught:
        reload(folder)
    assert str(caught.value).startswith(f"{file} line 2: ")
    assert "\n" not in str(caught.value)


def lacks_run_json(path: Path) -> None:
    (path / "run.json").unlink()


def run_json_is_cut(path: Path) -> None:
    (path / "run.json").write_bytes((path / "run.json").read_bytes()[:40])


def run_json_is_a_folder(path: Path) -> None:
    (path / "run.json").unlink()
    (path / "run.json").mkdir()


def records_are_a_folder(path: Path) -> None:
    (path / "records.jsonl").unlink()
    (path / "records.jsonl").mkdir()


def is_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a folder")


def is_gone(path: Path) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize("damage", [lacks_run_json, run_json_is_cut, run_json_is_a_folder, records_are_a_folder, is_a_file, is_gone])
def test_what_is_no_run_folder_is_one_line(folder: RunFolder, damage: Callable[[Path], None]) -> None:
    assert folder.path
    damage(folder.path)
    with pytest.raises(RunError) as caught:
        reload(folder)
    assert str(folder.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """The parent is a file: the tests may run as root, whom no permission stops."""
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot write the run folder .*: Not a directory"):
        RunFolder.create(tmp_path / "file", info())


def add(folder: RunFolder) -> None:
    folder.add(full_record("other/none"))


@pytest.mark.parametrize("write", [add, RunFolder.finish])
def test_a_folder_that_vanished_is_one_line(folder: RunFolder, write: Callable[[RunFolder], None]) -> None:
    assert folder.path
    shutil.rmtree(folder.path)
    with pytest.raises(RunError, match="cannot write"):
        write(folder)


def test_without_a_path_records_stay_in_memory() -> None:
    folder = RunFolder(None, info())
    folder.add(full_record())
    folder.finish()
    assert folder.done() == {(TINY, "k/none")}


WRONG = {Verdict.FLAKY, Verdict.FAILED, Verdict.OOM, Verdict.TIMEOUT, Verdict.CRASHED, Verdict.ERROR}


@pytest.mark.parametrize("verdicts", [c for n in range(5) for c in itertools.combinations(Verdict, n)])
def test_exit_code(verdicts: tuple[Verdict, ...]) -> None:
    """Only a run in which something passed and nothing else happened is 0."""
    got = exit_code([Record(TINY, "k/none", verdict) for verdict in verdicts])
    if WRONG & set(verdicts):
        assert got == 1
    elif Verdict.VACUOUS in verdicts:
        assert got == 4
    else:
        assert got == (0 if Verdict.PASSED in verdicts else 5)


# --- folders that were cut or edited ----------------------------------------------------------------------------------


def test_a_finished_folder_that_lacks_records_is_unfinished(folder: RunFolder) -> None:
    """Half copied, say: what is there passed, and what is not there may have failed."""
    folder.info.kernels = [{"name": "k", "family": "sparse_prefill", "arms": list(SOURCES)}]
    folder.finish()
    assert reload(folder).info.finished
    file = records_file(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])  # in the last line
    assert reload(folder).info.finished == "" and reload(folder).missing() == [(TINY, f"k/{SOURCES[-1]}")]
    file.write_bytes(whole + b"{")  # one line more was begun
    assert reload(folder).info.finished


def test_a_record_twice_is_refused(folder: RunFolder) -> None:
    folder.add(folder.records[0])
    with pytest.raises(RunError, match=f"has two records of k/{SOURCES[0]} on"):
        reload(folder)


@pytest.mark.parametrize(("changed", "told"), [
    ({"started": "garbage"}, "is no local time"),
    ({"started": "2026-01-01T00:00:00"}, "is no local time with its offset"),
    ({"kernels": [{}]}, "kernels: one has no name"),
    ({"kernels": [{"name": "k", "arms": "none"}]}, "arms that are no list"),
    ({"options": {"unavailable": ["k"]}}, "unavailable is no table"),
    ({"options": {"settings": [1]}}, "settings is no table"),
])
def test_values_that_no_run_has_are_refused(folder: RunFolder, changed: dict[str, object], told: str) -> None:
    for name, value in changed.items():
        setattr(folder.info, name, value)
    folder.save_info()
    with pytest.raises(RunError, match=told):
        reload(folder)


def test_a_contract_that_there_is_not_is_refused(folder: RunFolder) -> None:
    folder.add(dataclasses.replace(full_record("k/more"), time=Timing("walls", "warm", "alone", [1.0])))
    with pytest.raises(RunError, match="contract 'walls' is none of kernel, span, wall"):
        reload(folder)


@pytest.mark.parametrize("us", [[], [1e308], [-1.0]])
def test_times_that_no_arm_has_are_refused(folder: RunFolder, us: list[float]) -> None:
    folder.add(dataclasses.replace(full_record("k/more"), time=Timing("wall", "warm", "alone", us)))
    with pytest.raises(RunError, match="line 4: time: us must be samples"):
        reload(folder)
