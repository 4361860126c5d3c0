"""Shared by tests of indexer_topk: a case's inputs and reference, made once, and a kernel taken through its checks in this process."""
from __future__ import annotations

import functools

import torch

from arms.kernel import KERNELS, load_package
from cases import IndexerTopkCase, parse_case
from cases.indexer_inputs import IndexerInputs, make_indexer_inputs
from harness.topk_trial import TopkRun, TopkTrial
from references.indexer_topk import TopkExpected, topk_reference

# Small products on shared cores: a second thread that has to wait for a core costs 30 times more than it saves.
torch.set_num_threads(1)
load_package("arms.indexer_topk")


def topk_inputs(text: str) -> IndexerInputs:
    """A case's inputs on the CPU, a test's own."""
    case = parse_case(text)
    assert isinstance(case, IndexerTopkCase)
    return make_indexer_inputs(case, "cpu")


@functools.lru_cache(maxsize=8)
def topk_expected(text: str) -> TopkExpected:
    """The fp32 reference of a case. Shared."""
    return topk_reference(topk_inputs(text))


def topk_trial(name: str, text: str) -> TopkTrial:
    """A kernel on a case, with inputs of its own (a broken kernel may write into them)."""
    inputs = topk_inputs(text)
    kernel = KERNELS[name]
    return TopkTrial(kernel, inputs, topk_expected(text), inputs.digests(), lambda phase: None)  # type: ignore[arg-type]


def run_topk(name: str, text: str) -> TopkRun:
    """The kernel's only arm on a case."""
    trial = topk_trial(name, text)
    return trial.run(trial.kernel.arm)
