"""The plug-in in a repository that is not ours: items, markers, verdicts, several processes; and that it is not there unless asked for."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import FAULTY, TINY, Done, environment, left_behind, marked, new_mark

from cases import format_case, parse_case
from cases.suites import override
from harness import pytest_plugin
from harness.asking import Settings
from harness.client import WorkerOptions
from harness.pytest_plan import Part, Plan, check_processes
from harness.pytest_plugin import Plugin, group_of, marks_of, named_item, put_together
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo, exit_code
from harness.verdicts import Verdict

OWN = "def test_own() -> None:\n    pass\n"
VACUOUS = format_case(override(parse_case(TINY), "sm_scale=10000.0"))
LIVE = format_case(override(parse_case(TINY), "tail=live"))
SEGFAULT, RAISES = (f"sparse_prefill:s_q={rows},s_kv=128,h_q=2,topk=64" for rows in (11, 20))  # what `deadly` does there
WIDE = [str(override(parse_case(TINY), f"h_q={h_q}")) for h_q in (1, 2, 4)]
KERNEL = {"name": "k", "family": "sparse_prefill", "arms": ["none", "metadata"], "device": "any", "capability": []}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def run(folder: Path, *arguments: str, mark: str = "", **more: str) -> Done:
    """pytest in a folder, to its end. mark: of its processes; more: environment variables."""
    done = subprocess.run(command(*arguments), cwd=folder, env=environment(mark or new_mark(), COLUMNS="200", **more), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=90, check=False)
    assert "INTERNALERROR" not in done.stdout, done.stdout
    return Done(done.returncode, done.stdout)


def repository(folder: Path) -> Path:
    (folder / "test_own.py").write_text(OWN)
    return folder


def only_run(folder: Path) -> RunFolder:
    return RunFolder.load(next((folder / "runs").iterdir()))


def outcomes(done: Done) -> dict[str, str]:
    """Of `pytest -v`, by item."""
    return {found[1]: found[2] for found in re.finditer(r"^(?:\.\./)*(threearm::\S+) ([A-Z]+)", done.text, re.M)}


def test_without_its_options_nothing_is_loaded(tmp_path: Path) -> None:
    """Also beside a package that has the name of one of ours."""
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("OURS = False\n")
    (tmp_path / "test_own.py").write_text(
        "import sys\n\ndef test_own():\n    assert {'torch', 'msgspec', 'harness', 'cases', 'threearm'}.isdisjoint(sys.modules)\n"
        "    import harness\n    assert not harness.OURS\n")
    done = run(tmp_path)
    assert done.code == 0 and "1 passed" in done.text and "threearm:" not in done.text
    shadowed = run(tmp_path, "--threearm-suite=smoke")
    assert shadowed.code == 4 and "ERROR: threearm: package 'harness' is taken from" in shadowed.text


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Right and wrong kernels on cases that pass, cannot show anything, are refused, and end the worker."""
    folder = repository(tmp_path_factory.mktemp("everything"))
    cases = [f"--threearm-case={case}" for case in (TINY, VACUOUS, LIVE, RAISES, SEGFAULT)]
    arms = [f"--threearm-arm={arm}" for arm in ("torch_blocks", "deadly/none")]
    done = run(folder, *cases, *arms, f"--threearm-load={FAULTY / 'deadly.py'}", "--threearm-device=cpu", "-v", "-rs", "--junitxml=j.xml",
               "--threearm-time=wall", "--threearm-samples=2", "-k", "not backscan and not (deadly and tail)", "test_own.py")
    return folder, done


def test_an_item_is_an_arm_on_a_case_and_fares_as_its_record(everything: tuple[Path, Done]) -> None:
    folder, done = everything
    found = outcomes(done)
    assert done.code == 1 and "test_own.py::test_own PASSED" in done.text
    for source in ("none", "metadata"):
        assert found[f"threearm::{TINY}[torch_blocks/{source}]"] == "PASSED"
        assert found[f"threearm::{VACUOUS}[torch_blocks/{source}]"] == "FAILED"
        assert found[f"threearm::{LIVE}[torch_blocks/{source}]"] == ("PASSED" if source == "metadata" else "SKIPPED")
    assert found[f"threearm::{SEGFAULT}[deadly/none]"] == found[f"threearm::{RAISES}[deadly/none]"] == "FAILED"
    records = {f"threearm::{r.case}[{r.arm}]": r for r in only_run(folder).records}
    for item, outcome in found.items():
        verdict = records[item].verdict
        assert outcome == {Verdict.PASSED: "PASSED", Verdict.SKIPPED: "SKIPPED"}.get(verdict, "FAILED"), item
    assert all(record.time for record in records.values() if record.verdict is Verdict.PASSED)


def test_a_failure_is_told_in_full_with_a_line_that_repeats_it(everything: tuple[Path, Done]) -> None:
    _, done = everything
    assert f"VACUOUS  torch_blocks/none  {VACUOUS}" in done.lines
    assert "VACUOUS  reference  an all-zero out would pass" in done.text
    assert f"CRASHED  deadly/none  {SEGFAULT}" in done.lines and "  signal SIGSEGV in phase launch" in done.lines
    assert f"  repeat: threearm replay {SEGFAULT} --arm deadly/none --load {FAULTY / 'deadly.py'}" in done.lines
    assert "Traceback" not in done.text
    assert "tail=live: only an arm that is given the length computes this case" in done.text
    assert any(line.startswith("records: ") for line in done.lines)


def test_what_pytest_writes_for_others_has_the_verdicts(everything: tuple[Path, Done]) -> None:
    folder, _ = everything
    cases = {each.get("name"): each for each in ElementTree.parse(folder / "j.xml").iter("testcase")}
    crashed = cases[f"{SEGFAULT}[deadly/none]"]
    assert crashed.get("classname") == "threearm" and crashed.find("failure") is not None
    assert [(p.get("name"), p.get("value")) for p in crashed.iter("property")] == [("verdict", "CRASHED")]


def test_a_deselected_arm_is_compared_with_and_not_reported(everything: tuple[Path, Done]) -> None:
    folder, done = everything
    assert not any("/backscan]" in item for item in outcomes(done))
    assert "8 PASSED, 1 SKIPPED, 3 VACUOUS, 1 FAILED, 1 CRASHED" in done.lines, done.text
    checks = {(r.case, r.arm): {check.name for check in r.checks} for r in only_run(folder).records}
    assert "backscan-vs-metadata" in checks[TINY, "torch_blocks/metadata"] and checks[TINY, "torch_blocks/backscan"]


def test_a_run_with_cases_deselected_is_not_called_finished(everything: tuple[Path, Done]) -> None:
    folder, done = everything
    assert f"threearm::{LIVE}[deadly/none]" not in outcomes(done)
    assert (LIVE, "deadly/none") in only_run(folder).missing() and only_run(folder).info.finished == ""


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Two processes of pytest-xdist."""
    folder = repository(tmp_path_factory.mktemp("in_two"))
    (folder / "list.txt").write_text("\n".join(WIDE))
    done = run(folder, f"--threearm-suite={folder / 'list.txt'}", "--threearm-arm=torch_blocks", "--threearm-device=cpu",
               "-n2", "-v", "test_own.py")
    return folder, done


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_two_processes_leave_one_run(in_two: tuple[Path, Done]) -> None:
    folder, done = in_two
    assert done.code == 0 and "10 passed" in done.text, done.text
    assert "9 PASSED" in done.lines
    stored = only_run(folder)
    assert stored.missing() == [] and stored.info.finished and stored.path
    assert sorted(path.name for path in stored.path.iterdir()) == ["lock", "records.jsonl", "run.json", "worker.log"]
    assert [(r.case, r.arm) for r in stored.records] == [(case, f"torch_blocks/{source}") for case in WIDE for source in (
        "none", "backscan", "metadata")]
    assert re.findall(r"^=== (gw\d)$", (stored.path / "worker.log").read_text(), re.M) == ["gw0", "gw1"]


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_arms_that_are_compared_stay_in_one_process(in_two: tuple[Path, Done]) -> None:
    _, done = in_two
    found = re.findall(r"^\[(gw\d)\] .*?PASSED (?:\.\./)*(threearm::\S+)", done.text, re.M)
    by_group: dict[str, set[str]] = {}
    for process, item in found:
        by_group.setdefault(group_of(item), set()).add(process)
    assert len(found) == 9 and len(by_group) == 3
    assert {len(processes) for processes in by_group.values()} == {1}
    assert len({process for process, _ in found}) == 2


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="pytest-xdist is not installed")
@pytest.mark.parametrize("restarts", [2, 0])
def test_what_a_process_died_at_is_a_record(tmp_path: Path, restarts: int) -> None:
    """It dies at the first arm of the last case, once; the others of the case are for the process that takes its place, if one may."""
    run_mark, case = new_mark(), WIDE[-1]
    cases = [f"--threearm-case={case}" for case in WIDE]
    done = run(tmp_path, *cases, f"--threearm-load={FAULTY / 'ends_pytest.py'}", "--threearm-arm=ends_pytest", "--threearm-device=cpu",
               "-n2", f"--max-worker-restart={restarts}", mark=run_mark, ENDS_PYTEST_AT="4", ENDS_PYTEST_DONE=str(tmp_path / "done"))
    assert done.code == 1 and f"1 failed, {8 if restarts else 6} passed" in done.text, done.text
    assert f"{8 if restarts else 6} PASSED, 1 CRASHED" in done.lines
    assert f"CRASHED  ends_pytest/none  {case}" in done.lines and f"  repeat: threearm replay {case} --arm ends_pytest/none" in done.text
    stored = only_run(tmp_path)
    assert [r.verdict for r in stored.records] == [*[Verdict.PASSED] * 6, Verdict.CRASHED, *[Verdict.PASSED] * (2 if restarts else 0)]
    assert exit_code(stored.records) == 1 and bool(stored.info.finished) is bool(restarts)
    assert stored.missing() == ([] if restarts else [(case, "ends_pytest/backscan"), (case, "ends_pytest/metadata")])
    assert left_behind(run_mark) == []


def test_items_are_chosen_by_mark_name_and_id(tmp_path: Path) -> None:
    (tmp_path / "gpu.py").write_text((FAULTY / "slow.py").read_text().replace(
        '@sparse_prefill_kernel("slow")', '@sparse_prefill_kernel("slow", requires=Requires(device="cuda", capability=((9, 0),)))').replace(
        "import Launch,", "import Launch, Requires,"))
    arguments = [f"--threearm-case={TINY}", "--threearm-arm=torch_blocks", "--threearm-arm=slow", f"--threearm-load={tmp_path / 'gpu.py'}",
                 "--threearm-device=cpu", "--strict-markers"]
    named = f"threearm::{TINY}[torch_blocks/metadata]"
    one = run(tmp_path, *arguments, "--collect-only", "-q", named)
    assert one.code == 0 and [line for line in one.lines if "::" in line] == [named]
    assert not (tmp_path / "runs").exists()
    marked_so = run(tmp_path, *arguments, "-v", "-m", "cuda and sm90 and not perf", "-k", "backscan or metadata")
    assert outcomes(marked_so) == {f"threearm::{TINY}[slow/{source}]": "SKIPPED" for source in ("backscan", "metadata")}
    assert marked_so.code == 5, "all were skipped: nothing was shown"


@pytest.mark.parametrize(("arguments", "said"), [
    (["--threearm-suite=nosuch"], "unknown suite 'nosuch'"),
    (["--threearm-case=sparse_prefill:s_q=0"], "s_q"),
    (["--threearm-suite=smoke", "--threearm-device=tpu"], "--device tpu: allowed is"),
    (["--threearm-suite=smoke", "--threearm-runs=/proc/x"], "--threearm-runs=/proc/x: no run folder can be made there: /proc: "),
    (["--threearm-suite=smoke", "--threearm-runs=test_own.py"], "--threearm-runs=test_own.py: no run folder can be made there: "),
    (["--threearm-arm=torch_dense"], "--threearm-arm=torch_dense: needs --threearm-suite=NAME or --threearm-case=TEXT"),
    (["--threearm-load=nope.py"], "--threearm-load=nope.py: needs"),
    (["--threearm-time=wall", "test_own.py"], "--threearm-time=wall: needs"),
    (["--threearm-runs", "elsewhere"], "--threearm-runs: needs"), (["--threearm-suite="], "--threearm-suite=: needs")])
def test_what_is_wrong_with_an_option_is_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run(repository(tmp_path), *arguments)
    assert done.code == 4 and len(done.lines) == 1 and said in done.text
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] in ([], ["__pycache__"])


def test_options_in_a_configuration_file_wait_for_cases(tmp_path: Path) -> None:
    (repository(tmp_path) / "pytest.ini").write_text("[pytest]\naddopts = --threearm-device=cpu --threearm-arm=torch_blocks\n")
    done = run(tmp_path)
    assert done.code == 0 and "1 passed" in done.text
    with_cases = run(tmp_path, f"--threearm-case={TINY}", "--collect-only", "-q")
    assert with_cases.code == 0 and f"threearm::{TINY}[torch_blocks/none]" in with_cases.lines


def test_ctrl_c_leaves_no_worker(tmp_path: Path) -> None:
    mark = new_mark()
    cases = [f"--threearm-case={case}" for case in WIDE]
    process = subprocess.Popen(
        command(*cases, f"--threearm-load={FAULTY / 'slow.py'}", "--threearm-arm=slow", "--threearm-device=cpu",
                "--threearm-launches=1000"),
        cwd=tmp_path, env=environment(mark), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + 40
    while not any(file.read_bytes().count(b"prepare") for file in tmp_path.glob("runs/*/worker.log")) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(marked(mark)) == 2
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=20)[0]
    assert process.returncode == 2 and "KeyboardInterrupt" in text
    assert left_behind(mark, 3.0) == []


def plan(contract: str = "", device: str = "cpu", gpus: int = 0) -> Plan:
    return Plan([TINY], [KERNEL], WorkerOptions(device, False, (), 1 << 30), Settings(contract), {}, {}, ["NVIDIA H200"] * gpus)


@pytest.mark.parametrize(("found", "processes", "dist", "said"), [
    (plan(), 8, "load", ""), (plan(device="cuda", gpus=2), 8, "load", ""), (plan("wall"), 0, "no", ""), (plan("wall"), 1, "load", ""),
    (plan("auto", "cuda", 2), 2, "load", ""),
    (plan("auto", "cuda", 2), 3, "load", "auto with 3 processes on 2 GPUs: what is timed is shared with nothing"),
    (plan("kernel", "cuda:1", 2), 2, "load", "kernel with 2 processes on 1 GPU: what is timed is shared with nothing"),
    (plan("wall", "cuda", 2), 2, "load", "wall with 2 processes: they share a CPU"),
    (plan("wall"), 2, "load", "wall with 2 processes on one CPU: what is timed"),
    (plan(), 2, "each", "--dist each would run every case in every process")])
def test_times_are_refused_where_they_would_be_shared(found: Plan, processes: int, dist: str, said: str) -> None:
    if not said:
        check_processes(found, processes, dist)
        return
    with pytest.raises(pytest.UsageError) as caught:
        check_processes(found, processes, dist)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("device", "capability", "contract", "marks"), [
    ("any", [], "", []), ("cuda", [], "", ["cuda"]), ("cuda", [[9, 0]], "", ["cuda", "sm90"]), ("cuda", [[10, 0], [10, 3]], "span", [
        "cuda", "sm100", "perf"]), ("cuda", [[9, 0], [10, 0]], "", ["cuda"]), ("any", [], "wall", ["perf"])])
def test_markers_follow_from_what_a_kernel_requires(device: str, capability: list[list[int]], contract: str, marks: list[str]) -> None:
    assert marks_of({**KERNEL, "device": device, "capability": capability}, Settings(contract)) == marks


@pytest.mark.parametrize(("argument", "item"), [
    ("threearm::a[k/none]", "threearm::a[k/none]"), ("../../threearm::a[k/none]", "threearm::a[k/none]"), ("test_own.py::test_own", ""),
    ("threearm", ""), ("tests", "")])
def test_an_items_id_is_known_as_pytest_prints_it(argument: str, item: str) -> None:
    assert named_item(argument) == item


class Config:
    """What of pytest's the plug-in reads."""

    def __init__(self, folder: Path, **options: Any) -> None:
        class ArgsSource:
            ARGS = "args"

        self.ArgsSource, self.args_source, self.args, self.rootpath = ArgsSource, "args", [], folder
        self.option = type("Option", (), {"threearm_runs": "runs", **options})
        self.invocation_params = type("Invoked", (), {"dir": folder})

    def getoption(self, name: str, default: Any = None) -> Any:
        return getattr(self.option, name, default)

    def addinivalue_line(self, name: str, line: str) -> None:
        assert name == "markers"


class Node:
    """A process of pytest-xdist, as its controller sees it."""

    def __init__(self, name: str) -> None:
        self.gateway = type("Gateway", (), {"id": name})
        self.workerinput: dict[str, str] = {}

    def gpu(self) -> int:
        return int(json.loads(self.workerinput["threearm"])["gpu"])


def test_each_process_gets_a_gpu_and_its_successor_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_plugin, "make_plan", lambda config: plan("auto", "cuda", 3))
    plugin = Plugin(Config(tmp_path, dist="load", tx=["3*popen"]))  # type: ignore[arg-type]
    nodes = [Node(f"gw{number}") for number in range(4)]
    for node in nodes[:3]:
        plugin.pytest_configure_node(node)
    assert [node.gpu() for node in nodes[:3]] == [0, 1, 2]
    plugin.pytest_testnodedown(nodes[1], "crashed")
    plugin.pytest_configure_node(nodes[3])
    assert nodes[3].gpu() == 1
    part = msgspec.json.decode(nodes[3].workerinput["threearm"], type=Part)
    assert part.plan.options.memory == (1 << 30) // 3 and Path(part.folder).name == "gw3"
    assert dataclasses.replace(part.plan, options=plugin.plan.options) == plugin.plan
    with pytest.raises(pytest.UsageError, match="4 processes on 3 GPUs"):
        Plugin(Config(tmp_path, dist="load", tx=["4*popen"]))  # type: ignore[arg-type]


def test_what_two_processes_had_counts_with_the_worse_verdict(tmp_path: Path) -> None:
    info = RunInfo("2026-01-01T00:00:00+00:00", [], [TINY], [KERNEL], {}, {})
    folder = RunFolder.make(tmp_path / "run", info)
    for name, verdicts in (("gw0", {"none": Verdict.PASSED}), ("gw2", {"none": Verdict.FLAKY, "metadata": Verdict.PASSED})):
        part = RunFolder.make(tmp_path / "run" / "parts" / name, info)
        for source, verdict in verdicts.items():
            part.add(Record(TINY, f"k/{source}", verdict))
    (tmp_path / "run" / "parts" / "gw1").mkdir()  # its process died before it had written anything
    folder.add(Record(TINY, "k/metadata", Verdict.CRASHED))
    put_together(folder)
    assert [(record.source, record.verdict) for record in RunFolder.load(tmp_path / "run").records] == [
        ("none", Verdict.FLAKY), ("metadata", Verdict.CRASHED)]
    assert not (tmp_path / "run" / "parts").exists()
