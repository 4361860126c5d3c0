"""The two families of cases, and which one a text belongs to. No torch: the parent process parses cases, too."""
from __future__ import annotations

import difflib

from cases.indexer_topk import IndexerTopkCase
from cases.sparse_prefill import SparsePrefillCase
from cases.text import CaseError, format_record, parse_fields, shown

Case = SparsePrefillCase | IndexerTopkCase
"""One problem: a frozen dataclass with `family` and `work`, the FLOPs of one launch."""

FAMILIES: dict[str, type[Case]] = {kind.family: kind for kind in (SparsePrefillCase, IndexerTopkCase)}


def family_of(text: str) -> str:
    """The family that a case text, or a record's, names: what stands before the colon."""
    return text.partition(":")[0].strip()


def format_case(case: Case, canonical: bool = False) -> str:
    """The text of a case; `canonical` also prints the keys that hold their default."""
    return format_record(case.family, case, canonical)


def parse_case(text: str) -> Case:
    """Read a case text. Raises CaseError with one line: what was given, what is allowed."""
    family, colon, body = text.strip().partition(":")
    family = family.strip()
    if colon and family in FAMILIES:
        return parse_fields(FAMILIES[family], body, family)
    near = difflib.get_close_matches(family, FAMILIES, n=1)
    if colon and near:
        raise CaseError(f"unknown family {shown(family)!r}: did you mean {near[0]!r}? families are {', '.join(FAMILIES)}")
    raise CaseError(f"{text.strip()!r} is not a case: it must start with {' or '.join(repr(f'{name}:') for name in FAMILIES)}")
