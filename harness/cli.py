"""The commands. What they do is done by runner, reports and the worker; how options are read is in options.py."""
from __future__ import annotations

import dataclasses
import io
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Column, Table

from cases import format_case, parse_case
from harness.asking import Progress, Settings
from harness.calibrate_command import calibrate
from harness.client import Unfit, WorkerDied, WorkerOptions
from harness.doctor_command import doctor
from harness.evidence_command import evidence
from harness.fuzz_command import fuzz
from harness.gate_command import gate
from harness.history_command import history
from harness.limits_command import limits
from harness.many import ManyRunner, in_words, on_gpu
from harness.merge_command import merge_folders
from harness.mutants_command import mutants
from harness.options import (
    INTERRUPTED,
    NOTHING_RAN,
    PAUSE,
    Arms,
    Broken,
    Cases,
    Device,
    Environment,
    Fp64,
    Gpus,
    Junit,
    Launches,
    Load,
    Memory,
    NowAndThen,
    Overrides,
    Python,
    Samples,
    SaveOutputs,
    Shard,
    Suite,
    Time,
    Timeout,
    TimeWrong,
    ask,
    choose,
    console,
    contract_for,
    errors,
    fail,
    import_problems,
    open_run,
    part_of,
    progress_bar,
    read_cases,
    read_gpus,
    replay_options,
    say,
    stored_options,
    with_environment,
    worker_options,
)
from harness.record import Record
from harness.report_command import after_run, before_work, report, show
from harness.runfolder import RunError, RunFolder, RunInfo, exit_code, fingerprints, now, revision
from harness.runner import Runner, cases_of
from harness.sanitize import TOOLS
from harness.sanitize_command import replay_sanitized, sanitizer
from harness.verdicts import Verdict
from reports import cells, failure

LONGEST = 90
TAIL = 30  # lines of the worker's log that replay shows after an exception

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def tell_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        print(f"threearm {revision()}")
        raise typer.Exit()


@app.callback()
def about(version: Annotated[bool, typer.Option("--version", is_eager=True, callback=tell_version,
                                                help="Print the version.")] = False) -> None:
    """Differential correctness and performance harness for sparse-attention kernels."""


@app.command()
def run(context: typer.Context, cases: Cases = None, suite: Suite = "smoke", arm: Arms = None, device: Device = "auto", load: Load = None,
        broken: Broken = False, settings: Overrides = "",
        time: Time = "auto", samples: Samples = 30,
        timeout: Timeout = 0.0, memory: Memory = 0.0, fp64: Fp64 = False, time_wrong: TimeWrong = False, launches: Launches = 0,
        save_outputs: SaveOutputs = False, shard: Shard = "", gpus: Gpus = "",
        runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
        resume: Annotated[Path | None, typer.Option(help="Go on with this run folder; its own options hold.")] = None,
        junit: Junit = None) -> None:
    """Take cases through every available arm: table, records, exit code."""
    before_work({"--junit": junit})
    if resume:
        sources = {name: context.get_parameter_source(name) for name in context.params if name not in ("resume", "junit")}
        if any(source and source.name == "COMMANDLINE" for source in sources.values()):
            fail("--resume goes on with the run's own cases, arms and options: give it alone")
        resume_run(resume, junit)
    whole = read_cases(cases, suite, settings)
    texts = part_of(whole, shard)
    options = worker_options(device, load, broken, arm, memory)
    description = ask(options, whole)
    options = dataclasses.replace(options, device=description["device"])
    kernels = choose(description["kernels"], whole, arm, broken)
    if not kernels:
        fail("no kernel can run here; `threearm arms` says why", NOTHING_RAN)
    plan = Settings(contract_for(time, options.device), samples, fp64, timeout, time_wrong, launches, save_outputs=save_outputs)
    lanes = read_gpus(gpus, device, description, plan.contract)
    if lanes and not memory:
        options = dataclasses.replace(options, memory=options.memory // len(lanes))
    unavailable = {k["name"]: k["why_not"] for k in description["kernels"] if not arm and k["why_not"] and cases_of(k, texts)}
    part = {**({"shard": shard, "whole": whole} if shard else {}), **({"gpus": lanes} if lanes else {})}
    info = RunInfo(now(), sys.argv, texts, kernels, {**description["machine"], **in_words(lanes), "threearm": revision()},
                   {"worker": dataclasses.asdict(options), "loaded": fingerprints(options.load), "settings": dataclasses.asdict(plan),
                    "unavailable": unavailable, **part})
    try:
        folder = RunFolder.create(runs, info)
    except RunError as error:
        fail(str(error))
    execute(folder, options, plan, junit)


def resume_run(path: Path, junit: Path | None = None) -> NoReturn:
    """Go on with a run, as it was asked for."""
    folder = open_run(path, repair=True)
    options, plan = stored_options(folder)
    if options is None or plan is None:
        fail(f"{path}/run.json: its options do not say how the run was started")
    execute(folder, options, plan, junit)


def execute(folder: RunFolder, options: WorkerOptions, plan: Settings, junit: Path | None = None) -> NoReturn:
    """Run, show the table and what failed, and exit."""
    total = sum(len(cases_of(kernel, folder.info.cases)) * len(kernel["arms"]) for kernel in folder.info.kernels)
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=total)
        told = NowAndThen(PAUSE)

        def progress(case: str, arm: str, phase: str) -> None:
            done, what = len(folder.records), f"{arm}  {phase}  {cells.short(case)}"
            bar.update(task, completed=done, description=what[:LONGEST])
            if not console.is_terminal:
                told.say(f"{done} of {total}  {what}")

        def kept() -> str:
            return (f"{len(folder.records)} of {total} records are in {folder.path}; "
                    f"go on with: {shlex.join(['threearm', 'run', '--resume', str(folder.path)])}")

        try:
            runner_of(folder, options, plan, progress).run()
        except KeyboardInterrupt:
            bar.stop()
            errors.print(f"interrupted: {kept()}", highlight=False, markup=False)
            raise typer.Exit(INTERRUPTED) from None
        except (RunError, Unfit) as error:
            bar.stop()
            fail(f"{error}; {kept()}", NOTHING_RAN)
    show(folder, options, plan)
    raise typer.Exit(after_run(folder, exit_code(folder.records), junit))


def runner_of(folder: RunFolder, options: WorkerOptions, plan: Settings, progress: Progress) -> Runner | ManyRunner:
    """What runs it: on one device, or on the GPUs that it was asked for."""
    gpus = folder.info.options.get("gpus")
    if gpus:
        return ManyRunner(folder, [on_gpu(options, index) for index in gpus], plan, progress)
    return Runner(folder, options, plan, folder.info.kernels, progress)


@app.command()
def arms(device: Device = "auto", load: Load = None, broken: Broken = False) -> None:
    """List every kernel: version, what it requires, what it promises, and, where it can't run, why."""
    options = worker_options(device, load, broken, None, 0.0)
    description = ask(options, [])
    options = dataclasses.replace(options, device=description["device"])
    kernels = description["kernels"]
    for family in dict.fromkeys(kernel["family"] for kernel in kernels):
        shown = [kernel for kernel in kernels if kernel["family"] == family]
        name = Column("kernel", width=max(len(kernel["name"]) for kernel in shown), overflow="fold")
        heads = ("arms", "version", "requires", "promises", "can run here")
        listing = Table(name, *(Column(head, overflow="fold") for head in heads), title=family, title_justify="left", title_style="bold")
        for kernel in shown:
            listing.add_row(kernel["name"], "\n".join(kernel["arms"]), kernel["version"] or "-", kernel["requires"], kernel["promise"],
                            can_run(kernel, options))
        console.print(listing)
    console.print("an arm is named kernel/arm; promises: what may change when a kernel of sparse_prefill skips masked pairs, and how a "
                  "kernel of indexer_topk sums and what it holds; its bound in GiB, which may depend on the device, is told where it "
                  "can run", style="dim", highlight=False)


def can_run(kernel: dict[str, Any], options: WorkerOptions) -> str:
    """yes, or what does not run and why. Imports the kernel's package in a process of its own."""
    why, none_only = import_problems(kernel, options)
    return f"no: {why}" if why else f"none arm alone: {none_only}" if none_only else "yes"


@app.command("list")
def list_cases(cases: Cases = None, suite: Suite = "smoke", arm: Arms = None, device: Device = "auto", load: Load = None,
               broken: Broken = False, settings: Overrides = "",
               canonical: Annotated[bool, typer.Option(help="Print every key, defaults too.")] = False) -> None:
    """Print what a run would do, without doing it."""
    texts = read_cases(cases, suite, settings)
    kernels = choose(ask(worker_options(device, load, broken, arm, 0.0), texts)["kernels"], texts, arm, broken)
    for text in texts:
        print(format_case(parse_case(text), canonical))
        for kernel in kernels:
            for name in kernel["arms"] if cases_of(kernel, [text]) else ():
                why = kernel["why_not"] or kernel["refused"][text].get(name, "")
                print(f"  {kernel['name']}/{name}{'  SKIPPED: ' + why if why else ''}")


@app.command()
def replay(case: Annotated[str, typer.Argument(help="A case text.")],
           arm: Annotated[str, typer.Option("--arm", help="kernel or kernel/arm.")],
           device: Device = "auto", load: Load = None, time: Time = "none", samples: Samples = 30,
           timeout: Timeout = 0.0, memory: Memory = 0.0, fp64: Fp64 = False, time_wrong: TimeWrong = False, launches: Launches = 0,
           python: Python = "", env: Environment = None,
           sanitize: Annotated[str, typer.Option(help=f"Under compute-sanitizer: {' | '.join(TOOLS)}.")] = "") -> None:
    """Run one case again on one kernel and tell every check in full. Arms before the named one run too, to be compared with; not with
    --sanitize, where each named one has a process of its own."""
    program = sanitizer(sanitize) if sanitize else ""
    texts = read_cases([case], "", "")
    options = with_environment(worker_options(device, load, False, [arm], memory), python, env)
    description = ask(options, texts)
    options = dataclasses.replace(options, device=description["device"])
    kernel = choose(description["kernels"], texts, [arm])[0]
    wanted = kernel["arms"]
    if program:
        replay_sanitized(options, Settings("", samples, fp64, timeout, launches=launches), kernel, texts[0], sanitize, program)
    every = next(k["arms"] for k in description["kernels"] if k["name"] == kernel["name"])
    kernel["arms"] = every[: every.index(wanted[-1]) + 1]
    plan = Settings(contract_for(time, options.device), samples, fp64, timeout, time_wrong, launches)
    folder = RunFolder(None, RunInfo(now(), sys.argv, texts, [kernel], {}, {}))
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(folder, options, plan, [kernel], lambda *_: None, Path(scratch) / "worker.log")
        try:
            runner.run()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (RunError, Unfit, WorkerDied) as error:
            fail(str(error), NOTHING_RAN)
        printed = runner.log.read_text(encoding="utf-8", errors="replace") if runner.log.is_file() else ""
    records = [record for record in folder.records if record.source in wanted]
    for record in records:
        again = [*replay_options(record, options, plan), *(["--python", python] if python else [])]
        say(failure.describe(record, again, always=True))
        if plan.contract and not record.time:
            say(f"  no time: {why_no_time(record)}")
    if any(map(failure.raised, records)):
        say("the worker printed:\n" + "\n".join(f"  {line}" for line in printed.splitlines()[-TAIL:]))
    raise typer.Exit(exit_code(records))


def why_no_time(record: Record) -> str:
    """Why an arm that was to be timed has no time."""
    if record.verdict is Verdict.PASSED:
        return "it was not measured"
    return "an arm that did not pass is not timed" + (", except with --time-wrong" if record.checks else "")


# here, since --help lists commands in this order
for command in (report, history, mutants, fuzz, limits, gate, calibrate, evidence, doctor):
    app.command()(command)
app.command("merge")(merge_folders)


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a CI job that is cancelled is told how to go on, too
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path that the terminal's encoding lacks is shown escaped
    app()
