"""What the harness needs to know of a family: how its inputs are made, what is right, and what judges a kernel. Worker side.

A Trial is one kernel on one case. The worker makes it as

    trial = FAMILIES[kernel.family].trial(kernel, inputs, expected, digests, phase)

with inputs from `make_inputs(case, device)`, expected from `reference(inputs, dtype)` (dtype fp32, or fp64 with --fp64), digests from
`inputs.digests()` before anything was launched, and phase(name), which announces what is about to happen ("prepare", "first launch",
"launch", "judge"): the parent's clock starts anew with every call, so a trial calls it before each long step. Then it asks for
`trial.run(arm)`, once for each arm in the kernel's order, and for those whose checks all passed `trial.timed(arm)` and, after the
timed loop, `trial.check_timed(arm, last)`. An exception in phase prepare, (first) launch or timing is the kernel's fault, in another
phase the harness's own.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from arms.kernel import Kernel, make_problem, normalise
from arms.topk import TopkKernel
from cases.indexer_inputs import IndexerInputs, make_indexer_inputs
from cases.inputs import Inputs, make_inputs
from harness.checks import NAMES
from harness.record import Lengths
from harness.roofline import Work, indexer_topk_work, sparse_prefill_work
from harness.timing import Timed
from harness.topk_launches import taken
from harness.topk_trial import TopkTrial, make_topk_problem
from harness.trial import KernelTrial, made_ready
from harness.verdicts import Check
from references.indexer_topk import topk_reference
from references.sparse_prefill import reference


class Run(Protocol):
    """What Trial.run returns: one arm, launched and judged. Plain attributes or properties, as the trial likes."""

    @property
    def checks(self) -> list[Check]:
        """Every check; the arm's verdict is the worst of theirs."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The outputs whose fingerprints are recorded, by name. They must not change any more."""

    @property
    def lengths(self) -> Lengths | None:
        """Statistics of the topk_length that the arm was given; None without one."""

    @property
    def note(self) -> str:
        """What a reader must know, or ""."""

    @property
    def extra(self) -> dict[str, float]:
        """Reported, not judged."""

    @property
    def ways(self) -> dict[str, int]:
        """How many rows came to their result which way (arms.topk.WAYS); {} where the arm does not say."""

    @property
    def memory(self) -> int | None:
        """Bytes that a launch held at its peak beyond inputs and outputs; None where it was not measured."""


class Trial(Protocol):
    """One kernel on one case. launches: how many run-to-run makes back to back."""

    launches: int

    def run(self, arm: str) -> Run:
        """Launch an arm as often as its checks need, and judge it, also against the arms run before. Raises what the kernel raises."""

    def timed(self, arm: str) -> Timed:
        """What is timed of an arm that was run: derive() and launch(derived), whose result the worker keeps from the last call.
        Prepares, if need be (phase "prepare"); a family without a topk_length has derive return None."""

    def check_timed(self, arm: str, last: Any) -> Check:
        """The check "timed-output": whether `last`, what launch() returned in the last timed call, is right once more.
        FLAKY where the checked call was right and the timed one is not."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What is done differently in another family."""

    make_inputs: Callable[[Any, torch.device], Any]
    reference: Callable[[Any, torch.dtype], Any]
    trial: Callable[[Any, Any, Any, dict[str, str], Callable[[str], None]], Trial]
    work: Callable[[Any], Work]
    """What no right kernel can leave out, from the inputs."""
    timed: Callable[[Any, Any, str], tuple[Timed, Callable[[Any], dict[str, torch.Tensor]]]]
    """(kernel, inputs, arm): what is timed of an arm without judging it, and what makes tensors that can be compared of a launch's
    result. Raises what the kernel raises."""


def _sparse_prefill_timed(kernel: Kernel, inputs: Inputs, arm: str) -> tuple[Timed, Callable[[Any], dict[str, torch.Tensor]]]:
    launch = made_ready(kernel, make_problem(inputs))
    return (Timed(kernel.sources[arm].prepare(inputs), launch),
            lambda raw: dict(zip(NAMES, normalise(raw, kernel.convention))))


def _indexer_topk_timed(kernel: TopkKernel, inputs: IndexerInputs, arm: str) -> tuple[Timed, Callable[[Any], dict[str, torch.Tensor]]]:
    problem = make_topk_problem(inputs)
    launch = made_ready(kernel, problem)
    return (Timed(lambda: None, lambda _: launch()),
            lambda raw: {"set": taken(raw, problem).indices.sort(1).values})


FAMILIES = {
    "sparse_prefill": Family(make_inputs, reference, KernelTrial, sparse_prefill_work, _sparse_prefill_timed),
    "indexer_topk": Family(make_indexer_inputs, topk_reference, TopkTrial, indexer_topk_work, _indexer_topk_timed),
}
