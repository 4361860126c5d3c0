"""What an evidence page calls its cases: what a table says of every case, and a row's own keys, together are a case that ran; one name a
case on a whole page. And no table has a column without content. On the real evidence of docs/evidence/commands."""
from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cases import format_case, parse_case
from harness.comparison import Pairing
from harness.evidence_folder import EvidenceFolder
from harness.evidence_plans import PLANS
from reports import evidence_page, evidence_terminal
from reports.evidence import without_seed
from reports.evidence_compare import side_by_side
from reports.evidence_naming import naming, naming_of
from tests.processes import ROOT, invoke

COMMANDS = ROOT / "docs" / "evidence" / "commands"
NAMES = list(PLANS)
Table = list[list[str]]


def stored(name: str) -> EvidenceFolder:
    return EvidenceFolder.load(COMMANDS / name)


def tables(page: str) -> list[tuple[Table, str]]:
    """Every table, its head first, and what stands under it up to the next table."""
    found: list[tuple[Table, str]] = []
    for line in page.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if not found or found[-1][1]:
                found.append(([], ""))
            if not line.startswith("|---"):
                found[-1][0].append(cells)
        elif found:
            found[-1] = found[-1][0], f"{found[-1][1]}{line}\n"
    return found


SEEDS = ",seed=*"


def named(page: str) -> list[tuple[str, str]]:
    """(name, the case that it and its table's line say) of every row of every table with cases; of rows that stand for several seeds, the
    case without one and SEEDS."""
    found = []
    for rows, under in tables(page):
        if "case" not in rows[0]:
            continue
        place = rows[0].index("case")
        common = re.search(r"every case: `([^`]*)`", under)
        for row in rows[1:]:
            if "INVALID" in row:
                continue
            text = row[place] if ":" in row[place] else f"{common[1]},{row[place]}".replace(":,", ":") if common else ""
            assert text, f"no line says what every case of this table has: {rows[0]}"
            found.append((row[place], format_case(parse_case(text)) + (SEEDS if "row, and seed " in under else "")))
    return found


def check(page: str, folder: EvidenceFolder) -> None:
    """Every name is of a case that ran, every case has one name apart from its full text."""
    ran = {record.case for record in evidence_page.records_of(folder)}
    ran |= {without_seed(case) + SEEDS for case in ran if without_seed(case) != case}
    short: dict[str, set[str]] = {}
    for name, case in named(page):
        assert case in ran, f"{name} says {case}, which was not run"
        if ":" not in name:
            short.setdefault(case, set()).add(name)
    assert short and all(len(each) == 1 for each in short.values()), short


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_calls_its_cases_gives_back_the_cases(name: str) -> None:
    folder = stored(name)
    page = evidence_page.page(folder)
    check(page, folder)
    timed = {record.case for record in evidence_page.records_of(folder) if record.time}
    assert timed <= {case for _, case in named(page)}, "each timed case is named in some table"


def test_a_name_that_leaves_out_a_key_is_found() -> None:
    folder = stored("bf16-topk-length")
    page = evidence_page.page(folder)
    with pytest.raises(AssertionError, match="which was not run"):
        check(page.replace("s_q=4096,s_kv=4096,", "s_q=4096,"), folder)
    with pytest.raises(AssertionError, match="no line says"):
        check(page.replace("every case: ", "each: "), folder)
    with pytest.raises(AssertionError):
        check(page.replace("| s_q=8192,s_kv=8192,rows=full |", "| s_q=8192,s_kv=8192 |", 1), folder)  # the same case by another name


def test_side_by_side_names_the_cases_of_both() -> None:
    here, there = stored("bf16-topk-length"), stored("bf16-topk-length")
    run = there.runs["span"]
    run.records[0] = msgspec.convert(msgspec.to_builtins(run.records[0]), type(run.records[0]))
    run.records[0].case = "sparse_prefill:s_q=4096,s_kv=4096,topk=512"
    cases = {case for _, case in named(side_by_side(here, there))}
    assert cases == {record.case for folder in (here, there) for record in evidence_page.records_of(folder)}


def test_a_part_that_compares_some_of_the_cases_calls_them_the_same() -> None:
    folder = stored("bf16-topk-length")
    folder.pairs = folder.pairs[:1]
    case = folder.pairs[0][0].case
    assert naming([folder], [case]).own[case] == "s_q=4096,s_kv=4096,rows=ramp"
    assert naming_of([case]).own[case] != "s_q=4096,s_kv=4096,rows=ramp", "alone it would have another name"
    check(evidence_page.page(folder), folder)


def test_parts_that_one_table_shows_together_share_their_names() -> None:
    folder = stored("litetopk")
    folder.pairs = []
    assert naming([folder], [folder.runs["scale"].records[0].case]).own.keys() == {
        record.case for run in folder.runs.values() for record in run.records}


def test_cases_that_differ_in_few_keys_name_all_of_them_and_others_only_what_is_not_default() -> None:
    few = naming_of(["sparse_prefill:s_q=64", "sparse_prefill:s_q=32,rows=ramp"])
    assert few.common == "sparse_prefill:" and list(few.own.values()) == ["s_q=64,rows=full", "s_q=32,rows=ramp"]
    many = naming_of(["sparse_prefill:s_q=8,topk=64", "sparse_prefill:s_q=8,s_kv=64,h_q=1,topk=32,rows=ramp"])
    assert many.common == "sparse_prefill:s_q=8"
    assert list(many.own.values()) == ["topk=64", "s_kv=64,h_q=1,topk=32,rows=ramp"]


@pytest.mark.parametrize("name", NAMES)
def test_no_table_has_an_empty_column(name: str) -> None:
    for rows, _ in tables(evidence_page.page(stored(name))):
        for place, head in enumerate(rows[0]):
            assert any(row[place] for row in rows[1:]), f"{head} of {rows[0]}"


@pytest.mark.parametrize("name", NAMES)
def test_the_pages_of_docs_are_those_of_their_folders(name: str) -> None:
    """After a change of the page: threearm report docs/evidence/commands/NAME --markdown > docs/evidence/commands/NAME.md"""
    assert (COMMANDS / f"{name}.md").read_text() == evidence_page.page(stored(name))


def test_litetopk_explains_a_wrong_arm_only_where_there_is_one() -> None:
    folder = stored("litetopk")
    assert "\nwrong: the arm's choice" in evidence_page.page(folder)
    for run in folder.runs.values():
        run.records = [record for record in run.records if record.verdict is record.verdict.PASSED]
    assert "wrong: the arm's choice" not in evidence_page.page(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_terminal_cuts_nothing_and_keeps_commands_whole(name: str) -> None:
    done = invoke("report", f"docs/evidence/commands/{name}")
    page = evidence_page.page(stored(name))
    assert "…" not in done.text
    commands = re.findall(r"(?m)^(threearm replay .*)  # \d+$", page)[:evidence_terminal.SHOWN_FAILURES]
    assert bool(commands) == (name != "bf16-topk-length")
    assert all(f"  repeat: {command}" in done.text.splitlines() for command in commands)
    again = [line for line in done.text.splitlines() if line.startswith("again: ")]
    assert again and all(f"again: `{line.removeprefix('again: ')}`" in page for line in again)
    told = tables("\n".join(evidence_page.blocks(stored(name), short=True)))
    words = [word for rows, _ in told for row in rows[1:] for head, cell in zip(rows[0], row) if head in evidence_terminal.NAMED
             for word in cell.split(",")]
    assert words and set(words) <= set(re.split(r"[\s,]+", done.text))
    assert f"all of it: threearm report docs/evidence/commands/{name} --markdown" in done.text


def test_a_time_that_is_none_is_named_on_the_terminal(tmp_path: Path) -> None:
    folder = stored("bf16-topk-length")
    folder.pairs = [(Pairing("sparse_prefill:s_q=4096,s_kv=4096,h_q=128,topk=2048,rows=ramp", "k/none", "k/metadata"), folder.pairs[0][1])]
    assert evidence_terminal.failures(folder) == []
    folder.pairs[0][1].verdict, folder.pairs[0][1].why = folder.pairs[0][1].verdict.INVALID, "below the speed of light"
    assert evidence_terminal.failures(folder)[1].startswith("INVALID  k/none against k/metadata on sparse_prefill:s_q=4096,")
