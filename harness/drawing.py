"""Where Hypothesis is asked: batches of case texts of one kernel, and the smallest case that still fails. Nothing is run in here.

Hypothesis is imported when it is first needed: only those who fuzz have it.
"""
from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable
from typing import Any

from cases.fits import Fits

BATCH = 100
"""Examples in a batch. A failure is shrunk from its batch drawn again, so it should not take long to draw."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """What decides which cases are drawn: same batch, same cases, in the same order. work: max_work of cases/strategies.py; rarely: by what
    it is multiplied in one draw in eight."""

    family: str
    fits: Fits
    work: int
    seed: int
    kernel: str
    number: int
    rarely: int = 1

    @property
    def key(self) -> int:
        """What Hypothesis is seeded with: the same for a kernel whatever other kernels are fuzzed beside it."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}/{self.kernel}/{self.number}".encode(), digest_size=6).digest(), "little")


class Fails(Exception):
    """Raised inside Hypothesis on a failing case, which is its argument."""


def draw(batch: Batch) -> list[str]:
    """The batch's cases as text, each once, in the order drawn."""
    found: dict[str, None] = {}
    _ask(batch, lambda text: found.setdefault(text), shrinking=False)
    return list(found)


def shrink(batch: Batch, fails: Callable[[str], bool]) -> str | None:
    """The smallest case that `fails` is true of, as far as Hypothesis gets from the first of the batch that it is true of; None if it is
    true of none. `fails` must give the same answer to the same text, and is asked about the batch's cases in their order, then others."""
    def test(text: str) -> None:
        if fails(text):
            raise Fails(text)

    try:
        _ask(batch, test, shrinking=True)
    except Fails as found:
        return str(found)
    return None


def _ask(batch: Batch, test: Callable[[str], object], shrinking: bool) -> None:
    hypothesis: Any = importlib.import_module("hypothesis")
    from cases.strategies import indexer_topk_cases, sparse_prefill_cases

    make: Any = {"sparse_prefill": sparse_prefill_cases, "indexer_topk": indexer_topk_cases}[batch.family]
    phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink) if shrinking else (hypothesis.Phase.generate,)
    rules = hypothesis.settings(max_examples=BATCH, phases=phases, database=None, deadline=None, derandomize=False, print_blob=False,
                                report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet,
                                suppress_health_check=tuple(hypothesis.HealthCheck))

    def example(case: object) -> None:
        test(str(case))

    usual, large = (make(max_work=batch.work * factor, fits=batch.fits) for factor in (1, batch.rarely))
    cases = usual
    if batch.rarely > 1:
        cases = importlib.import_module("hypothesis.strategies").integers(0, 7).flatmap(lambda number: large if number == 7 else usual)
    hypothesis.seed(batch.key)(rules(hypothesis.given(cases)(example)))()
