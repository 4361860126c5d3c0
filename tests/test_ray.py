"""Campaigns over a Ray cluster, here one of this machine's own: the same findings, a lost actor that costs nothing, nothing left behind."""
from __future__ import annotations

import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import FAULTY, MARK, TINY, invoke, left_behind, marked, new_mark, start

from arms.kernel import load_package
from harness import ray_pool
from harness.asking import Settings
from harness.client import Unfit, WorkerOptions
from harness.fuzz import Campaign, Plan, signatures
from harness.pool import Job, Outcome, Pool
from harness.ray_cluster import device_of, first_line, last_line, staged
from harness.ray_pool import RayPool
from harness.runfolder import RunFolder
from harness.verdicts import Verdict

load_package("arms.sparse_prefill")
SEEDS = [Job(f"{TINY},seed={seed}", "torch_blocks", ("none",), "torch_blocks") for seed in range(8)]
SEGFAULT = Job("sparse_prefill:s_q=11,s_kv=128,h_q=2,topk=64", "deadly", ("none", "metadata"), "deadly")
OPTIONS = WorkerOptions("auto", True, (str(FAULTY / "deadly.py"),), 0, "/nowhere/python")


class Told(list[str]):
    """What the pool told."""


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """Carried by everything that Ray starts for this module."""
    mark = new_mark()
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    yield mark
    os.environ.pop(MARK)
    if before is not None:
        os.environ[MARK] = before
    left = left_behind(mark, 10.0)
    assert [line for line in left if "pytest" not in line] == []


@pytest.fixture(scope="module")
def told() -> Told:
    return Told()


@pytest.fixture(scope="module")
def pool(mark: str, told: Told) -> Iterator[RayPool]:
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    made = RayPool(OPTIONS, Settings(timeout=20.0), 2, "local", told.append)
    try:
        made.join()
    except Unfit as error:
        pytest.skip(f"ray cannot start here: {error}")
    with made:
        yield made


def actors(pool: RayPool) -> list[int]:
    """Process ids of the actors that are there."""
    members = [*pool.idle, *(member for member, _ in pool.busy.values())]
    return [int(member.where.rpartition(" ")[2]) for member in members]


def pid_at_work(pool: RayPool) -> int:
    return int(next(iter(pool.busy.values()))[0].where.rpartition(" ")[2])


def test_nodes_run_the_code_that_was_sent_and_name_themselves(pool: RayPool) -> None:
    described = pool.describe(pool.options, [TINY])
    assert described["device"] == "cpu" and {"torch_blocks", "deadly"} <= {kernel["name"] for kernel in described["kernels"]}
    assert pool.probe(pool.options, Path(os.devnull), "torch_blocks") == ("", "")
    assert pool.options.load == ("loaded/0/deadly.py",) and len(actors(pool)) >= 1 and pool.about.startswith("ray ")


def test_every_job_has_an_outcome_and_a_death_costs_one(pool: RayPool, tmp_path: Path) -> None:
    pool.log = tmp_path / "worker.log"
    found = {outcome.job: outcome for outcome in pool.run([*SEEDS[:3], SEGFAULT, *SEEDS[3:]])}
    assert set(found) == {*SEEDS, SEGFAULT} and pool.losses == 0
    verdicts = [record.verdict for record in found[SEGFAULT].records]
    assert verdicts.count(Verdict.CRASHED) == 1 and len(verdicts) == 2
    assert {record.verdict for job in SEEDS for record in found[job].records} == {Verdict.PASSED}


def test_a_lost_actor_is_replaced_and_its_case_run_again(pool: RayPool, told: Told) -> None:
    told.clear()
    killed, found = 0, []
    for outcome in pool.run(SEEDS * 2):
        found.append(outcome)
        if not killed and pool.busy:
            killed = pid_at_work(pool)
            os.kill(killed, signal.SIGKILL)
    assert len(found) == 2 * len(SEEDS) and {record.verdict for outcome in found for record in outcome.records} == {Verdict.PASSED}
    assert pool.losses == 1 and len(told) == 1 and f"pid {killed}: " in told[0] and "is run again on another" in told[0]
    while len(actors(pool)) < 2:
        pool._next()
    assert killed not in actors(pool)


def test_a_case_that_loses_two_actors_is_an_error(pool: RayPool, told: Told) -> None:
    told.clear()
    pool.lost_once.add(SEEDS[0])
    outcomes = pool.run([SEEDS[0]])
    kill = pool._next

    def killing() -> Any:
        if pool.busy:
            os.kill(pid_at_work(pool), signal.SIGKILL)
        return kill()

    pool._next = killing  # type: ignore[method-assign]
    found = next(iter(outcomes))
    pool._next = kill  # type: ignore[method-assign]
    assert [record.verdict for record in found.records] == [Verdict.ERROR] and "two actors were lost in it" in found.records[0].detail
    assert "the second time with torch_blocks" in told[-1]


def comparable(outcome: Outcome) -> list[tuple[Any, ...]]:
    return [(record.arm, record.verdict, record.inputs, record.outputs, [(check.name, check.verdict) for check in record.checks])
            for record in outcome.records]


def test_a_campaign_finds_what_the_local_pool_finds(pool: RayPool) -> None:
    kernel = next(each for each in pool.describe(pool.options, [])["kernels"] if each["name"] == "broken_drops_one_member")
    plan = Plan("cpu", 30, work=1024, stop_after=1, shrink_seconds=0.0)
    campaign = Campaign(plan, [kernel], pool, lambda record: None, lambda campaign: None)
    campaign.run()
    found = campaign.findings[0]
    with Pool(WorkerOptions("cpu", True, (), 8 << 30, sys.executable, ("OMP_NUM_THREADS=1",)), Settings(), 1) as here:
        ours = here.one(found.drawn.job)
    assert found.signature == signatures(ours)[0] and found.signature[0] == "broken_drops_one_member/litetopk"
    assert comparable(ours) == comparable(found.drawn) == comparable(found.again)


def test_an_interrupt_ends_the_campaign_and_the_cluster(tmp_path: Path, pool: RayPool) -> None:
    mark = new_mark()
    process = start(["fuzz", "--executor", "ray", "--arm", "torch_dense", "--workers", "1", "--runs", str(tmp_path)], mark)
    until = time.monotonic() + 60
    while time.monotonic() < until and not list(tmp_path.glob("*/records.jsonl")) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted: " in text and "no case failed" in text and "Traceback" not in text, text
    assert left_behind(mark, 10.0) == [] and not marked(mark)
    assert "1 nodes" in RunFolder.load(next(tmp_path.iterdir())).info.machine["cluster"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--executor", "dask"], "--executor dask: allowed is local | ray"),
    (["--ray-address", "auto"], "--ray-address auto: only with --executor ray"),
    (["--executor", "ray", "--device", "cuda:1"], "--device cuda:1: Ray gives each actor a GPU, allowed is auto | cpu | cuda")])
def test_a_wrong_option_is_one_line(arguments: list[str], message: str) -> None:
    done = invoke("fuzz", *arguments)
    assert done.code == 2 and message in done.text


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unfit, match="pip install ray"):
        RayPool(OPTIONS, Settings(), 1, "local", print).join()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_no_cluster_is_ends_it_at_once(address: str) -> None:
    begun = time.monotonic()
    with pytest.raises(Unfit, match=f"--ray-address {address}: .*refused"):
        RayPool(OPTIONS, Settings(), 1, address, print).join()
    assert time.monotonic() - begun < 10


def test_the_device_follows_from_the_cluster() -> None:
    assert device_of("auto", {"CPU": 8}) == "cpu" and device_of("auto", {"GPU": 2, "accelerator_type:H200": 1}) == "cuda"
    assert device_of("cpu", {"GPU": 2}) == "cpu"
    with pytest.raises(Unfit, match="--device cuda: the cluster has no GPU"):
        device_of("cuda", {"CPU": 8})
    with pytest.raises(Unfit, match=r"several models.*B200, H200"):
        device_of("cuda", {"GPU": 2, "accelerator_type:H200": 1, "accelerator_type:B200": 1})


def test_what_is_sent_is_what_a_worker_needs(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    assert staged(folder, (str(FAULTY / "slow.py"),)) == ("loaded/0/slow.py",)
    assert {path.name for path in folder.iterdir()} == {"arms", "cases", "harness", "references", "loaded"}
    assert (folder / "loaded/0/late.py").is_file() and not list(folder.rglob("__pycache__"))


class NoCluster(types.ModuleType):
    """A stand-in for ray in which no actor can be started."""

    exceptions = types.SimpleNamespace(RayError=RuntimeError, RayTaskError=KeyError, RayActorError=OSError)

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return refs[:1], refs[1:]

    def get(self, ref: Any) -> Any:
        raise RuntimeError("The actor died\n  ModuleNotFoundError: No module named 'torch'")


def test_actors_that_cannot_start_end_it_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    pool = RayPool(OPTIONS, Settings(), 1, "local", told.append)
    pool.ray = NoCluster("ray")
    monkeypatch.setattr(pool, "_start", lambda: pool.starting.update({object(): ray_pool.Member(None)}))
    pool._start()
    with pytest.raises(Unfit, match=r"^no actor could be started: ModuleNotFoundError: No module named 'torch'$"):
        pool.one(SEEDS[0])
    assert len(told) == 3


def test_a_cluster_that_gives_nothing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_pool, "START", 0.0)
    pool = RayPool(OPTIONS, Settings(), 1, "local", print)
    pool.ray, pool.about = NoCluster("ray"), "1 nodes"
    monkeypatch.setattr(pool.ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    pool.starting = {object(): ray_pool.Member(None)}
    with pytest.raises(Unfit, match="gives no actor"):
        pool.one(SEEDS[0])


def test_what_ray_says_is_cut_to_its_reason() -> None:
    said = RuntimeError("The actor died.\n\tclass_name: A\nThe actor is dead because its process has died. Some common causes include: x")
    assert first_line(said) == "The actor is dead because its process has died"
    assert (first_line(RuntimeError("")), last_line(RuntimeError("a\n  b\n"))) == ("RuntimeError", "b")
