"""Variations of a sparse_prefill problem: what they change, when they are exact, and that launches which pass are few."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from arms_under_test import FP8, FULL, HALF, ONE, Length, kernel_of, run, subject_of
from trials import inputs_of, run_arms

from arms.kernel import BITWISE, KERNELS, Outputs, Problem, Requires, SkipPromise, make_problem
from arms.lengths import SOURCES
from arms.sparse_prefill.torch_blocks import attention
from harness import metamorphic
from harness.variations import LARGE, padded, q_scaled, rows_permuted, scales_exactly, unnamed_changed
from harness.verdicts import Verdict

# --- the variations ---------------------------------------------------------------------------------------------------


def test_rows_in_another_order_are_put_back() -> None:
    subject = subject_of(HALF, "backscan")
    variation = rows_permuted(subject)
    assert variation is not None
    p, length = variation.apply(subject.problem, subject.length)
    assert not torch.equal(p.q, subject.problem.q) and length is not None
    back = variation.undo((p.q, p.indices[:, 0], length))
    assert torch.equal(back[0], subject.problem.q) and torch.equal(back[1], subject.problem.indices[:, 0])
    assert torch.equal(back[2], subject.length)  # type: ignore[arg-type]
    assert rows_permuted(subject_of(ONE)) is None


@pytest.mark.parametrize("text", [FULL, FP8])
def test_doubling_q_leaves_the_product_as_it_was(text: str) -> None:
    subject = subject_of(text)
    variation = q_scaled(subject)
    assert variation is not None
    p, _ = variation.apply(subject.problem, None)
    before, after = (x.q.double() * x.q_scale.double() * x.sm_scale for x in (subject.problem, p))
    assert torch.equal(before, after) and p.sm_scale == subject.problem.sm_scale / 2


def test_scaling_is_called_exact_only_where_it_is() -> None:
    """The claim itself: where scales_exactly says yes, fp32 scores in any order of multiplication are equal bit for bit."""
    p = make_problem(inputs_of(FULL))
    named = torch.ones(len(p.kv), dtype=torch.bool)
    assert scales_exactly(p, named)
    tiny, huge = (dataclasses.replace(p, kv=(p.kv.float() * factor).bfloat16()) for factor in (2.0**-120, 2.0**122))
    assert not scales_exactly(tiny, named) and not scales_exactly(huge, named)
    assert scales_exactly(huge, ~named)  # no key counts
    for q in (2.0**-118, 2.0**125):
        assert not scales_exactly(dataclasses.replace(p, q=(p.q.float() * q).bfloat16()), named)
    one, other = dataclasses.replace(tiny, q=tiny.q * 2), dataclasses.replace(tiny, sm_scale=tiny.sm_scale / 2)
    score = [(x.q[0].float() * x.sm_scale) @ x.kv[:, 0].float().T for x in (tiny, dataclasses.replace(one, sm_scale=other.sm_scale))]
    assert torch.equal(*score) or not scales_exactly(tiny, named)


def test_unnamed_keys_are_large_finite_and_above_the_rest() -> None:
    for text in (HALF, FP8):
        subject = subject_of(text)
        variation = unnamed_changed(subject)
        assert variation is not None
        p, _ = variation.apply(subject.problem, None)
        named = subject.inputs.named
        assert torch.equal(p.kv.view(torch.uint8)[named], subject.problem.kv.view(torch.uint8)[named])
        assert bool((p.kv[~named].float().abs() == LARGE[p.kv.dtype]).all())
        scores = p.q[0, 0].float() @ p.kv[:, 0].float().T
        assert bool(scores.isfinite().all()) and float(scores[~named].min()) > float(scores[named].max())
    assert unnamed_changed(subject_of(ONE)) is None


@pytest.mark.parametrize(("multiple", "topk", "wide"), [(1, 192, 256), (1, 100, 128), (128, 256, 384), (64, 64, 128), (1, 4, 64)])
def test_padding_ends_at_the_next_multiple(multiple: int, topk: int, wide: int) -> None:
    kernel = dataclasses.replace(KERNELS["torch_blocks"], requires=Requires(topk_multiple=multiple))
    subject = subject_of(f"sparse_prefill:s_q=2,s_kv=300,h_q=1,topk={topk}", kernel=kernel)  # type: ignore[arg-type]
    p, _ = padded(subject).apply(subject.problem, None)
    assert p.indices.shape == (2, 1, wide) and bool((p.indices[:, :, topk:] == -1).all())
    assert torch.equal(p.indices[:, :, :topk], subject.problem.indices) and p.indices.is_contiguous()


@pytest.mark.parametrize("source", SOURCES)
def test_permuting_keeps_each_rows_entries_before_its_length(source: str) -> None:
    seen: list[torch.Tensor] = []

    def note(p: Problem, length: Length) -> Outputs:
        seen.append(p.indices[:, 0].clone())
        return attention(p, length)

    subject = subject_of("sparse_prefill:s_q=13,s_kv=200,h_q=1,topk=130,rows=mixed", source, kernel_of(note))
    seen.clear()
    check = metamorphic.indices_permuted(subject)
    given, length = subject.problem.indices[:, 0], subject.length
    for row, (old, new) in enumerate(zip(given, seen[0])):
        end = 130 if length is None else int(length[row])
        assert torch.equal(old[:end].sort().values, new[:end].sort().values) and torch.equal(old[end:], new[end:])
        assert end < 3 or not torch.equal(old[:end], new[:end]) or bool((old[:end] == old[0]).all())
    assert check.verdict is Verdict.PASSED and check.margins


@pytest.mark.parametrize("rows", [2, 3, 6, 65, 66, 70])
def test_a_batch_is_split_at_an_odd_row_and_one_row_is_alone(rows: int) -> None:
    sizes: list[int] = []

    def note(p: Problem, length: Length) -> Outputs:
        sizes.append(len(p.q))
        return attention(p, length)

    subject = subject_of(f"sparse_prefill:s_q={rows},s_kv=20,h_q=1,topk=8", kernel=kernel_of(note))
    sizes.clear()
    check = metamorphic.batch_split(subject)
    assert check is not None and check.verdict is Verdict.PASSED
    assert sizes[0] % 2 == 1 and sum(sizes[:2]) == rows and 1 in sizes and len(sizes) == (2 if rows <= metamorphic.FEW else 3)
    assert metamorphic.batch_split(subject_of(ONE)) is None


def test_a_row_that_is_wrong_alone_only_shows_in_a_large_batch_as_well() -> None:
    def wrong(p: Problem, length: Length) -> Outputs:
        out, max_logits, lse = attention(p, length)
        return out, max_logits, lse + (1 if len(p.q) == 1 else 0)

    subject = subject_of("sparse_prefill:s_q=70,s_kv=20,h_q=1,topk=8", kernel=kernel_of(wrong))
    check = metamorphic.batch_split(subject)
    assert check is not None and check.verdict is Verdict.FAILED and check.where[0] == "rows 35 (1 of 70)"


@pytest.mark.parametrize(("text", "limit"), [(FULL, 129), (HALF, 49), ("sparse_prefill:s_q=2,s_kv=300,h_q=1,topk=126", 63)])
def test_lengths_are_cut_to_no_multiple_of_64(text: str, limit: int) -> None:
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(p: Problem, length: Length) -> Outputs:
        if length is not None:
            given.append((p.indices[:, 0].clone(), length.clone()))
        return attention(p, length)

    subject = subject_of(text, "backscan", kernel_of(note))
    given.clear()
    check = metamorphic.cut_at_length(subject)
    assert check is not None and check.verdict is Verdict.PASSED and limit % 64
    (_, first), (plain, length), (cut, same_length) = given
    assert subject.length is not None and torch.equal(first, subject.length)  # the launch knew other lengths before
    assert int(length.max()) == limit and torch.equal(length, same_length) and torch.equal(plain, subject.problem.indices[:, 0])
    assert bool((cut[:, limit:] == -1).all()) and torch.equal(cut[:, :limit], plain[:, :limit])


def test_nothing_is_cut_without_a_length_or_a_second_entry() -> None:
    assert metamorphic.cut_at_length(subject_of(FULL, "none")) is None
    assert metamorphic.cut_at_length(subject_of("sparse_prefill:s_q=2,s_kv=4,h_q=1,topk=1", "backscan")) is None


# --- promises and failures --------------------------------------------------------------------------------------------


def moved(by: float, when: Callable[[Problem], bool]) -> Callable[[Problem, Length], Outputs]:
    """torch_blocks, with lse moved in some launches."""
    def launch(p: Problem, length: Length) -> Outputs:
        out, max_logits, lse = attention(p, length)
        return out, max_logits, lse + by if when(p) else lse

    return launch


def test_rows_that_depend_on_their_batch_are_held_to_two_budgets_where_the_kernel_says_so() -> None:
    def verdicts(by: float, promise: SkipPromise) -> set[Verdict]:
        found = run(FULL, moved(by, lambda p: len(p.q) != 6), promise=promise)
        return {found["batch-split"].verdict}

    near = SkipPromise(row_independent=False)
    assert verdicts(1e-6, BITWISE) == {Verdict.FAILED} and verdicts(1e-6, near) == {Verdict.PASSED}
    assert verdicts(1e-2, near) == {Verdict.FAILED}
    assert run(FULL, attention, promise=near)["rows-permuted"].detail.startswith("within two budgets")


def test_pads_that_a_kernel_walks_are_held_to_its_promise() -> None:
    """One ULP in the right half in a wider launch without a length, where a pair more is walked."""
    def wider(p: Problem, length: Length) -> Outputs:
        out, max_logits, lse = attention(p, length)
        if p.indices.shape[2] > 256 and length is None:
            out[..., 256:] = (out[..., 256:].view(torch.int16) - 1).view(torch.bfloat16)
        return out, max_logits, lse

    promise = SkipPromise(max_ulp=1, columns=(256, 512), max_share=1.0, none_nearer_zero=True)
    assert run(FULL, wider)["padded"].verdict is Verdict.FAILED
    assert run(FULL, wider, promise=promise)["padded"].verdict is Verdict.PASSED
    assert run(FULL, wider, promise=dataclasses.replace(promise, columns=(300, 512)))["padded"].verdict is Verdict.FAILED
    assert run(FULL, wider, promise=SkipPromise(within_budget=True))["padded"].detail.startswith("within two budgets")
    assert run(FULL, wider, "backscan", promise)["padded"].verdict is Verdict.PASSED  # with a length no pair more is walked


def test_a_kernel_that_raises_on_a_variation_fails_that_check_alone() -> None:
    def refuses(p: Problem, length: Length) -> Outputs:
        if p.indices.shape[2] != 256:
            raise ValueError("topk must be 256")
        return attention(p, length)

    found = run(FULL, refuses)
    assert {name for name, check in found.items() if check.verdict is not Verdict.PASSED} == {"padded"}
    assert found["padded"].detail.endswith("raises on this variation of it: ValueError: topk must be 256")


def test_memory_that_runs_out_is_no_failure_of_a_check() -> None:
    def hungry(p: Problem, length: Length) -> Outputs:
        if p.indices.shape[2] != 256:
            raise MemoryError
        return attention(p, length)

    with pytest.raises(MemoryError):
        run(FULL, hungry)


def test_what_differs_together_but_not_alone_is_told() -> None:
    text = "sparse_prefill:s_q=6,s_kv=300,h_q=2,topk=64"
    found = run(text, moved(1.0, lambda p: p.indices.shape[2] > 64 and p.sm_scale < 576**-0.5))
    assert found["written"].verdict is Verdict.FAILED
    assert found["written"].detail.startswith("equal alone, but not together with guards, rows-permuted, q-scaled")
    assert found["padded"].verdict is found["q-scaled"].verdict is Verdict.PASSED
    once = iter([False] * 10 + [True])
    found = run(text, moved(1.0, lambda p: next(once, False)))
    assert found["written"].verdict is Verdict.FLAKY and " once, not again: " in found["written"].detail


def test_every_relation_is_in_the_record_of_a_right_arm() -> None:
    names = {source: {check.name for check in arm.checks} for source, arm in run_arms("torch_blocks", HALF).items()}
    each = {"written", "guards", "rows-permuted", "q-scaled", "unnamed-changed", "padded", "indices-permuted", "batch-split"}
    assert all(each <= found for found in names.values())
    assert [source for source in SOURCES if "cut-at-length" in names[source]] == ["backscan"]  # once a kernel
