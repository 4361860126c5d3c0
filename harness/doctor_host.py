"""What the host says of itself: load, governor, disk, the checkout. Parent side."""
from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from harness.runfolder import revision
from harness.writable import why_not

SPOILS = ("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE", "PYTORCH_NO_CUDA_MEMORY_CACHING",
          "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TRITON_INTERPRET")
"""Variables that change what a launch on a GPU does or takes."""
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@dataclasses.dataclass
class Host:
    """load: runnable processes, mean of a minute; cores: that we may use; governor: "" where the kernel does not tell; free: bytes for
    run folders at `runs`; refused: why nothing can be written there, "" where it can; revision: version, commit, and whether the tree was
    changed; variables: that are set and spoil launches."""

    load: float
    cores: int
    governor: str
    nvidia_smi: bool
    runs: Path
    free: int
    refused: str
    revision: str
    variables: list[str] = dataclasses.field(default_factory=list)

    @property
    def dirty(self) -> bool:
        return "changed since" in self.revision


def look(runs: Path) -> Host:
    """Look at this machine. runs: where run folders are to be made; it need not be there."""
    try:
        governor = GOVERNOR.read_text(encoding="ascii").strip()
    except OSError:
        governor = ""
    place = next(folder for folder in (runs.resolve(), *runs.resolve().parents) if folder.exists())
    return Host(os.getloadavg()[0], len(os.sched_getaffinity(0)), governor, shutil.which("nvidia-smi") is not None, runs,
                shutil.disk_usage(place).free, why_not(runs), revision(),
                [f"{name}={os.environ[name]}" for name in SPOILS if os.environ.get(name, "0") != "0"])
