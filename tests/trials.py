"""Shared by tests: a case's inputs and reference, made once, and a kernel taken through its arms in this process."""
from __future__ import annotations

import functools

import torch

from arms.kernel import KERNELS, Launch, Outputs, load_package, make_problem
from cases import load_suite, parse_case
from cases.inputs import Inputs, make_inputs
from harness.trial import ArmRun, KernelTrial
from harness.verdicts import SOURCES
from references import Expected, reference

# Small products on shared cores: a second thread that has to wait for a core costs 30 times more than it saves.
torch.set_num_threads(1)
load_package("arms.sparse_prefill")

SMOKE = [str(case) for case in load_suite("smoke") if case.family == "sparse_prefill"]


@functools.lru_cache(maxsize=8)
def inputs_of(text: str) -> Inputs:
    """A case's inputs on the CPU. Shared: a test must not write into them."""
    return make_inputs(parse_case(text), "cpu")


@functools.lru_cache(maxsize=8)
def expected_of(text: str) -> Expected:
    """The fp32 reference of a case. Shared."""
    return reference(inputs_of(text))


def prepared(name: str, inputs: Inputs) -> Launch:
    """A kernel made ready for a case's inputs."""
    return KERNELS[name].prepare(make_problem(inputs))


def launch(name: str, inputs: Inputs, source: str) -> Outputs:
    """One launch of one arm."""
    return prepared(name, inputs)(KERNELS[name].sources[source].prepare(inputs)())


def sources_of(text: str) -> tuple[str, ...]:
    """The arms that take a case: where live indices stand past the length, the one that is given the length."""
    return ("metadata",) if "tail=live" in text else SOURCES


def run_arms(name: str, text: str) -> dict[str, ArmRun]:
    """Every arm of a kernel on a case, with inputs of its own (a broken kernel may write into them), by source."""
    inputs = make_inputs(parse_case(text), "cpu")
    trial = KernelTrial(KERNELS[name], inputs, expected_of(text), inputs.digests(), lambda phase: None)
    return {source: trial.run(source) for source in sources_of(text)}
