"""What is known of one arm on one case: the line of records.jsonl, and the message a worker sends. docs/records.md explains it.

Plain dataclasses, so that the worker needs no library and msgspec reads them on the other side.
"""
from __future__ import annotations

import dataclasses

from harness.verdicts import Check, Verdict

SCHEMA = 1


@dataclasses.dataclass
class Timing:
    """One arm's times on one case, under one contract. Microseconds, one entry a sample, in the order taken.

    us: the call (contract kernel: its kernels alone; span and wall: derivation included). derive_us: contract kernel, the
    derivation's kernels. kernels: how many kernels a call launches, breakdown: median us of each by name (contract kernel).
    """

    contract: str
    cache: str
    order: str
    us: list[float]
    derive_us: list[float] = dataclasses.field(default_factory=list)
    kernels: int = 0
    breakdown: dict[str, float] = dataclasses.field(default_factory=dict)
    clocks: str = ""


@dataclasses.dataclass
class Lengths:
    """The topk_length an arm was given: statistics over rows, and a fingerprint."""

    mean: float
    least: int
    most: int
    pairs_run: float  # share of the 128-key pairs of the full width that these lengths leave to be processed
    digest: str


@dataclasses.dataclass
class Record:
    """One arm on one case.

    case: the text that makes it again. arm: kernel/source. verdict: the worst of checks', or why there are none.
    detail: one line for a verdict without checks (skip reason, signal, exception). inputs: fingerprints of the tensors the
    arm was given, `all` together. outputs: fingerprints of what came out, by name. lengths: None without a topk_length.
    note: what a reader must know (the metadata guard fell back). extra: reported, not judged. ways: how many rows came to
    their result which way (arms/topk.py), {} where the arm does not say. memory: bytes that a launch held at its peak beyond
    inputs and outputs, None where it was not measured. time: None if not timed.
    seconds: what making the inputs, the reference, and launching and judging this arm took.
    """

    case: str
    arm: str
    verdict: Verdict
    detail: str = ""
    checks: list[Check] = dataclasses.field(default_factory=list)
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    outputs: dict[str, str] = dataclasses.field(default_factory=dict)
    lengths: Lengths | None = None
    note: str = ""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    ways: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    time: Timing | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def kernel(self) -> str:
        return self.arm.rpartition("/")[0]

    @property
    def family(self) -> str:
        return self.case.partition(":")[0]

    @property
    def source(self) -> str:
        """The arm's name within its kernel: a topk_length source, or dense or litetopk."""
        return self.arm.rpartition("/")[2]
