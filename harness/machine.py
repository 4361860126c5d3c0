"""What machine and software this is: the part of a run's record that makes a number mean something. Worker side."""
from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

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


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


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
    elif os.path.exists("/dev/nvidiactl"):
        facts["gpu not used"] = f"torch {torch.__version__} does not see it" if not torch.cuda.is_available() else "not asked for"
    facts |= {name: version for name in PACKAGES if (version := version_of((name,)))}
    return {key: value for key, value in facts.items() if value}
