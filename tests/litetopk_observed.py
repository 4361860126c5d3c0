"""The portable LiteTopk seen at work on one row: what its first scan emitted and lost, and whether its thresholds were ever too tight."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from topk_problems import best, steered

from arms.indexer_topk.litetopk_torch import calibrated, run
from arms.litetopk.torch_config import G1 as PUBLISHED_1
from arms.litetopk.torch_config import G2 as PUBLISHED_2
from arms.litetopk.torch_config import Config
from arms.litetopk.torch_scan import Block, scan
from arms.litetopk.torch_select import choose
from arms.litetopk.torch_trace import Trace
from arms.scoring import Scorer, Tile
from arms.topk import WAYS, TopkProblem

K, CAP, SAMPLE, ONE_ROW = 2048, 16384, 8192, Tile(1, 4096)
S256K, S1M = 1 << 18, 1 << 20
LAG = 4  # tiles between two looks at the counts: as published, 64 blocks of 256 keys
G1, G2 = dataclasses.replace(PUBLISHED_1, refresh=LAG), dataclasses.replace(PUBLISHED_2, refresh=LAG)


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Table(Scorer):
    """Scores from a table of them, fp32 [num_q, s_kv]: scoring a million keys takes seconds, and is tried elsewhere."""

    def __init__(self, p: TopkProblem, tile: Tile) -> None:
        super().__init__(p, tile)
        above, below = (p.k_fp8.view(torch.uint8)[:, head] > 0 for head in (0, 1))
        self.table = p.weights[:, :1] * torch.where(above, p.kv_scale, torch.where(below, -p.kv_scale, 0.0))

    def raw(self, row0: int, row1: int, key0: int, key1: int) -> torch.Tensor:
        return self.table[row0:row1, key0:key1].clone()

    def at(self, row0: int, row1: int, keys: torch.Tensor) -> torch.Tensor:
        return self.table[row0:row1, keys]


@dataclasses.dataclass
class Seen:
    """One row run with some settings: what its first scan emitted and would have returned, and what came out."""

    emitted: int
    lost: int
    recall: float
    way: str
    attempts: int


def observe(scores: torch.Tensor, config: Config, topk: int = K, scorer: Callable[[TopkProblem, Tile], Table] = Table) -> Seen:
    """Run one row over these scores. Asserts that the result is exact, and that a safe gate of a causal sample is never too tight."""
    p = steered(scores, topk)
    trace = Trace()
    result = run(p, scorer(p, ONE_ROW), config, trace)
    want = best(scores, 0, len(scores), topk)
    assert result.status is not None and set(result.indices[0].tolist()) - {-1} == set(want)
    assert_never_too_tight(p, trace, Table(p, ONE_ROW))
    found = scan(block := Block(scorer(p, ONE_ROW), 0, 1), calibrated(block, topk, config), topk, config)
    kept = set(choose(found.value[:, :-1], found.index[:, :-1], topk)[1][0].tolist())
    attempts = 1 + max(step.attempt for step in trace.steps)
    return Seen(trace.emitted(0), trace.dropped(0), len(kept & set(want)) / len(want), WAYS[result.status[0]], attempts)


def assert_never_too_tight(p: TopkProblem, trace: Trace, scorer: Scorer, attempts: int = 1) -> None:
    """At every step of the first scans the threshold is at or behind the bucket of the k-th score, and never goes back. Scans whose first
    threshold is not (a margin gate's, or that of another's sample) and rows that are shut are passed over."""
    kth = torch.full((p.num_q,), -math.inf)
    for row in range(p.num_q):
        scores = scorer.masked(row, row + 1)[0]
        chosen = best(scores, int(p.ks[row]), int(p.ke[row]), p.topk)
        kth[row] = scores[chosen[-1]] if len(chosen) == p.topk else -math.inf
    for step in trace.steps:
        if step.attempt < attempts:
            gate = trace.gates[step.rows[0], step.attempt]
            least = gate.bucket(kth[slice(*step.rows), None])[:, 0]
            sound = gate.threshold >= least
            assert bool((least[sound] <= step.after[sound]).all()) and bool((step.after <= step.before).all()), step
