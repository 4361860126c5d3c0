"""Variations of a sparse_prefill problem after which an arm must give the same, and a launch on several of them at once."""
from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from arms.kernel import Kernel, Launch, Outputs, Problem
from cases.inputs import Inputs
from harness import checks
from harness.guard import Guards, poisoned_memory
from harness.locate.localise import Rows
from harness.verdicts import Check, Verdict
from references.sparse_prefill import Expected

Length = torch.Tensor | None
T = TypeVar("T")
GRAIN = 64  # keys by which a width is enlarged where the kernel takes any
LARGE = {torch.bfloat16: 2.0**40, torch.float8_e4m3fn: 448.0}
"""What an unnamed key holds: its scores are above every other, and finite (2^40 * 2^7 * 576 in fp32; 448 is e4m3's largest)."""
LEAST, MOST = 2.0**-126, 2.0**127  # of normal fp32 numbers
DIGITS = {torch.bfloat16: 2.0**-14, torch.float8_e4m3fn: 2.0**-6}
"""The last bit of a product of two numbers, as a share of it."""


class Raised(Exception):
    """A kernel that takes the case itself raised on a variation of it. One line."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """One arm on one case: outputs is what it gave for problem and length (int32 [s_q] or None).

    ready: a problem's launch, whose outputs are in the harness's convention; finish: waits for outputs of a problem, and gives copies of
    them; phase: announces what is about to happen, so that the clock of a long case starts anew.
    """

    kernel: Kernel
    inputs: Inputs
    expected: Expected
    problem: Problem
    length: Length
    outputs: Outputs
    rows: Rows
    ready: Callable[[Problem], Launch]
    finish: Callable[[Outputs, Problem], Outputs]
    phase: Callable[[str], None]

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    @property
    def s_q(self) -> int:
        return self.inputs.case.s_q

    def call(self, problem: Problem, length: Length, first: Length = None) -> Outputs:
        """Make a problem ready and launch it, after a launch with the lengths `first`, if any. Raises as attempt does."""
        def both() -> Outputs:
            launch = self.ready(problem)
            if first is not None:
                launch(first)
            return self.finish(launch(length), problem)

        return self.attempt(both)

    def attempt(self, action: Callable[[], T]) -> T:
        """Do what calls the kernel. Raises Raised where the kernel raises, but what it has run out of and what poisons CUDA."""
        self.phase("launch")
        try:
            return action()
        except (torch.cuda.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            text = (str(error).strip() or repr(error)).splitlines()[0]
            if "can't allocate memory" in text:
                raise
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises the error of a poisoned context
            traceback.print_exc()
            raise Raised(f"{type(error).__name__}: {text}") from error

    def equal(self, name: str, got: Outputs, label: str, told: str) -> Check:
        """Whether `got` is what the arm gave before. told: the detail of a check that passed."""
        check = checks.same(name, got, self.outputs, self.rows, (label, "before"))
        if check.verdict is Verdict.PASSED:
            check.detail = f"bitwise equal: {told}"
        return check

    def near(self, name: str, got: Outputs, label: str, told: str) -> Check:
        """Whether `got` is within two budgets of what the arm gave before."""
        check = checks.near(name, got, self.outputs, self.expected, self.rows, (label, "before"))
        check.detail = f"{told}: {check.detail}" if check.verdict is not Verdict.PASSED else f"within two budgets: {told}"
        return check

    def independent(self, name: str, got: Outputs, label: str, told: str) -> Check:
        """What is promised of a row in another batch: equality, or two budgets where rows are not independent of each other."""
        return (self.equal if self.kernel.promise.row_independent else self.near)(name, got, label, told)


@dataclasses.dataclass(frozen=True)
class Variation:
    """apply: the varied problem and length; undo: the outputs in the order of the original rows. told: in words, for a check's detail."""

    name: str
    told: str
    apply: Callable[[Problem, Length], tuple[Problem, Length]]
    undo: Callable[[Outputs], Outputs] = lambda outputs: outputs


def launch(subject: Subject, variations: list[Variation], guards: Guards | None, poisoned: bool = False) -> Outputs:
    """One launch on the problem with all variations, in the order of the original rows."""
    problem, length = subject.problem, subject.length
    for variation in variations:
        problem, length = variation.apply(problem, length)
    with contextlib.ExitStack() as stack:
        if guards:
            problem, length = guarded(guards, problem, length)
            stack.enter_context(guards.memory())
        if poisoned:
            stack.enter_context(poisoned_memory())
        outputs = subject.call(problem, length)
    for variation in reversed(variations):
        outputs = variation.undo(outputs)
    return outputs


def guarded(guards: Guards, problem: Problem, length: Length) -> tuple[Problem, Length]:
    """The same in memory between bands: kv[-1] and kv[s_kv] are NaN, the indices and lengths next to the first and last ones live."""
    around = guards.around
    q, kv, q_scale, kv_scale = (around(name, getattr(problem, name), math.nan) for name in ("q", "kv", "q_scale", "kv_scale"))
    sink = problem.attn_sink if problem.attn_sink is None else around("attn_sink", problem.attn_sink, math.nan)
    indices = around("indices", problem.indices, problem.kv.shape[0] // 2)
    moved = dataclasses.replace(problem, q=q, kv=kv, indices=indices, attn_sink=sink, q_scale=q_scale, kv_scale=kv_scale)
    return moved, None if length is None else around("topk_length", length, 1)


def copied(outputs: Outputs) -> Outputs:
    """Outputs that a later launch does not overwrite."""
    return outputs[0].clone(), outputs[1].clone(), outputs[2].clone()


def rows_permuted(subject: Subject) -> Variation | None:
    """Query rows in another order; None for a single one."""
    if subject.s_q == 1:
        return None
    order = torch.randperm(subject.s_q, generator=torch.Generator().manual_seed(subject.inputs.case.seed)).to(subject.device)
    back = order.argsort()

    def apply(p: Problem, length: Length) -> tuple[Problem, Length]:
        return dataclasses.replace(p, q=taken(p.q, order), indices=p.indices[order]), None if length is None else length[order]

    return Variation("rows-permuted", "rows in another order", apply, lambda x: (x[0][back], x[1][back], x[2][back]))


def taken(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows], also in e4m3, which not every version of torch indexes."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.dtype == torch.float8_e4m3fn else x[rows]


def q_scaled(subject: Subject) -> Variation | None:
    """Twice q (fp8: twice its scale) and half sm_scale: every score comes about by the same roundings, times a power of two. None where
    that is not so: a product or a sum may overflow, or leave the normal numbers."""
    p = subject.problem
    if not scales_exactly(p, subject.inputs.named):
        return None

    def apply(p: Problem, length: Length) -> tuple[Problem, Length]:
        halved = dataclasses.replace(p, sm_scale=p.sm_scale / 2)
        return (dataclasses.replace(halved, q_scale=p.q_scale * 2) if p.fp8 else dataclasses.replace(halved, q=p.q * 2)), length

    return Variation("q-scaled", f"{'q_scale' if p.fp8 else 'q'} times 2, sm_scale by 2", apply)


def scales_exactly(p: Problem, named: torch.Tensor) -> bool:
    """Whether doubling q commutes with every rounding on the way to the scores. named: bool [s_kv], the keys that count.

    A sum of d_qk products stays below d_qk max|q| max|k|, doubled and times sm_scale it must be finite; its partial sums are multiples
    of the last bit of the smallest product, which must be a normal number: then no rounding depends on the exponent.
    """
    if not bool(named.any()):
        return True
    q, k = p.q.float().abs(), p.kv[named].float().abs()
    scale = abs(p.sm_scale) * float(p.q_scale) * float(p.kv_scale)
    most = 2 * p.q.shape[-1] * float(q.max()) * max(1.0, float(k.max())) * max(1.0, scale)
    least = torch.stack([torch.where(x > 0, x, torch.inf).min() for x in (q, k)])  # inf where all is 0, which scales exactly
    product = float(least[0]) * float(least[1]) * DIGITS[p.q.dtype]
    return most < MOST and product * min(1.0, scale / 2) >= LEAST and scale / 2 >= LEAST


def unnamed_changed(subject: Subject) -> Variation | None:
    """Every kv row that no valid entry names holds other, large values: a maximum over masked keys would pass over NaN (nan-leak), but
    not over them. None where every row is named."""
    unnamed = ~subject.inputs.named
    if not bool(unnamed.any()):
        return None

    def apply(p: Problem, length: Length) -> tuple[Problem, Length]:
        sign = torch.where(p.q[0, 0].float() < 0, -1.0, 1.0)  # a large score at least for the first row's first head
        row = (sign * LARGE[p.kv.dtype]).to(p.kv.dtype)
        kv = p.kv.clone()
        kv.view(torch.uint8)[unnamed] = row.view(torch.uint8)
        return dataclasses.replace(p, kv=kv), length

    large = LARGE[subject.problem.kv.dtype]
    return Variation("unnamed-changed", f"{int(unnamed.sum())} kv rows that no valid entry names set to +-{large:.3g}", apply)


def padded(subject: Subject) -> Variation:
    """Rows widened by -1 to the next multiple of what the kernel takes."""
    grain = subject.kernel.requires.topk_multiple
    grain = grain if grain > 1 else GRAIN
    width = subject.inputs.case.topk
    more = (width // grain + 1) * grain - width

    def apply(p: Problem, length: Length) -> tuple[Problem, Length]:
        return dataclasses.replace(p, indices=torch.nn.functional.pad(p.indices, (0, more), value=-1)), length

    return Variation("padded", f"width {width} padded with -1 to {width + more}", apply)


def exactly_padded(subject: Subject) -> bool:
    """Whether the kernel promises equality: an arm without a length walks the pads, as `none` walks what another arm skips."""
    promise = subject.kernel.promise
    return not promise.within_budget and (subject.length is not None or not promise.max_ulp)
