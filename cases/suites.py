"""Suites: text files of cases, one a line; `#` starts a comment, blank lines are skipped.

The corpus is a folder of such files: what was once wrong somewhere. `corpus` is all of it but the files that need a GPU, whose names end in
-gpu; `corpus/NAME` is one file.
"""
from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path

from cases.families import Case, parse_case
from cases.text import CaseError, check_key, read_values, split_values

FOLDER = Path(__file__).parent / "suites"
CORPUS = Path(__file__).parent / "corpus"
NEEDS_GPU = "-gpu"  # how the name of a corpus file ends whose cases are too large for a CPU


def suite_names() -> list[str]:
    """The suites that come with the project, and the corpus: the whole, and each of its files."""
    suites, corpus = (sorted(path.stem for path in folder.glob("*.txt")) for folder in (FOLDER, CORPUS))
    return [*suites, "corpus", *(f"corpus/{name}" for name in corpus)]


def load_suite(name: str) -> list[Case]:
    """Read a suite by name, or any text file by path. Raises CaseError: unknown suite, or a bad line with its number."""
    if name == "corpus":
        files = [path for path in sorted(CORPUS.glob("*.txt")) if not path.stem.endswith(NEEDS_GPU)]
        return list(dict.fromkeys(case for path in files for case in _load(f"corpus/{path.stem}", path)))
    folder = CORPUS.parent if name.startswith("corpus/") else FOLDER
    return _load(name, folder / f"{name}.txt" if name in suite_names() else Path(name))


def _load(name: str, path: Path) -> list[Case]:
    """The cases of one file. Raises CaseError."""
    try:
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise CaseError(f"suite {name[:100]!r} cannot be read: {error}") from None
    if text is None:
        near = difflib.get_close_matches(name, suite_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if os.sep in name or name.endswith(".txt"):  # a path
            what = "it is a folder" if path.is_dir() else "no such file"
            raise CaseError(f"no file of cases {name!r}: {hint}{what}")
        raise CaseError(f"unknown suite {name!r}: {hint}suites are {', '.join(suite_names())}, or a path to a file of cases")
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                cases.append(parse_case(text))
            except CaseError as error:
                raise CaseError(f"{path.name} line {number}: {error}") from None
    if not cases:
        raise CaseError(f"suite {name!r} holds no case")
    return cases


def override(case: Case, settings: str) -> Case:
    """The case with some keys set anew, from `key=value,key=value`. Raises CaseError."""
    return override_all([case], settings)[0]


def override_all(cases: list[Case], settings: str) -> list[Case]:
    """The cases with some keys set anew, each in the cases whose family has it. Raises CaseError if none of theirs has."""
    texts = split_values(settings)
    keys = {type(case): [field.name for field in dataclasses.fields(case)] for case in cases}
    for key in texts:
        check_key(key, dict.fromkeys(name for names in keys.values() for name in names), " and ".join(kind.family for kind in keys))
    values = {kind: read_values(kind, {key: raw for key, raw in texts.items() if key in names}, kind.family)
              for kind, names in keys.items()}
    return [dataclasses.replace(case, **values[type(case)]) for case in cases]
