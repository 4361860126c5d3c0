"""`threearm evidence`: the published evidence of a change, made again by one command. docs/evidence-command.md explains it."""
from __future__ import annotations

import dataclasses
import difflib
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from harness.client import Unfit, WorkerOptions
from harness.evidence import Evidence, code_of, part_info
from harness.evidence_folder import EvidenceFolder, EvidenceInfo
from harness.evidence_plans import PLANS, Asked, EvidencePlan, parts_of
from harness.options import (
    INTERRUPTED,
    NOTHING_RAN,
    Device,
    Junit,
    Load,
    Timeout,
    ask,
    choose,
    errors,
    fail,
    followed,
    say,
    worker_options,
)
from harness.report_command import after_run, before_work
from harness.runfolder import RunError, now, replace_file, revision
from reports import evidence_page, evidence_terminal

LONGEST = 90
UNRESOLVED = 4
SUMMARY = "summary.md"

Name = Annotated[str, typer.Argument(help="Which evidence; without it they are listed.", show_default=False)]
Sweeps = Annotated[bool, typer.Option("--sweeps/--no-sweeps", help="Also time against topk_length and keys, and look for the crossover.")]
EvidenceSamples = Annotated[int, typer.Option("--samples", min=0, help="Timing samples per arm and case; 0: as published.")]
EvidenceArms = Annotated[list[str] | None, typer.Option("--arm", help="kernel or kernel/arm; repeat for several. Default: as published.")]
Processes = Annotated[int, typer.Option("--processes", min=-1, help="Pairs of processes behind an interval; 0: none; -1: 3, on a CPU 2.")]
Compare = Annotated[Path | None, typer.Option("--compare", help="An evidence folder of the same name, to stand beside this one.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the page, Markdown, here.")]
Runs = Annotated[Path, typer.Option(help="Where the folder is made.")]


def evidence(name: Name = "", arm: EvidenceArms = None, device: Device = "auto", load: Load = None, samples: EvidenceSamples = 0,
             processes: Processes = -1, compare: Compare = None, out: Out = None, runs: Runs = Path("runs"), timeout: Timeout = 0.0,
             sweeps: Sweeps = True, junit: Junit = None) -> None:
    """Make the published evidence of a change again, as Markdown for a pull request. Without a GPU: at reduced shapes, to try it."""
    if not name:
        list_plans()
    plan = plan_of(name)
    before_work({"--out": out, "--junit": junit})
    other = other_folder(compare, name)
    options = worker_options(device, load, False, arm, 0.0)
    if processes == 1:
        fail("--processes 1: an interval needs 2 or more; 0 takes none")
    asked = Asked(sweeps, samples, processes, timeout)
    options, info = asked_for(plan, options, arm, asked)
    try:
        folder = EvidenceFolder.create(runs, info)
    except RunError as error:
        fail(str(error))
    execute(folder, plan, options, asked, other, out, junit)


def list_plans() -> NoReturn:
    """A line each."""
    for plan in PLANS.values():
        say(f"{plan.name:20} {plan.about}")
    raise typer.Exit(0)


def plan_of(name: str) -> EvidencePlan:
    """The plan of that name, or one line and exit 2."""
    if name not in PLANS:
        near = difflib.get_close_matches(name, PLANS, n=1)
        fail(f"unknown evidence {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}there is {', '.join(PLANS)}")
    return PLANS[name]


def other_folder(path: Path | None, name: str) -> EvidenceFolder | None:
    """What --compare names, or one line and exit 2."""
    if path is None:
        return None
    found = open_evidence(path)
    if found.info.name != name:
        fail(f"--compare {path}: it is evidence of {found.info.name}, not of {name}")
    return found


def open_evidence(path: Path) -> EvidenceFolder:
    """Read an evidence folder, or one line and exit 2."""
    try:
        return EvidenceFolder.load(path)
    except RunError as error:
        fail(str(error))


def asked_for(plan: EvidencePlan, options: WorkerOptions, arms: list[str] | None, asked: Asked) -> tuple[WorkerOptions, EvidenceInfo]:
    """The device, and what evidence.json says: kernels and parts. Exit 2 for an unknown arm, 5 where no kernel can run."""
    every = {reduced: [case for part in parts_of(plan, reduced, asked) for case in part.cases(reduced)] for reduced in (False, True)}
    description = ask(options, list(dict.fromkeys([*every[False], *every[True]])))
    options = dataclasses.replace(options, device=description["device"])
    reduced = not options.device.startswith("cuda")
    named = arms or list(plan.cpu if reduced else plan.gpu)
    kernels = choose(description["kernels"], every[reduced], named)
    notes = [f"not available: {kernel['name']}: {kernel['why_not']}" for kernel in kernels if kernel["why_not"]]
    usable = [cut_down(kernel, every[reduced]) for kernel in kernels if not kernel["why_not"]]
    if not usable:
        fail(f"no kernel of this evidence can run here: {'; '.join(notes)}", NOTHING_RAN)
    left_out = [part for part in parts_of(plan, False, asked) if part not in parts_of(plan, reduced, asked)]
    notes += [f"left out without a GPU: {part.name} (contract `{part.contract}`)" for part in left_out]
    notes += [] if asked.sweeps else ["sweeps left out: --no-sweeps"]
    notes += [] if asked.processes else ["no intervals over fresh processes: --processes 0"]
    info = EvidenceInfo(plan.name, now(), sys.argv, {**description["machine"], "threearm": revision()}, reduced,
                        [part_info(part, reduced, asked) for part in parts_of(plan, reduced, asked)], usable,
                        {"worker": dataclasses.asdict(options), "asked": dataclasses.asdict(asked)}, notes)
    return options, info


def cut_down(kernel: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    """The kernel without what it says of cases that are not run."""
    return {**kernel, "refused": {case: why for case, why in kernel["refused"].items() if case in cases}}


# --- carrying it out --------------------------------------------------------------------------------------------------


def execute(folder: EvidenceFolder, plan: EvidencePlan, options: WorkerOptions, asked: Asked, other: EvidenceFolder | None,
            out: Path | None, junit: Path | None) -> NoReturn:
    """Run, write and show the page, and exit. What is known is kept and shown whatever happens."""
    problem = ""
    with followed() as progress:
        try:
            Evidence(folder, plan, options, asked, progress).run()
        except KeyboardInterrupt:
            folder.info.interrupted = True
        except (RunError, Unfit) as error:
            problem = str(error)
            folder.info.notes.append(f"ended by: {problem}")
    try:
        folder.finish(complete=not folder.info.interrupted and not problem)
        page = evidence_page.page(folder, other)
        replace_file(folder.path / SUMMARY, page.encode())
        if out:
            out.write_text(page, encoding="utf-8")
    except RunError as error:
        problem = problem or str(error)
    except OSError as error:
        problem = problem or f"cannot write {error.filename}: {error.strerror}"
    code = after_run(folder, show(folder, other), junit)
    if problem:
        fail(problem, NOTHING_RAN)
    raise typer.Exit(code)


def show(folder: EvidenceFolder, other: EvidenceFolder | None = None, again: bool = False) -> int:
    """The page on a screen, short. again: it is a stored one. Returns the exit code."""
    evidence_terminal.show(folder, other)
    say(f"evidence: {folder.path}")
    code = code_of(folder)
    if folder.info.finished:
        return code
    count = sum(len(run.records) for run in folder.runs.values())
    errors.print(f"incomplete: {count} records and {len(folder.pairs)} comparisons are in {folder.path}", markup=False, highlight=False)
    for text in folder.lacking():
        errors.print(f"  lacks {text}", markup=False, highlight=False)
    if folder.info.interrupted and not again:
        return INTERRUPTED
    return code or UNRESOLVED
