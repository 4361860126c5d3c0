"""What folders hold is what docs/schema and docs/records.md say, older ones are read, and newer ones are refused by name."""
from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from processes import ROOT, TINY_TOPK, invoke, threearm

from harness import schemas
from harness.comparison import Burst, Estimate, Pairing, Round, Rule, TimeComparison, Transition
from harness.evidence_folder import EvidenceFolder, EvidenceInfo, PartInfo
from harness.gate_folder import GateFolder, GateInfo, SideInfo
from harness.record import Lengths, Record, Timing
from harness.runfolder import RunError, RunFolder, RunInfo
from harness.stored import folders_below, open_folder
from harness.verdicts import SOURCES, Check, Picture, Verdict

SCHEMAS = ROOT / "docs" / "schema"
OLD = ROOT / "tests" / "data" / "schema-1"
STORED = [*folders_below(ROOT / "docs" / "evidence"), OLD]
HEADINGS: dict[str, type] = {
    "run.json": RunInfo, "records.jsonl, one line an arm and case": Record, "A check": Check, "A check's picture": Picture,
    "The topk_length of an arm": Lengths, "A time": Timing, "gate.json": GateInfo, "A side of a gate": SideInfo,
    "comparisons.jsonl, one line a comparison": Transition, "A pairing": Pairing, "Times compared": TimeComparison, "A rule": Rule,
    "An estimate": Estimate, "A round": Round, "A burst": Burst, "evidence.json": EvidenceInfo, "A part of evidence": PartInfo}
FILES = {"run.json": "run", "records.jsonl": "records", "gate.json": "gate", "comparisons.jsonl": "comparisons",
         "evidence.json": "evidence", "pairs.jsonl": "pairs"}


def values(folder: Path) -> Iterator[tuple[str, Any]]:
    """(schema's name, value) of all that a folder, and those inside it, hold."""
    for file in sorted(folder.rglob("*")):
        if file.name in FILES:
            text = file.read_text(encoding="utf-8")
            for each in text.splitlines() if file.suffix == ".jsonl" else [text]:
                yield FILES[file.name], json.loads(each)


def validate(folder: Path) -> set[str]:
    """Check everything in a folder. Returns the schemas that were used. Raises jsonschema.ValidationError."""
    checkers = {name: jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text())) for name in FILES.values()}
    used = set()
    for name, value in values(folder):
        checkers[name].validate(value)
        used.add(name)
    return used


def test_the_schemas_are_those_of_the_code() -> None:
    """Where this fails: python -m harness.schemas docs/schema."""
    assert {file.name: file.read_bytes() for file in SCHEMAS.iterdir()} == schemas.contents()
    for name in FILES.values():
        jsonschema.Draft202012Validator.check_schema(schemas.schema(name))


@pytest.mark.parametrize("folder", STORED, ids=lambda path: path.name)
def test_stored_folders_are_what_the_schemas_say(folder: Path) -> None:
    used = validate(folder)
    assert {"run", "records"} <= used and ({"gate", "comparisons"} <= used) is (folder / "gate.json").is_file()


def test_a_fresh_run_is_what_the_schemas_say(tmp_path: Path) -> None:
    """With a failure, which has a picture, and times."""
    threearm("run", "sparse_prefill:s_q=4,s_kv=600,h_q=2,d_qk=512,topk=512,rows=ragged", TINY_TOPK, "--arm", "broken_skips_last_pair",
             "--arm", "litetopk_torch", "--samples", "2", "--runs", str(tmp_path), seconds=120)
    [folder] = tmp_path.iterdir()
    assert validate(folder) == {"run", "records"}
    records = RunFolder.load(folder).records
    assert any(check.picture for record in records for check in record.checks) and any(record.time for record in records)


def test_fresh_gates_and_evidence_are_what_the_schemas_say(tmp_path: Path) -> None:
    """Every field set that can be."""
    gate = GateFolder.load(ROOT / "docs" / "evidence" / "gates" / "slow")
    gate.info.notes, gate.info.void = ["note"], ["void"]
    gate.path = tmp_path
    gate.transitions[0].numbers = Check("numbers", Verdict.FAILED, picture=Picture("out", 4, 2, "head", 1, 1, "eJwzBAAAMgAy"))
    gate.finish(complete=True)
    part = PartInfo("a", "A", "pairs", "span", 3)
    evidence = EvidenceFolder(tmp_path, EvidenceInfo("litetopk", "now", ["threearm"], {}, True, [part], []))
    evidence.add(gate.transitions[0].pairing, gate.transitions[0].time)  # type: ignore[arg-type]
    evidence.finish(complete=True)
    assert validate(tmp_path) == {"gate", "comparisons", "evidence", "pairs"}


@pytest.mark.parametrize(("change", "said"), [
    ({"verdict": "FINE"}, "is not one of"), ({"checks": [{"name": "x"}]}, "'verdict' is a required property"),
    ({"memory": "lots"}, "'lots'"), ({"time": {"contract": "span"}}, "is not valid under any")])
def test_a_record_that_is_none_is_refused_by_the_schema(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    record = {**json.loads((OLD / "records.jsonl").read_text().splitlines()[0]), **change}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(jsonschema.ValidationError, match=re.escape(said)):
        validate(tmp_path)


# --- the page ---------------------------------------------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    """Fields by heading, of every table of docs/records.md that begins with `field`."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in (ROOT / "docs" / "records.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| field |"):
            found[heading] = []
        elif line.startswith("| ") and heading in found:
            found[heading] += line.split("|")[1].strip().split(", ")
    return found


def fields_of(kind: type) -> list[str]:
    fields: Any = msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else dataclasses.fields(kind)
    return [field.name for field in fields]


def types_inside(kind: Any) -> set[type]:
    """Every type with fields that one has inside."""
    met: set[type] = set()

    def walk(node: Any) -> None:
        if isinstance(node, (msgspec.inspect.StructType, msgspec.inspect.DataclassType)):
            if node.cls in met:
                return
            met.add(node.cls)
            for field in node.fields:
                walk(field.type)
        for inner in (*getattr(node, "types", ()), *getattr(node, "item_types", ()), getattr(node, "item_type", None),
                      getattr(node, "value_type", None)):
            if inner is not None:
                walk(inner)

    walk(msgspec.inspect.type_info(kind))
    return met


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_field_is_described(heading: str) -> None:
    assert sorted(documented()[heading]) == sorted(fields_of(HEADINGS[heading]))


def test_every_type_that_is_stored_is_described() -> None:
    stored = set().union(*(types_inside(kind) for kind, _ in schemas.KINDS.values()))
    assert stored == set(HEADINGS.values()) and set(documented()) == set(HEADINGS)


# --- other versions ---------------------------------------------------------------------------------------------------


def test_records_of_the_first_version_are_read() -> None:
    """As they were written before there were a second family, ways, memory and pictures."""
    folder = RunFolder.load(OLD)
    raw = [json.loads(line) for line in (OLD / "records.jsonl").read_text().splitlines()]
    assert all("ways" not in each and "memory" not in each for each in raw)
    assert "arms" not in json.loads((OLD / "run.json").read_text())["kernels"][0]
    first, last = folder.records[0], folder.records[-1]
    assert (first.ways, first.memory, first.verdict) == ({}, None, Verdict.PASSED) and first.time and first.lengths is None
    assert all(check.picture is None for check in first.checks)
    assert (last.checks, last.inputs, last.seconds, last.time) == ([], {}, {}, None)
    assert (folder.info.kernels[0]["family"], folder.info.kernels[0]["arms"]) == ("sparse_prefill", list(SOURCES))
    done = invoke("report", str(OLD), "--rejudge")
    assert done.code == 0 and "by today's rules all is as it was stored" in done.text


@pytest.mark.parametrize("file", ["run.json", "records.jsonl"])
@pytest.mark.parametrize("extra", [{}, {"verdict": "SUBLIME", "started": 5}], ids=["readable", "not readable"])
def test_a_newer_run_is_refused_in_one_line(file: str, extra: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(OLD, folder)
    lines = (folder / file).read_text().splitlines() if file == "records.jsonl" else [(folder / file).read_text()]
    lines[0] = json.dumps({**json.loads(lines[0]), **extra, "schema": 2})
    (folder / file).write_text("\n".join(lines) + "\n")
    done = invoke("report", str(folder))
    assert done.code == 2
    place = f"{file}{' line 1' if file == 'records.jsonl' else ''}"
    assert f"{place}: schema 2 is of a newer threearm; this one knows 1" in " ".join(done.lines)


@pytest.mark.parametrize("name", ["gate", "evidence"])
def test_a_newer_gate_or_evidence_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.json").write_text('{"schema": 2, "parts": [], "more": 1}')
    with pytest.raises(RunError, match=rf"{name}\.json: schema 2 is of a newer threearm; this one knows 1"):
        open_folder(tmp_path)


def test_a_file_that_is_no_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json: "):
        open_folder(tmp_path)
    with pytest.raises(RunError, match="is no folder of a run, a gate or evidence"):
        open_folder(tmp_path / "nothing")
