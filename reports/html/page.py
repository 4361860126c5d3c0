"""One HTML file of several sources: runs, gates, evidence folders, mutants. It needs no network, no script and no other file."""
from __future__ import annotations

from collections.abc import Sequence

from harness.evidence_folder import EvidenceFolder
from harness.gate_folder import GateFolder
from harness.mutants_file import MutantsFile
from harness.runfolder import RunFolder
from reports.html import gate_part, mutants_part, run_part
from reports.html.parts import Part, render

Source = RunFolder | GateFolder | EvidenceFolder | MutantsFile


def build(sources: Sequence[Source], title: str) -> str:
    """The page, as text. The same sources give the same text."""
    parts = [part(source, f"s{number}") for number, source in enumerate(sources)]
    return str(render("page", title=title, parts=parts))


def part(source: Source, anchor: str) -> Part:
    """What a source says. anchor: what its ids begin with."""
    if isinstance(source, GateFolder):
        return gate_part.of_gate(source, anchor)
    if isinstance(source, EvidenceFolder):
        return run_part.of_evidence(source, anchor)
    if isinstance(source, MutantsFile):
        return mutants_part.of_mutants(source, anchor)
    return run_part.of_run(source, anchor)
