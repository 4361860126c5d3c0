"""Whether this machine can give trustworthy evidence: findings, from what NVML, a worker's probes and the host say. Parent side.

A problem makes times, or verdicts, worthless; a warning makes them worth less, or a feature unusable. Each says how to put it right.
harness/doctor_nvml.py, doctor_host.py and doctor_probes.py gather, doctor_gpu.py judges NVML's part, doctor_command.py asks and shows.
"""
from __future__ import annotations

import dataclasses
import enum
import errno
import os
import statistics
from typing import Any

from harness.doctor_host import Host
from harness.sampling import CLOCKS_APART, LOWEST_CLOCK
from harness.watch import POWER_CAP, SLOWDOWN, Reading, slowed
from harness.words import counted

GIB = 1 << 30
LEAST_SHARE, POOR_SHARE = 0.75, 0.6
"""Of the peak bandwidth, by copying: an H200 was measured at 0.86 to 0.88. Below the first a warning, below the second a problem."""
COARSE_US = 2.0  # steps of the event timer; CUDA documents about half a microsecond
FLUSH_SHOWS = 1.05  # how much longer reading takes after a flush, at least
FREE_SHARE = 0.9  # of the memory
CONTAINER = "pip install nvidia-ml-py; give a container the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
SUPPORTED = ("9.0", "10.0")
"""Compute capabilities of the GPUs that sparse-attention kernels are made for: H100, H200; B200."""


class Level(str, enum.Enum):
    """How much a finding counts."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at. remedy: how to put it right, "" where nothing is to be."""

    subject: str
    level: Level
    says: str
    remedy: str = ""


def finding(subject: str, bad: bool, says: str, remedy: str, level: Level = Level.WARNING) -> Finding:
    """`level` and the remedy where it is bad, else ok."""
    return Finding(subject, level, says, remedy) if bad else Finding(subject, Level.OK, says)


def exit_code(findings: list[Finding]) -> int:
    """0 trustworthy, 4 warnings alone, 5 a problem."""
    levels = {found.level for found in findings}
    return 5 if Level.PROBLEM in levels else 4 if Level.WARNING in levels else 0


# What torch sees

def of_device(facts: dict[str, Any], wants_cpu: bool = False) -> list[Finding]:
    """facts: the probe `build`. wants_cpu: --device cpu."""
    if facts["device"] == "cpu":
        if facts["driver_seen"] and not facts["cuda_usable"]:
            return [Finding("gpu", Level.PROBLEM, *unseen(facts))]
        seen = "not asked for (--device cpu)" if wants_cpu and facts["cuda_usable"] else "none"
        return [Finding("gpu", Level.WARNING, f"{seen}: this machine can tell whether an answer is right; its times are no evidence",
                        "times are taken on the GPU that is to be served from")]
    supported = facts["capability"] in SUPPORTED
    name = f"{facts['gpu']}, compute capability {facts['capability']}"
    arch = "sm_" + facts["capability"].replace(".", "")
    built = any(each.startswith(arch) for each in facts["built_for"])
    free = facts["free"] / facts["total"]
    return [
        finding("gpu", not supported, name if supported else f"{name}: sparse-attention kernels are made for {' and '.join(SUPPORTED)}",
                "use an H100, H200 or B200"),
        finding("torch", not built, f"torch {facts['torch']} for CUDA {facts['cuda']}, "
                + (f"with code for {arch}" if built else f"without code for {arch}: it has {', '.join(facts['built_for'])}"),
                "install a torch built for this GPU", Level.PROBLEM),
        finding("memory", free < FREE_SHARE, f"{facts['free'] / GIB:.0f} of {facts['total'] / GIB:.0f} GiB free",
                "end what else holds memory (nvidia-smi): cases of 1M keys need most of it"),
    ]


def not_there(device: str, facts: dict[str, Any]) -> Finding:
    """A device that was asked for and cannot be used. device: as --device has it; facts: the probe `build`, on the CPU."""
    if facts["cuda_usable"]:
        sees = f"torch sees {counted(facts['gpus'], 'GPU')}, from cuda:0"
        return Finding("gpu", Level.PROBLEM, f"{device} is not there or cannot be used: {sees}",
                       "--device cuda, or the number of one of those; nvidia-smi says more")
    says, remedy = unseen(facts)
    return Finding("gpu", Level.PROBLEM, f"{device} is not there: {says}", f"{remedy}; without a GPU: --device cpu")


def unseen(facts: dict[str, Any]) -> tuple[str, str]:
    """Why torch sees no GPU, and how to put it right. facts: the probe `build`."""
    driver = "there is an NVIDIA driver" if facts["driver_seen"] else "there is no NVIDIA driver"
    get_driver = "" if facts["driver_seen"] else "install the driver, or give the container the GPU (docker run --gpus all)"
    if not facts["cuda"]:
        return (f"{driver}, and torch {facts['torch']} is built without CUDA",
                "; ".join(filter(None, (get_driver, "install a torch that is built for CUDA no newer than the driver's "
                                        "(https://pytorch.org/get-started/locally)"))))
    if get_driver:
        return driver, get_driver
    return (f"{driver}, but torch {facts['torch']} for CUDA {facts['cuda']} does not see a GPU",
            "look at CUDA_VISIBLE_DEVICES, and whether the driver is older than that CUDA: update it, or install a torch for an older CUDA")


def no_worker(detail: str) -> Finding:
    """A worker that died before it could answer. detail: how, with the last that it printed."""
    lacks = "No module named" in detail
    return Finding("worker", Level.PROBLEM, f"cannot run: {detail}",
                   "pip install -e . into this interpreter" if lacks else
                   "see what `python -c 'import torch'` says in this interpreter: what ends that ends every worker")


# What the probes found

def of_probes(facts: dict[str, dict[str, Any]], readings: list[Reading], most_mhz: int) -> list[Finding]:
    """facts: by probe. readings: of the clock while the probe `copying` ran; most_mhz: the highest there is."""
    judges = {"profiler": profiled, "launch": launched, "copying": copied, "events": event_steps, "flushing": flushed}
    found = []
    for name, judge in judges.items():
        raised = facts[name].get("raised", "")
        found.append(Finding(name, Level.PROBLEM, f"the probe failed: {raised}", "run it again; what no probe can do no kernel can")
                     if raised else judge(facts[name]))
    return [*found, under_load(readings, most_mhz)]


def profiled(facts: dict[str, Any]) -> Finding:
    """Contract kernel counts launches."""
    says = "the profiler sees every launch" if facts["kernels"] == 1 else \
        facts["lost"] or f"the profiler sees {facts['kernels']} kernels where 1 was launched"
    return finding("profiler", facts["kernels"] != 1, says,
                   "let CUPTI read counters: driver option NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN; end other profilers. "
                   "Until then: --time span", Level.PROBLEM if facts["kernels"] == 0 else Level.WARNING)


def launched(facts: dict[str, Any]) -> Finding:
    """Contract span hides the launch behind a busy stream."""
    return finding("launch", not facts["hidden"], f"takes the host {facts['host_us']:.1f} us"
                   + (", hidden behind a busy stream" if facts["hidden"] else " and cannot be hidden: it waits for the device"),
                   "unset CUDA_LAUNCH_BLOCKING, and run without a debugger or sanitizer", Level.PROBLEM)


def copied(facts: dict[str, Any]) -> Finding:
    """Bandwidth against the peak: an emulated, shared or broken memory shows."""
    if not facts["peak"]:
        return Finding("copying", Level.OK, f"{facts['bandwidth'] / 1e12:.2f} TB/s; the peak of this GPU is not known")
    share = facts["bandwidth"] / facts["peak"]
    return finding("copying", share < LEAST_SHARE, f"{facts['bandwidth'] / 1e12:.2f} of {facts['peak'] / 1e12:.2f} TB/s, {share:.0%}",
                   "end what else uses the GPU; look at memory clock, MIG and ECC", Level.PROBLEM if share < POOR_SHARE else Level.WARNING)


def event_steps(facts: dict[str, Any]) -> Finding:
    """What the event timer can tell apart."""
    coarse = facts["step_us"] > COARSE_US or not facts["step_us"]
    return finding("event timer", coarse, f"steps of {facts['step_us']:.3g} us" if facts["step_us"] else "every time is the same",
                   "time cases that take much longer than a step; look at the driver and the virtualisation")


def flushed(facts: dict[str, Any]) -> Finding:
    """Whether a sample begins with what was in the L2."""
    ratio = facts["flushed_us"] / facts["warm_us"]
    return finding("L2 flush", ratio < FLUSH_SHOWS,
                   f"reading {facts['l2'] / 3e6:.0f} MB takes {facts['warm_us']:.1f} us, after a flush {facts['flushed_us']:.1f} us",
                   "end what else uses the GPU; samples may be warm, which the report does not say")


def under_load(readings: list[Reading], most_mhz: int) -> Finding:
    """The clock while the GPU copied."""
    if not readings or not most_mhz:
        return Finding("clocks under load", Level.PROBLEM, "could not be read: a gate counts no round", "see NVML")
    mhz, reasons = [reading.mhz for reading in readings], 0
    for reading in readings:
        reasons |= reading.reasons
    hard, says = any(reasons & bit for bit in SLOWDOWN), f"{min(mhz)} to {max(mhz)} of {most_mhz} MHz while copying"
    if hard or statistics.fmean(mhz) < LOWEST_CLOCK * most_mhz:
        return Finding("clocks under load", Level.PROBLEM, f"{says}{', ' + slowed(reasons) if slowed(reasons) else ''}",
                       "look at cooling and power; nvidia-smi -rgc and -rac lift a lock")
    unsteady = min(mhz) < (1 - CLOCKS_APART) * max(mhz)
    return finding("clocks under load", unsteady, f"{says}{', ' + slowed(reasons) if reasons & POWER_CAP else ''}"
                   + ("" if unsteady else ", steady"),
                   "lock them: nvidia-smi -lgc MHZ (as root), at one that the power limit allows; threearm gate leaves unequal rounds out")


# The host, and what is installed

def of_host(host: Host, on_gpu: bool) -> list[Finding]:
    """on_gpu: whether a GPU is to be judged, whose driver is told by nvidia-smi."""
    load = host.load / host.cores
    found = [
        finding("CPU load", load > 0.5, f"{host.load:.1f} runnable on {host.cores} cores",
                "end what else runs; wall times and launches wait", Level.PROBLEM if load > 1.5 and on_gpu else Level.WARNING),
        finding("CPU governor", host.governor not in ("", "performance"), host.governor or "not told: a virtual machine, or a container",
                "cpupower frequency-set -g performance (as root)"),
        disk(host),
        finding("threearm", host.dirty, host.revision, "commit: a number of a changed tree cannot be repeated"),
    ]
    if on_gpu:
        says = "there" if host.nvidia_smi else "not there: records lack driver, power limit and highest clocks"
        found.append(finding("environment", bool(host.variables), ", ".join(host.variables) or "no variable set that spoils launches",
                             "unset them"))
        found.insert(0, finding("nvidia-smi", not host.nvidia_smi, says, CONTAINER))
    return found


def disk(host: Host) -> Finding:
    """Where run folders go. What cannot be written has no room for a reason that making room does not end, unless it is full."""
    free = f"{host.free / GIB:.1f} GiB free"
    if host.refused:
        full = os.strerror(errno.ENOSPC) in host.refused
        return Finding("disk", Level.PROBLEM, f"{host.runs} cannot be written ({host.refused}){f', {free}' if full else ''}",
                       "make room, or give --runs another place" if full else "give --runs a place that can be")
    return finding("disk", host.free < GIB, f"{free} for {host.runs}", "make room, or give --runs another place",
                   Level.PROBLEM if host.free < GIB // 8 else Level.WARNING)


def of_kernels(kernels: list[dict[str, Any]], on_gpu: bool) -> list[Finding]:
    """kernels: as a worker describes them; `why_not` also what importing them said, `none_only` why an arm alone is there."""
    run = [kernel for kernel in kernels if not kernel["why_not"]]
    names = ", ".join(f"{kernel['name']} {kernel['version']}".strip() for kernel in run)
    says = f"{len(run)} of {len(kernels)} can run: {names}" if run else "none can run"
    found = [finding("kernels", not run, says, "pip install -e '.[cuda]'", Level.PROBLEM)]
    other = [kernel["name"] for kernel in kernels if elsewhere(kernel["why_not"])]
    if other:
        found.append(Finding("kernels", Level.OK, f"not for this device: {', '.join(other)}"))
    for kernel in kernels:
        why = kernel["why_not"]
        if why and not elsewhere(why):
            found.append(finding(kernel["name"], on_gpu, f"cannot run: {why}", remedy_of(why)))
        elif kernel.get("none_only"):
            found.append(finding(kernel["name"], on_gpu, f"none arm alone: {kernel['none_only']}",
                                 "install a newer version of its package"))
    return found


def elsewhere(why: str) -> bool:
    """Whether a kernel is for another device than this."""
    return why.startswith("needs ")


def remedy_of(why: str) -> str:
    """What to install for a kernel that cannot run."""
    if "(pip install " in why:
        return why.partition("(")[2].rpartition(")")[0]
    return "install it, or set CUDA_HOME" if "CUDA_HOME" in why else "its package is not for this torch or CUDA: install one that is"
