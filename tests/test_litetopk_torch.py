"""The parts of the portable LiteTopk: its gate never tightens too far, its certificate, and what follows a scan that is refused."""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from litetopk_observed import CAP, G1, ONE_ROW, S1M, S256K, SAMPLE, K, Table, assert_never_too_tight, normal
from topk_problems import assert_right, one_thread, problem, steered

from arms.indexer_topk.litetopk_torch import calibrated, corrected, run
from arms.litetopk import torch_scan
from arms.litetopk.torch_config import Config, gate_rank
from arms.litetopk.torch_gate import Gate, calibrate, zoom
from arms.litetopk.torch_scan import Block, Candidates
from arms.litetopk.torch_select import certified
from arms.litetopk.torch_trace import Trace
from arms.scoring import Scorer, Tile
from arms.topk import WAYS

__all__ = ["one_thread"]  # a fixture that every test of this module uses


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
