"""Shared by tests: machines that exist as random numbers. Each disturbs times in its own way; the truth is known."""
from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from harness import comparing
from harness.client import WorkerOptions
from harness.comparison import BASE, CANDIDATE, Burst, Estimate, Pairing, Round, Rule, TimeVerdict
from harness.sampling import Plan, Sampled, Side
from harness.stats import estimate, judge, narrow, suspect

US = 100.0
SAMPLES = 9
FEWEST, MOST, ROUNDS = Plan.processes, Plan.most, Plan.rounds
ABBA = (BASE, CANDIDATE, CANDIDATE, BASE)
AABB = (BASE, BASE, CANDIDATE, CANDIDATE)
SWAPPED = {BASE: CANDIDATE, CANDIDATE: BASE}
Offset = Callable[[np.random.Generator], float]
"""Log of how far off a whole process is, for as long as it lives."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What disturbs times. All sizes are logs. noise: of one sample; slope: linear drift from burst to burst, its sign drawn for each
    process; jump, jumps: size of a lasting step between bursts, and its probability; clock: steps up or down by one clock, as a walk;
    spikes: share of samples that take several times as long; throttled: share of bursts at half speed, of which `seen` are marked;
    spell: probability and size of what hits the candidate in all processes that are started together."""

    offset: Offset = lambda rng: 0.0
    noise: float = 0.005
    slope: float = 0.0
    jump: float = 0.0
    jumps: float = 0.0
    clock: float = 0.0
    spikes: float = 0.0
    throttled: float = 0.0
    seen: float = 1.0
    spell: tuple[float, float] = (0.0, 0.0)


def normal(size: float) -> Offset:
    return lambda rng: float(rng.normal(0, size))


def heavy(size: float) -> Offset:
    """Student's t with 3 degrees of freedom: one process in fifty is five times as far off as most."""
    return lambda rng: float(rng.standard_t(3)) * size


MACHINES = {
    "normal offsets": Machine(normal(0.005)),
    "heavy-tailed offsets": Machine(heavy(0.003)),
    "linear drift": Machine(normal(0.002), slope=0.02),
    "jumping drift": Machine(normal(0.002), jump=0.02, jumps=0.1),
    "spikes": Machine(normal(0.003), spikes=0.1),
    "throttled, seen": Machine(normal(0.003), throttled=0.05),
    "throttled, half of it seen": Machine(normal(0.003), throttled=0.02, seen=0.5),
    "clock steps": Machine(normal(0.002), clock=0.0076),
    "spells": Machine(normal(0.002), spell=(0.02, 0.08)),
}


def process(rng: np.random.Generator, machine: Machine, change: float, spell: float = 0.0, order: tuple[str, ...] = ABBA) -> list[Round]:
    """The rounds of one pair of fresh processes, whose candidate takes 1 + change times as long."""
    off = {BASE: machine.offset(rng), CANDIDATE: machine.offset(rng) + float(np.log1p(change)) + spell}
    slope, level, step = machine.slope * rng.choice((-1, 1)), 0.0, 0
    rounds = []
    for number in range(ROUNDS):
        bursts, unclean = [], ""
        for side in order if number % 2 == 0 else [SWAPPED[side] for side in order]:
            level += slope + (rng.choice((-1, 1)) * machine.jump if rng.random() < machine.jumps else 0.0)
            step = int(np.clip(step + rng.integers(-1, 2), -2, 2))
            logs = off[side] + level + step * machine.clock + rng.normal(0, machine.noise, SAMPLES)
            logs = logs + np.where(rng.random(SAMPLES) < machine.spikes, rng.exponential(1.0, SAMPLES), 0.0)
            if rng.random() < machine.throttled:
                logs = logs + np.log(2)
                unclean = "throttled" if rng.random() < machine.seen else unclean
            bursts.append(Burst(side, (US * np.exp(logs)).tolist()))
        rounds.append(Round(bursts, unclean))
    return rounds


def spell_of(rng: np.random.Generator, machine: Machine) -> float:
    """What hits the candidate in all processes that are started together."""
    chance, size = machine.spell
    return float(rng.choice((-1, 1)) * size) if rng.random() < chance else 0.0


def generations(rng: np.random.Generator, machine: Machine, count: int, change: float = 0.0) -> list[list[Round]]:
    """Pairs of processes that are started one after the other."""
    spell = spell_of(rng, machine)
    return [process(rng, machine, change, spell) for _ in range(count)]


def verdicts(patch: pytest.MonkeyPatch, machine: Machine, rule: Rule, rng: np.random.Generator, count: int,
             change: float = 0.0) -> Counter[TimeVerdict]:
    """What the gate's own procedure says of so many pairings on this machine."""
    spells: dict[Pairing, float] = {}

    def one_generation(some: list[Sampled], sides: object, plan: Plan, number: int, watch: object) -> Iterator[tuple[Sampled, list[Round]]]:
        for sampled in some:
            if number == 0:
                spells[sampled.pairing] = spell_of(rng, machine)
            yield sampled, process(rng, machine, change, spells[sampled.pairing])

    patch.setattr(comparing, "one_generation", one_generation)
    side = Side(WorkerOptions("cpu", False, (), 0), Path(os.devnull))
    found = comparing.compare([Pairing(str(each), "a/b", "a/b") for each in range(count)], side, side, Plan(), lambda pairing: rule)
    return Counter(each.verdict for each in found.values())


Estimator = Callable[[list[list[Round]], float], Estimate | None]


def verdicts_otherwise(machine: Machine, rule: Rule, rng: np.random.Generator, count: int, order: tuple[str, ...] = ABBA,
                       estimator: Estimator = estimate, confirm: bool = True) -> Counter[TimeVerdict]:
    """The same in a way that may be wrong: bursts in another order, another interval, the first round taken for its own confirmation."""

    def taken() -> Estimate | None:
        spell, processes = spell_of(rng, machine), []
        while len(processes) < FEWEST or (len(processes) < MOST and not narrow(estimator(processes, rule.confidence), rule)):
            processes.append(process(rng, machine, 0.0, spell, order))
        return estimator(processes, rule.confidence)

    firsts = [taken() for _ in range(count)]
    return Counter(judge(first, (taken() if confirm else first) if suspect(first, rule) else None, rule)[0] for first in firsts)
