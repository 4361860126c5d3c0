"""Deliberately wrong indexer top-k kernels, continued: candidate and tie buffers at the sizes that published kernels have, a threshold
that is not raised, and the stages of the portable LiteTopk without what makes them exact (see indexer_topk.py)."""
from __future__ import annotations

from collections.abc import Callable

import torch

from arms.broken.indexer_topk import choose, logits, only, right
from arms.broken.indexer_topk_lite import lowest_chosen
from arms.broken.problems import FLAT, LONG_EXACT, PLAIN, RISING, SHIFTED
from arms.broken.register import broken_topk as broken
from arms.indexer_topk.litetopk_torch import calibrated, corrected
from arms.litetopk.torch_config import G1, Config
from arms.litetopk.torch_gate import Gate
from arms.litetopk.torch_scan import Block, Candidates, scan, tightened
from arms.litetopk.torch_select import choose as choose_candidates
from arms.scoring import Scorer
from arms.topk import WAYS, TopkProblem, TopkResult

# --- buffers of a fixed size ------------------------------------------------------------------------------------------


def first_of_the_bin(p: TopkProblem, capacity: int) -> TopkResult:
    """Of the scores whose first 8 bits are the k-th one's, the first `capacity` to come are kept; of all others every one."""
    scores = logits(p)
    in_bin = scores.view(torch.int32) >> 24 == lowest_chosen(p).view(torch.int32) >> 24
    return only(p, scores, ~in_bin | (in_bin.cumsum(1) <= capacity))


@broken("tie_buffer_of_2048", "set", "indexer_topk:requests=1/2600,topk=1000,values=planted", reports=("TK2",),
        boundary="a tie buffer of 2048 keys")
def tie_buffer_of_2048(p: TopkProblem) -> TopkResult:
    return first_of_the_bin(p, 2048)


@broken("tie_buffer_of_4096", "set", "indexer_topk:requests=1/5200,topk=2000,values=planted", reports=("TK1", "TK14"),
        boundary="a tie buffer of 4096 keys")
def tie_buffer_of_4096(p: TopkProblem) -> TopkResult:
    return first_of_the_bin(p, 4096)


@broken("tie_buffer_of_16384", "set", "indexer_topk:requests=1/20400,topk=8000,values=planted", reports=("TK3", "TK10"),
        boundary="a tie buffer of 16384 keys")
def tie_buffer_of_16384(p: TopkProblem) -> TopkResult:
    return first_of_the_bin(p, 1 << 14)


@broken("bucket_ranked_by_fp16", "set", LONG_EXACT, boundary="ranked by fp16 inside the bucket of the k-th score")
def bucket_ranked_by_fp16(p: TopkProblem) -> TopkResult:
    """Exact above the octave of the k-th score, inside it ranked by fp16."""
    scores = logits(p)
    in_bin = scores.view(torch.int32) >> 23 == lowest_chosen(p).view(torch.int32) >> 23
    return TopkResult(choose(p, torch.where(in_bin, scores.half().float(), scores)).indices)


@broken("last_slot_unwritten", "written", PLAIN)
def last_slot_unwritten(p: TopkProblem) -> TopkResult:
    """One arrival counter too low: the slot of a full row's last key keeps what was there."""
    indices, slots = right(p).indices, torch.empty(p.num_q, p.topk, dtype=torch.int32, device=p.device)
    indices[:, -1] = torch.where(indices[:, -1] >= 0, slots[:, -1], indices[:, -1])
    return TopkResult(indices)


@broken("stale_threshold_loosens", "set", RISING, boundary="the first 2 * topk keys alone of those that reach")
def stale_threshold_loosens(p: TopkProblem) -> TopkResult:
    """The threshold is that of the first topk keys and is never raised again: too many pass, and the last ones find no room."""
    scores = logits(p)
    first = torch.arange(p.s_kv, device=p.device) < p.ks[:, None] + p.topk
    passes = scores >= torch.where(first & (scores > -torch.inf), scores, torch.inf).amin(1, keepdim=True)
    return only(p, scores, passes & (passes.cumsum(1) <= 2 * p.topk) | (scores == -torch.inf))


# --- the portable LiteTopk's stages, without its certificate ----------------------------------------------------------


Scan = Callable[[Block, Gate, int, Config], Candidates]


def scanned(p: TopkProblem, config: Config, other: Scorer | None = None, scan: Scan = scan) -> TopkResult:
    """One scan of each block by this gate, and the choice among what it let through, taken for the answer whatever was lost."""
    scorer = other or Scorer(p)
    status = torch.full((p.num_q,), WAYS.index("scan"), dtype=torch.int32, device=p.device)
    found = []
    for row0 in range(0, p.num_q, scorer.tile.rows):
        block = Block(scorer, row0, min(row0 + scorer.tile.rows, p.num_q))
        kept = scan(block, calibrated(block, p.topk, config), p.topk, config)
        found.append(choose_candidates(kept.value[:, :-1], kept.index[:, :-1], p.topk))
    return TopkResult(torch.cat([indices for _, indices in found]), torch.cat([values for values, _ in found]), status)


class SampledHigher(Scorer):
    """The sample is scored by another kernel than the scan, which rounds two ULP higher."""

    def at(self, row0: int, row1: int, keys: torch.Tensor) -> torch.Tensor:
        return super().at(row0, row1, keys) * (1 + 2.0**-22)


@broken("scan_with_a_span_of_1e_20", "shape", FLAT, also=("status",), reports=("LT1",),
        boundary="rows whose scores are all equal left empty")
def scan_with_a_span_of_1e_20(p: TopkProblem) -> TopkResult:
    """As first published: where the sample's scores are all equal, two ULP are more than its scale is wide."""
    return scanned(p, G1, SampledHigher(p))


@broken("scan_with_one_sample_for_all", "shape", SHIFTED, also=("status",), reports=("LT2",), boundary="rows left empty")
def scan_with_one_sample_for_all(p: TopkProblem) -> TopkResult:
    """The calibration of the batch's first keys tightens the gate of requests that score lower."""
    return scanned(p, Config(spread="shared"))


@broken("scan_that_overflows", "set", RISING, also=("status",), reports=("LT4",), boundary="the window's first 2 * topk keys alone")
def scan_that_overflows(p: TopkProblem) -> TopkResult:
    """Room for 2 * topk candidates, and what comes later is dropped in silence."""
    return scanned(p, Config(sample=p.topk, spread="prefix", capacity=2 * p.topk))


@broken("scan_of_a_margin_gate", "shape", "indexer_topk:requests=4/3000,topk=256,values=descending", also=("status",))
def scan_of_a_margin_gate(p: TopkProblem) -> TopkResult:
    """As published second: a gate at 1.5 times the share of the sample, which a prefix that scores best makes too tight."""
    return scanned(p, Config(sample=2 * p.topk, spread="prefix", gate="margin", refresh=0, buckets=4096))


def scan_again(block: Block, gate: Gate, topk: int, config: Config) -> Candidates:
    """A scan, and another one by the corrected gate, which goes on counting where the first one stopped."""
    before = scan(block, gate, topk, config)
    gate = corrected(gate, before, topk)
    found = Candidates.none(block.rows, config.room(topk), gate.buckets, block.scorer.p.device)
    found.stored += before.stored
    for key0, _, scores, may in block.tiles(config.tile):
        bucket = gate.bucket(scores)
        found.add(key0, scores, may & (bucket <= gate.threshold[:, None]), bucket)
        gate.threshold = tightened(gate, found, topk)
    return found


@broken("rescan_keeps_its_counts", "shape", "indexer_topk:requests=4/400,topk=64,values=descending", also=("status",), reports=("LT5",))
def rescan_keeps_its_counts(p: TopkProblem) -> TopkResult:
    """What the first scan stored is counted again: the threshold passes the k-th score before topk keys are there."""
    return scanned(p, Config(sample=p.topk, spread="prefix", tile=16, refresh=0), scan=scan_again)
