"""Whether a kernel takes its fp8 scales as the fp32 numbers that they are: what one loses, the other must gain."""
from __future__ import annotations

import dataclasses
import math

from harness import checks
from harness.compare import margin
from harness.locate.picture import locate
from harness.variations import Subject
from harness.verdicts import Check, Verdict
from references.precision import FP32_UNIT, KAPPA, LAMBDA, ROUNDOFF

TRADED = 1 + 3 * 2.0**-13  # neither bf16 nor fp16 has it


def scales_traded(subject: Subject) -> Check | None:
    """fp8: q_scale times TRADED, sm_scale by it, so that no product changes but by rounding. max_logits and lse must agree within it; out
    need not, as P is rounded to e4m3 from numbers that differ in their last bits. None in bf16, which has no scales.

    The bytes are the same on both sides. A score is a dot product times four factors in some order: five fp32 roundings a side. lse moves
    by the mean of the scores' errors, and the mean of |s| is at most |lse| + log n; sums of n terms err by LAMBDA sqrt(n) units, exp, log
    and the rest by KAPPA each. A kernel that scales q before the product sums other numbers: its fp32 sums err on either side by the
    reference's budget in the proportion of an fp32 unit and step to the fp8 accumulator's.
    """
    if not subject.problem.fp8:
        return None
    p = dataclasses.replace(subject.problem, q_scale=subject.problem.q_scale * TRADED, sm_scale=subject.problem.sm_scale / TRADED)
    got, keys = subject.call(p, subject.length), subject.inputs.case.topk
    told = f"with q_scale times {TRADED} and sm_scale by it"
    check = Check("scales-traded", Verdict.PASSED, f"max_logits and lse as before, {told}")
    size = subject.outputs[1].abs() + subject.outputs[2].abs() + math.log(keys)
    rounding = FP32_UNIT * (10 * size + LAMBDA * keys**0.5 + 4 * KAPPA)
    summed = 2 * FP32_UNIT / ROUNDOFF["fp8"].acc_unit * ROUNDOFF["fp8"].acc_step ** 0.5
    for name, now, before in zip(checks.NAMES[1:], got[1:], subject.outputs[1:]):
        bound = rounding + summed * getattr(subject.expected, f"{name}_budget")
        ratio = margin(now, before.to(bound.dtype), bound)
        check.margins[name] = min(checks.BIGGEST, float(ratio.max()))
        check.total += ratio.numel()
        if check.margins[name] > 1 and check.verdict is Verdict.PASSED:
            bad = ratio > 1
            check.verdict, check.bad = Verdict.FAILED, int(bad.sum())
            locate(check, bad, subject.rows, name)
            check.detail = f"{name} moves by up to {check.margins[name]:.3g} times what rounding can do, {told}"
            check.first = checks.first_elements(bad, now, before, bound, names=("traded", "before"))
    return check
