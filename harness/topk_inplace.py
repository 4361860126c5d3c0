"""Whether a launch reads its inputs anew. Set-up may know shapes, requests and windows; q, k, kv_scale and weights are data, which a
serving engine writes into the same memory again and again."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from arms.topk import TopkProblem, TopkResult
from harness.topk_localise import Windows, localise_members
from harness.topk_relations import band_of_arm
from harness.topk_sets import Band, compare
from harness.verdicts import Check, Verdict

DATA = ("q_fp8", "k_fp8", "kv_scale", "weights")
ROOM = 4.0


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


def reads_inputs(p: TopkProblem, launch: Callable[[], TopkResult], dense: Callable[[], TopkResult], band: Band, eps: torch.Tensor,
                 windows: Windows) -> Check:
    """The launch that was made ready for other contents, against a fresh torch_dense, by the latter's scores. eps: the case's margins.

    The rewritten rows have no bound of their own. ROOM times the case's largest margin is theirs: what this check looks for is a launch
    that did not read, whose keys are wrong by whole scores; precision is `set`'s."""
    with rewritten(p):
        right = dense()
        widest = ROOM * eps.amax().expand_as(eps) if len(eps) else eps
        found = compare(launch().indices, right.indices, band_of_arm(right, band, widest), ("the launch", "torch_dense"))
    check = Check("reads-inputs", Verdict.PASSED, "inputs rewritten in place: the launch chose by the new ones", bad=int(found.far.sum()),
                  total=len(found.rows))
    if check.bad:
        check.verdict, check.first = Verdict.FAILED, found.first
        check.detail = (f"q, k, kv_scale and weights rewritten in place: {found.far_keys:,} keys of the launch are not those of the new "
                        f"inputs, in {check.bad:,} rows")
        check.where = localise_members(found.far, windows, found.places)
    return check
