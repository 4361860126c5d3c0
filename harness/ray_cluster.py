"""What a pool over a Ray cluster needs besides Ray: the code that is sent, the address, the device, and what Ray says, made short."""
from __future__ import annotations

import shutil
import socket
from pathlib import Path

from harness.client import OURS, ROOT, Unfit

CONNECT = 10.0
"""Seconds for a connection to the address that was given."""


def reachable(address: str) -> None:
    """Raises Unfit where nothing listens at HOST:PORT or ray://HOST:PORT: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        raise Unfit(f"--ray-address {address}: {error}") from None


def staged(folder: Path, load: tuple[str, ...]) -> tuple[str, ...]:
    """Copy the packages that a worker needs into a folder, and kernel files with the modules beside them. The files' places in it."""
    for package in OURS:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    places = []
    for number, file in enumerate(map(Path, load)):
        beside = folder / "loaded" / str(number)
        beside.mkdir(parents=True)
        for module in {file, *file.parent.glob("*.py")}:
            shutil.copy(module, beside)
        places.append(str((beside / file.name).relative_to(folder)))
    return tuple(places)


def device_of(device: str, resources: dict[str, float]) -> str:
    """`auto` by what a cluster has. Raises Unfit where it has no GPU, or GPUs of several models: what one refuses another takes."""
    gpus = resources.get("GPU", 0)
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cpu":
        return device
    if not gpus:
        raise Unfit(f"--device {device}: the cluster has no GPU")
    models = sorted(name.partition(":")[2] for name in resources if name.startswith("accelerator_type:"))
    if len(models) > 1:
        raise Unfit(f"the cluster has GPUs of several models, a campaign is about one: {', '.join(models)}")
    return device


def first_line(error: BaseException) -> str:
    """The first line of what it says, but for Ray's own headings the one that has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("The actor is dead because")), lines[0] if lines else type(error).__name__)
    return reason.partition(". Some common causes")[0][:300]


def last_line(error: BaseException) -> str:
    """The last line of what it says: the exception of a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
