"""`threearm fuzz`: generated cases through kernels until time is up; a live line, each finding with the line that repeats it, exit code."""
from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from cases import FAMILIES
from cases.suites import CORPUS
from harness.asking import Settings
from harness.client import Unfit, WorkerOptions
from harness.fuzz import RIGHT, Campaign, Finding, Plan
from harness.options import (
    INTERRUPTED,
    NOTHING_RAN,
    PAUSE,
    Arms,
    Broken,
    Device,
    Load,
    Memory,
    NowAndThen,
    OfFamily,
    Timeout,
    ask,
    choose,
    console,
    errors,
    fail,
    in_seconds,
    replay_options,
    say,
    usable,
    worker_options,
)
from harness.pool import Pool
from harness.ray_pool import RayPool
from harness.record import Record
from harness.runfolder import RunError, RunFolder, RunInfo, now, revision
from harness.runner import describe, probe
from harness.verdicts import Check, Verdict
from harness.words import counted
from reports import failure

MOST_WORKERS = 2  # for one kernel on a GPU: more processes take turns on the device, and each launch waits for its turn
SHOWN_WHERE = 3  # lines of a shrunk failure that say where it was as drawn
EXECUTORS = ("local", "ray")
Options = Callable[[Record], list[str]]  # what a replay line of a record needs besides

Duration = Annotated[str, typer.Option("--time", help="How long cases are drawn: 90s, 10m, 2h.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same cases, in the same order for each kernel.")]
Work = Annotated[int, typer.Option("--work", min=0, max=1 << 40,
                                   help="Dot products of a launch, at most (query rows x heads x width or keys); 0: for the device.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Worker processes for each kernel; 0: what the cores give. "
                                      "With ray: actors in all; 0: one a GPU or core of the cluster.")]
Executor = Annotated[str, typer.Option("--executor", help="local: processes of this machine; ray: actors of a Ray cluster.")]
RayAddress = Annotated[str, typer.Option("--ray-address", help="local: a Ray of this machine's own; auto or HOST:PORT: one that runs.")]
Save = Annotated[bool, typer.Option("--save", help="Append what was found to cases/corpus/FAMILY.txt, on CUDA FAMILY-gpu.txt.")]
ShrinkTime = Annotated[str, typer.Option("--shrink-time", help="How long one failure is shrunk: 60s, 5m; 0: not at all.")]
StopAfter = Annotated[int, typer.Option("--stop-after", min=0, help="End after so many findings; 0: when time is up.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where run folders are made.")]


def fuzz(family: OfFamily = "", arm: Arms = None, time: Duration = "10m", device: Device = "auto", seed: Seed = 0, work: Work = 0,
         workers: Workers = 0, save: Save = False, shrink_time: ShrinkTime = "60s", stop_after: StopAfter = 0, load: Load = None,
         broken: Broken = False, timeout: Timeout = 0.0, memory: Memory = 0.0, executor: Executor = "local",
         ray_address: RayAddress = "local", runs: Runs = Path("runs")) -> None:
    """Generated cases through every available kernel until time is up; what fails is shrunk to a line that repeats it."""
    allowed(executor, ray_address, device)
    if family and family not in FAMILIES:
        fail(f"--family {family}: families are {', '.join(FAMILIES)}")
    if importlib.util.find_spec("hypothesis") is None:
        fail("cases are drawn by hypothesis, which is not installed: pip install hypothesis", NOTHING_RAN)
    options = worker_options(device, load, broken, arm, memory)
    seconds, shrink_seconds = in_seconds("--time", time), in_seconds("--shrink-time", shrink_time)
    settings = Settings(timeout=timeout)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(joined(options, settings, workers, memory, ray_address)) if executor == "ray" else None
        described = ask(options, [], cluster.describe if cluster else describe)
        suggest_broken(arm, described["kernels"], options)
        options = dataclasses.replace(options, device=described["device"])
        kernels = [usable(kernel, options, cluster.probe if cluster else probe)
                   for kernel in chosen(described["kernels"], family, arm, broken)]
        kernels = [kernel for kernel in kernels if kernel["arms"]]
        if not kernels:
            fail("no kernel can run here; `threearm arms` says why", NOTHING_RAN)
        plan = Plan(options.device, seconds, seed, work, shrink_seconds, stop_after)
        where = {"cluster": cluster.about} if cluster else {}
        info = RunInfo(now(), sys.argv, [], kernels, {**described["machine"], **where, "threearm": revision()},
                       {"worker": dataclasses.asdict(options), "settings": dataclasses.asdict(settings), "fuzz": dataclasses.asdict(plan)})
        folder, campaign, interrupted = carried_out(plan, info, options, settings, workers, runs, cluster)
    for text in all_told(campaign.findings, seed, lambda record: replay_options(record, options, settings)):
        say(text)
    if save and campaign.findings:
        saved(campaign.findings, seed, "-gpu" if options.device.startswith("cuda") else "", loaded(described["kernels"], options))
    say(("interrupted: " if interrupted else "") + summary(campaign))
    if cluster and cluster.losses:
        say(f"{counted(cluster.losses, 'actor')} of the cluster lost, each in the middle of a case, which was run again on another")
    if campaign.failed:
        say(f"every failure as drawn: threearm report {folder.path} --failures")
    say(f"records: {folder.path}")
    raise typer.Exit(exit_code(campaign, interrupted))


def allowed(executor: str, ray_address: str, device: str) -> None:
    """Exit 2 for an executor that there is not, or options that it does not take."""
    if executor not in EXECUTORS:
        fail(f"--executor {executor}: allowed is {' | '.join(EXECUTORS)}")
    if executor == "local" and ray_address != "local":
        fail(f"--ray-address {ray_address}: only with --executor ray")
    if executor == "ray" and ":" in device:
        fail(f"--device {device}: Ray gives each actor a GPU, allowed is auto | cpu | cuda")


def joined(options: WorkerOptions, settings: Settings, count: int, memory: float, address: str) -> RayPool:
    """A pool over a cluster, to be entered: it tells of each lost actor on stderr. Exit 5 where there is no such cluster."""
    def tell(line: str) -> None:
        errors.print(line, highlight=False, markup=False)

    pool = RayPool(options if memory else dataclasses.replace(options, memory=0), settings, count, address, tell)
    try:
        pool.join()
    except Unfit as error:
        fail(str(error), NOTHING_RAN)
    return pool


def carried_out(plan: Plan, info: RunInfo, options: WorkerOptions, settings: Settings, workers: int, runs: Path,
                cluster: RayPool | None) -> tuple[RunFolder, Campaign, bool]:
    """The campaign, in a pool of this machine where there is no cluster; its folder, and whether it was interrupted. Exit 5 where it
    cannot go on."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of several workers would wait for each other's cores
    interrupted = False
    try:
        folder = RunFolder.create(runs, info)
        assert folder.path is not None
        log = folder.path / "worker.log"
        pool: contextlib.AbstractContextManager[RayPool | Pool]
        if cluster:
            cluster.log, pool = log, contextlib.nullcontext(cluster)
        else:
            pool = Pool(options, settings, workers or default_workers(options.device, len(info.kernels)), log)
        with pool as runner, watched() as tell:
            campaign = Campaign(plan, info.kernels, runner, lambda record: keep(folder, record), tell)
            with contextlib.suppress(KeyboardInterrupt):
                interrupted = True
                campaign.run()
                interrupted = False
        folder.finish()
    except (RunError, Unfit) as error:
        fail(str(error), NOTHING_RAN)
    return folder, campaign, interrupted


def chosen(kernels: list[dict[str, Any]], family: str, arms: list[str] | None, broken: bool) -> list[dict[str, Any]]:
    """The kernels to fuzz, `arms` of each cut down to those asked for; exit 2 for one that there is not, or that cannot run here."""
    named = choose(kernels, [f"{name}:" for name in ([family] if family else FAMILIES)], arms, broken)
    for kernel in named:
        if arms and kernel["why_not"]:
            fail(f"--arm {kernel['name']}: {kernel['why_not']}")
    return named


def suggest_broken(arms: list[str] | None, kernels: list[dict[str, Any]], options: WorkerOptions) -> None:
    """Exit 2 for an --arm that is the name of a broken kernel without broken_: it is not among the kernels, so nothing else would say."""
    unknown = [name for name in (text.partition("/")[0] for text in arms or ()) if name not in {kernel["name"] for kernel in kernels}]
    if not unknown or options.broken:
        return
    everything = [kernel["name"] for kernel in ask(dataclasses.replace(options, broken=True, device="cpu"), [])["kernels"]]
    for name in unknown:
        near = difflib.get_close_matches(f"broken_{name}", everything, n=1, cutoff=0.9)
        if near:
            fail(f"unknown kernel {name!r}: did you mean {near[0]!r}?")


def loaded(kernels: list[dict[str, Any]], options: WorkerOptions) -> dict[str, str]:
    """The option that brings a kernel along which the project has not, by its name: --load with the files' names."""
    if not options.load:
        return {}
    own = {kernel["name"] for kernel in ask(dataclasses.replace(options, load=(), device="cpu"), [])["kernels"]}
    words = "".join(f" --load {Path(file).name}" for file in options.load)
    return {kernel["name"]: words for kernel in kernels if kernel["name"] not in own}


def default_workers(device: str, kernels: int) -> int:
    """Workers for each kernel: together one a core, on a GPU not more than it serves."""
    count = max(1, len(os.sched_getaffinity(0)) // kernels)
    return min(count, MOST_WORKERS) if device.startswith("cuda") else count


def keep(folder: RunFolder, record: Record) -> None:
    """Write a record. Of one that passed, what says nothing is left out, and it is not kept in memory: there are very many."""
    if record.verdict is Verdict.PASSED:
        checks = [Check(check.name, check.verdict, margins=check.margins) for check in record.checks if check.margins]
        record = dataclasses.replace(record, checks=checks)
    folder.add(record)
    if record.verdict in failure.HARMLESS:
        folder.records.pop()


@contextlib.contextmanager
def watched() -> Iterator[Any]:
    """What tells how a campaign goes: one line that is always up to date on a terminal, now and then a line in a log."""
    if not console.is_terminal:
        now_and_then = NowAndThen(PAUSE)
        yield lambda campaign: now_and_then.say(line(campaign))
        return
    with Live(Text("starting"), console=console, transient=True, refresh_per_second=4) as live:
        yield lambda campaign: live.update(Text(line(campaign), no_wrap=True, overflow="ellipsis"))


def line(campaign: Campaign) -> str:
    """Cases, rate, failures, time left, and what takes long just now."""
    cases, arms = campaign.rates
    left = max(0, round(campaign.plan.seconds - campaign.elapsed))
    return (f"{campaign.cases:,} cases  {cases:.1f}/s ({arms:.1f} arms/s)  {campaign.failed:,} failed, {campaign.ways} found  "
            f"{left // 60}:{left % 60:02} left{'  ' + campaign.doing if campaign.doing else ''}")


def all_told(findings: list[Finding], seed: int, options: Options) -> list[str]:
    """Every finding; one that was shrunk to what is told already in one line."""
    lines: list[str] = []
    before: set[tuple[str, str]] = set()
    for finding in findings:
        if finding.shown in before:
            flaky = f"; FLAKY as drawn: {finding.differs}" if finding.differs else ""
            lines += [f"FAILED  {', '.join(finding.signature)}: shrunk to the case above, {finding.shown[1]}, "
                      f"from {finding.drawn.job.case}{flaky}", ""]
        else:
            lines += told(finding, seed, options)
        before.add(finding.shown)
    return lines


def told(finding: Finding, seed: int, options: Options) -> list[str]:
    """A finding as `threearm run` tells a failure, with where it came from; one that differs from itself with both of its runs."""
    def wrong(records: list[Record]) -> list[Record]:
        return [record for record in records if record.verdict not in failure.HARMLESS]

    lines = failure.describe_all(wrong(finding.smallest.records), options)
    if finding.differs:
        lines.append(f"  FLAKY: the same case twice: {finding.differs}. The second run:")
        again = wrong(finding.again.records)
        lines += failure.describe_all(again, options) if again else ["  everything PASSED"]
    how = f"shrunk in {finding.seconds:.0f} s, {counted(finding.tried, 'case')} tried" if finding.shrunk else "as drawn"
    if finding.interrupted:
        how += ", interrupted before it was run again" if finding.again is finding.drawn else ", interrupted while it was being shrunk"
    lines.append(f"  found by threearm fuzz --seed {seed}: {how}")
    return [*lines, *(as_drawn(finding, options) if finding.shrunk else []), ""]


def as_drawn(finding: Finding, options: Options) -> list[str]:
    """Where the check that did not pass was wrong before shrinking, and the line that repeats that."""
    arm, name = finding.signature
    record = next(record for record in finding.drawn.records if record.arm == arm)
    check = next((check for check in record.checks if check.name == name and check.verdict not in RIGHT), None)
    what = f"{check.verdict.value} {name}  {check.detail}" if check else f"{record.verdict.value}  {record.detail}"
    lines = [f"  as drawn: {what}"]
    lines += [f"             where: {where}" for where in (check.where if check else [])[:SHOWN_WHERE]]
    return [*lines, f"    repeat: {failure.replay_line(record, options(record))}"]


def saved(findings: list[Finding], seed: int, suffix: str, load: dict[str, str]) -> None:
    """Append what was found to the corpus, a case once. suffix: of the file's name; load: options that bring kernels along, by name."""
    for finding in findings:
        case, (arm, check) = finding.smallest.job.case, finding.signature
        path = CORPUS / f"{case.partition(':')[0]}{suffix}.txt"
        try:
            there = path.read_text(encoding="utf-8") if path.is_file() else ""
            if any(text.partition("#")[0].strip() == case for text in there.splitlines()):
                continue
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"# {datetime.date.today()} {arm}, {check}: found by threearm fuzz --seed {seed}"
                           f"{load.get(finding.drawn.job.kernel, '')}\n{case}\n")
        except OSError as error:
            fail(f"cannot write {path}: {error.strerror}")
        say(f"saved: {path}: {case}")


def summary(campaign: Campaign) -> str:
    """What was run, how fast, what came out, how far it went."""
    cases, arms = campaign.rates
    counts = ", ".join(f"{campaign.verdicts[verdict]:,} {verdict.value}" for verdict in Verdict if campaign.verdicts[verdict])
    refused = sum(source.refused for source in campaign.sources.values())
    lines = ["nothing ran"]
    if campaign.cases:
        lines = [f"{counted(campaign.cases, 'case')} in {campaign.elapsed:.0f} s, {cases:.1f} a second ({arms:.1f} arms a second)", counts,
                 f"{counted(campaign.failed, 'case')} failed, in {counted(campaign.ways, 'way')}" if campaign.failed else "no case failed",
                 "reached: " + "; ".join(f"{family}: {reach}" for family, reach in campaign.reach.items())]
    return "\n".join([*lines, *([f"{counted(refused, 'drawn case')} taken by no arm"] if refused else [])])


def exit_code(campaign: Campaign, interrupted: bool) -> int:
    """1 something failed; 130 interrupted before anything did; 5 nothing ran; 0 nothing failed: that some cases are vacuous is in the
    nature of drawn ones."""
    if campaign.failed:
        return 1
    if interrupted:
        return INTERRUPTED
    return 0 if campaign.cases else NOTHING_RAN
