"""Saved outputs judged anew against a reference that is made here: no kernel is launched. Worker side.

What needs the kernel itself (launched again, on other problems, its own scores) is not judged.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from arms.kernel import KERNELS
from arms.topk import TopkKernel, TopkResult
from cases.counter import digest
from cases.indexer_inputs import IndexerInputs
from cases.inputs import Inputs
from harness import checks, topk_checks
from harness.locate.localise import describe_rows
from harness.locate.topk_localise import Windows
from harness.tensorfile import read
from harness.topk_sets import Band, tally
from harness.verdicts import Check
from references.indexer_topk import TopkExpected
from references.sparse_prefill import Expected


class Refused(LookupError):
    """Outputs, or inputs, that are not those of the record: one line that names them."""


def check_inputs(made: dict[str, str], recorded: dict[str, str]) -> None:
    """Raise Refused unless the inputs made here have the record's fingerprints."""
    differ = [name for name in {**made, **recorded} if made.get(name) != recorded.get(name)]
    if differ:
        names = [name for name in differ if name != "all"] or differ
        raise Refused(f"the case makes other inputs here than the record's: {', '.join(names)}")


def saved_outputs(path: str, about: dict[str, str], outputs: dict[str, str], ways: dict[str, int]) -> dict[str, torch.Tensor]:
    """The tensors of a file, if they are what a record has fingerprints of. about: the case and arm that the file must be of; ways: the
    record's. Raises Refused, OSError and TensorFileError."""
    tensors, said = read(path)
    other = [f"{key} {said.get(key, 'none')}" for key, value in about.items() if said.get(key) != value]
    if other:
        raise Refused(f"{path} is of {' and '.join(other)}")
    found = {name: digest(tensor) for name, tensor in tensors.items()}
    if "indices" in tensors:
        found["set"] = digest(tensors["indices"].sort(1).values)
    differ = [name for name, fingerprint in outputs.items() if found.get(name) != fingerprint]
    if "status" in tensors and int((tensors["status"] == topk_checks.REFUSED).sum()) != ways.get("failed", 0):
        differ.append("status")  # it has no fingerprint: the rows that it gives up are counted
    if differ:
        raise Refused(f"{path}: not what the record has: {', '.join(differ)}")
    return tensors


def judge(inputs: Any, expected: Any, tensors: dict[str, torch.Tensor], name: str) -> list[Check]:
    """The checks of saved outputs by today's reference and budgets. name: the kernel's. Raises Refused where that is not known here."""
    if isinstance(inputs, Inputs):
        return _sparse(inputs, expected, tensors)
    kernel = KERNELS.get(name)
    if not isinstance(kernel, TopkKernel):
        raise Refused(f"how {name} sums is not known here: it is not registered (--load)")
    return _topk(inputs, expected, tensors, kernel.accumulate)


def _sparse(inputs: Inputs, expected: Expected, tensors: dict[str, torch.Tensor]) -> list[Check]:
    """`reference`, and `sentinels` where a row has no valid key."""
    rows = describe_rows(None, inputs.valid_entries, inputs.valid, inputs.indices[:, 0])
    outputs = tensors["out"], tensors["max_logits"], tensors["lse"]
    found = [checks.against_reference(outputs, expected, rows), checks.sentinels(outputs, rows, "as stored")]
    return [check for check in found if check]


def _topk(inputs: IndexerInputs, expected: TopkExpected, tensors: dict[str, torch.Tensor], accumulate: str) -> list[Check]:
    """`shape`, `set`, `nan-chosen` and, of an arm that returned values, `values`, without its own scores."""
    case, indices, status = inputs.case, tensors["indices"], tensors.get("status")
    band = Band(expected.scores, expected.kth, expected.eps[accumulate], inputs.ks, inputs.ke, case.s_kv)
    windows = Windows(inputs.ks.cpu().long(), inputs.ke.cpu().long(), case.topk, inputs.requests)
    judged = torch.ones_like(inputs.ks, dtype=torch.bool) if status is None else status != topk_checks.REFUSED
    found = tally(indices, band)
    made = [topk_checks.shape(indices, expected.count, judged, windows, band)[0],
            topk_checks.members(found, indices, band, judged, expected.valid > case.topk, windows),
            topk_checks.nan_chosen(found, judged, windows)]
    if "values" in tensors:
        error = _error(expected, accumulate)
        made.append(topk_checks.values(TopkResult(indices, tensors["values"], status), found.scores, None, error, windows, band))
    return [check for check in made if check]


def _error(expected: TopkExpected, accumulate: str) -> Callable[[int, int, torch.Tensor], torch.Tensor]:
    return lambda row0, row1, keys: expected.score_error(accumulate, row0, row1, keys)
