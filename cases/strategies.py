"""Hypothesis strategies for case records: they draw the record only, never a tensor. Needs hypothesis, so no other module imports it."""
from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from cases import indexer_topk
from cases.indexer_topk import IndexerTopkCase
from cases.sparse_prefill import ORDERS, ROWS, SCALES, SINKS, TAILS, VALUES, SparsePrefillCase

BORDERS = (1, 63, 64, 65, 127, 128, 129)
"""Around one 64-key block and one pair of them, where kernels go wrong."""
WIDTHS = (*BORDERS, 192, 255, 256, 257, 384, 512)


def sizes(most: int, borders: tuple[int, ...] = BORDERS) -> st.SearchStrategy[int]:
    """Integers from 1 to `most`, half of them a border."""
    return st.sampled_from([border for border in borders if border <= most]) | st.integers(1, most)


def _zero_or(other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """0 (the default of a rarely used key) in half of the draws."""
    return st.just(0) | other


@st.composite
def sparse_prefill_cases(draw: st.DrawFn, max_work: int = 1 << 16) -> SparsePrefillCase:
    """Any valid case with s_q * h_q * topk <= max_work, topk <= 512 and s_kv of the order of topk, so that a CPU makes it fast.

    sm_scale stays where scores are neither all equal nor overflow: from 0.01 to 1.
    """
    topk = draw(sizes(min(512, max_work), WIDTHS))
    h_q = draw(sizes(min(128, max_work // topk), (1, 2, 16, 64, 128)))
    s_q = draw(sizes(min(512, max_work // (topk * h_q))))
    rows, values, tail = draw(st.sampled_from(ROWS)), draw(st.sampled_from(VALUES)), draw(st.sampled_from(TAILS))
    pad_rows = draw(_zero_or(st.integers(0, s_q)))
    s_kv = draw(sizes(2048, WIDTHS))
    requests = "-"
    if rows == "causal":
        requests, keys = draw(_requests(s_q - pad_rows))
        s_kv = max(s_kv, keys)
    dtype = draw(st.sampled_from(("bf16", "fp8")))
    any_scale = dtype == "fp8" and values in ("normal", "large", "poison")
    return SparsePrefillCase(
        dtype=dtype, scales=draw(st.sampled_from(SCALES)) if any_scale else "pow2",
        s_q=s_q, s_kv=s_kv, h_q=h_q, d_qk=draw(st.sampled_from((576, 512))),
        topk=topk, rows=rows, requests=requests,
        holes=draw(st.sampled_from((0.0, 0.02, 0.5, 1.0)) | st.floats(0.0, 1.0)),
        lead=draw(_zero_or(sizes(topk))),
        order=draw(st.sampled_from(ORDERS)), tail=tail, values=values,
        peak=draw(st.just(7.0) | st.floats(0.0, 80.0)), peak_at=draw(st.sampled_from(("first", "middle", "last"))),
        sink=draw(st.sampled_from(SINKS)),
        sm_scale=0.0 if values == "integer" else draw(st.just(0.0) | st.floats(0.01, 1.0)),
        index_topk=draw(_zero_or(sizes(topk))), pad_rows=pad_rows,
        # Metadata that the guard rejects leaves no arm that can tell a live tail from valid entries.
        metadata_rows=0 if tail == "live" else draw(_zero_or(sizes(2 * s_q))), seed=draw(st.integers(0, (1 << 31) - 1)))


@st.composite
def _requests(draw: st.DrawFn, rows: int) -> tuple[str, int]:
    """`requests` for a causal batch of `rows` query rows, and the kv rows that they need."""
    if rows == 0 or draw(st.booleans()):
        return "-", rows
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=3))) if rows > 1 else []
    parts, keys = [], 0
    for start, end in zip([0, *cuts], [*cuts, rows]):
        qo_len, cached = end - start, draw(_zero_or(sizes(600)))
        parts.append(f"{qo_len}/{qo_len + cached}" if cached else f"{qo_len}")
        keys += qo_len + cached
    return "+".join(parts), keys


KEYS = (1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 4099)
"""Around tiles of 64 to 256 keys and the usual topk."""
FEW = (1, 2, 3, 4, 5, 7, 8, 9, 13)
"""Around blocks of 4 and 8 rows."""


@st.composite
def indexer_topk_cases(draw: st.DrawFn, max_work: int = 1 << 20) -> IndexerTopkCase:
    """Any valid case with num_q * s_kv * h <= max_work and at most 64 rows and 4100 keys, so that a CPU makes it fast."""
    h = draw(st.sampled_from((32, 64)) if max_work >= 64 else st.just(32))
    most = max(1, max_work // h)
    s_kv = draw(sizes(min(4100, most), KEYS))
    num_q = draw(sizes(min(64, max(1, most // s_kv)), FEW))
    requests, rows, keys = draw(_indexer_requests(num_q, s_kv))
    values = draw(st.sampled_from([v for v in indexer_topk.VALUES if v != "shifted" or "+" in requests]))
    at = st.just("-")
    if values == "plateau":
        at = st.sampled_from(("-", "first", "last"))
    elif values == "planted":
        at = at | st.sets(st.sampled_from(indexer_topk.PLACES), min_size=1).map(lambda places: "+".join(sorted(places)))
    share = st.sampled_from((0.0, 0.05, 0.5, 0.9, 0.99, 1.0)) | st.floats(0.0, 1.0)
    return IndexerTopkCase(
        requests=requests, topk=draw(sizes(2048, KEYS[:-2])), h=h, window=draw(st.sampled_from(indexer_topk.WINDOWS)),
        span=draw(_zero_or(sizes(s_kv, KEYS))), order=draw(st.sampled_from(indexer_topk.ORDERS)),
        empty=draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))), pad_rows=num_q - rows, pad_keys=s_kv - keys, values=values,
        ties=draw(st.sampled_from(indexer_topk.TIES)), weights=draw(st.sampled_from(indexer_topk.WEIGHTS)),
        scales="pow2" if values == "bucketedge" else draw(st.sampled_from(indexer_topk.SCALES)),
        share=draw(share), sigma=draw(st.sampled_from((1.0, 4.0, 5.0)) | st.floats(0.0, 64.0)), ulps=draw(st.integers(1, 64)),
        at=draw(at), seed=draw(st.integers(0, (1 << 31) - 1)))


@st.composite
def _indexer_requests(draw: st.DrawFn, num_q: int, s_kv: int) -> tuple[str, int, int]:
    """`requests` for at most num_q rows and s_kv keys, and the rows and keys that they have. What is left is padding."""
    rows = draw(sizes(min(num_q, s_kv), FEW) | st.just(min(num_q, s_kv)))
    cached = draw(st.just(s_kv - rows) | st.integers(0, s_kv - rows))
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1), max_size=3))) if rows > 1 else []
    shares = sorted(draw(st.lists(st.integers(0, cached), min_size=len(cuts), max_size=len(cuts))))
    parts = []
    for start, end, low, high in zip([0, *cuts], [*cuts, rows], [0, *shares], [*shares, cached]):
        parts.append(f"{end - start}/{end - start + high - low}")
    return "+".join(parts), rows, rows + cached
