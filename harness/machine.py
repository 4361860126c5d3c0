"""What machine and software this is: the part of a run's record that makes a number mean something. Worker side."""
from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

from harness.roofline import machine

PACKAGES = ("torch", "triton", "sgl-flash-mla", "sglang-kernel", "sgl-kernel", "sgl-deep-gemm", "sglang", "flash-mla")


def nvidia_smi(query: str, index: int) -> list[str]:
    """Fields of one GPU from nvidia-smi, or [] where the tool is absent or fails."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={index}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [field.strip() for field in done.stdout.strip().split(",")]


def version_of(distributions: tuple[str, ...]) -> str:
    """Version of the first installed of these distributions, or ""."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def gpu_uuid(device: torch.device) -> str:
    """The name by which NVML finds a device, whatever CUDA_VISIBLE_DEVICES says; "" without one."""
    if device.type != "cuda":
        return ""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def gpu_names(device: torch.device) -> list[str]:
    """The model of every GPU that this process sees, in CUDA's order; [] where it was not to use any."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if device.type == "cuda" else []


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def peaks(device: torch.device) -> dict[str, str]:
    """What a GPU can do at most at its highest clock, a number and its unit each (harness/roofline.py); {} where that is not known, or of
    no GPU."""
    best = machine(device) if device.type == "cuda" else None
    if best is None:
        return {}
    bf16, fp8 = best.flops
    return {"peak bf16": f"{bf16 / 1e12:.0f} TFLOP/s", "peak fp8": f"{fp8 / 1e12:.0f} TFLOP/s",
            "peak memory": f"{best.bandwidth / 1e12:.2f} TB/s", "L2": f"{best.cache} B"}


def describe_machine(device: torch.device) -> dict[str, str]:
    """Names, versions and settings, all text. Keys without a value on this machine are left out."""
    facts = {
        "device": str(device),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads",
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "cuda": torch.version.cuda or "",
    }
    if device.type == "cuda":
        index = device.index or 0
        capability = torch.cuda.get_device_capability(device)
        fields = nvidia_smi("name,driver_version,power.limit,clocks.max.sm,clocks.max.mem,ecc.mode.current", index)
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["capability"] = f"{capability[0]}.{capability[1]}"
        if len(fields) == 6:
            facts |= dict(zip(("driver", "power limit", "max SM clock", "max memory clock", "ECC"), fields[1:]))
        facts |= peaks(device)
    elif os.path.exists("/dev/nvidiactl"):
        facts["gpu not used"] = f"torch {torch.__version__} does not see it" if not torch.cuda.is_available() else "not asked for"
    facts |= {name: version for name in PACKAGES if (version := version_of((name,)))}
    return {key: value for key, value in facts.items() if value}
