"""Workers of kernels that are harder to tell: faults in set-up and in the timed loop, odd packages, files that cannot be loaded.

tests/test_faults_survived.py has the table of what every run survives.
"""
from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import FAULTY, MARK, TINY, left_behind, new_mark

from cases import parse_case
from cases.suites import override
from harness.asking import Settings
from harness.client import Unloadable, WorkerDied, WorkerOptions, WorkerProcess
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo
from harness.runner import Runner, describe
from harness.verdicts import SOURCES, Verdict

LATE_ZERO, LATE_LSE, LATE_ERROR, LATE_ODD_ERROR, LATE_EXIT = 11, 12, 13, 14, 15  # late.py


@dataclasses.dataclass
class Outcome:
    """What a run left: records by kernel, case and source; processes; descriptors it did not give back."""

    records: dict[tuple[str, str, str], Record]
    left: list[str]
    leaked: int

    def arms(self, kernel: str, case: str = TINY) -> list[Record]:
        """The records of none, backscan and metadata."""
        return [self.records[kernel, case, source] for source in SOURCES]

    def verdicts(self, kernel: str, case: str = TINY) -> list[Verdict]:
        return [record.verdict for record in self.arms(kernel, case)]


def rows(s_q: int, more: str = "") -> str:
    """The tiny case with so many rows, which is what tells a faulty kernel what to do."""
    return str(override(parse_case(TINY), f"s_q={s_q}{more}"))


ALLPAD = rows(23, ",rows=allpad")  # metadata dies of a length of 0


def options(*files: str) -> WorkerOptions:
    return WorkerOptions("cpu", False, tuple(str(FAULTY / file) for file in files), 1 << 30)


def carry_out(path: Path, file: str, names: tuple[str, ...], cases: list[str], settings: Settings,
              sources: tuple[str, ...] = SOURCES) -> Outcome:
    """Run kernels on cases, as a command does after it has asked for the kernels' descriptions."""
    kernels: list[dict[str, Any]] = [
        {"name": name, "family": "sparse_prefill", "why_not": "", "imports": "foreign" if file == "foreign.py" else "",
         "arms": list(sources), "refused": {case: {} for case in cases}} for name in names]
    folder = RunFolder(path, RunInfo("", [], cases, kernels, {}, {}))
    mark, before = new_mark(), len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("OMP_NUM_THREADS", "1")
        Runner(folder, options(file), settings, kernels, lambda *_: None).run()
    leaked = len(os.listdir("/proc/self/fd")) - before
    records = {(record.kernel, record.case, record.source): record for record in folder.records}
    return Outcome(records, left_behind(mark, 1.0), leaked)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    cases = [TINY, *map(rows, (LATE_ZERO, LATE_LSE, LATE_ERROR, LATE_ODD_ERROR, LATE_EXIT))]
    return carry_out(tmp_path_factory.mktemp("late"), "late.py", ("late",), cases, Settings(contract="wall", samples=12))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks the processes of one test; ends what is left of them."""
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    yield mark
    left_behind(mark, 0.0)


@pytest.mark.parametrize(("kernel", "verdict", "detail"), [
    ("deadly_in_prepare", Verdict.CRASHED, "signal SIGSEGV in phase prepare"),
    ("deadly_by_signal_40", Verdict.CRASHED, "signal .*in phase launch"),
    ("scribbles", Verdict.CRASHED, ""),
    ("raises_in_prepare", Verdict.FAILED, "KeyError in phase prepare: 'layout'"),
    ("raises_no_unicode", Verdict.FAILED, "ValueError in phase prepare: a file name"),
])
def test_faults_that_are_harder_to_tell(tmp_path: Path, kernel: str, verdict: Verdict, detail: str) -> None:
    outcome = carry_out(tmp_path, "deadly.py", (kernel,), [TINY], Settings(timeout=20.0), ("none",))
    record = outcome.records[kernel, TINY, "none"]
    assert record.verdict is verdict
    assert re.match(detail, record.detail)
    assert (outcome.left, outcome.leaked) == ([], 0)


@pytest.mark.parametrize("s_q", [LATE_ZERO, LATE_LSE])
def test_wrong_only_in_the_timed_loop(timed: Outcome, s_q: int) -> None:
    assert timed.verdicts("late", rows(s_q)) == [Verdict.FLAKY] * 3
    for record in timed.arms("late", rows(s_q)):
        assert [check.name for check in record.checks if check.verdict is not Verdict.PASSED] == ["timed-output"]


def test_a_death_in_the_timed_loop(timed: Outcome) -> None:
    """The arms are interleaved there, so it is told of all of them. What was known before is kept."""
    for record in timed.arms("late", rows(LATE_EXIT)):
        assert record.verdict is Verdict.CRASHED
        assert record.detail.startswith("exit code 9 in phase timing")
        assert "reference" in {check.name for check in record.checks}


@pytest.mark.parametrize("s_q", [LATE_ERROR, LATE_ODD_ERROR])
def test_an_exception_in_the_timed_loop_is_no_pass(timed: Outcome, s_q: int) -> None:
    assert timed.verdicts("late", rows(s_q)) == [Verdict.FAILED] * 3


def test_an_arm_that_dies_leaves_no_other_untimed_without_a_word(tmp_path: Path) -> None:
    outcome = carry_out(tmp_path, "deadly.py", ("deadly",), [ALLPAD], Settings(contract="wall", samples=2))
    assert outcome.verdicts("deadly", ALLPAD) == [Verdict.PASSED, Verdict.PASSED, Verdict.CRASHED]
    for record in outcome.arms("deadly", ALLPAD)[:2]:
        assert record.time or "not timed" in record.note


def test_what_is_right_is_timed(timed: Outcome) -> None:
    assert timed.verdicts("late", TINY) == [Verdict.PASSED] * 3
    for record in timed.arms("late", TINY):
        assert record.time is not None
        assert len(record.time.us) == 12


def test_a_reused_output_buffer_hides_no_flakiness(tmp_path: Path) -> None:
    outcome = carry_out(tmp_path, "late.py", ("reuses_its_buffer",), [TINY], Settings(), ("none",))
    checks = {check.name: check.verdict for check in outcome.records["reuses_its_buffer", TINY, "none"].checks}
    assert checks["run-to-run"] is Verdict.FLAKY


def test_a_right_kernel_with_one_buffer_is_not_accused(tmp_path: Path) -> None:
    case = "sparse_prefill:dtype=fp8,s_q=3,s_kv=400,h_q=1,d_qk=512,topk=384,rows=short"
    outcome = carry_out(tmp_path, "late.py", ("keeps_its_buffer",), [case], Settings(contract="wall", samples=3))
    assert outcome.verdicts("keeps_its_buffer", case) == [Verdict.PASSED] * 3
    skipping = {check.name: check for check in outcome.arms("keeps_its_buffer", case)[2].checks}["none-vs-metadata"]
    assert skipping.bad > 0


def test_packages_that_are_not_as_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threearm_test_dying.py").write_text("import os\nos._exit(4)\n")
    (tmp_path / "threearm_test_raising.py").write_text("raise ImportError('libcudart.so.99: no such file')\n")
    (tmp_path / "threearm_test_old.py").write_text("def fwd(q, kv, indices): ...\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = carry_out(tmp_path, "foreign.py", ("dying", "raising", "old"), [TINY], Settings(timeout=20.0))
    assert "exit code 4 in phase import" in outcome.records["dying", TINY, "none"].detail
    assert outcome.verdicts("raising") == [Verdict.SKIPPED] * 3
    assert "ImportError: libcudart.so.99" in outcome.records["raising", TINY, "metadata"].detail
    assert outcome.verdicts("old") == [Verdict.PASSED, Verdict.SKIPPED, Verdict.SKIPPED]
    assert "takes no topk_length" in outcome.records["old", TINY, "backscan"].detail


@pytest.mark.parametrize(("file", "told"), [
    ("no_import.py", "ModuleNotFoundError: No module named 'threearm_no_such_module'"),
    ("registers_nothing.py", "registers no kernel"),
    ("taken_name.py", "kernel 'torch_blocks' is registered by .*torch_blocks.py already"),
])
def test_a_file_that_cannot_be_loaded(mark: str, file: str, told: str) -> None:
    with pytest.raises(Unloadable, match=told) as caught:
        describe(options(file), [])
    assert str(caught.value).startswith(f"--load {FAULTY / file}: ")
    assert "\n" not in str(caught.value)
    assert left_behind(mark, 0.5) == []


def test_a_file_that_never_imports(mark: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="no answer for 4 s in phase start") as caught:
        WorkerProcess(options("hangs_at_import.py"), tmp_path / "log", start_limit=4.0)
    assert caught.value.verdict is Verdict.TIMEOUT
    assert left_behind(mark, 0.5) == []
