"""What a run prints besides its table: tracebacks, progress, what was not run, and what a repeat line has to set."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import pytest
from processes import FAULTY, ROOT, TINY, TINY_TOPK, invoke, threearm

from harness import cli, options
from harness.asking import Settings
from harness.client import WorkerOptions
from harness.record import Record
from harness.runner import describe
from harness.verdicts import Verdict


def test_an_exception_is_one_line_and_says_where_its_traceback_is(tmp_path: Path) -> None:
    load = ["--load", str(FAULTY / "no_launch.py"), "--device", "cpu"]
    done = threearm("run", TINY, TINY_TOPK, "--arm", "returns_out", "--arm", "returns_indices", *load, "--runs", str(tmp_path))
    assert done.code == 1
    for kernel in ("returns_out", "returns_indices"):
        assert f"TypeError in phase prepare: {kernel} must return a callable that launches it, it returned a Tensor (" in done.text
    assert done.text.count("as returns_out/none above") == 2
    log = next(tmp_path.iterdir()) / "worker.log"
    assert done.lines.count(f"tracebacks: {log}") == 1
    assert log.read_text().count("Traceback") == 4
    assert f"tracebacks: {log}" in invoke("report", str(log.parent)).text
    log.unlink()
    assert "tracebacks: " not in invoke("report", str(log.parent)).text


def test_replay_shows_the_traceback() -> None:
    done = invoke("replay", TINY_TOPK, "--arm", "returns_indices", "--load", str(FAULTY / "no_launch.py"), "--device", "cpu")
    assert done.code == 1
    assert "the worker printed:" in done.lines and "  Traceback (most recent call last):" in done.lines
    assert "the worker printed:" not in invoke("replay", TINY_TOPK, "--arm", "torch_dense", "--device", "cpu").text


def test_progress_is_told_in_a_log_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", TINY, "--arm", "torch_blocks", "--device", "cpu", "--time", "none", "--runs", str(tmp_path)]
    assert " of 3  " not in invoke(*arguments).text
    monkeypatch.setattr(cli, "PAUSE", 0.0)
    told = [line for line in invoke(*arguments).lines if " of 3  torch_blocks" in line]
    assert f"0 of 3  torch_blocks/none  prepare  {TINY.partition(':')[2]}" in told
    assert any(line.startswith("2 of 3  torch_blocks/metadata  launch") for line in told)


def test_lines_of_progress_are_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 29.0, 30.0, 30.0, 59.0, 61.0, 61.0])
    monkeypatch.setattr(options, "monotonic", lambda: next(times))
    told = options.NowAndThen(30.0)
    for number in range(4):
        told.say(f"line {number}")
    captured = capsys.readouterr()
    assert (captured.out, captured.err.splitlines()) == ("", ["line 1", "line 3"])


def test_what_is_not_available_is_told_only_if_nobody_chose(tmp_path: Path) -> None:
    arguments = ["run", TINY_TOPK, "--device", "cpu", "--time", "none", "--runs", str(tmp_path)]
    assert "not available: deep_gemm: needs a cuda device, this is cpu" in invoke(*arguments).lines
    assert "not available" not in invoke(*arguments, "--arm", "torch_dense").text


def test_a_repeat_line_sets_what_triton_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Settings("wall")
    record = Record(TINY_TOPK, "litetopk_triton/litetopk", Verdict.FAILED)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    plain = options.worker_options("cpu", None, False, None, 0.0)
    assert options.replay_options(record, plain, plan) == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked = options.worker_options("cpu", None, False, None, 0.0)
    assert options.replay_options(record, asked, plan) == ["TRITON_INTERPRET=1"]
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(asked)), WorkerOptions) == asked
    monkeypatch.delenv("TRITON_INTERPRET")
    kernels = describe(asked, [])["kernels"]  # a worker of a run that goes on has it as well
    if importlib.util.find_spec("triton"):
        assert next(kernel["why_not"] for kernel in kernels if kernel["name"] == "litetopk_triton") == ""


def test_the_portable_example_of_add_arm_passes(tmp_path: Path) -> None:
    """As it stands in the document, on the case that it names and on one with ties, short rows, NaN and -inf."""
    blocks = (ROOT / "arms" / "ADD_ARM.md").read_text(encoding="utf-8").split("```python\n")[1:]
    example = next(block.partition("```")[0] for block in blocks if block.startswith("# my_dense.py"))
    (tmp_path / "my_dense.py").write_text(example)
    cases = ["indexer_topk:requests=4/3000,topk=512", "indexer_topk:requests=5/90+3/300,topk=64,values=inf,weights=mixed,ties=pairs"]
    done = threearm("run", *cases, "--load", str(tmp_path / "my_dense.py"), "--arm", "my_dense", "--device", "cpu", "--time", "none",
                    "--runs", str(tmp_path))
    assert done.code == 0 and "2 PASSED" in done.lines
