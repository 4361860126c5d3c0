"""A run's folder: run.json (what was asked, on what machine) and records.jsonl (what came out, a line an arm and case)."""
from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import importlib.metadata
import math
import os
import re
import secrets
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from harness.record import SCHEMA, Record
from harness.verdicts import SOURCES, Verdict


class RunError(Exception):
    """A run folder that cannot be read or written as asked: one line."""


class RunInfo(msgspec.Struct):
    """run.json. options: what decides the results, so that --resume repeats it; kernels: as the worker described them,
    `arms` those that were asked for."""

    started: str
    command: list[str]
    cases: list[str]
    kernels: list[dict[str, Any]]
    machine: dict[str, str]
    options: dict[str, Any]
    schema: int = SCHEMA
    finished: str = ""


class RunFolder:
    """Reads and writes one folder. Each record is flushed to the file as one line before `add` returns.

    Without a path it keeps the records in memory only.
    """

    def __init__(self, path: Path | None, info: RunInfo) -> None:
        self.path, self.info = path, info
        self.records: list[Record] = []

    @staticmethod
    def create(root: Path, info: RunInfo) -> RunFolder:
        """Make runs/<time>-<gpu>-<id>/. Raises RunError if that cannot be written."""
        name = re.sub(r"[^a-z0-9]+", "", info.machine.get("gpu", "cpu").lower().replace("nvidia", "")) or "gpu"
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        return RunFolder.make(root / f"{stamp}-{name}-{secrets.token_hex(2)}", info)

    @staticmethod
    def make(path: Path, info: RunInfo) -> RunFolder:
        """Make a folder of that name. Raises RunError if it cannot be written."""
        folder = RunFolder(path, info)
        try:
            path.mkdir(parents=True)
            folder.lock()
            folder.save_info()
        except OSError as error:
            raise RunError(f"cannot write the run folder {path}: {error.strerror}") from None
        return folder

    @staticmethod
    def load(path: Path, repair: bool = False) -> RunFolder:
        """Read a folder. A last line without its end, cut by a kill or still being written, does not count, and `repair`
        takes it off the file and locks the folder, so that a resumed run can append. Other bad lines raise RunError."""
        try:
            info = msgspec.json.decode((path / "run.json").read_bytes(), type=RunInfo)
        except OSError as error:
            raise RunError(f"{path} is not a run folder: run.json: {error.strerror}") from None
        except msgspec.DecodeError as error:
            raise RunError(f"{path}/run.json: {error}") from None
        for kernel in info.kernels:  # as folders had it when there was one family
            kernel.setdefault("family", "sparse_prefill")
            kernel.setdefault("arms", kernel.get("sources", list(SOURCES)))
        folder = RunFolder(path, info)
        if repair:
            folder.lock()
        file = path / "records.jsonl"
        try:
            lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
        except OSError as error:
            raise RunError(f"{file}: {error.strerror}") from None
        for number, line in enumerate(lines[:-1], 1):
            try:
                folder.records.append(msgspec.json.decode(line, type=Record))
            except msgspec.DecodeError as error:
                raise RunError(f"{file} line {number}: {error}") from None
        if lines[-1] and repair:
            try:
                os.truncate(file, file.stat().st_size - len(lines[-1]))
            except OSError as error:
                raise RunError(f"cannot write {file}: {error.strerror}") from None
        return folder

    def lock(self) -> None:
        """Keep others from writing here until this process ends. Raises RunError if one does already."""
        if self.path is None:
            return
        try:
            self.guard = open(self.path / "lock", "w", encoding="ascii")  # noqa: SIM115 - held open on purpose
            fcntl.flock(self.guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process is writing to {self.path}") from None
        except OSError as error:
            raise RunError(f"cannot write {self.path}/lock: {error.strerror}") from None

    def save_info(self) -> None:
        """Write run.json, by way of a temporary file, so that it is never half written."""
        if self.path is None:
            return
        replace_file(self.path / "run.json", as_json(self.info))

    def add(self, record: Record) -> None:
        """Append one record. Raises RunError if the disk takes no more."""
        record.extra = {name: value for name, value in record.extra.items() if math.isfinite(value)}  # JSON has no other
        if self.path is not None:
            append_line(self.path / "records.jsonl", record)
        self.records.append(record)

    def output_file(self, record: Record) -> Path | None:
        """Where a record's outputs are kept, if they are (`run --save-outputs`); None for a folder in memory."""
        return self.path and self.path / "outputs" / output_name(record)

    def done(self) -> set[tuple[str, str]]:
        """(case, arm) of every record there is."""
        return {(record.case, record.arm) for record in self.records}

    def finish(self) -> None:
        """Note the end in run.json."""
        self.info.finished = now()
        try:
            self.save_info()
        except OSError as error:
            raise RunError(f"cannot write {self.path}/run.json: {error.strerror}") from None


def as_json(value: Any) -> bytes:
    """For people to read, too."""
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file by way of a temporary one, so that it is never half written. Raises OSError."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def append_line(file: Path, value: Any) -> None:
    """Append a value as one line of JSON. Raises RunError if the disk takes no more."""
    try:
        with open(file, "ab") as handle:
            handle.write(msgspec.json.encode(value) + b"\n")
    except OSError as error:
        raise RunError(f"cannot write {file}: {error.strerror}") from None


def output_name(record: Record) -> str:
    """The name of the file with a record's outputs: its arm, and a fingerprint of its case, whose text may be too long for a name."""
    return f"{record.arm.replace('/', '-')}-{hashlib.sha256(record.case.encode()).hexdigest()[:16]}.safetensors"


def now() -> str:
    """Local time with its offset, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def revision() -> str:
    """The project's version, and in a git checkout its commit and whether the tree differs from it."""
    try:
        version = importlib.metadata.version("threearm")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return version
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return version
    return f"{version}, commit {commit}{', changed since' if dirty else ''}"


def exit_code(records: list[Record]) -> int:
    """0 all passed (skipped arms aside); 1 something wrong; 4 vacuous; 5 nothing ran."""
    verdicts = {record.verdict for record in records} - {Verdict.SKIPPED}
    if not verdicts:
        return 5
    if verdicts - {Verdict.PASSED, Verdict.VACUOUS}:
        return 1
    return 4 if Verdict.VACUOUS in verdicts else 0
