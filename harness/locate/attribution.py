"""Which entries a wrong row of attention left out, counted twice or added: read off its out and lse, by least squares.

With w[h, j] the softmax weight that entry j has in head h by the reference (over the entries that count), v[j] its value and c[j] what is
wrong with it (-1: left out, +1: counted once too often, or though it does not count), a fault that only changes which entries are used
gives

    exp(lse' - lse) out' - out = sum_j c[j] w[h, j] v[j]        exp(lse' - lse) - 1 = sum_j c[j] w[h, j]

in every head and column: 513 equations a head for at most topk + 2 unknowns, whose normal matrix is (W^T W) * (V V^T). Rounding moves a
c[j] by little where w[h, j] is not too small; what stands out by 8 of its own standard deviations and rounds to a whole number is told,
if the entries found explain most of the row's error. A fault of another kind leaves a large rest, and nothing is said. Nor is it where the
lse of the row is within its budget and the entries found would have moved it out: then they are one way to make the same out, and not what
happened (an out that is scaled as a whole, in a row of few entries that count).
"""
from __future__ import annotations

import dataclasses

import torch

from arms.kernel import Outputs
from cases.sparse_prefill import D_V
from harness.compare import margin
from harness.locate.hypotheses import View
from harness.locate.localise import POWERS, best_fit, ranges
from harness.words import counted
from references.sparse_prefill import full_precision

ROWS = 8
MOST = {"cpu": 1 << 11, "cuda": 1 << 12}
"""Entries of a row beyond which nothing is solved (4096 unknowns take a second on a CPU)."""
LSE_WEIGHT = 16.0  # lse is good to 2^-20, out to 2^-9: its equation counts more
SURE = 8.0  # standard deviations
EXPLAINED = 0.9  # of the squared error, by the whole numbers alone


@dataclasses.dataclass
class Found:
    """Entries of some rows: int64 [n] each. row: number of the query row; position: in the row, -1 for a key that the row does not name;
    key; length: of the row; times: how often too often it was used, -1 for left out; counts: bool."""

    row: torch.Tensor
    position: torch.Tensor
    key: torch.Tensor
    length: torch.Tensor
    times: torch.Tensor
    counts: torch.Tensor


def attribute(got: Outputs, view: View, bad_rows: torch.Tensor) -> list[str]:
    """Lines that say which entries are wrong, [] if that is not what is wrong. bad_rows: bool [s_q]; got: of the whole case."""
    if view.entry.shape[1] > MOST[view.entry.device.type]:
        return []
    parts = []
    with full_precision(view.entry.device):
        for at in bad_rows[view.rows].nonzero()[:ROWS, 0].tolist():
            parts += [found] if (found := _row(got, view, at)) else []
    if not parts:
        return []
    every = Found(*(torch.cat(column).cpu() for column in zip(*(dataclasses.astuple(part) for part in parts))))
    lines: list[str] = []
    kinds = {"left out": (every.counts, every.times == -1), "counted twice or more": (every.counts, every.times > 0),
             "added": (~every.counts, every.times > 0)}
    for name, (among, hit) in kinds.items():
        lines += _tell(name, every, among, among & hit, len(parts), view)
    return lines


def _row(got: Outputs, view: View, at: int) -> Found | None:
    """Solve one row of the view; None if entries are not what is wrong with it, or if it cannot be told."""
    heads, row, inputs = view.heads, int(view.rows[at]), view.inputs
    expected = view.expected
    out, lse = got[0][row, heads].double(), got[2][row, heads].double()
    right, right_lse = expected.out[row, heads].double(), expected.lse[row, heads].double()
    if inputs.sink is not None:
        sink = inputs.sink[heads].double()
        out, right = out / torch.sigmoid(lse - sink)[:, None], right / torch.sigmoid(right_lse - sink)[:, None]
    ratio = torch.exp(lse - right_lse)
    usable = ratio.isfinite() & out.isfinite().all(1) & right.isfinite().all(1) & (ratio > 0) & (ratio < 1e6)
    if not bool(usable.any()):
        return None
    entry, counts = view.entry[at], view.counts[at]
    other = torch.tensor([0, inputs.case.s_kv - 1], device=entry.device)
    other = other[~torch.isin(other, entry[counts])].unique()
    key = torch.cat([entry, other])
    real = torch.cat([view.real[at], torch.ones(len(other), dtype=torch.bool, device=key.device)])
    position = torch.cat([view.position, torch.full((len(other),), -1, device=key.device)])
    counts = torch.cat([counts, torch.zeros(len(other), dtype=torch.bool, device=key.device)])
    k = _numbers(inputs.kv[:, 0], key[real]) * inputs.values.kv_scale
    clean = ~k.isnan().any(1)
    k, key, position, counts = k[clean], key[real][clean], position[real][clean], counts[real][clean]
    q = _numbers(inputs.q[row], heads[usable]) * inputs.values.q_scale
    w = torch.exp(q @ k.T * inputs.case.scale - right_lse[usable, None]).clamp(max=1e3)
    solved = _solve(w, k[:, :D_V], (ratio[:, None] * out - right)[usable], (ratio - 1)[usable])
    if solved is None or not _lse_agrees(lse, row, w @ solved.double(), usable, view):
        return None
    length = torch.full_like(key, int(view.length[at]))
    return Found(torch.full_like(key, row), position, key, length, solved, counts)


def _lse_agrees(lse: torch.Tensor, row: int, moved: torch.Tensor, usable: torch.Tensor, view: View) -> bool:
    """Whether entries that weigh `moved` in all, fp64 [usable heads], leave lse within its budget where the row's is so in every head."""
    right, budget = (x[row, view.heads].double() for x in (view.expected.lse, view.expected.lse_budget))
    if bool((margin(lse, right, budget) > 1).any()):
        return True
    shown = torch.log1p(moved.clamp(min=-1.0)).abs()  # -inf where nothing is left
    return bool((shown <= 2 * budget[usable]).all())  # the arm's own error and what was rounded here


def _numbers(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of q or kv as fp64."""
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype).float().double()
    return tensor[rows].double()


def _solve(w: torch.Tensor, v: torch.Tensor, rest: torch.Tensor, mass: torch.Tensor) -> torch.Tensor | None:
    """int64 [entries]: how often too often each was used, None if whole numbers do not explain the rest.

    w [heads, entries], v [entries, 512], rest [heads, 512], mass [heads].
    """
    heads, entries = w.shape
    freedom = heads * (D_V + 1) - entries
    target = float(rest.square().sum() + (LSE_WEIGHT * mass).square().sum())
    if freedom < entries // 8 or not target > 0:
        return None
    normal = (w.T @ w) * (v @ v.T + LSE_WEIGHT**2)
    side = (w * (rest @ v.T + LSE_WEIGHT**2 * mass[:, None])).sum(0)
    ridge = normal.diagonal().mean() * 1e-9
    inverse = torch.linalg.inv(normal + ridge * torch.eye(entries, dtype=normal.dtype, device=normal.device))
    c = inverse @ side
    left = max(0.0, target - float(2 * c @ side - c @ normal @ c))
    sigma = (left / freedom * inverse.diagonal().clamp(min=0)).sqrt()
    whole = torch.where(c.abs() > SURE * sigma, c.round(), 0.0)
    rest_of_whole = target - float(2 * whole @ side - whole @ normal @ whole)
    uneven = ((c - whole).abs() > 0.25) & (whole != 0)
    if rest_of_whole > (1 - EXPLAINED) * target or not bool((whole != 0).any()) or bool(uneven.any()):
        return None
    return whole.long()


def _tell(name: str, every: Found, among: torch.Tensor, hit: torch.Tensor, rows: int, view: View) -> list[str]:
    """The lines of one kind of wrong entry. among: the entries that could be of it, hit: those that are."""
    if not bool(hit.any()):
        return []
    at, keys = every.position[hit], every.key[hit]
    listed = int(hit.sum())
    where = _marked(at[at >= 0], view.entry.shape[1])
    line = f"entries {name}: {listed} in {len(every.row[hit].unique())} of {counted(rows, 'row')} looked at"
    line += f"; positions {where}" if where else ""
    lines = [f"{line}; keys {_marked(keys, view.inputs.case.s_kv)}"]
    several = int(among.sum()) > listed
    pattern = best_fit(hit[among], {k: m[among] for k, m in borders(every, view).items()}, f"entries {name}", 0.8) if several else ""
    return lines + ([pattern] if pattern else [])


def _marked(places: torch.Tensor, many: int) -> str:
    mask = torch.zeros(many, dtype=torch.bool)
    mask[places] = True
    return ranges(mask) if len(places) else ""


def borders(every: Found, view: View) -> dict[str, torch.Tensor]:
    """Each border's name and the entries on its far side: bool [n]."""
    at, length, key = every.position, every.length, every.key
    s_kv = view.inputs.case.s_kv
    last, first = _extreme(every, -1), _extreme(every, 1)
    sets = {
        "the last entry that counts": every.counts & (at == last), "the first entry that counts": every.counts & (at == first),
        "position 0": at == 0, "key 0": key == 0, "the last key of kv": key == s_kv - 1,
        "the entry before topk_length": at == length - 1, "the entry at topk_length": at == length,
        "at or past topk_length": at >= length,
        "at or past topk_length, in its block of 64": (at >= length) & (at < -(-length // 64) * 64),
        "at or past topk_length, in its pair of 128": (at >= length) & (at < -(-length // 128) * 128),
        "the 64 entries past topk_length": (at >= length) & (at < length + 64),
        "the last, partial block of 64": at >= length // 64 * 64, "the last, partial pair of 128": at >= length // 128 * 128,
        "the last block of 64": at >= (length - 1) // 64 * 64, "the last pair of 128": at >= (length - 1) // 128 * 128,
        "odd positions": at % 2 == 1, "odd blocks of 64": at // 64 % 2 == 1, "odd pairs of 128": at // 128 % 2 == 1,
        "keys of the last, partial page of 64": key >= s_kv // 64 * 64,
    }
    for edge in POWERS:
        if edge < view.entry.shape[1]:
            sets |= {f"positions below {edge}": (at >= 0) & (at < edge), f"positions from {edge} on": at >= edge}
        if edge < s_kv:
            sets |= {f"keys from {edge} on": key >= edge}
    for power in range(16, 32):
        sets |= {f"keys whose offset in kv is past 2^{power} elements": (key + 1) * view.inputs.case.d_qk > 1 << power}
    sets["not a key that the row names"] = at < 0
    return sets


def _extreme(every: Found, sign: int) -> torch.Tensor:
    """int64 [n]: the first (1) or last (-1) position of the entry's row that counts."""
    fill = 1 << 30
    numbers, place = every.row.unique(return_inverse=True)
    least = torch.full((len(numbers),), fill).scatter_reduce(0, place, torch.where(every.counts, every.position * sign, fill), "amin")
    result: torch.Tensor = least[place] * sign
    return result
