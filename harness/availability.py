"""Why a kernel, or one of its arms on one case, does not run here. Worker side: it may import a kernel's package."""
from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect

import torch

from arms.kernel import Kernel
from cases.sparse_prefill import SparsePrefillCase
from harness.machine import version_of


@functools.cache
def _entry_takes_length(entry: str) -> bool:
    """Import "module:function" and see whether it has a topk_length argument. Raises what the import raises."""
    module, _, function = entry.partition(":")
    return "topk_length" in inspect.signature(getattr(importlib.import_module(module), function)).parameters


def unavailable(kernel: Kernel, device: torch.device) -> str:
    """Why the kernel cannot run on this device and in this environment, or "". Does not import the kernel's package."""
    need = kernel.requires
    if need.device not in ("any", device.type):
        return f"needs a {need.device} device, this is {device.type}"
    if need.capability and device.type == "cuda":
        have = torch.cuda.get_device_capability(device)
        if have not in need.capability:
            wanted = " or ".join(f"{a}.{b}" for a, b in need.capability)
            return f"needs compute capability {wanted}, this GPU has {have[0]}.{have[1]}"
    if need.entry:
        package = need.entry.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return f"package {package} is not installed (pip install {need.distribution[0] if need.distribution else package})"
    return ""


def import_problem(kernel: Kernel) -> str:
    """Import the kernel's entry point: why that fails, or "". May compile or load libraries."""
    if not kernel.requires.entry:
        return ""
    try:
        _entry_takes_length(kernel.requires.entry)
    except Exception as error:  # whatever a foreign package raises when it cannot be imported is the reason
        first = (str(error) or repr(error)).strip().splitlines()[0]
        return f"{kernel.requires.entry} does not import: {type(error).__name__}: {first}"
    return ""


def refusal(kernel: Kernel, source: str, case: SparsePrefillCase) -> str:
    """Why this arm does not take this case, or "". From declared data alone."""
    need = kernel.requires
    if case.dtype not in need.dtypes:
        return f"takes {' or '.join(need.dtypes)}, the case is {case.dtype}"
    if need.heads and case.h_q not in need.heads:
        return f"takes h_q {' or '.join(map(str, need.heads))}, the case has {case.h_q}"
    if case.d_qk not in need.d_qk:
        return f"takes d_qk {' or '.join(map(str, need.d_qk))}, the case has {case.d_qk}"
    if case.topk % need.topk_multiple:
        return f"needs topk to be a multiple of {need.topk_multiple}, the case has {case.topk}"
    for limit in need.limits:
        if source in limit.sources and getattr(case, limit.key) in limit.values:
            return f"{limit.key}={getattr(case, limit.key)}: {limit.reason}"
    if case.tail == "live" and source != "metadata":
        return "tail=live: only an arm that is given the length computes this case"
    return ""


def no_length(kernel: Kernel) -> str:
    """Why the kernel has a none arm alone, or "". Imports the entry point."""
    if kernel.requires.entry and not _entry_takes_length(kernel.requires.entry):
        return f"{kernel.requires.entry} of version {version_of(kernel.requires.distribution)} takes no topk_length"
    return ""


def requirements(kernel: Kernel) -> str:
    """What the kernel requires, in one line."""
    need = kernel.requires
    parts = [need.device if need.device != "any" else "any device", "/".join(need.dtypes)]
    if need.capability:
        parts.append("SM" + "/".join(f"{a}{b}" for a, b in need.capability))
    if need.heads:
        parts.append(f"h_q {'/'.join(map(str, need.heads))}")
    if need.d_qk != (512, 576):
        parts.append(f"d_qk {'/'.join(map(str, need.d_qk))}")
    if need.topk_multiple > 1:
        parts.append(f"topk % {need.topk_multiple} == 0")
    if need.distribution:
        parts.append(f"pip {need.distribution[0]}")
    return ", ".join([*parts, *([need.note] if need.note else [])])
