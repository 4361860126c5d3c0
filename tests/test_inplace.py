"""Whether a launch reads q and kv anew: who copies in set-up may, who gives an earlier launch's result again may not."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from arms_under_test import FP8, HALF, kernel_of
from trials import expected_of

from arms.kernel import Launch, Outputs, Problem
from arms.lengths import SOURCES
from arms.sparse_prefill.torch_blocks import attention
from cases import parse_case
from cases.inputs import make_inputs
from harness.inplace import negate
from harness.trial import KernelTrial
from harness.verdicts import Check, Verdict

EMPTY = "sparse_prefill:s_q=4,s_kv=64,h_q=2,topk=128,rows=allpad"


def found(prepare: Callable[[Problem], Launch], text: str) -> list[Check]:
    """The check, of each arm."""
    kernel, inputs = dataclasses.replace(kernel_of(attention), prepare=prepare), make_inputs(parse_case(text), "cpu")
    trial = KernelTrial(kernel, inputs, expected_of(text), inputs.digests(), lambda phase: None)
    return [check for source in SOURCES for check in trial.run(source).checks if check.name == "reads-inputs"]


def copies(*names: str) -> Callable[[Problem], Launch]:
    """A right kernel whose set-up copies these of its inputs."""
    def prepare(p: Problem) -> Launch:
        kept = dataclasses.replace(p, **{name: getattr(p, name).clone() for name in names})
        return lambda length: attention(kept, length)

    return prepare


@pytest.mark.parametrize("text", [HALF, FP8])
@pytest.mark.parametrize("names", [(), ("q",), ("kv",), ("q", "kv")])
def test_set_up_may_copy(names: tuple[str, ...], text: str) -> None:
    every = found(copies(*names), text)
    assert [check.verdict for check in every] == [Verdict.PASSED] * 3
    assert all(("set-up copies q" in check.detail) is ("q" in names) for check in every)


def test_a_result_that_is_given_again_is_found() -> None:
    def prepare(p: Problem) -> Launch:
        kept: dict[bool, Outputs] = {}

        def launch(length: torch.Tensor | None) -> Outputs:
            return kept.setdefault(length is None, attention(p, length))

        return launch

    every = found(prepare, HALF)
    assert [check.verdict for check in every] == [Verdict.FAILED] * 3
    assert all(check.detail.startswith("results of an earlier launch are given again") for check in every)


def test_rows_without_a_key_have_nothing_to_read() -> None:
    assert found(copies(), EMPTY) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_signs_change_and_change_back(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -1.5, 448.0, float("nan")]).to(dtype)
    before = x.float()
    negate(x)
    assert torch.equal(x.float()[:3], -before[:3]) and bool(x.float()[3].isnan())
    negate(x)
    assert torch.equal(x.float()[:3], before[:3])
