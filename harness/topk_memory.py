"""The most memory that a launch holds: on CUDA as torch's allocator counts it, elsewhere from the storages that torch operations make."""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arms.topk import TopkKernel, TopkProblem

T = TypeVar("T")


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations return while it is active and that are still alive.

    What an operation holds and frees within itself, and memory from elsewhere than torch, is not seen.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        """known: tensors that were there before; views of them count nothing."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.known, self.now, self.peak = known, 0, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks. It would import its compiler, 1.6 s, to leave this class alone."""
        return False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._seen(leaf.untyped_storage())
        return result

    def _seen(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self.alive.pop(key, 0)


class Meter:
    """Measures one kernel: `prepare` builds it under the meter, `launch` runs it. Only what was allocated since the meter was
    made counts, so a workspace that set-up keeps does, and the harness's own tensors do not."""

    def __init__(self, device: torch.device, known: list[torch.Tensor]) -> None:
        self.device = device
        self.storages = None if device.type == "cuda" else LiveStorages(known)
        self.before = self._allocated()

    def discount(self, size: int) -> None:
        """Leave out `size` bytes that the harness itself took since."""
        self.before += size if self.storages is None else 0

    def _allocated(self, what: str = "current") -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self.device).get(f"requested_bytes.all.{what}", 0))

    def watch(self, call: Callable[[], T]) -> tuple[T, int]:
        """The call's result, and the most bytes held at once during it, those kept since the meter was made included."""
        if self.storages is None:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            result = call()
            torch.cuda.synchronize(self.device)
            return result, self._allocated("peak") - self.before
        self.storages.peak = self.storages.now
        with self.storages:
            result = call()
        return result, self.storages.peak


def whole_bytes(kernel: TopkKernel) -> Callable[[TopkProblem], int]:
    """The kernel's memory bound. What it returns raises ValueError where the kernel's function gives no whole number of bytes."""
    def bound(problem: TopkProblem) -> int:
        given = kernel.memory(problem)
        if type(given) is not int or given < 0:
            raise ValueError(f"memory of {kernel.name} must give a whole number of bytes, it gave {given!r}")
        return given

    return bound
