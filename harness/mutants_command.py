"""`threearm mutants`: every broken arm through the checks, and right arms on generated cases; the matrix, and the exit code."""
from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cases.fault import Fault
from harness.asking import Settings
from harness.client import Unfit, WorkerOptions
from harness.mutants import Matrix, Plan, ask_worker, can_show, generated
from harness.mutants_file import MutantsFile, as_file, save
from harness.options import (
    INTERRUPTED,
    NOTHING_RAN,
    PAUSE,
    Device,
    Load,
    Memory,
    NowAndThen,
    OfFamily,
    ask,
    console,
    errors,
    fail,
    progress_bar,
    replay_options,
    say,
    told_if_unfit,
    usable,
    worker_options,
)
from harness.pool import Outcome, Pool
from harness.record import Record
from harness.report_command import before_work
from harness.runfolder import RunError, RunInfo, now, replace_file, revision
from reports import mutants as report

SAMPLED, COMPLETE = 100, 2000
"""Generated cases, where --right does not say how many."""
TIMED_SAMPLES = 30
Complete = Annotated[bool, typer.Option("--complete", help=f"Every fault on every small case of its family; {COMPLETE:,} generated cases.")]
Named = Annotated[list[str] | None, typer.Option("--arm", help="A broken arm, with or without its broken_; repeat for several.")]
Right = Annotated[int | None, typer.Option("--right", min=0, help=f"Generated cases for right arms; {SAMPLED}, or none with --arm.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seeds the generated cases.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="The whole matrix as Markdown, with command, versions and machine.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the matrix to a file, for `threearm report --html --mutants`.")]
Html = Annotated[Path | None, typer.Option("--html", help="Also write the matrix as one page that needs nothing else.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Worker processes; 0: one a core, on a GPU at most 2.")]


def mutants(complete: Complete = False, family: OfFamily = "", arm: Named = None, right: Right = None, seed: Seed = 0,
            markdown: Markdown = False, json: Json = None, html: Html = None, workers: Workers = 0, device: Device = "auto",
            load: Load = None, memory: Memory = 0.0) -> None:
    """Which check catches which broken arm, and whether any accuses a right one."""
    before_work({"--json": json, "--html": html}, on_github=False)
    options = worker_options(device, load, True, None, memory)
    faults, described = told_if_unfit(lambda: ask_worker(options, lambda faults: chosen(faults, family, arm), complete))
    options = dataclasses.replace(options, device=described["device"])
    count = right if right is not None else 0 if arm else COMPLETE if complete else SAMPLED
    plan, machine = planned(faults, described, options, complete, count, seed), described["machine"]
    info = RunInfo(now(), sys.argv, [], [], {**machine, "threearm": revision()}, {})
    matrix = Matrix(faults, options.device, whole=not arm)

    def repeat(record: Record) -> list[str]:
        return replay_options(record, options, Settings())

    try:
        run(plan, matrix, options, workers, lambda outcome: report.news(matrix, outcome, repeat))
    except KeyboardInterrupt:
        matrix.interrupted = True
    except Unfit as error:
        fail(str(error), NOTHING_RAN)
    info.finished, drawn = now(), sum(map(len, plan.generated.values()))
    store(as_file(info, matrix, drawn), json, html)
    if markdown:
        print(report.page(info, matrix, drawn), end="")
    else:
        if matrix.interrupted:
            say(report.how_far(matrix))
        console.print(report.terminal(matrix))
        for line in report.findings(matrix, drawn, repeat):
            say(line)
    raise typer.Exit(1 if matrix.wrong else INTERRUPTED if matrix.interrupted else 0)


def store(stored: MutantsFile, json: Path | None, html: Path | None) -> None:
    """Write the files that were asked for, or one line and exit 5."""
    try:
        if json:
            save(json, stored)
        if html:
            from reports.html.page import build
            replace_file(html, build([stored], "threearm mutants").encode())
    except RunError as error:
        fail(str(error), NOTHING_RAN)
    except OSError as error:
        fail(f"cannot write {html}: {error.strerror}", NOTHING_RAN)


def chosen(faults: list[Fault], family: str, arms: list[str] | None) -> list[Fault]:
    """The faults of a family, or those that are named; exit 2 if there is no such family or fault."""
    families, names = dict.fromkeys(fault.family for fault in faults), {fault.name: fault for fault in faults}
    if family and family not in families:
        fail(f"--family {family}: families are {' and '.join(families)}")
    wanted = [arm.removeprefix("broken_") for arm in arms or names]
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            fail(f"--arm {name}: no such fault{f'; did you mean {near[0]!r}?' if near else '; `threearm arms --broken` lists them'}")
    found = [fault for fault in faults if fault.name in wanted and family in ("", fault.family)]
    if not found:
        fail(f"--family {family}: none of the faults named is of it")
    return found


def planned(faults: list[Fault], described: dict[str, Any], options: WorkerOptions, complete: bool, count: int, seed: int) -> Plan:
    """What is run, with `count` generated cases: which right arm takes which of them is asked of a worker without arms/broken."""
    right = [usable(kernel, options) for kernel in described["kernels"]
             if not kernel["why_not"] and not kernel["name"].startswith("broken_")]
    right = [kernel for kernel in right if kernel["arms"] and kernel["family"] in {fault.family for fault in faults}]
    try:
        cases = generated(right, count, seed) if count else {}
    except ImportError as error:
        fail(f"generated cases need {error.name} (pip install {error.name}); --right 0 does without", NOTHING_RAN)
    if cases:
        texts = list(dict.fromkeys(case for some in cases.values() for case in some))
        plain = {kernel["name"]: kernel for kernel in ask(dataclasses.replace(options, broken=False), texts)["kernels"]}
        right = [{**kernel, "refused": kernel["refused"] | plain[kernel["name"]]["refused"]} for kernel in right]
    broken = {kernel["name"]: kernel for kernel in described["kernels"] if kernel["name"] in {fault.kernel for fault in faults}}
    return Plan(can_show(faults, options.device), right, broken, cases, complete)


def run(plan: Plan, matrix: Matrix, options: WorkerOptions, workers: int, news: Callable[[Outcome], list[str]]) -> None:
    """Take every job through workers and fill the matrix. news: lines on what a job shows, told at once, on stderr."""
    cores = len(os.sched_getaffinity(0))
    count = workers or (min(cores, 2) if options.device.startswith("cuda") else cores)
    if "OMP_NUM_THREADS" not in os.environ:  # threads of several workers would wait for each other's cores
        options = dataclasses.replace(options, environment=(*options.environment, "OMP_NUM_THREADS=1"))
    matrix.total = total = sum(1 for _ in plan.timed()) + sum(1 for _ in plan.jobs())
    with progress_bar(errors) as bar:
        task, told = bar.add_task("starting", total=total), NowAndThen(PAUSE)
        for done, outcome in enumerate(outcomes(plan, options, count), 1):
            matrix.add(outcome)
            for line in news(outcome):
                errors.print(line, highlight=False, markup=False)
            bar.update(task, completed=done, description=outcome.job.kernel)
            if not errors.is_terminal:
                told.say(f"{done} of {total}  {outcome.job.kernel}  {outcome.job.case}")


def outcomes(plan: Plan, options: WorkerOptions, count: int) -> Iterator[Outcome]:
    """Of every job, as they come; first of those that are timed, which have a pool that times."""
    timed = list(plan.timed())
    if timed:
        with Pool(options, Settings("wall", TIMED_SAMPLES), min(count, len(timed))) as pool:
            yield from pool.run(timed)
    with Pool(options, Settings(), count) as pool:
        yield from pool.run(plan.jobs())
