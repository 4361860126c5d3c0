"""JSON Schema of what a folder holds, made from the types that write it: `python -m harness.schemas docs/schema` writes the files.

docs/records.md says what the fields mean. A field that is not required may be absent: it was added later, or holds its default.
"""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from harness.comparison import Transition
from harness.evidence_folder import EvidenceInfo, Paired
from harness.gate_folder import GateInfo
from harness.record import SCHEMA, Record
from harness.runfolder import RunInfo, as_json

DIALECT = "https://json-schema.org/draft/2020-12/schema"
KINDS: dict[str, tuple[Any, str]] = {
    "run": (RunInfo, "run.json"),
    "records": (Record, "a line of records.jsonl"),
    "gate": (GateInfo, "gate.json"),
    "comparisons": (Transition, "a line of comparisons.jsonl"),
    "evidence": (EvidenceInfo, "evidence.json"),
    "pairs": (Paired, "a line of pairs.jsonl"),
}
"""By the schema's name: the type, and what it describes."""


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a kind."""
    kind, what = KINDS[name]
    return {"$schema": DIALECT, "title": f"threearm: {what}, schema {SCHEMA}", **msgspec.json.schema(kind)}


def contents() -> dict[str, bytes]:
    """Every file by name, as it is written."""
    return {f"{name}.json": as_json(schema(name)) for name in KINDS}


def main(folder: Path) -> None:
    """Write every schema."""
    for name, content in contents().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
