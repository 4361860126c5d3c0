"""What is known of one arm in two environments: did it change, and did its time. The lines of a gate's comparisons.jsonl.

Parent side. docs/gate.md explains it.
"""
from __future__ import annotations

import dataclasses
import enum

from harness.verdicts import Check, Verdict

SIDES = BASE, CANDIDATE = "base", "candidate"


class TimeVerdict(str, enum.Enum):
    """What the times of a base and a candidate say together (harness/stats.py)."""

    SAME = "SAME"  # shown to be: the whole interval of the ratio lies within the threshold
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNRESOLVED = "UNRESOLVED"  # the interval allows several of these; not a pass
    INVALID = "INVALID"  # no time of the work: below the speed of light, other outputs than the checked ones, or a side that ended


@dataclasses.dataclass(frozen=True)
class Pairing:
    """An arm of the base and an arm of the candidate, as kernel/arm, on one case."""

    case: str
    base: str
    candidate: str


@dataclasses.dataclass
class Burst:
    """Samples taken one right after the other in one process. us: microseconds, in the order taken. clocks: SM clock in MHz, each time
    that NVML was read meanwhile; watts: the mean; reasons: all throttle reasons seen, as bits. Empty and 0 where there is no GPU."""

    side: str  # base or candidate
    us: list[float]
    clocks: list[int] = dataclasses.field(default_factory=list)
    watts: float = 0.0
    reasons: int = 0


@dataclasses.dataclass
class Round:
    """Four bursts, in the order base candidate candidate base, or the other way round. unclean: why it does not count, or ""."""

    bursts: list[Burst]
    unclean: str = ""


@dataclasses.dataclass
class Estimate:
    """Candidate over base: the ratio and its interval; the medians in microseconds; how many processes and clean rounds are behind it."""

    ratio: float
    low: float
    high: float
    base_us: float
    candidate_us: float
    processes: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Rule:
    """When a change is one. threshold: relative, 0.02 is 2 %. floor_us: a change of less microseconds is none. source: where the
    threshold is from ("calibrated: 12 A/A comparisons", "not calibrated"). widest: what may be called SAME at most, where a noisy machine
    has a wider threshold; 0: the threshold."""

    threshold: float
    floor_us: float
    confidence: float = 0.95
    source: str = "not calibrated"
    widest: float = 0.0

    def for_same(self) -> Rule:
        """The rule that an interval must keep to be SAME."""
        return dataclasses.replace(self, threshold=min(self.threshold, self.widest or self.threshold))


@dataclasses.dataclass
class TimeComparison:
    """Times of a pairing. processes: rounds by pair of fresh processes; confirming: those of the confirming round. why: the verdict
    in words; stopped: why no more was sampled; least_us: the speed of light, and of what."""

    verdict: TimeVerdict
    why: str
    rule: Rule
    contract: str
    cache: str
    processes: list[list[Round]]
    confirming: list[list[Round]] = dataclasses.field(default_factory=list)
    estimate: Estimate | None = None
    confirmed: Estimate | None = None
    stopped: str = ""
    least_us: float = 0.0
    least_of: str = ""
    throttled: int = 0  # samples taken while the GPU was throttled
    samples: int = 0
    seconds: float = 0.0  # what this pairing took, its share of starting processes included
    notes: list[str] = dataclasses.field(default_factory=list)


class Change(str, enum.Enum):
    """What became of an arm from base to candidate, from harmless to worst."""

    SAME = "bitwise same"
    FIXED = "FAIL->PASS"
    NEW_ARM = "new arm"
    NUMBERS = "numbers changed"  # both pass, other bits, within budget
    STILL_BAD = "still failing"
    UNKNOWN = "not comparable"  # vacuous, or the saved outputs are missing
    PROMISE = "promise changed"  # lse in another base, another sentinel, other bits promised
    GONE = "arm gone"
    NEW_WRONG = "new arm fails"
    NONDETERMINISM = "new nondeterminism"
    NAN = "new NaN"
    BROKE = "PASS->FAIL"
    OOM = "new OOM"
    HANG = "new hang"
    CRASH = "new crash"


@dataclasses.dataclass
class Transition:
    """One pairing's change. base, candidate: the two records' verdicts, None where there is no record. margins_before, margins_after:
    error over budget against the reference, by output. numbers: what differs (ULP histogram, localiser), where something does."""

    pairing: Pairing
    change: Change
    detail: str = ""
    base: Verdict | None = None
    candidate: Verdict | None = None
    margins_before: dict[str, float] = dataclasses.field(default_factory=dict)
    margins_after: dict[str, float] = dataclasses.field(default_factory=dict)
    numbers: Check | None = None
    time: TimeComparison | None = None
