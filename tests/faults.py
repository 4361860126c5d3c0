"""Shared by tests: what the checks said of each deliberately wrong kernel on its own case, run once for all of them."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import sys

from topk_trials import run_topk
from trials import run_arms

from arms.broken.fault import FAULTS
from arms.kernel import load_package
from harness.verdicts import Check

load_package("arms.broken")


@dataclasses.dataclass
class Judged:
    """An arm's checks, without its outputs."""

    checks: list[Check]


@functools.cache
def run_fault(name: str) -> dict[str, Judged]:
    """Every arm of a broken kernel on the case that shows its fault, by source (indexer_topk: ""). Raises what the kernel raises."""
    from_the_beginning()
    return run_on(name, FAULTS[name].case)


@functools.lru_cache(maxsize=256)
def run_on(name: str, text: str) -> dict[str, Judged]:
    """The same on another case."""
    if FAULTS[name].family == "indexer_topk":
        return {"": Judged(run_topk(name, text).checks)}
    return {source: Judged(run.checks) for source, run in run_arms(name, text).items()}


def from_the_beginning() -> None:
    """Some faults depend on what was launched before: forget it."""
    for module in [module for path, module in sys.modules.items() if path.startswith("arms.broken.")]:
        for name, value in list(vars(module).items()):
            if not name.startswith("_") or name.startswith("__"):
                continue
            if isinstance(value, itertools.count):
                setattr(module, name, itertools.count())
            elif isinstance(value, (dict, list)):
                value.clear()
