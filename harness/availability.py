"""Why a kernel, or one of its arms on one case, does not run here. Worker side: it may import a kernel's package."""
from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
from typing import Any

import torch

from arms.kernel import Kernel, Requires, find_program
from arms.topk import TopkKernel
from cases import Case, parse_case
from cases.fits import Fits
from harness.machine import version_of

AnyKernel = Kernel | TopkKernel
NO_LIMIT = Requires()
LIVE = "only an arm that is given the length computes this case"


@functools.cache
def _entry(entry: str) -> Any:
    """Import "module:function". Raises what the import raises."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def unavailable(kernel: AnyKernel, device: torch.device) -> str:
    """Why the kernel cannot run on this device and in this environment, or "". Does not import the kernel's package."""
    need = kernel.requires
    if need.device not in ("any", device.type):
        return f"needs a {need.device} device, this is {device.type}"
    if need.capability and device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        if have not in need.capability:
            wanted = " or ".join(f"{a}.{b}" for a, b in need.capability)
            return f"needs compute capability {wanted}, this GPU has {have[0]}.{have[1]}"
    if need.program and find_program(need.program) is None:
        return f"{need.program} is neither on PATH nor in CUDA_HOME"
    if need.entry:
        package = need.entry.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"package {package} is not installed (pip install {need.distribution[0] if need.distribution else package})"
    return ""


def import_problem(kernel: AnyKernel) -> str:
    """Import the kernel's entry point: why that fails, or "". May compile or load libraries."""
    if not kernel.requires.entry:
        return ""
    try:
        _entry(kernel.requires.entry)
        no_length(kernel)  # it reads the signature, which a function without one refuses
    except Exception as error:  # whatever a foreign package raises when it cannot be imported is the reason
        first = (str(error) or repr(error)).strip().splitlines()[0]
        return f"{kernel.requires.entry} does not import: {type(error).__name__}: {first}"
    return ""


def fits(kernel: AnyKernel) -> Fits:
    """What the kernel's cases may be, from what it requires."""
    need = kernel.requires
    refused = [(arm, limit.key, value, limit.reason) for limit in need.limits for value in limit.values for arm in limit.sources]
    if not isinstance(kernel, TopkKernel):
        refused += [(source, "tail", "live", LIVE) for source in kernel.arms if source != "metadata"]
    return Fits(need.dtypes, need.heads, need.d_qk, need.topk_multiple, need.topk_in, need.topk_max, need.keys, need.keys_multiple,
                need.requests_max, kernel.arms, tuple(refused))


def refusal(kernel: AnyKernel, arm: str, case: Case) -> str:
    """Why this arm does not take this case of its kernel's family, or "". From declared data alone."""
    return fits(kernel).refusal(arm, case)


def no_length(kernel: AnyKernel) -> str:
    """Why a kernel of sparse_prefill has a none arm alone, or "". Imports the entry point."""
    entry = kernel.requires.entry
    if isinstance(kernel, TopkKernel) or not entry or "topk_length" in inspect.signature(_entry(entry)).parameters:
        return ""
    return f"{entry} of version {version_of(kernel.requires.distribution)} takes no topk_length"


def requirements(kernel: AnyKernel) -> str:
    """What the kernel requires, in one line."""
    need = kernel.requires
    topk = isinstance(kernel, TopkKernel)
    parts = [need.device if need.device != "any" else "any device", *([] if topk else ["/".join(need.dtypes)])]
    if need.capability:
        parts.append("SM" + "/".join(f"{a}{b}" for a, b in need.capability))
    if need.program:
        parts.append(need.program)
    if need.heads:
        parts.append(f"{'h' if topk else 'h_q'} {'/'.join(map(str, need.heads))}")
    if need.d_qk != (512, 576):
        parts.append(f"d_qk {'/'.join(map(str, need.d_qk))}")
    if need.topk_in:
        parts.append(f"topk {'/'.join(map(str, need.topk_in))}")
    if need.topk_max:
        parts.append(f"topk up to {need.topk_max}")
    if need.topk_multiple > 1:
        parts.append(f"topk % {need.topk_multiple} == 0")
    if need.keys != NO_LIMIT.keys:
        parts.append(f"{need.keys[0]} to {need.keys[1]} keys")
    if need.keys_multiple > 1:
        parts.append(f"keys % {need.keys_multiple} == 0")
    if need.requests_max:
        parts.append("one request" if need.requests_max == 1 else f"up to {need.requests_max} requests")
    if need.distribution:
        parts.append(f"pip {need.distribution[0]}")
    return ", ".join([*parts, *([need.note] if need.note else [])])



def described(kernel: AnyKernel, device: torch.device, cases: list[str]) -> dict[str, Any]:
    """What the parent knows of a kernel, and for each case of its family the arms that do not take it and why."""
    why = unavailable(kernel, device)
    refused = {}
    for text in cases:
        case = parse_case(text)
        if case.family == kernel.family:
            reasons = {arm: refusal(kernel, arm, case) for arm in kernel.arms}
            refused[text] = {arm: reason for arm, reason in reasons.items() if reason}
    return {
        "name": kernel.name, "family": kernel.family, "arms": list(kernel.arms), "version": version_of(kernel.requires.distribution),
        "why_not": why, "imports": kernel.requires.entry, "device": kernel.requires.device,
        "capability": [list(version) for version in kernel.requires.capability], "requires": requirements(kernel),
        "promise": kernel.promises(None if why else device), "convention": "" if isinstance(kernel, TopkKernel) else str(kernel.convention),
        "fits": dataclasses.asdict(fits(kernel)), "refused": refused,
        "limits": [dataclasses.asdict(limit) for limit in kernel.requires.limits]}
