"""Two families in one run: which text, key, kernel and arm belongs to which, and that neither meets the other's."""
from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import FAULTY, TINY, TINY_TOPK, Done, threearm

from arms.kernel import KERNELS, Requires, load_file, load_package
from arms.lengths import SOURCES
from arms.topk import TopkKernel, TopkProblem, no_bound
from cases import CaseError, IndexerTopkCase, SparsePrefillCase, family_of, format_case, load_suite, parse_case
from cases.families import FAMILIES as CASE_FAMILIES
from cases.suites import override_all
from harness import availability, verdicts
from harness.asking import contract_of, seconds_allowed
from harness.client import WorkerOptions
from harness.families import FAMILIES
from harness.runfolder import RunFolder
from harness.runner import cases_of, describe
from harness.verdicts import Verdict

CPU = torch.device("cpu")
BOTH = [parse_case(TINY), parse_case(TINY_TOPK)]


# --- cases ------------------------------------------------------------------------------------------------------------


def test_a_text_is_a_case_of_its_family() -> None:
    assert [type(case) for case in BOTH] == [SparsePrefillCase, IndexerTopkCase]
    assert [family_of(text) for text in (TINY, TINY_TOPK)] == [case.family for case in BOTH] == list(CASE_FAMILIES) == list(FAMILIES)
    assert [format_case(case) for case in BOTH] == [TINY, TINY_TOPK] == [str(case) for case in BOTH]
    assert parse_case(format_case(BOTH[1], canonical=True)) == BOTH[1]


def test_a_key_is_set_in_the_cases_that_have_it() -> None:
    both = [dataclasses.replace(BOTH[0], topk=7, h_q=3), dataclasses.replace(BOTH[1], topk=7, h=64)]
    assert override_all(BOTH, "topk=7,h_q=3,h=64") == both
    assert override_all(BOTH, "h_q=3") == [dataclasses.replace(BOTH[0], h_q=3), BOTH[1]]


@pytest.mark.parametrize(("settings", "told"), [
    ("h_qq=3", r"unknown key 'h_qq' in sparse_prefill and indexer_topk: did you mean 'h_q'\? keys are dtype, .*, requests, .*window"),
    ("topk=3,topk=4", "topk is given twice"),
    ("topk", "'topk' is not key=value"),
    ("h=33", "h=33: allowed is 32 or 64"),
])
def test_settings_that_cannot_be(settings: str, told: str) -> None:
    with pytest.raises(CaseError, match=told):
        override_all(BOTH, settings)


def test_a_key_of_the_other_family_alone_is_an_error() -> None:
    with pytest.raises(CaseError, match="unknown key 'h' in sparse_prefill: "):
        override_all(BOTH[:1], "h=32")
    with pytest.raises(CaseError, match="unknown key 'h_q' in indexer_topk: "):
        override_all(BOTH[1:], "h_q=32")


def test_work_is_floating_point_operations_of_a_launch() -> None:
    assert BOTH[0].work == 2 * 2 * 2 * 16 * (512 + 512)  # s_q, h_q, topk, d_qk + d_v
    assert BOTH[1].work == 2 * 2 * 40 * 32 * 128  # rows, keys, heads, columns
    assert seconds_allowed(BOTH[0], "cpu") == pytest.approx(60, abs=1)
    large = parse_case("indexer_topk:requests=8192/1048576")
    assert seconds_allowed(large, "cuda") > 60 + large.work / 100e12 * 12


def test_smoke_shows_both() -> None:
    assert {case.family for case in load_suite("smoke")} == set(CASE_FAMILIES)


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_a_kernel_knows_its_family_and_arms() -> None:
    load_package("arms.sparse_prefill")
    load_package("arms.indexer_topk")
    assert (KERNELS["torch_blocks"].family, KERNELS["torch_blocks"].arms) == ("sparse_prefill", verdicts.SOURCES)
    assert (KERNELS["torch_dense"].family, KERNELS["torch_dense"].arms) == ("indexer_topk", ("dense",))
    assert tuple(SOURCES) == verdicts.SOURCES


def test_a_file_without_a_kernel_names_both_decorators() -> None:
    with pytest.raises(ValueError, match="use @sparse_prefill_kernel or @indexer_topk_kernel"):
        load_file(str(FAULTY / "registers_nothing.py"))


def topk_kernel(requires: Requires = Requires(), memory: Any = no_bound) -> TopkKernel:
    def prepare(problem: TopkProblem) -> Any:
        raise AssertionError("nothing is launched here")

    return TopkKernel("k", prepare, requires, "litetopk", "fp8", memory, __file__)


def test_a_promise_is_one_line_with_a_bound_at_one_size() -> None:
    assert topk_kernel().promises(CPU) == "fp8 sums; no memory bound"
    sized = topk_kernel(memory=lambda p: p.num_q * p.s_kv // 8 + p.heads + p.topk + len(p.requests))
    assert sized.promises(CPU) == "fp8 sums; at 8192 rows, 1M keys, topk 2048 at most 1.00 GiB beyond inputs and indices"
    assert sized.promises(None) == "fp8 sums; a memory bound"

    def broken(problem: TopkProblem) -> int:
        raise KeyError("x")

    assert "unknown (KeyError)" in topk_kernel(memory=broken).promises(CPU)


@pytest.mark.parametrize(("requires", "text", "told"), [
    (Requires(heads=(32,)), "h=64", "takes h 32, the case has 64"),
    (Requires(topk_in=(512, 2048)), "topk=1024", "takes topk 512 or 2048, the case has 1024"),
    (Requires(topk_max=2048), "topk=2049", "takes topk up to 2048, the case has 2049"),
    (Requires(topk_multiple=4), "topk=6", "needs topk to be a multiple of 4, the case has 6"),
    (Requires(keys=(100, 200)), "requests=4/99", "takes 100 to 200 keys, the case has 99"),
    (Requires(keys=(100, 200)), "requests=4/101+4/100", "takes 100 to 200 keys, the case has 201"),
    (Requires(keys_multiple=4), "requests=4/102", "needs the keys to be a multiple of 4, the case has 102"),
    (Requires(requests_max=1), "requests=4/100+1/2", "takes 1 request(s), the case has 2"),
])
def test_a_case_is_refused_with_the_reason(requires: Requires, text: str, told: str) -> None:
    assert availability.refusal(topk_kernel(requires), "litetopk", parse_case(f"indexer_topk:{text}")) == told
    assert availability.refusal(topk_kernel(), "litetopk", parse_case(f"indexer_topk:{text}")) == ""


def test_requirements_are_told_in_one_line() -> None:
    need = Requires(device="cuda", capability=((9, 0),), heads=(32,), topk_in=(2048,), topk_max=2048, keys=(1, 9), keys_multiple=4,
                    requests_max=1)
    assert availability.requirements(topk_kernel(need)) == \
        "cuda, SM90, h 32, topk 2048, topk up to 2048, 1 to 9 keys, keys % 4 == 0, one request"
    assert availability.requirements(topk_kernel(Requires(heads=(32, 64)))) == "any device, h 32/64"


@pytest.mark.parametrize(("family", "contract", "device", "becomes"), [
    ("sparse_prefill", "auto", "cuda", "kernel"), ("indexer_topk", "auto", "cuda:1", "span"), ("indexer_topk", "auto", "cpu", "wall"),
    ("sparse_prefill", "auto", "cpu", "wall"), ("indexer_topk", "kernel", "cuda", "kernel"), ("indexer_topk", "", "cuda", "")])
def test_auto_is_each_family_s_own_contract(family: str, contract: str, device: str, becomes: str) -> None:
    assert contract_of(family, contract, device) == becomes


def test_the_worker_describes_cases_of_the_kernel_s_family_alone() -> None:
    kernels = {kernel["name"]: kernel for kernel in describe(WorkerOptions("cpu", False, (), 1 << 33), [TINY, TINY_TOPK])["kernels"]}
    assert {kernel["family"] for kernel in kernels.values()} == set(FAMILIES)
    assert (list(kernels["torch_blocks"]["refused"]), kernels["torch_blocks"]["arms"]) == ([TINY], list(SOURCES))
    assert (list(kernels["torch_dense"]["refused"]), kernels["torch_dense"]["arms"]) == ([TINY_TOPK], ["dense"])
    assert cases_of(kernels["torch_dense"], [TINY, TINY_TOPK]) == [TINY_TOPK]


# --- a run of both ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Mixed:
    """A run of one case of each family."""

    done: Done
    folder: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "records.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    runs = tmp_path_factory.mktemp("mixed")
    done = threearm("run", TINY, TINY_TOPK, "--device", "cpu", "--samples", "2", "--runs", str(runs))
    return Mixed(done, next(runs.iterdir()))


def test_each_kernel_meets_the_cases_of_its_family(mixed: Mixed) -> None:
    assert mixed.done.code == 0, mixed.done.text
    met = {(record["arm"], record["case"]) for record in mixed.records}
    assert len(met) == len(mixed.records)
    assert {arm for arm, case in met if case == TINY} == {f"torch_blocks/{source}" for source in SOURCES}
    of_topk = {arm for arm, case in met if case == TINY_TOPK}
    assert {"torch_dense/dense", "litetopk_torch/litetopk"} <= of_topk
    assert {arm.partition("/")[2] for arm in of_topk} == {"dense", "litetopk"}
    assert {record["verdict"] for record in mixed.records} == {"PASSED"}
    assert "SKIPPED" not in mixed.done.text


def test_records_have_what_their_family_has(mixed: Mixed) -> None:
    records = {record["arm"]: record for record in mixed.records}
    assert set(records["torch_blocks/none"]["outputs"]) == {"out", "max_logits", "lse"}
    assert records["torch_blocks/metadata"]["lengths"] and records["torch_blocks/none"]["ways"] == {}
    assert "indices" in records["litetopk_torch/litetopk"]["outputs"]
    assert sum(records["litetopk_torch/litetopk"]["ways"].values()) == 2
    assert records["litetopk_torch/litetopk"]["memory"] > 0
    assert all("timed-output" in {check["name"] for check in record["checks"]} for record in records.values())
    assert {record["time"]["contract"] for record in records.values()} == {"wall"}


def test_the_run_shows_both_families(mixed: Mixed) -> None:
    text = mixed.done.text
    assert text.index("none / metadata") < text.index("dense / litetopk")
    shown = threearm("report", str(mixed.folder))
    assert shown.text.strip() == text.strip()
    page = threearm("report", "--markdown", str(mixed.folder)).text
    assert "#### torch_blocks" in page and "#### indexer_topk" in page and "peak transient memory" in page


def test_a_finished_run_of_both_is_not_run_again(mixed: Mixed) -> None:
    before = (mixed.folder / "records.jsonl").read_bytes()
    assert threearm("run", "--resume", str(mixed.folder)).code == 0
    assert (mixed.folder / "records.jsonl").read_bytes() == before


def test_cases_without_a_kernel_of_theirs_are_mentioned(tmp_path: Path) -> None:
    done = threearm("run", TINY, TINY_TOPK, "--arm", "torch_blocks/none", "--device", "cpu", "--time", "none", "--runs", str(tmp_path))
    assert done.code == 0
    assert "1 PASSED" in done.lines
    assert "1 case of indexer_topk was not run: no chosen kernel is of that family" in done.lines
    assert "not available" not in done.text  # nobody asked for the others


def test_list_has_each_kernel_under_the_cases_of_its_family() -> None:
    lines = threearm("list", TINY, TINY_TOPK, "--device", "cpu").lines
    first, second = lines[1 : lines.index(TINY_TOPK)], lines[lines.index(TINY_TOPK) + 1 :]
    assert first == [f"  torch_blocks/{source}" for source in SOURCES]
    assert {"  torch_dense/dense", "  litetopk_torch/litetopk"} <= set(second) and not any("torch_blocks" in line for line in second)


def test_faults_of_indexer_kernels_are_told_apart(tmp_path: Path) -> None:
    """One ends its worker, the other is wrong only in the timed loop; torch_dense is unharmed."""
    load = ["--load", str(FAULTY / "topk_faults.py"), "--device", "cpu", "--samples", "50", "--runs", str(tmp_path)]
    done = threearm("run", TINY_TOPK, "--arm", "exits", "--arm", "late_topk", "--arm", "litetopk_torch", *load)
    assert done.code == 1
    records = {json.loads(line)["arm"]: json.loads(line) for line in next(tmp_path.glob("*/records.jsonl")).read_bytes().splitlines()}
    assert {arm: record["verdict"] for arm, record in records.items()} == {
        "exits/litetopk": "CRASHED", "late_topk/dense": "FLAKY", "litetopk_torch/litetopk": "PASSED"}
    assert records["exits/litetopk"]["detail"].startswith("exit code 7 in phase launch")
    wrong = [check["name"] for check in records["late_topk/dense"]["checks"] if check["verdict"] != "PASSED"]
    assert wrong == ["timed-output"]


@pytest.mark.parametrize("arm", ["torch_dense", "litetopk_torch/litetopk"])
def test_replay_tells_an_indexer_arm_in_full(arm: str) -> None:
    done = threearm("replay", TINY_TOPK, "--arm", arm, "--device", "cpu")
    assert done.code == 0
    assert done.lines[0].startswith(f"PASSED  {arm.partition('/')[0]}/")
    assert "PASSED   set" in done.text


def test_replay_of_the_last_source_runs_those_before_it() -> None:
    done = threearm("replay", TINY, "--arm", "torch_blocks/metadata", "--device", "cpu")
    assert done.code == 0
    assert "none-vs-metadata" in done.text and "backscan-vs-metadata" in done.text
    assert "torch_blocks/none  " not in done.text


def test_time_wrong_times_what_is_wrong_and_leaves_its_verdict(tmp_path: Path) -> None:
    """An inexact baseline has a time, too, when asked for; without, none."""
    case = "indexer_topk:requests=4/200,topk=16"
    arms = ("--arm", "torch_dense", "--arm", "broken_smallest_chosen", "--samples", "2", "--time", "wall")
    for more, times in (((), [False, True]), (("--time-wrong",), [True, True])):
        done = threearm("run", case, *arms, "--runs", str(tmp_path), *more)
        assert done.code == 1
        stored = RunFolder.load(Path(done.lines[-1].removeprefix("records: ")), False)
        records = {record.kernel: record for record in stored.records}
        assert [records[name].time is not None for name in ("broken_smallest_chosen", "torch_dense")] == times
        assert records["broken_smallest_chosen"].verdict is Verdict.FAILED


def test_a_requirement_that_is_no_tuple_is_refused() -> None:
    """("package") is a string, of which a version would be looked for letter by letter."""
    with pytest.raises(TypeError, match=r"distribution='package': it is a tuple, write \('package',\)"):
        Requires(distribution=("package"))  # type: ignore[arg-type]
