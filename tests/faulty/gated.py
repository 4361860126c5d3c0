"""One kernel as two versions of a wheel would have it: what is wrong with it is said by a variable of the environment, case by case.

GATED_FAULTS holds the h_q of the cases in which something is wrong, separated by commas; what, is in DEEDS. `packaged` needs a package that
tests/wheels.py writes in two versions: the second one rounds otherwise.
"""
from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import time
from collections.abc import Callable

import torch

from arms.kernel import Launch, Outputs, Problem, Requires, sparse_prefill_kernel
from arms.sparse_prefill.torch_blocks import attention

ACTIVE = {int(word) for word in os.environ.get("GATED_FAULTS", "").split(",") if word}
_LAUNCHES = itertools.count()


def one_ulp(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    """Small elements move to a neighbour: within the budget, which goes by the largest ones."""
    out = outputs[0]
    small = (out != 0) & (out.abs() < 0.125)
    return torch.where(small, (out.view(torch.int16) ^ 1).view(torch.bfloat16), out), outputs[1], outputs[2]


def zero(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    return torch.zeros_like(outputs[0]), outputs[1], outputs[2]


def nan(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    outputs[0][0, 0, 0] = float("nan")
    return outputs


def race(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    return one_ulp(outputs, length) if next(_LAUNCHES) % 2 else outputs


def base_2(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    return outputs[0], outputs[1], outputs[2] / 0.6931471805599453


def segfault(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    if length is None:
        ctypes.string_at(0)
    return outputs


def hang(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    if length is None:
        time.sleep(1000)
    return outputs


def no_memory(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    raise MemoryError("deliberate")


def one_ulp_and_the_last_arm_dies(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
    """Of the three arms metadata alone hands over a 0, so what the other two gave is lost with the process."""
    if length is not None and int(length.min()) == 0:
        ctypes.string_at(0)
    return one_ulp(outputs, length)


DEEDS: dict[int, Callable[[Outputs, torch.Tensor | None], Outputs]] = {
    11: one_ulp, 12: zero, 13: nan, 14: race, 15: base_2, 16: segfault, 17: hang, 18: no_memory, 19: one_ulp_and_the_last_arm_dies,
    20: zero, 21: zero}


@sparse_prefill_kernel("gated")
def gated(problem: Problem) -> Launch:
    h_q = problem.q.shape[1]
    deed = DEEDS[h_q] if h_q in ACTIVE else lambda outputs, length: outputs
    return lambda length: deed(attention(problem, length), length)


@sparse_prefill_kernel("packaged", requires=Requires(distribution=("threearm-test-package",), entry="threearm_test_package:forward"))
def packaged(problem: Problem) -> Launch:
    version = importlib.import_module("threearm_test_package").VERSION
    return lambda length: one_ulp(attention(problem, length), length) if version == "2.0" else attention(problem, length)
