"""The outputs of the trial that a worker ran last: written to a file, and held against those of another worker. Worker side.

Fingerprints say whether outputs are the same bit for bit; where they are not, one worker saves and the other compares.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from arms.topk import TopkResult
from harness import checks, topk_sets
from harness.compare import bits_differ, ulp_distance, ulp_histogram
from harness.families import Trial
from harness.locate.picture import locate_members
from harness.tensorfile import TensorFileError, read, write
from harness.topk_trial import TopkTrial
from harness.trial import ArmRun, KernelTrial
from harness.verdicts import Check, Verdict
from harness.words import counted

NAME = "numbers"
NEW_NAN = "new NaN: "
"""What the check's detail begins with where one side has a NaN that the other has not."""


def outputs(trial: Trial | None, arm: str) -> dict[str, torch.Tensor]:
    """What an arm gave in a trial, by name, without what follows from it. Raises LookupError if the trial has not run it."""
    if isinstance(trial, KernelTrial) and arm in trial.done:
        return trial.done[arm].tensors
    if isinstance(trial, TopkTrial) and trial.done is not None and trial.kernel.arm == arm:
        result = trial.done.result
        named = {"indices": result.indices, "values": result.values, "status": result.status}
        return {name: tensor for name, tensor in named.items() if tensor is not None}
    raise LookupError(f"no outputs of {arm} are held")


def save(trial: Trial | None, arm: str, path: str, about: dict[str, str]) -> int:
    """Write an arm's outputs into a safetensors file. Returns its bytes. Raises LookupError, OSError."""
    return write(path, outputs(trial, arm), about)


def compare(trial: Trial | None, arm: str, path: str, labels: tuple[str, str]) -> Check:
    """An arm's outputs against those in a file: PASSED if they are the same bit for bit; otherwise FAILED, with what differs and where.

    labels: what the arm's and the file's outputs are called. Raises LookupError, OSError and TensorFileError.
    """
    mine, (theirs, _) = outputs(trial, arm), read(path)
    unlike = {name: f"{name}: {labels[0]} {form(mine.get(name))}, {labels[1]} {form(theirs.get(name))}"
              for name in dict.fromkeys([*mine, *theirs]) if form(mine.get(name)) != form(theirs.get(name))}
    if isinstance(trial, TopkTrial) and trial.done is not None and "indices" not in unlike:  # a kernel need not return the others
        alike = {name: tensor.to(mine[name].device) for name, tensor in theirs.items() if name in mine and name not in unlike}
        return _choices(trial, trial.done.result, alike, labels, list(unlike.values()))
    if unlike or not isinstance(trial, KernelTrial):
        return Check(NAME, Verdict.FAILED, "; ".join(unlike.values()))
    return _sparse(trial.done[arm], {name: tensor.to(mine[name].device) for name, tensor in theirs.items()}, labels)


def form(tensor: torch.Tensor | None) -> str:
    """dtype and shape, as text."""
    return "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _sparse(run: ArmRun, theirs: dict[str, torch.Tensor], labels: tuple[str, str]) -> Check:
    """out, max_logits and lse, byte by byte. The first that differs is told in full, the others in a few words."""
    other = (theirs["out"], theirs["max_logits"], theirs["lse"])
    check = checks.same(NAME, run.outputs, other, run.rows, labels, bits=True)
    differing = [name for name, a, b in zip(checks.NAMES, run.outputs, other) if bool(bits_differ(a, b).any())]
    if not differing:
        return check
    check.where = [f"in {differing[0]}:", *check.where]
    pairs = {name: (a, b) for name, a, b in zip(checks.NAMES, run.outputs, other) if name in differing}
    check.detail = "; ".join([check.detail, *(f"{name}: {how_far(a, b)}" for name, (a, b) in pairs.items())])
    check.detail = new_nan(pairs, labels) + check.detail
    return check


def how_far(a: torch.Tensor, b: torch.Tensor) -> str:
    """The largest distance between elements whose bytes differ: in ULP and as a number. -0.0 and 0.0 are none apart."""
    both = bits_differ(a, b) & a.isfinite() & b.isfinite()
    if not bool(both.any()):
        return "no finite elements differ"
    left, right = a[both], b[both]
    ulp, apart = int(ulp_distance(left, right).max()), float((left.double() - right.double()).abs().max())
    return f"at most {ulp:,} ULP, {apart:.3g}" if ulp else "in the sign of zero alone"


def new_nan(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], labels: tuple[str, str]) -> str:
    """Which outputs hold a NaN on one side alone, as the beginning of a detail; "" where none does."""
    found = []
    for name, (a, b) in pairs.items():
        for label, mine, other in ((labels[0], a, b), (labels[1], b, a)):
            count = int((mine.isnan() & ~other.isnan()).sum())
            found += [f"{name} has {count:,} in {label} alone"] if count else []
    return f"{NEW_NAN}{', '.join(found)}; " if found else ""


def _choices(trial: TopkTrial, mine: TopkResult, theirs: dict[str, torch.Tensor], labels: tuple[str, str], told: list[str]) -> Check:
    """Two choices of keys: rows with other keys, with the same in another order; values beside the same keys; what is said of rows.

    theirs: the outputs that both have. told: what is known to differ already.
    """
    indices = theirs["indices"]
    differ = topk_sets.compare(mine.indices, indices, trial.band, labels)
    rows, check = len(indices), Check(NAME, Verdict.PASSED, total=indices.numel())
    if bool(differ.rows.any()):
        found = int(differ.far.sum())
        beyond = f"in {counted(found, 'row')} not within the margin" if found else "all within the margin"
        told.append(f"{int(differ.rows.sum()):,} of {rows:,} rows choose other keys: {counted(differ.keys, 'key')} in one alone, {beyond}")
        check.bad, check.first = differ.keys, differ.first
        locate_members(check, differ.rows, trial.windows, differ.places)
    if differ.moved:
        told.append(f"the same keys in another order in {differ.moved:,} of {rows:,} rows")
        if not check.where:
            moved = mine.indices != indices
            check.bad = int(moved.sum())
            locate_members(check, moved.any(1), trial.windows)
    if "values" in theirs and mine.values is not None:
        told += _values(check, (mine.indices, mine.values), (indices, theirs["values"]), ~differ.rows, labels)
    if "status" in theirs and mine.status is not None and bool((unlike := mine.status != theirs["status"]).any()):
        told.append(f"the status of {int(unlike.sum()):,} of {rows:,} rows differs")
        check.bad = check.bad or int(unlike.sum())
        if not check.where:
            locate_members(check, unlike, trial.windows)
    check.verdict = Verdict.FAILED if told else Verdict.PASSED
    check.detail = "; ".join(told) or f"equal: {', '.join(theirs)}; what stands beside -1 is not compared"
    return check


def _values(check: Check, mine: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor,
            labels: tuple[str, str]) -> list[str]:
    """Values beside the same keys, in the rows (bool [num_q]) that choose the same; what stands beside -1 means nothing. Fills the
    check's ULP; returns what is to be told."""
    (keys, a), (_, b) = (_by_key(indices[rows], values[rows]) for indices, values in (mine, theirs))
    bad = bits_differ(a, b) & (keys >= 0)
    if not bool(bad.any()):
        return []
    check.ulp = ulp_histogram(a, b, bad)
    number = rows.nonzero()[:, 0]
    for row, place in bad.nonzero()[: max(0, checks.SHOWN - len(check.first))].tolist():
        check.first.append(f"[row {int(number[row])}, key {int(keys[row, place])}]  {labels[1]} {float(b[row, place]):.9g}  "
                           f"{labels[0]} {float(a[row, place]):.9g}")
    check.bad, chosen = check.bad or int(bad.sum()), keys >= 0
    nan = new_nan({"values": (a[chosen], b[chosen])}, labels)
    return [f"{nan}values beside the same keys differ in {int(bad.sum()):,} of {int(chosen.sum()):,}: {how_far(a[chosen], b[chosen])}"]


def _by_key(indices: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in ascending order, -1 first, and the values beside them."""
    keys, order = indices.sort(stable=True, dim=1)
    return keys, values.gather(1, order)


def attempt(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an action gives, and `problem`: "", or in one line why it gives nothing: the disk, the file, or no such outputs."""
    try:
        return {**action(), "problem": ""}
    except (LookupError, OSError, TensorFileError) as error:
        return {"problem": str(error)}
