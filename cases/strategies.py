"""Hypothesis strategies for case records: they draw the record only, never a tensor. Needs hypothesis, so no module imports it when
it is itself imported.

Both draw within a budget of work, stated by the record: `max_work` dot products of a launch (2 * (d_qk + 512) FLOPs each in sparse_prefill,
256 in indexer_topk), and as many elements of inputs and outputs as MOST_ELEMENTS says. A `Fits` keeps them to what a kernel takes; where
its least case is above the budget, that case is what is drawn. Draws are weighted to the unusual, and the simplest value of a key comes
first, which is what shrinking goes for. It goes for fewer draws before that, so what a case does not use, or cannot choose, is drawn all
the same.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from cases import indexer_topk
from cases.fits import Fits
from cases.indexer_topk import HEAD_DIM, IndexerTopkCase
from cases.sparse_prefill import D_V, ORDERS, ROWS, SCALES, SINKS, TAILS, VALUES, SparsePrefillCase

ANY = Fits()
BLOCKS = (1, 63, 64, 65, 127, 128, 129, 192, 320)
"""Around one 64-key block and one pair of them, where kernels go wrong, and odd numbers of blocks."""
HEADS = (1, 2, 16, 64, 128)
FEW = (1, 2, 3, 4, 5, 7, 8, 9, 13)
"""Rows around blocks of 4 and 8."""
MOST_ROWS, MOST_TOPK, MOST_KEYS = 8192, 4096, 1 << 17


LONG = 513
"""As many keys, or more, has half of the draws that have room for them: a row of which a kernel needs several passes."""


def around(low: int, high: int) -> tuple[int, ...]:
    """2^n - 1, 2^n and 2^n + 1 for n from low to high."""
    return tuple(2**n + by for n in range(low, high + 1) for by in (-1, 0, 1))


WIDTHS = (*BLOCKS, *around(8, 12), 384)
KEYS = (1, 2, 3, 5, *BLOCKS[1:7], *around(8, 17), 4099)
"""Around tiles of 64 to 256 keys, the usual topk, and buffers of powers of two."""


def most_elements(max_work: int) -> int:
    """Elements of inputs and outputs that a case with this much work may have: enough for rows of every kind, at most 256M."""
    return min(max(1 << 21, 16 * max_work), 1 << 28)


def sizes(most: int, borders: Iterable[int] = BLOCKS, least: int = 1, multiple: int = 1) -> st.SearchStrategy[int]:
    """Multiples of `multiple` from `least` to `most`, half of them a border; the least one where `most` is below it."""
    low = max(1, -(-least // multiple))
    high = max(most // multiple, low)
    anything = st.integers(low, max(high, low + 1)).map(lambda count: min(count, high) * multiple)
    fitting = sorted({border for border in borders if low * multiple <= border <= high * multiple and border % multiple == 0})
    return _one_of(tuple(fitting or [low * multiple]), most) | anything


def _one_of(values: tuple[int, ...], most: int) -> st.SearchStrategy[int]:
    """One of the values that are not above `most`; the least where all are."""
    fitting = [value for value in sorted(values) if value <= most] or [min(values)]
    return st.sampled_from(fitting if len(fitting) > 1 else fitting * 2)  # a single value would be no draw


def _rounded(low: float, high: float, unit: int) -> st.SearchStrategy[float]:
    """Multiples of 1/unit from `low` to `high`: numbers that a person can read and type."""
    return st.integers(round(low * unit), round(high * unit)).map(lambda count: count / unit)


def _zero_or(other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """0 (the default of a rarely used key) in half of the draws."""
    return st.just(0) | other


def _widths(fits: Fits, most: int) -> st.SearchStrategy[int]:
    """topk, as far as the kernel takes it; half of the time whole pairs of blocks, if there is room for them."""
    if fits.topk_in:
        return _one_of(fits.topk_in, most)
    most = min(most, fits.topk_max or MOST_TOPK)
    widths, pairs = sizes(most, WIDTHS, multiple=fits.topk_multiple), math.lcm(128, fits.topk_multiple)
    return widths | sizes(most, WIDTHS, multiple=pairs) if most >= pairs else widths


@st.composite
def sparse_prefill_cases(draw: st.DrawFn, max_work: int = 1 << 16, fits: Fits = ANY) -> SparsePrefillCase:
    """Any valid case with s_q * h_q * topk <= max_work and at most most_elements(max_work) elements.

    sm_scale stays where scores are neither all equal nor overflow: from 0.01 to 1.
    """
    d_qk = draw(st.sampled_from(sorted(fits.d_qk, reverse=True)))
    share = most_elements(max_work) // 8  # for q and out; half of all is for kv, so that long rows have keys to name
    most_kv = min(MOST_KEYS, 4 * share // d_qk)
    s_q, h_q, topk = draw(_shapes(max_work, share // (d_qk + D_V), fits))
    rows, values = (draw(st.sampled_from(fits.allowed(*pair))) for pair in (("rows", ROWS), ("values", VALUES)))
    tail = draw(st.sampled_from(fits.allowed("tail", TAILS)))
    pad_rows = draw(_zero_or(st.integers(0, s_q)))
    s_kv = draw(sizes(most_kv, (*WIDTHS, *around(13, 17))))
    requests = "-"
    if rows == "causal":
        requests, keys = draw(_requests(s_q - pad_rows, most_kv))
        s_kv = max(s_kv, keys)
    dtype = draw(st.sampled_from(fits.dtypes))
    any_scale = dtype == "fp8" and values in ("normal", "large", "poison")
    case = SparsePrefillCase(
        dtype=dtype, scales=draw(st.sampled_from(fits.allowed("scales", SCALES))) if any_scale else "pow2",
        s_q=s_q, s_kv=s_kv, h_q=h_q, d_qk=d_qk, topk=topk, rows=rows, requests=requests,
        holes=draw(st.sampled_from((0.0, 0.02, 0.5, 1.0)) | _rounded(0, 1, 1000)),
        lead=draw(_zero_or(sizes(topk))),
        order=draw(st.sampled_from(ORDERS)), tail=tail, values=values,
        peak=draw(st.sampled_from((7.0, 0.0, 80.0)) | _rounded(0, 80, 10)) if values == "peaked" else 7.0,
        peak_at=draw(st.sampled_from(("first", "middle", "last"))) if values == "peaked" else "first",
        sink=draw(st.sampled_from(fits.allowed("sink", SINKS))),
        sm_scale=draw(st.just(0.0) | _rounded(0.01, 1, 1000)) * (values != "integer"),
        index_topk=draw(_zero_or(sizes(topk))), pad_rows=pad_rows,
        # Metadata that the guard rejects leaves no arm that can tell a live tail from valid entries.
        metadata_rows=draw(_zero_or(sizes(2 * s_q))) * (tail != "live"), seed=draw(st.integers(0, (1 << 31) - 1)))
    untaken = fits.arms and all(fits.refusal(arm, case) for arm in fits.arms)  # metadata falls back to none, which refuses more
    return dataclasses.replace(case, metadata_rows=0) if untaken else case


@st.composite
def _shapes(draw: st.DrawFn, max_work: int, most_pairs: int, fits: Fits) -> tuple[int, int, int]:
    """s_q, h_q and topk with s_q * h_q * topk <= max_work and s_q * h_q <= most_pairs. Whichever is drawn first may be large."""
    least = {"s_q": 1, "h_q": min(fits.heads or (1,)), "topk": min(fits.topk_in or (fits.topk_multiple,))}
    for name in draw(st.sampled_from((("topk", "h_q", "s_q"), ("s_q", "topk", "h_q"), ("h_q", "s_q", "topk")))):
        most = max_work * least[name] // math.prod(least.values())
        if name == "topk":
            least[name] = draw(_widths(fits, most))
            continue
        most = min(most, most_pairs * least[name] // (least["s_q"] * least["h_q"]))
        heads = _one_of(fits.heads, most) if fits.heads else sizes(min(128, most), HEADS)
        least[name] = draw(heads if name == "h_q" else sizes(min(MOST_ROWS, most), (*FEW, *BLOCKS, *around(8, 13))))
    return least["s_q"], least["h_q"], least["topk"]


@st.composite
def _requests(draw: st.DrawFn, rows: int, most_keys: int) -> tuple[str, int]:
    """`requests` for a causal batch of `rows` query rows, and the kv rows that they need, at most most_keys if rows is no more."""
    if rows == 0 or draw(st.booleans()):
        return "-", rows
    parts, keys = [], 0
    lengths = draw(_parts(rows))
    room = max(0, most_keys - rows) // len(lengths)
    for qo_len in lengths:
        cached = draw(_zero_or(sizes(room, WIDTHS))) if room else 0
        parts.append(f"{qo_len}/{qo_len + cached}" if cached else f"{qo_len}")
        keys += qo_len + cached
    return "+".join(parts), keys


@st.composite
def _parts(draw: st.DrawFn, total: int, most: int = 8) -> list[int]:
    """`total` as a sum of positive integers, at most `most` of them: one in half of the draws, else anything from 2 on."""
    most = min(total, most)
    if most == 1 or draw(st.booleans()):
        return [total]
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), min_size=1, max_size=most - 1)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, total])]


@st.composite
def indexer_topk_cases(draw: st.DrawFn, max_work: int = 1 << 20, fits: Fits = ANY) -> IndexerTopkCase:
    """Any valid case with num_q * s_kv * h <= max_work and at most most_elements(max_work) elements."""
    h, num_q, s_kv = draw(_row_and_key_counts(max_work, fits))
    requests, rows, keys = draw(_indexer_requests(num_q, s_kv, fits.requests_max or 8))
    several = "+" in requests
    patterns = tuple(values for values in indexer_topk.VALUES if values != "shifted" or several)
    values = draw(st.sampled_from(fits.allowed("values", patterns + ("shifted",) * (3 * several))))
    scales = draw(st.sampled_from(fits.allowed("scales", indexer_topk.SCALES)))
    return IndexerTopkCase(
        requests=requests, topk=draw(_choices(fits, num_q, s_kv, max_work)), h=h, window=draw(st.sampled_from(indexer_topk.WINDOWS)),
        span=draw(_zero_or(sizes(s_kv, KEYS))), order=draw(st.sampled_from(indexer_topk.ORDERS)),
        empty=draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))), pad_rows=num_q - rows, pad_keys=s_kv - keys, values=values,
        ties=draw(st.sampled_from(fits.allowed("ties", indexer_topk.TIES))), weights=draw(st.sampled_from(indexer_topk.WEIGHTS)),
        scales="pow2" if values in ("bucketedge", "lastbits") else scales,
        **draw(_of_values(values)), seed=draw(st.integers(0, (1 << 31) - 1)))


def _of_values(values: str) -> st.SearchStrategy[dict[str, Any]]:
    """The keys that only some patterns of values read: for others they keep their default."""
    share = st.sampled_from((0.05, 0.0, 0.5, 0.9, 0.99, 1.0)) | _rounded(0, 1, 1000)
    sigma = st.sampled_from((4.0, 1.0, 5.0)) | _rounded(0, 64, 10)
    keys: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "plateau": {"share": share, "at": st.sampled_from(("-", "first", "last"))},
        "planted": {"at": st.just("-") | st.sets(st.sampled_from(indexer_topk.PLACES), min_size=1).map(lambda at: "+".join(sorted(at)))},
        "latehot": {"share": share, "sigma": sigma}, "nan": {"share": share}, "inf": {"share": share},
        "drift": {"sigma": sigma}, "shifted": {"sigma": sigma}, "nearflat": {"ulps": st.just(3) | st.integers(1, 64)}}
    return st.fixed_dictionaries(keys.get(values, {}))


@st.composite
def _row_and_key_counts(draw: st.DrawFn, max_work: int, fits: Fits) -> tuple[int, int, int]:
    """h, num_q and s_kv with num_q * s_kv * h <= max_work. Keys first or rows first, so that either may be large."""
    quarter = most_elements(max_work) // 4  # for q; half of all is for keys, a quarter for what is chosen
    least, most = max(1, fits.keys[0]), min(MOST_KEYS, 2 * quarter // (HEAD_DIM + 1), fits.keys[1])
    h = draw(_one_of(fits.heads or (32, 64), max_work))
    room, most_rows = max(1, max_work // h), min(MOST_ROWS, quarter // ((HEAD_DIM + 1) * h))

    def keys(rows: int) -> st.SearchStrategy[int]:
        high = min(most, room // rows)
        anything = sizes(high, KEYS, least, fits.keys_multiple)
        return anything | sizes(high, KEYS, LONG, fits.keys_multiple) if high > LONG > least else anything

    def rows(keys: int) -> st.SearchStrategy[int]:
        return sizes(min(most_rows, max(1, room // keys)), (*FEW, *around(4, 13)))

    if draw(st.booleans()):
        num_q = draw(rows(least))
        return h, num_q, draw(keys(num_q))
    s_kv = draw(keys(1))
    return h, draw(rows(s_kv)), s_kv


def _choices(fits: Fits, num_q: int, s_kv: int, max_work: int) -> st.SearchStrategy[int]:
    """topk: anything that the kernel takes, or about as many keys as there are."""
    most = min(2048, most_elements(max_work) // (4 * num_q))
    near = [topk for topk in (s_kv - 1, s_kv, s_kv + 1)
            if 1 <= topk <= min(most, fits.topk_max or most) and topk % fits.topk_multiple == 0]
    if fits.topk_in or not near:
        return _widths(fits, most)
    return _widths(fits, most) | st.sampled_from(near)


@st.composite
def _indexer_requests(draw: st.DrawFn, num_q: int, s_kv: int, most: int) -> tuple[str, int, int]:
    """`requests`, at most `most`, for at most num_q rows and s_kv keys, and the rows and keys that they have. What is left is padding."""
    rows = draw(sizes(min(num_q, s_kv), FEW) | st.just(min(num_q, s_kv)))
    cached = draw(st.just(s_kv - rows) | st.integers(0, s_kv - rows))
    lengths = draw(_parts(rows, most))
    cuts = len(lengths) - 1
    shares = sorted(draw(st.lists(st.integers(0, cached), min_size=cuts, max_size=cuts)))
    parts = [f"{length}/{length + high - low}" for length, low, high in zip(lengths, [0, *shares], [*shares, cached])]
    return "+".join(parts), rows, rows + cached
