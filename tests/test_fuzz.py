"""The campaign: what fails is found, confirmed and shrunk, whatever becomes of workers; what differs from itself is told as such."""
from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import TINY_TOPK, invoke, left_behind, new_mark, start, threearm

from arms.kernel import KERNELS, load_package
from cases import IndexerTopkCase, SparsePrefillCase, parse_case
from harness import availability, fuzz_command
from harness.drawing import Batch, draw, shrink
from harness.fuzz import Campaign, Finding, Plan, Source, brings_in, leads, signatures
from harness.pool import Job, Outcome
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo
from harness.verdicts import Check, Verdict

load_package("arms.sparse_prefill")
load_package("arms.indexer_topk")
PLAN = Plan("cpu", 1e9, stop_after=1)
Judge = Callable[[Any, str], tuple[Verdict, str]]


def kernel(name: str) -> dict[str, Any]:
    """A kernel as a worker describes it, as far as the campaign looks."""
    found = KERNELS[name]
    return {"name": name, "family": found.family, "arms": list(found.arms), "fits": dataclasses.asdict(availability.fits(found))}


class Fake:
    """A pool in which a function says what becomes of an arm on a case: a verdict and the name of the check."""

    def __init__(self, judge: Judge) -> None:
        self.judge, self.ran = judge, 0

    def one(self, job: Job) -> Outcome:
        self.ran += 1
        case, records = parse_case(job.case), []
        for arm in job.arms:
            verdict, name = self.judge(case, arm)
            checks = [Check("reference", Verdict.PASSED, margins={"out": 0.1})]
            if verdict is Verdict.CRASHED:
                records.append(Record(job.case, f"{job.kernel}/{arm}", verdict, f"signal SIGSEGV in phase {name}; last output: boo"))
                continue
            records.append(Record(job.case, f"{job.kernel}/{arm}", verdict, checks=[*checks, Check(name, verdict)], outputs={"out": "00"}))
        return Outcome(job, records, 0.0)

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome]:
        for job in jobs:
            yield self.one(job)


def campaign(judge: Judge, name: str = "torch_blocks", plan: Plan = PLAN) -> Campaign:
    """A campaign that has ended."""
    found = Campaign(plan, [kernel(name)], Fake(judge), lambda record: None, lambda campaign: None)
    found.run()
    return found


def long_and_ragged(case: SparsePrefillCase, arm: str) -> tuple[Verdict, str]:
    bad = arm == "metadata" and case.topk > 128 and case.rows == "ragged"
    return (Verdict.FAILED, "lengths") if bad else (Verdict.PASSED, "lengths")


def told(found: Finding) -> str:
    return "\n".join(fuzz_command.told(found, 0, lambda record: []))


def test_a_failure_is_shrunk_to_a_line_that_repeats_it() -> None:
    done = campaign(long_and_ragged)
    assert [finding.signature for finding in done.findings] == [("torch_blocks/metadata", "lengths")]
    smallest = "sparse_prefill:s_q=1,s_kv=1,h_q=1,topk=129,rows=ragged"
    assert done.findings[0].smallest.job.case == smallest and done.findings[0].tried > 5 and not done.findings[0].differs
    text = told(done.findings[0])
    assert f"FAILED  torch_blocks/metadata  {smallest}\n" in text
    assert f"repeat: threearm replay {smallest} --arm torch_blocks/metadata" in text
    assert f"cases tried\n  as drawn: FAILED lengths  \n    repeat: threearm replay {done.findings[0].drawn.job.case} --arm" in text
    assert (fuzz_command.exit_code(done, False), done.failed) == (1, done.failed) and done.failed >= 1


def test_a_crash_is_an_outcome_like_any_other() -> None:
    def judge(case: IndexerTopkCase, arm: str) -> tuple[Verdict, str]:
        return (Verdict.CRASHED, "first launch") if case.ties == "far" and case.s_kv > 100 else (Verdict.PASSED, "set")

    done = campaign(judge, "litetopk_torch")
    assert done.findings[0].signature == ("litetopk_torch/litetopk", "CRASHED in phase first launch")
    smallest = parse_case(done.findings[0].smallest.job.case)
    assert isinstance(smallest, IndexerTopkCase) and (smallest.ties, smallest.num_q, smallest.topk) == ("far", 1, 1)
    assert 100 < smallest.s_kv < 130 and "signal SIGSEGV" in told(done.findings[0])


def test_what_differs_from_itself_is_flaky_and_shown_with_both_runs() -> None:
    failed: list[str] = []

    def once(case: SparsePrefillCase, arm: str) -> tuple[Verdict, str]:
        if case.topk > 128 and not failed:
            failed.append(str(case))
            return Verdict.FAILED, "reference"
        return Verdict.PASSED, "reference"

    done = campaign(once)
    assert [finding.shrunk for finding in done.findings] == [None] and done.findings[0].drawn.job.case == failed[0]
    text = told(done.findings[0])
    assert "FLAKY: the same case twice: torch_blocks/" in text and " was FAILED, then PASSED. The second run:\n  everything PASSED" in text
    assert "as drawn" in text


def test_other_bytes_are_flaky_as_well_and_are_shrunk_all_the_same() -> None:
    runs = iter(range(10**6))
    fake = Fake(lambda case, arm: (Verdict.FLAKY, "run-to-run") if case.topk > 128 else (Verdict.PASSED, "run-to-run"))
    one = fake.one

    def other_bytes(job: Job) -> Outcome:
        outcome = one(job)
        for record in outcome.records:
            record.outputs = {"out": f"{next(runs)}"}
        return outcome

    fake.one = other_bytes  # type: ignore[method-assign]
    done = Campaign(PLAN, [kernel("torch_blocks")], fake, lambda record: None, lambda campaign: None)
    done.run()
    assert done.findings[0].smallest.job.case == "sparse_prefill:s_q=1,s_kv=1,h_q=1,topk=129"
    assert ": out was " in done.findings[0].differs


def test_shrinking_ends_when_its_time_is_over() -> None:
    def slow(case: SparsePrefillCase, arm: str) -> tuple[Verdict, str]:
        if case.topk > 128:
            time.sleep(0.2)
            return Verdict.FAILED, "reference"
        return Verdict.PASSED, "reference"

    begun = time.monotonic()
    done = campaign(slow, plan=dataclasses.replace(PLAN, shrink_seconds=0.5))
    assert time.monotonic() - begun < 20 and done.findings[0].tried <= 5
    again = campaign(lambda case, arm: (Verdict.FAILED if case.topk > 128 else Verdict.PASSED, "reference"),
                     plan=dataclasses.replace(PLAN, shrink_seconds=0.0))
    assert (again.findings[0].tried, again.findings[0].shrunk) == (0, None)


def test_each_way_to_fail_is_told_once() -> None:
    def judge(case: SparsePrefillCase, arm: str) -> tuple[Verdict, str]:
        if case.topk == 1:
            return Verdict.FAILED, "written"
        return (Verdict.FAILED, "lengths") if case.rows == "ragged" else (Verdict.VACUOUS, "reference")

    done = campaign(judge, plan=dataclasses.replace(PLAN, stop_after=2, shrink_seconds=0.0))
    assert len({finding.signature[1] for finding in done.findings}) == 2 and done.failed >= 2
    assert signatures(done.findings[0].drawn)[0] == done.findings[0].signature


def test_cases_follow_from_the_seed_and_the_kernel_alone() -> None:
    first, other = (Source(kernel("torch_dense"), Plan("cpu", 1, seed=seed)).jobs() for seed in (3, 4))
    batch = Source(kernel("torch_dense"), Plan("cpu", 1, seed=3)).first
    assert [next(first).case for _ in range(40)] == draw(batch)[:40] != [next(other).case for _ in range(40)]
    assert draw(dataclasses.replace(batch, kernel="another")) != draw(batch)


def test_a_source_goes_on_after_a_batch_and_gives_no_case_twice() -> None:
    source = Source(kernel("torch_blocks"), PLAN)
    jobs = source.jobs()
    found = [next(jobs) for _ in range(150)]
    assert len({job.case for job in found}) == 150 and {batch.number for batch in source.origin.values()} >= {0, 1}
    assert {job.group for job in found} == {"torch_blocks"} and ("metadata",) in {job.arms for job in found}  # tail=live


def test_shrinking_what_does_not_fail_finds_nothing() -> None:
    source = Source(kernel("torch_blocks"), PLAN)
    assert shrink(Batch("sparse_prefill", source.fits, 1 << 10, 0, "k", 0), lambda text: False) is None


def test_what_was_found_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fuzz_command, "CORPUS", tmp_path)
    done = campaign(long_and_ragged)
    for _ in range(2):
        fuzz_command.saved(done.findings, 7, "", {})
    comment, case = (tmp_path / "sparse_prefill.txt").read_text(encoding="utf-8").splitlines()
    assert comment.endswith(" torch_blocks/metadata, lengths: found by threearm fuzz --seed 7") and comment.startswith("# 2")
    assert case == done.findings[0].smallest.job.case and capsys.readouterr().out.count("saved: ") == 1
    fuzz_command.saved(done.findings, 7, "-gpu", {"torch_blocks": " --load my.py"})
    assert (tmp_path / "sparse_prefill-gpu.txt").read_text(encoding="utf-8").splitlines()[0].endswith("--seed 7 --load my.py")


def test_records_of_passes_are_written_short_and_not_kept() -> None:
    folder = RunFolder(None, RunInfo("", [], [], [], {}, {}))
    checks = [Check("reference", Verdict.PASSED, "long", {"out": 0.5}), Check("written", Verdict.PASSED, "every element")]
    fuzz_command.keep(folder, Record("c", "k/none", Verdict.PASSED, checks=checks))
    assert folder.records == []
    fuzz_command.keep(folder, Record("c", "k/none", Verdict.FAILED, checks=checks))
    assert folder.records[0].checks == checks


@pytest.mark.parametrize(("arguments", "message"), [
    (["--time", "soon"], "--time soon: allowed is a number with s, m or h, for example 10m"),
    (["--time", "30"], "--time 30: allowed is a number with s, m or h, for example 10m"),
    (["--family", "dense"], "--family dense: families are sparse_prefill, indexer_topk")])
def test_a_wrong_option_is_one_line(arguments: list[str], message: str) -> None:
    done = invoke("fuzz", *arguments)
    assert done.code == 2 and message in done.text


def test_a_broken_kernel_is_found_and_its_line_repeats_it(tmp_path: Path) -> None:
    done = threearm("fuzz", "--arm", "broken_drops_one_member", "--time", "30s", "--shrink-time", "1s", "--stop-after", "1",
                    "--workers", "1", "--runs", str(tmp_path))
    assert done.code == 1, done.text
    repeat = next(line for line in done.lines if line.startswith("  repeat: threearm replay"))
    assert "FAILED   shape" in done.text and "found by threearm fuzz --seed 0" in done.text and " failed, in 1 way\n" in done.text
    assert repeat.split()[3].startswith("indexer_topk:")
    folder = next(tmp_path.iterdir())
    assert threearm("report", str(folder)).code == 1


def test_an_interrupt_ends_it_with_its_summary(tmp_path: Path) -> None:
    mark = new_mark()
    process = start(["fuzz", "--arm", "torch_dense", "--workers", "1", "--runs", str(tmp_path)], mark)
    until = time.monotonic() + 60
    while time.monotonic() < until and not list(tmp_path.glob("*/records.jsonl")):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 130, text
    assert "interrupted: " in text and " a second (" in text and left_behind(mark) == []
    assert "no case failed\nreached: indexer_topk: rows up to " in text and "records: " in text and "Traceback" not in text


def test_an_interrupt_while_a_failure_is_shrunk_tells_the_smallest_so_far(tmp_path: Path) -> None:
    mark = new_mark()
    process = start(["fuzz", "--arm", "broken_sees_the_future", "--workers", "1", "--shrink-time", "5m", "--runs", str(tmp_path)], mark)
    until = time.monotonic() + 60
    while time.monotonic() < until and not any('"FAILED"' in path.read_text() for path in tmp_path.glob("*/records.jsonl")):
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 1, text
    assert "FAILED  broken_sees_the_future/litetopk  indexer_topk:" in text and "  repeat: threearm replay indexer_topk:" in text
    assert "found by threearm fuzz --seed 0: " in text and "\ninterrupted: " in text and "Traceback" not in text
    folder = next(tmp_path.iterdir())
    assert f"threearm report {folder} --failures" in text and left_behind(mark) == []


def interrupted(after: int) -> Campaign:
    """A campaign that is interrupted at its launch of that number after the first that failed."""
    failed: list[str] = []

    def judge(case: SparsePrefillCase, arm: str) -> tuple[Verdict, str]:
        if failed or case.topk > 128:
            failed.append(str(case))
        if len(failed) > after:
            raise KeyboardInterrupt
        return (Verdict.FAILED if case.topk > 128 else Verdict.PASSED), "reference"

    one_arm = {**kernel("torch_blocks"), "arms": ["none"]}
    done = Campaign(dataclasses.replace(PLAN, stop_after=0), [one_arm], Fake(judge), lambda record: None, lambda campaign: None)
    with pytest.raises(KeyboardInterrupt):
        done.run()
    return done


def test_what_was_found_survives_an_interrupt() -> None:
    at_once, later = interrupted(1).findings, interrupted(12).findings
    assert [(finding.interrupted, finding.shrunk) for finding in at_once] == [(True, None)]
    assert "as drawn, interrupted before it was run again" in told(at_once[0])
    assert later[0].shrunk and later[0].tried > 5 and signatures(later[0].shrunk) == [later[0].signature]
    assert "cases tried, interrupted while it was being shrunk\n  as drawn: FAILED reference" in told(later[0])


def test_shrinking_stays_with_the_first_check_and_brings_nothing_hostile_in() -> None:
    wrong = [("k/none", "values"), ("k/none", "set"), ("k/metadata", "set")]
    assert leads(("k/none", "values"), wrong) and leads(("k/metadata", "set"), wrong)
    assert not leads(("k/none", "set"), wrong) and not leads(("k/backscan", "set"), wrong)
    tame, hostile = parse_case("sparse_prefill:tail=pad"), parse_case("sparse_prefill:tail=wild,values=poison")
    assert brings_in(hostile, tame) and not brings_in(tame, hostile) and not brings_in(hostile, hostile)
    assert brings_in(parse_case("indexer_topk:values=nan"), parse_case("indexer_topk:values=inf"))
    assert brings_in(parse_case("sparse_prefill:tail=live"), hostile)


def test_a_shrunk_failure_shows_where_it_was_as_drawn() -> None:
    found = campaign(long_and_ragged).findings[0]
    drawn = next(record for record in found.drawn.records if record.arm == found.signature[0])
    drawn.checks[-1] = dataclasses.replace(drawn.checks[-1], where=["rows 5..9", "heads all", "pattern", "more"])
    assert "  as drawn: FAILED lengths  \n             where: rows 5..9\n             where: heads all\n" in told(found)


def test_what_comes_down_to_a_case_that_is_told_is_one_line_and_one_way() -> None:
    done = campaign(long_and_ragged)
    again = dataclasses.replace(done.findings[0], signature=("torch_blocks/metadata", "another"))
    done.findings.append(again)
    text = fuzz_command.all_told(done.findings, 0, lambda record: [])
    assert [line for line in text if "shrunk to the case above" in line] == [
        f"FAILED  torch_blocks/metadata, another: shrunk to the case above, {again.shown[1]}, from {again.drawn.job.case}"]
    assert done.ways == 1 and "\n".join(text).count("repeat: ") == 2
    assert "failed, in 1 way\nreached: sparse_prefill: rows up to " in fuzz_command.summary(done)


def test_a_summary_of_nothing_says_so() -> None:
    done = campaign(long_and_ragged, plan=dataclasses.replace(PLAN, seconds=0.0))
    assert fuzz_command.summary(done) == "nothing ran" and fuzz_command.exit_code(done, False) == 5


def test_a_broken_kernel_is_suggested_by_its_short_name() -> None:
    done = threearm("fuzz", "--arm", "negated")
    assert done.code == 2 and "unknown kernel 'negated': did you mean 'broken_negated'?" in done.text


def test_one_draw_in_eight_has_more_work_on_a_cpu() -> None:
    assert (PLAN.rarely, Plan("cuda", 1).rarely, Plan("cpu", 1, work=99).rarely) == (16, 1, 1)
    for name in ("torch_blocks", "torch_dense"):
        batches = [dataclasses.replace(Source(kernel(name), PLAN).first, number=number) for number in range(4)]
        cases = [parse_case(text) for batch in batches for text in draw(batch)]
        usual = PLAN.work_of(cases[0].family) * (2 * (576 + 512) if cases[0].family == "sparse_prefill" else 256)
        assert 1 / 100 < sum(case.work > usual for case in cases) / len(cases) < 1 / 5 and max(case.work for case in cases) <= 16 * usual


def test_tiny_case_is_what_sources_can_make() -> None:
    job = Source(kernel("torch_dense"), PLAN).job(TINY_TOPK)
    assert job == Job(TINY_TOPK, "torch_dense", ("dense",), "torch_dense")
