"""Times two sides against each other: fresh processes, bursts in turns. Parent side.

A generation is a pair of fresh processes, one a side, that go through all pairings. In each, a round is four bursts, base candidate
candidate base and the next time the other way round (ABBA), so that a drift falls on both sides alike. What one generation says of a
pairing is one value, whatever the number of its samples: what is drawn once a process (memory layout, code placement, clocks) is the
same in all of them. harness/comparing.py says how many there are, harness/stats.py has the verdicts.
"""
from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cases import parse_case
from harness.asking import seconds_allowed
from harness.client import WorkerDied, WorkerOptions, WorkerProcess
from harness.comparison import BASE, CANDIDATE, SIDES, Burst, Pairing, Round
from harness.watch import POWER_CAP, SLOWDOWN, Reading, Watch

FEWEST, MOST = 5, 200  # samples in a burst
CLOCKS_APART = 0.01
"""How far the clocks of two sides may lie apart in a round. A difference of so much in time is no longer the kernel's."""
LOWEST_CLOCK = 0.75  # of the highest: below it the GPU is not in the state in which it is used
RESTS, LONGEST_REST = 5, 0.2
"""How long the GPU rests after a burst that ran into the power cap: so many times the burst, and at most so many seconds."""
AUTO = {"cuda": "span", "cpu": "wall"}

Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what is under way."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One environment: how its workers are started, and where they write what they print."""

    options: WorkerOptions
    log: Path


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is sampled. processes: pairs of fresh processes to begin with, and in a confirming round; most: at most so many;
    rounds: ABBA rounds in each; burst_ms: what a burst takes, roughly; seconds: a pairing's time, after which no more processes are
    started for it; flush: whether the L2 is flushed before every sample; timeout: seconds without an answer, 0 from the case's work;
    until: on the clock of time.monotonic, when all sampling ends, 0 for never."""

    contract: str = "auto"
    processes: int = 3
    most: int = 9
    rounds: int = 2
    burst_ms: float = 5.0
    seconds: float = 5.0
    flush: bool = True
    timeout: float = 0.0
    until: float = 0.0

    def time_is_up(self) -> bool:
        """Whether nothing more is to be sampled of anything."""
        return bool(self.until) and time.monotonic() >= self.until


@dataclasses.dataclass
class Sampled:
    """A pairing on its way: what was sampled, by generation, and what is known besides."""

    pairing: Pairing
    generations: list[list[Round]] = dataclasses.field(default_factory=list)
    confirming: list[list[Round]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    held: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    outputs: dict[str, list[dict[str, str]]] = dataclasses.field(default_factory=lambda: {BASE: [], CANDIDATE: []})
    died: str = ""
    stopped: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep it once."""
        if text and text not in self.notes:
            self.notes.append(text)


class Generation:
    """A pair of fresh processes. They are started together, and replaced when one of them dies."""

    def __init__(self, sides: dict[str, Side], plan: Plan, number: int, watch: Watch) -> None:
        self.sides, self.plan, self.number, self.watch = sides, plan, number, watch
        self.workers: dict[str, WorkerProcess] = {}
        self.starting = 0.0  # seconds that starting processes took, which all pairings share
        self.starters = concurrent.futures.ThreadPoolExecutor(2)  # a worker is ended with the thread that started it

    def measure(self, sampled: Sampled) -> list[Round]:
        """A pairing's rounds; [] where a side died, which `sampled` then says."""
        pairing = sampled.pairing
        try:
            self._start()
            began = time.monotonic()
            for side in self._order():
                sampled.held[side] = self._ask(side, pairing, "held", **self._request(side, pairing))
            self._told(sampled)
            count = self._count(sampled)
            rounds = [self._round(pairing, number, count) for number in range(self.plan.rounds)]
            for side in SIDES:
                sampled.outputs[side].append(self._ask(side, pairing, "released", op="release")["outputs"])
            sampled.seconds += time.monotonic() - began
            return rounds
        except _Died as death:
            sampled.died = str(death)
            self.close()
            return []

    def _start(self) -> None:
        """Start what is not running, both sides at once. Raises Unfit, _Died."""
        began = time.monotonic()
        missing = [side for side in self._order() if side not in self.workers]
        started = {side: self.starters.submit(WorkerProcess, self.sides[side].options, self.sides[side].log) for side in missing}
        for side, future in started.items():
            try:
                self.workers[side] = future.result()
            except WorkerDied as death:
                raise _Died(side, death) from None
        self.starting += time.monotonic() - began

    def _order(self) -> tuple[str, str]:
        return (BASE, CANDIDATE) if self.number % 2 == 0 else (CANDIDATE, BASE)

    def _request(self, side: str, pairing: Pairing) -> dict[str, Any]:
        name, _, arm = (pairing.base if side == BASE else pairing.candidate).rpartition("/")
        device = self.sides[side].options.device
        contract = AUTO[device.partition(":")[0]] if self.plan.contract == "auto" else self.plan.contract
        return {"op": "hold", "text": pairing.case, "name": name, "arm": arm, "contract": contract, "flush": self.plan.flush}

    def _ask(self, side: str, pairing: Pairing, answer: str, **request: Any) -> dict[str, Any]:
        limit = self.plan.timeout or seconds_allowed(parse_case(pairing.case), self.sides[side].options.device)
        try:
            for event in self.workers[side].ask(limit, **request):
                if event["event"] == answer:
                    return event
                if event["event"] == "broken":
                    raise _Died(side, f"{event['verdict']}: {event['detail']}")
        except WorkerDied as death:
            self.workers.pop(side)
            raise _Died(side, death) from None
        raise AssertionError("unreachable: events() ends only by an exception")

    def _told(self, sampled: Sampled) -> None:
        """What the two sides said of the pairing. Raises _Died where they were not given the same."""
        base, candidate = sampled.held[BASE], sampled.held[CANDIDATE]
        if base["inputs"] != candidate["inputs"]:
            raise _Died(CANDIDATE, "its inputs are not the base's")
        self.watch.open(candidate["gpu"])
        for side, found in sampled.held.items():
            sampled.note("" if found["hidden"] else f"{side}: it waits for the device in its call, so that its launch cannot be hidden")
        strangers = self.watch.strangers({base["pid"], candidate["pid"]})
        sampled.note(f"other processes on the GPU: {', '.join(map(str, strangers))}" if strangers else "")

    def _count(self, sampled: Sampled) -> int:
        longest: float = max(found["us"] for found in sampled.held.values())
        return min(MOST, max(FEWEST, round(self.plan.burst_ms * 1e3 / max(longest, 1.0))))

    def _round(self, pairing: Pairing, number: int, count: int) -> Round:
        first, second = self._order() if number % 2 == 0 else self._order()[::-1]
        bursts = []
        for side in (first, second, second, first):
            found = self._ask(side, pairing, "sampled", op="sample", count=count)
            bursts.append(burst(side, found["us"], self.watch.between(found["begin"], found["end"])))
            if capped(bursts[-1], self.watch):  # the next one would begin with a lower clock
                time.sleep(min(LONGEST_REST, RESTS * (found["end"] - found["begin"])))
        return Round(bursts, unclean(bursts, self.watch))

    def close(self) -> None:
        """End both processes."""
        for worker in self.workers.values():
            worker.kill()  # the interpreter's own way out takes longer than there is to lose
        self.workers.clear()

    def end(self) -> None:
        """End both processes, and start no more."""
        self.close()
        self.starters.shutdown()


class _Died(Exception):
    """One side could not be timed."""

    def __init__(self, side: str, death: WorkerDied | str) -> None:
        super().__init__(f"{side}: {death if isinstance(death, str) else f'{death.verdict.value}: {death.detail}'}")


def burst(side: str, us: list[float], readings: list[Reading]) -> Burst:
    """Samples with what the GPU was doing meanwhile."""
    reasons = 0
    for reading in readings:
        reasons |= reading.reasons
    return Burst(side, us, [reading.mhz for reading in readings],
                 statistics.fmean(reading.watts for reading in readings) if readings else 0.0, reasons)


def capped(found: Burst, watch: Watch) -> bool:
    """Whether the power cap took the clock down in a burst. The bit alone is also set at full clock, when the cap is near."""
    return bool(found.reasons & POWER_CAP and found.clocks and min(found.clocks) < (1 - CLOCKS_APART) * watch.most_mhz)


def unclean(bursts: list[Burst], watch: Watch) -> str:
    """Why a round does not count, or "". Without a GPU every round counts; with one whose clocks cannot be read, none does."""
    if not watch.most_mhz:
        return watch.problem
    names = [name for bit, name in SLOWDOWN.items() if any(found.reasons & bit for found in bursts)]
    if names:
        return " and ".join(names)
    if not all(found.clocks for found in bursts):
        return "no clock was read"
    clocks = {side: statistics.fmean(mhz for found in bursts if found.side == side for mhz in found.clocks) for side in SIDES}
    if min(clocks.values()) < LOWEST_CLOCK * watch.most_mhz:
        return f"clock below {LOWEST_CLOCK:.0%} of {watch.most_mhz} MHz"
    if max(clocks.values()) > (1 + CLOCKS_APART) * min(clocks.values()):
        why = " under the power cap" if any(found.reasons & POWER_CAP for found in bursts) else ""
        return f"clocks more than {CLOCKS_APART:.0%} apart{why}"
    return ""


def sample_pairs(pairings: list[Pairing], base: Side, candidate: Side, plan: Plan, generations: int,
                 progress: Progress = lambda done, of, what: None) -> dict[Pairing, list[list[Round]]]:
    """Rounds of every pairing in each of so many generations. Raises Unfit where a side cannot start workers as asked.

    A pairing that a side dies of has fewer generations than asked for.
    """
    todo = {pairing: Sampled(pairing) for pairing in pairings}
    sides = {BASE: base, CANDIDATE: candidate}
    with Watch() as watch:
        for number in range(generations):
            active = [sampled for sampled in todo.values() if not sampled.died]
            for sampled, rounds in one_generation(active, sides, plan, number, watch):
                sampled.generations += [rounds] if rounds else []
                progress(number, generations, f"generation {number + 1}  {sampled.pairing.case}")
    return {pairing: sampled.generations for pairing, sampled in todo.items()}


def one_generation(active: list[Sampled], sides: dict[str, Side], plan: Plan, number: int,
                   watch: Watch) -> Iterator[tuple[Sampled, list[Round]]]:
    """One generation of every pairing. Wheels that export the same symbols must not meet: each pair of kernels has its own processes."""
    groups: dict[tuple[str, str], list[Sampled]] = {}
    for sampled in active:
        kernels = sampled.pairing.base.rpartition("/")[0], sampled.pairing.candidate.rpartition("/")[0]
        groups.setdefault(kernels, []).append(sampled)
    for group in groups.values():
        generation = Generation(sides, plan, number, watch)
        try:
            for sampled in group:
                if not sampled.died:
                    yield sampled, generation.measure(sampled)
            for sampled in group:
                sampled.seconds += generation.starting / len(group)
        finally:
            generation.end()
