"""Guard bands: what they hold, what they see, and that nothing about a tensor changes but what lies around it."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
from trials import inputs_of, prepared

from arms.kernel import KERNELS, make_problem
from harness.guard import ALIGNMENT, PATTERN, Guards, up
from harness.verdicts import Check, Verdict

CPU = torch.device("cpu")
CASE = "sparse_prefill:s_q=3,s_kv=70,h_q=2,topk=64"


def past(x: torch.Tensor, elements: int, back: int = 0) -> torch.Tensor:
    """A view of what lies behind x, or `back` elements before it: what a kernel with a wrong address reaches."""
    at = int(x.storage_offset()) + (-back if back else x.numel())
    return x.as_strided((elements,), (1,), at)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32, torch.int64, torch.uint8])
def test_an_input_lies_at_an_aligned_address_between_its_fill(dtype: torch.dtype) -> None:
    guards, x = Guards(CPU), torch.arange(15).view(5, 3).to(dtype)
    fill = 7.0 if dtype in (torch.int32, torch.int64, torch.uint8) else math.nan
    got = guards.around("x", x.t().contiguous().t(), fill)
    assert got.data_ptr() % ALIGNMENT == 0 and got.is_contiguous() and bool((got.float() == x.float()).all())
    for band in (past(got, 3), past(got, 3, back=3)):
        assert bool((band.float() == fill).all() if fill == fill else band.float().isnan().all())
    assert guards.written() == []


def test_a_whole_row_before_and_behind_is_in_the_band() -> None:
    guards = Guards(CPU)
    kv = guards.around("kv", torch.zeros(3, 1, 4000, dtype=torch.bfloat16), math.nan)
    assert bool(past(kv, 4000).isnan().all()) and bool(past(kv, 4000, back=4000).isnan().all())


def test_the_pattern_is_nan_in_every_format_and_not_what_a_device_writes() -> None:
    raw = torch.tensor(list(PATTERN * 4), dtype=torch.uint8)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert bool(raw.view(dtype).float().isnan().all())
    assert int(raw.view(torch.int32)[0]) not in (0x7FFFFFFF, 0x7FC00000)
    assert len(set(raw.view(torch.int16).tolist())) == 2  # two bf16 NaN of a device in a row always show


@pytest.mark.parametrize(("make", "shape", "strides", "dtype"), [
    (lambda: torch.empty(5, 7), (5, 7), (7, 1), torch.float32),
    (lambda: torch.empty(4, dtype=torch.float8_e4m3fn), (4,), (1,), torch.float8_e4m3fn),
    (lambda: torch.empty_strided((2, 3), (1, 4), dtype=torch.bfloat16), (2, 3), (1, 4), torch.bfloat16),
    (lambda: torch.empty_like(torch.ones(3, 2).t()), (2, 3), (1, 2), torch.float32),
    (lambda: torch.ones(2, dtype=torch.int32).new_empty(3), (3,), (1,), torch.int32),
    (lambda: torch.ones(2).new_zeros(3), (3,), (1,), torch.float32),
    (lambda: torch.zeros_like(torch.ones(3, dtype=torch.int64)), (3,), (1,), torch.int64),
    (lambda: torch.zeros(0, 4), (0, 4), (4, 1), torch.float32),
    (lambda: torch.empty(()), (), (), torch.float32),
    (lambda: torch.empty(3, dtype=torch.bool), (3,), (1,), torch.bool)])
def test_what_is_made_inside_has_bands_and_is_what_was_asked_for(make: object, shape: tuple[int, ...], strides: tuple[int, ...],
                                                                  dtype: torch.dtype) -> None:
    guards = Guards(CPU)
    with guards.memory():
        x = make()  # type: ignore[operator]
    assert (tuple(x.shape), x.stride(), x.dtype) == (shape, strides, dtype) and x.data_ptr() % ALIGNMENT == 0
    made = len(guards.made)  # the tensor that some are made after has bands, too
    assert made >= 1 and guards.written() == []
    torch.empty(3)
    assert len(guards.made) == made  # outside of the block nothing is


def test_zeros_are_zero_and_empty_is_nan() -> None:
    guards = Guards(CPU)
    with guards.memory():
        zeros, empty, counts = torch.zeros(4), torch.empty(4), torch.empty(2, dtype=torch.int32)
        sevens, ones = torch.full((4,), 7), torch.ones_like(zeros)
    assert len(guards.made) == 5 and sevens.tolist() == [7] * 4 and sevens.dtype == torch.int64 and ones.tolist() == [1.0] * 4
    assert zeros.tolist() == [0.0] * 4 and bool(empty.isnan().all()) and counts.tolist() == [-32769] * 2


def test_what_has_values_is_left_alone() -> None:
    guards = Guards(CPU)
    given = torch.ones(3)
    with guards.memory():
        given.clone().cumsum(0)
        torch.empty(3, device="meta")
        torch.zeros(3, out=given)
    assert guards.made == []


@pytest.mark.parametrize(("spot", "told"), [("behind", "1 bytes after"), ("before", "2 bytes before")])
def test_one_element_outside_shows_and_is_told(spot: str, told: str) -> None:
    guards = Guards(CPU)
    guards.around("kv", torch.ones(4), math.nan)
    with guards.memory():
        x = torch.empty(6, dtype=torch.bfloat16) if spot == "before" else torch.empty(6, dtype=torch.uint8)
    past(x, 1, back=1 if spot == "before" else 0).fill_(1)
    check = guards.judge(Check("guards", Verdict.PASSED))
    assert check.verdict is Verdict.FAILED and check.detail.startswith(f"written outside its tensors: {told} {str(x.dtype)[6:]} [6]")


def test_a_result_that_depends_on_what_lies_outside_is_a_read() -> None:
    guards = Guards(CPU)
    guards.around("kv", torch.ones(4), math.nan)
    check = guards.judge(Check("guards", Verdict.FAILED, "out differs in 1 of 2", bad=1))
    assert check.verdict is Verdict.FAILED and "reads outside its tensors" in check.detail and "kv" in check.detail


def test_what_is_over_the_limit_has_no_bands_and_that_is_told() -> None:
    guards = Guards(CPU, limit=10_000)
    with guards.memory():
        for _ in range(3):
            torch.empty(10)
    assert len(guards.made) == 1 or guards.left_out
    assert "more had none" in guards.judge(Check("guards", Verdict.PASSED, total=1)).detail


@pytest.fixture
def extension() -> Iterator[object]:
    """An operation of a C++ extension, as torch sees it: registered, and making its output itself."""
    library = torch.library.Library("threearm_test", "FRAGMENT")
    library.define("one_too_many(Tensor x) -> Tensor")

    def one_too_many(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        result.copy_(x)
        if result.untyped_storage().nbytes() > result.nbytes:
            past(result, 1).zero_()
        return result

    library.impl("one_too_many", one_too_many, "CPU")
    yield torch.ops.threearm_test.one_too_many
    library._destroy()


def test_an_operation_of_an_extension_is_seen_inside(extension: object) -> None:
    """torch turns a mode off while an operation is handled: an extension's own would then make its tensors unseen."""
    guards, x = Guards(CPU), torch.ones(5)
    with guards.memory():
        result = extension(x)  # type: ignore[operator]
    assert torch.equal(result, x) and guards.written() == ["4 bytes after float32 [5]"]


@pytest.mark.parametrize("text", [CASE, f"{CASE},dtype=fp8,sink=mixed"])
def test_a_right_kernel_gives_the_same_between_bands(text: str) -> None:
    inputs = inputs_of(text)
    plain, guards, p = prepared("torch_blocks", inputs)(None), Guards(CPU), make_problem(inputs)
    moved = dataclasses.replace(p, q=guards.around("q", p.q, math.nan), kv=guards.around("kv", p.kv, math.nan),
                                indices=guards.around("indices", p.indices, 3))
    with guards.memory():
        got = KERNELS["torch_blocks"].prepare(moved)(None)  # type: ignore[arg-type]
    assert guards.written() == [] and guards.made
    assert all(torch.equal(a, b) for a, b in zip(got, plain))


def test_up() -> None:
    assert [up(n, 512) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@pytest.mark.cuda
def test_bands_on_the_gpu() -> None:
    guards = Guards(torch.device("cuda"))
    kv = guards.around("kv", torch.ones(3, 576, dtype=torch.bfloat16, device="cuda"), math.nan)
    with guards.memory():
        x, like = torch.empty(10, device="cuda"), torch.empty_like(kv)
        torch.mm(torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda"))
    assert bool(past(kv, 576).isnan().all()) and x.data_ptr() % ALIGNMENT == 0 and guards.written() == []
    past(like, 1).fill_(1)
    assert guards.written() == ["2 bytes after bfloat16 [3, 576]"]
