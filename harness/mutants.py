"""Which check catches which broken arm, and whether one accuses a right arm: what `threearm mutants` runs, and what comes of it.

Parent side: it knows the faults by what a worker tells of arms/broken.
"""
from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from cases import family_of, load_suite, parse_case
from cases.fault import Fault
from cases.fits import read_fits
from harness.client import WorkerDied, WorkerOptions, WorkerProcess
from harness.drawing import Batch, draw
from harness.pool import Job, Outcome
from harness.record import Record
from harness.verdicts import CHECKS, CUDA_CHECKS, Verdict

RAISES = "raises"
ENDED = {Verdict.FAILED: RAISES, Verdict.CRASHED: "crash", Verdict.TIMEOUT: "time limit", Verdict.OOM: "memory limit"}
"""What caught an arm that came to no check, by its record's verdict."""
ACCUSED = (Verdict.FAILED, Verdict.FLAKY, *(verdict for verdict in ENDED if verdict is not Verdict.FAILED))
TIMED = "timed-output"
"""The check whose faults have to be timed to show."""
GENERATED_WORK, MOST_BATCHES = 1 << 16, 1000
"""max_work of cases/strategies.py for generated cases; and how many batches are drawn for a kernel that takes few."""
SMALL = 1e9
"""Floating-point operations of one launch, up to which a case is tried with every fault of its family."""


def ask_worker(options: WorkerOptions, pick: Callable[[list[Fault]], list[Fault]], complete: bool) -> tuple[list[Fault], dict[str, Any]]:
    """The faults that `pick` takes of all that a worker with arms/broken knows, and the worker's description for their cases.

    Raises client.Unfit and client.WorkerDied.
    """
    worker = WorkerProcess(options, Path(os.devnull))
    try:
        faults = pick(msgspec.convert(_answer(worker, op="faults")["faults"], list[Fault]))
        return faults, _answer(worker, op="describe", cases=cases_of_plan(faults, complete))
    finally:
        worker.close()


def _answer(worker: WorkerProcess, **request: Any) -> dict[str, Any]:
    """The one event that answers a request."""
    event = next(worker.ask(120.0, **request))
    if event["event"] == "broken":
        raise WorkerDied(Verdict(event["verdict"]), event["detail"], "", request["op"])
    return event


def generated(right: list[dict[str, Any]], count: int, seed: int) -> dict[str, list[str]]:
    """Cases for right kernels, by name: together `count`, of each about the same number, as it takes them. The same seed gives the same.

    Raises ImportError without hypothesis.
    """
    cases: dict[str, list[str]] = {}
    for number, kernel in enumerate(right):
        share = count // len(right) + (number < count % len(right))
        found: dict[str, None] = {}
        batches = (Batch(kernel["family"], read_fits(kernel["fits"]), GENERATED_WORK, seed, kernel["name"], i) for i in range(MOST_BATCHES))
        while len(found) < share and (batch := next(batches, None)):
            found |= dict.fromkeys(draw(batch))
        cases[kernel["name"]] = list(found)[:share]
    return cases


# --- what is run ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """faults: those that are tried. right: kernels as a worker describes them, which no check may accuse. broken: the faults' kernels,
    described. generated: further cases for each right kernel. complete: every fault on every small case of its family, not on its own
    alone."""

    faults: list[Fault]
    right: list[dict[str, Any]]
    broken: dict[str, dict[str, Any]]
    generated: dict[str, list[str]]
    complete: bool

    def timed(self) -> Iterator[Job]:
        """Those that show in the timed loop, on their cases."""
        for fault in self.faults:
            if fault.check == TIMED:
                yield from _jobs([self.broken[fault.kernel]], fault.case)

    def jobs(self) -> Iterator[Job]:
        """The others, then the right arms on generated cases; by case, so that a worker makes its inputs once."""
        for case in cases_of_plan(self.faults, self.complete):
            yield from _jobs([self.broken[fault.kernel] for fault in self.faults if self._meets(fault, case)], case)
            yield from _jobs(self.right, case)
        for kernel in self.right:
            for case in self.generated.get(kernel["name"], ()):
                yield from _jobs([kernel], case)

    def _meets(self, fault: Fault, case: str) -> bool:
        return fault.check != TIMED and (fault.case == case or (self.complete and family_of(case) == fault.family and is_small(case)))


def can_show(faults: list[Fault], device: str) -> list[Fault]:
    """The faults that can be caught on a device: some checks are there on CUDA alone."""
    return [fault for fault in faults if device.startswith("cuda") or fault.check not in CUDA_CHECKS]


def is_small(case: str) -> bool:
    return parse_case(case).work <= SMALL


def cases_of_plan(faults: Iterable[Fault], complete: bool) -> list[str]:
    """The faults' own cases, by family; complete: with the small ones of the smoke suite."""
    cases = dict.fromkeys(fault.case for fault in faults)
    families = {family_of(case) for case in cases}
    if complete:
        smoke = map(str, load_suite("smoke"))
        cases |= dict.fromkeys(case for case in smoke if family_of(case) in families and is_small(case))
    return sorted(cases, key=family_of)


def _jobs(kernels: Iterable[dict[str, Any]], case: str) -> Iterator[Job]:
    """One job a kernel of the case's family, with the arms that take the case. A packaged kernel has workers of its own."""
    for kernel in kernels:
        if kernel["family"] == family_of(case):
            refused = kernel["refused"].get(case, {})
            arms = tuple(arm for arm in kernel["arms"] if arm not in refused)
            if arms:
                yield Job(case, kernel["name"], arms, kernel["name"] if kernel["imports"] else "")


# --- what comes of it -------------------------------------------------------------------------------------------------


def caught(records: Iterable[Record]) -> dict[str, Verdict]:
    """Every check that says that something is wrong, with what it says, in the order of the records."""
    found: dict[str, Verdict] = {}
    for record in records:
        if not record.checks and record.verdict in ENDED:
            found.setdefault(ENDED[record.verdict], record.verdict)
        for check in record.checks:
            if check.verdict in (Verdict.FAILED, Verdict.FLAKY):
                found.setdefault(check.name, check.verdict)
    return found


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault on one case: which checks caught it, and how long the case took, reference and all arms included."""

    caught: dict[str, Verdict]
    seconds: float


def seconds_of(outcome: Outcome) -> float:
    """What a case took: inputs, reference, and every launch and check of all arms. The whole job where an arm came to no check."""
    parts = [record.seconds for record in outcome.records]
    if not parts or not all(parts):
        return outcome.seconds
    return parts[0]["inputs"] + parts[0]["reference"] + sum(part["arm"] for part in parts)


@dataclasses.dataclass
class Matrix:
    """What was found. whole: whether faults are all there are of their families. cells: by fault's kernel and case. accused: records of
    right arms that are wrong, by a check or otherwise; errors: the harness's own faults; ran: how many cases each right kernel was taken
    through; met: those cases; emitted: the checks that right arms had, by family. done, total: jobs, total as far as it is known;
    interrupted: not all were done, and a fault counts only if its own case was."""

    faults: list[Fault]
    device: str
    whole: bool = True
    cells: dict[tuple[str, str], Cell] = dataclasses.field(default_factory=dict)
    accused: list[Record] = dataclasses.field(default_factory=list)
    errors: list[Record] = dataclasses.field(default_factory=list)
    ran: dict[str, int] = dataclasses.field(default_factory=dict)
    met: set[str] = dataclasses.field(default_factory=set)
    emitted: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    done: int = 0
    total: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.names = {fault.kernel for fault in self.faults}

    def add(self, outcome: Outcome) -> None:
        """Take in what a job gave."""
        kernel, case = outcome.job.kernel, outcome.job.case
        self.done += 1
        self.errors += [record for record in outcome.records if record.verdict is Verdict.ERROR]
        if kernel in self.names:
            self.cells[kernel, case] = Cell(caught(outcome.records), seconds_of(outcome))
            return
        self.ran[kernel] = self.ran.get(kernel, 0) + 1
        self.met.add(case)
        self.accused += [record for record in outcome.records if record.verdict in ACCUSED]
        self.emitted.setdefault(family_of(case), set()).update(check.name for record in outcome.records for check in record.checks)

    def tried(self) -> list[Fault]:
        """The faults that can be tried on this device; after an interrupt those that were, on their own case."""
        possible = can_show(self.faults, self.device)
        return [fault for fault in possible if (fault.kernel, fault.case) in self.cells] if self.interrupted else possible

    def own(self, fault: Fault) -> Cell:
        """The fault on its own case; nothing caught where that was not run."""
        return self.cells.get((fault.kernel, fault.case), Cell({}, 0.0))

    def by(self, fault: Fault) -> list[str]:
        """The checks that caught a fault, on any case: those that must first, then the others in order of the checks."""
        found = {check for (kernel, _), cell in self.cells.items() if kernel == fault.kernel for check in cell.caught}
        first = [check for check in (fault.check, *fault.also) if check in found]
        order = [*CHECKS[fault.family], *ENDED.values()]
        return first + sorted(found - set(first), key=order.index)

    def cases(self, fault: Fault) -> tuple[int, int]:
        """On how many cases the fault was caught, and on how many it was tried."""
        cells = [cell for (kernel, _), cell in self.cells.items() if kernel == fault.kernel]
        return sum(bool(cell.caught) for cell in cells), len(cells)

    def survivors(self) -> list[Fault]:
        """Faults that nothing caught, on any case."""
        return [fault for fault in self.tried() if not self.by(fault)]

    def missed(self) -> list[tuple[Fault, list[str]]]:
        """Faults that are caught, but not by every check that must, on their own case: with the ones that did not."""
        wanting = [(fault, self.wanting(fault)) for fault in self.tried() if self.by(fault)]
        return [(fault, checks) for fault, checks in wanting if checks]

    def wanting(self, fault: Fault) -> list[str]:
        """The checks that must catch a fault on its own case and have not."""
        return [check for check in (fault.check, *fault.also) if check not in self.own(fault).caught]

    def caught_by(self, family: str, check: str) -> list[Fault]:
        """The faults of a family that a check caught."""
        return [fault for fault in self.faults if fault.family == family and check in self.by(fault)]

    def idle(self, family: str) -> list[str]:
        """The checks of a family that caught no fault."""
        return [check for check in CHECKS[family] if not self.caught_by(family, check)]

    @property
    def families(self) -> list[str]:
        """The families of which faults were tried."""
        return list(dict.fromkeys(fault.family for fault in self.faults))

    @property
    def wrong(self) -> bool:
        """Whether a fault survived or was missed by a check that must catch it, or a right arm is accused."""
        return bool(self.survivors() or self.missed() or self.accused or self.errors)
