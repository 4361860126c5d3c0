"""Settings of the portable LiteTopk, and the published ones, which lose keys on some inputs and are there to show that they are caught."""
from __future__ import annotations

import dataclasses
import math

GATES = ("safe", "margin")
SAMPLES = ("strided", "prefix", "shared")


@dataclasses.dataclass(frozen=True)
class Config:
    """buckets: of the affine scale a row's scores are sorted into. sample: keys scored ahead to set that scale and the first threshold.
    capacity: candidates a row, 0 for max(4 * topk, 16384). tile: keys between two looks at the threshold, 0 for a scoring tile.

    gate: "safe" lets the sample's topk-th score through; "margin" as much of the sample as 1.5 topk of all keys would be, which emits less
    and may be too tight. refresh: the threshold is tightened after every so many tiles, 0 never.
    spread: which keys the sample holds: "strided" over the request, its "prefix", or a "shared" prefix of the whole buffer (causal for
    nobody). floor: least width of the scale, as a share of the sample's largest magnitude; least: and absolutely.
    open_short: a row that may attend fewer than topk of the sample's keys lets everything through. rescans: corrected scans of a row that
    is not certified, before it is computed densely.
    """

    buckets: int = 256
    sample: int = 8192
    capacity: int = 0
    tile: int = 0
    gate: str = "safe"
    refresh: int = 1
    spread: str = "strided"
    floor: float = 2.0**-8
    least: float = 1e-30
    open_short: bool = True
    rescans: int = 4

    def __post_init__(self) -> None:
        if not 2 <= self.buckets <= 4096:
            raise ValueError(f"buckets={self.buckets}: allowed is 2 to 4096")
        for name, low in (("sample", 1), ("capacity", 0), ("tile", 0), ("refresh", 0), ("rescans", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)}: allowed is {low} and more")
        if self.gate not in GATES or self.spread not in SAMPLES:
            raise ValueError(f"gate={self.gate!r}, spread={self.spread!r}: allowed are {', '.join(GATES)}; {', '.join(SAMPLES)}")
        if not 0 <= self.floor <= 1 or not 1e-30 <= self.least <= 1:
            raise ValueError(f"floor={self.floor}, least={self.least}: allowed are 0 to 1 and 1e-30 to 1")

    def room(self, topk: int) -> int:
        """Candidates a row. Raises ValueError if topk does not fit."""
        capacity = self.capacity or max(4 * topk, 1 << 14)
        if not 1 <= topk <= capacity:
            raise ValueError(f"topk={topk}: allowed is 1 to the capacity, {capacity}")
        return capacity


MARGIN = 1.5
LEAST_RANK = 64


def gate_rank(topk: int, sampled: int, keys: int) -> int:
    """The sample's rank at which a margin gate of a row stands: 1.5 times the share that topk is of the row's keys, at least 64."""
    if sampled >= keys:
        return topk
    return min(topk, max(LEAST_RANK, math.ceil(MARGIN * topk * sampled / keys)))


G1 = Config(spread="prefix", floor=0.0, least=1e-20, open_short=False)
"""As first published: calibrated on the prefix, a scale that may be next to nothing wide, its overflow silent (here it is not)."""

G2 = Config(spread="prefix", gate="margin", floor=2.0**-8, least=1e-6, open_short=False)
"""As published second: the margin gate, and a floor under the scale."""
