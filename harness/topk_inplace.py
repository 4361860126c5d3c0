"""Whether a launch reads its inputs anew. Set-up may know shapes, requests and windows; q, k, kv_scale and weights are data, which a
serving engine writes into the same memory again and again."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from arms.topk import TopkProblem, TopkResult
from harness.locate.picture import locate_members
from harness.locate.topk_localise import Windows
from harness.topk_relations import band_of_arm, malformed_entries
from harness.topk_sets import Band, compare
from harness.verdicts import Check, Verdict
from harness.words import counted

DATA = ("q_fp8", "k_fp8", "kv_scale", "weights")
ROWS = 64  # whose bounds are made at a time

Error = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(row0, row1, indices [rows, n]) -> how far the scores of two arms may be apart there, by what the inputs hold now."""


@contextlib.contextmanager
def rewritten(p: TopkProblem) -> Iterator[None]:
    """q, keys, scales and weights in reverse order, in the same memory; as they were behind the block."""
    before = {name: getattr(p, name).clone() for name in DATA}
    try:
        for name, tensor in before.items():
            getattr(p, name).copy_(tensor.flip(0))
        yield
    finally:
        for name, tensor in before.items():
            getattr(p, name).copy_(tensor)


def reads_inputs(p: TopkProblem, launch: Callable[[], TopkResult], dense: Callable[[], TopkResult], band: Band, error: Error,
                 windows: Windows) -> Check:
    """The launch that was made ready for other contents, against a fresh torch_dense, by the latter's scores."""
    with rewritten(p):
        got, right = launch(), dense()
        new, labels = band_of_arm(right, band, margins(got, right, error)), ("the launch", "torch_dense")
        found = compare(got.indices, right.indices, new, labels)
    check = Check("reads-inputs", Verdict.PASSED, "inputs rewritten in place: the launch chose by the new ones", bad=int(found.far.sum()),
                  total=len(found.rows))
    if check.bad:
        check.verdict, check.first = Verdict.FAILED, found.first
        apart = f"{counted(found.far_keys, 'key')} beyond ties and margins in one choice only, in {counted(check.bad, 'row')}"
        if not found.far_keys:
            apart = ("no key differs beyond ties and margins, but the entries do: "
                     f"{malformed_entries(got.indices, right.indices, found.far, new, labels)}")
        check.detail = f"q, k, kv_scale and weights rewritten in place: {apart}"
        locate_members(check, found.far, windows, found.places)
    return check


def margins(a: TopkResult, b: TopkResult, error: Error) -> torch.Tensor:
    """How far from b's k-th score a key that one of two right choices lacks may be, by b's scores: fp32 [num_q].

    Let D be the largest error of a row's chosen keys. If a chose x and b chose y instead, a scored x no lower than y, so b scores x at
    most 2 D below y, and y at most 2 D above x, which b left out at or below its k-th score.
    """
    steps = [slice(row, row + ROWS) for row in range(0, len(a.indices), ROWS)]
    both = torch.cat([a.indices, b.indices], 1)
    largest = [error(rows.start, min(rows.stop, len(both)), both[rows]).amax(1) for rows in steps]
    return 2 * torch.cat(largest).float()
