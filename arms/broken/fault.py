"""What a broken kernel is there for, as data beside its code: the check that must catch it, and a case that shows it."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One deliberately wrong kernel.

    kernel: its registered name, `broken_<fault>`. check: the check that must catch it (others may as well; `also` names further ones
    that must); "raises" where the launch's outputs are refused. case: the text of a small case on which it shows. boundary: where its
    fault lies, in the localiser's own words, "" if it has no such place. reports: ids of the public reports whose symptom it shows
    (docs/public-bugs.md).
    """

    kernel: str
    family: str
    check: str
    case: str
    also: tuple[str, ...] = ()
    boundary: str = ""
    reports: tuple[str, ...] = ()


FAULTS: dict[str, Fault] = {}
"""Every fault by its kernel's name, in the order of registration; filled when arms.broken is loaded."""


def declare(fault: Fault) -> None:
    """Keep a fault. Raises ValueError if another one has the name."""
    if FAULTS.get(fault.kernel, fault) != fault:
        raise ValueError(f"fault {fault.kernel!r} is declared already")
    FAULTS[fault.kernel] = fault
