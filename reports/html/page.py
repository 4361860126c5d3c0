"""One HTML file of several sources: runs, gates, evidence folders, mutants. It needs no network, no script and no other file."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.evidence_folder import EvidenceFolder
from harness.gate_folder import GateFolder
from harness.mutants_file import MutantsFile
from harness.runfolder import RunFolder
from harness.transitions import SLOWER, TITLES
from reports.html import gate_part, mutants_part, run_part
from reports.html.parts import WORST, Part, render

LEAST = TITLES[SLOWER]
"""The least of what is wrong."""
Source = RunFolder | GateFolder | EvidenceFolder | MutantsFile


def build(sources: Sequence[Source], title: str) -> str:
    """The page, as text. The same sources give the same text."""
    parts = [part(source, f"s{number}") for number, source in enumerate(sources)]
    return str(render("page", title=title, parts=parts, whole=whole(parts) if len(parts) > 1 else None))


def whole(parts: list[Part]) -> tuple[str, str]:
    """What several sources come to: the level of the worst of them, and `1 of 3 FAILED, 2 PASSED`, worst first."""
    ordered = sorted(parts, key=lambda part: (-WORST.index(part.level), part.word == LEAST))
    (worst, many), *others = Counter(part.word for part in ordered).items()
    return ordered[0].level, f"{many:,} of {len(parts):,} {worst}" + "".join(f", {count:,} {word}" for word, count in others)


def part(source: Source, anchor: str) -> Part:
    """What a source says. anchor: what its ids begin with."""
    if isinstance(source, GateFolder):
        return gate_part.of_gate(source, anchor)
    if isinstance(source, EvidenceFolder):
        return run_part.of_evidence(source, anchor)
    if isinstance(source, MutantsFile):
        return mutants_part.of_mutants(source, anchor)
    return run_part.of_run(source, anchor)
