"""The indexer_topk case: for each query row, the topk keys of its window with the highest indexer scores.

    score(r, j) = kv_scale[j] * sum_h weights[r, h] * max(0, <q[r, h], k[j]>),   ks[r] <= j < ke[r]

One line of text is the whole problem; tensors, windows and expected values are derived from it (see indexer_inputs.py).
"""
from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from cases.text import CaseError, check_fields, choice, format_record, integer, integers, real, words

FAMILY = "indexer_topk"
HEAD_DIM = 128
ACCUMULATE = ("fp32", "fp8")  # how a kernel may sum a dot product: fp32, or the 14 bits of Hopper's fp8 tensor core
MOST_KEYS = 1 << 24
MOST_ROWS = 1 << 20

VALUES = ("normal", "integer", "digits", "lastbits", "flat", "nearflat", "plateau", "ascending", "descending", "bucketedge",
          "drift", "latehot", "shifted", "outlier", "planted", "nan", "inf")
TIES = ("none", "pairs", "runs", "far", "all")
WEIGHTS = ("positive", "mixed", "negative")
SCALES = ("pow2", "any")
ORDERS = ("ascending", "descending", "shuffled")
WINDOWS = ("causal", "full")
PLACES = ("first", "last", "tile", "ks", "ke")

_REQUEST = re.compile(r"[1-9]\d{0,8}(/[1-9]\d{0,8})?")


def _is_requests(text: str) -> bool:
    return all(_REQUEST.fullmatch(part) for part in text.split("+"))


def _is_places(text: str) -> bool:
    places = text.split("+")
    return text == "-" or (set(places) <= set(PLACES) and len(set(places)) == len(places))


@dataclasses.dataclass(frozen=True)
class IndexerTopkCase:
    """One indexer top-k problem. Every field is a key of the text form; the default is what a left-out key means."""

    family: ClassVar[str] = FAMILY
    requests: str = words("8/1024", "rows[/kv_len] joined by '+', for example 16/8192+8/4096", _is_requests)
    """Query rows and keys of each request; its rows are its last positions. Their keys lie one request after the other."""
    topk: int = integer(2048, 1, 1 << 14)
    """Keys to choose for each row."""
    h: int = integers(32, (32, 64))
    """Indexer heads; the head dimension is always 128."""
    window: str = choice("causal", WINDOWS)
    """causal: a row sees its request's keys up to its own position; full: all keys of its request."""
    span: int = integer(0, 0, MOST_KEYS)
    """A row sees at most its last `span` keys, so that its window begins inside its request; 0 means no such limit."""
    order: str = choice("ascending", ORDERS)
    """Order of a request's rows by position: unless ascending, the ends of the windows go back and forth."""
    empty: float = real(0.0, 0.0, 1.0)
    """Fraction of the rows whose window is empty (ke = ks, inside the gathered keys)."""
    pad_rows: int = integer(0, 0, MOST_ROWS)
    """Rows after the last request, with ks = ke = 0."""
    pad_keys: int = integer(0, 0, MOST_KEYS)
    """Keys after the last request, which no row may see and which would score best."""
    values: str = choice("normal", VALUES)
    """What q, k, kv_scale and weights hold; see indexer_values.py."""
    ties: str = choice("none", TIES)
    """Keys that are copies of another: of the one before (pairs), of 64 in a row the first (runs), the second half of a request
    of its first half (far), every key of the first one (all)."""
    weights: str = choice("positive", WEIGHTS)
    """Signs of the head weights."""
    scales: str = choice("pow2", SCALES)
    """kv_scale: powers of two, or not."""
    share: float = real(0.05, 0.0, 1.0)
    """plateau: share of the keys that score exactly 0; latehot: share of the keys at the end that are hot; nan, inf: share of the
    keys with such a scale."""
    sigma: float = real(4.0, 0.0, 64.0)
    """drift: how far scores rise along the row, in their own standard deviations; latehot, shifted: how hot the hot keys are."""
    ulps: int = integer(3, 1, 64)
    """nearflat: scores differ by up to that many ULPs of kv_scale."""
    at: str = words("-", f"- or some of {', '.join(PLACES)} joined by '+'", _is_places)
    """planted: where the winners stand, - for all of these: a request's first and last key, both sides of boundaries of 64 keys, a
    row's first key (ks) and its last (ke). plateau: where its positive scores stand, first or last, - for anywhere."""
    seed: int = integer(0, 0, (1 << 31) - 1)
    """Seeds every draw."""

    def __post_init__(self) -> None:
        check_fields(self)
        short = next(((rows, keys) for rows, keys in self.request_lengths if keys < rows), None)
        if short:
            raise CaseError(f"requests={self.requests}: kv_len {short[1]} is less than rows {short[0]}")
        if self.num_q > MOST_ROWS:
            raise CaseError(f"requests={self.requests},pad_rows={self.pad_rows}: {self.num_q} rows, allowed are {MOST_ROWS}")
        if self.s_kv > MOST_KEYS:
            raise CaseError(f"requests={self.requests},pad_keys={self.pad_keys}: {self.s_kv} keys, allowed are {MOST_KEYS}")
        if self.values == "shifted" and len(self.request_lengths) < 2:
            raise CaseError(f"requests={self.requests}: values=shifted needs two or more, the first scores above the others")
        if self.values in ("bucketedge", "lastbits") and self.scales == "any":
            raise CaseError(f"scales=any: values={self.values} is exact only with scales=pow2")
        allowed = {"planted": PLACES, "plateau": ("first", "last")}.get(self.values, ())
        if self.at != "-" and not (set(self.at.split("+")) <= set(allowed) and (self.values == "planted" or "+" not in self.at)):
            some = "some of " if self.values == "planted" else ""
            raise CaseError(f"at={self.at}: with values={self.values} allowed is -{f' or {some}' if allowed else ''}{', '.join(allowed)}")

    @property
    def request_lengths(self) -> tuple[tuple[int, int], ...]:
        """(rows, kv_len) of each request."""
        pairs = (part.partition("/") for part in self.requests.split("+"))
        return tuple((int(rows), int(keys or rows)) for rows, _, keys in pairs)

    @property
    def bounds(self) -> tuple[tuple[int, int, int, int], ...]:
        """(row0, row1, kv0, kv1) of each request: its rows [row0, row1), its gathered keys [kv0, kv1)."""
        found, row, key = [], 0, 0
        for rows, keys in self.request_lengths:
            found.append((row, row + rows, key, key + keys))
            row, key = row + rows, key + keys
        return tuple(found)

    @property
    def num_q(self) -> int:
        """Query rows, padding included."""
        return sum(rows for rows, _ in self.request_lengths) + self.pad_rows

    @property
    def s_kv(self) -> int:
        """Gathered keys of all requests, padding included."""
        return sum(keys for _, keys in self.request_lengths) + self.pad_keys

    @property
    def places(self) -> tuple[str, ...]:
        """`at` as a tuple; of planted, - stands for all places."""
        if self.at == "-":
            return PLACES if self.values == "planted" else ()
        return tuple(self.at.split("+"))

    @property
    def exact(self) -> tuple[str, ...]:
        """In which accumulations (fp32, fp8) every sum of every right kernel is exact, so that scores have no error at all.

        docs/budgets.md proves it. The ramps need 20 bits, which fp32 has and Hopper's fp8 accumulator has not.
        """
        if self.values == "digits":
            return ACCUMULATE
        if self.scales != "pow2":
            return ()
        if self.values in ("integer", "lastbits", "plateau", "nan", "inf", "bucketedge"):
            return ACCUMULATE
        if self.values in ("ascending", "descending"):
            return ACCUMULATE if max(keys for _, keys in self.request_lengths) <= 4096 else ("fp32",)
        return ()

    @property
    def work(self) -> float:
        """Floating-point operations of one launch: each row's dot products with all keys of its request."""
        return 2.0 * HEAD_DIM * self.h * sum(rows * keys for rows, keys in self.request_lengths)

    @property
    def elements(self) -> int:
        """Elements of q, k, their scales and weights, and indices: what a case takes in memory, whatever its work."""
        return self.num_q * self.h * (HEAD_DIM + 1) + self.s_kv * (HEAD_DIM + 1) + self.num_q * self.topk

    def __str__(self) -> str:
        return format_record(FAMILY, self)
