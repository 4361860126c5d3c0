"""What a deliberately wrong kernel is there for, as data: the check that must catch it, and a case that shows it. No torch."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One deliberately wrong kernel (arms/broken).

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

    @property
    def name(self) -> str:
        return self.kernel.removeprefix("broken_")
