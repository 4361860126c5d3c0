"""Problems for the indexer top-k arms, made by hand, and what is right for them."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from arms.topk import TopkProblem, TopkResult

FP8 = torch.float8_e4m3fn
ONE = 0x38  # 1.0 in e4m3
Requests = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch on one thread: these problems are so small that threads waiting for each other on a busy machine take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layout(requests: Requests) -> tuple[torch.Tensor, torch.Tensor, tuple[tuple[int, int, int, int], ...]]:
    """ks, ke int32 [num_q] and bounds of causal requests, each (rows, keys): a request's rows are its last positions."""
    ks, ke, bounds, row0, kv0 = [], [], [], 0, 0
    for rows, keys in requests:
        ks += [kv0] * rows
        ke += [kv0 + keys - rows + row + 1 for row in range(rows)]
        bounds.append((row0, row0 + rows, kv0, kv0 + keys))
        row0, kv0 = row0 + rows, kv0 + keys
    return torch.tensor(ks, dtype=torch.int32), torch.tensor(ke, dtype=torch.int32), tuple(bounds)


def problem(requests: Requests, topk: int, heads: int = 32, seed: int = 0, whole: bool = False) -> TopkProblem:
    """Random e4m3 numbers, scales and weights of both signs; `whole`: small integers and powers of two, so that every fp32 sum is exact
    and many scores are equal."""
    generator = torch.Generator().manual_seed(seed)
    ks, ke, bounds = layout(requests)
    num_q, s_kv = len(ks), bounds[-1][3]

    def draw(*shape: int) -> torch.Tensor:
        if whole:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    scale = 2.0 ** torch.randint(-1, 2, (s_kv,), generator=generator) if whole else torch.rand(s_kv, generator=generator) + 0.5
    return TopkProblem(draw(num_q, heads, 128).to(FP8), draw(s_kv, 128).to(FP8), scale, draw(num_q, heads), ks, ke, topk, bounds)


def steered(scores: torch.Tensor, topk: int, requests: Requests | None = None, heads: int = 32, factors: torch.Tensor | None = None,
            ) -> TopkProblem:
    """A problem whose scores are these, bit for bit: fp32 [s_kv], the same for every row, times the row's factor (a power of two).

    Head 0 sees keys with a score above 0 and weighs 1, head 1 those below 0 and weighs -1, all others see nothing: the score is the
    key's scale, with its sign. A zero is a key that no head sees; a NaN is its scale.
    """
    ks, ke, bounds = layout(requests or [(1, len(scores))])
    num_q, s_kv = len(ks), len(scores)
    q, k = torch.zeros(num_q, heads, 128, dtype=torch.uint8), torch.zeros(s_kv, 128, dtype=torch.uint8)
    q[:, 0, 0] = q[:, 1, 1] = ONE
    k[:, 0], k[:, 1] = ~(scores <= 0) * ONE, (scores < 0) * ONE
    weights = torch.zeros(num_q, heads)
    weights[:, 0], weights[:, 1] = 1, -1
    if factors is not None:
        weights *= factors[:, None]
    scale = torch.where(scores == 0, 1.0, scores.abs())
    return TopkProblem(q.view(FP8), k.view(FP8), scale, weights, ks, ke, topk, bounds)


def best(scores: torch.Tensor, start: int, end: int, topk: int) -> list[int]:
    """The topk best positions of a row in [start, end): by score, then position; NaN never."""
    place = (~scores[start:end].isnan()).nonzero()[:, 0] + start
    found: list[int] = place[scores[place].sort(descending=True, stable=True).indices[:topk]].tolist()
    return found


def assert_right(p: TopkProblem, result: TopkResult, smallest: bool = False) -> None:
    """Exactly the best of the result's own scores, valid ones first, then -1, with their values; `smallest`: also the tie rule."""
    assert result.logits is not None and result.indices.dtype == torch.int32 and result.indices.shape == (p.num_q, p.topk)
    logits = result.logits(0, p.num_q)
    for row, chosen in enumerate(result.indices.tolist()):
        start, end = int(p.ks[row]), int(p.ke[row])
        want = best(logits[row], start, end, p.topk)
        count = len(want)
        assert chosen[count:] == [-1] * (p.topk - count), row
        got = chosen[:count]
        assert len(set(got)) == count and all(start <= place < end for place in got), row
        scores = logits[row]
        assert sorted(scores[got].tolist()) == sorted(scores[want].tolist()), row
        if smallest:
            assert sorted(got) == sorted(want), row
        if result.values is not None:
            assert torch.equal(result.values[row, :count], scores[got]), row
