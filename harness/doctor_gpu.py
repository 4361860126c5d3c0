"""What the readings of NVML mean for evidence. Parent side; harness/doctor.py has what a finding is."""
from __future__ import annotations

from collections.abc import Callable

from harness.doctor import CONTAINER, Finding, Level, finding
from harness.doctor_nvml import Gpu
from harness.watch import SLOWDOWN, slowed

HOT, WARM = 5, 15  # degrees below the slow-down
IDLE_PERCENT = 5  # of use, while nobody of us does anything
EXCLUSIVE, PROHIBITED = 3, 2  # nvmlComputeMode


def of_gpu(gpu: Gpu, built_for: str, strangers: list[int]) -> list[Finding]:
    """built_for: the CUDA version of torch. strangers: processes of others on the GPU."""
    if gpu.problem:
        return [Finding("NVML", Level.PROBLEM, f"cannot be read ({gpu.problem}): no clock, so a gate counts no round", CONTAINER)]
    judges: list[Callable[[Gpu], Finding]] = [persistence, clock_setting, power_limit, throttled, temperature, ecc, remapped, mig,
                                              compute_mode]
    found = [driver(gpu, built_for), *(judge(gpu) for judge in judges), in_use(gpu, strangers)]
    unknown = Finding("not told", Level.OK, f"NVML does not say: {', '.join(gpu.unknown)}")
    return [*(each for each in found if each.says), *([unknown] if gpu.unknown else [])]


def driver(gpu: Gpu, built_for: str) -> Finding:
    """A driver runs what is built for its own CUDA or an older one, and for a newer one of the same major version."""
    major = int(built_for.partition(".")[0] or 0)
    return finding("driver", gpu.cuda[0] < major, f"{gpu.driver}, for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}; torch is built for {built_for}",
                   "update the driver, or install a torch for an older CUDA", Level.PROBLEM)


def persistence(gpu: Gpu) -> Finding:
    """Without it the driver unloads between processes, and forgets what was set."""
    return finding("persistence", gpu.persistence is False, "" if gpu.persistence is None else "on" if gpu.persistence else "off",
                   "nvidia-smi -pm 1 (as root)")


def clock_setting(gpu: Gpu) -> Finding:
    """Application clocks below the highest. That they vary is seen under load."""
    if gpu.application_mhz is None or not gpu.most_mhz:
        return Finding("clock setting", Level.OK, "")
    return finding("clock setting", gpu.application_mhz < gpu.most_mhz,
                   f"application clock {gpu.application_mhz} of {gpu.most_mhz} MHz", "nvidia-smi -rac; a lock is lifted by nvidia-smi -rgc")


def power_limit(gpu: Gpu) -> Finding:
    """Another limit than the card's own makes times that nobody else has."""
    if not gpu.limit_watts or not gpu.default_watts:
        return Finding("power limit", Level.OK, "")
    return finding("power limit", abs(gpu.limit_watts - gpu.default_watts) > 1,
                   f"{gpu.limit_watts:.0f} W, default {gpu.default_watts:.0f} W", f"nvidia-smi -pl {gpu.default_watts:.0f} (as root)")


def throttled(gpu: Gpu) -> Finding:
    """Throttle reasons while nothing runs."""
    if gpu.reasons is None:
        return Finding("throttling", Level.PROBLEM, "NVML does not tell the throttle reasons",
                       "a newer driver, or access to the GPU's clocks")
    hard = any(gpu.reasons & bit for bit in SLOWDOWN)
    return finding("throttling", bool(slowed(gpu.reasons)), slowed(gpu.reasons) or "none now",
                   "look at cooling and power supply" if hard else "raise the power limit, or end what else uses the GPU",
                   Level.PROBLEM if hard else Level.WARNING)


def temperature(gpu: Gpu) -> Finding:
    """Against the temperature at which the GPU slows down."""
    if gpu.celsius is None or not gpu.slows_at:
        return Finding("temperature", Level.OK, f"{gpu.celsius} C" if gpu.celsius is not None else "")
    left = gpu.slows_at - gpu.celsius
    return finding("temperature", left < WARM, f"{gpu.celsius} C, slows down at {gpu.slows_at} C", "let it cool down; look at the fans",
                   Level.PROBLEM if left < HOT else Level.WARNING)


def ecc(gpu: Gpu) -> Finding:
    """Errors that could not be corrected since the driver was loaded make every verdict worthless."""
    if gpu.ecc is None:
        return Finding("ECC", Level.OK, "")
    if not gpu.ecc:
        return Finding("ECC", Level.WARNING, "off: a flipped bit is taken for a kernel's error",
                       "nvidia-smi -e 1 (as root), then reset the GPU")
    return finding("ECC", bool(gpu.uncorrected), f"on, {gpu.uncorrected or 0} uncorrected errors",
                   "reset the GPU; if they come again, replace it", Level.PROBLEM)


def remapped(gpu: Gpu) -> Finding:
    """Memory rows that were found bad."""
    if gpu.remap_pending is None:
        return Finding("memory rows", Level.OK, "")
    says = "a remapping failed" if gpu.remap_failed else "a remapping waits for a reset" if gpu.remap_pending else "none to remap"
    return finding("memory rows", says != "none to remap", says, "reset the GPU; after a failed remapping replace it", Level.PROBLEM)


def mig(gpu: Gpu) -> Finding:
    """A slice has a part of the SMs and shares the rest."""
    return finding("MIG", bool(gpu.mig), "" if gpu.mig is None else "on: a slice of a GPU is timed, beside others" if gpu.mig else "off",
                   "nvidia-smi -mig 0 (as root)", Level.PROBLEM)


def compute_mode(gpu: Gpu) -> Finding:
    """A gate has two processes on the GPU."""
    mode = {None: "", PROHIBITED: "prohibited: no process can use it", EXCLUSIVE: "exclusive: a gate needs two processes at once"}
    return finding("compute mode", gpu.compute_mode in (PROHIBITED, EXCLUSIVE), mode.get(gpu.compute_mode, "default"),
                   "nvidia-smi -c 0 (as root)", Level.PROBLEM if gpu.compute_mode == PROHIBITED else Level.WARNING)


def in_use(gpu: Gpu, strangers: list[int]) -> Finding:
    """Others on the GPU. In a container their processes are hidden, but not what they use."""
    if strangers:
        return Finding("other processes", Level.PROBLEM, f"on the GPU: pid {', '.join(map(str, strangers))}",
                       "wait for them, or use another GPU")
    if gpu.busy_percent is None:
        return Finding("other processes", Level.OK, "")
    busy = gpu.busy_percent > IDLE_PERCENT
    says = f"the GPU was {gpu.busy_percent} % busy while nothing of ours ran" if busy else "none seen, GPU idle"
    return finding("other processes", busy, says, "nvidia-smi on the host names them: wait, or use another GPU",
                   Level.PROBLEM)
