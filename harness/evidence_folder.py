"""An evidence folder: evidence.json (what was measured, on what), a run folder for each part of kind `run`, pairs.jsonl (for parts of kind
`pairs`: a line a comparison, [Pairing, TimeComparison]). docs/evidence-command.md explains it.
"""
from __future__ import annotations

import datetime
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from cases import CaseError
from harness.comparison import Pairing, TimeComparison
from harness.evidence_plans import PLANS, RUN, Asked, Part, keys_of, pairings, parts_of
from harness.evidence_values import decoded_pair, judged, whole
from harness.marks import EVIDENCE as INFO
from harness.record import SCHEMA, Record
from harness.runfolder import (
    RunError,
    RunFolder,
    RunInfo,
    append_line,
    as_json,
    check_info,
    decoded,
    instead,
    listed,
    now,
    replace_file,
)
from harness.verdicts import Verdict
from harness.words import counted

PAIRS = "pairs.jsonl"
NOT_TIMED = "not timed"
"""How the note of a record begins that has passed and could not be timed (harness/asking.py)."""
Paired = tuple[Pairing, TimeComparison]


class PartInfo(msgspec.Struct):
    """One part. name: of its folder, too. kind: `run`, or `pairs`. contract: as recorded, "" of what is not timed. samples: of an arm and
    case; of `pairs`, how many pairs of processes at most. seconds: what it took; 0 of one that did not get to its end. count: how
    many records, or comparisons, the whole of it has; -1 before that is known, and in older folders."""

    name: str
    title: str
    kind: str
    contract: str
    samples: int
    seconds: float = 0.0
    count: int = -1


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

    def asked(self) -> Asked:
        """What a person set. Raises msgspec.ValidationError."""
        return msgspec.convert(self.options.get("asked", {}), Asked)


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
        """Read a folder. A last line without its end, cut by a kill, does not count. Other bad lines, a newer schema, what is twice or is
        none of this evidence, and a part that is said to be done but is not there raise RunError. A folder that says it is finished and
        lacks something counts as unfinished."""
        try:
            content = (path / INFO).read_bytes()
            file = path / PAIRS
            lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        except OSError as error:
            raise RunError(f"{path} is not an evidence folder: {instead(path, INFO, error)}") from None
        info = decoded(content, EvidenceInfo, f"{path}/{INFO}")
        check_evidence(info, f"{path}/{INFO}")
        folder = EvidenceFolder(path, info)
        folder.pairs = [decoded_pair(line, f"{file} line {number}") for number, line in enumerate(lines, 1)]
        for part in info.parts:
            if part.kind == RUN and ((path / part.name).is_dir() or part.seconds):
                folder.runs[part.name] = RunFolder.load(path / part.name)
        try:
            folder.check()
            info.finished = "" if info.interrupted or folder.lacking() else info.finished
        except CaseError as error:
            raise RunError(f"{path}: {error}") from None
        return folder

    def check(self) -> None:
        """Raise RunError where the folder holds something twice, or what is none of this evidence: counts of it would be others."""
        every = {key for part in PLANS[self.info.name].parts if part.kind == RUN for key in self.planned(part.name)}
        for name, run in self.runs.items():
            place, keys, planned = f"{self.path / name}/records.jsonl", [(r.case, r.arm) for r in run.records], set(self.planned(name))
            if strange := next((key for key in keys if key not in planned), None):
                raise RunError(f"{place}: {strange[1]} on {strange[0]} is none of the part's records")
            contract = self.info.part(name).contract
            if other := next((r.time for r in run.records if r.time and r.time.contract != contract), None):
                raise RunError(f"{place}: a time of contract {other.contract!r}, the part's is {contract!r}")
        if len({pairing for pairing, _ in self.pairs}) < len(self.pairs):
            raise RunError(f"{self.path}/{PAIRS}: a comparison is there twice")
        contracts = {part.contract for part in self.info.parts if part.kind != RUN}
        for pairing, found in self.pairs:
            if contracts and found.contract not in contracts:
                raise RunError(f"{self.path}/{PAIRS}: a time of contract {found.contract!r}, the part's is {' or '.join(contracts)!r}")
            if not contracts or not {(pairing.case, pairing.base), (pairing.case, pairing.candidate)} <= every:
                raise RunError(f"{self.path}/{PAIRS}: {pairing.candidate} against {pairing.base} on {pairing.case} is of no part")

    # --- whether all of it is there ----------------------------------------------------------------------------------

    def records_of(self, parts: Iterable[str]) -> dict[tuple[str, str], Record]:
        """The records of some parts, by case and arm; those of the last, where several have the same."""
        return {(r.case, r.arm): r for name in parts if name in self.runs for r in self.runs[name].records}

    def planned(self, name: str) -> list[tuple[str, str]]:
        """(case, arm) of every record that a part of kind `run` has when it is whole: as the plan of today has it, or as its run lists it
        where that, and not the plan, has as many as were noted: plans may change."""
        part = PLANS[self.info.name].part(name)
        keys = keys_of(part, self.info.kernels, part.cases(self.info.reduced))
        about, run = next((about for about in self.info.parts if about.name == name), None), self.runs.get(name)
        if about and run and about.count not in (-1, len(keys)):
            own = keys_of(part, self.info.kernels, run.info.cases)
            return own if len(own) == about.count else keys
        return keys

    def lacking(self) -> list[str]:
        """What the whole evidence has and this folder has not, in words, a line each."""
        info = self.info
        found = []
        for part in parts_of(PLANS[info.name], info.reduced, info.asked()):
            about = next((about for about in info.parts if about.name == part.name), None)
            if about is None:
                found.append(f"{part.name}: {INFO} has no such part")
                continue
            found += self._lacking_records(about) if part.kind == RUN else self._lacking_pairs(part, about)
        return found

    def _lacking_records(self, about: PartInfo) -> list[str]:
        run, keys = self.runs.get(about.name), self.planned(about.name)
        if run is None:
            return [f"{about.name}: all {counted(len(keys), 'record')}"]
        done, found = run.done(), []
        missing = [key for key in keys if key not in done]
        if missing:
            found.append(f"{about.name}: {len(missing):,} of {counted(len(keys), 'record')}, first {missing[0][1]} on {missing[0][0]}")
        elif about.count not in (-1, len(keys)) or set(listed(run.info)) != set(keys):
            of = max(about.count, len(keys))
            found.append(f"{about.name}: the list of its run has {len(set(listed(run.info))):,} of {counted(of, 'record')}")
        elif not run.info.finished:
            found.append(f"{about.name}: its run has not finished")
        bare = [r for r in run.records if r.verdict is Verdict.PASSED and not judged(r)]
        untimed = [r for r in run.records if about.contract and r.verdict is Verdict.PASSED and not timed(r, about)]
        found += [f"{about.name}: checks or fingerprints of {counted(len(bare), 'record')} that PASSED"] if bare else []
        times = f"{about.samples} samples, contract {about.contract},"
        found += [f"{about.name}: {times} of {counted(len(untimed), 'record')} that PASSED"] if untimed else []
        return found

    def _lacking_pairs(self, part: Part, about: PartInfo) -> list[str]:
        """count: that of the pairings is noted when they begin; of older folders it follows from the records."""
        info = self.info
        count = about.count
        if count < 0:
            count = len(pairings(PLANS[info.name], part, info.reduced, info.kernels, self.records_of(part.of)))
        found = [f"{part.name}: {count - len(self.pairs):,} of {counted(count, 'comparison')}"] if len(self.pairs) < count else []
        cut = sum(not whole(comparison, about.samples) for _, comparison in self.pairs)
        return found + ([f"{part.name}: samples, or the interval, of {counted(cut, 'comparison')}"] if cut else [])

    # --- writing ------------------------------------------------------------------------------------------------------

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
        """Note the end, if it is one and all of it is there, in evidence.json. Raises RunError."""
        self.info.finished = now() if complete and not self.lacking() else ""
        try:
            self.save_info()
        except OSError as error:
            raise RunError(f"cannot write {self.path}/{INFO}: {error.strerror}") from None


def check_evidence(info: EvidenceInfo, place: str) -> None:
    """Raises RunError where evidence.json holds what no evidence writes there."""
    if info.name not in PLANS:
        raise RunError(f"{place}: name: this threearm knows no evidence {info.name!r}: there is {', '.join(PLANS)}")
    plan = {part.name: part for part in PLANS[info.name].parts}
    if len({part.name for part in info.parts}) < len(info.parts):
        raise RunError(f"{place}: parts: one is there twice")
    for part in info.parts:
        own = plan.get(part.name)
        if own is None or own.kind != part.kind:
            raise RunError(f"{place}: parts: {info.name} has no part {part.name!r} of kind {part.kind!r}")
        is_timed = part.kind != RUN or own.contract != ""
        if bool(part.contract) is not is_timed or (is_timed and part.samples < 1):
            raise RunError(f"{place}: parts: {part.name}: contract {part.contract!r}, {part.samples} samples")
    for kernel in info.kernels:
        if not isinstance(kernel.get("family"), str) or not isinstance(kernel.get("arms"), list):
            raise RunError(f"{place}: kernels: one has no family, or arms that are no list")
    check_info(RunInfo(info.started, info.command, [], info.kernels, info.machine, info.options), place)
    device = info.options.get("worker", {}).get("device")
    if device is not None and info.reduced is str(device).startswith("cuda"):
        raise RunError(f"{place}: reduced is {str(info.reduced).lower()}, but the device is {device}")
    try:
        info.asked()
    except msgspec.ValidationError as error:
        raise RunError(f"{place}: options: asked: {error}") from None


def timed(record: Record, part: PartInfo) -> bool:
    """Whether a record has the time that its part is for, or says why it has none."""
    if record.time is None:
        return record.note.startswith(NOT_TIMED)
    return len(record.time.us) == part.samples
