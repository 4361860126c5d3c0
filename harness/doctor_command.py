"""`threearm doctor`: whether this machine can give trustworthy evidence, and how to put right what cannot."""
from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import doctor_host, doctor_nvml
from harness.client import Unfit, Unloadable, WorkerDied, WorkerOptions, WorkerProcess
from harness.doctor import Finding, Level, exit_code, no_worker, not_there, of_device, of_host, of_kernels, of_probes
from harness.doctor_gpu import of_gpu
from harness.options import Device, Load, errors, import_problems, progress_bar, worker_options
from harness.runfolder import as_json
from harness.runner import describe, probe
from harness.watch import Watch
from reports import doctor as report

SETTLE = 1.5
"""Seconds without work before NVML is asked how busy the GPU is: it answers for about the last one."""
LIMIT = 120.0  # seconds for a probe
AT_ONCE = 4  # imports of packages
PROBES = ("profiler", "launch", "copying", "events", "flushing")

Json = Annotated[bool, typer.Option("--json", help="The findings as JSON.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run folders are to be made.")]


def doctor(device: Device = "auto", load: Load = None, runs: Runs = Path("runs"), as_text: Json = False) -> None:
    """Say whether this machine can give trustworthy evidence, and how to put right what cannot. Exit 4 with warnings, 5 with problems."""
    options = worker_options(device, load, False, None, 0.0)
    host = doctor_host.look(runs)  # first: what follows is load, too
    with progress_bar(errors) as bar:
        task = bar.add_task("starting a worker", total=None)
        found, machine = examined(options, lambda what: bar.update(task, description=what))
    found += of_host(host, machine.get("device", "").startswith("cuda"))
    if as_text:
        sys.stdout.write(as_json({"exit": exit_code(found), "machine": {**machine, "threearm": host.revision},
                                  "findings": [dataclasses.asdict(each) for each in found]}).decode())
    else:
        report.show(found, machine)
    raise typer.Exit(exit_code(found))


def examined(options: WorkerOptions, tell: Any) -> tuple[list[Finding], dict[str, str]]:
    """What a worker, its GPU and its kernels say; and the machine. A worker that cannot start is a finding, too."""
    try:
        tell("starting a worker")
        described = describe(options, [])
        options = dataclasses.replace(options, device=described["device"])
        tell("trying the device")
        return [*tried(options), *of_kernels(imported(described["kernels"], options, tell), options.device != "cpu")], described["machine"]
    except WorkerDied as death:
        return [no_worker(death.detail)], {}
    except Unloadable as error:
        return [Finding("worker", Level.PROBLEM, f"cannot run: {error}", "mend that file, or leave --load out")], {}
    except Unfit as error:
        return [unusable(options, str(error))], {}


def unusable(options: WorkerOptions, told: str) -> Finding:
    """Why the device that was asked for cannot be used, by what a worker without it sees. told: what torch said of the device."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            worker = WorkerProcess(dataclasses.replace(options, device="cpu"), Path(folder) / "worker.log")
        except WorkerDied as death:
            return no_worker(death.detail)
        try:
            build = asked(worker, "build")
        except WorkerDied as death:
            return no_worker(death.detail)
        finally:
            worker.kill()
    return Finding("gpu", Level.PROBLEM, told, "nvidia-smi may say more") if build.get("raised") else not_there(options.device, build)


def tried(options: WorkerOptions) -> list[Finding]:
    """What comes of the probes on the device, and what NVML says of it. Raises Unfit, WorkerDied."""
    with tempfile.TemporaryDirectory() as folder, Watch() as watch:
        worker = WorkerProcess(options, Path(folder) / "worker.log")
        try:
            build = asked(worker, "build")
            if build.get("raised"):
                return [Finding("gpu", Level.PROBLEM, build["raised"], "nvidia-smi may say more; a reset of the GPU may help")]
            found = of_device(build, options.device == "cpu")
            if build["device"] == "cpu":
                return found
            time.sleep(SETTLE)
            gpu = doctor_nvml.read(build["uuid"])
            watch.open(build["uuid"])
            found += of_gpu(gpu, build["cuda"], watch.strangers({build["pid"]}))
            facts = {name: asked(worker, name) for name in PROBES}
            copied = facts["copying"]
            readings = [] if copied.get("raised") else watch.between(copied["begin"], copied["end"])
            return [*found, *of_probes(facts, readings, watch.most_mhz)]
        finally:
            worker.kill()


def asked(worker: WorkerProcess, name: str) -> dict[str, Any]:
    """The facts of one probe. Raises WorkerDied."""
    for event in worker.ask(LIMIT, op="doctor", probe=name):
        if event["event"] == "examined":
            facts: dict[str, Any] = event["facts"]
            return facts
        if event["event"] == "broken":
            return {"raised": event["detail"]}
    raise AssertionError("unreachable: ask() ends only by an exception")


def imported(kernels: list[dict[str, Any]], options: WorkerOptions, tell: Any) -> list[dict[str, Any]]:
    """The kernels, with what importing their packages says; each in a process of its own, several at a time: torch alone takes seconds."""
    tell("importing the kernels' packages")
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as several:
        found = several.map(lambda kernel: import_problems(kernel, options, probe), kernels)
        return [{**kernel, "why_not": why, "none_only": none_only} for kernel, (why, none_only) in zip(kernels, found)]
