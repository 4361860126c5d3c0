"""The reference against a loop anyone can read, and budgets that a right kernel meets and a wrong one does not."""
from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from trials import SMOKE, expected_of, inputs_of, launch, sources_of

import references.sparse_prefill as module
from arms.kernel import Outputs, load_package
from cases import parse_case
from cases.inputs import Inputs
from cases.sparse_prefill import D_V
from harness import checks
from harness.compare import margin
from harness.locate.localise import describe_rows
from harness.verdicts import Check, Verdict
from references import Expected, reference
from references.precision import ROUNDOFF, bf16_ulp, p_error
from references.sparse_prefill import full_precision

load_package("arms.broken")

TINY = [f"sparse_prefill:{keys}" for keys in (
    "s_q=3,s_kv=40,h_q=2,topk=30",
    "s_q=3,s_kv=40,h_q=2,topk=30,d_qk=512,values=large,sm_scale=0.3",
    "s_q=6,s_kv=70,h_q=3,topk=66,rows=ragged,holes=0.2,sink=normal",
    "s_q=9,s_kv=50,h_q=12,topk=20,rows=mixed,tail=wild,sink=mixed",
    "s_q=9,s_kv=50,h_q=2,topk=20,rows=mixed,tail=live,values=poison",
    "s_q=4,s_kv=50,h_q=2,topk=20,rows=full,holes=1.0,sink=normal",
    "s_q=7,s_kv=60,h_q=2,topk=20,rows=causal,requests=3/20+2/9,pad_rows=2,values=flat",
    "s_q=4,s_kv=90,h_q=2,topk=70,rows=full,values=integer,d_qk=512,lead=9",
    "dtype=fp8,s_q=3,s_kv=90,h_q=2,topk=66,rows=ragged,holes=0.1,sink=normal",
    "dtype=fp8,s_q=3,s_kv=90,h_q=2,topk=66,rows=full,values=large",
    "dtype=fp8,s_q=4,s_kv=90,h_q=2,topk=66,rows=full,values=peaked,peak=30.0,peak_at=last",
    "dtype=fp8,s_q=9,s_kv=50,h_q=2,topk=20,rows=mixed,tail=wild,values=poison")]
NAMES = ("out", "max_logits", "lse")


def naive(inputs: Inputs, row: int, head: int) -> tuple[torch.Tensor, float, float]:
    """out [512], max_logits, lse of one query and head: a loop over its entries in fp64."""
    case, scales = inputs.case, (inputs.values.q_scale, inputs.values.kv_scale)
    q = inputs.q[row, head].double() * scales[0]
    keys = [int(t) for t in inputs.indices[row, 0, : int(inputs.valid[row])] if 0 <= int(t) < case.s_kv]
    if not keys:
        return torch.zeros(D_V, dtype=torch.float64), -math.inf, math.inf
    kv = [inputs.kv[t, 0].double() * scales[1] for t in keys]
    scores = [case.scale * float(q @ k) for k in kv]
    highest = max(scores)
    lse = highest + math.log(math.fsum(math.exp(s - highest) for s in scores))
    out = sum(math.exp(s - lse) * k[:D_V] for s, k in zip(scores, kv))
    if inputs.sink is not None:
        sink = float(inputs.sink[head])
        out = out * (0.0 if sink == math.inf else 1 / (1 + math.exp(sink - lse)))
    return out, highest, lse


@pytest.mark.parametrize("text", TINY)
def test_reference_is_what_a_plain_loop_computes(text: str) -> None:
    inputs = inputs_of(text)
    got = reference(inputs, torch.float64)
    for row in range(inputs.case.s_q):
        for head in range(inputs.case.h_q):
            out, max_logits, lse = naive(inputs, row, head)
            torch.testing.assert_close(got.out[row, head], out, rtol=1e-10, atol=1e-12)
            assert float(got.max_logits[row, head]) == pytest.approx(max_logits, rel=1e-12, abs=1e-12)
            assert float(got.lse[row, head]) == pytest.approx(lse, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("text", TINY)
def test_fp32_reference_uses_little_of_the_budget(text: str) -> None:
    inputs = inputs_of(text)
    exact, single = reference(inputs, torch.float64), expected_of(text)
    for name in NAMES:
        error = margin(getattr(single, name), getattr(exact, name), getattr(exact, f"{name}_budget"))
        assert float(error.max()) < (0.02 if name == "out" else 0.25), name
    for name in ("out_budget", "row_budget", "lse_budget", "max_logits_budget"):
        torch.testing.assert_close(getattr(single, name).double(), getattr(exact, name), rtol=1.0, atol=1e-12)  # an ULP may halve or double


@pytest.mark.parametrize("text", [TINY[2], TINY[3], TINY[8]])
def test_rows_taken_one_at_a_time_give_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, whole = inputs_of(text), reference(inputs_of(text), torch.float64)
    monkeypatch.setattr(module, "MEMORY_BUDGET", {"cpu": 1})
    assert module.rows_at_once(inputs, torch.float64) == 1
    each = reference(inputs, torch.float64)
    for field in dataclasses.fields(Expected):
        torch.testing.assert_close(getattr(each, field.name), getattr(whole, field.name), rtol=1e-12, atol=1e-15)


# --- fp32 that is fp32 ------------------------------------------------------------------------------------------------


def test_full_precision_sets_and_restores_also_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyError), full_precision(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            raise KeyError
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kept", [10, 7])  # mantissa bits of TF32 and of bf16
def test_full_precision_raises_where_products_are_rounded(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.Tensor.__matmul__

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return exact((a * 2.0**kept).round() / 2.0**kept, b)

    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    with pytest.raises(RuntimeError, match="not fp32"), full_precision(torch.device("cpu")):
        pass
    assert torch.get_float32_matmul_precision() == before


# --- budgets ----------------------------------------------------------------------------------------------------------


def judged(text: str, outputs: Outputs) -> Check:
    inputs = inputs_of(text)
    return checks.against_reference(outputs, expected_of(text), describe_rows(None, inputs.valid_entries, inputs.valid))


def has_a_key(text: str) -> bool:
    return "rows=allpad" not in text


def a_dropped_key_must_show(text: str) -> bool:
    """Exact cases, and normal values with at most 256 keys: there one key weighs more than all rounding."""
    case = parse_case(text)
    return has_a_key(text) and (case.exact or (case.values == "normal" and case.topk <= 256))


@pytest.mark.parametrize("text", SMOKE)
def test_a_right_kernel_meets_the_budgets_and_uses_some_of_them(text: str) -> None:
    check = judged(text, launch("torch_blocks", inputs_of(text), sources_of(text)[0]))
    assert check.verdict is Verdict.PASSED
    assert set(check.margins) == {"out", "max_logits", "lse", "out row norm"}
    if has_a_key(text):
        assert 0.05 < max(check.margins.values()) <= 1
        assert check.margins["out"] > 0 and check.margins["out row norm"] > 0


@pytest.mark.parametrize("text", [text for text in SMOKE if has_a_key(text)])
def test_a_zero_out_and_a_negated_out_fail(text: str) -> None:
    out, max_logits, lse = launch("torch_blocks", inputs_of(text), sources_of(text)[0])
    for wrong in (torch.zeros_like(out), -out):
        check = judged(text, (wrong, max_logits, lse))
        assert check.verdict is Verdict.FAILED
        assert check.margins["out"] > 1 and check.margins["out row norm"] > 1


@pytest.mark.parametrize("text", [text for text in SMOKE if a_dropped_key_must_show(text)])
def test_a_dropped_key_fails_by_out_alone(text: str) -> None:
    check = judged(text, launch("broken_drops_last_key", inputs_of(text), sources_of(text)[0]))
    assert check.verdict is Verdict.FAILED
    assert check.margins["out"] > 1 and check.margins["out row norm"] > 1


def test_statistics_are_judged_by_themselves() -> None:
    out, max_logits, lse = launch("torch_blocks", inputs_of(SMOKE[0]), "none")
    for name, outputs in {"lse": (out, max_logits, lse + 0.002), "max_logits": (out, max_logits - 0.002, lse)}.items():
        check = judged(SMOKE[0], outputs)
        assert check.verdict is Verdict.FAILED and f"{name} in " in check.detail
        assert check.margins["out"] < 1


def test_an_error_spread_thinly_over_rows_fails_by_the_row_norm() -> None:
    """Each element within its own budget, but all of them off: only the norm over the row can tell."""
    expected = expected_of(SMOKE[0])
    out = (expected.out + 0.6 * expected.out_budget).bfloat16()
    check = judged(SMOKE[0], (out, expected.max_logits, expected.lse))
    assert check.verdict is Verdict.FAILED and "out row norm in " in check.detail
    assert check.margins["out"] <= 1 and check.first and check.where


def test_a_budget_that_admits_zeros_is_called_vacuous() -> None:
    expected, text = expected_of(SMOKE[0]), SMOKE[0]
    inputs = inputs_of(text)
    wide = dataclasses.replace(expected, out_budget=expected.out.abs() + 1, row_budget=expected.row_budget + 1e6)
    rows = describe_rows(None, inputs.valid_entries, inputs.valid)
    right = (expected.out.bfloat16(), expected.max_logits, expected.lse)
    check = checks.against_reference(right, wide, rows)
    assert check.verdict is Verdict.VACUOUS and "all-zero out would pass" in check.detail
    for either in ("out_budget", "row_budget"):  # one of the two is enough to tell
        tight = dataclasses.replace(wide, **{either: getattr(expected, either)})
        assert checks.against_reference(right, tight, rows).verdict is Verdict.PASSED


def test_empty_rows_have_no_budget() -> None:
    text = next(case for case in SMOKE if "allpad" in case)
    assert not has_a_key(text)
    expected = expected_of(text)
    assert not bool(expected.out_budget.any()) and not bool(expected.lse_budget.any())
    out = expected.out.bfloat16()
    out[0, 0, 0] = 1e-30
    check = judged(text, (out, expected.max_logits, expected.lse))
    assert check.verdict is Verdict.FAILED and check.bad == 1
    assert check.margins["out"] == checks.BIGGEST


def test_bf16_ulp_is_the_spacing_of_bf16() -> None:
    x = torch.tensor([1.0, 1.5, 1.9921875, 2.0, 3.0, 0.1, 1e-20, 448.0]).bfloat16()
    spacing = (x.view(torch.int16) + 1).view(torch.bfloat16).double() - x.double()
    assert torch.equal(bf16_ulp(x.double()), spacing)
    assert torch.equal(bf16_ulp(-x.double()), spacing)
    assert float(bf16_ulp(torch.zeros(1))) == 2.0**-133


def test_p_error_bounds_what_rounding_does() -> None:
    p = torch.cat([torch.logspace(-12, 0, 4000, base=10), 2.0 ** torch.arange(-20, 1)])
    for name, dtype in {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}.items():
        error = (p.to(dtype).float() - p).abs() / p
        assert bool((error <= p_error(p, ROUNDOFF[name])).all()), name
        assert float(torch.as_tensor(p_error(p, ROUNDOFF[name])).max()) <= 1  # bf16: one number for every P
