"""The faults that there are: what each kernel of arms/broken is there for, declared beside its code."""
from __future__ import annotations

from cases.fault import Fault

FAULTS: dict[str, Fault] = {}
"""Every fault by its kernel's name, in the order of registration; filled when arms.broken is loaded."""


def declare(fault: Fault) -> None:
    """Keep a fault. Raises ValueError if another one has the name."""
    if FAULTS.get(fault.kernel, fault) != fault:
        raise ValueError(f"fault {fault.kernel!r} is declared already")
    FAULTS[fault.kernel] = fault
