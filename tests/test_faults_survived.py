"""Real faults in real workers, through `threearm run`: the culprit is named, every other arm and case has its verdict, nothing that was
recorded is lost, and no process or GPU memory is left. docs/faults.md is the table for a reader.

One run meets all faults of a device: a kernel does one deed in the case whose s_q names it, in its none arm alone.
"""
from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import FAULTY, ROOT, TINY, Done, environment, invoke, left_behind, marked, new_mark, start

from cases import parse_case
from cases.suites import override
from harness import asking
from harness.asking import Settings, deadline
from harness.client import PRINTED, WorkerOptions, from_what
from harness.verdicts import SOURCES, Verdict

FAULTY_CUDA = ROOT / "tests" / "faulty_cuda"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One deed: the s_q that makes the kernel do it, and what its arm's record then says. wrong: checks that did not pass."""

    s_q: int
    verdict: Verdict
    detail: str
    wrong: frozenset[str] = frozenset()


WRONG = frozenset({"reference", "batch-split"})  # an arm that survives its deed returns zeros; a batch of another length does not do it
WITH_NONE = {"none-vs-backscan", "none-vs-metadata", "full-width"}
FAULTS = {
    "segfault": Fault(11, Verdict.CRASHED, "signal SIGSEGV in phase launch"),
    "abort": Fault(12, Verdict.CRASHED, "signal SIGABRT in phase launch"),
    "exit-1": Fault(13, Verdict.CRASHED, "exit code 1 in phase launch"),
    "sys-exit": Fault(14, Verdict.CRASHED, "exit code 5 in phase launch"),
    "sigkill": Fault(15, Verdict.CRASHED, "signal SIGKILL in phase launch"),
    "exception": Fault(20, Verdict.FAILED, "RuntimeError in phase launch: deliberate"),
    "exception-without-words": Fault(21, Verdict.FAILED, "ValueError in phase launch"),
    "endless-loop": Fault(16, Verdict.TIMEOUT, "no answer for 3 s in phase launch (--timeout 3)"),
    "out-of-memory": Fault(18, Verdict.OOM, "1.0 GiB of memory exceeded in phase launch"),
    "child-left": Fault(19, Verdict.CRASHED, "signal SIGSEGV in phase launch"),
    "daemon-left": Fault(25, Verdict.PASSED, ""),
    "daemon-left-by-the-dead": Fault(27, Verdict.CRASHED, "signal SIGSEGV in phase launch"),
    "forged-stdout": Fault(22, Verdict.FAILED, "", WRONG),
    "endless-stdout": Fault(37, Verdict.CRASHED, f"more than {PRINTED >> 20} MiB printed in phase launch"),
    "flooded-descriptor": Fault(39, Verdict.CRASHED, "something else wrote to the worker's descriptor in phase launch"),
    "death-before-the-reply": Fault(29, Verdict.CRASHED, "exit code 6 in phase judge"),
    "death-in-the-reply": Fault(31, Verdict.CRASHED, "exit code 6 in phase judge"),
    "death-after-the-reply": Fault(33, Verdict.PASSED, ""),
    "no-reply": Fault(35, Verdict.ERROR, "the worker was done without a word of it"),
}
CUDA_FAULTS = {
    "illegal-access": Fault(11, Verdict.CRASHED, "illegal memory access"),
    "device-assert": Fault(12, Verdict.CRASHED, "device-side assert"),
    "endless-kernel": Fault(13, Verdict.TIMEOUT, "no answer for 10 s in phase launch (--timeout 10)"),
    "out-of-gpu-memory": Fault(14, Verdict.OOM, "memory"),
}
DIES_OF_A_LENGTH = 23  # the s_q in which deadly's arms die where topk_length is 0


def rows(s_q: int, more: str = "") -> str:
    """The tiny case with so many rows."""
    return str(override(parse_case(TINY), f"s_q={s_q}{more}"))


ALLPAD = rows(DIES_OF_A_LENGTH, ",rows=allpad")


@dataclasses.dataclass
class Survived:
    """A run that met faults: what it said, its folder, and the command lines of the processes that it left."""

    done: Done
    folder: Path
    left: list[str]
    asked: set[tuple[str, str]]  # (case, arm)
    gpu_memory: tuple[int, int] = (0, 0)  # MiB in use before and after

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "records.jsonl").read_bytes().splitlines()]

    def record(self, case: str, arm: str) -> dict[str, Any]:
        return next(record for record in self.records if (record["case"], record["arm"]) == (case, arm))

    def the_culprit_is_named(self, fault: Fault, kernel: str) -> None:
        """By its own record, in the run's own words."""
        record = self.record(rows(fault.s_q), f"{kernel}/none")
        assert (record["verdict"], fault.detail in record["detail"]) == (fault.verdict, True), record["detail"]
        assert "\n" not in record["detail"]
        assert {check["name"] for check in record["checks"] if check["verdict"] != Verdict.PASSED} == fault.wrong
        told = invoke("report", "--failures", str(self.folder))
        assert (told.code, self.done.code) == (1, 1)
        assert (f"{fault.verdict.value}  {kernel}/none  {rows(fault.s_q)}" in told.text) == (fault.verdict is not Verdict.PASSED)

    def the_others_are_judged(self, fault: Fault, kernel: str) -> None:
        """The other arms of the case, which may differ from one that is wrong and in nothing else, and the kernel that came after."""
        others = [self.record(rows(fault.s_q), arm) for arm in (f"{kernel}/backscan", f"{kernel}/metadata")]
        others += [self.record(rows(fault.s_q), f"torch_blocks/{source}") for source in SOURCES]
        for record in others:
            wrong = {check["name"] for check in record["checks"] if check["verdict"] != Verdict.PASSED}
            assert record["checks"] and record["detail"] == ""
            assert wrong <= (WITH_NONE if fault.wrong and kernel in record["arm"] else set())

    def everything_is_recorded_once(self) -> None:
        found = Counter((record["case"], record["arm"]) for record in self.records)
        assert set(found.values()) == {1}
        assert set(found) == self.asked

    def nothing_is_left(self) -> None:
        assert self.left == []
        assert self.gpu_memory[1] <= self.gpu_memory[0] + 64


def run_with(path: Path, file: Path, kernel: str, cases: list[str], *options: str) -> Survived:
    """`threearm run` of a faulty kernel, then of a right one, to its end."""
    mark, before = new_mark(), gpu_memory()
    arguments = ["run", *cases, "--load", str(file), "--arm", kernel, "--arm", "torch_blocks", "--time", "none", "--runs", str(path)]
    with start([*arguments, *options], mark) as process:
        text = process.communicate(timeout=240)[0]
    assert "Traceback" not in text, text
    left = left_behind(mark, 1.0)
    until = time.monotonic() + 10
    while gpu_memory() > before + 64 and time.monotonic() < until:
        time.sleep(0.2)
    asked = {(case, f"{name}/{source}") for case in cases for name in (kernel, "torch_blocks") for source in SOURCES}
    return Survived(Done(process.returncode, text), next(path.iterdir()), left, asked, (before, gpu_memory()))


def gpu_memory() -> int:
    """MiB in use on the GPU that the run is given; 0 where there is none."""
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", f"--id={which}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(map(int, done.stdout.split()))


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    cases = [*(rows(fault.s_q) for fault in FAULTS.values()), ALLPAD, TINY]
    return run_with(tmp_path_factory.mktemp("faults"), FAULTY / "deadly.py", "deadly", cases, "--device", "cpu", "--timeout", "3",
                    "--memory", "1")


@pytest.fixture(scope="module")
def survived_on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    cases = [*(rows(fault.s_q) for fault in CUDA_FAULTS.values()), TINY]
    return run_with(tmp_path_factory.mktemp("cuda"), FAULTY_CUDA / "faults.py", "deadly_on_gpu", cases, "--device", "cuda",
                    "--timeout", "10")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_survived(survived: Survived, name: str) -> None:
    survived.the_culprit_is_named(FAULTS[name], "deadly")
    survived.the_others_are_judged(FAULTS[name], "deadly")


def test_a_run_with_every_fault_leaves_nothing(survived: Survived) -> None:
    survived.nothing_is_left()


def test_a_run_with_every_fault_is_whole(survived: Survived) -> None:
    survived.everything_is_recorded_once()
    assert {survived.record(TINY, f"{kernel}/{source}")["verdict"] for kernel in ("deadly", "torch_blocks") for source in SOURCES} == {
        Verdict.PASSED}


def test_an_arm_that_dies_after_others_were_judged(survived: Survived) -> None:
    """metadata dies of what it alone hands over; what was known of the others stays."""
    found = [survived.record(ALLPAD, f"deadly/{source}") for source in SOURCES]
    assert [record["verdict"] for record in found] == [Verdict.PASSED, Verdict.PASSED, Verdict.CRASHED]
    assert found[2]["detail"].startswith("exit code 1 in phase launch")


def test_what_is_printed_forges_nothing_and_fills_no_disk(survived: Survived) -> None:
    log = (survived.folder / "worker.log").read_bytes()
    assert b'"verdict": "PASSED"' in log  # it did print
    assert b"a line that a kernel prints" in log and len(log) < 8 << 20


@pytest.mark.cuda
@pytest.mark.parametrize("name", CUDA_FAULTS)
def test_a_fault_on_the_gpu_is_survived(survived_on_gpu: Survived, name: str) -> None:
    survived_on_gpu.the_culprit_is_named(CUDA_FAULTS[name], "deadly_on_gpu")
    survived_on_gpu.the_others_are_judged(CUDA_FAULTS[name], "deadly_on_gpu")


@pytest.mark.cuda
def test_a_run_with_every_fault_on_the_gpu_leaves_nothing(survived_on_gpu: Survived) -> None:
    survived_on_gpu.nothing_is_left()


@pytest.mark.cuda
def test_a_run_with_every_fault_on_the_gpu_is_whole(survived_on_gpu: Survived) -> None:
    survived_on_gpu.everything_is_recorded_once()


# --- what a deadline says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "device", "settings", "seconds", "why"), [
    (TINY, "cpu", Settings(timeout=5.0), 5.0, "--timeout 5"),
    ("sparse_prefill:s_q=100,h_q=16,topk=1024,d_qk=512", "cpu", Settings(), 80.1, "60 s + 12 launches of 3.4e9 operations at 2e9 a second"),
    ("sparse_prefill:s_q=100,h_q=16,topk=1024,d_qk=512", "cuda", Settings(launches=200), 60.7,
     "60 s + 200 launches of 3.4e9 operations at 1e12 a second"),
])
def test_a_deadline_scales_with_the_work_and_says_so(text: str, device: str, settings: Settings, seconds: float, why: str) -> None:
    options = WorkerOptions(device, False, (), 1 << 30)
    assert deadline(parse_case(text), options, settings) == (pytest.approx(seconds, abs=0.1), why)
    slower, told = deadline(parse_case(text), dataclasses.replace(options, prefix=("/opt/a-watcher", "--quiet")), settings)
    assert slower == (settings.timeout or pytest.approx(asking.SLOWER * seconds, abs=2))
    assert told == why if settings.timeout else told == f"20 times {seconds:.0f} s under a-watcher: {why}"


def test_a_phase_that_may_take_longer_says_how_much() -> None:
    assert from_what(75.0, 75.0, "60 s + 12 launches") == " (60 s + 12 launches)"
    assert from_what(75.0, 750.0, "60 s + 12 launches") == " (10 times 75 s: 60 s + 12 launches)"
    assert from_what(75.0, 750.0, "") == ""


# --- faults of the disk, of the folder, and of whoever else writes there ----------------------------------------------

SLOW_CASES = [str(override(parse_case(TINY), f"h_q={h_q}")) for h_q in range(1, 6)]
TOTAL = len(SLOW_CASES) * len(SOURCES)
DAC_OVERRIDE, DAC_READ_SEARCH, CAPBSET_DROP = 1, 2, 24


def heed_permissions() -> None:
    """In a child before it starts: nobody may write where permissions say no, root neither."""
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(CAPBSET_DROP, capability)  # anyone but root has none of them


def command(arguments: list[str], mark: str, before: Callable[[], None]) -> subprocess.Popen[str]:
    """The command line, in a process that first calls `before`."""
    return subprocess.Popen([sys.executable, "threearm.py", *arguments], cwd=ROOT, env=environment(mark), text=True, preexec_fn=before,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@dataclasses.dataclass
class Story:
    """One run. Two at once; its folder turned read-only; gone on with on a disk that fills; gone on with to the end. What each step said,
    and records.jsonl after those that wrote."""

    folder: Path
    second: Done
    read_only: Done
    resumed_read_only: Done
    reported_read_only: Done
    full: Done
    end: Done
    contents: list[bytes]
    left: list[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    mark, runs, said, contents = new_mark(), tmp_path_factory.mktemp("story"), [], []

    def told(process: subprocess.Popen[str]) -> None:
        with process:
            text = process.communicate(timeout=60)[0]
        assert "Traceback" not in text, text
        said.append(Done(process.returncode, text))

    first = command(["run", *SLOW_CASES, "--load", str(FAULTY / "slow.py"), "--arm", "slow", "--time", "none", "--device", "cpu",
                     "--runs", str(runs)], mark, heed_permissions)
    until = time.monotonic() + 40
    while not any(file.stat().st_size for file in runs.glob("*/records.jsonl")):
        assert first.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    folder = next(runs.iterdir())
    file = folder / "records.jsonl"
    resume = ["run", "--resume", str(folder)]
    told(command(resume, mark, heed_permissions))
    file.chmod(0o444)
    told(first)
    contents.append(file.read_bytes())
    for path, mode in ((folder / "lock", 0o444), (folder, 0o555)):
        path.chmod(mode)
    told(command(resume, mark, heed_permissions))
    told(command(["report", str(folder)], mark, heed_permissions))
    for path, mode in ((folder, 0o755), (folder / "lock", 0o644), (file, 0o644)):
        path.chmod(mode)
    line = len(contents[0]) // contents[0].count(b"\n")
    most = len(contents[0]) + line + line // 2
    told(command(resume, mark, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))))
    contents.append(file.read_bytes())
    told(command(resume, mark, lambda: None))
    contents.append(file.read_bytes())
    return Story(folder, *said, contents=contents, left=left_behind(mark, 1.0))


def test_a_second_run_in_a_folder_is_refused_and_harms_nothing(story: Story) -> None:
    assert (story.second.code, len(story.second.lines)) == (2, 1)
    assert f"another process is writing to {story.folder}" in story.second.text


def test_a_folder_that_turns_read_only_ends_the_run_in_one_line(story: Story) -> None:
    assert (story.read_only.code, len(story.read_only.lines)) == (5, 1)
    assert f"cannot write {story.folder}/records.jsonl: Permission denied" in story.read_only.text
    kept = story.contents[0].count(b"\n")
    assert f"{kept} of {TOTAL} records are in {story.folder}; go on with: threearm run --resume" in story.read_only.text


def test_a_read_only_folder_can_be_read_and_is_not_gone_on_with(story: Story) -> None:
    assert (story.resumed_read_only.code, len(story.resumed_read_only.lines)) == (2, 1)
    assert f"cannot write {story.folder}/lock: Permission denied" in story.resumed_read_only.text
    assert story.reported_read_only.code == 4 and "incomplete" in story.reported_read_only.text


def test_a_disk_that_fills_ends_the_run_in_one_line(story: Story) -> None:
    assert (story.full.code, len(story.full.lines)) == (5, 1)
    assert f"cannot write {story.folder}/records.jsonl: File too large" in story.full.text
    assert "go on with: threearm run --resume" in story.full.text
    assert not story.contents[1].endswith(b"\n")  # the disk was full in the middle of a record


def test_after_all_of_it_the_run_is_whole(story: Story) -> None:
    assert story.end.code == 0 and f"{TOTAL} PASSED" in story.end.text
    for before, after in zip(story.contents, story.contents[1:]):
        assert after.startswith(before[: before.rindex(b"\n") + 1])
    found = [(record["case"], record["arm"]) for record in map(json.loads, story.contents[-1].splitlines())]
    assert sorted(found) == sorted((case, f"slow/{source}") for case in SLOW_CASES for source in SOURCES)
    assert story.left == []


def test_a_folder_in_which_no_run_can_be_made_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    mark = new_mark()
    with command(["run", TINY, "--arm", "torch_blocks", "--device", "cpu", "--runs", str(tmp_path)], mark, heed_permissions) as process:
        text = process.communicate(timeout=60)[0]
    tmp_path.chmod(0o755)
    assert (process.returncode, len(text.splitlines())) == (2, 1)
    assert "cannot write the run folder" in text and "Permission denied" in text
    assert marked(mark) == {} and list(tmp_path.iterdir()) == []
