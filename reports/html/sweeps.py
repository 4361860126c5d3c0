"""Records that form a sweep: timed, and of cases that differ in one number only. No plots here (plots_sweeps.py)."""
from __future__ import annotations

import dataclasses
import re
import statistics

from cases import CaseError, parse_case
from harness.record import Record
from harness.verdicts import Verdict
from reports.topk_table import ORDER

LENGTH = "mean topk_length"
OF_LENGTH = ("rows", "index_topk")
"""Keys of a case that a row's topk_length comes from."""
ONE_REQUEST = re.compile(r"(\d+)/(\d+)")
NO_AXES = ("seed",)
FEWEST = 3
"""Points that a line needs."""

Keys = dict[str, float | str]


@dataclasses.dataclass(frozen=True)
class Point:
    """One arm on one case. us: its samples; ok: whether it passed; name: the pattern of its rows, where x does
    not say it."""

    x: float
    us: list[float]
    ok: bool
    name: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.us)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Lines over one number. key: what it is; fixed: the rest of the cases, as text; contract: of all times; lines: by arm, in the order of
    x."""

    key: str
    fixed: str
    contract: str
    lines: dict[str, list[Point]]


def find(records: list[Record]) -> list[Sweep]:
    """Every sweep, in the order of the records. The arms of one kernel share a sweep, those of all indexer_topk kernels do."""
    timed = [record for record in records if record.time and record.time.us]
    lengths = {record.case: record.lengths.mean for record in records if record.lengths}
    lengths |= {record.case: record.lengths.mean for record in records if record.lengths and record.source == "metadata"}
    keys = {case: read(case) for case in dict.fromkeys(record.case for record in timed)}
    numeric = [key for key in dict.fromkeys(key for known in keys.values() for key, value in known.items()
                                            if isinstance(value, float)) if key not in NO_AXES]
    patterns, cut = ({case: length for case, length in lengths.items() if bool(keys.get(case, {}).get("index_topk")) is given}
                     for given in (False, True))
    over_length = [*_along(timed, keys, ("rows",), patterns, LENGTH), *_along(timed, keys, ("index_topk",), cut, LENGTH)]
    found = list(over_length)
    for key in numeric:
        if key not in OF_LENGTH or not over_length:
            xs = {case: value for case, known in keys.items() if isinstance(value := known.get(key), float)}
            found += _along(timed, keys, (key,), xs, key)
    return found


def read(case: str) -> Keys:
    """A case's keys with their values, numbers as such; of one request its rows and keys. {} of a text that this version does not read."""
    try:
        parsed = parse_case(case)
    except CaseError:
        return {}
    found: Keys = {"family": parsed.family}
    for field in dataclasses.fields(parsed):
        value = getattr(parsed, field.name)
        one = ONE_REQUEST.fullmatch(str(value)) if field.name == "requests" else None
        if one:
            found |= {"queries": float(one[1]), "keys": float(one[2])}
        else:
            found[field.name] = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
    return found


def _along(timed: list[Record], keys: dict[str, Keys], varied: tuple[str, ...], xs: dict[str, float], name: str) -> list[Sweep]:
    """Sweeps of cases that differ in `varied` alone."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in timed:
        known = keys[record.case]
        if record.case in xs and all(key in known for key in varied) and record.time:
            rest = ",".join(f"{key}={_text(value)}" for key, value in known.items() if key not in varied)
            kernel = record.kernel if record.family == "sparse_prefill" else ""
            groups.setdefault((kernel, record.time.contract, rest), []).append(record)
    found = []
    for (_, contract, rest), group in groups.items():
        lines: dict[str, list[Point]] = {}
        group = list({(record.arm, record.case): record for record in group}.values())  # of two of one arm and case the later
        for record in sorted(group, key=lambda record: xs[record.case]):
            own = _text(keys[record.case]["rows"]) if varied == ("rows",) else ""
            point = Point(xs[record.case], record.time.us if record.time else [], record.verdict is Verdict.PASSED, own)
            lines.setdefault(record.arm, []).append(point)
        lines = {arm: points for arm, points in lines.items() if len({point.x for point in points}) >= FEWEST}
        if lines:
            found.append(Sweep(name, _told(rest), contract, dict(sorted(lines.items(), key=lambda line: _rank(line[0])))))
    return found


def _rank(arm: str) -> int:
    """Dense arms first; others as they come."""
    source = arm.rpartition("/")[2]
    return ORDER.index(source) if source in ORDER else 0


def _text(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) and value < 1e5 else str(int(value)) if isinstance(value, float) else value


def _told(rest: str) -> str:
    """The keys that are not at their default."""
    parts = dict(part.split("=", 1) for part in rest.split(","))
    family = parts.pop("family", "")
    plain = {key: _text(value) for key, value in read(f"{family}:").items()} if family else {}
    return ", ".join(f"{key}={value}" for key, value in parts.items() if plain.get(key) != value)
