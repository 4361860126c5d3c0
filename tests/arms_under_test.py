"""Shared by tests: an unregistered kernel of sparse_prefill taken through its checks, or through one relation."""
from __future__ import annotations

from collections.abc import Callable

import torch
from trials import expected_of, inputs_of

from arms.kernel import BITWISE, KERNELS, Kernel, Launch, Outputs, Problem, Requires, SkipPromise, make_problem
from arms.lengths import SOURCES
from cases import parse_case
from cases.inputs import make_inputs
from harness.locate.localise import describe_rows
from harness.trial import KernelTrial
from harness.variations import Subject, copied
from harness.verdicts import Check

FULL = "sparse_prefill:s_q=6,s_kv=300,h_q=2"
HALF = "sparse_prefill:s_q=5,s_kv=3000,h_q=2,topk=192,rows=half"
FP8 = "sparse_prefill:dtype=fp8,s_q=4,s_kv=300,h_q=2,topk=64,rows=half,scales=any"
ONE = "sparse_prefill:s_q=1,s_kv=4,h_q=1,topk=4"

Length = torch.Tensor | None


def kernel_of(launch: Callable[[Problem, Length], Outputs], promise: SkipPromise = BITWISE, requires: Requires = Requires()) -> Kernel:
    return Kernel("kernel", lambda p: lambda length: launch(p, length), requires, KERNELS["torch_blocks"].convention,  # type: ignore[union-attr]
                  promise, dict(SOURCES), __file__)


def run(text: str, launch: Callable[[Problem, Length], Outputs], source: str = "none", promise: SkipPromise = BITWISE,
        requires: Requires = Requires()) -> dict[str, Check]:
    """The checks of one arm of an unregistered kernel, by name."""
    inputs = make_inputs(parse_case(text), "cpu")
    trial = KernelTrial(kernel_of(launch, promise, requires), inputs, expected_of(text), inputs.digests(), lambda phase: None)
    return {check.name: check for check in trial.run(source).checks}


def subject_of(text: str, source: str = "none", kernel: Kernel | None = None) -> Subject:
    inputs, used = inputs_of(text), kernel or KERNELS["torch_blocks"]
    length = SOURCES[source].prepare(inputs)()
    problem = make_problem(inputs)

    def ready(p: Problem) -> Launch:
        return used.prepare(p)  # type: ignore[arg-type,return-value]

    outputs = copied(ready(problem)(length))
    return Subject(used, inputs, expected_of(text), problem, length, outputs,  # type: ignore[arg-type]
                   describe_rows(length, inputs.valid_entries, inputs.valid), ready, lambda x, _: copied(x), lambda phase: None)
