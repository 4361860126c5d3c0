"""On a GPU: an arm is not told from itself in 200 comparisons, and 2 % is found. Needs an SM90 GPU for itself and FlashMLA.

`python -m pytest tests/test_sampling_cuda.py -s` prints what came out; THREEARM_PROOF names a folder to keep every sample in.
"""
from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from harness.client import WorkerOptions
from harness.comparing import compare
from harness.comparison import Pairing, Rule, TimeComparison, TimeVerdict
from harness.sampling import Plan, Side

PLANTED = str(Path(__file__).parent / "planted.py")
RULE = Rule(0.01, 1.0, source="1 %, not calibrated")
COUNT = 100, 20  # comparisons with itself, and with the planted arm, in each half


def cases(half: int, count: int, least_work: float) -> list[str]:
    """Shapes drawn from those that serve, the same every time; none of both halves."""
    draw, found = random.Random(half), dict[str, float]()
    while len(found) < count:
        s_q, h_q, topk = draw.choice((64, 128, 256, 512, 1024, 2048)), draw.choice((64, 128)), draw.choice((512, 1024, 2048))
        rows = draw.choice(("full", "half", "ragged"))
        s_kv = draw.choice((4096, 8192, 32768))
        work = 2.0 * s_q * h_q * topk * 1088
        if work >= least_work:
            found[f"sparse_prefill:s_q={s_q},s_kv={s_kv},h_q={h_q},topk={topk},rows={rows},seed={2 * draw.randrange(1000) + half}"] = work
    return list(found)


def told(name: str, found: list[TimeComparison]) -> str:
    """A line of what came out."""
    widths = [100 * (c.estimate.high - c.estimate.low) / 2 / c.estimate.ratio for c in found if c.estimate]
    changes = [100 * (c.estimate.ratio - 1) for c in found if c.estimate]
    seconds = [c.seconds for c in found]
    return (f"{name}: {dict(Counter(c.verdict.value for c in found))}; "
            f"change {min(changes):+.2f} % to {max(changes):+.2f} %, median {statistics.median(changes):+.2f} %; "
            f"half-width median {statistics.median(widths):.2f} %, largest {max(widths):.2f} %; "
            f"processes {dict(sorted(Counter(len(c.processes) for c in found).items()))}; "
            f"seconds a case median {statistics.median(seconds):.1f}, most {max(seconds):.1f}; "
            f"throttled {sum(c.throttled for c in found):,} of {sum(c.samples for c in found):,} samples")


@pytest.mark.cuda
@pytest.mark.sm90
@pytest.mark.perf
@pytest.mark.parametrize("half", [0, 1])
def test_100_comparisons_with_itself_and_20_with_an_arm_2_percent_slower(half: int, tmp_path: Path) -> None:
    options = WorkerOptions("cuda", False, (PLANTED,), 1 << 40, environment=("THREEARM_PLANTED=flash_mla 0.02",))
    side = Side(options, tmp_path / "worker.log")
    same = [Pairing(case, "flash_mla/none", "flash_mla/none") for case in cases(half, COUNT[0], 0)]
    slower = [Pairing(case, "flash_mla/none", "planted_slow/none") for case in cases(half + 10, COUNT[1], 1e11)]
    began = time.monotonic()
    found = compare([*same, *slower], side, side, Plan(), lambda _: RULE)
    print(f"\nhalf {half}: {time.monotonic() - began:.0f} s")
    for name, some in (("with itself", same), ("2 % slower", slower)):
        print(told(name, [found[pairing] for pairing in some]))
        print(*(f"  {p.case}: {found[p].verdict.value} {found[p].why} ({found[p].stopped})" for p in some
                if found[p].verdict is not (TimeVerdict.SAME if some is same else TimeVerdict.SLOWER)), sep="\n")
    if folder := os.environ.get("THREEARM_PROOF"):
        Path(folder, f"proof-{half}.json").write_bytes(msgspec.json.encode([(p, c) for p, c in found.items()]))
    assert not [p for p in same if found[p].verdict in (TimeVerdict.SLOWER, TimeVerdict.FASTER, TimeVerdict.INVALID)]
    assert sum(found[p].verdict is TimeVerdict.SLOWER for p in slower) >= 0.95 * len(slower)
