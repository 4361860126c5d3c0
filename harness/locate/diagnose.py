"""What the failed checks of an arm are told beyond the place: which entries or keys are wrong, and which fault explains it.

Called once an arm's checks are in; nothing is computed where none of them failed. An error in here is a line of text: it must not turn a
verdict into an error of the harness.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from arms.kernel import Outputs
from arms.topk import TopkProblem, TopkResult
from cases.inputs import Inputs
from harness.locate.attribution import attribute
from harness.locate.hypotheses import LEAST, explain, make_view, margins
from harness.locate.picture import keep_small
from harness.locate.suspects import HANDED, suspects
from harness.locate.topk_hypotheses import explain_choice
from harness.locate.topk_hypotheses import make_view as make_topk_view
from harness.locate.topk_localise import Windows
from harness.locate.topk_suspects import suspects as topk_suspects
from harness.locate.topk_wrong import tell_ranks
from harness.topk_checks import malformed
from harness.topk_sets import Band, chunks, tally
from harness.topk_sets import windows as window_mask
from harness.verdicts import Check, Verdict
from references.sparse_prefill import Expected

BY_REFERENCE = "reference"
OF_OUTPUTS = ("reference", "sentinels", "none-vs-backscan", "none-vs-metadata", "backscan-vs-metadata", "lengths")
"""Checks of an arm's own outputs, which one explanation fits; what other launches gave is not kept."""
OF_CHOICE = ("set", "shape", "status", "nan-chosen", "dense-vs-litetopk", "downstream", "values")


def failed(checks: list[Check], names: tuple[str, ...]) -> list[Check]:
    return [check for check in checks if check.name in names and check.verdict is Verdict.FAILED]


def diagnose(checks: list[Check], got: Outputs, inputs: Inputs, expected: Expected, length: torch.Tensor | None) -> None:
    """Add to the failed checks of a sparse_prefill arm what its outputs say of the fault. length: int32 [s_q] as it was handed over."""
    keep_small(checks)
    found = failed(checks, OF_OUTPUTS)
    with told_if_it_fails(found):
        made = derived(length, inputs) if found and length is not None else []
        for check in found:
            check.where += made if check.name == "lengths" else []
        bad = [ratio > 1 for ratio in margins(got, expected)] if found else []
        if any(bool(mask.any()) for mask in bad):
            view = make_view(inputs, expected, bad, length)
            explanation = explain(got, view, suspects(length is not None))
            entries = attribute(got, view, (bad[0].any(-1) | bad[1] | bad[2]).any(1))
            for check in found:
                check.where += entries if check.name == BY_REFERENCE else []
                check.where += [str(explanation)] if explanation else []
                check.where += made if explanation and explanation.name == HANDED and check.name != "lengths" else []


def derived(length: torch.Tensor, inputs: Inputs) -> list[str]:
    """The line that says how a wrong topk_length may have been made, [] if no way gives most of the wrong ones. length: int32 [s_q]."""
    named, told = inputs.indices[:, 0] >= 0, inputs.valid
    scan = torch.where(named, torch.arange(1, named.shape[1] + 1, device=named.device), 0).amax(1)
    most = torch.full_like(told, named.shape[1])
    ways = {
        "the count of valid entries": inputs.valid_entries.sum(1), "the entries before the first hole": named.long().cumprod(1).sum(1),
        "one less than it should be": scan - 1, "one more than it should be": scan + 1, "that of the row before": told.roll(1),
        "that of the next row": told.roll(-1), "the scan of the row before": scan.roll(1), "the scan of the next row": scan.roll(-1),
        "1 at most": told.clamp(max=1), "half of topk at most": told.clamp(max=inputs.case.limit // 2), "topk in every row": most,
        "topk + 1": most + 1, "rounded down to 64": told // 64 * 64, "rounded down to 128": told // 128 * 128,
        "rounded up to 64": -(-told // 64) * 64, "rounded up to 128": -(-told // 128) * 128, "64 less": told - 64, "128 less": told - 128,
    }
    given = length.long()
    wrong = given != torch.where(scan > 0, scan, given.clamp(max=1))  # a row without a key may have 0 or 1
    if not bool(wrong.any()):
        return []
    shares = {name: float(((given == value) | (given == value.clamp(min=1)))[wrong].double().mean()) for name, value in ways.items()}
    best = max(shares, key=lambda name: shares[name])
    if shares[best] < LEAST:
        return []
    return [f"explained by: the length is {best}; so it is in {shares[best]:.0%} of the rows where it is not backscan's"]


def diagnose_choice(checks: list[Check], result: TopkResult, problem: TopkProblem, band: Band, windows: Windows,
                    count: torch.Tensor) -> None:
    """The same for a choice of keys. count: int64 [num_q], how many keys each row must name."""
    keep_small(checks)
    found, own = failed(checks, OF_CHOICE), failed(checks, ("own-scores",))
    with told_if_it_fails([*found, *own]):
        if found:
            wrong = tally(result.indices, band).wrong
            for bad in malformed(result.indices, count, band.ks, band.ke).values():
                wrong |= bad
            if bool(wrong.any()):
                ranks = tell_ranks(result.indices, band, windows, wrong)
                explanation = explain_choice(make_topk_view(problem, result.indices, band, wrong), topk_suspects())
                for check in found:
                    check.where += ranks + ([explanation] if explanation else [])
        for check in own:
            by_own = own_band(result, band, count)
            check.where += tell_ranks(result.indices, by_own, windows, tally(result.indices, by_own).wrong)


def own_band(result: TopkResult, band: Band, count: torch.Tensor) -> Band:
    """The band around the k-th of the arm's own scores, without a margin."""
    assert result.logits is not None
    parts = []
    for row0, row1 in chunks(len(count), band.s_kv, count.device):
        score = result.logits(row0, row1)
        valid = window_mask(band.ks[row0:row1], band.ke[row0:row1], band.s_kv) & ~score.isnan()
        best = score.masked_fill(~valid, -torch.inf).topk(min(result.indices.shape[1], band.s_kv), dim=1).values
        some = count[row0:row1, None]
        parts.append(best.gather(1, (some - 1).clamp(min=0)).masked_fill(some == 0, torch.inf)[:, 0])
    kth = torch.cat(parts)
    return Band(result.logits, kth, torch.zeros_like(kth), band.ks, band.ke, band.s_kv)


@contextlib.contextmanager
def told_if_it_fails(found: list[Check]) -> Iterator[None]:
    """An error inside becomes a line of the checks that failed already. One of the device is raised: it is the kernel's doing."""
    try:
        yield
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        for check in found:
            check.where.append(f"the localiser itself failed: {type(error).__name__}: {str(error)[:200]}")
