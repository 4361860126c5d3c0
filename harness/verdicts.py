"""Verdicts and the result of one check. Imported by the worker, so torch and the standard library only."""
from __future__ import annotations

import dataclasses
import enum


class Verdict(str, enum.Enum):
    """What one check, or all checks of an arm together, said. Only PASSED is a pass."""

    PASSED = "PASSED"
    SKIPPED = "SKIPPED"  # not run, with the reason
    VACUOUS = "VACUOUS"  # the check could not have failed on this case
    FLAKY = "FLAKY"  # differs from itself
    FAILED = "FAILED"  # wrong
    OOM = "OOM"
    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"  # signal, exit, or an error that poisons the CUDA context
    ERROR = "ERROR"  # the harness's own fault


SOURCES = ("none", "backscan", "metadata")
"""The topk_length sources, in the order in which the arms are run (arms/lengths.py derives them)."""

CHECKS = {
    "sparse_prefill": (
        "run-to-run", "written", "after-another", "nan-leak", "reads-inputs", "inputs-unchanged", "indices-permuted", "padded",
        "cut-at-length", "rows-permuted", "batch-split", "q-scaled", "scales-traded", "unnamed-changed", "guards", "busy-stream",
        "graph-replay", "reference", "sentinels", "lengths", "backscan-vs-metadata", "none-vs-backscan", "none-vs-metadata", "full-width",
        "timed-output"),
    "indexer_topk": (
        "run-to-run", "written", "after-another", "reads-inputs", "inputs-unchanged", "rows-permuted", "batch-split", "weights-scaled",
        "request-duplicated", "request-shifted", "keys-appended", "guards", "busy-stream", "graph-replay", "shape", "set", "nan-chosen",
        "own-scores", "values", "status", "memory", "dense-vs-litetopk", "downstream", "timed-output"),
}
"""The names of all checks there are, by family; tests/test_mutants.py holds them against what is emitted."""

CUDA_CHECKS = ("busy-stream", "graph-replay")
"""Checks that a CPU run does not have."""

SEVERITY = list(Verdict)
"""From harmless to worst: an arm's verdict is the worst of its checks'."""


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict of several together. An empty list is SKIPPED: nothing was checked."""
    return max(verdicts, key=SEVERITY.index, default=Verdict.SKIPPED)


SHARES = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 0.6, 1 - 1e-9, 1.0)
"""What the digits 1 to 9 of a picture stand for: a share of bad elements of at most so much, and more than the one before."""


@dataclasses.dataclass
class Picture:
    """Where in an output the bad elements are: a grid over rows x columns with a digit a cell (SHARES; 0: none is bad).

    output: its name, or what the elements are. rows, columns: how many it has; across: what a column is ("head", "column", "key", "" where
    there is but one). height, width: cells. cells: base64 of zlib of the height * width digits, row by row. note: what a reader must know.
    """

    output: str
    rows: int
    columns: int
    across: str
    height: int
    width: int
    cells: str
    note: str = ""


@dataclasses.dataclass
class Check:
    """What one check found.

    margins: error over budget per output (0.3 is healthy, above 1 fails); empty where the check is an equality.
    bad, total: elements that violate and elements compared. first: the first five, as text. where: the localiser's lines.
    ulp: how many elements differ by how many ULP, for equality checks. picture: where the bad elements are, of failed comparisons.
    """

    name: str
    verdict: Verdict
    detail: str = ""
    margins: dict[str, float] = dataclasses.field(default_factory=dict)
    bad: int = 0
    total: int = 0
    first: list[str] = dataclasses.field(default_factory=list)
    where: list[str] = dataclasses.field(default_factory=list)
    ulp: dict[str, int] = dataclasses.field(default_factory=dict)
    picture: Picture | None = None
