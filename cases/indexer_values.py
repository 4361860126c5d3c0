"""What q, k, kv_scale and weights of an indexer_topk case hold: integers from counter.py, turned into floats by power-of-two scaling only.

pattern      scores along a row                                              what it shows
normal       random                                                          the ordinary case
integer      random, every sum exact                                         one wrong key of millions
digits       random, exact, weights (scales=pow2) or scales (any) of 13   weights, scales or scores rounded to 16 bits
             and 12 significant bits
lastbits     2^23 and a whole number below 4096, all different, exact        a selection that leaves out the last bits of fp32
flat         equal: one K row                                                a span of 0, everything in one bucket
nearflat     equal but for 0..ulps ULPs of kv_scale                          a scan that scores an ULP off its sample
plateau      exactly 0 for `share` of the keys (ReLU), exact                 one bucket holds most keys
ascending    strictly rising, exact                                          every key beats the calibration sample
descending   strictly falling, exact                                         the sample holds all winners
bucketedge   on 256 equal steps from lowest to highest, or 1/16 step off     a key exactly on a bucket's edge; exact
drift        random, mean rising by `sigma` standard deviations              a sample that is not typical
latehot      random, the last `share` of the keys `sigma` above the rest     the same, all at once
shifted      random, keys of request 0 `sigma` above the others              one calibration for several requests
outlier      random, one key of about +-1e6 among a request's first 1024     a range that one key stretches
planted      random, winners `at` named places, far above all others         off-by-one windows and tiles
nan, inf     as integer; `share` of the scales and one row's weight in 16    NaN never chosen, +inf first, -inf last
             are NaN, or infinite

Where a pattern steers scores, head 0 does it alone: its q is zero but for the last five columns, in which every other head is zero,
and k holds five base-16 digits of the key's level there. So scores are random parts plus weights[0] * level / 256.
"""
from __future__ import annotations

import dataclasses
import math

import torch

from cases.counter import bell, below, bits
from cases.indexer_topk import HEAD_DIM, IndexerTopkCase

_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements made at a time
DIGITS = 5
PLAIN = HEAD_DIM - DIGITS  # columns that steered patterns leave to random parts
_DIGIT_WEIGHTS = (256.0, 16.0, 1.0, 2.0**-4, 2.0**-8)  # q of head 0; all are e4m3 numbers
TOP_LEVEL = (1 << 20) - 1
_OUTLIER_LEVEL = 15 << 16  # one digit: 3840, times a scale of 256

EXACT = ("integer", "plateau", "nan", "inf")  # small integers all over, weights and scales powers of two
STEERED = ("ascending", "descending", "bucketedge", "drift", "latehot", "shifted", "outlier", "planted")
_SILENT = ("ascending", "descending", "bucketedge")  # no random part: k is zero outside the level
_SCALED = ("normal", "digits", *EXACT)  # a scale of its own for every key
_BASE_WEIGHT = 2.0**11  # lastbits: times head 0's 4096 it is 2^23, above which fp32 holds whole numbers and no more
_STEP = 2.0**-6  # weight of head 0 where levels are exact
PLANT_SIGMA = 32.0  # weights[0] * TOP_LEVEL / 256 in standard deviations: winners stand 16 to 32 above, random parts reach 12
_PAD_SCALE = 2.0**12


@dataclasses.dataclass(frozen=True)
class IndexerValues:
    """q_fp8 e4m3 [num_q, h, 128], k_fp8 e4m3 [s_kv, 128], kv_scale fp32 [s_kv], weights fp32 [num_q, h]."""

    q_fp8: torch.Tensor
    k_fp8: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Some keys of one request: `at` are their positions in it, those of the originals where they are copies (ties)."""

    request: int
    kv0: int
    length: int
    at: torch.Tensor

    @property
    def absolute(self) -> torch.Tensor:
        return self.at + self.kv0


def make_indexer_values(case: IndexerTopkCase, device: torch.device) -> IndexerValues:
    """Fill q, k, kv_scale and weights."""
    step = _CHUNK[device.type] // HEAD_DIM
    q = torch.empty(case.num_q, case.h, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device)
    for start in range(0, case.num_q * case.h, step):
        rows = torch.arange(start, min(start + step, case.num_q * case.h), device=device)
        q.view(-1, HEAD_DIM)[start : start + len(rows)] = _q_rows(case, rows).to(torch.float8_e4m3fn)
    k = torch.empty(case.s_kv, HEAD_DIM, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(case.s_kv, dtype=torch.float32, device=device)
    for number, (_, _, kv0, kv1) in enumerate(case.bounds):
        for start in range(kv0, kv1, step):
            part = torch.arange(start - kv0, min(start + step, kv1) - kv0, device=device)
            keys = _Keys(number, kv0, kv1 - kv0, _originals(case, part, kv1 - kv0))
            k[start : start + len(part)] = _k_rows(case, keys).to(torch.float8_e4m3fn)
            scale[start : start + len(part)] = _scales(case, keys)
    _fill_padding(case, k, scale)
    return IndexerValues(q, k, scale, _weights(case, device))


def score_sigma(case: IndexerTopkCase) -> float:
    """Standard deviation of a steered pattern's random part over the keys, before kv_scale.

    Each of h - 1 heads adds a weight of variance 1/48 times relu of a normal number, whose variance is (1/2 - 1/(2 pi)) times that of
    PLAIN products of two numbers of variance 4/3.
    """
    return math.sqrt((case.h - 1) / 48 * PLAIN * 16 / 9 * (0.5 - 0.5 / math.pi))


def _q_rows(case: IndexerTopkCase, rows: torch.Tensor) -> torch.Tensor:
    """fp32 [len(rows), 128]; a row here is one (query, head) pair."""
    if case.values == "plateau":
        return below(bits(case.seed, "q", rows, HEAD_DIM), 5).float()
    if case.values in EXACT:
        return below(bits(case.seed, "q", rows, HEAD_DIM), 9).float() - 4
    if case.values == "digits":  # eight columns of -1 or 1: no dot product is above 8
        draw = bits(case.seed, "q", rows, HEAD_DIM)
        first = below(bits(case.seed, "q columns", rows, 1), HEAD_DIM // 8) * 8
        column = torch.arange(HEAD_DIM, device=rows.device)
        return torch.where((column >= first) & (column < first + 8), 1.0 - 2.0 * (draw & 1), 0.0)
    if case.values == "lastbits":  # head 0 finds the same in all keys, head 1 the last three digits of the key's level
        head = (rows % case.h)[:, None]
        mine = [torch.tensor([0.0] * PLAIN + digits, device=rows.device) for digits in ([256.0, 0, 0, 0, 0], [0, 0, 256.0, 16.0, 1.0])]
        return torch.where(head == 0, mine[0], torch.where(head == 1, mine[1], 0.0))
    q = bell(case.seed, "q", rows, HEAD_DIM).float() * 2.0**-15
    if case.values in STEERED:
        steers = (rows % case.h == 0)[:, None]
        digits = torch.tensor([0.0] * PLAIN + list(_DIGIT_WEIGHTS), device=rows.device)
        q[:, PLAIN:] = 0.0
        q = torch.where(steers, digits, q)
    return q


def _originals(case: IndexerTopkCase, at: torch.Tensor, length: int) -> torch.Tensor:
    """The position that each key copies: itself, unless the case has ties."""
    if case.ties == "pairs":
        return at // 2 * 2
    if case.ties == "runs":
        return at // 64 * 64
    if case.ties == "far":
        return at % ((length + 1) // 2)
    return torch.zeros_like(at) if case.ties == "all" else at


def _k_rows(case: IndexerTopkCase, keys: _Keys) -> torch.Tensor:
    """fp32 [len(keys.at), 128]."""
    drawn = torch.zeros_like(keys.at) if case.values in ("flat", "nearflat") else keys.absolute
    if case.values == "plateau":
        k = below(bits(case.seed, "k", drawn, HEAD_DIM), 5).float()
        return torch.where(_is_zero(case, keys)[:, None], -k, k)
    if case.values in EXACT:
        return below(bits(case.seed, "k", drawn, HEAD_DIM), 9).float() - 4
    if case.values == "digits":
        return below(bits(case.seed, "k", drawn, HEAD_DIM), 3).float() - 1
    if case.values == "lastbits":
        k = torch.zeros(len(drawn), HEAD_DIM, device=drawn.device)
        k[:, PLAIN] = 16.0
        k[:, PLAIN + 2 :] = (_last_bits(case, keys)[:, None] >> torch.tensor([8, 4, 0], device=drawn.device) & 15).float()
        return k
    if case.values in _SILENT:
        k = torch.zeros(len(drawn), HEAD_DIM, device=drawn.device)
    else:
        k = bell(case.seed, "k", drawn, HEAD_DIM).float() * 2.0**-15
    if case.values in STEERED:
        level, top = _levels(case, keys)
        if case.values in ("outlier", "planted"):
            k = torch.where((level > 0)[:, None], 0.0, k)
        if case.weights == "negative" and case.values != "outlier":
            level = top - level
        shifts = torch.arange(4 * DIGITS - 4, -1, -4, device=level.device)
        k[:, PLAIN:] = (level[:, None] >> shifts & 15).float()
    return k


def _last_bits(case: IndexerTopkCase, keys: _Keys) -> torch.Tensor:
    """lastbits: int64 levels below 4096, different for 4096 keys in a row, in an order that the seed chooses."""
    draw = below(bits(case.seed, "level", torch.full_like(keys.at[:1], keys.request), 2)[0], 1 << 11).long()
    return (keys.at * (2 * draw[0] + 1) + draw[1]) % 4096


def _is_zero(case: IndexerTopkCase, keys: _Keys) -> torch.Tensor:
    """plateau: the keys that score 0. bool, one each."""
    zeros = round(case.share * keys.length)
    if case.at == "last":
        return keys.at < zeros
    if case.at == "first":
        return keys.at >= keys.length - zeros
    return below(bits(case.seed, "zero", keys.absolute, 1)[:, 0], 1 << 30) < round(case.share * (1 << 30))


def _levels(case: IndexerTopkCase, keys: _Keys) -> tuple[torch.Tensor, int]:
    """int64 levels from 0 to TOP_LEVEL, one for each key, and the level that counts as the top where weights[0] is negative."""
    at, length = keys.at, keys.length
    if case.values in ("ascending", "descending"):
        step = max(1, (1 << 20) >> (length - 1).bit_length())
        rank = at if case.values == "ascending" else length - 1 - at
        return (rank * step).clamp(max=TOP_LEVEL), min((length - 1) * step, TOP_LEVEL)
    if case.values == "bucketedge":
        return _edge_levels(case, keys), 4080 << 8
    if case.values == "drift":
        return at * TOP_LEVEL // length, TOP_LEVEL
    if case.values == "latehot":
        return (at >= length - round(case.share * length)) * TOP_LEVEL, TOP_LEVEL
    if case.values == "shifted":
        return torch.full_like(at, TOP_LEVEL * (keys.request == 0)), TOP_LEVEL
    if case.values == "outlier":
        place = below(bits(case.seed, "outlier", torch.full_like(at[:1], keys.request), 1)[:, 0], min(length, 1024))
        return (at == place) * _OUTLIER_LEVEL, TOP_LEVEL
    return _planted_levels(case, keys), TOP_LEVEL


def _edge_levels(case: IndexerTopkCase, keys: _Keys) -> torch.Tensor:
    """16 times 0..255 (in units of 256 levels, which dot products show as 1), or 1 beside that; the extremes stand first."""
    draw = bits(case.seed, "edge", keys.absolute, 2)
    step, off = below(draw[:, 0], 256), below(draw[:, 1], 3) - 1
    off = torch.where((step == 0) | (step == 255), 0, off)
    level = 16 * step + off
    level = torch.where(keys.at == 0, 4080, torch.where(keys.at == 1, 0, level))
    return level << 8


def _planted_levels(case: IndexerTopkCase, keys: _Keys) -> torch.Tensor:
    """0 for keys that are no winners. Winners at ks and ke rise towards the edge that they mark, as rows' edges are neighbours."""
    at, length, half = keys.at, keys.length, (TOP_LEVEL + 1) // 2
    rows = case.request_lengths[keys.request][0] if case.window == "causal" else 1
    level = torch.zeros_like(at)
    if "first" in case.places:
        level = torch.where(at == 0, half, level)
    if "last" in case.places:
        level = torch.where(at == length - 1, half, level)
    if "tile" in case.places:
        boundary = (keys.absolute + 1) // 64
        beside = ((keys.absolute + 1) % 64 <= 1) & (boundary > 0)
        stride = 1 << max(0, ((case.s_kv // 64 - 1) // 32).bit_length())
        level = torch.where(beside & (boundary % stride == 0), half, level)
    if "ks" in case.places:
        low, high = (max(0, length - rows + 1 - case.span), max(0, length - case.span)) if case.span else (0, 0)
        ramp = half + (high - at) * (half - 1) // (high - low + 1)
        level = torch.where((at >= low) & (at <= high), ramp, level)
    if "ke" in case.places:
        ramp = half + (at - (length - rows) + 1) * (half - 1) // rows
        level = torch.where(at >= length - rows, torch.maximum(level, ramp), level)
    return level


def _scales(case: IndexerTopkCase, keys: _Keys) -> torch.Tensor:
    """fp32, one for each key."""
    draw = bits(case.seed, "scale", keys.absolute, 2)
    scale = torch.full(keys.at.shape, 1.0 if case.scales == "pow2" else 0.7, dtype=torch.float32, device=keys.at.device)
    if case.values in _SCALED and case.scales == "pow2":
        scale = torch.tensor([0.5, 1.0, 2.0], device=keys.at.device)[below(draw[:, 0], 3)]
    elif case.values == "digits":  # odd: none is a number of 11 bits
        scale = (2 * below(draw[:, 0], 1 << 10) + 2049).float() * 2.0**-11
    elif case.values in _SCALED:
        scale = below(draw[:, 0], 1 << 23).float() * 2.0**-23 + 1
    elif case.values == "nearflat":
        scale = scale + below(draw[:, 0], case.ulps + 1).float() * (2.0**-23 if case.scales == "pow2" else 2.0**-24)
    elif case.values == "outlier":
        scale = torch.where(_levels(case, keys)[0] > 0, scale * 256, scale)
    if case.values in ("nan", "inf"):
        odd = below(draw[:, 1], 1 << 30) < round(case.share * (1 << 30))
        scale = scale.masked_fill(odd, math.nan if case.values == "nan" else math.inf)
    return scale


def _fill_padding(case: IndexerTopkCase, k: torch.Tensor, scale: torch.Tensor) -> None:
    """Keys that no row may see, though none scores better: random with a large scale, or 0 where all scores are negative."""
    first, step = case.s_kv - case.pad_keys, _CHUNK[k.device.type] // HEAD_DIM
    size = 0.0 if case.weights == "negative" else 2.0**-15
    for start in range(first, case.s_kv, step):
        keys = torch.arange(start, min(start + step, case.s_kv), device=k.device)
        k[start : start + len(keys)] = (bell(case.seed, "k", keys, HEAD_DIM).float() * size).to(torch.float8_e4m3fn)
    scale[first:] = _PAD_SCALE


def _weights(case: IndexerTopkCase, device: torch.device) -> torch.Tensor:
    """fp32 [num_q, h]: bell-shaped of standard deviation 0.144, or 1, 1/2, 1/4, 1/8 where sums are to be exact; digits: odd numbers of 13
    bits, or 1 to 8 beside scales of 12 bits, times 2^-13."""
    rows = torch.arange(case.num_q, device=device)
    if case.values in EXACT:
        draw = bits(case.seed, "weights", rows, case.h)
        weights = torch.tensor([1.0, 0.5, 0.25, 0.125], device=device)[(draw & 3).long()]
        weights = torch.where((draw & 4) > 0, weights, -weights)
    elif case.values == "digits":
        draw = bits(case.seed, "weights", rows, case.h)
        size = 2 * below(draw, 1 << 11) + 4097 if case.scales == "pow2" else below(draw, 8) + 1
        weights = torch.where((draw & 1) > 0, size, -size).float() * 2.0**-13
    else:
        weights = bell(case.seed, "weights", rows, case.h).float() * 2.0**-18
    if case.values in STEERED:
        weights[:, 0] = _steering_weight(case)
        if case.values == "outlier":
            weights[1::2, 0] *= -1
    if case.values == "lastbits":
        weights[:, :2] = torch.tensor([_BASE_WEIGHT, 1.0], device=device)
        weights[1::2, 1] = -1.0
    if case.weights != "mixed":
        weights = weights.abs() if case.weights == "positive" else -weights.abs()
    if case.values == "nan":
        weights[5::16, 3] = math.nan  # assigned: what a product with NaN is in bytes, devices do not agree on
    if case.values == "inf":
        weights[5::16, 3] *= math.inf
    return weights


def _steering_weight(case: IndexerTopkCase) -> float:
    """weights[0], positive."""
    if case.values in _SILENT:
        return _STEP
    if case.values == "outlier":
        return 1.0
    rise = PLANT_SIGMA if case.values == "planted" else case.sigma
    return rise * score_sigma(case) * 256 / TOP_LEVEL
