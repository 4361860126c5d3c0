"""The command line's options: their types, how they are read, and the one line that says what is wrong with one."""
from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cases import CaseError, family_of, format_case, load_suite, parse_case, suite_names
from cases.suites import override_all
from harness.asking import Settings
from harness.client import Unfit, Unloadable, WorkerDied, WorkerOptions, default_memory
from harness.many import check_times, chosen_gpus
from harness.record import Record
from harness.runfolder import RunError, RunFolder
from harness.runner import describe, probe
from harness.shards import parse_shard
from harness.verdicts import Verdict
from harness.words import counted

DECISIVE = ("TRITON_INTERPRET",)
"""Environment variables that decide how a kernel runs, so that a repeat line has to set them."""
DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
USAGE, NOTHING_RAN, INTERRUPTED = 2, 5, 130
UNITS = {"s": 1, "m": 60, "h": 3600}
LONGEST = 90  # characters of what a bar says is under way
PAUSE = 30.0  # seconds between two lines of progress where stdout is no terminal

Answer = TypeVar("Answer")

console = Console(width=None if sys.stdout.isatty() else 130, emoji=False)  # emoji: `cuda:-1:` would be shown as a thumb down
errors = Console(stderr=True, soft_wrap=True, emoji=False)

Cases = Annotated[list[str] | None, typer.Argument(help="Case texts, family:key=value,...", show_default=False)]
Suite = Annotated[str, typer.Option("--suite", help="A suite's name, or a file of cases.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto: cuda where there is one.")]
Arms = Annotated[list[str] | None, typer.Option("--arm", help="kernel or kernel/arm; repeat for several. Default: all available.")]
Load = Annotated[list[Path] | None, typer.Option("--load", help="A kernel file from outside the project; repeat for several.")]
OfFamily = Annotated[str, typer.Option("--family", help="sparse_prefill or indexer_topk alone.")]
Broken = Annotated[bool, typer.Option("--broken", help="Register the deliberately broken kernels of arms/broken.")]
Overrides = Annotated[str, typer.Option("--set", help="key=value,... set anew on every case whose family has the key.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds per launch phase; 0: from the case's work.", min=0)]
Memory = Annotated[float, typer.Option("--memory", help="GiB a worker may use; 0: 85 % of what is available.", min=0)]
Time = Annotated[str, typer.Option("--time", help="kernel, span, wall, none, or auto: on cuda kernel (indexer_topk: span), on cpu wall.")]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Timing samples per arm.")]
TimeWrong = Annotated[bool, typer.Option("--time-wrong", help="Also time arms whose answer is wrong, such as an inexact baseline.")]
Python = Annotated[str, typer.Option("--python", help="The interpreter that runs the workers; this one's own by default.")]
Environment = Annotated[list[str] | None, typer.Option("--env", help="NAME=value for the workers; repeat for several.")]
Launches = Annotated[int, typer.Option("--launches", help="Launches back to back in run-to-run; 0: three or four.", min=0, max=100_000)]
SaveOutputs = Annotated[bool, typer.Option("--save-outputs", help="Keep every arm's outputs in the run's folder, for a gate.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Also write JUnit XML here.")]
Shard = Annotated[str, typer.Option("--shard", metavar="I/N", help="Part I of N of the cases, from 1: for several hosts, whose runs "
                                    "`threearm merge` puts together.")]
Gpus = Annotated[str, typer.Option("--gpus", help="all, or numbers as in 0,2: a worker on each, cases dealt as they become free.")]
Fp64 = Annotated[bool, typer.Option("--fp64", help="Compute the reference in fp64.")]


def say(text: str, style: str = "") -> None:
    """Plain text on stdout: neither wrapped nor coloured by what it looks like. What a kernel says cannot steer the terminal."""
    text = CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def progress_bar(where: Console) -> Progress:
    """What is under way and how much of it is done; nothing where `where` is no terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=where, transient=True, disable=not where.is_terminal)


@contextlib.contextmanager
def followed(longest: int = LONGEST) -> Iterator[Callable[[int, int, str], None]]:
    """What is to be called with how much is done, of how much, and what is under way: a bar on a terminal's stderr, else a line now and
    then."""
    told = NowAndThen(PAUSE)
    with progress_bar(errors) as bar:
        task = bar.add_task("starting", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what[:longest])
            if not errors.is_terminal:
                told.say(f"{done} of {total}  {what}")

        yield progress


def fail(message: str, code: int = USAGE) -> NoReturn:
    """One line on stderr, and the exit code."""
    errors.print(f"threearm: {message}", style="red", highlight=False, markup=False)
    raise typer.Exit(code)


def in_seconds(option: str, text: str) -> float:
    """`90s`, `10m` or `2h` in seconds, and 0; exit 2 for anything else."""
    if text == "0":
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        fail(f"{option} {text}: allowed is a number with s, m or h, for example 10m")
    return float(found[1]) * UNITS[found[2]]


def read_cases(texts: list[str] | None, suite: str, settings: str) -> list[str]:
    """The run's cases as text, in their shortest form, each once."""
    try:
        cases = [parse_case(text) for text in texts] if texts else load_suite(suite)
        if settings:
            cases = override_all(cases, settings)
    except CaseError as error:
        hint = next((f" (a suite of that name is run with --suite {text})" for text in texts or () if text in suite_names()), "")
        fail(f"{error}{hint}")
    return list(dict.fromkeys(format_case(case) for case in cases))


def worker_options(device: str, load: list[Path] | None, broken: bool, arms: list[str] | None, memory: float) -> WorkerOptions:
    """How workers are to be started. A broken arm that is named brings arms/broken along."""
    if not DEVICES.fullmatch(device):
        fail(f"--device {device}: allowed is cpu, cuda, cuda:1 or auto")
    missing = next((path for path in load or () if not path.is_file()), None)
    if missing:
        fail(f"--load {missing}: no such file")
    wants_broken = broken or any(arm.startswith("broken_") for arm in arms or ())
    environment = tuple(f"{name}={os.environ[name]}" for name in DECISIVE if os.environ.get(name))
    return WorkerOptions(device, wants_broken, tuple(str(path.resolve()) for path in load or ()),
                         int(min(memory, 1e9) * 2**30) or default_memory(), environment=environment)


def with_environment(options: WorkerOptions, python: str, variables: list[str] | None) -> WorkerOptions:
    """The options with another interpreter and more variables, or one line and exit 2."""
    wrong = next((text for text in variables or () if not text.partition("=")[0] or "=" not in text), None)
    if wrong is not None:
        fail(f"--env {wrong}: it must be NAME=value")
    if python and shutil.which(python) is None:
        fail(f"--python {python}: no such program")
    return dataclasses.replace(options, python=shutil.which(python) or python if python else options.python,
                               environment=(*options.environment, *(variables or ())))


def ask(options: WorkerOptions, cases: list[str], described: Callable[..., dict[str, Any]] | None = None) -> dict[str, Any]:
    """The worker's description, or one line and exit 2 or 5. described: asks a worker, by default one of this machine."""
    return told_if_unfit(lambda: (described or describe)(options, cases))


def told_if_unfit(asked: Callable[[], Answer]) -> Answer:
    """What a worker says when it is asked, or one line: exit 2 where a file to load is wrong, 5 where there is no such device, or no
    worker can run."""
    try:
        return asked()
    except Unloadable as error:
        fail(str(error))
    except Unfit as error:
        fail(str(error), NOTHING_RAN)
    except WorkerDied as death:
        fail(f"no worker can run here: {death.detail}", NOTHING_RAN)


def choose(kernels: list[dict[str, Any]], cases: list[str], arms: list[str] | None, broken: bool = False) -> list[dict[str, Any]]:
    """The kernels to run, `arms` of each cut down to those asked for. Without --arm: every available kernel of the cases'
    families, broken ones only if asked for."""
    families = list(dict.fromkeys(map(family_of, cases)))
    if not arms:
        return [kernel for kernel in kernels if kernel["family"] in families and not kernel["why_not"]
                and (broken or not kernel["name"].startswith("broken_"))]
    names = {kernel["name"]: kernel for kernel in kernels}
    wanted: dict[str, set[str]] = {}
    for text in arms:
        name, slash, arm = text.partition("/")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            fail(f"unknown kernel {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}kernels are {', '.join(names)}")
        kernel = names[name]
        if slash and arm not in kernel["arms"]:
            fail(f"unknown arm {arm!r} in --arm {text}: {name} has {', '.join(kernel['arms'])}")
        if kernel["family"] not in families:
            fail(f"--arm {text}: it is a kernel of {kernel['family']}, the cases are of {' and '.join(families)}")
        wanted.setdefault(name, set()).update({arm} if slash else kernel["arms"])
    return [{**names[name], "arms": [arm for arm in names[name]["arms"] if arm in chosen]} for name, chosen in wanted.items()]


def contract_for(time: str, device: str) -> str:
    """The timing contract by name; "" for none, "auto" for each family's own."""
    on_cuda = device.startswith("cuda")
    allowed = ["auto", "none", "wall", *(["kernel", "span"] if on_cuda else [])]
    if time not in allowed:
        fail(f"--time {time}: allowed on {device} is {' | '.join(allowed)}")
    return "" if time == "none" else time


def replay_options(record: Record, options: WorkerOptions | None, plan: Settings | None) -> list[str]:
    """What a replay line needs besides case and arm, so that it repeats what this run did: variables, then options."""
    if options is None or plan is None:
        return []
    words = [text for text in options.environment if text.partition("=")[0] in DECISIVE]
    words += [] if options.device == "cpu" else ["--device", options.device]
    words += [part for text in options.environment if text.partition("=")[0] not in DECISIVE for part in ("--env", text)]
    words += [part for path in options.load for part in ("--load", path)]
    words += ["--fp64"] if plan.fp64 else []
    raced = any(c.name == "run-to-run" and c.verdict is Verdict.FLAKY for c in record.checks)
    words += ["--launches", str(plan.launches)] if plan.launches and raced else []
    words += ["--timeout", f"{plan.timeout:g}"] if plan.timeout and record.verdict is Verdict.TIMEOUT else []
    words += ["--memory", f"{options.memory / 2**30:g}"] if record.verdict is Verdict.OOM else []
    in_timing = any(c.name == "timed-output" and c.verdict is record.verdict for c in record.checks) or "phase timing" in record.detail
    return [*words, *(["--time", plan.contract, "--samples", str(plan.samples)] if in_timing else [])]


def open_run(path: Path, repair: bool = False) -> RunFolder:
    """Read a run folder, or one line and exit 2."""
    try:
        return RunFolder.load(path, repair)
    except RunError as error:
        fail(str(error))


def stored_options(folder: RunFolder) -> tuple[WorkerOptions | None, Settings | None]:
    """How a stored run was started; None where its run.json does not say."""
    try:
        return (msgspec.convert(folder.info.options.get("worker"), WorkerOptions),
                msgspec.convert(folder.info.options.get("settings"), Settings))
    except msgspec.ValidationError:
        return None, None


def part_of(cases: list[str], shard: str) -> list[str]:
    """The cases of a shard, all without one; or one line and exit 2."""
    if not shard:
        return cases
    try:
        part = parse_shard(shard)
    except ValueError as error:
        fail(f"--shard {shard}: {error}")
    return part.of(cases) or fail(f"--shard {shard}: of {counted(len(cases), 'case')} none is left for this part")


def read_gpus(text: str, device: str, description: dict[str, Any], contract: str) -> list[int]:
    """The GPUs of `--gpus`, [] without it; or one line and exit 2, or 5 where there is none."""
    if not text:
        return []
    names = description["gpus"]
    if device not in ("auto", "cuda"):
        fail(f"--gpus {text}: not with --device {device}")
    if not names:
        fail(f"--gpus {text}: there is no GPU here", NOTHING_RAN)
    try:
        chosen = chosen_gpus(text, names)
        check_times(contract, [names[index] for index in chosen])
    except ValueError as error:
        fail(f"--gpus {text}: {error}")
    return chosen


class NowAndThen:
    """Lines on stderr, at least `pause` seconds apart and after the start: progress for a log."""

    def __init__(self, pause: float) -> None:
        self.pause, self.last = pause, monotonic()

    def say(self, line: str) -> None:
        """Print it, unless the last one is not long ago."""
        if monotonic() - self.last >= self.pause:
            self.last = monotonic()
            errors.print(line, highlight=False, markup=False)


def import_problems(kernel: dict[str, Any], options: WorkerOptions, probed: Callable[..., tuple[str, str]] = probe) -> tuple[str, str]:
    """Why a kernel cannot run, and why it has a none arm alone, "" where nothing: its package is imported in a process of its own.
    probed: imports it, by default here."""
    if kernel["why_not"] or not kernel["imports"]:
        return kernel["why_not"], ""
    try:
        return probed(options, Path(os.devnull), kernel["name"])
    except WorkerDied as death:
        return f"importing it ends the process: {death.detail}", ""


def usable(kernel: dict[str, Any], options: WorkerOptions, probed: Callable[..., tuple[str, str]] = probe) -> dict[str, Any]:
    """The kernel with the arms that its package has here; none where that cannot be imported. probed: as of import_problems."""
    why, none_only = import_problems(kernel, options, probed)
    if why:
        say(f"not available: {kernel['name']}: {why}", style="dim")
    return {**kernel, "arms": [] if why else [arm for arm in kernel["arms"] if arm == "none" or not none_only]}
