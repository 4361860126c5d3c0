"""The two sides of `threearm gate`, from what was given on the command line: what each is, its interpreter, machine and kernels."""
from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.asking import Settings
from harness.client import FOREIGN, Unfit, WorkerDied, WorkerOptions
from harness.comparison import SIDES
from harness.environments import make
from harness.gate import Live
from harness.gate_folder import LIVE, STORED, SideInfo
from harness.given import EnvironmentProblem, Given, Kind, read_side
from harness.options import NOTHING_RAN, errors, fail, stored_options
from harness.runfolder import RunFolder, revision
from harness.runner import Runner, describe


def given_side(text: str, name: str) -> Given:
    """What a side is, or one line and exit 2."""
    try:
        return read_side(text)
    except EnvironmentProblem as error:
        fail(f"--{name} {error}")


def interpreter(side: Given, name: str, inherit: bool) -> str:
    """The side's Python; a requirement's environment is made. One line and exit 5 if that cannot be done."""
    if side.kind is Kind.INTERPRETER:
        return side.place
    try:
        return make(side.place, inherit, lambda line: errors.print(line, highlight=False, markup=False))
    except EnvironmentProblem as error:
        fail(f"--{name}: {error}", NOTHING_RAN)


def variables(words: list[str] | None, options: WorkerOptions, name: str) -> tuple[str, ...]:
    """Environment variables of a side: those that decide how kernels run, and those that are given."""
    wrong = next((word for word in words or () if not word.partition("=")[0].isidentifier() or "=" not in word), None)
    if wrong is not None:
        fail(f"--{name}-env {wrong}: write NAME=VALUE")
    return (*options.environment, *(words or ()))


def stored_side(side: Given, run: RunFolder) -> SideInfo:
    """What a run folder says of its machine and kernels."""
    return SideInfo(side.text, STORED, "", run.info.machine, run.info.kernels, run.info.options)


def live_side(side: Given, options: WorkerOptions, cases: list[str], settings: Settings, env: list[str] | None, name: str,
              inherit: bool) -> SideInfo:
    """A live side's machine and kernels, from its worker. One line and exit 5 if it cannot run workers."""
    options = dataclasses.replace(options, environment=variables(env, options, name), python=interpreter(side, name, inherit))
    try:
        description = describe(options, cases)
    except Unfit as error:
        fail(f"--{name} {side.text}: {error}", NOTHING_RAN)
    except WorkerDied as death:
        fail(f"--{name} {side.text}: no worker can run there: {death.detail}", NOTHING_RAN)
    ready = dataclasses.replace(options, device=description["device"])
    machine = {**description["machine"], "threearm": revision(), **({"variables": " ".join(env)} if env else {})}
    return SideInfo(side.text, LIVE, options.python, machine, description["kernels"],
                    {"worker": dataclasses.asdict(ready), "settings": dataclasses.asdict(settings)})


def live_options(side: SideInfo) -> WorkerOptions:
    """How a live side's workers are started."""
    return msgspec.convert(side.options["worker"], WorkerOptions)


def at_work(side: SideInfo, folder: RunFolder, settings: Settings) -> Live:
    """A live side, with the run folder that its records go to."""
    return Live(Runner(folder, live_options(side), settings, folder.info.kernels, lambda case, arm, phase: None))


def not_passed_on(sides: list[SideInfo], shell: Mapping[str, str] = os.environ) -> list[str]:
    """Notes: variables of this shell that a live side's workers do not get. threearm's own interpreter keeps them."""
    told: dict[str, list[str]] = {}
    for variable in (name for name in FOREIGN if name != "VIRTUAL_ENV" and shell.get(name)):
        live = {name: side for name, side in zip(SIDES, sides) if side.kind == LIVE}
        given = [name for name, side in live.items()
                 if any(word.startswith(f"{variable}=") for word in side.options["worker"]["environment"])]
        own = [name for name, side in live.items() if side.python == sys.executable and name not in given]
        without = ", ".join(f"--{name}-env" for name in live if name not in given and name not in own)
        if without:
            where = f"passed on to the {own[0]} alone, threearm's own interpreter" if own else "not passed on"
            told.setdefault(f"of this shell is {where}: {without}", []).append(variable)
    return [f"{', '.join(names)} {text}" for text, names in told.items()]


# --- what a stored run brings along -----------------------------------------------------------------------------------


def recorded_arms(runs: list[RunFolder | None]) -> set[str] | None:
    """The arms that stored runs have records of, as kernel/arm; None if no side is one."""
    stored = [run for run in runs if run]
    return {record.arm for run in stored for record in run.records} if stored else None


def loaded(load: list[Path] | None, runs: list[RunFolder | None]) -> tuple[list[Path] | None, list[str]]:
    """The kernel files to load: those that are given, else those of a stored run that are still there; and notes on those that are not.
    Two stored runs load nothing."""
    if load or all(runs):
        return load, []
    files = {path: name for run, name in zip(runs, SIDES) if run and (worker := stored_options(run)[0]) for path in worker.load}
    there = [Path(path) for path in files if Path(path).is_file()]
    return there, [f"{path}, which the {name}'s run loaded, is not there any more: --load" for path, name in files.items()
                   if Path(path) not in there]
