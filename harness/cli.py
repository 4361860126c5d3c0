"""The command line. Everything it does is done by runner, reports and the worker; here are options, messages, exit codes."""
from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cases.sparse_prefill import format_case, parse_case
from cases.suites import load_suite, override
from cases.text import CaseError
from harness.client import Unfit, WorkerDied, WorkerOptions, default_memory
from harness.runfolder import RunError, RunFolder, RunInfo, exit_code, now
from harness.runner import Runner, Settings, describe, probe
from harness.verdicts import SOURCES
from reports import evidence, failure, table

USAGE, NOTHING_RAN, INTERRUPTED = 2, 5, 130
SHOWN_FAILURES = 10

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Differential correctness and performance harness for sparse-attention kernels.")
console = Console(width=None if sys.stdout.isatty() else 130)
errors = Console(stderr=True, soft_wrap=True)

Cases = Annotated[list[str] | None, typer.Argument(help="Case texts, family:key=value,...", show_default=False)]
Suite = Annotated[str, typer.Option("--suite", help="A suite's name, or a file of cases.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto: cuda where there is one.")]
Arms = Annotated[list[str] | None, typer.Option("--arm", help="kernel or kernel/source; repeat for several. Default: all available.")]
Load = Annotated[list[Path] | None, typer.Option("--load", help="A kernel file from outside the project; repeat for several.")]
Broken = Annotated[bool, typer.Option("--broken", help="Register the deliberately broken kernels of arms/broken.")]
Overrides = Annotated[str, typer.Option("--set", help="key=value,... set anew on every case.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds per launch phase; 0: from the case's work.", min=0)]
Memory = Annotated[float, typer.Option("--memory", help="GiB a worker may use; 0: 85 % of what is available.", min=0)]
Fp64 = Annotated[bool, typer.Option("--fp64", help="Compute the reference in fp64.")]


def say(text: str, style: str = "") -> None:
    """Plain text on stdout: neither wrapped nor coloured by what it looks like."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def fail(message: str, code: int = USAGE) -> NoReturn:
    """One line on stderr, and the exit code."""
    errors.print(f"threearm: {message}", style="red", highlight=False, markup=False)
    raise typer.Exit(code)


def read_cases(texts: list[str] | None, suite: str, settings: str) -> list[str]:
    """The run's cases as text, in their shortest form, each once."""
    try:
        cases = [parse_case(text) for text in texts] if texts else load_suite(suite)
        if settings:
            cases = [override(case, settings) for case in cases]
    except CaseError as error:
        fail(str(error))
    return list(dict.fromkeys(format_case(case) for case in cases))


def worker_options(device: str, load: list[Path] | None, broken: bool, arms: list[str] | None, memory: float) -> WorkerOptions:
    """How workers are to be started. A broken arm that is named brings arms/broken along."""
    missing = next((path for path in load or () if not path.is_file()), None)
    if missing:
        fail(f"--load {missing}: no such file")
    wants_broken = broken or any(arm.startswith("broken_") for arm in arms or ())
    return WorkerOptions(device, wants_broken, tuple(str(path.resolve()) for path in load or ()),
                         int(memory * 2**30) or default_memory())


def ask(options: WorkerOptions, cases: list[str]) -> dict[str, Any]:
    """The worker's description, or one line and exit 2 (asked for what is not there) or 5 (no worker can run)."""
    try:
        return describe(options, cases)
    except Unfit as error:
        fail(str(error))
    except WorkerDied as death:
        fail(f"no worker can run here: {death.detail}", NOTHING_RAN)


def choose(kernels: list[dict[str, Any]], arms: list[str] | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The kernels to run and their sources. Without --arm: every available kernel, broken ones aside."""
    if not arms:
        return [k for k in kernels if not k["why_not"] and not k["name"].startswith("broken_")], SOURCES
    names = {kernel["name"]: kernel for kernel in kernels}
    chosen: dict[str, dict[str, Any]] = {}
    sources: set[str] = set()
    for arm in arms:
        name, slash, source = arm.partition("/")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            fail(f"unknown kernel {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}kernels are {', '.join(names)}")
        if slash and source not in SOURCES:
            fail(f"unknown topk_length source {source!r} in --arm {arm}: sources are {', '.join(SOURCES)}")
        chosen[name] = names[name]
        sources |= {source} if slash else set(SOURCES)
    return list(chosen.values()), tuple(s for s in SOURCES if s in sources)


@app.command()
def run(cases: Cases = None, suite: Suite = "smoke", arm: Arms = None, device: Device = "auto", load: Load = None,
        broken: Broken = False, settings: Overrides = "",
        time: Annotated[str, typer.Option("--time", help="kernel, span, wall, none, or auto: kernel on cuda, wall on cpu.")] = "auto",
        samples: Annotated[int, typer.Option(min=1, help="Timing samples per arm.")] = 30,
        timeout: Timeout = 0.0, memory: Memory = 0.0, fp64: Fp64 = False,
        runs: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
        resume: Annotated[Path | None, typer.Option(help="Go on with this run folder; its own options hold.")] = None) -> None:
    """Take cases through every available arm: table, records, exit code."""
    if resume:
        folder = open_run(resume)
        execute(folder, msgspec.convert(folder.info.options["worker"], WorkerOptions),
                msgspec.convert(folder.info.options["settings"], Settings))
    texts = read_cases(cases, suite, settings)
    options = worker_options(device, load, broken, arm, memory)
    description = ask(options, texts)
    options = dataclasses.replace(options, device=description["device"])
    contract = contract_for(time, options.device)
    kernels, sources = choose(description["kernels"], arm)
    if not kernels:
        fail("no kernel can run here; `threearm arms` says why", NOTHING_RAN)
    plan = Settings(sources, contract, samples, fp64, timeout)
    info = RunInfo(now(), sys.argv, texts, kernels, description["machine"],
                   {"worker": dataclasses.asdict(options), "settings": dataclasses.asdict(plan),
                    "unavailable": {k["name"]: k["why_not"] for k in description["kernels"] if k["why_not"]}})
    try:
        folder = RunFolder.create(runs, info)
    except RunError as error:
        fail(str(error))
    execute(folder, options, plan)


def contract_for(time: str, device: str) -> str:
    """The timing contract by name; "" for none."""
    on_cuda = device.startswith("cuda")
    allowed = ["auto", "none", "wall", *(["kernel", "span"] if on_cuda else [])]
    if time not in allowed:
        fail(f"--time {time}: allowed on {device} is {' | '.join(allowed)}")
    return {"auto": "kernel" if on_cuda else "wall", "none": ""}.get(time, time)


def execute(folder: RunFolder, options: WorkerOptions, plan: Settings) -> NoReturn:
    """Run, show the table and what failed, and exit."""
    total = len(folder.info.cases) * len(folder.info.kernels) * len(plan.sources)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def progress(case: str, arm: str, phase: str) -> None:
            bar.update(task, completed=len(folder.records), description=f"{arm}  {phase}  {table.short(case)[:50]}")

        try:
            Runner(folder, options, plan, folder.info.kernels, progress).run()
        except KeyboardInterrupt:
            bar.stop()
            errors.print(f"interrupted: {len(folder.records)} of {total} records are in {folder.path}; "
                         f"go on with: threearm run --resume {folder.path}", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
        except (RunError, Unfit) as error:
            bar.stop()
            fail(str(error), NOTHING_RAN)
    show(folder, options)
    raise typer.Exit(exit_code(folder.records))


def show(folder: RunFolder, options: WorkerOptions | None = None) -> None:
    """The run as a person reads it: machine, table, what did not pass, summary, where it is kept."""
    machine = folder.info.machine
    say("  ".join(f"{key} {machine[key]}" for key in ("gpu", "gpu not used", "cpu", "driver", "torch") if key in machine), style="dim")
    console.print(table.terminal(folder.records))
    bad = [record for record in folder.records if record.verdict not in failure.HARMLESS]
    for record in bad[:SHOWN_FAILURES]:
        say(failure.describe(record, replay_options(options)))
    if len(bad) > SHOWN_FAILURES:
        say(f"... and {len(bad) - SHOWN_FAILURES} more that did not pass; all: threearm report {folder.path} --failures")
    say(failure.summary(folder.records))
    for name, why in folder.info.options.get("unavailable", {}).items():
        say(f"not available: {name}: {why}", style="dim")
    say(f"records: {folder.path}")


def replay_options(options: WorkerOptions | None) -> list[str]:
    """What a replay line needs besides case and arm."""
    if options is None:
        return []
    loads = [part for path in options.load for part in ("--load", path)]
    return [*(["--device", options.device] if options.device != "cpu" else []), *loads]


def open_run(path: Path) -> RunFolder:
    """Read a run folder, or one line and exit 2."""
    try:
        return RunFolder.load(path)
    except RunError as error:
        fail(str(error))


@app.command()
def arms(device: Device = "auto", load: Load = None, broken: Broken = False) -> None:
    """List every kernel: version, what it requires, what it promises, and, where it can't run, why."""
    options = worker_options(device, load, broken, None, 0.0)
    description = ask(options, [])
    options = dataclasses.replace(options, device=description["device"])
    listing = Table("kernel", "version", "requires", "promises when it skips", "can run here")
    for kernel in description["kernels"]:
        why, none_only = kernel["why_not"], ""
        if not why and kernel["imports"]:
            why, none_only = probe(options, Path(os.devnull), kernel["name"])
        state = f"no: {why}" if why else f"none arm alone: {none_only}" if none_only else "yes"
        listing.add_row(kernel["name"], kernel["version"] or "-", kernel["requires"], kernel["promise"], state)
    console.print(listing)
    console.print(f"each kernel is {len(SOURCES)} arms: kernel/{', kernel/'.join(SOURCES)}", style="dim")


@app.command("list")
def list_cases(cases: Cases = None, suite: Suite = "smoke", arm: Arms = None, device: Device = "auto", load: Load = None,
               broken: Broken = False, settings: Overrides = "",
               canonical: Annotated[bool, typer.Option(help="Print every key, defaults too.")] = False) -> None:
    """Print what a run would do, without doing it."""
    texts = read_cases(cases, suite, settings)
    kernels, sources = choose(ask(worker_options(device, load, broken, arm, 0.0), texts)["kernels"], arm)
    for text in texts:
        print(format_case(parse_case(text), canonical))
        for kernel in kernels:
            for source in sources:
                why = kernel["why_not"] or kernel["refused"][text].get(source, "")
                print(f"  {kernel['name']}/{source}{'  SKIPPED: ' + why if why else ''}")


@app.command()
def replay(case: Annotated[str, typer.Argument(help="A case text.")],
           arm: Annotated[str, typer.Option("--arm", help="kernel or kernel/source.")],
           device: Device = "auto", load: Load = None, timeout: Timeout = 0.0, memory: Memory = 0.0, fp64: Fp64 = False) -> None:
    """Run one case again on one kernel and tell every check in full. Arms before the named one run too, to be compared with."""
    texts = read_cases([case], "", "")
    options = worker_options(device, load, False, [arm], memory)
    description = ask(options, texts)
    options = dataclasses.replace(options, device=description["device"])
    kernels, sources = choose(description["kernels"], [arm])
    upto = SOURCES[: SOURCES.index(sources[-1]) + 1]
    folder = RunFolder(None, RunInfo(now(), sys.argv, texts, kernels, {}, {}))
    try:
        Runner(folder, options, Settings(upto, "", 0, fp64, timeout), kernels, lambda *_: None).run()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    wanted = [record for record in folder.records if record.source in sources]
    for record in wanted:
        say(failure.describe(record, replay_options(options), always=True))
    raise typer.Exit(exit_code(wanted))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run folder.")],
           markdown: Annotated[bool, typer.Option(help="The whole run as Markdown, for a pull request.")] = False,
           failures: Annotated[bool, typer.Option(help="Every record that did not pass, in full.")] = False) -> None:
    """Show a stored run again. Needs no GPU."""
    stored = open_run(folder)
    if markdown:
        print(evidence.page(stored.info, stored.records), end="")
    elif failures:
        for record in stored.records:
            if record.verdict not in failure.HARMLESS:
                print(failure.describe(record, []))
    else:
        show(stored)
    raise typer.Exit(exit_code(stored.records))


def main() -> None:
    """Entry point."""
    app()
