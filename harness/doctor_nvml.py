"""What NVML says of one GPU, read once while nothing of ours runs on it. Parent side."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Gpu:
    """None where NVML does not say, then also named in `unknown`. problem: why nothing could be read, or "". cuda: the newest version
    that the driver takes, (major, minor). reasons: throttle reasons as bits. slows_at: the temperature of the slow-down."""

    problem: str = ""
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    persistence: bool | None = None
    application_mhz: int | None = None
    most_mhz: int | None = None
    limit_watts: float | None = None
    default_watts: float | None = None
    reasons: int | None = None
    celsius: int | None = None
    slows_at: int | None = None
    ecc: bool | None = None
    uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    mig: bool | None = None
    compute_mode: int | None = None
    busy_percent: int | None = None
    unknown: list[str] = dataclasses.field(default_factory=list)


def read(uuid: str) -> Gpu:
    """Read the GPU of this UUID."""
    gpu = Gpu()
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        gpu.driver = str(nvml.nvmlSystemGetDriverVersion())
        version = nvml.nvmlSystemGetCudaDriverVersion()
    except Exception as error:  # no library, no driver, a container that hides it
        gpu.problem = f"{type(error).__name__}: {error}"
        return gpu
    gpu.cuda = version // 1000, version % 1000 // 10

    def tell(what: str, ask: Callable[[], Any]) -> Any:
        """An answer, or None where this GPU or this user has none."""
        try:
            return ask()
        except Exception:
            gpu.unknown.append(what)
            return None

    def watts(milli: Any) -> float | None:
        return None if milli is None else milli / 1e3

    persistence = tell("persistence mode", lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    gpu.persistence = None if persistence is None else bool(persistence)
    gpu.application_mhz = tell("application clock", lambda: nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM))
    gpu.most_mhz = tell("highest clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    gpu.limit_watts = watts(tell("power limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle)))
    gpu.default_watts = watts(tell("default power limit", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)))
    gpu.reasons = tell("throttle reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    gpu.celsius = tell("temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    gpu.slows_at = tell("temperature of the slow-down", lambda: nvml.nvmlDeviceGetTemperatureThreshold(
        handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN))
    ecc = tell("ECC mode", lambda: nvml.nvmlDeviceGetEccMode(handle))
    gpu.ecc = None if ecc is None else bool(ecc[0])
    if gpu.ecc:
        gpu.uncorrected = tell("ECC errors", lambda: nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC))
    rows = tell("remapped memory rows", lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    if rows is not None:
        gpu.remap_pending, gpu.remap_failed = bool(rows[2]), bool(rows[3])
    mig = tell("MIG mode", lambda: nvml.nvmlDeviceGetMigMode(handle))
    gpu.mig = None if mig is None else bool(mig[0])
    gpu.compute_mode = tell("compute mode", lambda: nvml.nvmlDeviceGetComputeMode(handle))
    use = tell("how busy it is", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    gpu.busy_percent = None if use is None else use.gpu
    return gpu
