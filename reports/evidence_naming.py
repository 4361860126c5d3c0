"""What a case is called on an evidence page: what its table says of every case, and its own keys, together are exactly the case. Parts that
share cases, and parts whose cases are compared, share the names, so that a case has one name wherever a table names it.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from cases import format_case, parse_case
from harness.evidence_folder import EvidenceFolder
from harness.evidence_plans import PLANS, RUN
from reports.cells import labels

SPELLED_OUT = 3
"""Where no more keys than these differ, each case names all of them, those with their default, too."""


@dataclasses.dataclass(frozen=True)
class Naming:
    """common: `family:key=value,...`, what all cases share; own: of each case the rest."""

    common: str
    own: dict[str, str]

    def line(self, more: str = "") -> str:
        """What stands under a table whose rows name cases. more: what its rows do not name."""
        return f"every case: `{self.common}`, with the keys of its row{more}; keys that neither names have their defaults"


def naming_of(cases: Iterable[str]) -> Naming:
    """The names of cases of one family among one another."""
    every = list(dict.fromkeys(cases))
    common, own = labels(every)
    keys = {part.partition("=")[0] for text in own.values() for part in text.split(",")}
    if len(every) > 1 and len(keys) <= SPELLED_OUT:
        own = {case: spelled_out(case, keys) for case in every}
    return Naming(f"{every[0].partition(':')[0] if every else ''}:{common}", own)


def spelled_out(case: str, keys: set[str]) -> str:
    """These keys of a case, with what they hold."""
    every = format_case(parse_case(case), canonical=True).partition(":")[2].split(",")
    return ",".join(part for part in every if part.partition("=")[0] in keys)


def naming(folders: Sequence[EvidenceFolder], cases: Iterable[str]) -> Naming:
    """The names of these cases, which are of parts that go together. folders: the page's."""
    wanted = set(cases)
    return naming_of(case for group in groups(folders) if wanted & set(group) for case in group)


def groups(folders: Sequence[EvidenceFolder]) -> list[list[str]]:
    """The cases of all parts; those that share a name are in one group."""
    found: list[list[str]] = []
    for new in (each for folder in folders for each in together(folder)):
        joined = [group for group in found if set(group) & set(new)]
        found = [group for group in found if group not in joined]
        if new:
            found.append(list(dict.fromkeys(case for group in (*joined, new) for case in group)))
    return found


def together(folder: EvidenceFolder) -> list[list[str]]:
    """The cases of each part, of the comparisons, and of each set of parts that is compared together."""
    cases = {name: [record.case for record in run.records] for name, run in folder.runs.items()}
    plan = PLANS.get(folder.info.name)
    compared = [part.of for part in plan.parts if part.kind != RUN] if plan else []
    return [*cases.values(), [pairing.case for pairing, _ in folder.pairs],
            *([case for name in of for case in cases.get(name, [])] for of in compared)]
