"""A run's folder: run.json (what was asked, on what machine) and records.jsonl (what came out, a line an arm and case)."""
from __future__ import annotations

import collections
import contextlib
import datetime
import fcntl
import hashlib
import importlib.metadata
import math
import os
import re
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cases import family_of
from harness.marks import RUN, mark_of, what_it_is
from harness.record import SCHEMA, Record
from harness.verdicts import SOURCES, Verdict

Kind = TypeVar("Kind")
CONTRACTS = ("kernel", "span", "wall")


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
        self.one_at_a_time = threading.Lock()

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
        takes it off the file and locks the folder, so that a resumed run can append. Other bad lines, and values that no run has,
        raise RunError. A folder that says it is finished and lacks records (half copied, say) counts as unfinished."""
        try:
            content = (path / RUN).read_bytes()
        except OSError as error:
            raise RunError(f"{path} is not a run folder: {instead(path, RUN, error)}") from None
        info = decoded(content, RunInfo, f"{path}/{RUN}")
        for kernel in info.kernels:  # as folders had it when there was one family
            kernel.setdefault("family", "sparse_prefill")
            kernel.setdefault("arms", kernel.get("sources", list(SOURCES)))
        check_info(info, f"{path}/{RUN}")
        folder = RunFolder(path, info)
        if repair:
            folder.lock()
        file = path / "records.jsonl"
        try:
            lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
        except OSError as error:
            raise RunError(f"{file}: {error.strerror}") from None
        for number, line in enumerate(lines[:-1], 1):
            folder.records.append(decoded(line, Record, f"{file} line {number}"))
            check_record(folder.records[-1], f"{file} line {number}")
        twice = next((key for key, count in collections.Counter((r.case, r.arm) for r in folder.records).items() if count > 1), None)
        if twice and info.cases:  # a campaign, which has no list, runs a case again to confirm it
            raise RunError(f"{file} has two records of {twice[1]} on {twice[0]}")
        info.finished = info.finished if not folder.missing() else ""
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
        replace_file(self.path / RUN, as_json(self.info))

    def add(self, record: Record) -> None:
        """Append one record; from several threads, too. Raises RunError if the disk takes no more."""
        record.extra = {name: value for name, value in record.extra.items() if math.isfinite(value)}  # JSON has no other
        with self.one_at_a_time:
            if self.path is not None:
                append_line(self.path / "records.jsonl", record)
            self.records.append(record)

    def arrange(self) -> None:
        """Put the records into the order of the case list, where several hands have made them: in memory and in the file."""
        place = {key: number for number, key in enumerate(listed(self.info))}
        with self.one_at_a_time:
            self.records.sort(key=lambda record: place.get((record.case, record.arm), len(place)))
            if self.path is not None:
                try:
                    replace_file(self.path / "records.jsonl", b"".join(msgspec.json.encode(record) + b"\n" for record in self.records))
                except OSError as error:
                    raise RunError(f"cannot write {self.path}/records.jsonl: {error.strerror}") from None

    def output_file(self, record: Record) -> Path | None:
        """Where a record's outputs are kept, if they are (`run --save-outputs`); None for a folder in memory."""
        return self.path and self.path / "outputs" / output_name(record)

    def done(self) -> set[tuple[str, str]]:
        """(case, arm) of every record there is."""
        return {(record.case, record.arm) for record in self.records}

    def missing(self) -> list[tuple[str, str]]:
        """(case, arm) of every record that is still to come."""
        done = self.done()
        return [key for key in listed(self.info) if key not in done]

    def finish(self) -> None:
        """Note the end in run.json."""
        self.info.finished = now()
        try:
            self.save_info()
        except OSError as error:
            raise RunError(f"cannot write {self.path}/{RUN}: {error.strerror}") from None


def listed(info: RunInfo) -> list[tuple[str, str]]:
    """(case, arm) of every record that a whole run has, in its order: kernel by kernel, each on the cases of its family."""
    return [(case, f"{kernel['name']}/{arm}") for kernel in info.kernels for case in info.cases if family_of(case) == kernel["family"]
            for arm in kernel["arms"]]


def instead(path: Path, mark: str, error: OSError) -> str:
    """Why a folder could not be read as what it should be: what it is, or, where its file `mark` is there, the error."""
    return f"{error.filename}: {error.strerror}" if mark_of(path) == mark else what_it_is(path)


def check_info(info: RunInfo, place: str) -> None:
    """Raises RunError where run.json holds what no run writes there and what reads it could not take."""
    try:
        aware = datetime.datetime.fromisoformat(info.started).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        raise RunError(f"{place}: started: {info.started!r} is no local time with its offset")
    for kernel in info.kernels:
        if not isinstance(kernel.get("name"), str) or not isinstance(kernel["arms"], list):
            raise RunError(f"{place}: kernels: one has no name, or arms that are no list")
    for key in ("worker", "settings", "unavailable"):
        if not isinstance(info.options.get(key, {}), dict):
            raise RunError(f"{place}: options: {key} is no table")


def check_record(record: Record, place: str) -> None:
    """Raises RunError where a record has times that no arm has, or of a contract that there is not."""
    if record.time and record.time.contract not in CONTRACTS:
        raise RunError(f"{place}: time: contract {record.time.contract!r} is none of {', '.join(CONTRACTS)}")
    if record.time and not (record.time.us and all(0 <= us < 1e12 for us in record.time.us)):  # 1e12 us are eleven days
        raise RunError(f"{place}: time: us must be samples in microseconds")


class _Numbered(msgspec.Struct):
    """Of whatever is stored, the number that says which threearm can read it."""

    schema: int = SCHEMA


def decoded(content: bytes, kind: type[Kind], place: str) -> Kind:
    """What was stored as JSON. Raises RunError, with the place, where it is of a newer schema or is no such thing."""
    with contextlib.suppress(msgspec.DecodeError):
        schema = msgspec.json.decode(content, type=_Numbered).schema
        if schema > SCHEMA:
            raise RunError(f"{place}: schema {schema} is of a newer threearm; this one knows {SCHEMA}")
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise RunError(f"{place}: {error}") from None


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


def gather_logs(into: Path, parts: list[tuple[str, Path]]) -> None:
    """Append what several workers printed to one file, each part under a line with its name. Raises RunError."""
    try:
        with open(into, "ab") as target:
            for name, part in parts:
                if part.is_file():
                    target.write(f"=== {name}\n".encode())
                    with open(part, "rb") as source:
                        shutil.copyfileobj(source, target)
    except OSError as error:
        raise RunError(f"cannot write {into}: {error.strerror}") from None


def fingerprints(files: Iterable[str]) -> dict[str, str]:
    """The sha256 of each file that can be read, by its name: which contents a kernel file had that a run loaded."""
    found = {}
    for file in files:
        with contextlib.suppress(OSError):
            found[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return found


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
