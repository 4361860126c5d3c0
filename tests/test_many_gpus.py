"""Several devices at once, here two that are the CPU: whole cases dealt as lanes become free, a worker at a time on each, and an end,
however it comes, that leaves records as they are and no worker."""
from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import FAULTY, MARK, TINY, TINY_TOPK, invoke, left_behind, new_mark

from cases import parse_case
from cases.suites import override
from harness import asking, cli, options
from harness.asking import Settings
from harness.client import Unfit, WorkerOptions, WorkerProcess
from harness.many import ManyRunner, check_times, chosen_gpus, on_gpu
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo, listed
from harness.runner import describe
from harness.verdicts import SOURCES, Verdict

CASES = [str(override(parse_case(TINY), f"h_q={h_q}")) for h_q in range(1, 7)]
H200 = "NVIDIA H200"


def lane(number: int, device: str = "cpu") -> WorkerOptions:
    return WorkerOptions(device, False, (str(FAULTY / "slow.py"),), 8 << 30, sys.executable, ("OMP_NUM_THREADS=1", f"LANE={number}"))


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """slow, and a kernel of the other family."""
    described = {kernel["name"]: kernel for kernel in describe(lane(0), [*CASES, TINY_TOPK])["kernels"]}
    return [described["slow"], described["torch_dense"]]


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This test's workers carry it. None may be left."""
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    yield
    assert left_behind(mark, 2.0) == []


def make(path: Path, kernels: list[dict[str, Any]]) -> RunFolder:
    return RunFolder.make(path, RunInfo("2026-01-01T00:00:00+00:00", [], [*CASES, TINY_TOPK], kernels, {}, {}))


def keys(records: list[Record]) -> list[tuple[str, str]]:
    return [(record.case, record.arm) for record in records]


def test_two_lanes_do_all_with_one_worker_at_a_time_each(
        tmp_path: Path, kernels: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    alive: dict[tuple[str, ...], WorkerProcess] = {}
    overlaps, starts = [], []

    class Watched(WorkerProcess):
        def __init__(self, options: WorkerOptions, log: Path) -> None:
            before = alive.get(options.environment)
            overlaps.append(before is not None and before.process.poll() is None)
            starts.append(options.environment)
            super().__init__(options, log)
            alive[options.environment] = self

    monkeypatch.setattr(asking, "WorkerProcess", Watched)
    folder = make(tmp_path / "run", kernels)
    ManyRunner(folder, [lane(0), lane(1)], Settings(), lambda *_: None).run()
    assert not any(overlaps) and {word for environment in starts for word in environment} >= {"LANE=0", "LANE=1"}
    assert keys(folder.records) == listed(folder.info)
    assert {record.verdict for record in folder.records} == {Verdict.PASSED}
    stored = RunFolder.load(tmp_path / "run")
    assert stored.records == folder.records and stored.info.finished
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock", "records.jsonl", "run.json", "worker.log"]
    lanes = (tmp_path / "run" / "worker.log").read_text().split("=== lane ")[1:]
    done = [re.findall(r"^--- (.*)$", lane, re.M) for lane in lanes]
    assert len(done) == 2 and all(done), "both had something to do"
    assert sorted(done[0] + done[1]) == sorted([*(f"slow on {case}" for case in CASES), f"torch_dense on {TINY_TOPK}"])


def test_an_interrupt_accuses_nobody_and_can_be_gone_on_from(tmp_path: Path, kernels: list[dict[str, Any]]) -> None:
    """In the middle of timing, which ends workers that were doing nothing wrong."""
    sent = threading.Lock()

    def progress(case: str, arm: str, phase: str) -> None:
        if phase == "timing" and sent.acquire(blocking=False):
            main = threading.main_thread().ident
            assert main
            signal.pthread_kill(main, signal.SIGINT)

    folder = make(tmp_path / "run", kernels[:1])
    with pytest.raises(KeyboardInterrupt):
        ManyRunner(folder, [lane(0), lane(1)], Settings("wall", samples=200), progress).run()
    assert folder.info.finished == "" and len(folder.records) < len(listed(folder.info))
    assert {(record.verdict, record.time) for record in folder.records} == {(Verdict.PASSED, None)}
    before = list(folder.records)
    again = RunFolder(folder.path, folder.info)
    again.records = list(before)
    ManyRunner(again, [lane(0), lane(1)], Settings(), lambda *_: None).run()
    assert keys(again.records) == listed(again.info) and all(record in again.records for record in before)


def test_a_lane_that_cannot_start_ends_the_run_in_a_line(tmp_path: Path, kernels: list[dict[str, Any]]) -> None:
    with pytest.raises(Unfit, match="cuda:99"):
        ManyRunner(make(tmp_path / "run", kernels), [lane(0), lane(1, "cuda:99")], Settings(), lambda *_: None).run()


@pytest.mark.parametrize(("text", "gpus"), [("all", [0, 1, 2]), ("0", [0]), ("2,0", [2, 0])])
def test_gpus_are_chosen_by_number(text: str, gpus: list[int]) -> None:
    assert chosen_gpus(text, [H200] * 3) == gpus


@pytest.mark.parametrize(("text", "count", "said"), [
    ("3", 3, "there is no GPU 3 here, but 0 to 2"), ("1", 1, "there is no GPU 1 here, but 0 alone"), ("0,0", 2, "a GPU is named twice"),
    ("", 2, "it must be all, or numbers"), ("-1", 2, "it must be all"), ("0-2", 3, "it must be all"), ("0, 1", 2, "it must be all")])
def test_what_names_no_gpus_is_refused(text: str, count: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chosen_gpus(text, [H200] * count)


@pytest.mark.parametrize(("contract", "names", "said"), [
    ("wall", [H200, H200], "a CPU that they share"), ("kernel", [H200, "NVIDIA H100"], r"different models \(NVIDIA H200 | NVIDIA H100\)"),
    ("wall", [H200], ""), ("auto", [H200, H200], ""), ("", [H200, "NVIDIA H100"], "")])
def test_times_that_would_mean_nothing_are_refused(contract: str, names: list[str], said: str) -> None:
    if said:
        with pytest.raises(ValueError, match=said):
            check_times(contract, names)
    else:
        check_times(contract, names)


@pytest.mark.parametrize(("visible", "index", "name"), [(None, 2, "2"), ("5,3", 1, "3"), ("GPU-aa, GPU-bb", 1, "GPU-bb")])
def test_a_lanes_workers_see_one_gpu(visible: str | None, index: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = on_gpu(lane(0, "cuda"), index)
    assert (found.device, found.environment[-1]) == ("cuda", f"CUDA_VISIBLE_DEVICES={name}")


class Fake:
    """In ManyRunner's place: every arm passes."""

    made: list[list[WorkerOptions]]

    def __init__(self, folder: RunFolder, lanes: list[WorkerOptions], settings: Settings, progress: object) -> None:
        self.folder = folder
        self.made.append(lanes)

    def run(self) -> None:
        for case, arm in self.folder.missing():
            self.folder.add(Record(case, arm, Verdict.PASSED))
        self.folder.finish()


@pytest.fixture
def two_gpus(kernels: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[list[WorkerOptions]]:
    """The command line on a machine with two GPUs that are none. What it made lanes of."""
    described = {"device": "cuda", "machine": {"gpu": H200}, "kernels": kernels, "gpus": [H200, H200]}
    monkeypatch.setattr(options, "describe", lambda options, cases: described)
    monkeypatch.setattr(cli, "ManyRunner", Fake)
    Fake.made = []
    return Fake.made


def test_the_command_makes_a_lane_for_each_gpu(tmp_path: Path, two_gpus: list[list[WorkerOptions]]) -> None:
    arguments = ["run", CASES[0], TINY_TOPK, "--runs", str(tmp_path)]
    assert invoke(*arguments, "--gpus", "all").code == 0
    folder = RunFolder.load(next(tmp_path.iterdir()))
    assert [options.environment[-1] for options in two_gpus[0]] == [f"CUDA_VISIBLE_DEVICES={number}" for number in (0, 1)]
    assert folder.info.options["gpus"] == [0, 1] and folder.info.machine["gpus at once"] == "0, 1"
    assert len(folder.records) == len(SOURCES) + 1
    stored = dataclasses.asdict(two_gpus[0][0])["memory"]
    assert folder.info.options["worker"]["memory"] == stored and stored < 0.9 / 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert folder.path
    (folder.path / "records.jsonl").write_bytes(b"")
    (folder.path / "lock").unlink()  # this process holds it
    assert invoke("run", "--resume", str(folder.path)).code == 0
    assert two_gpus[1] == two_gpus[0]
    assert invoke(*arguments, "--gpus", "1", "--shard", "2/2").code == 0
    assert [options.environment[-1] for options in two_gpus[2]] == ["CUDA_VISIBLE_DEVICES=1"]


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["--gpus", "0,7"], 2, "--gpus 0,7: there is no GPU 7 here, but 0 to 1"),
    (["--gpus", "all", "--time", "wall"], 2, "a CPU that they share"),
    (["--gpus", "all", "--device", "cuda:1"], 2, "not with --device cuda:1")])
def test_gpus_that_cannot_be_had_are_a_line(
        tmp_path: Path, two_gpus: list[list[WorkerOptions]], arguments: list[str], code: int, said: str) -> None:
    done = invoke("run", TINY, "--runs", str(tmp_path), *arguments)
    assert (done.code, len(done.lines)) == (code, 1) and said in done.text
    assert two_gpus == [] and not list(tmp_path.iterdir())


def test_without_a_gpu_nothing_runs(kernels: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "describe", lambda options, cases: {"device": "cpu", "machine": {}, "kernels": kernels, "gpus": []})
    done = invoke("run", TINY, "--gpus", "all", "--runs", str(tmp_path))
    assert done.code == 5 and done.lines == ["threearm: --gpus all: there is no GPU here"]
