"""`threearm calibrate`: each arm timed against itself, several times; the thresholds that follow, in a file for `threearm gate`."""
from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from harness.client import Unfit, WorkerDied, WorkerOptions
from harness.comparison import Pairing, Round
from harness.options import (
    INTERRUPTED,
    NOTHING_RAN,
    PAUSE,
    Arms,
    Broken,
    Cases,
    Device,
    Environment,
    Load,
    Memory,
    NowAndThen,
    Overrides,
    Python,
    Suite,
    Timeout,
    ask,
    choose,
    console,
    errors,
    fail,
    progress_bar,
    read_cases,
    say,
    usable,
    with_environment,
    worker_options,
)
from harness.report_command import before_work
from harness.runfolder import now
from harness.runner import cases_of
from harness.sampling import AUTO, Plan, Side, sample_pairs
from harness.thresholds import DEFAULT, CaseThreshold, ThresholdError, Thresholds, calibrated, fingerprint, key, kind, load, save
from harness.words import counted
from reports import cells

INCOMPLETE = 4
LEAST_PROCESSES = 3
Comparisons = Annotated[int, typer.Option("--comparisons", min=2, help="A/A comparisons of each arm on each case.")]
Processes = Annotated[int, typer.Option("--processes", min=LEAST_PROCESSES, help="Pairs of fresh processes in each, as in the gate.")]
Contract = Annotated[str, typer.Option("--contract", help="span or wall; auto: span on cuda, wall on cpu.")]
Out = Annotated[Path, typer.Option("--out", help="The file. What it holds of other cases and arms on this machine is kept.")]


def calibrate(cases: Cases = None, suite: Suite = "smoke", arm: Arms = None, comparisons: Comparisons = 5, processes: Processes = 3,
              out: Out = Path("thresholds.json"), python: Python = "", env: Environment = None, contract: Contract = "auto",
              device: Device = "auto", load_files: Load = None, broken: Broken = False, settings: Overrides = "", timeout: Timeout = 0.0,
              memory: Memory = 0.0) -> None:
    """Time each arm against itself, and from that say what a change must be to be one."""
    before_work({"--out": out}, on_github=False)
    texts = read_cases(cases, suite, settings)
    options = with_environment(worker_options(device, load_files, broken, arm, memory), python, env)
    description = ask(options, texts)
    options = dataclasses.replace(options, device=description["device"])
    contract = contract_of(contract, options.device)
    stored = opened(out, description["machine"])
    chosen = choose(description["kernels"], texts, arm, broken)
    kernels = [kernel if kernel["why_not"] else usable(kernel, options) for kernel in chosen]
    pairings, refused = planned(kernels, texts)
    for line in refused if arm else ():
        say(line, style="dim")
    if not pairings:
        fail("no arm can run here; `threearm arms` says why", NOTHING_RAN)
    plan = Plan(contract=contract, processes=processes, timeout=timeout)
    made = now()
    taken = sampled(pairings, options, plan, comparisons)
    found = {pairing: calibrated(split(taken.get(pairing, []), processes), options.device, contract, made) for pairing in pairings}
    stored.cases |= {key(pairing.case, pairing.base): each for pairing, each in found.items() if each}
    stored.made, stored.command = made, sys.argv
    missing = [pairing for pairing, each in found.items() if each is None]
    if len(missing) < len(pairings):
        keep(stored, out)
        show({pairing: each for pairing, each in found.items() if each}, options.device, out)
    for pairing in missing:
        say(f"not calibrated: {pairing.base} on {pairing.case}: no comparison in which each process had a round that counts; "
            f"threearm run '{pairing.case}' --arm {pairing.base} may say why")
    raise typer.Exit(NOTHING_RAN if len(missing) == len(pairings) else INCOMPLETE if missing else 0)


def contract_of(contract: str, device: str) -> str:
    """The contract by name, or one line and exit 2 where the device does not have it."""
    own = AUTO[kind(device)]
    if contract not in ("auto", "wall", own):
        fail(f"--contract {contract}: allowed on {device} is {' | '.join(dict.fromkeys(('auto', own, 'wall')))}")
    return own if contract == "auto" else contract


def opened(out: Path, machine: dict[str, str]) -> Thresholds:
    """What the file holds already, or an empty one for this machine. One line and exit 2 if it is no such file, or of another machine."""
    if not out.exists():
        return Thresholds(fingerprint(machine))
    try:
        return load(out, machine)
    except ThresholdError as error:
        fail(f"--out {error}")


def planned(kernels: list[dict[str, Any]], texts: list[str]) -> tuple[list[Pairing], list[str]]:
    """Every arm against itself on every case that it takes; and a line for each that is left out."""
    pairings, refused = [], []
    for kernel in kernels:
        for case in cases_of(kernel, texts):
            for name in kernel["arms"]:
                arm, why = f"{kernel['name']}/{name}", kernel["why_not"] or kernel["refused"][case].get(name, "")
                if why:
                    refused.append(f"not calibrated: {arm} on {case}: {why}")
                else:
                    pairings.append(Pairing(case, arm, arm))
    return pairings, refused


def sampled(pairings: list[Pairing], options: WorkerOptions, plan: Plan, comparisons: int) -> dict[Pairing, list[list[Round]]]:
    """The rounds of all generations: `comparisons` times the processes of one. An interrupt leaves nothing to write."""
    told = NowAndThen(PAUSE)
    with tempfile.TemporaryDirectory() as folder, progress_bar(errors) as bar:
        task = bar.add_task("starting", total=comparisons * plan.processes)

        def progress(done: int, of: int, what: str) -> None:
            bar.update(task, completed=done, total=of, description=cells.short(what))
            if not errors.is_terminal:
                told.say(f"{done} of {of}  {what}")

        side = Side(options, Path(folder) / "worker.log")
        try:
            return sample_pairs(pairings, side, side, plan, comparisons * plan.processes, progress)
        except KeyboardInterrupt:
            bar.stop()
            fail("interrupted: nothing was written, thresholds need every comparison", INTERRUPTED)
        except (Unfit, WorkerDied) as error:
            bar.stop()
            fail(str(error), NOTHING_RAN)


def split(generations: list[list[Round]], processes: int) -> list[list[list[Round]]]:
    """Generations in groups of one comparison each, none in two of them. A rest that makes no comparison is left out."""
    return [generations[first: first + processes] for first in range(0, len(generations) - processes + 1, processes)]


def keep(stored: Thresholds, out: Path) -> None:
    """Write the file, or one line and exit 2."""
    try:
        save(stored, out)
    except ThresholdError as error:
        fail(str(error))


def show(found: dict[Pairing, CaseThreshold], device: str, out: Path) -> None:
    """The table, and what is worth a second look."""
    heads = ("median us", "A/A within", "threshold", "A/A fired", "unresolved", "sees")
    table = Table(Column("case", overflow="fold"), Column("arm", overflow="fold"), *(Column(head, justify="right") for head in heads),
                  title="thresholds", title_justify="left", title_style="bold")
    names = cells.names(list(dict.fromkeys(pairing.case for pairing in found)))
    for pairing, each in found.items():
        table.add_row(names[pairing.case], pairing.base, f"{each.median_us:,.1f}", percent(each.largest), percent(each.threshold),
                      f"{each.fired} of {each.comparisons}", f"{each.unresolved} of {each.comparisons}", percent(each.detectable))
    console.print(table)
    compared = sum(each.comparisons for each in found.values())
    fired, unresolved = sum(each.fired for each in found.values()), sum(each.unresolved for each in found.values())
    default = sum(each.by_default for each in found.values())
    say(f"{counted(compared, 'A/A comparison')} of {next(iter(found.values())).processes} pairs of processes: each under the threshold of "
        f"the others, {fired} fired, {unresolved} unresolved; under the default one {default} not SAME")
    for pairing, each in found.items():
        if each.threshold > DEFAULT[kind(device)]:
            say(f"wide: {pairing.base} on {pairing.case}: {percent(each.threshold)}, without calibration it is "
                f"{percent(DEFAULT[kind(device)])}; was something else running?")
    incomplete = sum(each.incomplete for each in found.values())
    if incomplete:
        say(f"{counted(incomplete, 'comparison')} left out: a process had no round that counts")
    say(f"thresholds: {out}")


def percent(value: float) -> str:
    """0.0123 is `1.23 %`; three figures, and all of them where there are more."""
    return f"{value * 100:,.0f} %" if value >= 1 else f"{value * 100:.3g} %"
