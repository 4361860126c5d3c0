"""Relations between launches of one arm of sparse_prefill on variations of a problem: none needs a reference to be right.

Variations after which out, max_logits and lse must be equal, bit for bit, are launched together, once: a kernel that is right passes all
of them in one launch, with its memory poisoned (check `written`) and inputs and outputs between guard bands (`guards`). Only where that
launch differs is each one launched alone, to say which it was.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from arms.kernel import Launch, Outputs
from harness import checks
from harness.compare import values_differ
from harness.guard import Guards
from harness.scales import scales_traded
from harness.stress import NotCaptured, replayed, while_busy
from harness.variations import (
    GRAIN,
    Raised,
    Subject,
    Variation,
    copied,
    exactly_padded,
    launch,
    padded,
    q_scaled,
    rows_permuted,
    unnamed_changed,
)
from harness.verdicts import Check, Verdict
from references.sparse_prefill import free_memory

FEW = 64  # rows: below, a launch costs its overhead
AT_ONCE = 3  # launches back to back that are held in memory, whatever they take


def relations(subject: Subject) -> list[Check]:
    """Every relation of one arm but cut_at_length. Launches four times, once on one row alone, if all hold."""
    found = equalities(subject)
    found += told("indices-permuted", lambda: indices_permuted(subject))
    found += told("batch-split", lambda: batch_split(subject))
    found += told("scales-traded", lambda: scales_traded(subject))
    if not exactly_padded(subject):
        found += told("padded", lambda: padded_by_promise(subject))
    return found


def told(name: str, relation: Callable[[], Check | None]) -> list[Check]:
    """The check that a relation gives, if any; its failure where the kernel raises."""
    try:
        check = relation()
    except Raised as error:
        return [Check(name, Verdict.FAILED, f"the kernel takes the case, but raises on this variation of it: {error}")]
    return [check] if check else []


def equalities(subject: Subject) -> list[Check]:
    """The checks of what must stay equal, `written` and `guards` first: from one launch, or alone where that one differs."""
    every = [v for v in (rows_permuted(subject), q_scaled(subject), unnamed_changed(subject)) if v]
    every += [padded(subject)] if exactly_padded(subject) else []
    near = [v for v in every if v.name == "rows-permuted" and not subject.kernel.promise.row_independent]
    exact = [v for v in every if v not in near]
    together, guards = all_at_once(subject, exact)
    bands = guards.judge(Check("guards", Verdict.PASSED, total=together.total))
    if together.verdict is Verdict.PASSED and bands.verdict is Verdict.PASSED:
        found = [together, bands]
        found += [Check(v.name, Verdict.PASSED, f"bitwise equal: {v.told}", total=together.total) for v in exact]
    else:
        found = one_by_one(subject, exact, together)
    return found + [check for v in near for check in alone(subject, v)]


def all_at_once(subject: Subject, variations: list[Variation]) -> tuple[Check, Guards]:
    """One launch with every variation, on poisoned memory between bands: whether the result is as before, under the name `written`."""
    guards = Guards(subject.device)
    try:
        got = launch(subject, variations, guards, poisoned=True)
    except Raised as error:
        return Check("written", Verdict.FAILED, f"raises {error}"), guards
    return subject.equal("written", got, "varied", "every element written over NaN"), guards


def one_by_one(subject: Subject, variations: list[Variation], together: Check) -> list[Check]:
    """The same checks, each from a launch of its own. If all pass, what they are together is the first one's failure; or FLAKY, if
    together they pass, too, the second time."""
    def poisoned() -> Check:
        return subject.equal("written", launch(subject, [], None, poisoned=True), "on poisoned memory", "every element written over NaN")

    def between_bands() -> Check:
        guards = Guards(subject.device)
        outputs = launch(subject, [], guards)
        if written.verdict is not Verdict.PASSED:  # then what is in fresh memory is part of the result: the bands alone are judged
            return guards.judge(Check("guards", Verdict.PASSED))
        return guards.judge(subject.equal("guards", outputs, "between guard bands", ""))

    (written,) = told("written", poisoned)
    found = [written, *told("guards", between_bands), *(check for v in variations for check in alone(subject, v))]
    if all(check.verdict is Verdict.PASSED for check in found) and together.verdict is not Verdict.PASSED:
        names = ", ".join(check.name for check in found[1:])
        again, _ = all_at_once(subject, variations)
        verdict = Verdict.FLAKY if again.verdict is Verdict.PASSED else Verdict.FAILED
        once = " once, not again" if again.verdict is Verdict.PASSED else ""
        detail = f"equal alone, but not together with {names}{once}: {together.detail}"
        found[0] = dataclasses.replace(together, verdict=verdict, detail=detail)
    return found


def alone(subject: Subject, variation: Variation) -> list[Check]:
    """The check of one variation, from a launch of its own."""
    judge = subject.independent if variation.name == "rows-permuted" else subject.equal
    return told(variation.name, lambda: judge(variation.name, launch(subject, [variation], None), variation.told, variation.told))


def padded_by_promise(subject: Subject) -> Check:
    """padded, for a kernel whose pads may change what its promise says."""
    variation, promise = padded(subject), subject.kernel.promise
    got = launch(subject, [variation], None)
    if promise.within_budget:
        return subject.near("padded", got, "padded", variation.told)
    topk, wide = subject.inputs.case.topk, int(variation.told.rpartition(" ")[2])
    more = torch.full((subject.s_q,), -(-topk // promise.pair) < -(-wide // promise.pair))
    check = checks.skipping("padded", subject.outputs, got, more, promise, subject.rows, ("before", "padded"))
    check.detail = f"{variation.told}: {check.detail}"
    return check


def indices_permuted(subject: Subject) -> Check:
    """The entries before a row's length in another order: from the last to the first, begun a third of the way."""
    p, length = subject.problem, subject.length
    width = p.indices.shape[2]
    position = torch.arange(width, device=subject.device)
    count = torch.full((subject.s_q, 1), width, device=subject.device) if length is None else length.clamp(0, width)[:, None].long()
    moved = (count - 1 - position + count // 3) % count.clamp(min=1)
    order = torch.where(position < count, moved, position)
    got = subject.call(dataclasses.replace(p, indices=p.indices.gather(2, order[:, None])), length)
    return subject.near("indices-permuted", got, "permuted", "every row's entries in another order")


def batch_split(subject: Subject) -> Check | None:
    """Rows launched in two batches, split at an odd row, and one row alone: where there are few, the first one, which is then also one of
    the two batches. None for a single row."""
    rows = subject.s_q
    if rows == 1:
        return None
    at = rows // 2 | 1 if rows > FEW else 1
    parts = [part(subject, slice(0, at)), part(subject, slice(at, rows))]
    if at > 1:
        one = part(subject, slice(at, at + 1))
        parts = [parts[0], one, (parts[1][0][1:], parts[1][1][1:], parts[1][2][1:])] if differ(one, parts[1]) else parts
    joined = torch.cat([x[0] for x in parts]), torch.cat([x[1] for x in parts]), torch.cat([x[2] for x in parts])
    how = f"rows 0..{at - 1} and {at}..{rows - 1} launched apart, row {at if at > 1 else 0} alone"
    return subject.independent("batch-split", joined, "split", how)


def differ(one: Outputs, part: Outputs) -> bool:
    """Whether the first row of `part` is another one alone."""
    return any(bool(values_differ(x, y[:1]).any()) for x, y in zip(one, part))


def part(subject: Subject, rows: slice) -> Outputs:
    """A launch on some rows, copied, so that they are aligned as a batch of their own."""
    p, length = subject.problem, subject.length
    cut = dataclasses.replace(p, q=p.q[rows].clone(), indices=p.indices[rows].clone())
    return subject.call(cut, None if length is None else length[rows].clone())


def cut_at_length(subject: Subject) -> Check | None:
    """topk_length cut to L, on the indices as given against the same with -1 from there on; L is no multiple of 64. Three launches.
    None without a length, or where no row is longer than one entry."""
    p, length = subject.problem, subject.length
    longest = 0 if length is None else int(length.max())
    limit = longest // 2 + 1
    limit -= limit % GRAIN == 0
    if length is None or limit >= longest:
        return None
    short = length.clamp(max=limit)
    beyond = torch.arange(p.indices.shape[2], device=subject.device) >= short[:, None, None]
    given = subject.call(p, short, first=length)  # the launch is given other lengths before: what it keeps of them would show
    cut = subject.call(dataclasses.replace(p, indices=p.indices.masked_fill(beyond, -1)), short.clone())
    rows = dataclasses.replace(subject.rows, length=short.cpu().long())
    check = checks.same("cut-at-length", given, cut, rows, ("entries past it", "-1 past it"))
    if check.verdict is Verdict.PASSED:
        check.detail = f"bitwise equal: topk_length at most {limit}, with the entries past it and with -1 there"
    return check


def run_to_run(subject: Subject, launch: Launch, launches: int) -> Check:
    """Launches back to back, each against the first one; as many at a time as have room for their outputs. launch: in the harness's
    convention."""
    group = max(AT_ONCE, free_memory(subject.device) // 4 // sum(x.nbytes for x in subject.outputs))
    check = Check("run-to-run", Verdict.PASSED)
    shared, differing = False, 0
    for begin in range(0, launches, group):
        subject.phase("launch")
        count = min(group, launches - begin)
        again = [] if shared else [launch(subject.length) for _ in range(count)]
        shared = shared or (count > 1 and again[0][0].data_ptr() == again[-1][0].data_ptr())  # then only the last launch is left in it
        if shared:
            again = [subject.finish(launch(subject.length), subject.problem) for _ in range(count)]
        for number, outputs in enumerate(again, begin + 2):
            names = f"launch {number}", "launch 1"
            other = checks.same("run-to-run", outputs, subject.outputs, subject.rows, names, Verdict.FLAKY, bits=True)
            differing += other.verdict is not Verdict.PASSED
            check = other if check.verdict is Verdict.PASSED else check
    if differing:
        check.detail += f"; {differing} of {launches} launches differ from the first"
        return check
    how = "one by one, since they share a buffer" if shared else "back to back"
    how += f" in groups of {group}" if launches > group else ""
    check.detail = f"{1 + launches} launches, {launches} of them {how}, bitwise equal"
    return check


def busy_stream(subject: Subject) -> Check:
    """Launches while a second stream keeps the GPU busy."""
    launch = subject.ready(subject.problem)
    results, covered = while_busy(lambda: copied(launch(subject.length)), subject.device)
    for number, outputs in enumerate(results, 1):
        names = f"busy launch {number}", "alone"
        check = checks.same("busy-stream", outputs, subject.outputs, subject.rows, names, Verdict.FLAKY, bits=True)
        if check.verdict is not Verdict.PASSED:
            return check
    check.detail = f"{len(results)} launches beside a busy stream, bitwise equal; it was busy beyond {covered} of them"
    return check


def graph_replay(subject: Subject) -> Check | None:
    """A launch captured in a CUDA graph and replayed after the rows of indices and lengths were reversed and the lengths halved, in
    place, against a launch on that. None where no graph can be made of it, as the kernel says of some launches at least."""
    p = dataclasses.replace(subject.problem, indices=subject.problem.indices.clone())
    length = None if subject.length is None else subject.length.clone()
    launch = subject.ready(p)

    def update() -> None:
        p.indices.copy_(subject.problem.indices.flip(0))
        if length is not None and subject.length is not None:
            length.copy_((subject.length.flip(0) + 1) // 2)

    try:
        outputs, graph = replayed(lambda: launch(length), update)
    except NotCaptured as error:
        if subject.kernel.requires.uncapturable:
            return None
        return Check("graph-replay", Verdict.FAILED, f"a CUDA graph cannot be made of it, which its `uncapturable` does not say: {error}")
    got = copied(outputs)
    check = checks.same("graph-replay", got, copied(launch(length)), subject.rows, ("replay", "launch"))
    del graph  # until here: the outputs are in its memory
    if check.verdict is Verdict.PASSED:
        what = "indices" if length is None else "indices and topk_length"
        stale = all(torch.equal(a, b) for a, b in zip(got, subject.outputs))
        check.detail = f"bitwise equal after {what} were updated in place{', which changes nothing here' if stale else ''}"
    return check
