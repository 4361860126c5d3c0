"""The gate with real workers: two versions of a kernel, and what became of it; a kernel and itself; a stored run; two wheels; Ctrl-C."""
from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import FAULTY, TINY, TINY_TOPK, Done, left_behind, new_mark, start, threearm
from wheels import wheel

from cases import parse_case
from cases.suites import override
from harness.asking import Settings
from harness.client import WorkerOptions
from harness.comparison import Change, TimeVerdict, Transition
from harness.gate import NO_OUTPUTS
from harness.gate_folder import LIVE, STORED, GateFolder, GateInfo, SideInfo
from harness.gate_sides import not_passed_on
from harness.record import Record
from harness.runfolder import RunFolder
from harness.tensorfile import read
from harness.verdicts import SOURCES, Verdict
from reports.repeating import of_gate

PYTHON = ("--base", sys.executable, "--candidate", sys.executable, "--device", "cpu")
GATED = ("--load", str(FAULTY / "gated.py"), "--time", "none")
FINE, ULP, ZERO, NAN, RACE, BASE_2, CRASH, HANG, MEMORY, LAST_DIES, MENDED, STILL = 22, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21
"""h_q of the case in which faulty/gated.py does it."""


def heads(h_q: int, more: str = "") -> str:
    """The tiny case with so many heads, which is what tells the kernel what to do."""
    return str(override(parse_case(TINY), f"h_q={h_q}{more}"))


CASES = {h_q: heads(h_q, ",rows=mixed,s_q=3" if h_q == LAST_DIES else "")
         for h_q in (FINE, ULP, ZERO, NAN, RACE, BASE_2, LAST_DIES, MENDED, STILL, MEMORY, HANG, CRASH)}
EXPECTED = {
    FINE: [Change.SAME] * 3, ULP: [Change.NUMBERS] * 3, ZERO: [Change.BROKE] * 3, NAN: [Change.NAN] * 3, RACE: [Change.NONDETERMINISM] * 3,
    BASE_2: [Change.PROMISE] * 3, CRASH: [Change.CRASH, Change.SAME, Change.SAME], HANG: [Change.HANG, Change.SAME, Change.SAME],
    MEMORY: [Change.OOM] * 3, LAST_DIES: [Change.NUMBERS, Change.NUMBERS, Change.CRASH], MENDED: [Change.FIXED] * 3,
    STILL: [Change.STILL_BAD] * 3}


@dataclasses.dataclass
class Gated:
    """A gate that was run: what it said, and its folder."""

    done: Done
    folder: GateFolder
    left: list[str]

    def of(self, case: str) -> list[Transition]:
        return [found for found in self.folder.transitions if found.pairing.case == case]


def gate(runs: Path, *arguments: str, seconds: float = 120.0, **more: str) -> Gated:
    """Run a gate to its end."""
    done = threearm("gate", *arguments, "--runs", str(runs), seconds=seconds, **more)
    paths = list(runs.glob("*-gate-*"))
    assert len(paths) == 1, done.text
    return Gated(done, GateFolder.load(paths[0]), [])


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Gated:
    suite = tmp_path_factory.mktemp("suite") / "cases.txt"
    suite.write_text("\n".join(CASES.values()))
    active = ",".join(str(h_q) for h_q in CASES if h_q not in (FINE, MENDED))
    return gate(tmp_path_factory.mktemp("faulty"), *PYTHON, *GATED, "--suite", str(suite), "--arm", "gated", "--timeout", "4",
                "--base-env", f"GATED_FAULTS={MENDED},{STILL}", "--candidate-env", f"GATED_FAULTS={active}")


@pytest.mark.parametrize("h_q", CASES)
def test_what_became_of_each_arm(faulty: Gated, h_q: int) -> None:
    found = faulty.of(CASES[h_q])
    assert [each.pairing.candidate for each in found] == [f"gated/{source}" for source in SOURCES]
    assert [each.change for each in found] == EXPECTED[h_q], [each.detail for each in found]


def test_other_numbers_are_told_with_margins_ulp_and_place(faulty: Gated) -> None:
    for found in faulty.of(CASES[ULP]):
        assert found.numbers and found.numbers.ulp.keys() == {"1"} and found.numbers.bad == found.numbers.ulp["1"] > 0
        assert "at most 1 ULP" in found.numbers.detail and "equal: max_logits, lse" in found.numbers.detail
        assert found.numbers.where[0] == "in out:" and found.numbers.first
        assert found.margins_before["out"] != found.margins_after["out"]


def test_outputs_that_died_with_a_later_arm_are_made_again(faulty: Gated) -> None:
    assert all(found.numbers and found.numbers.ulp.keys() == {"1"} for found in faulty.of(CASES[LAST_DIES])[:2])


def test_the_exit_code_and_the_screen(faulty: Gated) -> None:
    assert faulty.done.code == 1
    assert len(faulty.done.lines) <= 40
    for change in (Change.CRASH, Change.HANG, Change.NAN, Change.NONDETERMINISM, Change.BROKE, Change.PROMISE):
        assert change.value in faulty.done.text


def test_what_the_folder_holds(faulty: Gated) -> None:
    folder = faulty.folder.path
    assert sorted(file.name for file in folder.iterdir()) == ["base", "candidate", "comparisons.jsonl", "gate.json", "summary.md"]
    for side in ("base", "candidate"):
        records = RunFolder.load(folder / side)
        assert len(records.records) == 3 * len(CASES) and records.info.finished
        assert not (folder / side / "outputs").exists(), "outputs are kept though nobody asked for it"
    info = faulty.folder.info
    assert info.finished and info.pairs == [[f"gated/{source}"] * 2 for source in SOURCES]
    assert (info.base.python, info.candidate.machine["variables"][:12]) == (sys.executable, "GATED_FAULTS")


def test_the_page_repeats_both_sides(faulty: Gated) -> None:
    page = (faulty.folder.path / "summary.md").read_text()
    assert "--env GATED_FAULTS=20,21" in page and f"{CASES[ZERO]} --arm gated/none" in page


def test_a_stored_gate_is_shown_again(faulty: Gated) -> None:
    again = threearm("report", str(faulty.folder.path))
    assert again.code == 1
    assert [line for line in again.lines if "not compared" not in line][:5] == faulty.done.lines[:5]
    page = threearm("report", str(faulty.folder.path), "--markdown")
    assert page.code == 1 and page.text == (faulty.folder.path / "summary.md").read_text()


def test_a_line_that_was_cut_does_not_count(faulty: Gated, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(faulty.folder.path, folder)
    lines = (folder / "comparisons.jsonl").read_bytes()
    (folder / "comparisons.jsonl").write_bytes(lines[:-20])
    info = json.loads((folder / "gate.json").read_bytes())
    (folder / "gate.json").write_text(json.dumps({**info, "finished": ""}))
    assert len(GateFolder.load(folder).transitions) == len(faulty.folder.transitions) - 1
    done = threearm("report", str(folder))
    assert done.code == 1 and "incomplete" in done.text and done.lines[0].startswith("INCOMPLETE (exit 1): cut short")


@pytest.mark.parametrize(("change", "told"), [
    (lambda lines: lines[:-1], "comparisons.jsonl has 35 comparisons, the gate left 36"),
    (lambda lines: [*lines, lines[0]], "a comparison is there twice"),
])
def test_a_finished_gate_that_was_changed_is_not_judged(faulty: Gated, tmp_path: Path, change: Callable[[list[str]], list[str]],
                                                        told: str) -> None:
    shutil.copytree(faulty.folder.path, folder := tmp_path / "changed")
    lines = (folder / "comparisons.jsonl").read_text().splitlines(keepends=True)
    (folder / "comparisons.jsonl").write_text("".join(change(lines)))
    done = threearm("report", str(folder))
    assert done.code == 2 and told in done.text


def test_a_gate_of_a_newer_threearm_is_not_read(faulty: Gated, tmp_path: Path) -> None:
    shutil.copytree(faulty.folder.path, folder := tmp_path / "newer")
    info = json.loads((folder / "gate.json").read_bytes())
    (folder / "gate.json").write_text(json.dumps({**info, "schema": 99}))
    done = threearm("report", str(folder))
    assert done.code == 2 and "schema 99 is of a newer threearm" in done.text


def test_a_gate_that_was_killed_before_it_knew_anything(faulty: Gated, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    shutil.copytree(faulty.folder.path, folder)
    for name in ("comparisons.jsonl", "summary.md", "base/records.jsonl", "candidate/records.jsonl"):
        (folder / name).unlink()
    info = json.loads((folder / "gate.json").read_bytes())
    (folder / "gate.json").write_text(json.dumps({**info, "finished": ""}))
    done = threearm("report", str(folder))
    assert done.code == 4 and done.lines[0].endswith("INCOMPLETE (exit 4): cut short, or still running, after 0 comparisons")
    assert "summary.md" not in done.text
    page = threearm("report", str(folder), "--markdown")
    assert page.code == 4 and page.text.startswith("**INCOMPLETE (exit 4)")


def test_failures_in_full(faulty: Gated) -> None:
    """Each that got worse or fails on both sides, with the lines that repeat both; the screen says how to get there."""
    assert faulty.done.lines[-1] == f"failures in full: threearm report {faulty.folder.path} --failures"
    done = threearm("report", str(faulty.folder.path), "--failures")
    wrong = [found for found in faulty.folder.transitions if found.change not in (Change.SAME, Change.NUMBERS, Change.FIXED)]
    assert done.code == 1 and len(wrong) > 20
    assert done.text.count("  repeat: ") >= len(wrong)
    assert done.text.count("repeat the base: ") + done.text.count("in the base:\n") == len(wrong)
    assert f"{CASES[ZERO]} --arm gated/none --env GATED_FAULTS=" in done.text


def test_what_was_given_up_is_repeated_under_the_same_deadline(tmp_path: Path) -> None:
    options = {"worker": dataclasses.asdict(WorkerOptions("cpu", False, (), 1)), "settings": dataclasses.asdict(Settings(timeout=4.0))}
    side = SideInfo("python", LIVE, sys.executable, {}, [], options)
    folder = GateFolder.create(tmp_path, GateInfo("", [], [TINY], [], side, side, {}))
    repeat = of_gate(folder)
    for record, words in [(Record(TINY, "k/none", Verdict.SKIPPED, "given up: hung on 2 cases before"), ["--timeout", "4"]),
                          (Record(TINY, "k/none", Verdict.TIMEOUT, "no answer"), ["--timeout", "4"]),
                          (Record(TINY, "k/none", Verdict.SKIPPED, "given up: crashed on 2 cases before"), [])]:
        assert repeat("candidate", record) == words


# --- what is no comparison of anything --------------------------------------------------------------------------------


def test_a_kernel_that_can_be_imported_on_neither_side_was_not_tested(tmp_path: Path) -> None:
    """It fails as it did before; that is no pass, though another kernel passes beside it."""
    file = tmp_path / "unimportable.py"
    file.write_text("from arms.kernel import sparse_prefill_kernel\n\n\n@sparse_prefill_kernel('unimportable')\n"
                    "def unimportable(problem):\n    import no_such_package\n    return no_such_package.launch\n")
    found = gate(tmp_path / "runs", *PYTHON, TINY, "--load", str(file), "--time", "none", "--arm", "unimportable/none", "--arm",
                 "torch_blocks/none")
    assert {each.change for each in found.folder.transitions} == {Change.STILL_BAD, Change.SAME}
    assert found.done.code == 4
    assert "UNRESOLVED (exit 4): nothing was tested of unimportable: FAILED ModuleNotFoundError" in found.done.text
    assert "no_such_package" in " ".join(found.done.lines[:3])


SHELL = {"PYTHONPATH": "/x", "VIRTUAL_ENV": "/v", "HOME": "/h"}


@pytest.mark.parametrize(("base", "candidate", "notes"), [
    (("/b", ()), ("/c", ()), ["PYTHONPATH of this shell is not passed on: --base-env, --candidate-env"]),
    (("/b", ("PYTHONPATH=/x", "VIRTUAL_ENV=/v")), ("/c", ("VIRTUAL_ENV=",)),
     ["PYTHONPATH of this shell is not passed on: --candidate-env"]),
    ((sys.executable, ()), ("/c", ("VIRTUAL_ENV=/v",)),
     ["PYTHONPATH of this shell is passed on to the base alone, threearm's own interpreter: --candidate-env"]),
    ((sys.executable, ()), (sys.executable, ()), []),
    (None, ("/c", ("VIRTUAL_ENV=/v",)), ["PYTHONPATH of this shell is not passed on: --candidate-env"]),
    (None, None, [])])
def test_variables_of_the_shell_that_a_side_does_not_get(base: tuple[str, tuple[str, ...]] | None,
                                                         candidate: tuple[str, tuple[str, ...]] | None, notes: list[str]) -> None:
    sides = [SideInfo("x", LIVE, given[0], {}, [], {"worker": {"environment": given[1]}}) if given else SideInfo("x", STORED, "", {}, [])
             for given in (base, candidate)]
    assert not_passed_on(sides, SHELL) == notes
    assert not_passed_on(sides, {"HOME": "/h"}) == []


# --- a kernel and itself, times, other kernels ------------------------------------------------------------------------


@pytest.mark.perf
def test_a_kernel_and_itself(tmp_path: Path) -> None:
    found = gate(tmp_path, *PYTHON, TINY, "--arm", "torch_blocks/none", "--processes", "2", "--seconds", "2",
                 "--markdown", str(tmp_path / "page.md"))
    assert [each.change for each in found.folder.transitions] == [Change.SAME]
    time = found.folder.transitions[0].time
    assert time and time.verdict in (TimeVerdict.SAME, TimeVerdict.UNRESOLVED) and time.contract == "wall"
    assert len(time.processes) >= 2 and time.estimate and time.rule.source == "not calibrated"
    assert found.done.code == (0 if time.verdict is TimeVerdict.SAME else 4)
    assert (tmp_path / "page.md").read_text() == (found.folder.path / "summary.md").read_text()


def test_broken_arms_and_other_kernels_by_name(tmp_path: Path) -> None:
    """Both families in one gate; a broken kernel that is named is brought along."""
    found = gate(tmp_path, *PYTHON, TINY, TINY_TOPK, "--time", "none", "--arm", "torch_blocks/none=broken_negated/none",
                 "--arm", "torch_dense=litetopk_torch", "--keep-outputs")
    by_arm = {each.pairing.candidate: each for each in found.folder.transitions}
    assert by_arm["broken_negated/none"].change is Change.BROKE
    assert by_arm["litetopk_torch/litetopk"].pairing.base == "torch_dense/dense"
    assert by_arm["litetopk_torch/litetopk"].change in (Change.SAME, Change.NUMBERS)
    assert found.done.code == 1
    kept = [next((found.folder.path / side / "outputs").glob("*none-*")) for side in ("base", "candidate")]
    (mine, about), (theirs, _) = (read(str(file)) for file in kept)
    assert about == {"case": TINY, "arm": "torch_blocks/none"}
    assert (mine["out"] == -theirs["out"]).all() and (mine["lse"] == theirs["lse"]).all()


# --- a stored run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose outputs were saved."""
    runs = tmp_path_factory.mktemp("stored")
    done = threearm("run", CASES[FINE], CASES[ULP], TINY_TOPK, *GATED, "--arm", "gated/none", "--arm", "torch_dense", "--device", "cpu",
                    "--save-outputs", "--runs", str(runs))
    assert done.code == 0, done.text
    return next(runs.iterdir())


def test_a_run_saves_outputs(stored: Path) -> None:
    run = RunFolder.load(stored)
    files = {run.output_file(record): record for record in run.records}
    assert {file for file in files if file} == set((stored / "outputs").iterdir()) and len(files) == 3
    for file, record in files.items():
        tensors, about = read(str(file))
        assert about == {"case": record.case, "arm": record.arm}
        assert tensors.keys() <= record.outputs.keys()


def against_stored(run: Path, tmp_path: Path, *more: str) -> Gated:
    return gate(tmp_path, "--base", str(run), "--candidate", sys.executable, "--device", "cpu", *GATED[:2], "--arm", "gated/none",
                "--arm", "torch_dense", "--candidate-env", f"GATED_FAULTS={ULP}", *more)


def test_against_a_stored_run(stored: Path, tmp_path: Path) -> None:
    before = sorted(stored.rglob("*"))
    found = against_stored(stored, tmp_path)
    assert [each.change for each in found.folder.transitions] == [Change.SAME, Change.NUMBERS, Change.SAME]
    numbers = found.of(CASES[ULP])[0].numbers
    assert numbers and numbers.ulp.keys() == {"1"}
    assert found.done.code == 0 and "never compared" in found.done.text
    assert all(each.time is None for each in found.folder.transitions)
    assert sorted(stored.rglob("*")) == before, "the stored run was changed"
    assert found.folder.sides["base"].records


def test_stored_runs_that_lack_records_are_no_ok(stored: Path, tmp_path: Path) -> None:
    """Both lack the same one, so nothing that is there differs."""
    run = tmp_path / "run"
    shutil.copytree(stored, run)
    lines = (run / "records.jsonl").read_bytes().splitlines(keepends=True)
    (run / "records.jsonl").write_bytes(b"".join(lines[:-1]))
    found = gate(tmp_path / "gate", "--base", str(run), "--candidate", str(run))
    assert found.done.code == 4
    assert "the base's run lacks 1 record and the candidate's run lacks 1 record" in found.done.text.splitlines()[0]
    whole = gate(tmp_path / "whole", "--base", str(stored), "--candidate", str(stored))
    assert whole.done.code == 0, whole.done.text


def test_bitwise_and_without_saved_outputs(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stored, run, ignore=shutil.ignore_patterns("outputs"))
    found = against_stored(run, tmp_path / "gate", "--bitwise")
    changed = found.of(CASES[ULP])[0]
    assert changed.change is Change.NUMBERS and changed.numbers is None
    assert changed.detail.endswith("the outputs were not compared (no saved outputs: threearm run --save-outputs)")
    assert [note for note in found.folder.info.notes if "saved" in note] == [f"outputs not compared: {NO_OUTPUTS}"]
    assert found.done.code == 1


def test_a_stored_run_brings_its_kernels_along(stored: Path, tmp_path: Path) -> None:
    """Without --load and --arm: what the run loaded, and no arm that it has no record of. A file that is gone is told."""
    found = gate(tmp_path / "gate", "--base", str(stored), "--candidate", sys.executable, "--device", "cpu")
    assert [(each.pairing.candidate, each.change) for each in found.folder.transitions] == [
        ("gated/none", Change.SAME), ("gated/none", Change.SAME), ("torch_dense/dense", Change.SAME)]
    assert found.done.code == 0
    run = tmp_path / "run"
    shutil.copytree(stored, run)
    info = json.loads((run / "run.json").read_bytes())
    info["options"]["worker"]["load"] = [str(tmp_path / "gone.py")]
    (run / "run.json").write_text(json.dumps(info))
    without = gate(tmp_path / "without", "--base", str(run), "--candidate", sys.executable, "--device", "cpu")
    assert [each.change for each in without.folder.transitions] == [Change.GONE, Change.GONE, Change.SAME] and without.done.code == 1
    assert f"{tmp_path}/gone.py, which the base's run loaded, is not there any more: --load" in without.folder.info.notes


def test_other_inputs_are_no_comparison(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stored, run)
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    for record in records:
        if record["case"] == CASES[ULP]:
            record["inputs"] |= {"kv": "other", "all": "other"}
    (run / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = against_stored(run, tmp_path / "gate")
    changed = found.of(CASES[ULP])[0]
    assert changed.change is Change.UNKNOWN and changed.detail == "inputs differ: kv" and changed.numbers is None
    assert found.done.code == 5


def test_two_stored_runs(stored: Path, tmp_path: Path) -> None:
    found = gate(tmp_path, "--base", str(stored), "--candidate", str(stored))
    assert {each.change for each in found.folder.transitions} == {Change.SAME} and len(found.folder.transitions) == 3
    assert found.done.code == 0


# --- two wheels -------------------------------------------------------------------------------------------------------


def test_two_wheels_and_none(tmp_path: Path) -> None:
    """Requirements become environments; a package that is missing on one side is an arm gone, or a new one."""
    one, two = str(wheel(tmp_path, "1.0")), str(wheel(tmp_path, "2.0"))
    common = ("--inherit-packages", "--device", "cpu", *GATED, "--arm", "packaged/none", TINY)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PYTHONPATH": str(tmp_path)}
    bump = gate(tmp_path / "bump", "--base", one, "--candidate", two, *common, **cache)
    assert [each.change for each in bump.folder.transitions] == [Change.NUMBERS]
    assert [side.kernels[0]["version"] for side in (bump.folder.info.base, bump.folder.info.candidate)] == ["1.0", "2.0"]
    assert bump.done.code == 0 and "2.0" in bump.done.text
    assert "PYTHONPATH of this shell is not passed on: --base-env, --candidate-env" in bump.done.text
    gone = gate(tmp_path / "gone", "--base", one, "--candidate", sys.executable, *common, **cache)
    assert [each.change for each in gone.folder.transitions] == [Change.GONE] and gone.done.code == 1
    assert len(list((tmp_path / "cache" / "threearm" / "environments").glob("*/made.json"))) == 2


# --- ends that are none -----------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_is_known(tmp_path: Path) -> None:
    mark = new_mark()
    process = start(["gate", *PYTHON, *GATED, CASES[FINE], CASES[HANG], "--arm", "gated/none", "--runs", str(tmp_path),
                     "--candidate-env", f"GATED_FAULTS={HANG}"], mark)
    file = None
    while process.poll() is None:
        file = next(tmp_path.glob("*/base/records.jsonl"), None)
        if file and file.read_bytes().count(b"\n") == 2:  # the base has both cases: the candidate is about to hang
            break
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=20)[0]
    assert process.returncode == 130 and "Traceback" not in text and "incomplete" in text.lower()
    assert left_behind(mark) == []
    folder = GateFolder.load(next(tmp_path.glob("*-gate-*")))
    assert [each.change for each in folder.transitions] == [Change.SAME]
    assert folder.info.interrupted and not folder.info.finished and (folder.path / "summary.md").is_file()
    again = threearm("report", str(folder.path))
    assert again.code == 4 and "INCOMPLETE (exit 4): interrupted after 1 comparison; so far OK" in again.text


def test_a_side_that_cannot_run_workers_is_one_line(tmp_path: Path) -> None:
    """An interpreter without torch: the one below this venv, without its packages."""
    bare = tmp_path / "bare"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S \"$@\"\n")
    bare.chmod(0o755)
    done = threearm("gate", "--base", sys.executable, "--candidate", str(bare), TINY, "--device", "cpu", "--runs", str(tmp_path / "runs"))
    assert done.code == 5 and "torch" in done.text and "--candidate" in done.text and len(done.lines) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    (("--base", "/no/such/python", "--candidate", sys.executable), "no such file"),
    (("--base", sys.executable, "--candidate", sys.executable, "--markdown", "/no/such/page.md"), "no such folder as /no/such"),
    (("--base", sys.executable, "--candidate", sys.executable, "--base-env", "X"), "NAME=VALUE"),
    (("--base", sys.executable, "--candidate", sys.executable, "--suite", "no-such-suite"), "no-such-suite"),
    (("--base", sys.executable, "--candidate", sys.executable, "--device", "tpu"), "--device tpu"),
])
def test_usage_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = threearm("gate", *arguments)
    assert done.code == 2 and said in done.text and len(done.lines) == 1


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, stored: Path) -> None:
    (tmp_path / "file").touch()
    done = threearm("gate", "--base", str(stored), "--candidate", str(stored), "--runs", str(tmp_path / "file" / "runs"))
    assert done.code == 2 and "cannot write" in done.text and len(done.lines) == 1


def test_vacuous_or_skipped_on_both_sides_is_no_pass(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stored, run)
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    for record in records:
        record |= {"verdict": Verdict.SKIPPED.value, "checks": [], "outputs": {}, "inputs": {}, "detail": "no such GPU"}
    (run / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = gate(tmp_path / "gate", "--base", str(run), "--candidate", str(run))
    assert found.done.code == 5
    assert "VOID (exit 5): nothing was compared: no such GPU" in found.done.text
