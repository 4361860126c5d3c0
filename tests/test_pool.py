"""The pool: outcomes of many jobs, a death that costs one of them, groups apart, an early end that leaves nothing behind."""
from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import MARK, left_behind, marked, new_mark

from harness.asking import Settings
from harness.client import Unfit, WorkerOptions
from harness.pool import Job, Outcome, Pool
from harness.verdicts import Verdict

FAULTY = Path(__file__).parent / "faulty"
TINY = "sparse_prefill:s_q=3,s_kv=128,h_q=2,topk=64"
SEGFAULT = "sparse_prefill:s_q=11,s_kv=128,h_q=2,topk=64"
SEEDS = [f"{TINY},seed={seed}" for seed in range(6)]
SOURCES = ("none", "backscan", "metadata")


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """This test's workers carry it. None may be left."""
    mark = new_mark()
    monkeypatch.setenv(MARK, mark)
    yield mark
    assert left_behind(mark, 1.0) == []


def workers(mark: str) -> int:
    return len(marked(mark).keys() - {os.getpid()})


def options(*files: str, device: str = "cpu") -> WorkerOptions:
    return WorkerOptions(device, False, tuple(str(FAULTY / file) for file in files), 8 << 30, sys.executable, ("OMP_NUM_THREADS=1",))


def verdicts(outcome: Outcome) -> list[Verdict]:
    return [record.verdict for record in outcome.records]


def test_every_job_has_an_outcome_and_a_death_costs_one_job(mark: str) -> None:
    jobs = [Job(case, "torch_blocks", SOURCES) for case in SEEDS]
    jobs.insert(2, Job(SEGFAULT, "deadly", SOURCES))
    with Pool(options("deadly.py"), Settings(timeout=4.0), 2) as pool:
        found = {outcome.job: outcome for outcome in pool.run(jobs)}
        assert set(found) == set(jobs)
        for job, outcome in found.items():
            assert {record.source for record in outcome.records} == set(SOURCES)
            assert verdicts(outcome).count(Verdict.CRASHED) == (job.kernel == "deadly")
            assert verdicts(outcome).count(Verdict.PASSED) == len(SOURCES) - (job.kernel == "deadly")
        again = pool.one(jobs[0])
        assert again.records[0].outputs == found[jobs[0]].records[0].outputs
        assert workers(mark) == 2
    assert workers(mark) == 0


def test_groups_have_workers_of_their_own(mark: str) -> None:
    with Pool(options(), Settings(), 1) as pool:
        jobs = [Job(case, "torch_blocks", ("none",), group) for case, group in zip(SEEDS[:4], itertools.cycle("ab"))]
        assert sum(len(outcome.records) for outcome in pool.run(jobs)) == 4
        assert workers(mark) == 2


def test_leaving_early_ends_what_is_under_way(mark: str) -> None:
    taken: list[int] = []

    def endless() -> Iterator[Job]:
        for seed in itertools.count():
            taken.append(seed)
            yield Job(f"{TINY},seed={seed}", "torch_blocks", ("none",))

    with Pool(options(), Settings(), 2) as pool:
        for _ in zip(range(3), pool.run(endless())):
            pass
        assert len(taken) < 20
    assert workers(mark) == 0


def test_an_environment_that_is_unfit_is_told() -> None:
    with Pool(options(device="cuda:99"), Settings(), 1) as pool, pytest.raises(Unfit, match="cuda:99"):
        list(pool.run([Job(TINY, "torch_blocks", ("none",))]))
