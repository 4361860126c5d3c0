"""The sparse_prefill case: sparse MLA prefill over given indices, with or without a topk_length.

One line of text is the whole problem; tensors, lengths and expected values are derived from it (see inputs.py).
"""
from __future__ import annotations

import dataclasses
import math
import re
from typing import ClassVar

from cases.text import CaseError, check_fields, choice, format_record, integer, integers, real, words

FAMILY = "sparse_prefill"
D_V = 512  # V is the first 512 columns of a kv row
SCORE_COLUMNS = 64  # the last 64 columns of d_qk carry the scores in the patterns that plan them

ROWS = ("full", "half", "short", "ramp", "ragged", "allpad", "mixed", "causal")
ORDERS = ("shuffled", "ascending", "descending")
TAILS = ("pad", "wild", "live")
VALUES = ("normal", "peaked", "flat", "integer", "large", "poison")
SINKS = ("none", "normal", "mixed")
SCALES = ("pow2", "any")

_REQUEST = re.compile(r"[1-9]\d{0,8}(/[1-9]\d{0,8})?")


def _is_requests(text: str) -> bool:
    return text == "-" or all(_REQUEST.fullmatch(part) for part in text.split("+"))


def _real_or_auto(default: float) -> float:
    """sm_scale: 0 stands for `auto`, the value pattern's own scale."""
    return real(default, 0.0, 1e4)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class SparsePrefillCase:
    """One sparse-prefill problem. Every field is a key of the text form; the default is what a left-out key means."""

    family: ClassVar[str] = FAMILY
    dtype: str = choice("bf16", ("bf16", "fp8"))
    """bf16, or fp8: e4m3 q and kv with per-tensor scales, the q8kv8 layout."""
    s_q: int = integer(64, 1, 1 << 20)
    """Query rows."""
    s_kv: int = integer(1024, 1, 1 << 24)
    """Key/value rows."""
    h_q: int = integer(64, 1, 1024)
    """Query heads; one kv head serves them all (MLA)."""
    d_qk: int = integers(576, (512, 576))
    """Columns of q and kv; d_v is always 512."""
    topk: int = integer(256, 1, 1 << 14)
    """Width of indices."""
    rows: str = choice("full", ROWS)
    """How many entries of a row are valid; see rows.py."""
    requests: str = words("-", "qo_len[/kv_len] joined by '+', for example 100/300+17, or - for one request", _is_requests)
    """Only with rows=causal: request r attends its own kv rows, row i of it the first kv_len - qo_len + i + 1."""
    holes: float = real(0.0, 0.0, 1.0)
    """Fraction of the entries inside the valid range that become -1."""
    lead: int = integer(0, 0, 1 << 14)
    """The first `lead` entries of every row become -1 (a masked first block)."""
    order: str = choice("shuffled", ORDERS)
    """Order of a row's indices."""
    tail: str = choice("pad", TAILS)
    """What stands past the valid range: -1, out-of-range values up to +-2^31, or live indices."""
    values: str = choice("normal", VALUES)
    """What q and kv hold; see values.py."""
    peak: float = real(7.0, 0.0, 80.0)
    """values=peaked: nats by which one key stands above the rest."""
    peak_at: str = choice("first", ("first", "middle", "last"))
    """values=peaked: where in the row that key stands."""
    scales: str = choice("pow2", SCALES)
    """fp8: per-tensor scales that are powers of two, or not. The patterns of exact values have powers of two only."""
    sink: str = choice("none", SINKS)
    """attn_sink: not given, bell-shaped, or mixed with -inf, +inf and large values."""
    sm_scale: float = _real_or_auto(0.0)
    """Softmax scale; 0 means the pattern's own: d_qk^-0.5, or ln(2)/16 for values=integer."""
    index_topk: int = integer(0, 0, 1 << 14)
    """Entries the indexer may choose, at most topk (the padded width); 0 means topk."""
    pad_rows: int = integer(0, 0, 1 << 20)
    """The last `pad_rows` query rows are data-parallel padding: no valid entry."""
    metadata_rows: int = integer(0, 0, 1 << 20)
    """Rows of the metadata lengths; 0 means s_q. Another number makes the serving guard hand over none."""
    seed: int = integer(0, 0, (1 << 31) - 1)
    """Seeds every draw."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.index_topk > self.topk:
            raise CaseError(f"index_topk={self.index_topk}: allowed is 0 to topk={self.topk}")
        if self.lead > self.topk:
            raise CaseError(f"lead={self.lead}: allowed is 0 to topk={self.topk}")
        if self.pad_rows > self.s_q:
            raise CaseError(f"pad_rows={self.pad_rows}: allowed is 0 to s_q={self.s_q}")
        if self.requests != "-" and self.rows != "causal":
            raise CaseError(f"requests={self.requests}: allowed only with rows=causal, not rows={self.rows}")
        if self.values == "integer" and self.sm_scale:
            raise CaseError(f"sm_scale={self.sm_scale!r}: values=integer is exact only with its own scale, leave it out")
        if self.scales == "any" and (self.dtype != "fp8" or self.values not in ("normal", "large", "poison")):
            raise CaseError("scales=any: allowed only with dtype=fp8 and values=normal, large or poison")
        if self.tail == "live" and self.metadata_rows not in (0, self.s_q):
            raise CaseError(f"metadata_rows={self.metadata_rows}: with tail=live allowed is 0 or s_q, so that the length is handed over")
        if 0 < self.sm_scale < 1e-6:
            raise CaseError(f"sm_scale={self.sm_scale!r}: allowed is 0 (the pattern's own) or a number from 1e-06 to 10000")
        if self.values == "peaked" and self.peak_value > 28:  # 448 times the smallest fp8 scale of the pattern (values.py)
            least = self.peak / (SCORE_COLUMNS * 28**2)
            raise CaseError(f"sm_scale={self.sm_scale!r}: with values=peaked,peak={self.peak!r} allowed is at least {least:.3g}")
        if self.rows == "causal":
            self._check_requests()

    def _check_requests(self) -> None:
        queries = sum(qo for qo, _ in self.request_lengths)
        keys = sum(kv for _, kv in self.request_lengths)
        short = next(((qo, kv) for qo, kv in self.request_lengths if kv < qo), None)
        if short:
            raise CaseError(f"requests={self.requests}: kv_len {short[1]} is less than qo_len {short[0]}")
        if queries != self.s_q - self.pad_rows:
            raise CaseError(f"requests={self.requests}: its {queries} query rows are not "
                            f"s_q - pad_rows = {self.s_q - self.pad_rows}")
        if keys > self.s_kv:
            raise CaseError(f"s_kv={self.s_kv}: allowed is at least {keys}, the kv rows of the requests")

    @property
    def request_lengths(self) -> tuple[tuple[int, int], ...]:
        """(qo_len, kv_len) of each request."""
        if self.requests == "-":
            rows = self.s_q - self.pad_rows
            return ((rows, rows),)
        pairs = (part.partition("/") for part in self.requests.split("+"))
        return tuple((int(qo), int(kv or qo)) for qo, _, kv in pairs)

    @property
    def scale(self) -> float:
        """sm_scale as a number. In values=integer, 16 units of score are ln 2, so that P is a power of two."""
        if self.sm_scale:
            return self.sm_scale
        return math.log(2) / 16 if self.values == "integer" else float(self.d_qk**-0.5)

    @property
    def peak_value(self) -> float:
        """values=peaked: x, so that SCORE_COLUMNS products of x * x, scaled, are `peak` nats (before the dtype rounds x)."""
        return math.sqrt(self.peak / (SCORE_COLUMNS * self.scale))

    @property
    def limit(self) -> int:
        """index_topk as a number: the most entries of a row that can be valid."""
        return self.index_topk or self.topk

    @property
    def exact(self) -> bool:
        """Whether P is a power of two and V small integers, so that out is known to one ULP (values.py)."""
        return self.values in ("flat", "integer")

    @property
    def work(self) -> float:
        """Floating-point operations of one launch that skips nothing: Q K^T over d_qk columns, P V over 512."""
        return 2.0 * self.s_q * self.h_q * self.topk * (self.d_qk + D_V)

    @property
    def elements(self) -> int:
        """Elements of q, kv, indices and out: what a case takes in memory, whatever its work."""
        return self.s_q * self.h_q * (self.d_qk + D_V) + self.s_kv * self.d_qk + self.s_q * self.topk

    def __str__(self) -> str:
        return format_record(FAMILY, self)
