"""The fuzzing campaign: cases that Hypothesis draws, through a pool of workers, until time is up; what fails is confirmed and shrunk.

Hypothesis never sees a kernel. Batches of cases are drawn first and run in the pool. A failure that is new is run once more, and if it
fails again its batch is drawn again with what is known of every case remembered, so that Hypothesis shrinks the failing one; cases that are
not known yet are run one by one. A crash, a hang or a sticky error is therefore an outcome like any other: it costs a worker.
"""
from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from cases import Case, SparsePrefillCase, parse_case
from cases.fits import Fits, read_fits
from harness.drawing import Batch, draw, shrink
from harness.pool import Job, Outcome
from harness.record import Record
from harness.verdicts import Verdict

RIGHT = (Verdict.PASSED, Verdict.SKIPPED, Verdict.VACUOUS)
"""What `threearm run` does not hold against an arm."""
WORK = {"cpu": {"sparse_prefill": 1 << 12, "indexer_topk": 1 << 16}, "cuda": {"sparse_prefill": 1 << 24, "indexer_topk": 1 << 27}}
"""max_work of a draw, where none is said: on a CPU at most 10 or 20 MFLOPs a launch, which take it milliseconds, on a GPU 40 GFLOPs."""
RARELY = 16
"""How much more work one draw in eight may have on a CPU where none is said: without it rows are hardly ever long there."""
HOSTILE = {"values": ("nan", "inf", "poison"), "tail": ("live", "wild")}
"""What shrinking does not bring in: it makes most kernels fail, and hardly ever for the reason why the drawn case did."""

Signature = tuple[str, str]
"""What is wrong: (arm, check that did not pass, or verdict and phase where there is none)."""


class Runs(Protocol):
    """What the campaign needs of harness.pool.Pool."""

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome]:
        """Outcomes as they come; jobs are taken as workers become free."""

    def one(self, job: Job) -> Outcome:
        """One job, at once."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """seconds: how long cases are drawn; work: max_work of a draw, 0 for the device's own; shrink_seconds: how long one failure may be
    shrunk; stop_after: how many findings end the campaign, 0 for any number."""

    device: str
    seconds: float
    seed: int = 0
    work: int = 0
    shrink_seconds: float = 60.0
    stop_after: int = 0

    def work_of(self, family: str) -> int:
        """max_work of a family's draws."""
        return self.work or WORK["cuda" if self.device.startswith("cuda") else "cpu"][family]

    @property
    def rarely(self) -> int:
        """By what that is multiplied in one draw in eight."""
        return 1 if self.work or self.device.startswith("cuda") else RARELY


@dataclasses.dataclass
class Finding:
    """A failure that was new. drawn, again: its two runs as drawn; shrunk: the run of the smallest case that fails in the same way, None
    where it was not shrunk; tried: how many cases shrinking ran; interrupted: before it was run again (`again` is `drawn` then) or while it
    was being shrunk, so that `shrunk` is as far as that came."""

    signature: Signature
    drawn: Outcome
    again: Outcome
    shrunk: Outcome | None = None
    tried: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def smallest(self) -> Outcome:
        """The run to look at."""
        return self.shrunk or self.drawn

    @property
    def shown(self) -> tuple[str, str]:
        """Kernel and case text of that run: findings that come down to the same one are one way to fail."""
        return self.smallest.job.kernel, self.smallest.job.case

    @property
    def differs(self) -> str:
        """How the two runs of the drawn case differ: verdicts, or what came out; "" where they do not."""
        first, second = ({r.arm: r for r in outcome.records} for outcome in (self.drawn, self.again))
        for arm, record in first.items():
            other = second.get(arm)
            if other is None or record.verdict is not other.verdict:
                return f"{arm} was {record.verdict.value}, then {other.verdict.value if other else 'not run'}"
            changed = [name for name, digest in record.outputs.items() if other.outputs.get(name) != digest]
            if changed:
                return f"{arm}: {changed[0]} was {record.outputs[changed[0]]}, then {other.outputs.get(changed[0])}"
        return ""


def signatures(outcome: Outcome) -> list[Signature]:
    """What is wrong with an outcome, in the order of its arms and their checks; [] where nothing is."""
    found: list[Signature] = []
    for record in outcome.records:
        if record.verdict in RIGHT:
            continue
        wrong = [check.name for check in record.checks if check.verdict not in RIGHT]
        phase = re.search(r" in phase ([a-z ]+)", record.detail)
        found += [(record.arm, name) for name in wrong or [f"{record.verdict.value}{f' in phase {phase[1].strip()}' if phase else ''}"]]
    return found


def leads(signature: Signature, wrong: Iterable[Signature]) -> bool:
    """Whether it is the first thing that is wrong with its arm."""
    return next((other for other in wrong if other[0] == signature[0]), None) == signature


def brings_in(case: Case, drawn: Case) -> bool:
    """Whether a case has hostile input that the drawn one had not."""
    return any(getattr(case, key, "") in words and getattr(case, key) != getattr(drawn, key) for key, words in HOSTILE.items())


@dataclasses.dataclass
class Reach:
    """How far the cases went that were run: the largest number of rows, topk and number of keys, and every number of heads."""

    rows: int = 0
    topk: int = 0
    keys: int = 0
    heads: set[int] = dataclasses.field(default_factory=set)

    def add(self, case: Case) -> None:
        """Count a case in."""
        rows, heads = (case.s_q, case.h_q) if isinstance(case, SparsePrefillCase) else (case.num_q, case.h)
        self.rows, self.topk, self.keys = max(self.rows, rows), max(self.topk, case.topk), max(self.keys, case.s_kv)
        self.heads.add(heads)

    def __str__(self) -> str:
        heads = f"{min(self.heads)} to {max(self.heads)}" if len(self.heads) > 2 else " and ".join(map(str, sorted(self.heads)))
        return f"rows up to {self.rows:,}, topk up to {self.topk:,}, keys up to {self.keys:,}, heads {heads}"


class Source:
    """Jobs of one kernel without end, each case once: batch after batch, the arms that take the case."""

    def __init__(self, kernel: dict[str, Any], plan: Plan) -> None:
        self.name, self.arms = kernel["name"], kernel["arms"]
        self.fits: Fits = read_fits(kernel["fits"])
        self.first = Batch(kernel["family"], self.fits, plan.work_of(kernel["family"]), plan.seed, self.name, 0, plan.rarely)
        self.origin: dict[str, Batch] = {}
        self.refused = 0

    def jobs(self) -> Iterator[Job]:
        """Without end: after a batch comes the next."""
        batch = self.first
        while True:
            for text in draw(batch):
                if text in self.origin:
                    continue
                self.origin[text] = batch
                job = self.job(text)
                if job.arms:
                    yield job
                else:
                    self.refused += 1
            batch = dataclasses.replace(batch, number=batch.number + 1)

    def job(self, text: str) -> Job:
        """The job of a case; without arms where none takes it."""
        case = parse_case(text)
        return Job(text, self.name, tuple(arm for arm in self.arms if not self.fits.refusal(arm, case)), self.name)


class Campaign:
    """kernels: as a worker describes them, `arms` cut down to those asked for. keep: called with every record of the campaign's own cases
    (not of those that shrinking tries). tell: called now and then, in the middle of whatever takes long."""

    def __init__(self, plan: Plan, kernels: list[dict[str, Any]], pool: Runs, keep: Callable[[Record], None],
                 tell: Callable[[Campaign], None]) -> None:
        self.plan, self.pool, self.keep, self.tell = plan, pool, keep, tell
        self.sources = {kernel["name"]: Source(kernel, plan) for kernel in kernels}
        self.known: dict[tuple[str, str], tuple[Signature, ...]] = {}
        self.seen: set[Signature] = set()
        self.new: list[Outcome] = []
        self.findings: list[Finding] = []
        self.verdicts: Counter[Verdict] = Counter()
        self.reach: dict[str, Reach] = {}
        self.cases = self.failed = 0
        self.start = time.monotonic()
        self.aside = 0.0  # seconds that went into findings
        self.doing = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the campaign began."""
        return time.monotonic() - self.start

    @property
    def rates(self) -> tuple[float, float]:
        """Cases, and arms on cases, a second, findings' own time left out."""
        seconds = max(1e-9, self.elapsed - self.aside)
        return self.cases / seconds, sum(self.verdicts.values()) / seconds

    @property
    def ways(self) -> int:
        """In how many ways cases failed: findings, those that were shrunk to the same case counted once."""
        return len({finding.shown for finding in self.findings})

    @property
    def enough(self) -> bool:
        """Whether as much was found as was asked for."""
        return 0 < self.plan.stop_after <= self.ways

    @property
    def over(self) -> bool:
        """Whether no further case is to be drawn."""
        return self.enough or self.elapsed >= self.plan.seconds

    def run(self) -> None:
        """Until time is up, or enough was found. Raises what the pool raises, and KeyboardInterrupt: what is new is then
        among the findings, shrunk as far as that has come."""
        self.start = time.monotonic()
        try:
            self._run()
        except KeyboardInterrupt:
            self.findings += [Finding(signatures(outcome)[0], outcome, outcome, interrupted=True) for outcome in self.new]
            self.new.clear()
            raise

    def _run(self) -> None:
        stream = _in_turn([source.jobs() for source in self.sources.values()])
        while not self.over:
            for outcome in self.pool.run(self._until_something_is_new(stream)):
                self._note(outcome)
                self.tell(self)
            while self.new and not self.enough:  # also what came when time was up
                self._investigate(self.new.pop(0))

    def _until_something_is_new(self, stream: Iterator[Job]) -> Iterator[Job]:
        while not self.new and not self.over:
            yield next(stream)  # asked for only when it is wanted: a job that was taken must be run

    def _note(self, outcome: Outcome) -> None:
        wrong = signatures(outcome)
        self.known[outcome.job.kernel, outcome.job.case] = tuple(wrong)
        self.cases += 1
        case = parse_case(outcome.job.case)
        self.reach.setdefault(case.family, Reach()).add(case)
        self.failed += bool(wrong)
        for record in outcome.records:
            self.verdicts[record.verdict] += 1
            self.keep(record)
        if wrong and wrong[0] not in self.seen:
            self.seen.update(wrong)
            self.new.append(outcome)

    def _investigate(self, outcome: Outcome) -> None:
        """Run it again; shrink it if it fails again in the same way."""
        start, self.doing = time.monotonic(), f"running {outcome.job.kernel} again"
        self.tell(self)
        finding = Finding(signatures(outcome)[0], outcome, outcome)
        try:
            finding.again = self.pool.one(outcome.job)
            if finding.signature in signatures(finding.again):
                self._shrink(finding, start + self.plan.shrink_seconds)
        except KeyboardInterrupt:
            finding.interrupted = True
            raise
        finally:
            finding.seconds = time.monotonic() - start
            self.findings.append(finding)
        self.aside, self.doing = self.aside + finding.seconds, ""
        self.tell(self)

    def _shrink(self, finding: Finding, until: float) -> None:
        """Leave the smallest case that fails in the same way in `finding`, at any time the smallest so far: in the same first check of the
        same arm, and without hostile input that the drawn case had not. Once time is over, a case that was never run counts as right;
        whatever was once said of a case stays, so that Hypothesis meets no contradiction."""
        job, drawn = finding.drawn.job, parse_case(finding.drawn.job.case)
        source, told = self.sources[job.kernel], {job.case: True}  # cases drawn before it are known, too: all of them were run
        outcomes = {job.case: finding.again}

        def fails(text: str) -> bool:
            if text not in told:
                known = self.known.get((job.kernel, text))
                told[text] = not brings_in(parse_case(text), drawn) and leads(finding.signature, run(text) if known is None else known)
                if told[text] and text in outcomes:  # Hypothesis goes on from the last case that failed
                    finding.shrunk = outcomes[text]
            return told[text]

        def run(text: str) -> tuple[Signature, ...]:
            case = source.job(text)
            if not case.arms or time.monotonic() >= until:
                return ()
            finding.tried += 1
            left = until - time.monotonic()
            self.doing = f"shrinking {' '.join(finding.signature)}: {finding.tried} tried, {left:.0f} s left"
            self.tell(self)
            outcomes[text] = self.pool.one(case)
            self.known[job.kernel, text] = tuple(signatures(outcomes[text]))
            return self.known[job.kernel, text]

        smallest = shrink(source.origin[job.case], fails) or job.case
        finding.shrunk = None if smallest == job.case else outcomes.get(smallest) or self.pool.one(source.job(smallest))


def _in_turn(streams: list[Iterator[Job]]) -> Iterator[Job]:
    """One of each, for ever."""
    while True:
        for stream in streams:
            yield next(stream)
