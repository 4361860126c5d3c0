"""Judging again what is stored: it comes to the same where nothing was changed, and finds what was, in numbers, samples and outputs."""
from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ROOT, TINY, TINY_TOPK, Done, threearm
from trials import expected_of, inputs_of

from cases.counter import digest
from harness import rejudging
from harness.comparison import Change, TimeVerdict
from harness.gate_folder import GateFolder
from harness.record import Record
from harness.rejudge import Rejudged, gate_again, pairs_again, record_again, time_again
from harness.rejudge_command import rejudge_folder
from harness.runfolder import RunFolder
from harness.stored import folders_below, open_folder
from harness.tensorfile import read, write
from harness.verdicts import Check, Verdict

EVIDENCE = ROOT / "docs" / "evidence"
STORED = folders_below(EVIDENCE)
PROMISE = ("1 bf16 ULP, columns 256..511, at most 0.78% of them, only in rows where a pair of 64-key blocks is skipped, none nearer zero")
SKIPS = ("5 of 16 rows skip a pair; out differs in 10 of 65536; equal: max_logits, lse; 0.4883% of 2048 elements where the promise "
         f"allows it; within the promise ({PROMISE})")


def verdicts(folder: Any) -> list[Any]:
    """Every verdict that a folder holds."""
    runs = [folder] if isinstance(folder, RunFolder) else [*(folder.sides if isinstance(folder, GateFolder) else folder.runs).values()]
    found: list[Any] = [(record.verdict, [check.verdict for check in record.checks]) for run in runs for record in run.records]
    if isinstance(folder, GateFolder):
        found += [(each.change, each.base, each.candidate, each.time and each.time.verdict) for each in folder.transitions]
    return found


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_what_is_stored_comes_to_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real runs, of every version that has left some."""
    folder = open_folder(path)
    before = copy.deepcopy(verdicts(folder))
    assert rejudge_folder(folder) == 0
    assert verdicts(folder) == before
    told = capsys.readouterr().err
    assert "by today's rules all is as it was stored" in told and "stored PASSED" not in told


# --- by numbers -------------------------------------------------------------------------------------------------------


def passing(**fields: Any) -> Record:
    return Record(TINY, "k/none", Verdict.PASSED, checks=[
        Check("run-to-run", Verdict.PASSED), Check("reference", Verdict.PASSED, margins={"out": 0.4, "lse": 0.1}, total=64),
        dataclasses.replace(Check("none-vs-metadata", Verdict.PASSED, SKIPS, bad=10, total=65536, where=["columns 300..410"],
                                  ulp={"1": 10}), **fields)])


def again(record: Record, promise: str = PROMISE) -> Rejudged:
    return record_again(record, {"promise": promise})


def test_a_record_that_was_not_changed_is_as_it_was() -> None:
    found = again(passing())
    assert (found.differs, found.now) == (False, passing())


@pytest.mark.parametrize(("change", "told"), [
    (lambda r: r.checks[1].margins.update(out=1.2), "reference: stored PASSED, rejudged FAILED: margins above 1: out 1.2"),
    (lambda r: r.checks[1].margins.update(out=1e30), "margins above 1: out 1e+30"),
    (lambda r: r.checks[1].margins.update(out=-0.4), "margins above 1: out -0.4"),
    (lambda r: setattr(r.checks[1], "bad", 3), "reference: stored PASSED, rejudged FAILED: 3 elements are wrong"),
    (lambda r: setattr(r.checks[0], "bad", 3), "run-to-run: stored PASSED, rejudged FLAKY: 3 elements are wrong"),
    (lambda r: r.checks[2].ulp.update({"1": 9, "2": 1}), "none-vs-metadata: stored PASSED, rejudged FAILED: more than 1 ULP"),
    (lambda r: r.checks[2].ulp.update({"1": 9, "not finite": 1}), "more than 1 ULP"),
    (lambda r: r.checks[2].ulp.update({"1": 4}), "the ULP do not account for the elements that differ"),
    (lambda r: r.checks[2].where.__setitem__(0, "columns 200..410"), "outside columns 256..511"),
    (lambda r: setattr(r.checks[2], "detail", SKIPS.replace("equal: max_logits, lse", "lse differs in 2 of 4")),
     "lse or max_logits differ"),
    (lambda r: setattr(r.checks[2], "detail", SKIPS.replace("of 2048", "of 20")), "10 differ, more than 0.79% of 20"),
    (lambda r: r.checks.pop(1), "has no check 'reference'"),
    (lambda r: r.checks.clear(), "has no check 'reference'"),
    (lambda r: setattr(r.checks[1], "verdict", Verdict.FAILED), "reference: stored FAILED, rejudged PASSED: every margin is at most 1"),
    (lambda r: setattr(r, "verdict", Verdict.FAILED), "the record: stored FAILED, but the worst of its checks is PASSED"),
])
def test_a_record_that_was_changed_is_found(change: Callable[[Record], Any], told: str) -> None:
    record = passing()
    change(record)
    found = again(record)
    assert any(told in line for line in found.told), found.told


@pytest.mark.parametrize(("promise", "fails"), [(PROMISE, False), ("bitwise", True), ("", True), (PROMISE.replace("511", "399"), True),
                                                (PROMISE.replace("0.78%", "0.00%"), True), (PROMISE.replace("1 bf16", "2 bf16"), False)])
def test_what_differs_is_held_against_the_promise(promise: str, fails: bool) -> None:
    assert (again(passing(), promise).now.verdict is Verdict.FAILED) is fails


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.CRASHED, Verdict.TIMEOUT, Verdict.OOM, Verdict.ERROR])
def test_a_verdict_that_no_number_holds_stands(verdict: Verdict) -> None:
    """An exception, a signal, a hang: also one that came while the arm was timed, when its checks had passed."""
    assert again(Record(TINY, "k/none", verdict, "it ended")).now.verdict is verdict
    assert again(dataclasses.replace(passing(), verdict=verdict, detail="it ended")).now.verdict is verdict


def test_a_failure_that_was_called_a_pass_is_found() -> None:
    record = passing()
    record.checks[1].verdict = Verdict.FAILED
    record.checks[1].bad, record.checks[1].margins["out"] = 2, 3.0
    assert again(record).now.verdict is Verdict.FAILED  # the record said PASSED
    assert not again(dataclasses.replace(record, verdict=Verdict.FAILED)).differs


def test_vacuous_and_skipped_stay() -> None:
    vacuous = passing()
    vacuous.verdict = vacuous.checks[1].verdict = Verdict.VACUOUS
    skipped = Record(TINY, "k/none", Verdict.SKIPPED, "no GPU")
    assert not again(vacuous).differs and not again(skipped).differs


def test_a_campaign_keeps_no_checks_of_what_passed() -> None:
    record = Record(TINY, "k/none", Verdict.PASSED)
    assert record_again(record, {}, campaign=True).now.verdict is Verdict.PASSED
    assert record_again(record, {}).now.verdict is Verdict.ERROR


# --- gates ------------------------------------------------------------------------------------------------------------


def gate() -> GateFolder:
    return GateFolder.load(EVIDENCE / "gates" / "slow")


def test_a_time_that_was_called_otherwise_is_found() -> None:
    folder = gate()
    slower = next(found for found in folder.transitions if found.time and found.time.verdict is TimeVerdict.SLOWER)
    assert slower.time
    slower.time.verdict = TimeVerdict.SAME
    [line] = gate_again(folder)
    assert line.startswith("time stored SAME, rejudged SLOWER") and slower.pairing.case in line
    assert next(f.time for f in folder.transitions if f.pairing == slower.pairing).verdict is TimeVerdict.SLOWER  # type: ignore[union-attr]


def test_samples_that_were_changed_are_found() -> None:
    folder = gate()
    time = folder.transitions[0].time
    assert time
    for rounds in [*time.processes, *time.confirming]:
        for each in rounds:
            for burst in each.bursts:
                if burst.side == "candidate":
                    burst.us = [0.98 * us for us in burst.us]
    [line] = gate_again(folder)
    assert "time stored SLOWER, rejudged" in line


def test_an_interval_that_was_changed_is_found() -> None:
    time = gate().transitions[0].time
    assert time and time.estimate
    time.estimate.low *= 0.99
    now, why = time_again(time)
    assert "the stored interval is not that of the samples" in why and now.estimate != time.estimate
    pairs = [(gate().transitions[0].pairing, time)]
    assert len(pairs_again(pairs)) == 1 and not pairs_again(pairs)  # put right


def test_a_time_below_the_speed_of_light_is_invalid() -> None:
    time = gate().transitions[0].time
    assert time and time_again(time)[0].verdict is TimeVerdict.SLOWER
    time.least_us, time.least_of = 1e9, "bytes"
    assert time_again(time)[0].verdict is TimeVerdict.INVALID
    died = dataclasses.replace(time, least_us=0.0, verdict=TimeVerdict.INVALID, why="a side ended")
    assert (time_again(died)[0].verdict, time_again(died)[0].why) == (TimeVerdict.INVALID, "a side ended")


def test_a_transition_that_was_called_otherwise_is_found() -> None:
    folder = GateFolder.load(EVIDENCE / "gates" / "change")
    folder.transitions[3].change = Change.SAME
    [line] = gate_again(folder)
    assert line.startswith("stored bitwise same, rejudged promise changed")
    other = gate()
    record = other.sides["candidate"].records[0]
    record.outputs = {**record.outputs, "out": "0" * 16}
    assert [line for line in gate_again(other) if line.startswith("stored bitwise same, rejudged numbers changed")]


# --- saved outputs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its outputs: three arms of one family, one of the other."""
    runs = tmp_path_factory.mktemp("runs")
    done = threearm("run", TINY, TINY_TOPK, "--arm", "torch_blocks", "--arm", "litetopk_torch", "--time", "none", "--save-outputs",
                    "--runs", str(runs), seconds=120)
    assert done.code == 0, done.text
    [folder] = runs.iterdir()
    return folder


def rejudged(folder: Path, *words: str) -> Done:
    return threearm("report", str(folder), "--rejudge", *words, seconds=120)


def test_outputs_are_judged_anew_and_what_was_changed_is_told(saved: Path, tmp_path: Path) -> None:
    """One look at a folder in which every arm was changed in another way."""
    assert (first := rejudged(saved)).code == 0, first.text
    assert "rejudged" in first.text and "4 records; by today's rules all is as it was stored" in first.text
    changed = tmp_path / "changed"
    shutil.copytree(saved, changed)
    folder = RunFolder.load(changed)
    none, backscan, metadata, topk = folder.records
    files = {record.arm: folder.output_file(record) for record in folder.records}

    def spoil(record: Record, name: str, value: float, told: bool) -> None:
        """Write another first element into the file; told: and its fingerprint into the record, as an arm would have it that lies."""
        path = str(files[record.arm])
        tensors, about = read(path)
        tensors[name].view(-1)[0] = value
        write(path, tensors, about)
        if told:
            record.outputs[name] = digest(tensors[name])

    spoil(none, "lse", 3.5, told=False)
    spoil(backscan, "out", 100.0, told=True)
    metadata.inputs["kv"] = "0" * 16
    tensors, _ = read(str(files[topk.arm]))
    unused = next(key for key in range(40) if key not in tensors["indices"][0].tolist())
    spoil(topk, "indices", float(unused), told=True)
    topk.outputs["set"] = digest(read(str(files[topk.arm]))[0]["indices"].sort(1).values)
    lines = [json.dumps(dataclasses.asdict(record)) for record in folder.records]
    (changed / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    before = {path: path.read_bytes() for path in changed.rglob("*") if path.is_file()}
    done = rejudged(changed, "--failures")
    assert done.code == 1, done.text
    text = "\n".join(done.lines)
    assert f"not judged: {none.arm}  {none.case}" in text and "not what the record has: lse" in text
    assert f"not judged: {metadata.arm}  {metadata.case}: the case makes other inputs here than the record's: kv" in text
    assert f"stored PASSED, rejudged FAILED  {backscan.arm}" in text
    assert "reference: stored PASSED, rejudged FAILED: over budget: out" in text
    assert f"stored PASSED, rejudged FAILED  {topk.arm}" in text
    assert "FAILED   reference" in text  # --failures shows it as any failure
    assert {path: path.read_bytes() for path in before} == before, "the stored folder is not changed"


def test_a_changed_budget_changes_the_verdict(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.load(saved)
    record = folder.records[0]
    tensors = rejudging.saved_outputs(str(folder.output_file(record)), {"case": record.case, "arm": record.arm}, record.outputs, {})
    inputs = inputs_of(record.case)
    expected = expected_of(record.case)
    [check, *_] = rejudging.judge(inputs, expected, tensors, record.kernel)
    assert (check.name, check.verdict) == ("reference", Verdict.PASSED)
    assert check.margins == pytest.approx(record.checks[[c.name for c in record.checks].index("reference")].margins)
    strict = dataclasses.replace(expected, out_budget=expected.out_budget / 100)
    [check, *_] = rejudging.judge(inputs, strict, tensors, record.kernel)
    assert check.verdict is Verdict.FAILED
    found = record_again(record, {"promise": "bitwise"}, [check])
    assert found.now.verdict is Verdict.FAILED and "margins out" in found.told[0]


def test_outputs_of_another_record_are_refused(saved: Path) -> None:
    folder = RunFolder.load(saved)
    record, other = folder.records[:2]
    path = str(folder.output_file(record))
    with pytest.raises(rejudging.Refused, match=f"is of arm {record.arm}"):
        rejudging.saved_outputs(path, {"case": other.case, "arm": other.arm}, other.outputs, {})
    with pytest.raises(rejudging.Refused, match="not what the record has: out, max_logits"):
        rejudging.saved_outputs(path, {}, {**record.outputs, "out": "0" * 16, "max_logits": "1" * 16}, {})
    topk = folder.records[3]
    with pytest.raises(rejudging.Refused, match="not what the record has: status"):
        rejudging.saved_outputs(str(folder.output_file(topk)), {}, topk.outputs, {"failed": 1})
    with pytest.raises(rejudging.Refused, match="how gone sums is not known here"):
        rejudging.judge(object(), None, {"indices": torch.zeros(1)}, "gone")


def test_a_verdict_on_values_that_rests_on_own_scores_is_not_lifted() -> None:
    own = Check("values", Verdict.FAILED, "3 of 4 values are not the scores of their keys", {"values": 0.5}, bad=3, total=4,
                first=["[row 0, entry 0, key 1] want 1, value 1, budget 0.1, own score 1.00000012"])
    fresh = Check("values", Verdict.PASSED, "within their bounds", {"values": 0.5}, total=4)
    record = Record(TINY_TOPK, "k/litetopk", Verdict.FAILED, checks=[Check("shape", Verdict.PASSED), own])
    assert record_again(record, {}, [fresh]).now.verdict is Verdict.FAILED
    record.checks[1] = dataclasses.replace(own, first=["[row 0, entry 0, key 1] want 1, value 3, budget 0.1"])
    assert record_again(record, {}, [fresh]).now.verdict is Verdict.PASSED
