"""litetopk_torch: LiteTopk tile by tile in torch, on CPU or CUDA. No logits matrix: a few rows at a time are calibrated on a sample,
scanned, and their candidates ranked. Exact on every input: rows that are not certified are scanned again or computed densely."""
from __future__ import annotations

import torch

from arms.kernel import Requires
from arms.litetopk.torch_config import Config
from arms.litetopk.torch_gate import Gate, calibrate, first_reaching, zoom
from arms.litetopk.torch_scan import Block, Candidates, candidates_bytes, scan, step_bytes
from arms.litetopk.torch_select import certified, choose, choose_bytes, stream, up_to
from arms.litetopk.torch_trace import Trace
from arms.scoring import TILES, Scorer, scoring_bytes
from arms.topk import WAYS, TopkLaunch, TopkProblem, TopkResult, check_problem, indexer_topk_kernel

CONFIG = Config()
SCAN, RESCAN, DENSE = (WAYS.index(way) for way in ("scan", "rescan", "dense"))


def memory(p: TopkProblem) -> int:
    """Bytes beyond inputs and indices, whatever the number of keys: one block's candidates, a step or the choice among them, a tile of
    dot products, the sample's positions, and the values and status of all rows."""
    device, capacity = p.device.type, CONFIG.room(p.topk)
    tile = TILES[device]
    step = step_bytes(tile.rows, max(CONFIG.sample, tile.keys))
    choice = choose_bytes(tile.rows, max(capacity, p.topk + tile.keys), p.topk, device)
    block = candidates_bytes(tile.rows, capacity, CONFIG.buckets) + max(step, choice)
    return block + scoring_bytes(p) + 32 * CONFIG.sample + p.num_q * (4 * p.topk + 4)


@indexer_topk_kernel("litetopk_torch", accumulate="fp32", memory=memory, place_free=True,
                     requires=Requires(heads=(32, 64), uncapturable="it reads back which rows it must scan again"))
def litetopk_torch(problem: TopkProblem) -> TopkLaunch:
    """Any device. Equal scores: the smallest positions."""
    check_problem(problem)
    scorer = Scorer(problem)
    return lambda: run(problem, scorer, CONFIG)


def run(p: TopkProblem, scorer: Scorer, config: Config, trace: Trace | None = None) -> TopkResult:
    """One launch. Raises ValueError if the capacity does not hold topk."""
    config.room(p.topk)
    indices = torch.empty((p.num_q, p.topk), dtype=torch.int32, device=p.device)
    values = torch.empty((p.num_q, p.topk), device=p.device)
    status = torch.empty(p.num_q, dtype=torch.int32, device=p.device)
    for row0 in range(0, p.num_q, scorer.tile.rows):
        block = Block(scorer, row0, min(row0 + scorer.tile.rows, p.num_q))
        rows = slice(block.row0, block.row1)
        values[rows], indices[rows], status[rows] = run_block(block, p.topk, config, trace)
    return TopkResult(indices, values, status, scorer.masked)


def run_block(block: Block, topk: int, config: Config, trace: Trace | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, indices [rows, topk] and status [rows] of a block: scan, then scan again what is not certified, then compute it densely."""
    gate = calibrated(block, topk, config)
    found = scan(block, gate, topk, config, 0, trace)
    values, indices = choose(found.value[:, :-1], found.index[:, :-1], topk)
    status = torch.full((block.rows,), SCAN, dtype=torch.int32, device=values.device)
    failed = ~certified(gate, found, topk)
    for attempt in range(1, config.rescans + 1):
        if not bool(failed.any()):
            return values, indices, status
        gate = corrected(gate, found, topk).only(failed)
        del found  # a scan begins with counts of its own, and its room is the one before's
        found = scan(block, gate, topk, config, attempt, trace)
        good = failed & certified(gate, found, topk)
        take(values, indices, good, choose(found.value[:, :-1], found.index[:, :-1], topk))
        status.masked_fill_(good, RESCAN)
        failed &= ~good
    if bool(failed.any()):
        take(values, indices, failed, stream(block, topk))
        status.masked_fill_(failed, DENSE)
    return values, indices, status


def take(values: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor, chosen: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Write the rows where bool `rows` is set from another (values, indices)."""
    values[rows], indices[rows] = chosen[0][rows], chosen[1][rows]


def calibrated(block: Block, topk: int, config: Config) -> Gate:
    """The gate of each row of a block from the sample of its request. A row of no request may attend none of any sample: open."""
    p = block.scorer.p
    width = config.sample
    scores = torch.full((block.rows, width), torch.nan, device=p.device)
    may = torch.zeros((block.rows, width), dtype=torch.bool, device=p.device)
    for row0, row1, kv0, kv1 in p.requests:
        first, last = max(row0, block.row0), min(row1, block.row1)
        if first >= last:
            continue
        keys = sample_keys(max(kv0, 0), min(kv1, p.s_kv), p, config)
        rows = slice(first - block.row0, last - block.row0)
        scores[rows, : len(keys)] = block.scorer.at(first, last, keys)
        inside = (keys >= p.ks[first:last, None]) & (keys < p.ke[first:last, None])
        may[rows, : len(keys)] = True if config.spread == "shared" else inside
    lengths = (p.ke[block.row0 : block.row1] - p.ks[block.row0 : block.row1]).long()
    return calibrate(scores, may, lengths, topk, config)


def sample_keys(kv0: int, kv1: int, p: TopkProblem, config: Config) -> torch.Tensor:
    """int64 [at most config.sample]: the positions that are sampled for a request with the keys [kv0, kv1)."""
    if config.spread == "shared":
        return torch.arange(min(config.sample, p.s_kv), device=p.device)
    count = max(min(config.sample, kv1 - kv0), 0)
    places = torch.arange(count, device=p.device)
    return kv0 + (places if config.spread == "prefix" or not count else places * (kv1 - kv0) // count)


def corrected(gate: Gate, found: Candidates, topk: int) -> Gate:
    """The gate with which a row that was not certified is scanned again, from the counts of that scan.

    Up to the last threshold they are exact, dropped candidates included. If they hold the topk-th key, its bucket is the new threshold,
    and if that still lets through more than there is room for, the scale becomes that bucket alone. If they do not hold it, the
    gate was too tight: the sample's safe threshold, or after that, everything.
    """
    counts = found.stored + found.lost
    needed = found.valid.clamp(max=topk)
    exact = up_to(counts, gate.threshold) >= needed
    bucket = torch.minimum(first_reaching(counts, needed), gate.threshold).clamp(min=0)
    crowded = exact & (up_to(counts, bucket) > found.capacity)
    opened = torch.where(gate.safe > gate.threshold, gate.safe, gate.buckets - 1)
    threshold = torch.where(exact, bucket, opened)
    closer = zoom(gate, bucket, found.best, found.worst)
    return Gate(torch.where(crowded, closer.origin, gate.origin), torch.where(crowded, closer.inv_delta, gate.inv_delta),
                torch.where(crowded, closer.threshold, threshold), torch.where(crowded, closer.safe, gate.safe), gate.buckets)

