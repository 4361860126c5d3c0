"""The text form of a case: `family:key=value,key=value`, exact both ways.

A case record is a frozen dataclass whose fields are declared with `integer`, `real`, `choice` or `words`; what a key
may hold is written once, there, and both the parser and its error messages read it.
"""
from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

R = TypeVar("R")


class CaseError(ValueError):
    """A case text or record that cannot be: one line that names the key, what was given and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """How one field is read, written and checked."""

    parse: Callable[[str], Any]
    show: Callable[[Any], str]
    allowed: str
    accepts: Callable[[Any], bool]


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):  # int() also takes 1_000 and other scripts' digits
        raise ValueError(text)
    return int(text)


def _real(text: str) -> float:
    if not re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", text):
        raise ValueError(text)
    return float(text)


def _field(default: Any, spec: Spec) -> Any:
    return dataclasses.field(default=default, metadata={"spec": spec})


def integer(default: int, low: int, high: int) -> Any:
    """An integer field in [low, high]."""
    return _field(default, Spec(_integer, str, f"an integer from {low} to {high}",
                                lambda v: type(v) is int and low <= v <= high))


def integers(default: int, values: tuple[int, ...]) -> Any:
    """An integer field that takes one of a few values."""
    return _field(default, Spec(_integer, str, " or ".join(map(str, values)), lambda v: type(v) is int and v in values))


def real(default: float, low: float, high: float) -> Any:
    """A finite float field in [low, high]; written with repr, which reads back to the same bits."""
    return _field(default, Spec(_real, repr, f"a number from {low:g} to {high:g}",
                                lambda v: type(v) is float and math.isfinite(v) and low <= v <= high))


def choice(default: str, values: Iterable[str]) -> Any:
    """A field that holds one of the given words."""
    names = tuple(values)
    return _field(default, Spec(str, str, " | ".join(names), lambda v: v in names))


def words(default: str, allowed: str, accepts: Callable[[str], bool]) -> Any:
    """A field with a small grammar of its own, kept as text."""
    return _field(default, Spec(str, str, allowed, accepts))


def shown(value: object) -> str:
    """A value as an error message shows it: as it is, unless that would not be one line of print."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def check_fields(record: Any) -> None:
    """Raise CaseError for the first field that holds something its declaration does not allow."""
    for field in dataclasses.fields(record):
        spec: Spec = field.metadata["spec"]
        value = getattr(record, field.name)
        if not spec.accepts(value):
            raise CaseError(f"{field.name}={shown(value)}: allowed is {spec.allowed}")


def format_record(family: str, record: Any, canonical: bool = False) -> str:
    """The text of a record. Fields that hold their default are left out unless `canonical`."""
    parts = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if canonical or value != field.default:
            parts.append(f"{field.name}={field.metadata['spec'].show(value)}")
    return f"{family}:{','.join(parts)}"


def split_values(body: str) -> dict[str, str]:
    """Read `key=value,...` into a dict of texts. Raises CaseError: no `=`, or a key that is given twice."""
    values: dict[str, str] = {}
    for part in body.split(",") if body.strip() else []:
        key, equals, raw = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise CaseError(f"{part.strip()!r} is not key=value")
        if key in values:
            raise CaseError(f"{key} is given twice: {values[key]!r} and {raw!r}")
        values[key] = raw
    return values


def check_key(key: str, keys: Iterable[str], where: str) -> None:
    """Raise CaseError if the key is none of these. where: what they are the keys of."""
    known = list(keys)
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CaseError(f"unknown key {key!r} in {where}: {hint}keys are {', '.join(known)}")


def read_values(record_type: type[Any], texts: dict[str, str], family: str) -> dict[str, Any]:
    """Turn texts into what the fields of those names hold. Raises CaseError: unknown key, unreadable value."""
    fields = {f.name: f for f in dataclasses.fields(record_type)}
    values: dict[str, Any] = {}
    for key, raw in texts.items():
        check_key(key, fields, family)
        spec: Spec = fields[key].metadata["spec"]
        try:
            values[key] = spec.parse(raw)
        except ValueError:
            raise CaseError(f"{key}={shown(raw)}: allowed is {spec.allowed}") from None
    return values


def parse_fields(record_type: type[R], body: str, family: str) -> R:
    """Read `key=value,...` into a record. Raises CaseError, also for values that cannot go together."""
    return record_type(**read_values(record_type, split_values(body), family))
