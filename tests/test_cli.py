"""The command line: exit codes, one-line messages, what a run prints, and that its repeat line repeats."""
from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from processes import FAULTY, ROOT, TINY, TINY_TOPK, Done, environment, invoke, new_mark, threearm
from rich.console import Console

from arms.kernel import KERNELS, load_package
from cases import load_suite, parse_case
from cases.suites import override
from harness import cli, options
from harness.client import WorkerOptions
from harness.runner import describe

WRONG = str(override(parse_case(TINY), "s_q=3"))
VACUOUS = str(override(parse_case(TINY), "sm_scale=10000.0"))  # scores whose rounding alone moves every key
LIVE = str(override(parse_case(TINY), "tail=live"))


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """What a worker says of the kernels here."""
    return describe(WorkerOptions("cpu", True, (), 1 << 33), [TINY])


@pytest.fixture
def asked(described: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands need no worker to learn of the kernels."""
    monkeypatch.setattr(options, "describe", lambda options, cases: described)


# --- what cannot be done is said in one line, exit 2 -------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "told"), [
    (["--suite", "smok"], "unknown suite 'smok': did you mean 'smoke'?"),
    (["--suite", ""], "unknown suite ''"),
    (["--suite", "x" * 5000], "suite 'xxx"),
    ([""], "'' is not a case"),
    (["☃"], "'☃' is not a case: it must start with 'sparse_prefill:'"),
    (["sparse_prefill:s_q"], "'s_q' is not key=value"),
    (["sparse_prefill:sq=3"], "unknown key 'sq' in sparse_prefill: did you mean 's_q'?"),
    (["sparse_prefill:s_q=0"], "s_q=0: allowed is an integer from 1 to"),
    (["sparse_prefill:s_q=1e3"], "s_q=1e3: allowed is an integer"),
    (["sparse_prefill:s_q=" + "9" * 5000], "s_q=999"),
    (["sparse_prefill:holes=nan"], "holes=nan: allowed is a number from 0 to 1"),
    (["sparse_prefill:s_q=1,s_q=2"], "s_q is given twice"),
    (["--set", "sq=3"], "unknown key 'sq'"),
    (["--set", "topk"], "'topk' is not key=value"),
    (["--set", "rows=ragd"], "rows=ragd: allowed is full | half"),
    (["--time", "span"], "--time span: allowed on cpu is auto | none | wall"),
    (["--time", "fast"], "--time fast: allowed on cpu is"),
    (["--arm", "torch_block"], "unknown kernel 'torch_block': did you mean 'torch_blocks'?"),
    (["--arm", ""], "unknown kernel ''"),
    (["--arm", "torch_blocks/metdata"], "unknown arm 'metdata' in --arm torch_blocks/metdata: torch_blocks has none, backscan, metadata"),
    (["--arm", "torch_blocks/"], "unknown arm ''"),
    (["--arm", "torch_dense/litetopk"], "unknown arm 'litetopk' in --arm torch_dense/litetopk: torch_dense has dense"),
    ([TINY, "--arm", "torch_blocks", "--arm", "torch_dense"],
     "--arm torch_dense: it is a kernel of indexer_topk, the cases are of sparse_prefill"),
    ([TINY_TOPK, "--arm", "torch_blocks/none"], "--arm torch_blocks/none: it is a kernel of sparse_prefill, the cases are of indexer_topk"),
    ([TINY, TINY_TOPK, "--set", "sq=3"], "unknown key 'sq' in sparse_prefill and indexer_topk: did you mean 's_q'?"),
    ([TINY_TOPK, "--set", "s_q=3"], "unknown key 's_q' in indexer_topk: "),
    (["indexer_topkk:topk=3"], "unknown family 'indexer_topkk': did you mean 'indexer_topk'? families are sparse_prefill, indexer_topk"),
    (["--load", "no_such_file.py"], "--load no_such_file.py: no such file"),
    (["--load", "."], "--load .: no such file"),
    *((["--device", device], f"--device {device}: allowed is cpu, cuda, cuda:1 or auto")
      for device in ("gpu", "meta", "", "CPU", "cuda:", "cuda:-1", "nonsense")),
    (["--resume", "no_such_run"], "no_such_run is not a run folder"),
    (["--resume", __file__], "is not a run folder"),
    (["--runs", __file__, TINY], f"cannot write the run folder {__file__}/"),
])
@pytest.mark.usefixtures("asked")
def test_a_mistake_is_one_line(arguments: list[str], told: str) -> None:
    done = invoke("run", *([] if {"--resume", "--device"} & set(arguments) else ["--device", "cpu"]), *arguments)
    assert done.code == 2, done.text
    assert told in done.text
    assert len(done.lines) == 1 or done.lines[0].startswith("Usage:")


@pytest.mark.parametrize("arguments", [
    ["run", "--no-such-option"], ["run", "--samples", "many"], ["run", "--samples", "1.5"], ["run", "--samples", "0"],
    ["run", "--samples", "-1"], ["run", "--timeout", "-1"], ["run", "--timeout", "nan"], ["run", "--memory", "-1"],
    ["run", "--memory", "nan"], ["no_such_command"], ["replay", TINY], ["replay"], ["report"], ["run", "--suite"], [],
])
def test_usage_errors(arguments: list[str]) -> None:
    assert invoke(*arguments).code == 2


def test_endless_memory_is_no_traceback() -> None:
    """It may be refused, or taken for what it says."""
    with contextlib.suppress(typer.Exit):
        assert cli.worker_options("cpu", None, False, None, math.inf).memory > 1 << 30


def suite(path: Path, content: bytes) -> str:
    (path / "a suite.txt").write_bytes(content)
    return str(path / "a suite.txt")


@pytest.mark.parametrize("content", [
    b"# cases\r\n\r\nsparse_prefill:s_q=3 # three\r\nsparse_prefill:s_q=4\r\n",
    b"\xef\xbb\xbf# cases\nsparse_prefill:s_q=3\nsparse_prefill:s_q=4",
    b"sparse_prefill:s_q=3\nsparse_prefill: s_q = 4 \nsparse_prefill:s_q=3",
], ids=["CRLF", "BOM", "twice"])
@pytest.mark.usefixtures("asked")
def test_suites_that_can_be_read(tmp_path: Path, content: bytes) -> None:
    assert cli.read_cases(None, suite(tmp_path, content), "") == ["sparse_prefill:s_q=3", "sparse_prefill:s_q=4"]


@pytest.mark.parametrize(("content", "told"), [
    (b"", "holds no case"),
    (b"# nothing\n", "holds no case"),
    (b"\n# a comment\nsparse_prefill:s_q=x\n", "a suite.txt line 3: s_q=x: allowed is an integer"),
    (b"\xff\xfe\x00", "a suite.txt"),
], ids=["empty", "comment", "bad line", "no text"])
@pytest.mark.usefixtures("asked")
def test_suites_that_cannot_be_read(tmp_path: Path, content: bytes, told: str) -> None:
    done = invoke("run", "--device", "cpu", "--suite", suite(tmp_path, content))
    assert done.code == 2
    assert told in done.text
    assert len(done.lines) == 1


@pytest.mark.parametrize(("arguments", "code", "told"), [
    pytest.param(["--device", "cuda"], 5, "--device cuda: ", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    (["--device", "cpu", "--load", str(FAULTY / "no_import.py")], 2, "ModuleNotFoundError: No module named 'threearm_no_such_module'"),
])
def test_what_a_worker_cannot_do_is_one_line(arguments: list[str], code: int, told: str) -> None:
    """5 where the machine is at fault, 2 where what was given is."""
    done = threearm("list", TINY, *arguments)
    assert done.code == code, done.text
    assert told in done.text
    assert len(done.lines) == 1


def test_what_a_kernel_says_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    options.say("ValueError: \x1b[2Jgone\x00, and a line\n of text")
    assert capsys.readouterr().out == "ValueError: \\x1b[2Jgone\\x00, and a line\n of text\n"


def test_the_version_is_told() -> None:
    assert invoke("--version").text.startswith("threearm ")


def test_help_lists_commands_in_the_order_in_which_they_are_needed() -> None:
    listed = re.findall(r"^│ ([a-z]+) +[A-Z]", invoke("--help").text, re.MULTILINE)
    assert listed == ["run", "arms", "list", "replay", "report", "history", "mutants", "fuzz", "limits", "gate", "calibrate", "evidence",
                      "doctor", "merge"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("arguments", [["list", TINY, "--device", "cpu"], ["arms", "--device", "cpu"], ["--help"], ["list", "☃"]], ids=str)
def test_when_the_reader_goes_away_the_exit_code_is_141(arguments: list[str], stream: str) -> None:
    """Whoever notices: print, rich or typer, or the last flush. What is written to the other stream is not in the way."""
    reader, writer = os.pipe()
    os.close(reader)
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    command = [sys.executable, "threearm.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(new_mark()), timeout=60, check=False, **both)
    os.close(writer)
    wrong = "☃" in arguments  # that is told on stderr
    assert done.returncode == (141 if (stream == "stderr") == wrong else 2 if wrong else 0)
    assert wrong or not done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "threearm.py", "list", TINY, "--device", "cpu"], cwd=ROOT, env=environment(new_mark()),
                              stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (5, ["threearm: [Errno 28] No space left on device"])


# --- arms, list -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("asked")
def test_arms_lists_every_kernel_and_why_not() -> None:
    for package in ("arms.sparse_prefill", "arms.indexer_topk", "arms.broken"):
        load_package(package)
    done = invoke("arms", "--broken", "--device", "cpu")
    assert done.code == 0
    words = done.text.split()
    assert [name for name in KERNELS if name not in words] == []
    flat = " ".join(done.text.replace("│", " ").split())
    assert "no: needs a cuda" in flat
    order = [done.text.index(word) for word in ("sparse_prefill", "torch_blocks", "indexer_topk", "torch_dense")]
    assert order == sorted(order)


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.usefixtures("asked")
def test_arms_on_a_narrow_terminal_cuts_nothing_off(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(cli, "console", Console(width=width))
    done = invoke("arms", "--device", "cpu")
    assert "…" not in done.text and max(map(len, done.lines)) <= width
    assert {"litetopk_sglang_sm90", "torch_blocks"} <= set(done.text.split())


@pytest.mark.parametrize("canonical", [False, True])
def test_list_parses_back(described: dict[str, Any], monkeypatch: pytest.MonkeyPatch, canonical: bool) -> None:
    cases = load_suite("edge")
    kernels = [{**kernel, "refused": {str(case): {} for case in cases}} for kernel in described["kernels"]]
    monkeypatch.setattr(options, "describe", lambda options, cases: {**described, "kernels": kernels})
    done = invoke("list", "--suite", "edge", "--device", "cpu", *(["--canonical"] if canonical else []))
    assert done.code == 0
    printed = [line for line in done.lines if not line.startswith(" ")]
    assert [parse_case(line) for line in printed] == list(dict.fromkeys(cases))
    assert all(("seed=" in line) == canonical for line in printed if "seed" not in str(parse_case(line)))


@pytest.mark.usefixtures("asked")
def test_list_names_arms_and_why_not() -> None:
    done = invoke("list", TINY, "--device", "cpu", "--arm", "torch_blocks/none", "--arm", "torch_blocks/none", "--arm", "flash_mla/none")
    assert done.lines == [TINY, "  torch_blocks/none", "  flash_mla/none  SKIPPED: needs a cuda device, this is cpu"]


def test_naming_a_broken_kernel_registers_it() -> None:
    assert cli.worker_options("cpu", None, False, ["broken_negated/none"], 0.0).broken
    assert not cli.worker_options("cpu", None, False, ["torch_blocks"], 0.0).broken


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Wrong:
    """A run with an arm that is wrong, loaded from a path with spaces; and its folder."""

    done: Done
    folder: Path

    @property
    def repeat(self) -> str:
        """The first repeat line."""
        return next(line for line in self.done.lines if "repeat: " in line).partition("repeat: ")[2]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Wrong:
    path = tmp_path_factory.mktemp("a ☃ folder")
    shutil.copy(FAULTY / "wrong_head.py", path / "wrong head.py")
    runs = path / "the runs"
    done = threearm("run", WRONG, "--load", str(path / "wrong head.py"), "--arm", "wrong_head", "--device", "cpu", "--time", "none",
                    "--runs", str(runs))
    return Wrong(done, next(runs.iterdir()))


def test_a_wrong_arm_is_told_in_full(wrong: Wrong) -> None:
    assert wrong.done.code == 1
    text = wrong.done.text
    assert f"FAILED  wrong_head/none  {WRONG}" in text
    assert "FAILED   reference  over budget: out in " in text
    assert "margins: out " in text
    assert "where: heads 1 (1 of 2)" in text
    assert "where: rows all 3" in text
    first = next(line.split() for line in wrong.done.lines if line.strip().startswith("[0, 1, 0]"))
    assert [first[3], first[5], first[7]] == ["want", "got", "budget"]
    assert float(first[6]) == 0.0
    assert "3 FAILED" in text
    assert f"records: {wrong.folder}" in text


def test_the_repeat_line_repeats(wrong: Wrong) -> None:
    words = shlex.split(wrong.repeat)
    assert words[:2] == ["threearm", "replay"]
    again = threearm(*words[1:])
    assert again.code == 1
    first = [line for line in wrong.done.lines if line.strip().startswith("[0, 1, ")][:5]
    assert first
    told = [line for line in again.lines if line.strip().startswith("[0, 1, ")]
    assert told and told == first[: len(told)]
    assert wrong.repeat in again.text


def test_report_tells_the_same(wrong: Wrong) -> None:
    shown = threearm("report", str(wrong.folder))
    assert shown.code == 1
    assert shown.text.strip() == wrong.done.text.strip()


def test_report_failures(wrong: Wrong) -> None:
    shown = invoke("report", "--failures", str(wrong.folder))
    assert shown.code == 1
    assert shown.text.count("repeat: ") == 3
    assert wrong.repeat in shown.text


def test_report_markdown(wrong: Wrong) -> None:
    shown = invoke("report", "--markdown", str(wrong.folder))
    assert shown.code == 1
    assert any(line.startswith("|") and line.count("FAILED") == 3 for line in shown.lines)


def test_vacuous_and_skipped_arms(tmp_path: Path) -> None:
    """Of the live case, metadata alone is run; the other two are listed with the reason."""
    done = threearm("run", VACUOUS, LIVE, "--arm", "torch_blocks", "--device", "cpu", "--samples", "2", "--runs", str(tmp_path))
    assert done.code == 4
    assert "VACUOUS  reference  an all-zero out would pass" in done.text
    assert any(line.startswith("SKIPPED torch_blocks/none") and "tail=live: only an arm that is given the length" in line
               for line in done.lines)
    assert "1 PASSED, 2 SKIPPED, 3 VACUOUS" in done.lines


def test_nothing_ran(tmp_path: Path) -> None:
    done = threearm("run", TINY, "--arm", "flash_mla", "--device", "cpu", "--runs", str(tmp_path))
    assert done.code == 5
    assert any(line.startswith("SKIPPED flash_mla/none") and "needs a cuda device, this is cpu" in line for line in done.lines)


# --- other packages of the same names ---------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with somebody else's package `cases`."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "__init__.py").write_text("raise RuntimeError('somebody else')\n")
    return tmp_path


def test_a_package_that_shadows_is_named(foreign: Path) -> None:
    done = threearm("list", TINY, prefix=("-m", "threearm"), cwd=foreign, PYTHONPATH=f"{foreign}:{ROOT}")
    assert done.code == 5
    assert len(done.lines) == 1
    assert "'cases'" in done.text
    assert str(foreign / "cases") in done.text


def test_a_folder_with_such_a_package_can_be_worked_in(foreign: Path) -> None:
    """The command comes from its own folder, and so must its workers, wherever it is called."""
    done = threearm("list", TINY, "--device", "cpu", prefix=(str(ROOT / "threearm.py"),), cwd=foreign)
    assert done.code == 0, done.text
