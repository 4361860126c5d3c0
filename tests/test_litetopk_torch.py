"""The portable LiteTopk: its gate never tightens too far, and what loses keys with the published settings is caught and repaired.

F1 to F12 are the rows of the failure-mode table in the published sizes: topk 2048, 16384 candidates, a sample of 8192 keys, one row.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from topk_problems import assert_right, best, one_thread, problem, steered

from arms.indexer_topk.litetopk_torch import calibrated, corrected, run
from arms.litetopk import torch_scan
from arms.litetopk.torch_config import G1 as PUBLISHED_1
from arms.litetopk.torch_config import G2 as PUBLISHED_2
from arms.litetopk.torch_config import Config, gate_rank
from arms.litetopk.torch_gate import Gate, calibrate, zoom
from arms.litetopk.torch_scan import Block, Candidates, scan
from arms.litetopk.torch_select import certified, choose
from arms.litetopk.torch_trace import Trace
from arms.scoring import Scorer, Tile
from arms.topk import WAYS, TopkProblem

K, CAP, SAMPLE, ONE_ROW = 2048, 16384, 8192, Tile(1, 4096)
S256K, S1M = 1 << 18, 1 << 20
LAG = 4  # tiles between two looks at the counts: as published, 64 blocks of 256 keys
G1, G2 = dataclasses.replace(PUBLISHED_1, refresh=LAG), dataclasses.replace(PUBLISHED_2, refresh=LAG)

__all__ = ["one_thread"]  # a fixture that every test of this module uses


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


@pytest.mark.parametrize(("keys", "emitted"), [(S256K, 10_900), (2 * S256K, 12_400), (S1M, 13_900)])
def test_f1_stationary(keys: int, emitted: int) -> None:
    """K * (1 + ln(S / sample)) and a lag; at 1M the published capacity is nearly used up, and the row is certified by its first scan."""
    seen = observe(normal(keys), G1)
    assert K * (1 + math.log(keys / SAMPLE)) * 0.95 <= seen.emitted <= emitted * 1.05
    assert (seen.lost, seen.way, seen.attempts, seen.recall) == (0, "scan", 1, 1.0)


@pytest.mark.parametrize(("keys", "emitted"), [(S256K, 2_900), (S1M, 5_300)])
def test_f1_margin(keys: int, emitted: int) -> None:
    seen = observe(normal(keys), G2)
    assert K <= seen.emitted <= emitted * 1.3
    assert (seen.lost, seen.way) == (0, "scan")


def test_f2_slow_drift() -> None:
    seen = observe(normal(S1M) + torch.linspace(0, 1, S1M), G1)
    assert seen.lost > 0 and 0.4 < seen.recall < 0.7 and seen.way == "rescan"


@pytest.mark.parametrize("config", [G1, G2])
def test_f3_fast_drift(config: Config) -> None:
    seen = observe(normal(S256K) + torch.linspace(0, 3, S256K), config)
    assert seen.lost > 0 and seen.recall < (0.3 if config is G1 else 0.95) and seen.way == "rescan"


@pytest.mark.parametrize(("keys", "recall"), [(S256K, (0.3, 0.6)), (S1M, (0.0, 0.15))])
def test_f4_late_hot(keys: int, recall: tuple[float, float]) -> None:
    scores = normal(keys)
    scores[-keys // 20 :] += 4
    seen = observe(scores, G1)
    assert seen.lost > 0 and recall[0] <= seen.recall <= recall[1] and seen.way == "rescan"


@pytest.mark.parametrize("config", [G1, G2])
def test_f5_ascending(config: Config) -> None:
    """Everything passes, the first are kept, and none of them is among the best."""
    seen = observe(torch.arange(1, S256K + 1).float(), config)
    assert seen.emitted > S256K - SAMPLE and seen.recall == 0.0 and seen.way == "rescan" and seen.attempts <= 3


def test_f6_descending() -> None:
    scores = torch.arange(S256K, 0, -1).float()
    seen = observe(scores, G1)
    assert K <= seen.emitted <= K + SAMPLE // 256 and (seen.way, seen.attempts) == ("scan", 1)
    seen = observe(scores, G2)
    assert 64 <= seen.emitted <= 390 and (seen.way, seen.attempts) == ("rescan", 2)


def test_f7_plateau() -> None:
    """The scale is made of zeros and everything is in one bucket; the second corrected scan looks into it."""
    scores = torch.zeros(S256K)
    scores[-3000:] = normal(3000).abs() + 0.1
    seen = observe(scores, G1)
    assert seen.emitted == S256K and seen.recall == 0.0 and seen.way == "rescan"


@pytest.mark.parametrize("outlier", [1e6, -1e6])
def test_f8_outlier(outlier: float) -> None:
    scores = normal(S256K)
    scores[4000] = outlier
    seen = observe(scores, G1)
    assert seen.emitted > 0.99 * S256K and 0.04 < seen.recall < 0.09 and seen.way == "rescan"


class TwoUlpOff(Table):
    """The sample is scored by another kernel than the scan, whose scores are two ULP lower."""

    def at(self, row0: int, row1: int, keys: torch.Tensor) -> torch.Tensor:
        return super().at(row0, row1, keys) * (1 + 2.0**-22)


@pytest.mark.parametrize(("keys", "way"), [(CAP, "rescan"), (2 * CAP, "dense")])
def test_f9_flat(keys: int, way: str) -> None:
    """With next to no width, nothing passes. More equal keys than there is room for can only be ranked densely, by position."""
    seen = observe(torch.full((keys,), 1.5), G1, scorer=TwoUlpOff)
    assert (seen.emitted, seen.way) == (0, way)
    seen = observe(torch.full((keys,), 1.5), G2, scorer=TwoUlpOff)
    assert (seen.emitted, seen.way) == (keys, "scan" if way == "rescan" else way)
    seen = observe(torch.full((keys,), 1.5), Config(), scorer=TwoUlpOff)
    assert (seen.emitted, seen.way) == (keys, "scan" if way == "rescan" else way)


def test_f9_a_few_ulp_apart() -> None:
    scores = 1.5 + torch.randint(0, 7, (CAP,), generator=torch.Generator().manual_seed(3)) * 2.0**-23
    assert observe(scores, Config()).way == "scan"


def test_f10_short_sample() -> None:
    """As published, the guarantee is the sample's length, not topk; an open gate is what it takes."""
    scores = normal(S256K)
    scores[:1024] += 20
    short = dataclasses.replace(G1, sample=1024)
    seen = observe(scores, short)
    assert seen.emitted == 1024 and seen.recall == 0.5 and seen.way == "rescan"
    seen = observe(scores[:20_000], dataclasses.replace(short, open_short=True))
    assert seen.emitted >= K and seen.way in ("scan", "rescan")


def test_f11_shared_sample() -> None:
    """A sample of the first request's keys shuts the gate for the second, whose scores are lower by five."""
    scores = normal(2 * 20_000)
    scores[:20_000] += 5
    p = steered(scores, K, [(1, 20_000), (1, 20_000)])
    trace = Trace()
    result = run(p, Table(p, ONE_ROW), dataclasses.replace(G1, spread="shared"), trace)
    assert trace.emitted(0) >= K and trace.emitted(1) == 0
    assert result.status is not None and [WAYS[way] for way in result.status] == ["scan", "rescan"]
    assert_right(p, result, smallest=True)
    own = Trace()
    run(p, Table(p, ONE_ROW), G1, own)
    assert own.emitted(1) >= K and max(step.attempt for step in own.steps) == 0


def test_f12_fewer_keys_than_topk() -> None:
    for config in (G1, G2, Config()):
        p = steered(normal(500), K)
        trace = Trace()
        result = run(p, Scorer(p, ONE_ROW), config, trace)
        assert trace.emitted(0) == 500 and result.status is not None and result.status.tolist() == [0]
        assert bool((trace.gates[0, 0].threshold >= 254).all())
        assert_right(p, result, smallest=True)


PATTERNS = {
    "normal": normal(S256K), "drift": normal(S256K) + torch.linspace(0, 3, S256K), "ascending": torch.arange(1, S256K + 1).float(),
    "descending": torch.arange(S256K, 0, -1).float(), "negative": -normal(S256K).abs(),
    "late hot": normal(S256K) + (torch.arange(S256K) > S256K * 0.95) * 4.0,
    "outlier": normal(S256K).index_fill(0, torch.tensor([0]), 1e6),
    "plateau": normal(S256K).relu() * (torch.rand(S256K, generator=torch.Generator().manual_seed(5)) < 0.02),
}
FIRST_SCAN = {"normal", "drift", "descending", "negative"}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_default_settings(pattern: str) -> None:
    """A sample spread over the request survives drift; other patterns take a corrected scan or two, and never the dense way."""
    seen = observe(PATTERNS[pattern], Config())
    assert seen.way == ("scan" if pattern in FIRST_SCAN else "rescan") and seen.attempts <= 3, seen


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("buckets", [2, 3, 255, 256, 257, 4096])
def test_thresholds_of_many_rows(whole: bool, buckets: int) -> None:
    """Real products, ragged requests: at every step, for every row."""
    p = problem([(9, 1500), (7, 300), (3, 3)], 40, whole=whole)
    scorer, trace = Scorer(p, Tile(4, 256)), Trace()
    config = Config(buckets=buckets, sample=256, capacity=400, tile=64)
    assert_right(p, run(p, scorer, config, trace), smallest=True)
    assert_never_too_tight(p, trace, scorer, attempts=9)


def test_an_overtight_refresh_is_seen_and_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh that counts every candidate twice passes the k-th score: the trace shows it, the certificate refuses it."""
    def twice(gate: Gate, candidates: Candidates, topk: int) -> torch.Tensor:
        return right(gate, dataclasses.replace(candidates, stored=2 * candidates.stored), topk)

    right = torch_scan.tightened
    monkeypatch.setattr(torch_scan, "tightened", twice)
    p = steered(normal(20_000), 256)
    trace, scorer = Trace(), Table(p, ONE_ROW)
    result = run(p, scorer, Config(sample=2048), trace)
    with pytest.raises(AssertionError):
        assert_never_too_tight(p, trace, scorer)
    assert result.status is not None and WAYS[result.status[0]] == "dense"
    assert_right(p, result, smallest=True)


def test_rescans_start_from_clean_counts() -> None:
    """Emission of a corrected scan is that of its own candidates: between topk and the room, whatever the first one counted."""
    p = steered(torch.arange(1, 40_001).float(), 1000)
    trace = Trace()
    run(p, Table(p, ONE_ROW), dataclasses.replace(G1, sample=2048), trace)
    last = max(step.attempt for step in trace.steps)
    assert last > 0 and 1000 <= trace.emitted(0, last) <= CAP and trace.dropped(0, last) == 0


def test_only_failed_rows_are_scanned_again() -> None:
    scores = torch.cat([torch.arange(1, 30_001).float(), torch.arange(30_000, 0, -1).float()])
    p = steered(scores, 1000, [(1, 30_000), (1, 30_000)])
    trace = Trace()
    result = run(p, Table(p, Tile(2, 1024)), dataclasses.replace(G1, sample=2048), trace)
    assert result.status is not None and [WAYS[way] for way in result.status] == ["rescan", "scan"]
    assert trace.emitted(1, 1) == 0
    assert_right(p, result, smallest=True)


def test_a_certificate_needs_room_and_a_threshold_behind_the_kth() -> None:
    gate = Gate(torch.zeros(1), torch.ones(1), torch.tensor([1]), torch.tensor([1]), 4)
    found = Candidates.none(1, 4, 4, torch.device("cpu"))
    found.valid, found.emitted, found.stored[0, 1] = torch.tensor([9]), torch.tensor([3]), 3
    assert bool(certified(gate, found, 3)) and not bool(certified(gate, found, 4))
    assert not bool(certified(dataclasses.replace(gate, threshold=torch.tensor([0])), found, 3))
    found.emitted = torch.tensor([5])
    assert not bool(certified(gate, found, 3))
    found.valid, found.emitted, found.stored = torch.tensor([2]), torch.tensor([2]), torch.tensor([[0, 2, 0, 0]])
    assert bool(certified(gate, found, 3))


def test_counts_of_what_was_kept_and_of_what_was_lost() -> None:
    found = Candidates.none(2, 5, 4, torch.device("cpu"))
    for key0 in (100, 108):
        passes = torch.tensor([[True, False, True, True, False, False, True, True], [False] * 8])
        found.add(key0, torch.arange(8).float().expand(2, 8) + key0, passes, torch.tensor([0.0, 0, 1, 1, 2, 2, 3, 3]).expand(2, 8))
    assert (found.emitted.tolist(), found.kept.tolist(), found.dropped.tolist()) == ([10, 0], [5, 0], [5, 0])
    assert (found.stored[0].tolist(), found.lost[0].tolist()) == ([1, 2, 0, 2], [1, 2, 0, 2])
    assert found.index[0, :5].tolist() == [100, 102, 103, 106, 107] == found.value[0, :5].tolist()
    assert int(found.stored[1].sum()) == int(found.lost[1].sum()) == 0 and found.index[1, :5].tolist() == [-1] * 5
    assert (float(found.best[0]), float(found.worst[0])) == (115, 100)


def test_buckets_never_rise_with_the_score() -> None:
    """Also of scales that overflow, and of infinite scores; only NaN has no bucket."""
    ends = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 3.4e38, -3.4e38])
    scores = torch.cat([normal(2000) * 10.0 ** torch.randint(-40, 38, (2000,)), ends]).sort().values[None]
    samples = [normal(500), torch.full((500,), 3.4e38), ends[-2:], ends[:2], torch.zeros(3), torch.tensor([1e-45, -1e-45]),
               torch.tensor([math.nan])]
    for sample in (each[None] for each in samples):
        for config in (Config(), G1, Config(buckets=4096)):
            gate = calibrate(sample, torch.ones(sample.shape, dtype=torch.bool), torch.tensor([10**6]), 2, config)
            closer = zoom(gate, gate.threshold, sample.amax(1), sample.amin(1))
            for each in (gate, closer):
                bucket = each.bucket(scores)[0]
                assert not bool(bucket.isnan().any()) and bool((bucket.diff() <= 0).all())
                assert float(bucket[-1]) == 0.0 and float(bucket[0]) == config.buckets - 1
                assert bool(each.bucket(torch.tensor([[math.nan]])).isnan())


@pytest.mark.parametrize("spread", ["strided", "prefix"])
def test_a_row_is_calibrated_on_keys_that_it_may_attend(spread: str) -> None:
    """A whole prompt of rising scores: keys after a row's own are better, and must not raise its gate. Too few before it: open."""
    p = steered(torch.arange(1, 401).float(), 20, [(400, 400)])
    scorer = Table(p, Tile(8, 128))
    config = Config(sample=64, capacity=400, spread=spread)
    opened = 0
    for row0 in range(0, 400, 8):
        gate = calibrated(Block(scorer, row0, row0 + 8), p.topk, config)
        for place, row in enumerate(range(row0, row0 + 8)):
            least = gate.bucket(torch.full((8, 1), float(max(row + 1 - p.topk + 1, 1))))[place, 0]
            assert int(gate.threshold[place]) >= int(least)
            opened += int(gate.threshold[place]) == config.buckets - 1
    assert opened == (20 * 400 // 64 if spread == "strided" else 20)  # with exactly topk of them, the last is the worst of all


def test_infinite_scores_do_not_stretch_the_scale() -> None:
    sample, may = torch.tensor([[3.0, -math.inf, 1.0, math.inf, math.nan, 9.0]]), torch.tensor([[True] * 5 + [False]])
    gate = calibrate(sample, may, torch.tensor([100]), 2, Config(buckets=11))
    assert (float(gate.origin), float(gate.inv_delta), int(gate.threshold)) == (-3.0, 5.0, 0)


def test_rank_of_a_margin_gate() -> None:
    """96 at 256K, 64 from 384K on; topk where the sample is all there is."""
    assert [gate_rank(K, SAMPLE, keys) for keys in (SAMPLE, S256K, 3 * S256K // 2, S1M)] == [K, 96, 64, 64]


def test_what_follows_a_scan() -> None:
    """Exact counts give the new threshold; a bucket too full is looked into; a gate too tight opens, first to the safe one."""
    gate = Gate(torch.zeros(4), torch.ones(4), torch.tensor([3, 3, 1, 3]), torch.tensor([3, 3, 2, 3]), 5)
    found = Candidates.none(4, 10, 5, torch.device("cpu"))
    found.valid = torch.full((4,), 100)
    found.stored = torch.tensor([[1, 1, 1, 7, 0], [1, 9, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 1, 0]])
    found.lost = torch.tensor([[0, 5, 0, 0, 0], [0, 7, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    found.best, found.worst = torch.zeros(4), torch.full((4,), -4.0)
    after = corrected(gate, found, 4)
    assert after.threshold.tolist() == [1, 3, 2, 4]
    assert float(after.inv_delta[1]) > 3 and -1.1 < -float(after.origin[1]) < -0.9 and after.inv_delta[[0, 2, 3]].tolist() == [1, 1, 1]

def test_the_table_holds_what_is_scored() -> None:
    scores = torch.cat([normal(200), torch.tensor([0.0, -0.0])])
    p = steered(scores, 9, [(3, 202)], factors=torch.tensor([1.0, 0.5, -2.0]))
    assert torch.equal(Table(p, ONE_ROW).masked(0, 3), Scorer(p).masked(0, 3))
