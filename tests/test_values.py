"""What q, kv and attn_sink hold in each pattern, as the table in cases/values.py says."""
from __future__ import annotations

import math

import pytest
import torch
from trials import inputs_of

from cases import CaseError, parse_case
from cases.inputs import Inputs, make_inputs
from cases.sparse_prefill import D_V, SCORE_COLUMNS, VALUES

DTYPES = ("bf16", "fp8")


def dequantised(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """q and kv [s_kv, d_qk] as the kernel is meant to see them, in fp64."""
    return inputs.q.double() * inputs.values.q_scale, inputs.kv[:, 0].double() * inputs.values.kv_scale


def scores(inputs: Inputs) -> torch.Tensor:
    """Unscaled scores of every query with every key, fp64 [s_q, h_q, s_kv]."""
    q, kv = dequantised(inputs)
    return q @ kv.T


def case_of(values: str, dtype: str, extra: str = "") -> Inputs:
    return inputs_of(f"sparse_prefill:dtype={dtype},s_q=6,s_kv=400,h_q=4,topk=200,values={values}{extra}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", VALUES)
def test_values_are_finite_and_not_constant(values: str, dtype: str) -> None:
    inputs = case_of(values, dtype)
    q, kv = dequantised(inputs)
    v = kv[inputs.named, :D_V]
    assert bool(q.isfinite().all()) and bool(v.isfinite().all())
    assert len(v.unique()) >= 5 and len(q.unique()) >= 2
    assert not torch.equal(v[0], v[1]) and not torch.equal(v[:, 1], v[:, 3])
    assert (inputs.q.dtype, inputs.kv.dtype) == ((torch.bfloat16,) * 2 if dtype == "bf16" else (torch.float8_e4m3fn,) * 2)


@pytest.mark.parametrize("values", [v for v in VALUES if v != "peaked"])  # peaked: one value for all heads, by design
def test_q_differs_between_heads_and_rows(values: str) -> None:
    q, _ = dequantised(case_of(values, "bf16"))
    assert len(q[0].unique(dim=0)) >= 3
    assert len(q.view(24, -1).unique(dim=0)) >= 15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("values", "sigma"), [("normal", 1.155), ("large", 9.24)])
def test_bell_shaped_values_have_the_stated_spread(values: str, sigma: float, dtype: str) -> None:
    q, kv = dequantised(case_of(values, dtype))
    assert float(q.std()) == pytest.approx(1.155, rel=0.03) and abs(float(q.mean())) < 0.05
    assert float(kv.std()) == pytest.approx(sigma, rel=0.03) and float(kv.abs().max()) < 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", ["pad", "live"])
def test_poison_is_nan_in_exactly_the_rows_that_no_valid_entry_names(dtype: str, tail: str) -> None:
    inputs = case_of("poison", dtype, f",rows=mixed,tail={tail}")
    for kv in (inputs.kv, inputs.values.kv):
        assert torch.equal(kv[:, 0].float().isnan().all(1), ~inputs.named)
        assert torch.equal(kv[:, 0].float().isnan().any(1), ~inputs.named)
    assert bool(inputs.named.any()) and not bool(inputs.named.all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_flat_scores_are_exactly_equal(dtype: str) -> None:
    each = scores(case_of("flat", dtype))
    assert bool((each == each[..., :1]).all())
    assert len(each[..., 0].unique()) > 5  # and different between queries


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_probabilities_are_one_half_quarter_of_the_largest(dtype: str, d_qk: int) -> None:
    inputs = case_of("integer", dtype, f",d_qk={d_qk}")
    steps = scores(inputs) / 16
    assert set(steps.unique().tolist()) == {0.0, -1.0, -2.0}
    assert inputs.case.scale * 16 == pytest.approx(math.log(2), rel=1e-15)
    v = dequantised(inputs)[1][:, : d_qk - SCORE_COLUMNS]
    assert set(v.unique().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("peak", [5.0, 7.0, 80.0])
def test_one_key_stands_peak_nats_above_the_others(dtype: str, peak: float) -> None:
    inputs = case_of("peaked", dtype, f",peak={peak}")
    nats = scores(inputs) * inputs.case.scale
    assert bool((nats[..., 1:] == 0).all())
    assert float(nats[0, 0, 0]) == pytest.approx(peak, rel=0.1 if dtype == "fp8" else 0.02)  # what the dtype rounds x to
    v = dequantised(inputs)[1][:, : 512 - SCORE_COLUMNS]
    assert bool((v[:, 0::2] == 1).all()) and len(v[:, 1::2].unique()) > 50


@pytest.mark.parametrize("keys", ["dtype=fp8,sm_scale=1e-05", "dtype=fp8,sm_scale=0.001,peak=80.0", "sm_scale=1e-300"])
def test_a_peak_is_as_high_as_asked_for_or_refused(keys: str) -> None:
    """fp8: x / scale is more than the 448 that e4m3 holds. 1e-300: x is no float32."""
    try:
        case = parse_case(f"sparse_prefill:s_q=2,s_kv=300,h_q=1,topk=100,values=peaked,{keys}")
    except CaseError:
        return
    inputs = make_inputs(case, "cpu")
    assert float(scores(inputs)[0, 0, 0] * case.scale) == pytest.approx(case.peak, rel=0.1)


@pytest.mark.parametrize("values", VALUES)
def test_fp8_stays_in_range_and_its_scales_are_powers_of_two(values: str) -> None:
    inputs = case_of(values, "fp8")
    for tensor, scale in ((inputs.q, inputs.values.q_scale), (inputs.kv[inputs.named], inputs.values.kv_scale)):
        assert float(tensor.float().abs().max()) <= 448
        assert math.frexp(scale)[0] == 0.5
    original, quantised = inputs.values.q.double(), dequantised(inputs)[0]
    assert bool(((quantised - original).abs() <= original.abs() * 2.0**-4 + 2.0**-8 * 2.0**-10).all())


def test_sinks() -> None:
    assert case_of("normal", "bf16").sink is None
    normal = make_inputs(parse_case("sparse_prefill:s_q=1,h_q=500,sink=normal"), "cpu").sink
    mixed = make_inputs(parse_case("sparse_prefill:s_q=1,h_q=500,sink=mixed"), "cpu").sink
    assert normal is not None and mixed is not None and normal.dtype == torch.float32
    assert float(normal.mean()) == pytest.approx(4, abs=0.5) and float(normal.std()) == pytest.approx(2.31, rel=0.15)
    assert set(mixed[1::2].tolist()) == {-math.inf, math.inf, 0.0, 88.0, -88.0}
    assert torch.equal(mixed[0::2], normal[0::2])
