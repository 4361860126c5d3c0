"""Declared limits are tried: one that is still there, one that is not; and every declaration names a case that it refuses."""
from __future__ import annotations

import pytest
import torch
from processes import FAULTY, threearm

from arms.kernel import KERNELS, Limit, load_package
from cases import parse_case
from harness.availability import refusal

load_package("arms.sparse_prefill")
load_package("arms.indexer_topk")
LIMITS = [(kernel.name, limit, arm) for kernel in KERNELS.values() for limit in kernel.requires.limits
          for arm in kernel.arms if arm in limit.sources]


@pytest.mark.parametrize(("name", "limit", "arm"), LIMITS)
def test_a_limit_names_a_case_that_it_refuses(name: str, limit: Limit, arm: str) -> None:
    case = parse_case(limit.case)
    assert str(case) == limit.case
    assert limit.reason in refusal(KERNELS[name], arm, case)


def test_a_limit_that_is_there_and_one_that_is_outgrown() -> None:
    loaded = ("--load", str(FAULTY / "limited.py"), "--arm", "limited", "--arm", "outgrown")
    done = threearm("limits", "--device", "cpu", *loaded, COLUMNS="140")
    assert done.code == 1
    assert "still there: FAILED" in done.text and "no sink without a length" in done.text
    assert "outgrown/none passes sparse_prefill:" in done.text.replace("\n", " ")
    assert "2 limits tried, 1 still there; 0 not tried" in done.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the limits of its kernels are tried")
def test_what_cannot_be_tried_says_why() -> None:
    done = threearm("limits", "--device", "cpu", "--arm", "sglang_q8kv8", COLUMNS="140")
    assert done.code == 5
    assert "not tried: needs a cuda device" in done.text
