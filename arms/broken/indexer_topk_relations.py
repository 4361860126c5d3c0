"""Deliberately wrong indexer top-k kernels that are right on the case as it stands, or within every bound: a variation of the problem
shows them, or what lies around their memory.

The last two need CUDA: a GPU that others keep busy, and a CUDA graph.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from arms.broken.fault import declare
from arms.broken.indexer_topk import choose, logits, only, right
from arms.broken.indexer_topk_lite import lowest_chosen
from arms.broken.problems import NEGATIVE, ONE_REQUEST, PLAIN, TWO
from arms.broken.register import WrongChoice
from arms.broken.register import broken_topk as broken
from arms.kernel import Requires
from arms.topk import TopkLaunch, TopkProblem, TopkResult, indexer_topk_kernel, no_bound
from cases.fault import Fault


def promising(name: str, check: str, case: str, also: tuple[str, ...] = ()) -> Callable[[WrongChoice], WrongChoice]:
    """As broken_topk, of a kernel that promises scores whose bits do not depend on where row and key stand."""
    declare(Fault(f"broken_{name}", "indexer_topk", check, case, also))

    def register(launch: WrongChoice) -> WrongChoice:
        def prepare(problem: TopkProblem) -> TopkLaunch:
            return lambda: launch(problem)

        indexer_topk_kernel(f"broken_{name}", memory=no_bound, place_free=True)(prepare)
        return launch

    return register


def next_fp32(x: torch.Tensor) -> torch.Tensor:
    """The next fp32 number."""
    return torch.nextafter(x, torch.full_like(x, torch.inf))


@broken("windows_taken_to_grow", "rows-permuted", PLAIN)
def windows_taken_to_grow(p: TopkProblem) -> TopkResult:
    """The end of a row's window is the largest so far in its request: right as long as rows come in the order of their positions."""
    ke = p.ke.clone()
    for row0, row1, _, _ in p.requests:
        ke[row0:row1] = p.ke[row0:row1].cummax(0).values if row1 > row0 else ke[row0:row1]
    return right(dataclasses.replace(p, ke=torch.where(p.ke > p.ks, ke, p.ke)))


@promising("odd_rows_round_otherwise", "rows-permuted", PLAIN)
def odd_rows_round_otherwise(p: TopkProblem) -> TopkResult:
    """One ULP, in every other row: as if those were summed by another half of a warp."""
    result = right(p)
    assert result.values is not None
    result.values[1::2] = next_fp32(result.values[1::2])
    return result


@broken("last_row_of_an_odd_batch", "batch-split", PLAIN)
def last_row_of_an_odd_batch(p: TopkProblem) -> TopkResult:
    """Rows are taken in pairs. One that has no partner is scored with the weights of the first row."""
    weights = p.weights.clone()
    weights[p.num_q // 2 * 2 :] = p.weights[:1].flip(1)
    return right(dataclasses.replace(p, weights=weights))


@promising("scores_on_a_fixed_grid", "weights-scaled", PLAIN)
def scores_on_a_fixed_grid(p: TopkProblem) -> TopkResult:
    """Whole multiples of 2^-15, whatever size the scores have: within the bounds."""
    scores = logits(p)
    return choose(p, torch.where(scores.isfinite(), (scores * 2.0**15).round() * 2.0**-15, scores))


@promising("scores_saturate", "weights-scaled", PLAIN)
def scores_saturate(p: TopkProblem) -> TopkResult:
    """At a number that the case's scores do not reach."""
    return choose(p, logits(p).clamp(max=110.0))


@broken("cache_keyed_by_content", "request-duplicated", TWO)
def cache_keyed_by_content(p: TopkProblem) -> TopkResult:
    """Positions are kept absolute, and found again by what the query holds: another request with the same content gets the first one's."""
    result = right(p)
    content = torch.cat([p.q_fp8.view(torch.uint8).flatten(1).float(), p.weights], 1)
    same = (content[:, None] == content[None]).all(2)
    return TopkResult(result.indices[same.int().argmax(1)])


@broken("first_request_from_key_0", "request-shifted", ONE_REQUEST, reports=("TL4",))
def first_request_from_key_0(p: TopkProblem) -> TopkResult:
    """The first request's keys are taken to begin at 0."""
    ks = p.ks.clone()
    _, row1, kv0, _ = p.requests[0]
    ks[:row1] = torch.where(p.ke[:row1] > p.ks[:row1], p.ks[:row1] - kv0, p.ks[:row1])
    return right(dataclasses.replace(p, ks=ks))


@broken("buckets_over_the_whole_span", "keys-appended", NEGATIVE)
def buckets_over_the_whole_span(p: TopkProblem) -> TopkResult:
    """64 buckets from the best to the worst score, and topk places for those in the bucket of the k-th, the first to come: enough as long
    as no key is far below the others."""
    scores = logits(p)
    seen = scores.isfinite()
    low, high = (torch.where(seen, scores, fill) for fill in (torch.inf, -torch.inf))
    step = (high.amax(1, keepdim=True) - low.amin(1, keepdim=True)) / 64
    bucket, border = (((high.amax(1, keepdim=True) - x) / step).floor() for x in (scores, lowest_chosen(p)))
    in_border = seen & (bucket == border)
    return only(p, scores, ~in_border | (in_border.cumsum(1) <= p.topk))


def behind(x: torch.Tensor) -> torch.Tensor | None:
    """The element behind a tensor's last one, where memory that torch knows lies there: elsewhere touching it would harm the process."""
    end = int(x.storage_offset()) + x.numel()
    return x.as_strided((1,), (1,), end) if (end + 1) * x.element_size() <= x.untyped_storage().nbytes() else None


@broken("reads_a_scale_too_many", "guards", PLAIN, reports=("ML9",))
def reads_a_scale_too_many(p: TopkProblem) -> TopkResult:
    """The scale behind the last one is loaded with the others and multiplied by 0."""
    scores, other = logits(p), behind(p.kv_scale)
    return choose(p, scores if other is None else scores + 0 * other)


@broken("writes_an_index_too_many", "guards", PLAIN, reports=("TK14",))
def writes_an_index_too_many(p: TopkProblem) -> TopkResult:
    indices = torch.empty((p.num_q, p.topk), dtype=torch.int32, device=p.device)
    indices.copy_(right(p).indices)
    other = behind(indices)
    if other is not None:
        other.fill_(-1)
    return TopkResult(indices)


# --- on CUDA ----------------------------------------------------------------------------------------------------------


def capturable(p: TopkProblem) -> TopkResult:
    """A right choice without waiting for the device, so that a CUDA graph can be made of it: of finite scores, and small cases."""
    dots = torch.einsum("rhd,kd->rhk", p.q_fp8.float(), p.k_fp8.float()).relu()
    position = torch.arange(p.s_kv, device=p.device)
    inside = (position >= p.ks[:, None]) & (position < p.ke[:, None])
    scores = ((dots * p.weights[..., None]).sum(1) * p.kv_scale).masked_fill(~inside, -torch.inf)
    values, indices = scores.topk(min(p.topk, p.s_kv), 1)
    indices = torch.where(values > -torch.inf, indices, -1).int()
    return TopkResult(torch.nn.functional.pad(indices, (0, p.topk - indices.shape[1]), value=-1))


@indexer_topk_kernel("broken_result_left_to_another_stream", memory=no_bound, requires=Requires(device="cuda"))
def result_left_to_another_stream(p: TopkProblem) -> TopkLaunch:
    """The last step is queued on a stream of its own, behind other work: there in time for whoever waits for the whole device, but not for
    those who wait for the stream of the launch."""
    stream = torch.cuda.Stream(p.device)

    def launch() -> TopkResult:
        indices = torch.full((p.num_q, p.topk), -1, dtype=torch.int32, device=p.device)
        result = capturable(p).indices
        stream.wait_stream(torch.cuda.current_stream(p.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 22)  # cycles: 2 ms
            indices.copy_(result)
        result.record_stream(stream)
        indices.record_stream(stream)
        return TopkResult(indices)

    return launch


@indexer_topk_kernel("broken_weights_frozen_in_a_graph", memory=no_bound, requires=Requires(device="cuda"))
def weights_frozen_in_a_graph(p: TopkProblem) -> TopkLaunch:
    """A graph that is captured keeps the weights of the launch before."""
    kept: list[torch.Tensor] = []

    def launch() -> TopkResult:
        if not torch.cuda.is_current_stream_capturing():
            kept[:] = [p.weights.clone()]
        return capturable(dataclasses.replace(p, weights=kept[0]))

    return launch


declare(Fault("broken_result_left_to_another_stream", "indexer_topk", "busy-stream", PLAIN, reports=("ML1",)))
declare(Fault("broken_weights_frozen_in_a_graph", "indexer_topk", "graph-replay", PLAIN))
