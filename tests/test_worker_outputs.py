"""Outputs of two launches held against each other: each kind of difference, made by hand in a file that another worker could write."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from topk_trials import topk_trial
from trials import expected_of, inputs_of

from arms.kernel import KERNELS
from harness.compare import bits_differ
from harness.families import Trial
from harness.tensorfile import TensorFileError, read, write
from harness.topk_trial import TopkTrial
from harness.trial import KernelTrial
from harness.verdicts import Check, Verdict
from harness.worker_outputs import NEW_NAN, attempt, compare, outputs, save

SPARSE = "sparse_prefill:s_q=6,s_kv=300,h_q=2,topk=64,rows=mixed"
TOPK = "indexer_topk:requests=4/40+3/200,topk=16"
LABELS = ("candidate", "base")
Spoil = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def sparse() -> KernelTrial:
    inputs = inputs_of(SPARSE)
    trial = KernelTrial(KERNELS["torch_blocks"], inputs, expected_of(SPARSE), inputs.digests(), lambda phase: None)  # type: ignore[arg-type]
    trial.run("none")
    return trial


@pytest.fixture(scope="module")
def topk() -> TopkTrial:
    trial = topk_trial("litetopk_torch", TOPK)
    trial.run("litetopk")
    return trial


def against(trial: Trial, arm: str, tmp_path: Path, spoil: Spoil) -> Check:
    """The check of an arm against its own outputs, spoilt in the file."""
    path = str(tmp_path / "base.safetensors")
    save(trial, arm, path, {"case": "x"})
    tensors, _ = read(path)
    spoil(tensors)
    write(path, tensors, {})
    return compare(trial, arm, path, LABELS)


def nothing(tensors: dict[str, torch.Tensor]) -> None:
    """As they were."""


def test_what_is_saved_comes_back(sparse: KernelTrial, topk: TopkTrial, tmp_path: Path) -> None:
    for trial, arm, names in ((sparse, "none", {"out", "max_logits", "lse"}), (topk, "litetopk", {"indices", "values", "status"})):
        path = str(tmp_path / arm)
        size = save(trial, arm, path, {"case": "a", "arm": arm})
        tensors, about = read(path)
        assert tensors.keys() == names and about == {"case": "a", "arm": arm} and size == Path(path).stat().st_size
        assert all(not bool(bits_differ(tensors[name], tensor).any()) for name, tensor in outputs(trial, arm).items())


def test_equal_is_passed(sparse: KernelTrial, topk: TopkTrial, tmp_path: Path) -> None:
    assert against(sparse, "none", tmp_path, nothing).verdict is Verdict.PASSED
    assert against(topk, "litetopk", tmp_path, nothing).verdict is Verdict.PASSED


# --- sparse_prefill ---------------------------------------------------------------------------------------------------


def test_one_ulp_in_half_of_the_columns(sparse: KernelTrial, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["out"][:, 1, 256:].view(torch.int16).add_(1)

    check = against(sparse, "none", tmp_path, spoil)
    changed = 6 * 256
    assert check.verdict is Verdict.FAILED and check.bad == changed and sum(check.ulp.values()) == changed
    assert check.where == ["in out:", "rows all 6", "heads 1 (1 of 2)", "columns 256..511 (256 of 512)", *check.where[4:]]
    assert "at most 1 ULP" in check.detail and "equal: max_logits, lse" in check.detail
    assert "base" in check.first[0] and "candidate" in check.first[0]


def test_the_first_output_is_told_in_full_and_the_others_counted(sparse: KernelTrial, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lse"][5, 0].view(torch.int32).add_(7)
        tensors["max_logits"][1, 1].view(torch.int32).add_(3)

    check = against(sparse, "none", tmp_path, spoil)
    assert check.where[0] == "in max_logits:" and check.bad == 2 and check.ulp == {"3-4": 1}
    assert "max_logits: at most 3 ULP" in check.detail and "lse: at most 7 ULP" in check.detail and "equal: out" in check.detail


@pytest.mark.parametrize(("value", "who"), [(0.5, "candidate"), (float("nan"), "base")])
def test_a_nan_of_one_side_is_said_first(sparse: KernelTrial, tmp_path: Path, value: float, who: str) -> None:
    mine = sparse.done["none"].outputs[0]
    kept = mine[1, 0, 3].clone()
    mine[1, 0, 3] = 0.5 if value != value else float("nan")
    try:
        def spoil(tensors: dict[str, torch.Tensor]) -> None:
            tensors["out"][1, 0, 3] = value

        check = against(sparse, "none", tmp_path, spoil)
    finally:
        mine[1, 0, 3] = kept
    assert check.detail.startswith(f"{NEW_NAN}out has 1 in {who} alone; ") and check.ulp == {"not finite": 1}


def test_the_sign_of_zero_is_a_bit_too(sparse: KernelTrial, tmp_path: Path) -> None:
    mine = sparse.done["none"].outputs[0]
    kept = mine[1, 0, 3].clone()
    mine[1, 0, 3] = 0.0
    try:
        def spoil(tensors: dict[str, torch.Tensor]) -> None:
            tensors["out"][1, 0, 3] = -0.0

        check = against(sparse, "none", tmp_path, spoil)
    finally:
        mine[1, 0, 3] = kept
    assert check.verdict is Verdict.FAILED and check.bad == 1 and "in the sign of zero alone" in check.detail


def test_another_form_is_told(sparse: KernelTrial, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["out"] = tensors["out"].float()
        del tensors["lse"]

    check = against(sparse, "none", tmp_path, spoil)
    assert check.verdict is Verdict.FAILED
    assert check.detail == "out: candidate bfloat16 [6, 2, 512], base float32 [6, 2, 512]; lse: candidate float32 [6, 2], base none"


# --- indexer_topk -----------------------------------------------------------------------------------------------------


def chosen(trial: TopkTrial) -> torch.Tensor:
    assert trial.done
    return trial.done.result.indices


def test_a_swapped_key_is_told_as_far(topk: TopkTrial, tmp_path: Path) -> None:
    row = 5  # of the second request, which has 200 keys to choose 16 from

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        free = [key for key in range(int(topk.ks[row]), int(topk.ke[row])) if key not in tensors["indices"][row]]
        tensors["indices"][row, 0] = min(free, key=lambda key: float(topk.band.scores(row, row + 1)[0, key]))

    check = against(topk, "litetopk", tmp_path, spoil)
    assert check.verdict is Verdict.FAILED and check.bad == 2
    assert "1 of 7 rows choose other keys: 2 keys in one alone, in 1 row not within the margin" in check.detail
    assert any(line.startswith("rows 5") for line in check.where) and "only in" in check.first[0]


def test_another_order_is_no_other_choice(topk: TopkTrial, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("indices", "values"):
            tensors[name][6] = tensors[name][6].flip(0)

    check = against(topk, "litetopk", tmp_path, spoil)
    assert check.verdict is Verdict.FAILED
    assert check.detail == "the same keys in another order in 1 of 7 rows" and check.ulp == {}


def test_values_beside_the_same_keys(topk: TopkTrial, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("indices", "values"):
            tensors[name][6] = tensors[name][6].flip(0)
        tensors["values"][6, 2].view(torch.int32).add_(2)

    check = against(topk, "litetopk", tmp_path, spoil)
    assert check.ulp == {"2": 1} and "values beside the same keys differ in 1 of" in check.detail and "at most 2 ULP" in check.detail
    assert any("[row 6, key" in line for line in check.first)


def test_what_stands_behind_the_chosen_means_nothing(tmp_path: Path) -> None:
    trial = topk_trial("litetopk_torch", "indexer_topk:requests=3/8,topk=16")
    trial.run("litetopk")
    assert bool((chosen(trial) == -1).any())

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["values"][tensors["indices"] == -1] = 5.0

    check = against(trial, "litetopk", tmp_path, spoil)
    assert check.verdict is Verdict.PASSED and "beside -1" in check.detail


def test_status_and_missing_values(topk: TopkTrial, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["status"][:3] = 1
        del tensors["values"]

    check = against(topk, "litetopk", tmp_path, spoil)
    assert check.verdict is Verdict.FAILED and check.bad == 3
    assert check.detail == "values: candidate float32 [7, 16], base none; the status of 3 of 7 rows differs"


def test_another_width_cannot_be_compared(topk: TopkTrial, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["indices"] = tensors["indices"][:, :8].contiguous()

    check = against(topk, "litetopk", tmp_path, spoil)
    assert check.verdict is Verdict.FAILED and "indices: candidate int32 [7, 16], base int32 [7, 8]" in check.detail


# --- what cannot be done ----------------------------------------------------------------------------------------------


def test_problems_are_one_line(sparse: KernelTrial, tmp_path: Path) -> None:
    (tmp_path / "damaged").write_bytes(b"no tensors")
    actions: list[Callable[[], dict[str, object]]] = [
        lambda: {"bytes": save(sparse, "backscan", str(tmp_path / "x"), {})},
        lambda: {"bytes": save(None, "none", str(tmp_path / "x"), {})},
        lambda: {"bytes": save(sparse, "none", str(tmp_path / "no" / "folder"), {})},
        lambda: {"check": compare(sparse, "none", str(tmp_path / "missing"), LABELS)},
        lambda: {"check": compare(sparse, "none", str(tmp_path / "damaged"), LABELS)}]
    for action in actions:
        answer = attempt(action)
        assert answer.keys() == {"problem"} and answer["problem"] and "\n" not in answer["problem"]
    with pytest.raises(TensorFileError):
        compare(sparse, "none", str(tmp_path / "damaged"), LABELS)
    assert attempt(lambda: {"bytes": 3}) == {"bytes": 3, "problem": ""}


def test_a_check_can_be_sent(sparse: KernelTrial, tmp_path: Path) -> None:
    import json

    check = against(sparse, "none", tmp_path, nothing)
    assert json.loads(json.dumps(dataclasses.asdict(check)))["name"] == "numbers"
