"""How an arm is launched for its checks: how often, on what memory, and held to which promise in which rows."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from trials import expected_of, inputs_of

from arms.kernel import BITWISE, Convention, Kernel, Launch, Outputs, Problem, Requires, SkipPromise, normalise
from arms.lengths import SOURCES
from arms.sparse_prefill.torch_blocks import attention
from cases import parse_case
from cases.inputs import make_inputs
from harness.guard import poisoned_memory
from harness.trial import ArmRun, KernelTrial, check_shapes
from harness.verdicts import Check, Verdict

HALF = "sparse_prefill:s_q=6,s_kv=3000,h_q=2,topk=384,rows=half"
MIXED = "sparse_prefill:s_q=26,s_kv=300,h_q=2,rows=mixed"
NEXT_TO_256 = SkipPromise(max_ulp=1, columns=(256, 512), max_share=1.0)

Change = Callable[[Outputs, "torch.Tensor | None"], Outputs]


def trial_of(text: str, launch: Callable[[Problem], Launch], promise: SkipPromise = BITWISE,
             convention: Convention = Convention()) -> tuple[KernelTrial, list[str]]:
    """A trial of an unregistered kernel, and the list of the phases that it announces."""
    phases: list[str] = []
    inputs = make_inputs(parse_case(text), "cpu")
    kernel = Kernel("kernel", launch, Requires(), convention, promise, dict(SOURCES), __file__)
    return KernelTrial(kernel, inputs, expected_of(text), inputs.digests(), phases.append), phases


def changed(change: Change) -> Callable[[Problem], Launch]:
    """torch_blocks, with its outputs changed."""
    def prepare(problem: Problem) -> Launch:
        return lambda length: change(attention(problem, length), length)

    return prepare


def check_named(run: ArmRun, name: str) -> Check:
    return next(check for check in run.checks if check.name == name)


def test_poisoned_memory_is_nan_inside_and_settings_are_restored() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), poisoned_memory():
        assert bool(torch.empty(1000).isnan().all())
        assert bool(torch.empty_like(torch.zeros(10, dtype=torch.bfloat16)).isnan().all())
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize("leaks", [False, True])
def test_one_launch_is_on_poisoned_memory_and_is_compared(leaks: bool) -> None:
    """A kernel that is wrong only if its memory was NaN, as one that does not write everything is: then alone once more, and between
    guard bands, whose memory is NaN, too."""
    poisoned: list[bool] = []

    def leak(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
        poisoned.append(bool(torch.empty(64).isnan().all()))
        if poisoned[-1] and leaks:
            outputs[2][0, 0] += 1
        return outputs

    trial, _ = trial_of(HALF, changed(leak))
    torch.empty(64).zero_()
    run = trial.run("none")
    # launch, again three times, another problem, again, NaN in kv, q and kv rewritten twice, fresh; then order of entries, two batches
    before, varied, after = [False] * 10, [True], [False] * 3
    alone = [True, True, False, False, False, False] if leaks else []
    assert poisoned == before + varied + alone + after
    assert {check.name for check in run.checks if check.verdict is not Verdict.PASSED} == ({"written"} if leaks else set())
    if leaks:
        assert check_named(run, "written").detail.startswith("lse differs in 1 of 12")


def test_full_width_is_launched_once_per_kernel_with_topk_everywhere() -> None:
    given: list[list[int] | None] = []

    def note(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
        given.append(None if length is None else length.tolist())
        return outputs

    trial, _ = trial_of(HALF, changed(note))
    names = {source: [check.name for check in trial.run(source).checks] for source in SOURCES}
    assert given.count([384] * 6) == 1 and given.count([97] * 6) == 2 and given.count(None) == 14  # 97: cut
    assert given.count([192] * 6) == 25 and given.count([192] * 5) == given.count([192]) == 2  # 5 and 1: split
    assert "full-width" in names["backscan"] and "full-width" not in names["metadata"]


def test_set_up_is_done_once_and_announced_before_the_launch() -> None:
    made: list[int] = []

    def prepare(problem: Problem) -> Launch:
        made.append(1)
        return lambda length: attention(problem, length)

    trial, phases = trial_of("sparse_prefill:s_q=1,s_kv=4,h_q=1,topk=4", prepare)  # every key named: no second set-up with NaN
    for source in SOURCES:
        trial.run(source)
    # Once for all arms, for each on poisoned memory, with its entries in another order, and twice where q and kv are rewritten; twice
    # for the cut length.
    assert len(made) == 1 + 4 * 3 + 2 and phases.count("prepare") == 1
    assert phases[:2] == ["prepare", "launch"] and "judge" in phases


def one_ulp_in(rows: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Away from zero by an ULP in the right half of some rows, chosen by their length."""
    def change(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = outputs
        if length is not None:
            at = rows(length)
            out[at, :, 256:] = (out[at, :, 256:].view(torch.int16) + 1).view(torch.bfloat16)
        return out, max_logits, lse

    return change


def test_promise_holds_for_rows_that_skip_a_pair_and_for_no_others() -> None:
    """Width 256: rows of 65 to 128 entries skip a pair, rows of 129 and more do not."""
    skipping, walking = (one_ulp_in(rows) for rows in (lambda n: (n > 1) & (n <= 128), lambda n: (n > 128) & (n < 256)))
    for change, verdict in ((skipping, Verdict.PASSED), (walking, Verdict.FAILED)):
        trial, _ = trial_of(MIXED, changed(change), NEXT_TO_256)
        trial.run("none")
        for source in ("backscan", "metadata"):
            assert check_named(trial.run(source), f"none-vs-{source}").verdict is verdict


def test_arms_that_skip_the_same_pairs_are_held_to_bits() -> None:
    """metadata gives a row without a key 0 pairs and backscan 1: only there may they differ."""
    def change(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
        return one_ulp_in(lambda n: n == 1)(outputs, length) if length is not None and int(length.min()) == 0 else outputs

    trial, _ = trial_of(MIXED, changed(change), NEXT_TO_256)
    trial.run("backscan")
    check = check_named(trial.run("metadata"), "backscan-vs-metadata")
    assert check.verdict is Verdict.FAILED and "elements outside the promised rows" in check.detail


@pytest.mark.parametrize("nearer", ["none", "backscan"])
def test_which_arm_must_be_the_one_nearer_zero(nearer: str) -> None:
    def change(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = outputs
        if (length is None) != (nearer == "none"):
            out[:, :, 300:310] = (out[:, :, 300:310].view(torch.int16) + 1).view(torch.bfloat16)
        return out, max_logits, lse

    trial, _ = trial_of(HALF, changed(change), dataclasses.replace(NEXT_TO_256, none_nearer_zero=True))
    trial.run("none")
    check = check_named(trial.run("backscan"), "none-vs-backscan")
    assert check.verdict is (Verdict.PASSED if nearer == "none" else Verdict.FAILED)


def test_guard_that_falls_back_is_noted_and_judged_as_none() -> None:
    text = f"{HALF},metadata_rows=5"
    trial, _ = trial_of(text, changed(lambda outputs, length: outputs))
    trial.run("none")
    run = trial.run("metadata")
    assert run.length is None and "fell back to none" in run.note
    assert {check.verdict for check in run.checks} == {Verdict.PASSED}
    assert not {"lengths", "none-vs-metadata"} & {check.name for check in run.checks}


def test_a_kernels_own_convention_is_translated_before_it_is_judged() -> None:
    def base_2(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
        out, max_logits, lse = outputs
        lse = lse * 1.4426950408889634
        return out, max_logits * 1.4426950408889634, lse.masked_fill(lse == torch.inf, -torch.inf)

    right = trial_of(MIXED, changed(base_2), convention=Convention(log_base=2.0, empty_lse=-torch.inf))[0].run("none")
    assert {check.verdict for check in right.checks} == {Verdict.PASSED}
    wrong = trial_of(MIXED, changed(base_2))[0].run("none")
    assert check_named(wrong, "reference").verdict is Verdict.FAILED


@pytest.mark.parametrize("sentinel", [-torch.inf, torch.nan, -1e30])
def test_a_kernels_own_lse_of_an_empty_row_becomes_plus_infinity(sentinel: float) -> None:
    lse = torch.tensor([[1.5], [sentinel]])
    got = normalise((torch.zeros(2, 1, 512), lse, lse), Convention(empty_lse=sentinel))
    assert got[2].tolist() == [[1.5], [torch.inf]]
    assert got[1] is lse and bool((got[0] == 0).all())


def test_distance_to_the_unquantised_case_is_reported_for_fp8_alone() -> None:
    plain = changed(lambda outputs, length: outputs)
    extra = trial_of(HALF.replace(":", ":dtype=fp8,"), plain)[0].run("none").extra
    assert 0.01 < extra["unquantised relative error"] < 0.2
    assert trial_of(HALF, plain)[0].run("none").extra == {}


def test_outputs_of_another_dtype_are_refused() -> None:
    inputs = inputs_of(HALF)
    out, max_logits, lse = attention(trial_of(HALF, changed(lambda outputs, length: outputs))[0].problem, None)
    check_shapes((out, max_logits, lse), inputs)
    with pytest.raises(ValueError, match=r"out must be torch.bfloat16 .* returned torch.float32"):
        check_shapes((out.float(), max_logits, lse), inputs)
    with pytest.raises(ValueError, match=r"lse must be torch.float32 .* returned torch.float64"):
        check_shapes((out, max_logits, lse.double()), inputs)


def test_a_kernel_that_splits_by_length_may_promise_less_than_equality() -> None:
    """Its arms are then held to be near each other: one ULP of lse passes, one budget too many does not."""
    def shifted(by: float) -> list[Verdict]:
        def shift(outputs: Outputs, length: torch.Tensor | None) -> Outputs:
            return outputs[0], outputs[1], outputs[2] + (0 if length is None else by)

        trial, _ = trial_of(HALF, changed(shift), SkipPromise(within_budget=True))
        runs = [trial.run(source) for source in SOURCES]
        return [check_named(runs[1], name).verdict for name in ("none-vs-backscan", "full-width")]

    assert shifted(1e-6) == [Verdict.PASSED] * 2
    assert shifted(1e-3) == [Verdict.FAILED] * 2


@pytest.mark.parametrize(("returned", "what"), [(torch.zeros(2), "a Tensor"), (None, "None"), ((1, 2), "a tuple")])
def test_a_kernel_that_returns_nothing_to_launch_is_told_so(returned: object, what: str) -> None:
    trial, phases = trial_of(HALF, lambda problem: returned)  # type: ignore[arg-type,return-value]
    for source in ("none", "backscan"):
        with pytest.raises(TypeError, match=f"^kernel must return a callable that launches it, it returned {what}$"):
            trial.run(source)
    assert set(phases) == {"prepare"}
