"""`threearm replay --sanitize`: what a tool's report means, and a run under one. The tool of most tests is a script that starts what it
is given, as compute-sanitizer does, and then writes a report that was prepared."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import FAULTY, MARK, ROOT, TINY, invoke, left_behind, new_mark

from cases import parse_case
from cases.suites import override
from harness.client import WorkerOptions
from harness.record import Record
from harness.sanitize import OWN_ALLOCATIONS, TOOLS, Report, blocks, check_of, find_program, read, watched, with_report
from harness.verdicts import Check, Verdict

HEAD = "========= COMPUTE-SANITIZER\n"
CLEAN = HEAD + "========= ERROR SUMMARY: 0 errors\n"
WILD_STORE = """========= Invalid __global__ write of size 4 bytes
=========     at sparse_fwd(float *, int)+0x170 in prefill.cu:61
=========     by thread (3,0,0) in block (7,0,0)
=========     Address 0x7f6510dffc04 is out of bounds
=========     and is 5 bytes after the nearest allocation at 0x7f6510dffa00 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: launch [0x1234] in libtorch_cuda.so
=========
"""
RACE = """========= Error: Race reported between Write access at topk(int *)+0x40 in select.cu:12
=========     and Read access at topk(int *)+0x90 in select.cu:20 [508 hazards]
=========
"""
RACE_IN_CUBLAS = """========= Error: Race reported between Read access at nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT+0x30d0
=========     and Write access at nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT+0x3eb0 [3072 hazards]
=========
"""
READ_IN_TORCH = """========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)
=========     by thread (0,0,0) in block (0,0,0)
=========
"""
FAULTY_REPORT = HEAD + WILD_STORE * 5 + "========= ERROR SUMMARY: 5 errors\n"
UNWATCHED = HEAD + "========= Error: Target application terminated before first instrumented API call\n========= ERROR SUMMARY: 0 errors\n"
LOGS = Path("the logs")


def reported(tmp_path: Path, *texts: str, tool: str = "memcheck") -> Report:
    for number, text in enumerate(texts):
        (tmp_path / f"{tool}-{number}.log").write_text(text)
    return read(tmp_path, tool)


def test_errors_are_read_with_their_place_and_without_the_host_s_frames() -> None:
    found = blocks(FAULTY_REPORT)
    assert len(found) == 5
    assert found[0] == ["Invalid __global__ write of size 4 bytes", "at sparse_fwd(float *, int)+0x170 in prefill.cu:61",
                        "by thread (3,0,0) in block (7,0,0)", "Address 0x7f6510dffc04 is out of bounds",
                        "and is 5 bytes after the nearest allocation at 0x7f6510dffa00 of size 512 bytes"]


@pytest.mark.parametrize(("texts", "tool", "device", "verdict", "told"), [
    ([CLEAN], "memcheck", "cuda", Verdict.PASSED, "compute-sanitizer memcheck: 0 errors"),
    ([CLEAN, CLEAN], "synccheck", "cuda:1", Verdict.PASSED, "compute-sanitizer synccheck: 0 errors"),
    ([CLEAN], "memcheck", "cpu", Verdict.VACUOUS, "memcheck: 0 errors, but it watches what runs on a GPU, and nothing did"),
    ([UNWATCHED], "memcheck", "cuda", Verdict.VACUOUS, "nothing did"),
    ([FAULTY_REPORT], "memcheck", "cuda", Verdict.FAILED, "compute-sanitizer memcheck: 5 errors; its log: the logs"),
    ([CLEAN, FAULTY_REPORT], "memcheck", "cuda", Verdict.FAILED, "5 errors"),
    ([HEAD + WILD_STORE], "memcheck", "cuda", Verdict.FAILED, "1 error;"),  # ended before its summary
    ([HEAD + RACE + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"], "racecheck", "cuda", Verdict.FAILED,
     "1 error;"),
    ([HEAD + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"], "racecheck", "cuda", Verdict.PASSED, "0 errors"),
    ([HEAD + RACE_IN_CUBLAS + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error)\n"], "racecheck", "cuda", Verdict.PASSED,
     "0 errors in the arm's own kernels; 1 in those of torch and cuBLAS"),
    ([HEAD + RACE_IN_CUBLAS + RACE + "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"], "racecheck", "cuda",
     Verdict.FAILED, "1 error;"),
    ([HEAD + READ_IN_TORCH + "========= ERROR SUMMARY: 1 error\n"], "initcheck", "cuda", Verdict.PASSED, "1 in those of torch"),
    ([HEAD + READ_IN_TORCH + "========= ERROR SUMMARY: 10001 errors\n"], "initcheck", "cuda", Verdict.VACUOUS,
     "printed only the first 10,000"),
    ([HEAD + READ_IN_TORCH + "========= ERROR SUMMARY: 1 error\n"], "memcheck", "cuda", Verdict.FAILED, "1 error;"),  # no false alarm
    ([HEAD], "memcheck", "cuda", Verdict.ERROR, "came to no summary"),
    ([], "memcheck", "cuda", Verdict.ERROR, "came to no summary"),
    ([HEAD + "========= Internal Sanitizer Error: no memory\n========= ERROR SUMMARY: 0 errors\n"], "memcheck", "cuda", Verdict.ERROR,
     "came to no summary"),
])
def test_what_a_report_means(tmp_path: Path, texts: list[str], tool: str, device: str, verdict: Verdict, told: str) -> None:
    check = check_of(reported(tmp_path, *texts, tool=tool), tool, device, LOGS)
    assert check.verdict is verdict
    assert told in check.detail


def test_the_first_errors_are_told_and_all_are_counted(tmp_path: Path) -> None:
    check = check_of(reported(tmp_path, FAULTY_REPORT), "memcheck", "cuda", LOGS)
    assert (check.bad, len(check.first)) == (5, 3 * 5)
    assert check.first[1] == "  at sparse_fwd(float *, int)+0x170 in prefill.cu:61"


@pytest.mark.parametrize(("record", "texts", "verdict"), [
    (Record(TINY, "k/none", Verdict.TIMEOUT, "no answer"), [HEAD], Verdict.TIMEOUT),  # ended with the worker: no fault of the tool
    (Record(TINY, "k/none", Verdict.CRASHED, "exit code 3"), [FAULTY_REPORT], Verdict.CRASHED),
    (Record(TINY, "k/none", Verdict.FAILED, "", [Check("graph-replay", Verdict.FAILED), Check("reference", Verdict.PASSED)]), [CLEAN],
     Verdict.PASSED),  # no graph can be made where every tensor is an allocation
    (Record(TINY, "k/none", Verdict.FAILED, "", [Check("reference", Verdict.FAILED)]), [CLEAN], Verdict.FAILED),
    (Record(TINY, "k/none", Verdict.PASSED, "", [Check("reference", Verdict.PASSED)]), [FAULTY_REPORT], Verdict.FAILED),
    (Record(TINY, "k/none", Verdict.SKIPPED, "needs a cuda device"), [], Verdict.SKIPPED),
])
def test_a_record_with_a_report(tmp_path: Path, record: Record, texts: list[str], verdict: Verdict) -> None:
    assert with_report(record, reported(tmp_path, *texts), "memcheck", "cuda", LOGS).verdict is verdict


@pytest.mark.parametrize("tool", TOOLS)
def test_how_the_tool_is_called(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    monkeypatch.delenv(OWN_ALLOCATIONS, raising=False)
    options = watched(WorkerOptions("cuda", False, (), 1 << 30), "/opt/compute-sanitizer", tool, LOGS)
    assert options.prefix[:5] == ("/opt/compute-sanitizer", "--tool", tool, "--log-file", f"the logs/{tool}-%p.log")
    assert options.environment == (f"{OWN_ALLOCATIONS}=1",)
    monkeypatch.setenv(OWN_ALLOCATIONS, "0")
    assert watched(WorkerOptions("cuda", False, (), 1 << 30), "/opt/compute-sanitizer", tool, LOGS).environment == ()


# --- the command ------------------------------------------------------------------------------------------------------

SCRIPT = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
given = {{}}
while words[0].startswith("--"):
    given[words[0]], words = words[1], words[2:]
code = subprocess.run(words, close_fds=False).returncode
with open(given["--log-file"].replace("%p", str(os.getpid())), "w") as log:
    log.write(open(os.path.join(os.path.dirname(__file__), "report")).read())
sys.exit(code)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer on PATH; the report that it will write is the file `report` beside it."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "compute-sanitizer"
    program.write_text(SCRIPT)
    program.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def replay(tool: str, *options: str) -> tuple[int, str]:
    done = invoke("replay", TINY, "--device", "cpu", "--sanitize", tool, *options)
    return done.code, done.text


def test_errors_fail_the_arm_and_are_told(fake: Path) -> None:
    (fake / "bin" / "report").write_text(FAULTY_REPORT)
    code, text = replay("memcheck", "--arm", "torch_blocks/none")
    assert code == 1
    assert "FAILED  torch_blocks/none" in text and "FAILED   memcheck  compute-sanitizer memcheck: 5 errors; its log: " in text
    assert "at sparse_fwd(float *, int)+0x170 in prefill.cu:61" in text and "by thread (3,0,0) in block (7,0,0)" in text
    assert "--arm torch_blocks/none --sanitize memcheck" in text  # the line that repeats it
    kept = next((fake / "tmp").glob("threearm-memcheck-*"))
    assert str(kept) in text and next(kept.glob("memcheck-*.log")).read_text() == FAULTY_REPORT


def test_a_cpu_arm_is_not_taken_for_watched(fake: Path) -> None:
    (fake / "bin" / "report").write_text(CLEAN)
    code, text = replay("memcheck", "--arm", "torch_blocks/none")
    assert code == 4 and "it watches what runs on a GPU, and nothing did" in text


def test_a_hang_under_the_tool_ends_both(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake / "bin" / "report").write_text(CLEAN)
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    hang = str(override(parse_case(TINY), "s_q=17"))
    done = invoke("replay", hang, "--device", "cpu", "--sanitize", "memcheck", "--arm", "deadly/none", "--load", str(FAULTY / "deadly.py"),
                  "--timeout", "2")
    assert done.code == 1 and "no answer for 2 s in phase launch (--timeout 2)" in done.text
    assert "it was ended before its summary" in done.text
    assert left_behind(mark, 1.0) == []


def test_without_the_tool_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    code, text = replay("racecheck", "--arm", "torch_blocks")
    assert (code, text.splitlines()) == (5, ["threearm: --sanitize racecheck: compute-sanitizer is neither on PATH nor in CUDA_HOME"])


def test_a_tool_that_there_is_not_is_one_line() -> None:
    code, text = replay("leakcheck", "--arm", "torch_blocks")
    assert (code, text.splitlines()) == (2, ["threearm: --sanitize leakcheck: allowed is memcheck | racecheck | initcheck | synccheck"])


def test_the_program_is_found_in_cuda_s_folder(monkeypatch: pytest.MonkeyPatch, fake: Path) -> None:
    monkeypatch.setenv("PATH", str(fake / "tmp"))
    monkeypatch.setenv("CUDA_HOME", str(fake))
    assert find_program() == str(fake / "bin" / "compute-sanitizer")


# --- on a GPU ---------------------------------------------------------------------------------------------------------

needs_the_tool = pytest.mark.skipif(find_program() is None, reason="no compute-sanitizer")


@pytest.mark.cuda
@needs_the_tool
@pytest.mark.parametrize("tool", TOOLS)
def test_a_right_kernel_has_no_error(tool: str) -> None:
    done = invoke("replay", TINY, "--arm", "torch_blocks/none", "--device", "cuda", "--sanitize", tool)
    assert f"compute-sanitizer {tool}: 0 errors" in done.text and done.code == 0, done.text


@pytest.mark.cuda
@needs_the_tool
def test_a_read_past_the_end_is_found() -> None:
    case = str(override(parse_case(TINY), "s_q=11"))
    faults = str(ROOT / "tests" / "faulty_cuda" / "faults.py")
    done = invoke("replay", case, "--arm", "deadly_on_gpu/none", "--load", faults, "--device", "cuda", "--sanitize", "memcheck")
    assert done.code == 1 and "Invalid __global__ read of size 4 bytes" in done.text, done.text
