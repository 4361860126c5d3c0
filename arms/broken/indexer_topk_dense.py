"""Deliberately wrong dense indexer kernels, each a few lines on top of torch_dense's chunk loop: what chunks of rows and of keys,
logits that are not cleaned and a selection of a fixed width go wrong by (see indexer_topk.py)."""
from __future__ import annotations

import dataclasses

import torch

from arms.broken.indexer_topk import choose, logits, right
from arms.broken.problems import LONG, PLAIN, RISING, SHORT, TWO
from arms.broken.register import broken_topk as broken
from arms.scoring import Scorer
from arms.topk import TopkProblem, TopkResult

CHUNK = 4
"""Rows a chunk, so that small problems have several."""


@broken("dense_windows_of_the_first_chunk", "shape", TWO, arm="dense", reports=("ML13",),
        boundary="windows read at the row's number in its chunk of 4")
def dense_windows_of_the_first_chunk(p: TopkProblem) -> TopkResult:
    """ks and ke are read at the row's number in its chunk."""
    rows = torch.arange(p.num_q, device=p.device) % CHUNK
    return right(dataclasses.replace(p, ks=p.ks[rows], ke=p.ke[rows]))


@broken("dense_chunk_written_over", "set", PLAIN, arm="dense", boundary="the first row of the batch")
def dense_chunk_written_over(p: TopkProblem) -> TopkResult:
    """A chunk's logits are overwritten while its top-k still reads them: its first row sees the next chunk's."""
    scores = logits(p)
    mixed = scores[::CHUNK].clone()
    mixed[:-1] = torch.where((scores[CHUNK::CHUNK] > -torch.inf) & (mixed[:-1] > -torch.inf), scores[CHUNK::CHUNK], mixed[:-1])
    scores[::CHUNK] = mixed
    return TopkResult(choose(p, scores).indices)


@broken("dense_logits_not_cleaned", "shape", RISING, arm="dense", reports=("ML9",), boundary="ke ignored")
def dense_logits_not_cleaned(p: TopkProblem) -> TopkResult:
    """Logits outside a row's window are never written, and the selection runs over the whole width: here they hold the row's scores."""
    return choose(p, Scorer(p).raw(0, p.num_q, 0, p.s_kv))


@broken("dense_windows_of_whole_vectors", "shape", SHORT, arm="dense", boundary="the last, partial tile of 4 keys left out")
def dense_windows_of_whole_vectors(p: TopkProblem) -> TopkResult:
    """The selection reads 4 keys at a time and leaves a window's last 1 to 3 alone."""
    return right(dataclasses.replace(p, ke=torch.maximum(p.ks, p.ks + (p.ke - p.ks) // 4 * 4)))


@broken("dense_last_256_columns_selected", "set", LONG, arm="dense", reports=("TK15",), boundary="the window's last 256 keys alone")
def dense_last_256_columns_selected(p: TopkProblem) -> TopkResult:
    """Stands for a selection that keeps the last 2048 of more columns than its counters hold, with 256."""
    return right(dataclasses.replace(p, ks=torch.maximum(p.ks, p.ke - max(256, p.topk))))


@broken("dense_halves_share_topk", "set", RISING, arm="dense", boundary="half of the choice from each half of the window")
def dense_halves_share_topk(p: TopkProblem) -> TopkResult:
    """Each half of a window that holds more than topk keys gives half of the choice, wherever the best are."""
    middle = torch.where(p.ke - p.ks > 2 * p.topk, (p.ks + p.ke) // 2, p.ke)
    parts = [right(dataclasses.replace(p, ke=middle)), right(dataclasses.replace(p, ks=middle))]
    few = [part.indices[:, : (p.topk + 1) // 2] for part in parts]
    both = torch.cat([few[0], few[1][:, : p.topk // 2]], 1)
    return TopkResult(torch.where((middle < p.ke)[:, None], both, parts[0].indices))
