"""Folders that are there: a run's, a gate's or an evidence folder, by what it holds, and all such folders below another one."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.evidence import code_of as evidence_code
from harness.evidence_folder import EvidenceFolder
from harness.gate_folder import GateFolder
from harness.marks import EVIDENCE, GATE, RUN, mark_of, what_it_is
from harness.record import Record
from harness.runfolder import RunError, RunFolder, exit_code
from harness.transitions import UNRESOLVED

Stored = RunFolder | GateFolder | EvidenceFolder
LOADED: dict[str, Callable[[Path], Stored]] = {GATE: GateFolder.load, EVIDENCE: EvidenceFolder.load, RUN: RunFolder.load}


def open_folder(path: Path) -> Stored:
    """Read a folder, whatever it is of. Raises RunError."""
    mark = mark_of(path)
    if not mark:
        raise RunError(f"{path} is no folder of a run, a gate or evidence: {what_it_is(path)}")
    return LOADED[mark](path)


def folders_below(path: Path) -> list[Path]:
    """The folder itself if it is one of ours, else every one below it, in the order of their names; those inside another one of ours are
    that one's. Links to folders are not followed."""
    if mark_of(path):
        return [path]
    try:
        inside = sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink())
    except OSError:
        return []
    return [found for each in inside for found in folders_below(each)]


def records_of(folder: RunFolder | EvidenceFolder) -> list[Record]:
    """All records: a run's, or those of every part of an evidence folder."""
    return folder.records if isinstance(folder, RunFolder) else [record for run in folder.runs.values() for record in run.records]


def code_of(folder: RunFolder | EvidenceFolder) -> int:
    """The exit code of a run or of evidence; what has not finished is 4 unless something is wrong."""
    code = exit_code(folder.records) if isinstance(folder, RunFolder) else evidence_code(folder)
    return code or (0 if folder.info.finished else UNRESOLVED)
