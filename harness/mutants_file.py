"""A mutants matrix as a file, so that a report can show it again: `threearm mutants --json FILE`."""
from __future__ import annotations

from pathlib import Path

import msgspec

from cases.fault import Fault
from harness.mutants import Cell, Matrix
from harness.record import SCHEMA, Record
from harness.runfolder import RunError, RunInfo, as_json, replace_file
from harness.verdicts import Verdict


class CellEntry(msgspec.Struct):
    """One fault on one case: kernel and case, which checks caught it, and the seconds that the case took."""

    kernel: str
    case: str
    caught: dict[str, Verdict]
    seconds: float


class MutantsFile(msgspec.Struct):
    """The file. info: command, machine and time; generated: how many cases were drawn; the rest as in harness.mutants.Matrix."""

    info: RunInfo
    generated: int
    faults: list[Fault]
    device: str
    whole: bool
    cells: list[CellEntry]
    accused: list[Record]
    errors: list[Record]
    ran: dict[str, int]
    met: list[str]
    emitted: dict[str, list[str]]
    done: int
    total: int
    interrupted: bool
    schema: int = SCHEMA

    def matrix(self) -> Matrix:
        """As it was."""
        cells = {(cell.kernel, cell.case): Cell(cell.caught, cell.seconds) for cell in self.cells}
        emitted = {family: set(names) for family, names in self.emitted.items()}
        return Matrix(self.faults, self.device, self.whole, cells, self.accused, self.errors, self.ran, set(self.met), emitted,
                      self.done, self.total, self.interrupted)


def as_file(info: RunInfo, matrix: Matrix, generated: int) -> MutantsFile:
    """What the file holds."""
    cells = [CellEntry(kernel, case, cell.caught, cell.seconds) for (kernel, case), cell in matrix.cells.items()]
    emitted = {family: sorted(names) for family, names in matrix.emitted.items()}
    return MutantsFile(info, generated, matrix.faults, matrix.device, matrix.whole, cells, matrix.accused, matrix.errors, matrix.ran,
                       sorted(matrix.met), emitted, matrix.done, matrix.total, matrix.interrupted)


def save(path: Path, stored: MutantsFile) -> None:
    """Write the file. Raises RunError."""
    try:
        replace_file(path, as_json(stored))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def load(path: Path) -> MutantsFile:
    """Read the file. Raises RunError."""
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=MutantsFile)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise RunError(f"{path} is no file of `threearm mutants --json`: {error}") from None
    if stored.schema > SCHEMA:
        raise RunError(f"{path}: schema {stored.schema} is of a newer threearm; this one knows {SCHEMA}")
    return stored
