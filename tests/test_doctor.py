"""The doctor: every finding seen both ways, with a stand-in for NVML; the whole examination of a GPU that is none; the command on a CPU."""
from __future__ import annotations

import dataclasses
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import FAULTY, invoke

from harness import doctor_command, doctor_host, doctor_nvml, doctor_probes
from harness.client import WorkerDied, WorkerOptions
from harness.doctor import GIB, Finding, Level, exit_code, no_worker, not_there, of_device, of_host, of_kernels, of_probes
from harness.doctor_gpu import of_gpu
from harness.doctor_host import Host
from harness.verdicts import Verdict
from harness.watch import Reading
from harness.writable import why_not
from reports import doctor as report

OK, WARNING, PROBLEM = Level.OK, Level.WARNING, Level.PROBLEM


class Nvml(types.ModuleType):
    """What is used of pynvml, of a GPU at rest with nothing wrong. A value that is an exception is raised."""

    NVML_CLOCK_SM = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = 0
    GOOD: dict[str, Any] = {  # noqa: RUF012
        "nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle", "nvmlSystemGetDriverVersion": "580.159.04",
        "nvmlSystemGetCudaDriverVersion": 13000, "nvmlDeviceGetPersistenceMode": 1, "nvmlDeviceGetApplicationsClock": 1980,
        "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": 700_000, "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
        "nvmlDeviceGetTemperature": 35, "nvmlDeviceGetTemperatureThreshold": 90, "nvmlDeviceGetEccMode": [1, 1],
        "nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetRemappedRows": (0, 0, 0, 0), "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetComputeMode": 0, "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=0), "nvmlDeviceGetClockInfo": 1980,
        "nvmlDeviceGetPowerUsage": 300_000, "nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=7)]}

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.values = dict(self.GOOD)

    def __getattr__(self, name: str) -> Any:
        if name not in self.GOOD:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            value = self.values[name]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def named(findings: list[Finding], subject: str) -> Finding:
    found = [each for each in findings if each.subject == subject]
    assert len(found) == 1, (subject, findings)
    assert bool(found[0].remedy) == (found[0].level is not OK), "a remedy where something is wrong, and only there"
    return found[0]


def test_a_good_gpu_has_nothing_but_good_findings(nvml: Nvml) -> None:
    found = of_gpu(doctor_nvml.read("GPU-1"), "13.0", [])
    assert {each.level for each in found} == {OK} and exit_code(found) == 0
    assert [each.subject for each in found] == ["driver", "persistence", "clock setting", "power limit", "throttling", "temperature", "ECC",
                                                "memory rows", "MIG", "compute mode", "other processes"]


@pytest.mark.parametrize(("name", "value", "subject", "level", "says"), [
    ("nvmlSystemGetCudaDriverVersion", 12080, "driver", PROBLEM, "for CUDA 12.8; torch is built for 13.0"),
    ("nvmlDeviceGetPersistenceMode", 0, "persistence", WARNING, "off"),
    ("nvmlDeviceGetApplicationsClock", 1500, "clock setting", WARNING, "application clock 1500 of 1980 MHz"),
    ("nvmlDeviceGetEnforcedPowerLimit", 500_000, "power limit", WARNING, "500 W, default 700 W"),
    ("nvmlDeviceGetCurrentClocksEventReasons", 0x4, "throttling", WARNING, "power cap"),
    ("nvmlDeviceGetCurrentClocksEventReasons", 0x40, "throttling", PROBLEM, "hardware thermal slowdown"),
    ("nvmlDeviceGetCurrentClocksEventReasons", RuntimeError("no permission"), "throttling", PROBLEM, "does not tell"),
    ("nvmlDeviceGetTemperature", 78, "temperature", WARNING, "78 C, slows down at 90 C"),
    ("nvmlDeviceGetTemperature", 87, "temperature", PROBLEM, "87 C"),
    ("nvmlDeviceGetEccMode", [0, 0], "ECC", WARNING, "off"),
    ("nvmlDeviceGetTotalEccErrors", 3, "ECC", PROBLEM, "3 uncorrected errors"),
    ("nvmlDeviceGetRemappedRows", (0, 1, 1, 0), "memory rows", PROBLEM, "waits for a reset"),
    ("nvmlDeviceGetRemappedRows", (0, 1, 0, 1), "memory rows", PROBLEM, "failed"),
    ("nvmlDeviceGetMigMode", [1, 1], "MIG", PROBLEM, "a slice of a GPU"),
    ("nvmlDeviceGetComputeMode", 3, "compute mode", WARNING, "exclusive"),
    ("nvmlDeviceGetComputeMode", 2, "compute mode", PROBLEM, "prohibited"),
    ("nvmlDeviceGetUtilizationRates", types.SimpleNamespace(gpu=97), "other processes", PROBLEM, "97 % busy while nothing of ours ran")])
def test_each_thing_that_is_wrong_with_a_gpu_is_found(nvml: Nvml, name: str, value: Any, subject: str, level: Level, says: str) -> None:
    nvml.values[name] = value
    found = of_gpu(doctor_nvml.read("GPU-1"), "13.0", [])
    assert named(found, subject).level is level and says in named(found, subject).says
    assert [each.subject for each in found if each.level is not OK] == [subject], "nothing else is accused"


def test_strangers_on_the_gpu_are_named(nvml: Nvml) -> None:
    found = named(of_gpu(doctor_nvml.read("GPU-1"), "13.0", [41, 42]), "other processes")
    assert found.level is PROBLEM and found.says == "on the GPU: pid 41, 42"


def test_nvml_that_cannot_be_read_is_one_problem(nvml: Nvml) -> None:
    nvml.values["nvmlInit"] = RuntimeError("driver not loaded")
    found = of_gpu(doctor_nvml.read("GPU-1"), "13.0", [])
    assert [each.subject for each in found] == ["NVML"] and found[0].level is PROBLEM and "driver not loaded" in found[0].says


def test_what_nvml_does_not_say_is_said(nvml: Nvml) -> None:
    for name in ("nvmlDeviceGetApplicationsClock", "nvmlDeviceGetMigMode", "nvmlDeviceGetRemappedRows"):
        nvml.values[name] = RuntimeError("Not Supported")
    found = of_gpu(doctor_nvml.read("GPU-1"), "13.0", [])
    assert named(found, "not told").says == "NVML does not say: application clock, remapped memory rows, MIG mode"
    assert {"clock setting", "MIG", "memory rows"}.isdisjoint(each.subject for each in found)


BUILD = {"pid": 7, "device": "cuda", "torch": "2.11.0", "cuda": "13.0", "driver_seen": True, "cuda_usable": True, "uuid": "GPU-1",
         "gpu": "NVIDIA H200", "gpus": 1, "capability": "9.0", "built_for": ["sm_80", "sm_90a"], "free": 139 * GIB, "total": 140 * GIB}
ON_CPU = {**BUILD, "device": "cpu", "driver_seen": False, "cuda_usable": False}
FACTS: dict[str, dict[str, Any]] = {
    "profiler": {"kernels": 1, "lost": ""}, "launch": {"host_us": 6.0, "hidden": True, "span_us": 3.0},
    "copying": {"bandwidth": 4.2e12, "peak": 4.8e12, "begin": 0.0, "end": 1.0}, "events": {"step_us": 0.03},
    "flushing": {"warm_us": 9.0, "flushed_us": 12.0, "l2": 60_000_000}}
STEADY = [Reading(float(at), 1980, 300.0, 0x4 if at else 0) for at in range(5)]


def test_what_torch_sees_is_judged() -> None:
    assert {each.level for each in of_device(BUILD)} == {OK}
    assert named(of_device({**BUILD, "capability": "8.0"}), "gpu").level is WARNING
    assert named(of_device({**BUILD, "built_for": ["sm_80"]}), "torch").level is PROBLEM
    assert named(of_device({**BUILD, "free": 70 * GIB}), "memory").level is WARNING
    assert "its times are no evidence" in named(of_device(ON_CPU), "gpu").says and named(of_device(ON_CPU), "gpu").level is WARNING
    assert "not asked for" in named(of_device({**BUILD, "device": "cpu"}, wants_cpu=True), "gpu").says
    unseen = named(of_device({**ON_CPU, "driver_seen": True}), "gpu")
    assert unseen.level is PROBLEM and "does not see a GPU" in unseen.says


def test_good_probes_are_good() -> None:
    found = of_probes(FACTS, STEADY, 1980)
    assert {each.level for each in found} == {OK} and "88%" in named(found, "copying").says
    assert named(found, "clocks under load").says == "1980 to 1980 of 1980 MHz while copying, power cap, steady"


@pytest.mark.parametrize(("probe", "facts", "subject", "level", "says"), [
    ("profiler", {"kernels": 0, "lost": "the profiler lost records"}, "profiler", PROBLEM, "the profiler lost records"),
    ("profiler", {"kernels": 2, "lost": ""}, "profiler", WARNING, "sees 2 kernels where 1 was launched"),
    ("launch", {"host_us": 5000.0, "hidden": False}, "launch", PROBLEM, "cannot be hidden"),
    ("copying", {"bandwidth": 3.4e12, "peak": 4.8e12, "begin": 0, "end": 1}, "copying", WARNING, "71%"),
    ("copying", {"bandwidth": 1.2e12, "peak": 4.8e12, "begin": 0, "end": 1}, "copying", PROBLEM, "25%"),
    ("events", {"step_us": 1000.0}, "event timer", WARNING, "steps of 1e+03 us"),
    ("events", {"step_us": 0.0}, "event timer", WARNING, "every time is the same"),
    ("flushing", {"warm_us": 9.0, "flushed_us": 9.1, "l2": 60_000_000}, "L2 flush", WARNING, "9.1 us"),
    ("flushing", {"raised": "OutOfMemoryError: no"}, "flushing", PROBLEM, "the probe failed: OutOfMemoryError: no")])
def test_each_probe_that_fails_is_found(probe: str, facts: dict[str, Any], subject: str, level: Level, says: str) -> None:
    found = of_probes({**FACTS, probe: facts}, STEADY, 1980)
    assert named(found, subject).level is level and says in named(found, subject).says
    assert [each.subject for each in found if each.level is not OK] == [subject]


def test_a_peak_that_is_not_known_is_no_share() -> None:
    found = of_probes({**FACTS, "copying": {**FACTS["copying"], "peak": 0.0}}, STEADY, 1980)
    assert "not known" in named(found, "copying").says


@pytest.mark.parametrize(("readings", "level", "says"), [
    ([], PROBLEM, "could not be read"),
    ([Reading(0, 1980, 1, 0), Reading(1, 1900, 1, 0x4)], WARNING, "1900 to 1980 of 1980 MHz while copying, power cap"),
    ([Reading(0, 1980, 1, 0x40)], PROBLEM, "hardware thermal slowdown"),
    ([Reading(0, 1200, 1, 0)], PROBLEM, "1200 to 1200 of 1980 MHz")])
def test_clocks_under_load_are_judged(readings: list[Reading], level: Level, says: str) -> None:
    found = named(of_probes(FACTS, readings, 1980), "clocks under load")
    assert found.level is level and says in found.says


GOOD_HOST = Host(0.2, 8, "performance", True, Path("runs"), 100 * GIB, "", "0.1.0, commit 0123456789ab")


@pytest.mark.parametrize(("change", "subject", "level", "says"), [
    ({"load": 5.0}, "CPU load", WARNING, "5.0 runnable on 8 cores"), ({"load": 20.0}, "CPU load", PROBLEM, "20.0"),
    ({"governor": "powersave"}, "CPU governor", WARNING, "powersave"),
    ({"nvidia_smi": False}, "nvidia-smi", WARNING, "not there"),
    ({"free": GIB // 2}, "disk", WARNING, "0.5 GiB free"), ({"free": 1}, "disk", PROBLEM, "0.0 GiB free"),
    ({"refused": "/proc: No such file or directory", "free": 0}, "disk", PROBLEM, "runs cannot be written (/proc: No such file"),
    ({"refused": "No space left on device", "free": GIB}, "disk", PROBLEM, "(No space left on device), 1.0 GiB free"),
    ({"variables": ["CUDA_LAUNCH_BLOCKING=1"]}, "environment", WARNING, "CUDA_LAUNCH_BLOCKING=1"),
    ({"revision": "0.1.0, commit 0123456789ab, changed since"}, "threearm", WARNING, "changed since")])
def test_the_host_is_judged(change: dict[str, Any], subject: str, level: Level, says: str) -> None:
    assert {each.level for each in of_host(GOOD_HOST, True)} == {OK}
    found = of_host(dataclasses.replace(GOOD_HOST, **change), True)
    assert named(found, subject).level is level and says in named(found, subject).says
    assert [each.subject for each in found if each.level is not OK] == [subject]


def test_a_host_without_a_gpu_needs_no_nvidia_smi_and_answers_do_not_hang_on_its_load() -> None:
    assert exit_code(of_host(dataclasses.replace(GOOD_HOST, load=99.0), False)) == 4
    assert {each.level for each in of_host(dataclasses.replace(GOOD_HOST, nvidia_smi=False, governor=""), False)} == {OK}


def test_this_host_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = doctor_host.look(tmp_path / "not" / "there")
    assert found.cores >= 1 and found.free > 0 and not found.refused and found.variables == ["CUDA_LAUNCH_BLOCKING=1"]


def test_room_is_asked_for_where_that_helps(tmp_path: Path) -> None:
    full, refused = (named(of_host(dataclasses.replace(GOOD_HOST, refused=why), True), "disk").remedy
                     for why in ("No space left on device", "Read-only file system"))
    assert "make room" in full and refused == "give --runs a place that can be"
    (tmp_path / "file").touch()
    assert why_not(tmp_path / "file" / "runs") == f"{tmp_path}/file: Not a directory"
    assert why_not(Path("/proc/x")) == "/proc: No such file or directory", "whoever asks, also root"
    assert why_not(tmp_path / "a" / "b") == why_not(tmp_path) == "" and [path.name for path in tmp_path.iterdir()] == ["file"]


def kernel(name: str, why_not: str = "", none_only: str = "") -> dict[str, Any]:
    return {"name": name, "version": "1.0", "why_not": why_not, "none_only": none_only}


def test_kernels_that_cannot_run_say_why_and_what_to_install() -> None:
    kernels = [kernel("a"),
               kernel("b", "package b is not installed (pip install b-kernel)"),
               kernel("c", "nvcc is neither on PATH nor in CUDA_HOME"),
               kernel("d", "needs compute capability 10.0, this GPU has 9.0"), kernel("e", "b:f does not import: OSError: libcudart.so.12"),
               kernel("f", none_only="f of version 0.9 takes no topk_length")]
    found = of_kernels(kernels, True)
    assert found[0].says == "2 of 6 can run: a 1.0, f 1.0" and "not for this device: d" in found[1].says and exit_code(found) == 4
    assert [(each.subject, each.remedy) for each in found[2:]] == [
        ("b", "pip install b-kernel"), ("c", "install it, or set CUDA_HOME"),
        ("e", "its package is not for this torch or CUDA: install one that is"), ("f", "install a newer version of its package")]
    assert {each.level for each in of_kernels([kernel("a"), *kernels[1:3]], False)} == {OK}, "a CPU needs none of them"
    assert of_kernels(kernels[1:2], True)[0].level is PROBLEM


def test_the_sentence_that_counts() -> None:
    good, warning, problem = Finding("a", OK, ""), Finding("b", WARNING, "", "x"), Finding("c", PROBLEM, "", "x")
    assert (exit_code([good]), exit_code([good, warning]), exit_code([warning, problem])) == (0, 4, 5)
    assert report.verdict([good], "cuda") == "trustworthy: nothing found"
    assert report.verdict([good, warning], "cuda") == "trustworthy with 1 warning"
    assert report.verdict([warning], "cpu") == "answers are trustworthy, times are no evidence: 1 warning"
    assert report.verdict([warning, problem], "cuda") == "NOT trustworthy: 1 problem, 1 warning"


class FakeWorker:
    """A worker on a GPU; `copying` takes as long as two readings."""

    def __init__(self, options: WorkerOptions, log: Path) -> None:
        self.killed = False

    def ask(self, limit: float, op: str, probe: str) -> list[dict[str, Any]]:
        facts = {**FACTS, "build": BUILD}[probe]
        if probe == "copying":
            begin = time.monotonic()
            time.sleep(0.05)
            facts = {**facts, "begin": begin, "end": time.monotonic()}
        return [{"event": "phase", "arm": "", "phase": probe}, {"event": "examined", "facts": facts}]

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def on_gpu(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """A machine with a GPU, as far as the command looks."""
    described = {"device": "cuda", "machine": {"device": "cuda", "gpu": "NVIDIA H200"},
                 "kernels": [{**kernel("torch_blocks"), "imports": ""}, {**kernel("flash_mla"), "imports": "flash_mla:f"}]}
    monkeypatch.setattr(doctor_command, "describe", lambda options, cases: described)
    monkeypatch.setattr(doctor_command, "probe", lambda options, log, name: ("", ""))
    monkeypatch.setattr(doctor_command, "WorkerProcess", FakeWorker)
    monkeypatch.setattr(doctor_command, "SETTLE", 0.0)
    monkeypatch.setattr(doctor_host, "look", lambda runs: GOOD_HOST)
    return nvml


def test_a_gpu_with_nothing_wrong_is_trustworthy(on_gpu: Nvml) -> None:
    done = invoke("doctor")
    assert done.code == 0 and done.lines[-1] == "trustworthy: nothing found", done.text
    assert "ok        copying" in done.text and "2 of 2 can run: torch_blocks 1.0, flash_mla 1.0" in done.text


def test_a_stranger_on_the_gpu_is_a_problem(on_gpu: Nvml) -> None:
    on_gpu.values["nvmlDeviceGetComputeRunningProcesses"] = [types.SimpleNamespace(pid=7), types.SimpleNamespace(pid=99)]
    done = invoke("doctor")
    assert done.code == 5 and "on the GPU: pid 99" in done.text and done.lines[-1] == "NOT trustworthy: 1 problem, 0 warnings"


def test_an_import_that_ends_the_process_is_a_warning(on_gpu: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(options: WorkerOptions, log: Path, name: str) -> tuple[str, str]:
        raise WorkerDied(Verdict.CRASHED, "signal SIGSEGV in phase import", "", "import")

    monkeypatch.setattr(doctor_command, "probe", dies)
    done = invoke("doctor", "--json")
    found = json.loads(done.text)
    assert done.code == found["exit"] == 4
    assert [each["subject"] for each in found["findings"] if each["level"] == "warning"] == ["flash_mla"]
    assert "importing it ends the process: signal SIGSEGV" in done.text


def test_on_a_cpu_answers_are_evidence_and_times_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_host, "look", lambda runs: GOOD_HOST)
    done = invoke("doctor", "--device", "cpu", "--runs", str(tmp_path))
    assert done.code == 4 and "times are no evidence" in done.lines[-1] and "torch_blocks" in done.text, done.text


def test_a_device_that_is_not_there_is_a_problem() -> None:
    done = invoke("doctor", "--device", "cuda:99")
    assert done.code == 5 and "problem   gpu" in done.text and "cuda:99 is not there" in done.text
    assert "without a GPU: --device cpu" in done.text or "the number of one of those" in done.text


@pytest.mark.parametrize(("facts", "says", "remedy"), [
    ({"cuda": "", "driver_seen": True}, "torch 2.11.0 is built without CUDA", "install a torch that is built for CUDA"),
    ({"cuda": "", "driver_seen": False}, "no NVIDIA driver, and torch 2.11.0 is built without", "install the driver, or give"),
    ({"driver_seen": False}, "there is no NVIDIA driver", "install the driver, or give the container the GPU"),
    ({"driver_seen": True}, "torch 2.11.0 for CUDA 13.0 does not see a GPU", "look at CUDA_VISIBLE_DEVICES"),
    ({"cuda_usable": True, "gpus": 2}, "torch sees 2 GPUs, from cuda:0", "the number of one of those")])
def test_what_is_to_be_done_follows_from_why_it_is_not_there(facts: dict[str, Any], says: str, remedy: str) -> None:
    found = not_there("cuda:7", {**ON_CPU, **facts})
    assert found.level is PROBLEM and says in found.says and remedy in found.remedy
    assert "pip install -e ." not in found.remedy


def test_a_worker_that_cannot_start_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_worker("exit code 1; last output: No module named 'torch'").remedy.startswith("pip install -e .")
    assert "import torch" in no_worker("signal SIGSEGV in phase start").remedy
    done = invoke("doctor", "--load", str(FAULTY / "no_import.py"), "--device", "cpu")
    assert done.code == 5 and "put right: mend that file" in done.text, done.text


def test_a_probe_that_raises_says_so() -> None:
    assert "ValueError" in doctor_probes.examine("profiler", torch.device("cpu"))["raised"]
    build = doctor_probes.examine("build", torch.device("cpu"))
    assert build["device"] == "cpu" and build["torch"] == torch.__version__


@pytest.mark.cuda
def test_every_probe_has_its_facts_on_a_gpu() -> None:
    facts = {name: doctor_probes.examine(name, torch.device("cuda")) for name in doctor_probes.PROBES}
    assert not [found for found in facts.values() if "raised" in found]
    assert facts["copying"]["bandwidth"] > 1e11 and facts["launch"]["hidden"] and facts["flushing"]["warm_us"] > 0
