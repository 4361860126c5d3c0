"""What tables, pages and failures say, from records made by hand."""
from __future__ import annotations

import dataclasses
import io
import shlex

import pytest
from rich.console import Console

from harness.record import Lengths, Record, Timing
from harness.runfolder import RunInfo
from harness.verdicts import Check, Verdict
from reports import evidence, failure, table
from reports.cells import labels, markdown_table
from reports.frame import frame, margin, reason

ONE = "sparse_prefill:s_q=32,topk=512,rows=full"
TWO = "sparse_prefill:s_q=32,topk=512,rows=half"
FACTS = {"gpu": "NVIDIA H200", "driver": "590.1", "torch": "2.11.0"}


def passed(arm: str, case: str = ONE, us: tuple[float, ...] = (), derive: tuple[float, ...] = (), share: float = 0.5,
           contract: str = "wall") -> Record:
    """A record that passed, timed if there are times."""
    time = Timing(contract, "warm", "interleaved, ABBA", list(us), list(derive)) if us else None
    check = Check("reference", Verdict.PASSED, margins={"out": share, "lse": 0.125}, total=64)
    return Record(case, arm, Verdict.PASSED, checks=[check], time=time)


def failed(arm: str = "k/metadata", case: str = TWO) -> Record:
    """A record with one check that failed and one that passed."""
    wrong = Check("reference", Verdict.FAILED, "out: error is 2.5 times its budget", margins={"out": 2.5, "lse": 0.25}, bad=1024,
                  total=4096, first=["[0, 1, 2]  want 1  got 2  budget 0.4"], where=["rows 16..31 (16 of 32)", "heads all 64"],
                  ulp={"1": 1000, "not finite": 24})
    return Record(case, arm, Verdict.FAILED, checks=[Check("written", Verdict.PASSED, "every element"), wrong])


def skipped(arm: str, case: str = ONE, why: str = "takes bf16, the case is fp8") -> Record:
    return Record(case, arm, Verdict.SKIPPED, why)


def rendered(records: list[Record], width: int = 160) -> str:
    """The terminal's table as text."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table.terminal(records))
    return console.file.getvalue()  # type: ignore[attr-defined]


def cells(text: str, start: str) -> list[str]:
    """The cells of the first table row whose first cell begins so."""
    line = next(line for line in text.splitlines() if line.strip("│| ").startswith(start))
    return [part.strip() for part in line.strip("│|").replace("│", "|").split("|")]


# --- labels -----------------------------------------------------------------------------------------------------------


def test_labels_take_out_what_every_case_shares() -> None:
    assert labels([ONE, TWO]) == ("s_q=32,topk=512", {ONE: "rows=full", TWO: "rows=half"})


def test_one_case_keeps_its_own() -> None:
    assert labels([ONE]) == ("", {ONE: "s_q=32,topk=512,rows=full"})


def test_a_case_of_what_is_shared_alone_is_the_default_one() -> None:
    plain = "sparse_prefill:s_q=32,topk=512"
    assert labels([ONE, plain])[1] == {ONE: "rows=full", plain: "rows=full"}
    assert labels(["sparse_prefill:"])[1] == {"sparse_prefill:": "(defaults)"}


def test_a_value_that_differs_is_not_shared() -> None:
    common, own = labels(["sparse_prefill:s_q=3,topk=32", "sparse_prefill:s_q=32,topk=32"])
    assert common == "topk=32"
    assert list(own.values()) == ["s_q=3", "s_q=32"]


def test_no_cases_have_no_labels() -> None:
    assert labels([]) == ("", {})


# --- tables -----------------------------------------------------------------------------------------------------------


def timed() -> list[Record]:
    return [passed("k/none", us=(4000.0, 4100.0, 4200.0)), passed("k/backscan", us=(2000.0, 2100.0, 2300.0), derive=(10.0, 12.0)),
            passed("k/metadata", us=(1000.0, 2050.0, 3000.0), share=0.75)]


@pytest.mark.parametrize("text", [rendered(timed()), table.markdown(timed()).replace("<br>", " ")], ids=["terminal", "markdown"])
def test_times_ratio_and_margin(text: str) -> None:
    """Medians and quartiles in milliseconds, none over metadata, the largest margin of the row."""
    assert "4.1 [4.05 4.15]" in text
    assert "2.1 [2.05 2.2]" in text
    assert "+0.011 derive" in text
    assert cells(text, "s_q=32")[-2:] == ["2.00x", "0.75"]
    assert "contract wall" in text
    assert "of 3 samples, interleaved, ABBA, warm" in text


def test_arms_that_are_missing_or_not_timed_leave_their_cells_empty() -> None:
    text = rendered([passed("k/none", us=(1000.0,)), passed("k/metadata"), failed(), skipped("other/none", TWO)])
    assert cells(text, "rows=full") == ["rows=full", "PASSED", "", "PASSED", "", "0.5"]
    assert cells(text, "rows=half") == ["rows=half", "", "", "FAILED", "", "2.5"]
    assert cells(text[text.index("other") :], "rows=half") == ["rows=half", "SKIPPED", "", "", "", ""]


def test_each_kernel_has_a_table_and_the_legend_comes_once() -> None:
    records = [passed("first/none", us=(1.0,)), passed("second/none", us=(1.0,)), passed("second/none", TWO)]
    for text in (rendered(records), table.markdown(records)):
        assert text.count("none / metadata") == 2
        assert text.count("margin: largest error") == 1
        assert text.count("every case: s_q=32,topk=512") == 1
        assert text.index("first") < text.index("second")


def test_every_contract_and_sample_count_is_told() -> None:
    records = [passed("k/none", us=(1.0, 2.0)), passed("k/none", TWO, us=(1.0,)), passed("j/none", us=(1.0,), contract="kernel")]
    text = table.legend(records)
    assert "contract wall: host clock around derivation and call; median [quartiles] of 1 to 2 samples" in text
    assert "contract kernel: sum of the CUDA kernels" in text


def test_nothing_makes_an_empty_table() -> None:
    assert "margin" in rendered([])
    assert "nothing ran" in failure.summary([])
    assert frame([]).empty


def test_a_narrow_terminal_loses_no_case() -> None:
    text = rendered([passed("k/none", case="sparse_prefill:s_q=32,topk=512,rows=causal,requests=100/300+17+33")], width=60)
    first = "".join(line.strip("│").split("│")[0].strip() for line in text.splitlines() if line.startswith("│"))
    assert first.replace(" ", "") == "s_q=32,topk=512,rows=causal,requests=100/300+17+33"


def test_markup_in_a_kernel_s_name_is_text() -> None:
    assert "odd[/red]" in rendered([passed("odd[/red]/none")])


def test_markdown_cells_hold_no_line_break_and_no_bar() -> None:
    lines = markdown_table(["a", "b"], [["x\ny", "1|2"]]).splitlines()
    assert lines == ["| a | b |", "|---|---|", "| x<br>y | 1\\|2 |"]


# --- what is read from a record ---------------------------------------------------------------------------------------


def test_margin_is_the_largest_of_the_reference_check() -> None:
    assert margin(failed()) == 2.5
    assert margin(skipped("k/none")) is None


def test_reason_is_the_record_s_own_or_its_checks() -> None:
    assert reason(skipped("k/none")) == "takes bf16, the case is fp8"
    assert reason(failed()) == "reference: out: error is 2.5 times its budget"
    assert reason(passed("k/none")) == ""


def test_frame_has_a_row_a_record() -> None:
    records = [dataclasses.replace(passed("k/none", us=(1.0, 3.0)), lengths=Lengths(1.0, 0, 2, 0.25, "")), failed()]
    data = frame(records)
    assert list(data["source"]) == ["none", "metadata"]
    assert list(data["pairs"]) == [0.25, 1.0]
    assert data["median"][0] == 2.0
    assert data["median"].isna()[1]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_is_told_in_full() -> None:
    lines = failure.describe(failed(), ["--device", "cuda", "--load", "my kernel.py"]).splitlines()
    assert lines[0] == f"FAILED  k/metadata  {TWO}"
    told = [line.strip() for line in lines]
    assert "PASSED   written" in told
    assert "FAILED   reference  out: error is 2.5 times its budget  1,024 of 4,096 (25.000%)" in told
    assert "margins: out 2.5  lse 0.25" in told
    assert "where: rows 16..31 (16 of 32)" in told
    assert "where: heads all 64" in told
    assert "[0, 1, 2]  want 1  got 2  budget 0.4" in told
    assert "ULP apart: 1: 1,000, not finite: 24" in told
    assert shlex.split(told[-1].partition("repeat: ")[2]) == [
        "threearm", "replay", TWO, "--arm", "k/metadata", "--device", "cuda", "--load", "my kernel.py"]


def test_an_arm_that_is_wrong_as_another_one_is_told_in_one_line() -> None:
    """What passed is not compared: it differs by construction. Nor are the names of arms."""
    def wrong(source: str, first: str, *more: Check) -> Record:
        record = failed(f"k/{source}")
        found = dataclasses.replace(record.checks[1], first=[f"[0]  k/{source} {first}"])
        return dataclasses.replace(record, checks=[found, *more, Check("sentinels", Verdict.PASSED, margins={"lse": len(source) / 10})])

    guard = Check("lengths", Verdict.PASSED, "as derived")
    texts = failure.describe_all([wrong("none", "2"), wrong("backscan", "2", guard), wrong("metadata", "3", guard)], lambda record: [])
    assert [text.splitlines()[1] for text in texts] == [f"  {failure.describe_check(failed().checks[1])[0].strip()}", "  as k/none above",
                                                        f"  {failure.describe_check(failed().checks[1])[0].strip()}"]
    assert "repeat: threearm replay" in texts[1] and "k/backscan" in texts[1]
    versus = [Check(f"none-vs-{source}", Verdict.FAILED, f"k/{source} differs") for source in ("backscan", "metadata")]
    texts = failure.describe_all([wrong("backscan", "2", versus[0]), wrong("metadata", "2", versus[1])], lambda record: [])
    assert "as k/backscan above" in texts[1]
    texts = failure.describe_all([wrong("none", "2"), wrong("backscan", "2", versus[0])], lambda record: [])
    assert "above" not in texts[1]  # one finding more
    texts = failure.describe_all([wrong("backscan", "2", versus[0]), wrong("metadata", "2")], lambda record: [])
    assert "above" not in texts[1]  # one less
    once = Check("full-width", Verdict.FAILED, "differs")  # only the first arm with a length has it
    texts = failure.describe_all([wrong("backscan", "2", versus[0], once), wrong("metadata", "2", versus[1])], lambda record: [])
    assert "as k/backscan above" in texts[1]


def test_what_is_the_same_on_another_case_or_of_another_kernel_is_told_in_full() -> None:
    records = [failed("k/none"), failed("k/none", ONE), failed("j/none")]
    assert all("above" not in text for text in failure.describe_all(records, lambda record: []))


def test_variables_stand_before_the_command() -> None:
    line = failure.replay_line(failed(), ["TRITON_INTERPRET=1", "--device", "cuda"])
    assert line == f"TRITON_INTERPRET=1 threearm replay {TWO} --arm k/metadata --device cuda"
    assert failure.replay_line(failed(), ["A=1"]) == f"A=1 threearm replay {TWO} --arm k/metadata"


@pytest.mark.parametrize(("verdict", "detail", "is_one"), [
    (Verdict.FAILED, "TypeError in phase prepare: k must return a callable", True),
    (Verdict.CRASHED, "AcceleratorError in phase launch: illegal address", True),
    (Verdict.CRASHED, "exit code 7 in phase launch", False),
    (Verdict.CRASHED, "signal SIGSEGV in phase launch", False),
    (Verdict.OOM, "OutOfMemoryError in phase launch: none left", False),  # a worker prints no traceback of it
    (Verdict.SKIPPED, "takes bf16, the case is fp8", False),
])
def test_an_exception_is_told_from_other_ends(verdict: Verdict, detail: str, is_one: bool) -> None:
    assert failure.raised(Record(ONE, "k/none", verdict, detail)) is is_one
    assert not failure.raised(failed())


def test_a_death_is_told_with_its_detail() -> None:
    text = failure.describe(Record(ONE, "k/none", Verdict.CRASHED, "signal SIGSEGV in phase launch"), [])
    assert text.splitlines()[1].strip() == "signal SIGSEGV in phase launch"


def test_replay_tells_what_passed_as_well() -> None:
    record = dataclasses.replace(failed(), extra={"unquantised relative error": 0.0125})
    assert "every element" not in failure.describe(record, [])
    text = failure.describe(record, [], always=True)
    assert "every element" in text
    assert "unquantised relative error: 0.0125 (reported, not judged)" in text


def test_summary_counts_and_lists_reasons_once() -> None:
    records = [passed("k/none"), passed("k/none", TWO), failed(), skipped("k/backscan"), skipped("k/backscan", TWO)]
    lines = failure.summary(records).splitlines()
    assert lines[0] == "2 PASSED, 2 SKIPPED, 1 FAILED"
    assert lines[1] == "checks that did not pass: reference 1"
    assert lines[2:] == ["SKIPPED k/backscan: takes bf16, the case is fp8 (2 cases)"]


def test_the_guard_s_note_is_shown() -> None:
    """An arm called metadata that was given no length passed as none does; nobody may take its time for metadata's."""
    note = "the metadata has another row count than the batch: the guard fell back to none"
    record = dataclasses.replace(passed("k/metadata"), note=note)
    assert f"note: k/metadata on {ONE}: {note}" in failure.summary([record])
    assert note in failure.describe(record, [])


def test_a_page_holds_table_checks_skips_and_machine() -> None:
    info = RunInfo("2026-01-01", ["/usr/bin/threearm", "run", "a b"], [ONE, TWO], [], FACTS, {})
    page = evidence.page(info, [*timed(), failed(), skipped("k/none", TWO)])
    assert "2.00x" in page
    assert "| k | reference | 3 of 4 | out 2.5, lse 0.25 |" in page
    assert "takes bf16, the case is fp8" in page
    assert "threearm run 'a b'" in page
    assert "NVIDIA H200" in page
    assert "finished not" in page
