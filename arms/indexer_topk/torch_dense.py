"""torch_dense: the portable dense arm. Logits in fp32, as many rows at a time as serving's memory budget allows, then torch.topk."""
from __future__ import annotations

from arms.dense import BUDGET, TopkWriter, choosing_bytes, chunk_rows, chunks
from arms.kernel import Requires
from arms.scoring import TILES, Scorer, scoring_bytes
from arms.topk import TopkLaunch, TopkProblem, TopkResult, check_problem, indexer_topk_kernel


def memory(p: TopkProblem) -> int:
    """Bytes beyond inputs and indices: one chunk of logits, what the choice over it takes, one tile of dot products."""
    device = p.device.type
    rows = chunk_rows(p.num_q, 4 * p.s_kv, BUDGET[device], TILES[device].rows)
    return 4 * rows * p.s_kv + choosing_bytes(p, rows) + scoring_bytes(p)


@indexer_topk_kernel("torch_dense", arm="dense", accumulate="fp32", memory=memory, place_free=True,
                     requires=Requires(heads=(32, 64), uncapturable="it reads back which rows choose a genuine -inf"))
def torch_dense(problem: TopkProblem) -> TopkLaunch:
    """Any device. Ties at the k-th score: whichever torch.topk returns."""
    check_problem(problem)
    scorer = Scorer(problem)
    return lambda: dense_topk(problem, scorer, BUDGET[problem.device.type])


def dense_topk(p: TopkProblem, scorer: Scorer, budget: int) -> TopkResult:
    """One launch with at most `budget` bytes of logits at a time (and at least one tile's rows)."""
    writer = TopkWriter(p, scorer.masked)
    for row0, row1 in chunks(p.num_q, 4 * p.s_kv, budget, scorer.tile.rows):
        writer.choose(scorer.masked(row0, row1), row0)
    writer.finish()
    return TopkResult(writer.indices, writer.values, logits=scorer.masked)
