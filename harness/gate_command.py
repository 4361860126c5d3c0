"""`threearm gate`: one case list through two environments, and whether anything got worse. docs/gate.md explains it."""
from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NoReturn

import typer

from harness.asking import Settings
from harness.client import Unfit
from harness.comparison import SIDES, Pairing, Rule
from harness.gate import Gate, Pair, Side, Stored, Timing
from harness.gate_folder import STORED, GateFolder, GateInfo, SideInfo
from harness.gate_pairs import all_pairs, named_pairs
from harness.gate_sides import at_work, given_side, live_options, live_side, loaded, not_passed_on, recorded_arms, stored_side
from harness.given import Kind
from harness.options import (
    NOTHING_RAN,
    Broken,
    Cases,
    Device,
    Fp64,
    Junit,
    Launches,
    Load,
    Memory,
    Timeout,
    console,
    errors,
    fail,
    followed,
    in_seconds,
    open_run,
    read_cases,
    say,
    worker_options,
)
from harness.report_command import after_run, before_work
from harness.runfolder import RunError, RunFolder, now, revision
from harness.sampling import AUTO, Plan
from harness.thresholds import ThresholdError, load, rule_for
from harness.transitions import UNRESOLVED
from harness.words import counted
from reports import gate as report
from reports.gate_page import failure_texts, untold_texts
from reports.gate_things import verdict
from reports.repeating import of_gate

GIVE_UP = 2
"""Cases in a row on which an arm hangs or crashes before it is asked no more."""
LONGEST = 90

Base = Annotated[str, typer.Option("--base", help="What is trusted: an interpreter, a pip requirement (KERNEL==1.0), or a run folder.")]
Candidate = Annotated[str, typer.Option("--candidate", help="What is to be judged: the same choices.")]
PairArms = Annotated[list[str] | None, typer.Option("--arm", help="kernel, kernel/arm, or BASE=CANDIDATE of either; repeat for several.")]
GateSuite = Annotated[str, typer.Option("--suite", help="A suite's name, or a file of cases. Default: a stored run's cases, or smoke.")]
Bitwise = Annotated[bool, typer.Option("--bitwise", help="Other bits are something wrong, even within the budget.")]
GateTime = Annotated[str, typer.Option("--time", help="span, wall, none, or auto: on cuda span, on cpu wall.")]
ThresholdFile = Annotated[Path | None, typer.Option("--thresholds", help="What `threearm calibrate` wrote on this machine.")]
Seconds = Annotated[float, typer.Option("--seconds", min=0.1, help="Timing of one arm on one case takes no longer, once it has enough.")]
Within = Annotated[str, typer.Option("--within", help="No more is timed after so long, such as 5m; what is open then is UNRESOLVED.")]
Processes = Annotated[int, typer.Option("--processes", min=2, help="Pairs of fresh processes that times are taken from, at least.")]
BaseEnv = Annotated[list[str] | None, typer.Option("--base-env", help="NAME=VALUE in the base's environment; repeat for several.")]
CandidateEnv = Annotated[list[str] | None, typer.Option("--candidate-env", help="The same in the candidate's.")]
Inherit = Annotated[bool, typer.Option("--inherit-packages", help="A requirement's environment sees the packages installed here.")]
Keep = Annotated[bool, typer.Option("--keep-outputs", help="Keep the outputs whose bits differ.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Also write the report for a pull request here.")]
Runs = Annotated[Path, typer.Option(help="Where run folders are made.")]


def gate(base: Base, candidate: Candidate, cases: Cases = None, suite: GateSuite = "", arm: PairArms = None, bitwise: Bitwise = False,
         time: GateTime = "auto", thresholds: ThresholdFile = None, seconds: Seconds = 5.0, within: Within = "",
         processes: Processes = 3, base_env: BaseEnv = None, candidate_env: CandidateEnv = None, inherit: Inherit = False,
         device: Device = "auto", load: Load = None, broken: Broken = False, timeout: Timeout = 0.0, memory: Memory = 0.0,
         fp64: Fp64 = False, launches: Launches = 0, keep_outputs: Keep = False, runs: Runs = Path("runs"),
         markdown: MarkdownFile = None, junit: Junit = None) -> None:
    """Compare two environments case by case: what broke, which numbers changed, what got slower. Exit 0 only if nothing got worse."""
    before_work({"--markdown": markdown, "--junit": junit})
    limit = in_seconds("--within", within) if within else 0.0
    given = [given_side(text, name) for text, name in zip((base, candidate), SIDES)]
    stored = [open_run(Path(side.place)) if side.kind is Kind.RUN_FOLDER else None for side in given]
    texts = case_list(cases, suite, stored)
    recorded = None if arm else recorded_arms(stored)
    if recorded is not None and not recorded:
        fail("the run folder has no records", NOTHING_RAN)
    load, gone = loaded(load, stored)
    options = worker_options(device, load, broken, [half for text in arm or recorded or () for half in text.split("=")], memory)
    if not memory and not any(stored):
        options = dataclasses.replace(options, memory=options.memory // 2)  # both sides hold a case at the same time
    settings = Settings(fp64=fp64, timeout=timeout, launches=launches, give_up=GIVE_UP)
    described = [stored_side(side, run) if run else live_side(side, options, texts, settings, env, name, inherit)
                 for side, run, env, name in zip(given, stored, (base_env, candidate_env), SIDES)]
    kernels = described[0].kernels, described[1].kernels
    pairs = named_pairs(*kernels, texts, arm) if arm else all_pairs(*kernels, texts, options.broken, recorded)
    if not pairs:
        why = next((f": {kernel['name']}: {kernel['why_not']}" for side in kernels for kernel in side if kernel["why_not"]), "")
        fail(f"no kernel can run on either side{why}", NOTHING_RAN)
    contract, why_not = contract_of(time, described)
    rule_of = rules(thresholds, described[1], contract)
    info = gate_info(texts, pairs, described, {"bitwise": bitwise, "time": contract or why_not, "settings": dataclasses.asdict(settings),
                                               "thresholds": str(thresholds or ""), "within": limit, "named": bool(arm)})
    info.options["lacking"] = [f"the {name}'s run lacks {counted(len(absent), 'record')}" for run, name in zip(stored, SIDES)
                               if run and (absent := run.missing())]
    info.notes += info.options["lacking"]
    info.notes += [*gone, *not_passed_on(described)]
    try:
        folder = GateFolder.create(runs, info)
    except RunError as error:
        fail(str(error))
    sides = [Stored(run, folder.sides[name]) if run else at_work(side, folder.sides[name], settings)
             for run, side, name in zip(stored, described, SIDES)]
    plan = Plan(contract, processes, most=max(9, processes), seconds=seconds, timeout=timeout, until=monotonic() + limit if limit else 0.0)
    timing = Timing(live_options(described[0]), live_options(described[1]), plan, rule_of) if contract else None
    execute(folder, (sides[0], sides[1]), pairs, timing, keep_outputs, markdown, junit)


def case_list(cases: list[str] | None, suite: str, stored: list[RunFolder | None]) -> list[str]:
    """The cases that are named; else those of a stored run; else smoke."""
    run = next((run for run in stored if run), None)
    return run.info.cases if run and not cases and not suite else read_cases(cases, suite or "smoke", "")


# --- what is compared -------------------------------------------------------------------------------------------------


def contract_of(time: str, sides: list[SideInfo]) -> tuple[str, str]:
    """The timing contract; or "" and why nothing is timed. Exit 2 for one that the device does not have, 5 if the devices differ."""
    if any(side.kind == STORED for side in sides):
        return "", "times of a run folder are never compared: they are another day's"
    base, candidate = (side.options["worker"]["device"] for side in sides)
    if base != candidate:
        fail(f"the base runs on {base}, the candidate on {candidate}: name one with --device", NOTHING_RAN)
    kind = candidate.partition(":")[0]
    allowed = ["auto", "none", "wall", *(["span"] if kind == "cuda" else [])]
    if time not in allowed:
        fail(f"--time {time}: allowed on {candidate} is {' | '.join(allowed)}")
    return ("", "--time none") if time == "none" else (AUTO[kind] if time == "auto" else time, "")


def rules(path: Path | None, side: SideInfo, contract: str) -> Callable[[Pairing], Rule]:
    """When a change of time is one. Exit 2 for thresholds that cannot be used here."""
    try:
        stored = load(path, side.machine) if path else None
    except ThresholdError as error:
        fail(f"--thresholds {error}")
    return lambda pairing: rule_for(stored, pairing, side.options["worker"]["device"], contract)


def gate_info(cases: list[str], pairs: list[Pair], sides: list[SideInfo], options: dict[str, Any]) -> GateInfo:
    """gate.json, with those kernels of each side that take part."""
    arms = [[f"{pair.names[0]}/{x}", f"{pair.names[1]}/{y}"] for pair in pairs for x, y in pair.arms]
    base = cut_down(sides[0], [pair.base for pair in pairs])
    candidate = cut_down(sides[1], [pair.candidate for pair in pairs])
    return GateInfo(now(), sys.argv, cases, arms, base, candidate, options, threearm=revision())


def cut_down(side: SideInfo, kernels: list[dict[str, Any] | None]) -> SideInfo:
    """The side with these kernels alone."""
    return SideInfo(side.what, side.kind, side.python, side.machine, [kernel for kernel in kernels if kernel], side.options)


# --- carrying it out --------------------------------------------------------------------------------------------------


def execute(folder: GateFolder, sides: tuple[Side, Side], pairs: list[Pair], timing: Timing | None, keep_outputs: bool,
            markdown: Path | None, junit: Path | None) -> NoReturn:
    """Run, write and show the result, and exit."""
    problem = ""
    with followed() as progress:
        try:
            Gate(folder, *sides, pairs, timing, keep_outputs, progress).run()
        except KeyboardInterrupt:
            folder.info.interrupted = True
        except (RunError, Unfit) as error:
            problem = str(error)
            folder.info.void.append(problem)
    try:
        folder.finish(complete=not folder.info.interrupted and not problem)
        page = markdown_page(folder)
        folder.write("summary.md", page)
        if markdown:
            markdown.write_text(page, encoding="utf-8")
    except RunError as error:
        problem = problem or str(error)
    except OSError as error:
        problem = problem or f"cannot write {markdown}: {error.strerror}"
    code = after_run(folder, show(folder), junit)
    if problem:
        fail(problem, NOTHING_RAN)
    raise typer.Exit(code)


def show(folder: GateFolder, again: bool = False) -> int:
    """The gate's result on a screen. again: it is a stored one. Returns the exit code."""
    console.print(report.terminal(folder.transitions, folder.info, str(folder.path), again))
    code = verdict(folder.transitions, folder.info, again)[0]
    if folder.info.finished:
        return code
    errors.print(f"incomplete: {len(folder.transitions)} comparisons are in {folder.path}", markup=False, highlight=False)
    return code or UNRESOLVED


def markdown_page(folder: GateFolder, again: bool = False) -> str:
    """The whole result as Markdown. again: it is a stored one."""
    return report.markdown(folder.transitions, folder.info, folder.records("base"), folder.records("candidate"), of_gate(folder), again)


def report_gate(folder: GateFolder, markdown: bool, failures: bool) -> None:
    """`threearm report` of a stored gate: show it again, or in full all that takes it from exit 0 and what fails on both sides."""
    if markdown:
        print(markdown_page(folder, again=True), end="")
    elif failures:
        told = failure_texts(folder.transitions, folder.info, folder.records("base"), folder.records("candidate"), of_gate(folder))
        told += untold_texts(folder.transitions, folder.info)
        code, said = verdict(folder.transitions, folder.info, again=True)
        say("\n\n".join([*([said] if code else []), *told]) or "nothing got worse, and nothing fails on both sides")
    else:
        show(folder, again=True)
