"""A gate's folder: gate.json (what was compared, on what), base/ and candidate/ (ordinary run folders), comparisons.jsonl (a Transition a
line), outputs/ (while they are compared). docs/gate.md explains it.
"""
from __future__ import annotations

import datetime
import secrets
from pathlib import Path
from typing import Any

import msgspec

from harness.comparison import SIDES, Transition
from harness.marks import GATE
from harness.record import SCHEMA, Record
from harness.runfolder import RunError, RunFolder, RunInfo, append_line, as_json, decoded, instead, now, replace_file

LIVE, STORED = "environment", "run folder"


class SideInfo(msgspec.Struct):
    """One side. what: as it was given on the command line. kind: an environment, or a run folder whose records are stored ones. python:
    the interpreter, "" for a run folder. machine, kernels: as its worker described them, or as the stored run has them."""

    what: str
    kind: str
    python: str
    machine: dict[str, str]
    kernels: list[dict[str, Any]]
    options: dict[str, Any] = {}


class GateInfo(msgspec.Struct):
    """gate.json. pairs: [base arm, candidate arm], kernel/arm each. options: what decides the results: bitwise, time (contract, or why
    nothing is timed), thresholds, settings. notes: what a reader must know. void: why the comparison is none, where it is not.
    interrupted: that it was cut short by a person."""

    started: str
    command: list[str]
    cases: list[str]
    pairs: list[list[str]]
    base: SideInfo
    candidate: SideInfo
    options: dict[str, Any]
    notes: list[str] = []
    void: list[str] = []
    interrupted: bool = False
    threearm: str = ""
    schema: int = SCHEMA
    finished: str = ""
    count: int = -1
    """Of the comparisons, once it is finished."""


class GateFolder:
    """Reads and writes one folder. A transition is flushed as one line before `add` returns; `finish` writes them all anew, with their
    times, by way of a temporary file."""

    def __init__(self, path: Path, info: GateInfo) -> None:
        self.path, self.info = path, info
        self.transitions: list[Transition] = []
        self.sides: dict[str, RunFolder] = {}

    @staticmethod
    def create(root: Path, info: GateInfo) -> GateFolder:
        """Make runs/<time>-gate-<id>/ with a run folder for each side. Raises RunError if that cannot be written."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = GateFolder(root / f"{stamp}-gate-{secrets.token_hex(2)}", info)
        try:
            folder.path.mkdir(parents=True)
            folder.save_info()
        except OSError as error:
            raise RunError(f"cannot write the gate's folder {folder.path}: {error.strerror}") from None
        for name, side in (("base", info.base), ("candidate", info.candidate)):
            run = RunInfo(info.started, info.command, info.cases, side.kernels, side.machine, side.options)
            folder.sides[name] = RunFolder.make(folder.path / name, run)
        return folder

    @staticmethod
    def load(path: Path) -> GateFolder:
        """Read a folder. A last line without its end, cut by a kill, does not count. Other bad lines raise RunError."""
        try:
            content = (path / GATE).read_bytes()
            file = path / "comparisons.jsonl"
            lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        except OSError as error:
            raise RunError(f"{path} is not a gate's folder: {instead(path, GATE, error)}") from None
        folder = GateFolder(path, decoded(content, GateInfo, f"{path}/{GATE}"))
        folder.transitions = [decoded(line, Transition, f"{file} line {number}") for number, line in enumerate(lines, 1)]
        folder.check()
        folder.sides = {name: RunFolder.load(path / name) for name in SIDES}
        return folder

    def check(self) -> None:
        """Raise RunError where the file of comparisons is not what the gate left: a verdict on a part of it would be another."""
        if len({found.pairing for found in self.transitions}) < len(self.transitions):
            raise RunError(f"{self.path}/comparisons.jsonl: a comparison is there twice")
        if self.info.finished and self.info.count not in (-1, len(self.transitions)):
            raise RunError(f"{self.path}/comparisons.jsonl has {len(self.transitions)} comparisons, the gate left {self.info.count}")

    def records(self, side: str) -> dict[tuple[str, str], Record]:
        """The records of base or candidate, by case and arm."""
        return {(record.case, record.arm): record for record in self.sides[side].records}

    def save_info(self) -> None:
        """Write gate.json, by way of a temporary file, so that it is never half written. Raises OSError."""
        replace_file(self.path / GATE, as_json(self.info))

    def add(self, transition: Transition) -> None:
        """Append one line. Raises RunError if the disk takes no more."""
        append_line(self.path / "comparisons.jsonl", transition)
        self.transitions.append(transition)

    def finish(self, complete: bool) -> None:
        """Write the transitions with what has become known of them since (their times), and the end into gate.json if it is one."""
        self.info.finished, self.info.count = now() if complete else "", len(self.transitions)
        try:
            replace_file(self.path / "comparisons.jsonl", b"".join(msgspec.json.encode(each) + b"\n" for each in self.transitions))
            self.save_info()
        except OSError as error:
            raise RunError(f"cannot write into {self.path}: {error.strerror}") from None

    def write(self, name: str, text: str) -> None:
        """A text file in the folder. Raises RunError."""
        try:
            replace_file(self.path / name, text.encode())
        except OSError as error:
            raise RunError(f"cannot write {self.path}/{name}: {error.strerror}") from None
