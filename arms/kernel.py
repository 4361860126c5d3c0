"""What a kernel is to the harness, and how one is registered: `@sparse_prefill_kernel(...)` on one function.

The function gets a Problem and returns the callable that launches the kernel; whatever it does before returning
(casts, padding, layout) is set-up and is not timed. It becomes three arms, one per topk_length source (lengths.py).
See ADD_ARM.md.
"""
from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from arms.lengths import SOURCES, Source
from cases.inputs import Inputs
from cases.sparse_prefill import D_V

if TYPE_CHECKING:
    from arms.topk import TopkKernel

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""out [s_q, h_q, 512] bf16, max_logits [s_q, h_q] fp32, lse [s_q, h_q] fp32: the order every public kernel returns."""

Launch = Callable[["torch.Tensor | None"], Outputs]
"""Runs the kernel once with topk_length int32 [s_q], or None."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is given, in the field's own names.

    q [s_q, h_q, d_qk] and kv [s_kv, 1, d_qk]: bf16, or e4m3 to be multiplied by q_scale and kv_scale (fp32 [1], on the
    device); indices int32 [s_q, 1, topk]; sm_scale: float; attn_sink: fp32 [h_q] in nats, or None; d_v = 512.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    attn_sink: torch.Tensor | None
    q_scale: torch.Tensor
    kv_scale: torch.Tensor
    d_v: int = D_V

    @property
    def fp8(self) -> bool:
        return self.q.dtype == torch.float8_e4m3fn


def make_problem(inputs: Inputs) -> Problem:
    """The kernel's view of a case's tensors (no copies)."""
    scales = [torch.tensor([s], dtype=torch.float32, device=inputs.device) for s in (inputs.values.q_scale, inputs.values.kv_scale)]
    return Problem(inputs.q, inputs.kv, inputs.indices, inputs.case.scale, inputs.sink, scales[0], scales[1])


@dataclasses.dataclass(frozen=True)
class Limit:
    """A documented limit of a kernel: the arms of these names (`sources`) are not run on cases whose `key` holds one of `values`.

    case: the text of a case on which it shows. `threearm limits` runs the arms on it: one that passes has outgrown its limit.
    """

    sources: tuple[str, ...]
    key: str
    values: tuple[str, ...]
    reason: str
    case: str


@dataclasses.dataclass(frozen=True)
class Requires:
    """What a kernel needs, as data, so that the harness can say why it does not run.

    device: cpu, cuda or any; capability: CUDA (major, minor) pairs, () for all; distribution: pip names it may be
    installed under; entry: "module:function", whose signature also tells whether it takes topk_length; program: what it runs
    while it is made ready (nvcc), found by find_program;
    heads: what it accepts, () for everything; topk_multiple: topk (the width) must be a multiple of this.
    uncapturable: why no CUDA graph can be made of some launches, "" where one can be made of all.
    sparse_prefill alone: dtypes, d_qk: what it accepts.
    indexer_topk alone: topk_in: what it accepts, () for everything; topk_max: the most it takes, 0 for any; keys: the least
    and most gathered keys; keys_multiple: their number must be a multiple of this; requests_max: the most requests, 0 for any.
    note: what `threearm arms` should say besides.
    """

    device: str = "any"
    capability: tuple[tuple[int, int], ...] = ()
    distribution: tuple[str, ...] = ()
    entry: str = ""
    program: str = ""
    dtypes: tuple[str, ...] = ("bf16", "fp8")
    heads: tuple[int, ...] = ()
    d_qk: tuple[int, ...] = (512, 576)
    topk_multiple: int = 1
    topk_in: tuple[int, ...] = ()
    topk_max: int = 0
    keys: tuple[int, int] = (0, 1 << 31)
    keys_multiple: int = 1
    requests_max: int = 0
    limits: tuple[Limit, ...] = ()
    uncapturable: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.device not in ("any", "cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: allowed are any, cpu, cuda")
        if not set(self.dtypes) <= {"bf16", "fp8"}:
            raise ValueError(f"dtypes={self.dtypes!r}: allowed are bf16 and fp8")
        for name in ("capability", "distribution", "dtypes", "heads", "d_qk", "topk_in"):
            if not isinstance(getattr(self, name), tuple):  # ("package") is no tuple, and a string is a sequence of letters
                raise TypeError(f"{name}={getattr(self, name)!r}: it is a tuple, write ({getattr(self, name)!r},)")


def find_program(name: str) -> str | None:
    """Where a program is: on PATH, or in CUDA's folder (CUDA_HOME, /usr/local/cuda)."""
    return shutil.which(name) or shutil.which(name, path=os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))


@dataclasses.dataclass(frozen=True)
class Convention:
    """What the kernel returns where kernels differ; the harness's own convention is natural log and +inf lse."""

    log_base: float = math.e
    empty_lse: float = math.inf

    def __str__(self) -> str:
        return f"statistics in base {'e' if self.log_base == math.e else f'{self.log_base:g}'}, empty lse {self.empty_lse:+g}"


@dataclasses.dataclass(frozen=True)
class SkipPromise:
    """What a kernel promises of out when masked pairs of blocks are skipped; lse and max_logits are always bitwise.

    Rows in which nothing is skipped are bitwise equal. In the others, elements may differ by at most max_ulp bf16 ULP,
    only in columns [columns), at most max_share of those elements (see `allowance`), and, with `none_nearer_zero`, always
    so that the arm that processes the masked pairs is the one nearer zero. max_ulp=0 is bitwise equality.

    within_budget promises nothing of the kind: the arms are only held to be within two budgets of each other, as a kernel
    that splits its work by topk_length needs.

    row_independent: a row's bits do not depend on the rows beside it, nor on its place among them. Without it, rows in another order or
    another batch are held to two budgets.
    """

    max_ulp: int = 0
    columns: tuple[int, int] = (0, D_V)
    max_share: float = 0.0
    none_nearer_zero: bool = False
    pair: int = 128
    within_budget: bool = False
    row_independent: bool = True

    def allowance(self, elements: int) -> float:
        """How many of `elements` may differ: max_share of them, and eight standard deviations of such a count."""
        expected = self.max_share * elements
        return expected + 8 * math.sqrt(expected)

    def __str__(self) -> str:
        return self._of_skipping() + ("" if self.row_independent else "; a row's bits depend on its batch")

    def _of_skipping(self) -> str:
        if self.within_budget:
            return "within two budgets (its arms are not bitwise equal)"
        if not self.max_ulp:
            return "bitwise"
        return (f"{self.max_ulp} bf16 ULP, columns {self.columns[0]}..{self.columns[1] - 1}, at most {self.max_share:.2%} of them, "
                f"only in rows where a pair of {self.pair // 2}-key blocks is skipped"
                + (", none nearer zero" if self.none_nearer_zero else ""))


BITWISE = SkipPromise()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A registered sparse-prefill kernel. `sources` maps each topk_length source to the function that derives it."""

    name: str
    prepare: Callable[[Problem], Launch]
    requires: Requires
    convention: Convention
    promise: SkipPromise
    sources: dict[str, Source]
    file: str
    family: str = "sparse_prefill"

    @property
    def arms(self) -> tuple[str, ...]:
        """The names of its arms, in the order in which they are run."""
        return tuple(SOURCES)

    def promises(self, device: torch.device | None) -> str:
        """One line for `threearm arms`, the same on every device."""
        return str(self.promise)


KERNELS: dict[str, Kernel | TopkKernel] = {}
"""Every registered kernel of both families, by name."""


def sparse_prefill_kernel(name: str, requires: Requires = Requires(), convention: Convention = Convention(),
                          promise: SkipPromise = BITWISE, sources: dict[str, Source] | None = None,
                          ) -> Callable[[Callable[[Problem], Launch]], Callable[[Problem], Launch]]:
    """Register the decorated function as kernel `name`.

    Raises ValueError if the name is taken by another file, or is not made of letters, digits, '_', '-' and '.'.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(f"kernel name {name!r}: allowed are letters, digits, '_', '-' and '.'")

    def register(prepare: Callable[[Problem], Launch]) -> Callable[[Problem], Launch]:
        file = prepare.__code__.co_filename
        if name in KERNELS and KERNELS[name].file != file:
            raise ValueError(f"kernel {name!r} is registered by {KERNELS[name].file} already")
        KERNELS[name] = Kernel(name, prepare, requires, convention, promise, {**SOURCES, **(sources or {})}, file)
        return prepare

    return register


def load_package(package: str) -> None:
    """Import every module of a package of kernels (arms.sparse_prefill, arms.indexer_topk, arms.broken), so that they register."""
    for path in sorted((Path(__file__).parent.parent / Path(*package.split("."))).glob("[a-z]*.py")):
        importlib.import_module(f"{package}.{path.stem}")


def load_file(path: str) -> list[str]:
    """Import a kernel file from outside the project; names of what it registered.

    Raises what the file raises, FileNotFoundError, or ValueError if it registers nothing.
    """
    before = dict(KERNELS)
    name = f"threearm_loaded_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a Python file")
    if str(Path(path).parent) not in sys.path:
        sys.path.append(str(Path(path).parent))  # modules beside the file can be imported
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    added = [kernel for kernel in KERNELS if KERNELS[kernel] is not before.get(kernel)]
    if not added:
        raise ValueError(f"{path} registers no kernel: use @sparse_prefill_kernel or @indexer_topk_kernel, see arms/ADD_ARM.md")
    return added


def normalise(outputs: Outputs, convention: Convention) -> Outputs:
    """Outputs in the harness's convention: natural-log statistics, lse +inf for a row without a valid key."""
    if not isinstance(outputs, (tuple, list)) or len(outputs) != 3:
        raise ValueError(f"a launch must return (out, max_logits, lse), this one returned {type(outputs).__name__}")
    out, max_logits, lse = outputs
    if convention.empty_lse != math.inf:
        sentinel = torch.isnan(lse) if math.isnan(convention.empty_lse) else lse == convention.empty_lse
        lse = lse.masked_fill(sentinel, math.inf)
    if convention.log_base != math.e:
        max_logits, lse = max_logits * math.log(convention.log_base), lse * math.log(convention.log_base)
    return out, max_logits, lse
