"""A run that was stopped goes on where it stopped, and leaves no worker behind, however it was stopped."""
from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import FAULTY, TINY, Done, left_behind, marked, new_mark, start, threearm

from cases import parse_case
from cases.suites import override
from harness.verdicts import SOURCES

CASES = [str(override(parse_case(TINY), f"h_q={h_q}")) for h_q in range(1, 7)]
TOTAL = len(CASES) * len(SOURCES)


@dataclasses.dataclass
class Story:
    """One run: stopped by Ctrl-C, gone on with, killed, gone on with to its end. Bytes of records.jsonl after each."""

    folder: Path
    stopped: Done
    after_stop: bytes
    report: Done
    after_kill: bytes
    end: Done
    after_end: bytes
    left: list[list[str]]
    prepared: list[str]


def wait_for(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until it is true. Fails if the process ends first, or after 40 s."""
    until = time.monotonic() + 40
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


def stop(process: subprocess.Popen[str], number: signal.Signals, mark: str) -> tuple[Done, list[str]]:
    """Send the signal; what the command said, and which processes are left."""
    process.send_signal(number)
    text = process.communicate(timeout=20)[0]
    return Done(process.returncode, text), left_behind(mark, 3.0)


def stop_after(arguments: list[str], runs: Path, records: int, number: signal.Signals) -> tuple[Done, list[str]]:
    """Run until there are so many records, then send the signal."""
    mark = new_mark()
    process = start(arguments, mark)
    wait_for(lambda: sum(file.read_bytes().count(b"\n") for file in runs.glob("*/records.jsonl")) >= records, process)
    return stop(process, number, mark)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    tmp = tmp_path_factory.mktemp("story")
    runs = tmp / "runs"
    (tmp / "suite.txt").write_text("\n".join(CASES))
    arguments = ["run", "--suite", str(tmp / "suite.txt"), "--load", str(FAULTY / "slow.py"), "--arm", "slow", "--time", "none",
                 "--device", "cpu", "--runs", str(runs)]
    stopped, left_by_stop = stop_after(arguments, runs, 4, signal.SIGINT)
    folder = next(runs.iterdir())
    file = folder / "records.jsonl"
    after_stop = file.read_bytes()
    report = threearm("report", str(folder))
    _, left_by_kill = stop_after(["run", "--resume", str(folder)], runs, 8, signal.SIGKILL)
    after_kill = file.read_bytes()
    said = (folder / "worker.log").stat().st_size
    end = threearm("run", "--resume", str(folder))
    prepared = [line for line in (folder / "worker.log").read_bytes()[said:].decode().splitlines() if line.startswith("prepare")]
    return Story(folder, stopped, after_stop, report, after_kill, end, file.read_bytes(), [left_by_stop, left_by_kill], prepared)


def keys(content: bytes) -> list[tuple[str, str]]:
    records = [json.loads(line) for line in content.splitlines()]
    return [(record["case"], record["arm"]) for record in records]


def test_ctrl_c_says_how_to_go_on(story: Story) -> None:
    assert story.stopped.code == 130
    assert "Traceback" not in story.stopped.text
    assert f"threearm run --resume {story.folder}" in story.stopped.text


def test_a_stopped_run_can_be_read(story: Story) -> None:
    assert story.report.code == 4 and "incomplete" in story.report.text
    assert 4 <= len(keys(story.after_stop)) < TOTAL
    assert f"{len(keys(story.after_stop))} PASSED" in story.report.text


def test_a_run_that_is_gone_on_with_is_whole(story: Story) -> None:
    assert story.end.code == 0
    assert f"{TOTAL} PASSED" in story.end.text
    assert sorted(keys(story.after_end)) == sorted((case, f"slow/{source}") for case in CASES for source in SOURCES)


def test_what_was_recorded_is_not_made_again(story: Story) -> None:
    assert story.after_kill.startswith(story.after_stop)
    assert story.after_end.startswith(story.after_kill[: story.after_kill.rindex(b"\n") + 1])
    done = keys(story.after_kill[: story.after_kill.rindex(b"\n") + 1])
    whole = [case for case in CASES if sum(key[0] == case for key in done) == len(SOURCES)]
    assert whole
    for case in whole:
        assert f"prepare h_q={parse_case(case).h_q}" not in story.prepared


def test_no_worker_is_left_by_a_stop_or_a_kill(story: Story) -> None:
    assert story.left == [[], []]


def test_a_finished_run_is_not_run_again(story: Story) -> None:
    again = threearm("run", "--resume", str(story.folder))
    assert again.code == 0
    assert (story.folder / "records.jsonl").read_bytes() == story.after_end


def test_resume_redoes_a_cut_line(story: Story, tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    shutil.copytree(story.folder, folder)
    (folder / "records.jsonl").write_bytes(story.after_end[:-30])
    done = threearm("run", "--resume", str(folder))
    assert done.code == 0
    assert sorted(keys((folder / "records.jsonl").read_bytes())) == sorted(keys(story.after_end))


def test_a_folder_that_says_not_how_it_was_run_is_one_line(story: Story, tmp_path: Path) -> None:
    described = json.loads((story.folder / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**described, "options": {}}))
    done = threearm("run", "--resume", str(tmp_path))
    assert done.code == 2
    assert len(done.lines) == 1
    assert str(tmp_path) in done.text


def test_ctrl_c_while_a_worker_starts_leaves_none() -> None:
    mark = new_mark()
    process = start(["arms", "--device", "cpu", "--load", str(FAULTY / "hangs_at_import.py")], mark)
    wait_for(lambda: len(marked(mark)) == 2, process)
    time.sleep(0.5)  # until the worker is in python, and past the exec
    done, left = stop(process, signal.SIGINT, mark)
    assert "Traceback" not in done.text
    assert done.code == 130
    assert left == []


def test_a_killed_parent_leaves_no_worker_in_a_kernel_that_hangs(tmp_path: Path) -> None:
    mark = new_mark()
    case = str(override(parse_case(TINY), "s_q=17"))
    process = start(["run", case, "--load", str(FAULTY / "deadly.py"), "--arm", "deadly/none", "--time", "none", "--device", "cpu",
                     "--runs", str(tmp_path)], mark)
    wait_for(lambda: any(tmp_path.glob("*/worker.log")), process)
    time.sleep(2.5)  # until the kernel sleeps
    _, left = stop(process, signal.SIGKILL, mark)
    assert left == []
