"""A run on several GPUs of one host: a chain of workers for each, to which whole cases are dealt as it becomes free.

A kernel's arms on one case go together, and a GPU has one worker at a time, which sees no other GPU: what is timed shares its GPU with
nothing of the run. Parent side.
"""
from __future__ import annotations

import collections
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

from harness.asking import Progress, Settings
from harness.client import WorkerOptions
from harness.runfolder import RunFolder, gather_logs
from harness.runner import Runner, cases_of

PATIENCE = 20.0
"""Seconds that an interrupt waits for workers to end. What is left ends with this process."""

Job = tuple[dict[str, Any], str]
"""A kernel, as the worker described it, and a case of its family."""


def chosen_gpus(text: str, names: list[str]) -> list[int]:
    """The GPUs that `--gpus` means: all, or numbers from 0 with commas between. names: of those that are there. Raises ValueError with one
    line."""
    if text == "all":
        return list(range(len(names)))
    if not all(word.isascii() and word.isdecimal() for word in text.split(",")):
        raise ValueError("it must be all, or numbers as in 0,2")
    chosen = [int(word) for word in text.split(",")]
    beyond = [index for index in chosen if index >= len(names)]
    if beyond:
        there = f"0 to {len(names) - 1}" if len(names) > 1 else "0 alone"
        raise ValueError(f"there is no GPU {beyond[0]} here, but {there}")
    if len(set(chosen)) < len(chosen):
        raise ValueError("a GPU is named twice")
    return chosen


def check_times(contract: str, names: list[str]) -> None:
    """Raise ValueError, one line, where GPUs of these models cannot be timed at once under a contract ("" times nothing)."""
    if contract == "wall" and len(names) > 1:
        raise ValueError("wall times of several GPUs at once would be of a CPU that they share; --time kernel, span or none")
    if contract and len(set(names)) > 1:
        models = " | ".join(dict.fromkeys(names))
        raise ValueError(f"times of different models ({models}) do not belong in one run; --time none, or a run each")


def in_words(gpus: list[int]) -> dict[str, str]:
    """For a run's machine: which of its GPUs are used at once."""
    return {"gpus at once": ", ".join(map(str, gpus))} if gpus else {}


def on_gpu(options: WorkerOptions, index: int) -> WorkerOptions:
    """The options for workers that see this GPU alone: also what a kernel's package starts on the first GPU it sees is then no
    disturbance of another. index: among those that this process sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = seen.split(",")[index].strip() if seen else str(index)
    return dataclasses.replace(options, device="cuda", environment=(*options.environment, f"CUDA_VISIBLE_DEVICES={name}"))


class Imports:
    """What importing each kernel's package came to, found out once for all lanes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[str, tuple[str, str] | None] = {}

    def of(self, kernel: dict[str, Any], runner: Runner) -> tuple[str, str] | None:
        """As Runner.imported; a lane waits while another one is at it."""
        with self.lock:
            if kernel["name"] not in self.known:
                self.known[kernel["name"]] = runner.imported(kernel)
            return self.known[kernel["name"]]


class Lane:
    """One device, with one worker at a time, and a fresh one a kernel. To be used by one thread, with which its worker ends; `stop` may
    come from another."""

    def __init__(self, folder: RunFolder, options: WorkerOptions, settings: Settings, imports: Imports, log: Path,
                 progress: Progress = lambda case, arm, phase: None) -> None:
        self.runner = Runner(folder, options, settings, folder.info.kernels, progress, log)
        self.imports, self.log, self.kernel = imports, log, ""

    def take(self, kernel: dict[str, Any], case: str) -> None:
        """A kernel's arms on one case: their records are in the folder afterwards. Raises what Runner.run raises."""
        if kernel["name"] != self.kernel:
            self.runner.asker.close()
            self.kernel = kernel["name"]
        problems = self.imports.of(kernel, self.runner)
        if problems is not None:
            self.runner.take(kernel, case, problems)

    def stop(self) -> None:
        """End the worker under way, and let none begin."""
        self.runner.asker.stop()

    def close(self) -> None:
        """Let the worker end, at once."""
        self.runner.asker.kill()
        self.runner.asker.watch.close()


class ManyRunner:
    """Runs what is planned, like Runner, on several devices at once. lanes: the options for each device's workers."""

    def __init__(self, folder: RunFolder, lanes: list[WorkerOptions], settings: Settings, progress: Progress) -> None:
        assert folder.path, "several lanes keep their logs in the folder"
        self.folder, self.log = folder, folder.path / "worker.log"
        imports = Imports()
        self.lanes = [Lane(folder, options, settings, imports, folder.path / f"worker-{number}.log", progress)
                      for number, options in enumerate(lanes)]
        done = folder.done() if not settings.save_outputs else set()  # a record may lack its outputs yet
        self.jobs: collections.deque[Job] = collections.deque(
            (kernel, case) for kernel in folder.info.kernels for case in cases_of(kernel, folder.info.cases)
            if any((case, f"{kernel['name']}/{arm}") not in done for arm in kernel["arms"]))
        self.over = threading.Event()
        self.problems: list[BaseException] = []

    def run(self) -> None:
        """Every kernel on every case, in the order in which lanes become free. Raises RunError or Unfit of the first lane that does; the
        others are then stopped."""
        threads = [threading.Thread(target=self._work, args=(lane,), daemon=True) for lane in self.lanes]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stop()
            for thread in threads:
                thread.join(PATIENCE)
            gather_logs(self.log, [(f"lane {number}", lane.log) for number, lane in enumerate(self.lanes)])
            for lane in self.lanes:
                lane.log.unlink(missing_ok=True)
        if self.problems:
            raise self.problems[0]
        self.folder.arrange()
        self.folder.finish()

    def _stop(self) -> None:
        self.over.set()
        for lane in self.lanes:
            lane.stop()

    def _work(self, lane: Lane) -> None:
        """A worker is ended with the thread that started it, so a lane has one thread."""
        try:
            while not self.over.is_set():
                try:
                    kernel, case = self.jobs.popleft()
                except IndexError:
                    return
                note(lane.log, f"{kernel['name']} on {case}")
                lane.take(kernel, case)
        except BaseException as error:  # for whoever waits in run()
            self.problems.append(error)
            self._stop()
        finally:
            lane.close()


def note(log: Path, line: str) -> None:
    """Say in a lane's log what comes next: it tells which GPU a record is from."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"--- {line}\n")
