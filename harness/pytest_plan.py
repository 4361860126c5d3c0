"""What pytest is to run, from its options. Used by pytest_plugin.py."""
from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from harness.asking import Settings
from harness.client import WorkerOptions
from harness.options import ask, choose, contract_for, read_cases, worker_options
from harness.runfolder import revision
from harness.runner import cases_of
from harness.writable import why_not


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be run, found out once: the processes of pytest-xdist get it from the controller. gpus: the models of those there are."""

    cases: list[str]
    kernels: list[dict[str, Any]]
    options: WorkerOptions
    settings: Settings
    machine: dict[str, str]
    unavailable: dict[str, str]
    gpus: list[str]


@dataclasses.dataclass(frozen=True)
class Part:
    """What a process of pytest-xdist is told. gpu: which one is its own, -1 for none; folder: what it is to make."""

    plan: Plan
    gpu: int
    folder: str


def make_plan(config: pytest.Config) -> Plan:
    """From the options. Raises pytest.UsageError with the line that the command line would print."""
    given = config.option
    why = why_not(config.invocation_params.dir / given.threearm_runs)
    if why and not given.collectonly:
        raise pytest.UsageError(f"--threearm-runs={given.threearm_runs}: no run folder can be made there: {why}")
    with usage_errors():
        suite = read_cases(None, given.threearm_suite, "") if given.threearm_suite else []
        cases = list(dict.fromkeys([*suite, *(read_cases(given.threearm_case, "", "") if given.threearm_case else [])]))
        load = [config.invocation_params.dir / path for path in given.threearm_load]
        options = worker_options(given.threearm_device, load, False, given.threearm_arm, 0.0)
        description = ask(options, cases)
        options = dataclasses.replace(options, device=description["device"])
        kernels = choose(description["kernels"], cases, given.threearm_arm)
        if given.threearm_samples < 1:
            raise pytest.UsageError(f"--threearm-samples {given.threearm_samples}: at least 1")
        settings = Settings(contract_for(given.threearm_time, options.device), given.threearm_samples, timeout=given.threearm_timeout,
                            launches=given.threearm_launches)
    others = [] if given.threearm_arm else description["kernels"]
    unavailable = {k["name"]: k["why_not"] for k in others if k["why_not"] and cases_of(k, cases)}
    machine = {**description["machine"], "threearm": revision()}
    return Plan(cases, kernels, options, settings, machine, unavailable, description["gpus"])


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the end of a command into pytest's own, with the line that was printed."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except typer.Exit:
        raise pytest.UsageError(said.getvalue().strip()) from None


def processes_of(config: pytest.Config) -> int:
    """How many processes pytest-xdist starts; 0 where it starts none."""
    if config.getoption("dist", "no") == "no":
        return 0
    return sum(int(word) if star and word.isdecimal() else 1
               for word, star, _ in (text.partition("*") for text in config.getoption("tx", None) or []))


def check_processes(plan: Plan, processes: int, dist: str) -> None:
    """Raise pytest.UsageError where several processes cannot do it."""
    if not processes:
        return
    if dist == "each":
        raise pytest.UsageError("--dist each would run every case in every process; leave it out")
    places = len(plan.gpus) if plan.options.device == "cuda" else 1
    if plan.settings.contract and processes > places:
        where = f"{places} GPU{'s' if places > 1 else ''}" if plan.options.device.startswith("cuda") else "one CPU"
        raise pytest.UsageError(f"--threearm-time {plan.settings.contract} with {processes} processes on {where}: "
                                "what is timed is shared with nothing")
    if plan.settings.contract == "wall" and processes > 1:
        raise pytest.UsageError(f"--threearm-time wall with {processes} processes: they share a CPU, whose time it is")
