"""One indexer problem made into others whose choice of keys follows from its own: no reference says what is right, the arm does.

A key may move to another row, batch, position or request and must be chosen as before. Each variation is a problem that check_problem
takes; what a kernel's `requires` or its size rules out is not made, and the record's note says so.
"""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

from arms.kernel import Requires
from arms.topk import TopkProblem, TopkResult
from cases.indexer_topk import HEAD_DIM
from harness.locate.topk_localise import Windows
from harness.topk_junk import Junk, junk_of
from harness.topk_relations import same_choice
from harness.topk_sets import Band
from harness.verdicts import Check, Verdict

STRANGE = -2  # stands for a key that is not one of the case's
SCORES = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Rows times keys of a variation that has more of either than the case: where it would have more scores, it is not made."""
FRONT = 4095  # keys put in front, at most
COPIED = 64  # rows of a request that are copied, at most: its last ones
JUNK = 67  # keys added at either end of a request's: more than a block of 64, and odd
LARGEST = 448.0  # of e4m3
LEAST = 2.0**-60

Request = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class View:
    """What one check looks at in a variation's launches.

    row: int64 [num_q], which row of the launches, counted through all of them, stands for each row of the case; -1: none does, and the row
    is not looked at. key: int32 [keys of the variation], which of the case's keys each is, STRANGE for none; None: keys are where they
    were. factor: what the arm's own values are to be multiplied by. label: the launch, in a failure's words; told: what was done.
    """

    name: str
    row: torch.Tensor
    key: torch.Tensor | None
    label: str
    told: str
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Variation:
    """Problems that are launched one after the other, and the checks that they serve. missing: `name: reason` of checks not made."""

    problems: tuple[TopkProblem, ...] = ()
    views: tuple[View, ...] = ()
    missing: tuple[str, ...] = ()


def variations(p: TopkProblem, need: Requires, band: Band, valid: torch.Tensor,
               error: Callable[[int, int, torch.Tensor], torch.Tensor]) -> Iterator[Variation]:
    """Every variation of a problem, made when it is asked for. Those that would be the problem itself are left out.

    band, valid (int64 [num_q], keys that may be chosen), error (as TopkExpected.score_error): for keys-appended, which must know that a
    key stays below the k-th.
    """
    yield rows_permuted(p)
    yield batch_split(p)
    if doubles_exactly(p):
        yield weights_scaled(p)
    yield enlarged(p, need)
    yield keys_appended(p, need, junk_of(p, band, valid, error))


def judged(variation: Variation, launched: list[TopkResult], base: TopkResult, band: Band, windows: Windows, bitwise: bool) -> list[Check]:
    """The checks of one variation. bitwise: the arm promises that a score's bits depend on its row and key alone: then its values, in
    order, must be the same bits, which no swap of equal scores changes."""
    indices = torch.cat([result.indices for result in launched])
    parts = [result.values for result in launched]
    values = None if any(part is None for part in parts) else torch.cat(parts)  # type: ignore[arg-type]
    found = []
    for view in variation.views:
        got = seen(view, indices, values, base)
        check = same_choice(view.name, got, base, band, windows, (view.label, "the case itself"), bitwise=bitwise)
        check.detail = f"{view.told}: {check.detail}"
        found.append(check)
    return found


def raised(variation: Variation, reason: str) -> list[Check]:
    """The checks of a variation on which the kernel raised. It takes the case, and what it `requires` does not rule the variation out."""
    detail = f"the kernel takes the case, but raises on this variation of it: {reason}"
    return [Check(view.name, Verdict.FAILED, f"{view.told}: {detail}", bad=1, total=1) for view in variation.views]


def seen(view: View, indices: torch.Tensor, values: torch.Tensor | None, base: TopkResult) -> TopkResult:
    """The launches' choice in the rows and keys of the case; rows that are not looked at are the base's."""
    row, looked = view.row.clamp(min=0), (view.row >= 0)[:, None]
    index = indices[row]
    if view.key is not None:
        last = len(view.key) - 1
        known = view.key[index.clamp(0, last).long()]
        index = torch.where(index < 0, index, torch.where(index > last, STRANGE, known))
    result = TopkResult(torch.where(looked, index, base.indices))
    if values is not None and base.values is not None:
        result.values = torch.where(looked, values[row] * view.factor, base.values)
    return result


# --- the same rows and keys -------------------------------------------------------------------------------------------


def rows_permuted(p: TopkProblem) -> Variation:
    """The rows of each request, and those of none, in another order. Requests stay where they are: rows of one follow each other."""
    bounds = [0, *(bound for request in p.requests for bound in request[:2]), p.num_q]
    order = torch.cat([row0 + turned(row1 - row0) for row0, row1 in itertools.pairwise(bounds)]).to(p.device)
    if bool((order == torch.arange(p.num_q, device=p.device)).all()):
        return Variation()
    view = View("rows-permuted", order.argsort(), None, "rows permuted", "the rows of each request turned round")
    return Variation((of_rows(p, order, p.requests),), (view,))


def turned(count: int) -> torch.Tensor:
    """A permutation of so many rows that turns them round and exchanges even places with odd ones: int64 [count]. An odd count turned
    round would leave each row's parity as it is, so there the last rows come behind the first."""
    place = torch.arange(count)
    return (count - 1 - place) if count % 2 == 0 else (count - place) % count


def batch_split(p: TopkProblem) -> Variation:
    """Three launches: the rows before an odd one, that one alone, those behind it."""
    if p.num_q < 2:
        return Variation()
    middle = (p.num_q // 2 - 1) | 1
    parts = [(0, middle), (middle, middle + 1), (middle + 1, p.num_q)]
    rows = torch.arange(p.num_q, device=p.device)
    problems = [of_rows(p, rows[first:last], clipped(p.requests, first, last)) for first, last in parts if first < last]
    told = f"rows before {middle}, that one alone, and those behind it, launched by themselves"
    return Variation(tuple(problems), (View("batch-split", rows, None, "batch split", told),))


def clipped(requests: tuple[Request, ...], first: int, last: int) -> tuple[Request, ...]:
    """The requests of rows [first, last), counted from `first`. Where they are of none, the last request without a row: no kernel
    must cope with a problem without requests."""
    parts = [(max(row0, first) - first, min(row1, last) - first, kv0, kv1) for row0, row1, kv0, kv1 in requests]
    return tuple(part for part in parts if part[0] < part[1]) or tuple((0, 0, *request[2:]) for request in requests[-1:])


def of_rows(p: TopkProblem, rows: torch.Tensor, requests: tuple[Request, ...]) -> TopkProblem:
    """These rows, in this order, over the same keys. rows: int64. Copies: a view of some rows may begin where nothing is aligned."""
    return dataclasses.replace(p, q_fp8=picked(p.q_fp8, rows), weights=p.weights[rows], ks=p.ks[rows], ke=p.ke[rows], requests=requests)


def picked(fp8: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """fp8[index], which torch does for bytes only."""
    return fp8.view(torch.uint8)[index].view(torch.float8_e4m3fn)


def weights_scaled(p: TopkProblem) -> Variation:
    view = View("weights-scaled", torch.arange(p.num_q, device=p.device), None, "weights doubled", "weights doubled", 0.5)
    return Variation((dataclasses.replace(p, weights=p.weights * 2),), (view,))


def doubles_exactly(p: TopkProblem) -> bool:
    """Whether twice the weights give exactly twice the score, however a kernel orders its operations: nothing may overflow or be subnormal.

    A nonzero product q k is a multiple of 2^-18. A sum is a multiple of the last place of its smallest term, 2^-23 of it, so after the sums
    over columns and heads, whatever cancels, 2^-64 of the smallest weight is left, and times the scale that must be at least 2^-126.
    Additions lose nothing below it. Weights and scales that are infinite or NaN give the same infinities and NaNs.
    """
    if not p.num_q or not p.s_kv:
        return False
    weight, scale = (torch.where(x.isfinite(), x.abs(), 0.0) for x in (p.weights, p.kv_scale))
    low = [min(1.0, float(torch.where(x > 0, x, torch.inf).amin())) for x in (weight, scale)]
    high = [max(1.0, float(x.amax())) for x in (weight, scale)]
    return low[0] * low[1] >= LEAST and high[0] * high[1] * p.heads * HEAD_DIM * LARGEST**2 < 2.0**125


# --- more rows and keys -----------------------------------------------------------------------------------------------


def enlarged(p: TopkProblem, need: Requires) -> Variation:
    """Another request's keys in front, a copy of one request behind: one launch for request-shifted and request-duplicated.

    In front come the first keys of the last request, which is another one than the first unless there is only one. Copied are all keys of
    the shortest request that leaves a key out, and at most its last COPIED rows. Where the kernel takes no further request: no copy.
    """
    if not p.requests or not p.s_kv:
        return Variation()
    choosing = [request for request in p.requests if request[3] - request[2] > p.topk] or list(p.requests)
    _, row1, kv0, kv1 = copied = min(choosing, key=lambda request: request[3] - request[2])
    many = bool(need.requests_max) and len(p.requests) >= need.requests_max
    missing = (f"request-duplicated: the kernel takes {need.requests_max} request(s)",) if many else ()
    rows, keys = (0, 0) if many else (min(COPIED, row1 - copied[0]), kv1 - kv0)
    front = front_keys(p, keys, need)
    reason = refused(need, p, p.num_q + rows, front + p.s_kv + keys)
    if reason:
        return Variation(missing=tuple(f"{name}: {reason}" for name in ("request-shifted", "request-duplicated")))
    every_row, every_key = torch.arange(p.num_q, device=p.device), torch.arange(p.s_kv, device=p.device)
    row = torch.cat([every_row, every_row[row1 - rows : row1]])
    key = torch.cat([p.requests[-1][2] + every_key[:front], every_key, every_key[kv0 : kv0 + keys]])
    moved = torch.full((len(row), 1), front, dtype=torch.int32, device=p.device)
    moved[p.num_q :] += p.s_kv - kv0
    requests = tuple((r0, r1, k0 + front, k1 + front) for r0, r1, k0, k1 in p.requests)
    requests += ((p.num_q, p.num_q + rows, front + p.s_kv, front + p.s_kv + keys),) if rows else ()
    problem = TopkProblem(picked(p.q_fp8, row), picked(p.k_fp8, key), p.kv_scale[key], p.weights[row], p.ks[row] + moved[:, 0],
                          p.ke[row] + moved[:, 0], p.topk, requests)
    strange = torch.full((len(key),), STRANGE, dtype=torch.int32, device=p.device)
    here, copy = strange.clone(), strange
    here[front : front + p.s_kv] = every_key.int()
    copy[front + p.s_kv :] = every_key[kv0 : kv0 + keys].int()
    views = [View("request-shifted", every_row, here, "keys shifted", f"{front:,} other keys put in front")]
    if rows:
        of_copy = torch.full_like(every_row, -1)
        of_copy[row1 - rows : row1] = p.num_q + every_row[:rows]
        told = f"the last {rows} rows and all keys of request {p.requests.index(copied)} once more, behind the others"
        views.append(View("request-duplicated", of_copy, copy, "its copy", told))
    return Variation((problem,), tuple(views), missing)


def front_keys(p: TopkProblem, copied: int, need: Requires) -> int:
    """How many keys to put in front: an odd number, so that no tile begins where it did, or what makes all keys the multiple needed."""
    most = min(FRONT, p.requests[-1][3] - p.requests[-1][2])
    if need.keys_multiple == 1:
        return (most - 1) | 1
    return max(0, most - (p.s_kv + copied + most) % need.keys_multiple)


def refused(need: Requires, p: TopkProblem, rows: int, keys: int) -> str:
    """Why a larger problem is not made, or ""."""
    most = SCORES[p.device.type]
    if rows * keys > most and rows * keys > p.num_q * p.s_kv:
        return f"{rows:,} rows by {keys:,} keys would be more than {most:,} scores"
    return f"the kernel takes up to {need.keys[1]:,} keys" if keys > need.keys[1] else ""


def keys_appended(p: TopkProblem, need: Requires, junk: Junk | None) -> Variation:
    """Keys that score below the k-th (topk_junk.py) in front of each request's keys and behind them. The windows of rows that may see
    them, and that begin with their request's first key or end with its last, take them in. Nothing if no row does.

    junk: which rows may see them, and what they are; None: there are no such keys.
    """
    if junk is None or not p.requests:
        return Variation()
    count = -(-JUNK // need.keys_multiple) * need.keys_multiple
    keys = p.s_kv + 2 * count * len(p.requests)
    if reason := refused(need, p, p.num_q, keys):
        return Variation(missing=(f"keys-appended: {reason}",))
    each = list(enumerate(p.requests))
    requests = tuple((row0, row1, kv0 + 2 * i * count, kv1 + 2 * (i + 1) * count) for i, (row0, row1, kv0, kv1) in each)
    new = TopkProblem(p.q_fp8, torch.zeros(keys, HEAD_DIM, dtype=torch.uint8, device=p.device).view(torch.float8_e4m3fn),
                      torch.ones(keys, device=p.device), p.weights, p.ks.clone(), p.ke.clone(), p.topk, requests)
    of_key = torch.full((keys,), STRANGE, dtype=torch.int32, device=p.device)
    end = p.requests[-1][3]
    pieces = [(kv0, kv1, kv0 + (2 * i + 1) * count) for i, (_, _, kv0, kv1) in each]
    for first, last, to in [*pieces, (end, p.s_kv, end + 2 * count * len(p.requests))]:
        of_key[to : to + last - first] = torch.arange(first, last, dtype=torch.int32, device=p.device)
    mine = of_key >= 0
    new.k_fp8.view(torch.uint8)[mine], new.kv_scale[mine] = p.k_fp8.view(torch.uint8), p.kv_scale
    told = torch.zeros(p.num_q, dtype=torch.bool, device=p.device)
    for i, (row0, row1, kv0, kv1) in each:
        rows, shift = slice(row0, row1), (2 * i + 1) * count
        front, back = junk.rows[rows] & (p.ks[rows] == kv0), junk.rows[rows] & (p.ke[rows] == kv1)
        new.ks[rows] += shift - count * front.int()
        new.ke[rows] += shift + count * back.int()
        told[rows] = front | back
        if i in junk.heavy:
            key, scale = junk.heavy[i]
            for to in (kv0 + 2 * i * count, kv1 + (2 * i + 1) * count):
                new.k_fp8.view(torch.uint8)[to : to + count] = p.k_fp8.view(torch.uint8)[key]
                new.kv_scale[to : to + count] = scale
    if not bool(told.any()):
        return Variation()
    view = View("keys-appended", torch.arange(p.num_q, device=p.device), of_key, "keys appended",
                f"{count} keys below the k-th at either end of each request, in the windows of {int(told.sum()):,} rows")
    return Variation((new,), (view,))
