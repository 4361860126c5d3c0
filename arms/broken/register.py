"""How broken kernels are registered: a decorator for each family, on a wrong launch, with what it is there for (fault.py)."""
from __future__ import annotations

from collections.abc import Callable

import torch

from arms.broken.fault import declare
from arms.kernel import Launch, Outputs, Problem, SkipPromise, sparse_prefill_kernel
from arms.lengths import SOURCES, Source
from arms.sparse_prefill.torch_blocks import REQUIRES, attention
from arms.topk import TopkLaunch, TopkProblem, TopkResult, indexer_topk_kernel, no_bound
from cases.fault import Fault
from cases.inputs import Inputs

Length = torch.Tensor | None
Wrong = Callable[[Problem, Length], Outputs]
WrongChoice = Callable[[TopkProblem], TopkResult]


def broken(name: str, check: str, case: str, promise: SkipPromise = SkipPromise(), also: tuple[str, ...] = (), boundary: str = "",
           reports: tuple[str, ...] = ()) -> Callable[[Wrong], Wrong]:
    """Register a wrong launch of sparse_prefill as kernel `broken_<name>`; the rest as in Fault."""
    declare(Fault(f"broken_{name}", "sparse_prefill", check, case, also, boundary, reports))

    def register(launch: Wrong) -> Wrong:
        def prepare(problem: Problem) -> Launch:
            return lambda length: launch(problem, length)

        sparse_prefill_kernel(f"broken_{name}", requires=REQUIRES, promise=promise)(prepare)
        return launch

    return register


def broken_source(name: str, check: str, case: str, source: str, derive: Callable[[Inputs], torch.Tensor], boundary: str = "",
                  reports: tuple[str, ...] = ()) -> None:
    """Register torch_blocks with one topk_length source replaced, as kernel `broken_<name>`."""
    declare(Fault(f"broken_{name}", "sparse_prefill", check, case, (), boundary, reports))
    replaced = {**SOURCES, source: Source(lambda inputs: lambda: derive(inputs))}

    @sparse_prefill_kernel(f"broken_{name}", requires=REQUIRES, sources=replaced)
    def prepare(problem: Problem) -> Launch:
        return lambda length: attention(problem, length)


def broken_topk(name: str, check: str, case: str, memory: Callable[[TopkProblem], int] = no_bound, also: tuple[str, ...] = (),
                boundary: str = "", reports: tuple[str, ...] = (), arm: str = "litetopk") -> Callable[[WrongChoice], WrongChoice]:
    """Register a wrong launch of indexer_topk as kernel `broken_<name>`, a litetopk or a dense arm; the rest as in Fault."""

    def register(launch: WrongChoice) -> WrongChoice:
        def prepare(problem: TopkProblem) -> TopkLaunch:
            return lambda: launch(problem)

        broken_topk_set_up(name, check, case, memory, also, boundary, reports, arm)(prepare)
        return launch

    return register


def broken_topk_set_up(name: str, check: str, case: str, memory: Callable[[TopkProblem], int] = no_bound, also: tuple[str, ...] = (),
                       boundary: str = "", reports: tuple[str, ...] = (), arm: str = "litetopk",
                       ) -> Callable[[Callable[[TopkProblem], TopkLaunch]], Callable[[TopkProblem], TopkLaunch]]:
    """The same for a fault in set-up: the decorated function makes the launch."""
    declare(Fault(f"broken_{name}", "indexer_topk", check, case, also, boundary, reports))
    return indexer_topk_kernel(f"broken_{name}", arm=arm, memory=memory)
