"""Suites: text files of cases, one a line; `#` starts a comment, blank lines are skipped."""
from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

from cases.sparse_prefill import FAMILY, SparsePrefillCase, parse_case
from cases.text import CaseError, parse_values

FOLDER = Path(__file__).parent / "suites"


def suite_names() -> list[str]:
    """The suites that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def load_suite(name: str) -> list[SparsePrefillCase]:
    """Read a suite by name, or any text file by path. Raises CaseError: unknown suite, or a bad line with its number."""
    path = FOLDER / f"{name}.txt" if name in suite_names() else Path(name)
    try:
        text = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise CaseError(f"suite {name[:100]!r} cannot be read: {error}") from None
    if text is None:
        near = difflib.get_close_matches(name, suite_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
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


def override(case: SparsePrefillCase, settings: str) -> SparsePrefillCase:
    """The case with some keys set anew, from `key=value,key=value`. Raises CaseError."""
    return dataclasses.replace(case, **parse_values(SparsePrefillCase, settings, FAMILY))
