"""An evidence folder: evidence.json (what was measured, on what), a run folder for each part of kind `run`, pairs.jsonl (for parts of kind
`pairs`: a line a comparison, [Pairing, TimeComparison]). docs/evidence-command.md explains it.
"""
from __future__ import annotations

import datetime
import secrets
from pathlib import Path
from typing import Any

import msgspec

from harness.comparison import Pairing, TimeComparison
from harness.record import SCHEMA
from harness.runfolder import RunError, RunFolder, RunInfo, append_line, as_json, decoded, now, replace_file

INFO, PAIRS = "evidence.json", "pairs.jsonl"
RUN, PAIRED = "run", "pairs"
Paired = tuple[Pairing, TimeComparison]


class PartInfo(msgspec.Struct):
    """One part. name: of its folder, too. kind: `run`, or `pairs`. contract: as recorded, "" of what is not timed. samples: of an arm and
    case; of `pairs`, how many pairs of processes at most. seconds: what it took; 0 of one that did not get to its end. problem: why
    it did not, where that was no person's doing."""

    name: str
    title: str
    kind: str
    contract: str
    samples: int
    seconds: float = 0.0
    problem: str = ""


class EvidenceInfo(msgspec.Struct):
    """evidence.json. reduced: CPU kernels at reduced shapes. parts: in the order in which they run. kernels: as the worker described them,
    with the arms that take part. options: how workers are started. interrupted: that it was cut short by a person."""

    name: str
    started: str
    command: list[str]
    machine: dict[str, str]
    reduced: bool
    parts: list[PartInfo]
    kernels: list[dict[str, Any]]
    options: dict[str, Any] = {}
    notes: list[str] = []
    interrupted: bool = False
    schema: int = SCHEMA
    finished: str = ""

    def part(self, name: str) -> PartInfo:
        """The part of that name. Raises StopIteration."""
        return next(part for part in self.parts if part.name == name)


class EvidenceFolder:
    """Reads and writes one folder. runs: the run folder of each part that has begun; pairs: comparisons, in the order made. A comparison
    is flushed as one line before `add` returns."""

    def __init__(self, path: Path, info: EvidenceInfo) -> None:
        self.path, self.info = path, info
        self.runs: dict[str, RunFolder] = {}
        self.pairs: list[Paired] = []

    @staticmethod
    def create(root: Path, info: EvidenceInfo) -> EvidenceFolder:
        """Make runs/<time>-evidence-<id>/. Raises RunError if that cannot be written."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = EvidenceFolder(root / f"{stamp}-evidence-{secrets.token_hex(2)}", info)
        try:
            folder.path.mkdir(parents=True)
            folder.save_info()
        except OSError as error:
            raise RunError(f"cannot write the evidence folder {folder.path}: {error.strerror}") from None
        return folder

    @staticmethod
    def load(path: Path) -> EvidenceFolder:
        """Read a folder. A last line without its end, cut by a kill, does not count. Other bad lines, a newer schema and a part
        that is said to be done but is not there raise RunError."""
        try:
            content = (path / INFO).read_bytes()
            file = path / PAIRS
            lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        except OSError as error:
            raise RunError(f"{path} is not an evidence folder: {error.filename}: {error.strerror}") from None
        info = decoded(content, EvidenceInfo, f"{path}/{INFO}")
        folder = EvidenceFolder(path, info)
        for number, line in enumerate(lines, 1):
            try:
                folder.pairs.append(msgspec.json.decode(line, type=Paired))
            except msgspec.DecodeError as error:
                raise RunError(f"{file} line {number}: {error}") from None
        for part in info.parts:
            if part.kind == RUN and ((path / part.name).is_dir() or part.seconds):
                folder.runs[part.name] = RunFolder.load(path / part.name)
        return folder

    def begin(self, part: str, run: RunInfo) -> RunFolder:
        """Make the run folder of a part. Raises RunError."""
        self.runs[part] = RunFolder.make(self.path / part, run)
        return self.runs[part]

    def add(self, pairing: Pairing, comparison: TimeComparison) -> None:
        """Append one line to pairs.jsonl. Raises RunError if the disk takes no more."""
        append_line(self.path / PAIRS, (pairing, comparison))
        self.pairs.append((pairing, comparison))

    def save_info(self) -> None:
        """Write evidence.json, by way of a temporary file. Raises OSError."""
        replace_file(self.path / INFO, as_json(self.info))

    def finish(self, complete: bool) -> None:
        """Note the end, if it is one, in evidence.json. Raises RunError."""
        self.info.finished = now() if complete else ""
        try:
            self.save_info()
        except OSError as error:
            raise RunError(f"cannot write {self.path}/{INFO}: {error.strerror}") from None
