"""What a record and a comparison of an evidence folder must hold to be whole. Pure functions."""
from __future__ import annotations

import msgspec

from harness.comparison import SIDES, Burst, Estimate, Pairing, TimeComparison, TimeVerdict
from harness.record import Record
from harness.rejudge import NEEDED
from harness.runfolder import RunError, decoded
from harness.stats import estimate

LONGEST_US = 1e12  # eleven days


def decoded_pair(line: bytes, place: str) -> tuple[Pairing, TimeComparison]:
    """A line of pairs.jsonl. Raises RunError where either half is of a newer schema or none, or holds times that no arm has."""
    try:
        halves = msgspec.json.decode(line, type=tuple[msgspec.Raw, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise RunError(f"{place}: {error}") from None
    pairing, found = decoded(bytes(halves[0]), Pairing, place), decoded(bytes(halves[1]), TimeComparison, place)
    for burst in bursts_of(found):
        if burst.side not in SIDES or not burst.us or not all(0 <= each < LONGEST_US for each in burst.us):
            raise RunError(f"{place}: a burst must have a side and samples in microseconds")
    if not all(sound(each) for each in (found.estimate, found.confirmed) if each):
        raise RunError(f"{place}: an estimate must hold times above 0, and a ratio within its interval")
    return pairing, found


def bursts_of(found: TimeComparison) -> list[Burst]:
    """All of a comparison."""
    return [burst for rounds in [*found.processes, *found.confirming] for each in rounds for burst in each.bursts]


def sound(found: Estimate) -> bool:
    """Whether an estimate can be one."""
    times = found.base_us, found.candidate_us
    return 0 < found.low <= found.ratio <= found.high < LONGEST_US and all(0 < us < LONGEST_US for us in times)


def judged(record: Record) -> bool:
    """Whether a record holds the check against what is right, and what it is about."""
    return NEEDED.get(record.family) in [check.name for check in record.checks] and bool(record.inputs and record.outputs)


def whole(found: TimeComparison, processes: int) -> bool:
    """Whether a comparison has its samples and, where they give one, its interval. One that is INVALID may have ended early."""
    if sum(len(burst.us) for burst in bursts_of(found)) != found.samples:
        return False
    if found.verdict is TimeVerdict.INVALID:
        return True
    has_all = len(found.processes) >= processes and all(found.processes)
    return has_all and (found.estimate is not None or estimate(found.processes, found.rule.confidence) is None)
