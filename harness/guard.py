"""Guard bands: tensors that lie in the middle of larger buffers, so that what reads or writes past them shows. And poisoned memory.

    guards = Guards(device)
    problem = dataclasses.replace(problem, kv=guards.around("kv", problem.kv, math.nan), ...)
    with guards.memory():
        outputs = kernel.prepare(problem)(length)
    check = guards.judge(<the comparison with the result as it was without bands, named "guards">)

A band before and after an input holds what would change the result if it were read: NaN, or a live index. Those around the tensors that
the kernel makes itself hold NaN in every float format, and so do the tensors. Memory that does not come from torch has no bands.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.verdicts import Check, Verdict
from references.sparse_prefill import free_memory

ALIGNMENT = 512  # bytes: what torch's CUDA allocator gives, and some kernels count on
BAND = 4096  # bytes at least
WIDEST = 1 << 17
PATTERN = bytes((0xFF, 0x7F, 0xFF, 0xFF))
"""NaN as fp32, fp16, bf16, e4m3 and e5m2, but never twice in a row the NaN that a device writes; as int32 -32769."""
SHOWN = 4
_deterministic = torch._C._set_deterministic_algorithms  # torch's own wrapper imports its compiler: 1.7 s
MAKERS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros",
          "full", "full_like", "new_full", "ones", "ones_like", "new_ones")
"""Operations of torch whose result gets bands: those without values, and those of one value, as which counters and outputs often start."""


@dataclasses.dataclass(frozen=True)
class Guarded:
    """One tensor: its name, uint8 views of the bands before and after it, and what each of them must hold."""

    name: str
    front: torch.Tensor
    back: torch.Tensor
    held: torch.Tensor

    def written(self) -> tuple[int, int]:
        """How many bytes of the two bands have changed."""
        return int((self.front != self.held).sum()), int((self.back != self.held).sum())


class Guards:
    """The bands of one launch. Tensors with bands are kept until the object is gone, at most `limit` bytes of them (None: a quarter of
    the free memory); further ones are made without, which judge() tells."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.limit = free_memory(device) // 4 if limit is None else limit
        self.held, self.left_out = 0, 0
        self.inputs: list[Guarded] = []
        self.made: list[Guarded] = []

    def around(self, name: str, tensor: torch.Tensor, fill: float) -> torch.Tensor:
        """A contiguous copy of an input, at a multiple of 512 bytes, between bands of `fill` that are at least as wide as one of its
        rows: element [-1] and row [len] of kv, say, are then what `fill` is."""
        unit = torch.tensor([fill], device=tensor.device).to(tensor.dtype).view(torch.uint8)
        strides = torch.empty(tensor.shape, device="meta").stride()
        copy, guarded = self._placed(name, tuple(tensor.shape), strides, tensor.dtype, tensor.device, unit)
        self.inputs.append(guarded)
        return copy.copy_(tensor)

    def make(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """A tensor without values, full of NaN (integers: -32769), between bands; None where that would be over the limit."""
        if self.held > self.limit:
            self.left_out += 1
            return None
        unit = torch.tensor(list(PATTERN), dtype=torch.uint8, device=device)
        name = f"{str(dtype).removeprefix('torch.')} {list(size)}"
        tensor, guarded = self._placed(name, size, stride, dtype, device, unit)
        self.made.append(guarded)
        return tensor

    def memory(self) -> _Memory:
        """A context in which the tensors that torch makes without values, also for a C++ extension, have bands."""
        return _Memory(self)

    def written(self) -> list[str]:
        """What has been written outside, one line a tensor: which one, how many bytes before or after it."""
        every = [*self.inputs, *self.made]
        intact = True  # as nearly always: two comparisons a device (a kernel may make tensors on the host) instead of two a tensor
        for device in {guarded.held.device for guarded in every}:
            here = [guarded for guarded in every if guarded.held.device == device]
            front, back, held = (torch.cat([getattr(guarded, which) for guarded in here]) for which in ("front", "back", "held"))
            intact &= torch.equal(front, held) and torch.equal(back, held)
        if intact:
            return []
        return [f"{count} bytes {where} {guarded.name}" for guarded in every
                for count, where in zip(guarded.written(), ("before", "after")) if count]

    def judge(self, check: Check) -> Check:
        """The finished check `guards`. check: whether the result of the guarded launch is the one without guards."""
        outside = self.written()
        names = ", ".join(guarded.name for guarded in self.inputs)
        without = f"; {self.left_out} more had none, which would have taken over {self.limit / 2**30:.2g} GiB" if self.left_out else ""
        around = f"bands around {names} and {len(self.made)} tensors that the kernel made{without}"
        if outside:
            more = f" and {len(outside) - SHOWN} more" if len(outside) > SHOWN else ""
            told = f"; {check.detail}" if check.verdict is not Verdict.PASSED else ""
            check.verdict, check.detail = Verdict.FAILED, f"written outside its tensors: {', '.join(outside[:SHOWN])}{more}{told}"
            check.bad = max(check.bad, len(outside))
        elif check.verdict is Verdict.PASSED:
            check.detail = f"{around}: untouched{', and the result is as before' if check.total else ''}"
        else:
            check.detail = f"reads outside its tensors: the result depends on {around}; {check.detail}"
        return check

    def _placed(self, name: str, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device,
                unit: torch.Tensor) -> tuple[torch.Tensor, Guarded]:
        item = dtype.itemsize
        reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
        row = stride[0] * item if size else item
        band = up(max(BAND, min(row, WIDEST)), ALIGNMENT)
        total = up(reach * item, ALIGNMENT) + 2 * band + ALIGNMENT
        buffer = torch.empty(total, dtype=torch.uint8, device=device)
        buffer.view(torch.int32).fill_(int.from_bytes(PATTERN, "little", signed=True))
        start = band + -(buffer.data_ptr() + band) % ALIGNMENT
        stop = start + reach * item
        guarded = Guarded(name, buffer[start - band : start], buffer[stop : stop + band], unit.repeat(band // len(unit)))
        guarded.front.copy_(guarded.held)
        guarded.back.copy_(guarded.held)
        self.held += total
        return buffer[start:stop].view(dtype).as_strided(size, stride), guarded


class _Memory(TorchDispatchMode):
    """Gives the results of MAKERS bands, whoever asks for them."""

    def __init__(self, guards: Guards) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guards = guards

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks. It would import its compiler, 1.6 s, to leave this class alone."""
        return False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation.namespace != "aten":
            return self._through(operation, args, kwargs)
        maker = operation.overloadpacket.__name__
        if maker not in MAKERS or "out" in kwargs or kwargs.get("pin_memory") or kwargs.get("layout") not in (None, torch.strided):
            return operation(*args, **kwargs)
        like = args[0] if args and isinstance(args[0], torch.Tensor) else None
        device = kwargs.get("device") or (torch.device("cpu") if like is None else like.device)
        if device.type == "meta":
            return operation(*args, **kwargs)
        shape = operation(*args, **{**kwargs, "device": torch.device("meta")})
        made = self.guards.make(tuple(shape.shape), shape.stride(), shape.dtype, device)
        if made is None:
            return operation(*args, **kwargs)
        if "empty" not in maker:
            made.copy_(operation(*args, **kwargs))
        return made

    def _through(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """A C++ extension's own operation, with this mode active inside it: torch turns a mode off while it handles an operation."""
        device = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), "cpu")
        key = {"cpu": "CPU", "cuda": "CUDA"}.get(device, "CPU")
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(operation.name(), key):
            return operation(*args, **kwargs)
        with self:
            return operation.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)


def up(size: int, multiple: int) -> int:
    """The next multiple at or above size."""
    return -(-size // multiple) * multiple


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor made without values inside the block starts as NaN (torch's own deterministic fill, at ATen level,
    so that a C++ extension's at::empty is filled as well)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    _deterministic(True, warn_only=True)
    try:
        yield
    finally:
        _deterministic(before[0], warn_only=before[1])
