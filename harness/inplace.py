"""Whether a launch of sparse_prefill reads q and kv anew, or gives what an earlier launch made of what stood there then."""
from __future__ import annotations

import dataclasses

import torch

from arms.kernel import Outputs
from harness import checks
from harness.compare import values_differ
from harness.variations import Subject
from harness.verdicts import Check, Verdict

NAME = "reads-inputs"
SIGN = {1: (torch.uint8, 0x80), 2: (torch.int16, -0x8000)}


def reads_inputs(subject: Subject) -> Check | None:
    """One prepared launch, twice: on q and -kv, then, in the same memory, on -q and kv. The second must be what a fresh one makes of -q and
    kv, or what was prepared gave in the first place: set-up is not timed, and may copy. It must not be what the first launch gave, nor a
    mixture. Signs alone change, so that no number becomes larger. None where nothing depends on the signs (all rows are empty).

    Raises variations.Raised where the kernel raises."""
    problem = dataclasses.replace(subject.problem, q=subject.problem.q.clone(), kv=subject.problem.kv.clone())
    launch = subject.attempt(lambda: subject.ready(problem))

    def again() -> Outputs:
        return subject.attempt(lambda: subject.finish(launch(subject.length), problem))

    negate(problem.kv)
    first = again()
    negate(problem.kv)
    negate(problem.q)
    second, fresh = again(), subject.call(problem, subject.length)
    if not any(bool(values_differ(a, b).any()) for a, b in zip(first, fresh)):
        return None
    check = checks.same(NAME, second, fresh, subject.rows, ("launched again on other q", "launched fresh on it"))
    if check.verdict is Verdict.PASSED:
        check.detail = "launched again after q and kv were rewritten in place: as a fresh launch"
    elif not any(bool(values_differ(a, b).any()) for a, b in zip(second, subject.outputs)):
        return Check(NAME, Verdict.PASSED, "set-up copies q: a launch does not see it rewritten", total=check.total)
    else:
        check.detail = f"results of an earlier launch are given again: {check.detail}"
    return check


def negate(tensor: torch.Tensor) -> None:
    """Change every sign bit, in place. bf16 or e4m3."""
    kind, bit = SIGN[tensor.element_size()]
    tensor.view(kind).bitwise_xor_(bit)
