"""docs/public-bugs.md holds every known report and is true of the broken arms, the corpus and the tests; right kernels pass the corpus."""
from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from topk_trials import run_topk
from trials import inputs_of, run_arms

import arms.sparse_prefill.torch_blocks as torch_blocks
from arms.broken.fault import FAULTS
from arms.kernel import KERNELS, Launch, Outputs, Problem, Requires, load_package, make_problem, sparse_prefill_kernel
from cases import Case, IndexerTopkCase, SparsePrefillCase, load_suite, parse_case
from cases.indexer_inputs import make_indexer_inputs
from cases.suites import CORPUS, NEEDS_GPU, suite_names
from harness.asking import seconds_allowed
from harness.availability import unavailable
from harness.verdicts import Check, Verdict
from references.indexer_topk import topk_reference

load_package("arms.broken")

PAGE = Path(__file__).parent.parent / "docs" / "public-bugs.md"
COUNTS = {"SP": 40, "TL": 10, "ML": 13, "TK": 19, "LT": 11, "PC": 6, "HT": 17}
IDS = [f"{group}{number}" for group, count in COUNTS.items() for number in range(1, count + 1)]
"""The reports that the page was made from, in its order."""
PUBLIC = ("public-sparse", "public-indexer", "public-gpu")
MOST_WORK = {"sparse_prefill": 3e7, "indexer_topk": 3e7}  # FLOP of a launch
MOST_WIDTH = 600  # topk of sparse_prefill: one row is as expensive as four on a CPU


@dataclasses.dataclass(frozen=True)
class Row:
    """One report as the page has it."""

    id: str
    files: set[str]
    broken: set[str]
    checks: set[str]
    tests: set[str]
    where: str


@functools.cache
def page() -> list[Row]:
    """The rows of the page's tables."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not re.fullmatch(r"[A-Z]{2}\d+", cells[0]):
            continue
        assert len(cells) == 7, line
        words = cells[5].replace("-", "", 1) if cells[5] == "-" else cells[5]
        said = [word for word in words.split(", ") if word]
        rows.append(Row(cells[0], set(cells[3].split(", ")) - {"-"}, {f"broken_{name}" for name in re.findall(r"`(\w+)`", cells[4])},
                        {word for word in said if "`" not in word}, {word.strip("`") for word in said if "`" in word}, cells[6]))
    return rows


@functools.cache
def tagged() -> list[tuple[str, Case, frozenset[str]]]:
    """(file, case, ids behind it) of every line of the corpus that was made from public reports."""
    found = []
    for file in PUBLIC:
        for line in (CORPUS / f"{file}.txt").read_text(encoding="utf-8").splitlines():
            text, _, note = line.partition("#")
            if text.strip():
                found.append((file, parse_case(text.strip()), frozenset(re.findall(r"\b[A-Z]{2}\d+\b", note.partition(":")[0]))))
    return found


def test_the_page_has_every_report_once_and_in_order() -> None:
    assert [row.id for row in page()] == IDS


def test_broken_arms_checks_and_files_are_as_the_page_says() -> None:
    for row in page():
        faults = [fault for fault in FAULTS.values() if row.id in fault.reports]
        assert row.broken == {fault.kernel for fault in faults}, row.id
        assert row.checks == {fault.check for fault in faults}, row.id
        assert row.files == {file for file, _, ids in tagged() if row.id in ids}, row.id


def test_every_report_is_seen_by_a_broken_arm_or_a_test_or_the_page_says_why_not() -> None:
    for row in page():
        assert re.match(r"CPU|GPU|Outside: ", row.where), row.id
        assert bool(row.broken | row.tests) != row.where.startswith("Outside: "), row.id
        assert row.broken or row.files or row.id.startswith("HT") or "no case" in row.where or row.where.startswith("Outside: "), row.id
        on_a_cpu = any(not file.endswith(NEEDS_GPU) for file in row.files)
        assert on_a_cpu or not (row.broken or row.where.startswith("CPU; ")), row.id


def test_tests_that_the_page_names_exist() -> None:
    files = Path(__file__).parent.glob("test_*.py")
    there = {name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(encoding="utf-8"), re.M)}
    assert {test for row in page() for test in row.tests} - there == set()


def test_faults_name_reports_that_there_are_and_their_cases_are_in_the_corpus() -> None:
    """So the line of a report holds a case on which its broken arm is caught: tests/test_broken_*.py run it there."""
    for fault in FAULTS.values():
        assert set(fault.reports) <= set(IDS), fault.kernel
        case = parse_case(fault.case)
        ids = [ids for file, other, ids in tagged() if other == case and not file.endswith(NEEDS_GPU)]
        assert set(fault.reports) <= frozenset().union(*ids), fault.kernel


# --- the corpus -------------------------------------------------------------------------------------------------------


def test_every_line_of_the_corpus_says_whose_it_is() -> None:
    for file, case, ids in tagged():
        assert ids and ids <= set(IDS), (file, str(case))


def test_corpus_is_its_files_without_those_that_need_a_gpu() -> None:
    files = [name for name in suite_names() if name.startswith("corpus/")]
    assert {f"corpus/{file}" for file in PUBLIC} <= set(files)
    whole = load_suite("corpus")
    assert set(whole) == {case for file in files if not file.endswith(NEEDS_GPU) for case in load_suite(file)}
    assert len(whole) == len(set(whole))
    assert max(case.work for file, case, _ in tagged() if not file.endswith(NEEDS_GPU)) < 2e8  # seconds on a CPU


def test_gpu_cases_fit_the_kernels_that_there_are_for_gpus() -> None:
    """64 and 128 heads, widths of whole pairs of blocks."""
    cases = [case for case in load_suite("corpus/public-gpu") if isinstance(case, SparsePrefillCase)]
    assert all(case.h_q in (64, 128) and case.topk % 128 == 0 for case in cases)


def small(family: str) -> list[str]:
    """The cases of the corpus that are run here. Left out are those of broken arms, which tests/test_broken_*.py take right kernels
    through, and those that need a GPU or take seconds, which are for `threearm run --suite corpus`."""
    elsewhere = {parse_case(fault.case) for fault in FAULTS.values()}
    cases = [case for file, case, _ in tagged() if not file.endswith(NEEDS_GPU) and case not in elsewhere]
    return [str(case) for case in cases if case.family == family and case.work <= MOST_WORK[family]
            and (family == "indexer_topk" or case.topk <= MOST_WIDTH)]


def not_passed(checks: list[Check]) -> dict[str, str]:
    """Check: what it says, where that is not PASSED."""
    return {check.name: f"{check.verdict.name} {check.detail}" for check in checks if check.verdict is not Verdict.PASSED}


@pytest.mark.parametrize("text", small("sparse_prefill"))
def test_a_right_kernel_passes_the_corpus_of_sparse_prefill(text: str) -> None:
    for run in run_arms("torch_blocks", text).values():
        assert not_passed(run.checks) == {}


@pytest.mark.parametrize("text", small("indexer_topk"))
@pytest.mark.parametrize("kernel", ["torch_dense", "litetopk_torch"])
def test_right_kernels_pass_the_corpus_of_indexer_topk(kernel: str, text: str) -> None:
    assert not_passed(run_topk(kernel, text).checks) == {}


def in_the_bin(case: Case, half: bool) -> tuple[int, int]:
    """How many keys of row 0 have the first 8 bits of its k-th score, and how many values: of fp16 if `half`, else of fp32."""
    assert isinstance(case, IndexerTopkCase)
    expected = topk_reference(make_indexer_inputs(case, "cpu"))
    scores, kth = expected.scores(0, 1)[0].float(), expected.kth[0].float()
    bins = [x.half().view(torch.int16) >> 8 if half else x.view(torch.int32) >> 24 for x in (scores, kth)]
    inside = scores[bins[0] == bins[1]]
    return len(inside), len(inside.unique())


@pytest.mark.parametrize(("text", "half", "keys", "values"), [
    ("indexer_topk:requests=1/2600,topk=1000,values=planted", False, 2048, 2048),
    ("indexer_topk:requests=1/5200,topk=2000,values=planted", False, 4096, 4096),
    ("indexer_topk:requests=1/20400,topk=8000,values=planted", False, 1 << 14, 1 << 14),
    ("indexer_topk:requests=1/14000,topk=7000,values=digits,scales=any", True, 2048, 2048),
    ("indexer_topk:requests=1/4200,topk=512,values=nearflat,ulps=64", True, 4096, 60),
    ("indexer_topk:requests=1/16385,topk=512,values=nearflat,ulps=64", True, 1 << 14, 60),
    ("indexer_topk:requests=1/8320,values=plateau,share=0.988", True, 8000, 1),
])
def test_corpus_lines_have_the_bins_that_they_claim(text: str, half: bool, keys: int, values: int) -> None:
    case = parse_case(text)
    assert case in load_suite("corpus/public-indexer")
    found = in_the_bin(case, half)
    assert found[0] > keys and found[1] >= values


# --- reports that are seen otherwise than by a check on a case --------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.reports and fault.check == "raises"])
def test_a_refusal_that_was_reported_is_an_exception_of_the_launch(name: str) -> None:
    fault = FAULTS[name]
    with pytest.raises((RuntimeError, AssertionError)):
        run_arms(name, fault.case) if fault.family == "sparse_prefill" else run_topk(name, fault.case)


def walked(kernel: str, length: torch.Tensor | None, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows times blocks that one launch walks."""
    counted = []

    def counting(*arguments: object) -> None:
        counted.append(len(arguments[2]))  # type: ignore[arg-type]
        add_block(*arguments)  # type: ignore[arg-type]

    add_block = torch_blocks.add_block
    with monkeypatch.context() as patch:
        patch.setattr(torch_blocks, "add_block", counting)
        KERNELS[kernel].prepare(problem)(length)  # type: ignore[arg-type, call-arg]
    return sum(counted)


def test_pairs_that_a_length_saves_are_told_by_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that heeds its length and yet walks all pairs passes every check: only the time of its arms shows it."""
    text = "sparse_prefill:s_q=6,s_kv=3000,h_q=2,topk=384,rows=half"

    @sparse_prefill_kernel("walks_every_pair")
    def walks_every_pair(problem: Problem) -> Launch:
        position = torch.arange(problem.indices.shape[2])

        def launch(length: torch.Tensor | None) -> Outputs:
            kept = position < (problem.indices.shape[2] if length is None else length[:, None, None])
            return torch_blocks.attention(dataclasses.replace(problem, indices=torch.where(kept, problem.indices, -1)), None)

        return launch

    try:
        for run in run_arms("walks_every_pair", text).values():
            assert not_passed(run.checks) == {}
        inputs = inputs_of(text)
        blocks = {kernel: [walked(kernel, length, make_problem(inputs), monkeypatch) for length in (None, inputs.seqlens)]
                  for kernel in ("torch_blocks", "walks_every_pair")}
    finally:
        del KERNELS["walks_every_pair"]
    assert blocks == {"torch_blocks": [36, 24], "walks_every_pair": [36, 36]}


def test_heads_have_the_same_bits_padded_or_not() -> None:
    problem = make_problem(inputs_of("sparse_prefill:s_q=4,s_kv=300,h_q=16,rows=ragged"))
    padded = dataclasses.replace(problem, q=torch.nn.functional.pad(problem.q, (0, 0, 0, 48)))
    for alone, among in zip(torch_blocks.attention(problem, None), torch_blocks.attention(padded, None)):
        assert torch.equal(alone, among[:, :16])


@pytest.mark.parametrize("have", [(9, 1), (10, 0), (12, 0), (8, 9)])
def test_a_capability_is_matched_exactly(have: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    @sparse_prefill_kernel("for_sm90", requires=Requires(capability=((9, 0),)))
    def for_sm90(problem: Problem) -> None: ...

    kernel = KERNELS.pop("for_sm90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: have)
    assert unavailable(kernel, torch.device("cuda")) == f"needs compute capability 9.0, this GPU has {have[0]}.{have[1]}"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert unavailable(kernel, torch.device("cuda")) == ""


def test_wrong_scores_are_told_from_a_wrong_selection() -> None:
    """By its own scores the choice is exact: own-scores passes, and set says that the scores are what is wrong."""
    fault = FAULTS["broken_exact_choice_by_wrong_scores"]
    found = {check.name: check.verdict for check in run_topk(fault.kernel, fault.case).checks}
    assert (found["set"], found["own-scores"]) == (Verdict.FAILED, Verdict.PASSED)
    found = {check.name: check.verdict for check in run_topk("broken_swaps_at_the_border", fault.case).checks}
    assert found["own-scores"] is Verdict.FAILED


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_case_with_more_work_has_more_time(device: str) -> None:
    small, large = parse_case("sparse_prefill:s_q=1"), parse_case("sparse_prefill:s_q=100000,h_q=128,topk=2048")
    assert seconds_allowed(small, device) == pytest.approx(60, abs=1)
    assert seconds_allowed(large, device) > 10 * 60
    assert seconds_allowed(large, device, launches=200) > 10 * seconds_allowed(large, device)
