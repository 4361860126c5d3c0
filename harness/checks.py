"""The checks on one arm's outputs: against the reference, against another arm, against the contract.

Each takes tensors and returns a Check; none launches anything (trial.py does). Every check here has a broken arm in
arms/broken that names it; tests/test_broken_arms.py runs them.
"""
from __future__ import annotations

import math

import torch

from arms.kernel import Outputs, SkipPromise
from harness.compare import bits_differ, margin, ulp_distance, ulp_histogram, values_differ
from harness.locate.localise import Rows
from harness.locate.picture import locate
from harness.verdicts import Check, Verdict
from references.sparse_prefill import Expected

NAMES = ("out", "max_logits", "lse")
SHOWN = 5
BIGGEST = 1e30  # JSON has no infinity


def against_reference(got: Outputs, expected: Expected, rows: Rows) -> Check:
    """out per element and per row norm, lse and max_logits, each within its budget; NaN and infinities must coincide."""
    ratios = {name: margin(value, getattr(expected, name), getattr(expected, f"{name}_budget"))
              for name, value in zip(NAMES, got)}
    error = torch.linalg.vector_norm(got[0].to(expected.out.dtype) - expected.out, dim=-1)
    ratios["out row norm"] = margin(error, torch.zeros_like(error), expected.row_budget)
    margins = {name: min(BIGGEST, float(ratio.max())) for name, ratio in ratios.items()}
    check = Check("reference", Verdict.PASSED, margins=margins, total=sum(r.numel() for r in ratios.values()))
    wrong = {name: ratio > 1 for name, ratio in ratios.items() if margins[name] > 1}
    if wrong:
        check.verdict = Verdict.FAILED
        check.bad = sum(int(bad.sum()) for bad in wrong.values())
        check.detail = "over budget: " + ", ".join(f"{name} in {int(bad.sum()):,} of {bad.numel():,}" for name, bad in wrong.items())
        # Told where most of it shows; a row's norm says less than its elements.
        widest = max(wrong, key=lambda name: (name != "out row norm", float(wrong[name].float().mean())))
        bad, name = wrong[widest], "out" if widest == "out row norm" else widest
        locate(check, bad, rows, widest)
        check.where.insert(0, f"in {widest}:")
        if widest == "out row norm":
            bad = bad[..., None] & (ratios["out"] == ratios["out"].amax(-1, keepdim=True))
        check.first = first_elements(bad, got[NAMES.index(name)], getattr(expected, name), getattr(expected, f"{name}_budget"))
    elif could_not_fail(expected, rows):
        check.verdict = Verdict.VACUOUS
        check.detail = "an all-zero out would pass: the budget exceeds every expected value"
    return check


def could_not_fail(expected: Expected, rows: Rows) -> bool:
    """Whether zeros in place of out would be within every budget, on a case that has a valid key."""
    if not bool((rows.counting > 0).any()):
        return False  # zeros are right there, and anything else fails
    zero = torch.zeros((), dtype=expected.out.dtype, device=expected.out.device).expand_as(expected.out)
    element = float(margin(zero, expected.out, expected.out_budget).max())
    norm = torch.linalg.vector_norm(expected.out, dim=-1)
    return max(element, float(margin(norm, torch.zeros_like(norm), expected.row_budget).max())) <= 1


def first_elements(bad: torch.Tensor, got: torch.Tensor, want: torch.Tensor, budget: torch.Tensor | None = None,
                   names: tuple[str, str] = ("got", "want")) -> list[str]:
    """The first five bad elements as text: position, both values, budget."""
    lines = []
    for at in bad.nonzero()[:SHOWN].tolist():
        place = tuple(at)
        limit = "" if budget is None else f"  budget {float(budget[place]):.3g}"
        lines.append(f"{at}  {names[1]} {float(want[place]):.7g}  {names[0]} {float(got[place]):.7g}{limit}")
    return lines


def sentinels(got: Outputs, rows: Rows, handed: str) -> Check | None:
    """A row without a valid key: out 0, max_logits -inf, lse +inf. None if the case has no such row.

    handed: what the arm gives as topk_length for such a row, for the report.
    """
    empty = (rows.counting == 0).to(got[0].device)
    if not bool(empty.any()):
        return None
    check = Check("sentinels", Verdict.PASSED, f"{int(empty.sum())} rows without a valid key, topk_length {handed}")
    wrong = []
    for name, value, want in zip(NAMES, got, (0.0, -math.inf, math.inf)):
        bad = (value != want) & empty.view(-1, *[1] * (value.dim() - 1))
        check.total += int(empty.sum()) * value[0].numel()
        if not bool(bad.any()):
            continue
        wrong.append(f"{name} is not {want:g} in {int(bad.sum()):,}")
        check.bad += int(bad.sum())
        if check.verdict is Verdict.PASSED:
            check.verdict = Verdict.FAILED
            locate(check, bad, rows, name)
            check.first = first_elements(bad, value, torch.full_like(value, want))
    if wrong:
        check.detail = f"rows without a valid key, topk_length {handed}: {'; '.join(wrong)}"
    return check


def same(name: str, got: Outputs, other: Outputs, rows: Rows, labels: tuple[str, str], verdict: Verdict = Verdict.FAILED,
         bits: bool = False) -> Check:
    """All three outputs equal: by value (-0.0 equals 0.0), or with `bits` by byte. labels: names of got and other."""
    check = Check(name, Verdict.PASSED, "bitwise equal: out, max_logits, lse")
    differ = bits_differ if bits else values_differ
    equal, notes = [], []
    for output, left, right in zip(NAMES, got, other):
        bad = differ(left, right)
        check.total += bad.numel()
        if not bool(bad.any()):
            equal.append(output)
            continue
        notes.append(f"{output} differs in {int(bad.sum())} of {bad.numel()}")
        if check.verdict is Verdict.PASSED:
            check.verdict = verdict
            locate(check, bad, rows, output)
            check.first = first_elements(bad, left, right, names=labels)
            check.ulp = ulp_histogram(left, right, bad)
        check.bad += int(bad.sum())
    if notes:
        check.detail = "; ".join(notes) + (f"; equal: {', '.join(equal)}" if equal else "")
    return check


def skipping(name: str, skipped: Outputs, walked: Outputs, skips: torch.Tensor, promise: SkipPromise, rows: Rows,
             labels: tuple[str, str]) -> Check:
    """The arm that skips masked pairs against the one that walks them, by the kernel's stated promise.

    skips: bool [s_q], rows in which `skipped` leaves out a pair that `walked` processes. Where nothing is skipped, and in
    lse and max_logits everywhere, equality; elsewhere in out what the promise says, rule by rule.
    """
    check = same(name, skipped, walked, rows, labels)
    check.detail = f"{int(skips.sum())} of {len(skips)} rows skip a pair; " + check.detail
    if check.verdict is Verdict.PASSED or not promise.max_ulp:
        return check
    device = skipped[0].device
    bad = values_differ(skipped[0], walked[0])
    allowed = torch.zeros_like(bad)
    allowed[skips.to(device), :, promise.columns[0] : promise.columns[1]] = True
    distance = ulp_distance(skipped[0], walked[0])
    room = int(allowed.sum())
    broken = {
        "lse or max_logits differ": bool(values_differ(skipped[1], walked[1]).any() | values_differ(skipped[2], walked[2]).any()),
        "elements outside the promised rows and columns": bool((bad & ~allowed).any()),
        f"more than {promise.max_ulp} ULP": bool((distance[bad] > promise.max_ulp).any()),
        f"more than {promise.max_share:.2%} of the promised columns": int(bad.sum()) > promise.allowance(room),
        f"{labels[1]} is not the one nearer zero": promise.none_nearer_zero
        and bool((walked[0].float().abs() > skipped[0].float().abs())[bad].any()),
    }
    violated = [rule for rule, is_broken in broken.items() if is_broken]
    check.verdict = Verdict.FAILED if violated else Verdict.PASSED
    share = int(bad.sum()) / max(1, room)
    check.detail += f"; {share:.4%} of {room} elements where the promise allows it"
    check.detail += f"; promise broken: {', '.join(violated)}" if violated else f"; within the promise ({promise})"
    return check


def near(name: str, got: Outputs, other: Outputs, expected: Expected, rows: Rows, labels: tuple[str, str]) -> Check:
    """Two arms within twice the reference's budgets of each other: what is left where a kernel promises no equality."""
    check = Check(name, Verdict.PASSED, "within two budgets, as the kernel promises no equality")
    for output, left, right in zip(NAMES, got, other):
        budget = 2 * getattr(expected, f"{output}_budget")
        ratio = margin(left, right.to(budget.dtype), budget)
        check.margins[output] = min(BIGGEST, float(ratio.max()))
        check.total += ratio.numel()
        if check.margins[output] > 1 and check.verdict is Verdict.PASSED:
            bad = ratio > 1
            check.verdict, check.bad = Verdict.FAILED, int(bad.sum())
            locate(check, bad, rows, output)
            check.detail = f"{output}: the arms differ by {check.margins[output]:.3g} times two budgets"
            check.first = first_elements(bad, left, right, budget, names=labels)
    return check


def lengths(source: str, length: torch.Tensor | None, exact: dict[str, torch.Tensor], valid_entries: torch.Tensor,
            indices: torch.Tensor, rows: Rows) -> Check | None:
    """A topk_length source against the indices. exact: backscan by every implementation at hand, torch's first.

    backscan: equal to 1 + last index >= 0, at least 1, in every implementation. metadata: no valid entry at or past it
    (so it is at least backscan where the tail is -1), and max(metadata, 1) == backscan on rows without a hole.
    """
    if length is None:
        return None
    check = Check("lengths", Verdict.PASSED, total=length.numel())
    scan = exact["torch"]
    if source == "backscan":
        problems = {f"backscan by {name} is not 1 + last index >= 0": value != scan for name, value in exact.items()}
        problems["the handed backscan is not 1 + last index >= 0"] = length != scan
        check.detail = f"equal to the exact count; implementations: {', '.join(exact)}"
    else:
        position = torch.arange(valid_entries.shape[1], device=length.device)
        past = position >= length[:, None]
        count = valid_entries.sum(1)
        plain = (indices[:, 0] >= 0).sum(1) == count  # nothing but -1 stands past the valid range
        packed = plain & ~rows.has_holes.to(plain.device)
        problems = {
            "a valid entry lies at or past the length": (valid_entries & past).any(1),
            "max(metadata, 1) != backscan on a row without holes": packed & (length.clamp(min=1) != scan),
        }
        shorter = int((plain & (scan < length)).sum())
        check.detail = f"{int(packed.sum())} packed rows equal backscan; backscan shorter on {shorter} rows with holes at the end"
    for problem, bad in problems.items():
        if bool(bad.any()):
            check.verdict, check.bad, check.detail = Verdict.FAILED, int(bad.sum()), problem
            check.first = first_elements(bad, length, scan, names=(source, "exact backscan"))
            locate(check, bad[:, None], rows, "topk_length")
            break
    return check
