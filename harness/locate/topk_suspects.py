"""The faults that topk_hypotheses.py tries on a wrong choice of keys, the plainer ones first: where two cannot be told apart on a case,
the first is named."""
from __future__ import annotations

from collections.abc import Callable

import torch

from harness.locate.topk_hypotheses import Choice, Make, TopkHypothesis, TopkView, bounds
from harness.locate.topk_suspects_gates import CAPACITIES, buffers, gates, readings


def scores() -> dict[str, Make]:
    """Other numbers to rank by."""
    def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
        return lambda v: Choice(v.scored(weights=change(v.p.weights[v.rows].clone())))

    def scale(change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
        return lambda v: Choice(v.scored(scale=change(v.p.kv_scale)))

    def ranked(change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
        return lambda v: Choice(change(v.score.float()))

    def heads(first: int, last: int) -> Make:
        """Heads [first, last) left out, counted as slices are."""
        def change(x: torch.Tensor) -> torch.Tensor:
            x[:, slice(first, last or None)] = 0
            return x

        return weights(change)

    found: dict[str, Make] = {
        "weights without their sign": weights(torch.abs),
        "no ReLU": lambda v: Choice(v.scored(relu=False)),
        "kv_scale left out": scale(torch.ones_like),
        "kv_scale of the next key": scale(lambda x: x.roll(-1)), "kv_scale of the key before": scale(lambda x: x.roll(1)),
        "weights all alike": weights(torch.ones_like),
        "the last head left out": heads(-1, 0), "the first head left out": heads(0, 1),
        "the second half of the heads left out": lambda v: heads(v.p.heads // 2, 0)(v),
        "the first half of the heads left out": lambda v: heads(0, v.p.heads // 2)(v),
        "weights of the next head": weights(lambda x: x.roll(-1, 1)),
        "weights of the next row": lambda v: Choice(v.scored(weights=v.p.weights[(v.rows + 1) % v.p.num_q])),
        "weights of the row before": lambda v: Choice(v.scored(weights=v.p.weights[(v.rows - 1) % v.p.num_q])),
        "queries of the next row": lambda v: Choice(v.scored(v.dots((v.rows + 1) % v.p.num_q))),
        "queries of the row before": lambda v: Choice(v.scored(v.dots((v.rows - 1) % v.p.num_q))),
        "scores of the row before": lambda v: Choice(other_row(v, -1)), "scores of the next row": lambda v: Choice(other_row(v, 1)),
        "scores of the first row for all": lambda v: Choice(other_row(v, 0)),
        "the lowest scores chosen": ranked(lambda s: torch.where(s == -torch.inf, s, -s)),
        "scores without their sign": ranked(lambda s: torch.where(s == -torch.inf, s, s.abs())),
        "ranked by bf16": ranked(lambda s: s.bfloat16().float()), "ranked by fp16": ranked(lambda s: s.half().float()),
        "ranked by fp16 inside the bucket of the k-th score": lambda v: Choice(in_bucket(v, torch.float16)),
        "ranked by bf16 inside the bucket of the k-th score": lambda v: Choice(in_bucket(v, torch.bfloat16)),
        "weights rounded to fp16": weights(lambda x: x.half().float()), "weights rounded to bf16": weights(lambda x: x.bfloat16().float()),
        "kv_scale rounded to fp16": scale(lambda x: x.half().float()), "kv_scale rounded to bf16": scale(lambda x: x.bfloat16().float()),
    }
    for kept in (30, 28, 24, 20, 16, 12):
        found[f"ranked by {kept} bits"] = ranked(bits_kept(kept))
    for columns in (32, 64, 96, 112, 120):
        found[f"columns from {columns} on left out"] = fewer_columns(columns)
    for power in range(12, 32):
        found[f"offsets of scores (row * s_kv) cut to {power} bits"] = wrapped(power)
    return found


def bits_kept(kept: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda s: (s.view(torch.int32) & -(1 << (32 - kept))).view(torch.float32)


def fewer_columns(columns: int) -> Make:
    return lambda v: Choice(v.scored(v.dots(columns=columns)))


def other_row(v: TopkView, step: int) -> torch.Tensor:
    """The scores that another row has for the same keys; step 0: the first row."""
    rows = torch.zeros_like(v.rows) if step == 0 else (v.rows + step) % v.p.num_q
    return v.scored(v.dots(rows), v.p.weights[rows])


def in_bucket(v: TopkView, dtype: torch.dtype) -> torch.Tensor:
    """Scores of the k-th one's octave rounded, all others as they are."""
    score, kth = v.score.float(), v.kth.float()
    same = score.view(torch.int32) >> 23 == kth.view(torch.int32) >> 23
    return torch.where(same, score.to(dtype).float(), score)


def wrapped(power: int) -> Make:
    """Row * s_kv in fewer bits: another place of the matrix of scores is read. Tried where that changes something, and it is small."""
    def make(v: TopkView) -> Choice | None:
        start = v.rows * v.p.s_kv
        if int(start.max()) < 1 << power or v.p.num_q * v.p.s_kv > 1 << 22:
            return None
        rows = torch.arange(v.p.num_q, device=v.rows.device)
        every = v.scored(v.dots(rows), v.p.weights).view(-1)
        return Choice(every[((start % (1 << power))[:, None] + v.key) % len(every)])

    return make


def windows() -> dict[str, Make]:
    """Other keys to choose from."""
    def window(ks: Callable[[TopkView], torch.Tensor], ke: Callable[[TopkView], torch.Tensor]) -> Make:
        """Bounds int64 [n, 1]; scores are made anew, since the reference has none outside a row's window. An empty row stays empty."""
        return lambda v: Choice(v.scored(), (v.key >= ks(v)) & (v.key < ke(v)) & (v.ke > v.ks))

    def ks_of(v: TopkView) -> torch.Tensor:
        return v.ks

    def ke_of(v: TopkView) -> torch.Tensor:
        return v.ke

    def whole(step: int) -> Callable[[TopkView], torch.Tensor]:
        return lambda v: v.ks + (v.ke - v.ks) // step * step

    def whole_keys(step: int) -> Callable[[TopkView], torch.Tensor]:
        return lambda v: v.ke // step * step

    def row(change: Callable[[TopkView], torch.Tensor]) -> Make:
        return lambda v: Choice(v.scored(), (v.key >= v.p.ks[change(v)][:, None]) & (v.key < v.p.ke[change(v)][:, None]))

    found = {
        "ke ignored (the request to its end)": window(ks_of, lambda v: bounds(v)[1]),
        "ks ignored (keys from 0 on)": window(lambda v: torch.zeros_like(v.ks), ke_of),
        "ks and ke ignored": window(lambda v: torch.zeros_like(v.ks), lambda v: torch.full_like(v.ke, v.p.s_kv)),
        "ks taken for the request's first key": window(lambda v: bounds(v)[0], ke_of),
        "ke - 1": window(ks_of, lambda v: v.ke - 1), "ke + 1": window(ks_of, lambda v: v.ke + 1),
        "ks + 1": window(lambda v: v.ks + 1, ke_of), "ks - 1": window(lambda v: v.ks - 1, ke_of),
        "the window of the next row": row(lambda v: (v.rows + 1) % v.p.num_q),
        "the window of the row before": row(lambda v: (v.rows - 1) % v.p.num_q),
        "the first half of the window alone": window(ks_of, lambda v: v.ks + (v.ke - v.ks + 1) // 2),
        "the second half of the window alone": window(lambda v: v.ks + (v.ke - v.ks) // 2, ke_of),
        "the window's last key left out": lambda v: Choice(inside=v.inside & (v.key != v.ke - 1)),
        "the window's first key left out": lambda v: Choice(inside=v.inside & (v.key != v.ks)),
    }
    for step in (128, 64, 32, 256, 16, 8, 4):
        tile = f"the last, partial tile of {step} keys left out"
        found[f"{tile}, counted from the window's start"] = long_rows(whole(step))
        found[f"{tile}, counted from key 0"] = long_rows(whole_keys(step))
        found[f"{tile}, in rows of few keys as well"] = window(ks_of, whole(step))
    for size in (4, 8, 16, 32, 64):
        found[f"windows read at the row's number in its chunk of {size}"] = row(in_chunk(size))
    for edge in CAPACITIES:
        found[f"the window's last {edge} keys alone"] = window(last_keys(edge), ke_of)
    return found


def long_rows(end: Callable[[TopkView], torch.Tensor]) -> Make:
    """Another end, in rows that keep more than topk keys."""
    return lambda v: Choice(inside=v.inside & ((v.key < end(v)) | (end(v) - v.ks <= v.p.topk)))


def in_chunk(size: int) -> Callable[[TopkView], torch.Tensor]:
    return lambda v: v.rows % size


def last_keys(edge: int) -> Callable[[TopkView], torch.Tensor]:
    return lambda v: torch.maximum(v.ks, v.ke - max(edge, v.p.topk))


def suspects() -> list[TopkHypothesis]:
    """All of them, plain ones first."""
    every = {**gates(), **windows(), **scores(), **buffers(), **readings()}
    return [TopkHypothesis(name, make) for name, make in every.items()]
