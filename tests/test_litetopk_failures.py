"""What loses keys with the published settings of LiteTopk is caught and repaired, and what the default settings make of it.

F1 to F12 are the rows of the failure-mode table in the published sizes: topk 2048, 16384 candidates, a sample of 8192 keys, one row.
"""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from litetopk_observed import CAP, G1, G2, ONE_ROW, S1M, S256K, SAMPLE, K, Table, normal, observe
from topk_problems import assert_right, one_thread, steered

from arms.indexer_topk.litetopk_torch import run
from arms.litetopk.torch_config import Config
from arms.litetopk.torch_trace import Trace
from arms.scoring import Scorer
from arms.topk import WAYS

__all__ = ["one_thread"]  # a fixture that every test of this module uses


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
