"""A case list in parts: which cases are a host's, and run folders of parts put together to one of the whole list.

A part's run.json has its own cases under `cases`, and under options `whole` the list that it is a part of, so that whoever puts parts
together sees what is missing.
"""
from __future__ import annotations

import dataclasses
import datetime
import re
from typing import Any

import msgspec

from harness.record import Record
from harness.runfolder import RunError, RunFolder, RunInfo, listed
from harness.verdicts import Verdict

SETTLED = ("contract", "samples", "fp64", "time_wrong", "launches")
"""Settings that decide what a record says; the others (patience, what is kept) may differ between parts."""
FILES = "kernel files"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, from 1."""

    index: int
    count: int

    def of(self, cases: list[str]) -> list[str]:
        """This part's cases: every count-th, so that a row of long ones is spread."""
        return cases[self.index - 1::self.count]


def parse_shard(text: str) -> Shard:
    """From 2/4. Raises ValueError with one line."""
    found = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text, re.ASCII)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError("it must be i/n, with i from 1 to n")
    return Shard(int(found[1]), int(found[2]))


def whole_list(info: RunInfo) -> list[str]:
    """The case list that a run is a part of, or all of."""
    return list(info.options.get("whole") or info.cases)


def model(info: RunInfo) -> str:
    """What a run's times were taken on: its GPU's model, or its CPU's."""
    return info.machine.get("gpu") or info.machine.get("cpu", "unknown")


Key = tuple[str, str]
"""(case, kernel/arm)."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """A record, and the part that it is from."""

    record: Record
    folder: RunFolder

    @property
    def place(self) -> str:
        return f"{model(self.folder.info)} in {self.folder.path}"


@dataclasses.dataclass
class Merged:
    """What parts come to. notes: what a reader must know; missing: what no part has; origins: where each record is from."""

    info: RunInfo
    records: list[Record]
    missing: list[Key]
    notes: list[str]
    origins: dict[Key, Origin]


def merge(folders: list[RunFolder], command: list[str], times_apart: bool = False) -> Merged:
    """Run folders of one case list as one. Raises RunError, one line, where they are no parts of one run: other lists, settings, kernels,
    a record twice that differs, times of different machines (with `times_apart` only within a case)."""
    _same_list(folders)
    _same_settings(folders)
    origins = _origins(folders)
    _all_listed(folders)
    timed = [origin for origin in origins.values() if origin.record.time]
    _one_machine_a_case(timed)
    models = dict.fromkeys(model(origin.folder.info) for origin in timed)
    if len(models) > 1 and not times_apart:
        first, other = (next(origin for origin in timed if model(origin.folder.info) == name) for name in list(models)[:2])
        raise RunError(f"times of different machines: {first.place}, {other.place}; --times-apart keeps both, and says which each is of")
    started = min((folder.info.started for folder in folders), key=datetime.datetime.fromisoformat)  # parts may have other time zones
    notes = _notes(folders)
    if len(models) > 1:
        notes.append(f"times are of {len(models)} machines, which each timed record names: compare them within a case alone")
    info = RunInfo(started, command, whole_list(folders[0].info), _kernels(folders), _machine(folders), _options(folders, notes))
    records = [origins[key].record for key in listed(info) if key in origins]
    if len(models) > 1:
        records = [_naming(record, model(origins[record.case, record.arm].folder.info)) for record in records]
    return Merged(info, records, [key for key in listed(info) if key not in origins], notes, origins)


def _all_listed(folders: list[RunFolder]) -> None:
    """No record is of a case or an arm that its part was not asked for: it would be left out without a word."""
    for folder in folders:
        known = set(listed(msgspec.structs.replace(folder.info, cases=whole_list(folder.info))))
        odd = next((record for record in folder.records if (record.case, record.arm) not in known), None)
        if odd:
            raise RunError(f"{folder.path} has a record of {odd.arm} on {odd.case}, which is not in its list")


def _same_list(folders: list[RunFolder]) -> None:
    first = folders[0]
    for other in folders[1:]:
        if other.info.schema != first.info.schema:
            raise RunError(f"{other.path} has schema {other.info.schema}, {first.path} has {first.info.schema}")
        ours, theirs = whole_list(first.info), whole_list(other.info)
        if ours != theirs:
            odd = next((case for case in [*theirs, *ours] if case not in ours or case not in theirs), "")
            what = f"{odd} is in one of them alone" if odd else "the same cases in another order"
            raise RunError(f"{other.path} is of another case list than {first.path}: {what}")


def _same_settings(folders: list[RunFolder]) -> None:
    """The variables that workers get decide as well (TRITON_INTERPRET), and so do the contents of kernel files that were loaded."""
    def settings(folder: RunFolder) -> dict[str, Any]:
        options, worker = folder.info.options, folder.info.options.get("worker") or {}
        given = {name: (options.get("settings") or {}).get(name) for name in SETTLED}
        loaded = sorted(options["loaded"].values()) if "loaded" in options else None  # older folders do not tell
        return {**given, "environment": worker.get("environment"), "device": str(worker.get("device", "")).partition(":")[0],
                FILES: loaded}

    first = folders[0]
    for other in folders[1:]:
        for name, value in settings(other).items():
            if value != settings(first)[name] and (name != FILES or None not in (value, settings(first)[name])):
                raise RunError(f"{other.path} was run with {name} {value}, {first.path} with {settings(first)[name]}")


def _kernels(folders: list[RunFolder]) -> list[dict[str, Any]]:
    """Every kernel of any part, with the arms of all. Where one part's machine cannot run it, another's description counts."""
    names = dict.fromkeys(kernel["name"] for folder in folders for kernel in folder.info.kernels)
    return [_kernel(name, [(kernel, folder) for folder in folders for kernel in folder.info.kernels if kernel["name"] == name])
            for name in names]


def _kernel(name: str, described: list[tuple[dict[str, Any], RunFolder]]) -> dict[str, Any]:
    usable = [each for each in described if not each[0].get("why_not")] or described
    kernel, folder = usable[0]
    for other, elsewhere in usable[1:]:
        for what in ("family", "version"):
            if other.get(what) != kernel.get(what):
                raise RunError(f"{name} has {what} {other.get(what) or 'unknown'} in {elsewhere.path}, "
                               f"{kernel.get(what) or 'unknown'} in {folder.path}")
    refused: dict[str, Any] = {}
    for other, _ in reversed([*described, usable[0]]):
        refused |= other.get("refused", {})
    return {**kernel, "arms": list(dict.fromkeys(arm for other, _ in described for arm in other["arms"])), "refused": refused}


def _machine(folders: list[RunFolder]) -> dict[str, str]:
    """Every fact; where parts differ, each value that there is."""
    keys = dict.fromkeys(key for folder in folders for key in folder.info.machine)
    return {key: " | ".join(dict.fromkeys(folder.info.machine[key] for folder in folders if key in folder.info.machine)) for key in keys}


def _options(folders: list[RunFolder], notes: list[str]) -> dict[str, Any]:
    """The first part's, so that a merged run can be gone on with, and what the parts were."""
    chosen = {kernel["name"] for folder in folders for kernel in folder.info.kernels}
    unavailable = {name: why for folder in folders for name, why in folder.info.options.get("unavailable", {}).items()}
    parts = [{"folder": str(folder.path), "command": folder.info.command, "machine": folder.info.machine, "started": folder.info.started,
              "finished": folder.info.finished, "shard": folder.info.options.get("shard", ""), "records": len(folder.records)}
             for folder in folders]
    return {**{key: folders[0].info.options[key] for key in ("worker", "settings") if key in folders[0].info.options},
            "unavailable": {name: why for name, why in unavailable.items() if name not in chosen},
            "merged": {"parts": parts, "notes": notes}}


def _notes(folders: list[RunFolder]) -> list[str]:
    """Facts of the machines in which parts differ."""
    notes = []
    for key in dict.fromkeys(key for folder in folders for key in folder.info.machine):
        values = dict.fromkeys(folder.info.machine.get(key, "none") for folder in folders)
        if len(values) > 1:
            notes.append(f"the parts differ in {key}: {' | '.join(values)}")
    return notes


def _origins(folders: list[RunFolder]) -> dict[Key, Origin]:
    """Every record once. An arm that one part skipped and another ran is the other's. Raises RunError where two that ran differ."""
    found: dict[Key, Origin] = {}
    for folder in folders:
        for record in folder.records:
            key = (record.case, record.arm)
            before = found.get(key)
            if before is None or (before.record.verdict is Verdict.SKIPPED and record.verdict is not Verdict.SKIPPED):
                found[key] = Origin(record, folder)
            elif record.verdict is not Verdict.SKIPPED and (apart := _apart(before.record, record)):
                raise RunError(f"{record.arm} on {record.case} is in {before.folder.path} and in {folder.path}, and {apart}")
    return found


def _apart(one: Record, other: Record) -> str:
    """In what two records of one arm on one case differ that must not, or ""."""
    if one.verdict is not other.verdict:
        return f"is {one.verdict.value} in the first, {other.verdict.value} in the second"
    for what in ("inputs", "outputs"):
        ours, theirs = getattr(one, what), getattr(other, what)
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if names:
            return f"its {what} differ: {', '.join(names)}"
    return ""


def _one_machine_a_case(timed: list[Origin]) -> None:
    """Raise RunError where times of different machines would stand side by side, as one's ratio to the other."""
    of_case: dict[str, Origin] = {}
    for origin in timed:
        first = of_case.setdefault(origin.record.case, origin)
        if model(first.folder.info) != model(origin.folder.info):
            raise RunError(f"{origin.record.case} was timed on {first.place} and on {origin.place}: "
                           "times of one case must be of one machine")


def _naming(record: Record, machine: str) -> Record:
    """The record with the machine of its time in its note."""
    said = f"timed on {machine}"
    return record if record.time is None else dataclasses.replace(record, note=f"{record.note}; {said}" if record.note else said)
