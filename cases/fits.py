"""Which cases a kernel takes, as data: what a worker says of a kernel, what refuses a case, and what strategies draw within. No torch."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from cases.families import Case
from cases.indexer_topk import IndexerTopkCase
from cases.sparse_prefill import SparsePrefillCase


@dataclasses.dataclass(frozen=True)
class Fits:
    """What the cases of one kernel may be; the default takes everything. The fields but the last two are those of arms.kernel.Requires.

    heads, topk_in: what is accepted, () for everything; topk_max, requests_max: 0 for any; keys: least and most gathered keys;
    sparse_prefill alone: dtypes, d_qk. arms: the names of the kernel's arms; refused: (arm, key, value, reason), a value of one of the
    case's keys that one arm does not take.
    """

    dtypes: tuple[str, ...] = ("bf16", "fp8")
    heads: tuple[int, ...] = ()
    d_qk: tuple[int, ...] = (512, 576)
    topk_multiple: int = 1
    topk_in: tuple[int, ...] = ()
    topk_max: int = 0
    keys: tuple[int, int] = (0, 1 << 31)
    keys_multiple: int = 1
    requests_max: int = 0
    arms: tuple[str, ...] = ()
    refused: tuple[tuple[str, str, str, str], ...] = ()

    def allowed(self, key: str, values: tuple[str, ...]) -> list[str]:
        """Those of a key's values that some arm takes. All of them where none is: then the kernel takes no case."""
        refusing = {(arm, value) for arm, name, value, _ in self.refused if name == key}
        return [value for value in values if not self.arms or any((arm, value) not in refusing for arm in self.arms)] or list(values)

    def refusal(self, arm: str, case: Case) -> str:
        """Why this arm does not take this case, or ""."""
        reasons = self._topk_refusals(case) if isinstance(case, IndexerTopkCase) else self._prefill_refusals(case)
        names = (arm, "none") if arm == "metadata" and _falls_back(case) else (arm,)
        return next(reasons, "") or next((f"{key}={value}: {reason}" for name, key, value, reason in self.refused
                                          if name in names and getattr(case, key) == value), "")

    def _prefill_refusals(self, case: SparsePrefillCase) -> Iterator[str]:
        if case.dtype not in self.dtypes:
            yield f"takes {_any_of(self.dtypes)}, the case is {case.dtype}"
        if self.heads and case.h_q not in self.heads:
            yield f"takes h_q {_any_of(self.heads)}, the case has {case.h_q}"
        if case.d_qk not in self.d_qk:
            yield f"takes d_qk {_any_of(self.d_qk)}, the case has {case.d_qk}"
        if case.topk % self.topk_multiple:
            yield f"needs topk to be a multiple of {self.topk_multiple}, the case has {case.topk}"

    def _topk_refusals(self, case: IndexerTopkCase) -> Iterator[str]:
        if self.heads and case.h not in self.heads:
            yield f"takes h {_any_of(self.heads)}, the case has {case.h}"
        if self.topk_in and case.topk not in self.topk_in:
            yield f"takes topk {_any_of(self.topk_in)}, the case has {case.topk}"
        if self.topk_max and case.topk > self.topk_max:
            yield f"takes topk up to {self.topk_max}, the case has {case.topk}"
        if case.topk % self.topk_multiple:
            yield f"needs topk to be a multiple of {self.topk_multiple}, the case has {case.topk}"
        if not self.keys[0] <= case.s_kv <= self.keys[1]:
            yield f"takes {self.keys[0]} to {self.keys[1]} keys, the case has {case.s_kv}"
        if case.s_kv % self.keys_multiple:
            yield f"needs the keys to be a multiple of {self.keys_multiple}, the case has {case.s_kv}"
        if self.requests_max and len(case.request_lengths) > self.requests_max:
            yield f"takes {self.requests_max} request(s), the case has {len(case.request_lengths)}"


def _falls_back(case: Case) -> bool:
    """Whether the serving guard hands over no metadata lengths, because they are of another row count: the arm then is `none`."""
    return isinstance(case, SparsePrefillCase) and case.metadata_rows not in (0, case.s_q)


def _any_of(values: tuple[object, ...]) -> str:
    return " or ".join(map(str, values))


def read_fits(data: dict[str, Any]) -> Fits:
    """The record from what a worker says of a kernel: JSON, so tuples came as lists."""
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Fits(**values | {"refused": tuple((arm, key, value, reason) for arm, key, value, reason in data["refused"])})
