"""`threearm limits`: whether each declared limit of a kernel is still there. An arm that passes has outgrown its declaration."""
from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.table import Column, Table

from cases import FAMILIES
from harness.asking import Asker, Settings
from harness.client import Unfit, WorkerDied, WorkerOptions
from harness.options import (
    INTERRUPTED,
    NOTHING_RAN,
    Arms,
    Device,
    Load,
    Memory,
    OfFamily,
    Timeout,
    ask,
    choose,
    console,
    errors,
    fail,
    progress_bar,
    say,
    worker_options,
)
from harness.record import Record
from harness.runner import probe
from harness.verdicts import Verdict
from harness.words import counted

OUTGROWN = 1
Found = list[tuple[str, dict[str, Any], Record]]
"""A kernel's name, a limit as a worker describes it, and what became of an arm on its case."""


def limits(arm: Arms = None, family: OfFamily = "", device: Device = "auto", load: Load = None, timeout: Timeout = 0.0,
           memory: Memory = 0.0) -> None:
    """Run every declared limit of every kernel: arms that `run` skips, on the case that shows why. Exit 1 if one of them passes."""
    if family and family not in FAMILIES:
        fail(f"--family {family}: families are {' and '.join(FAMILIES)}")
    options = worker_options(device, load, False, arm, memory)
    kernels = chosen(ask(options, [])["kernels"], family, arm)
    silent = [kernel for kernel in kernels if not declared(kernel)]
    for kernel in silent if arm else ():
        say(f"{kernel['name']} declares no limit{' of ' + ' or '.join(kernel['arms']) if kernel['limits'] else ''}")
    if len(silent) == len(kernels):
        if not arm:
            say(f"no kernel{' of ' + family if family else ''} declares a limit")
        raise typer.Exit(NOTHING_RAN)
    found: Found = []
    total, interrupted = sum(len(declared(kernel)) for kernel in kernels), False
    try:
        find(kernels, options, Settings(timeout=timeout), found, total)
    except KeyboardInterrupt:
        interrupted = True
        say(f"interrupted after {len(found)} of {counted(total, 'limit')}")
    heads = (*(Column(head, no_wrap=True) for head in ("kernel", "arm")), *(Column(head, overflow="fold") for head in ("limit", "found")))
    table = Table(*heads, title="declared limits", title_justify="left", title_style="bold")
    for name, limit, record in found:
        table.add_row(name, record.source, in_words(limit), describe(record))
    if found:
        console.print(table)
    ran = [record for _, _, record in found if record.verdict is not Verdict.SKIPPED]
    outgrown = [record for record in ran if record.verdict is Verdict.PASSED]
    for record in outgrown:
        say(f"{record.arm} passes {record.case}: its limit is no longer there, or this case does not show it")
    say(f"{counted(len(ran), 'limit')} tried, {len(ran) - len(outgrown)} still there; {total - len(ran)} not tried")
    raise typer.Exit(OUTGROWN if outgrown else INTERRUPTED if interrupted else 0 if ran else NOTHING_RAN)


def chosen(kernels: list[dict[str, Any]], family: str, arms: list[str] | None) -> list[dict[str, Any]]:
    """The kernels whose limits are tried, `arms` of each cut down to those asked for: also those that cannot run here, which is told."""
    families = [family] if family else list(FAMILIES)
    if arms:
        return choose(kernels, [f"{name}:" for name in families], arms)
    return [kernel for kernel in kernels if kernel["family"] in families]


def declared(kernel: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Each limit of a kernel with each of the arms that it is about."""
    return [(limit, source) for limit in kernel["limits"] for source in kernel["arms"] if source in limit["sources"]]


def find(kernels: list[dict[str, Any]], options: WorkerOptions, settings: Settings, found: Found, total: int) -> None:
    """Try every limit and fill `found`: a bar on a terminal, in a log each row as it is found."""
    with progress_bar(errors) as bar:
        task = bar.add_task("starting", total=total)
        for kernel in kernels:
            limits_of = declared(kernel)
            bar.update(task, description=kernel["name"])
            why, none_only = cannot(kernel, options) if limits_of else ("", "")
            for limit, source in limits_of:
                bar.update(task, description=f"{kernel['name']}/{source}")
                reason = why or (none_only if source != "none" else "")
                record = (Record(limit["case"], f"{kernel['name']}/{source}", Verdict.SKIPPED, reason) if reason
                          else try_limit(options, settings, kernel["name"], source, limit["case"]))
                found.append((kernel["name"], limit, record))
                bar.update(task, completed=len(found))
                if not errors.is_terminal:
                    errors.print(f"{len(found)} of {total}  {record.arm}  {in_words(limit)}  {describe(record)}", highlight=False,
                                 markup=False)


def cannot(kernel: dict[str, Any], options: WorkerOptions) -> tuple[str, str]:
    """Why a kernel cannot run here, and why it has its none arm alone; "" where it can. Imports its package, in a process of its own."""
    if kernel["why_not"] or not kernel["imports"]:
        return kernel["why_not"], ""
    try:
        return probe(options, Path(os.devnull), kernel["name"])
    except WorkerDied as death:
        return death.detail, ""


def try_limit(options: WorkerOptions, settings: Settings, name: str, source: str, case: str) -> Record:
    """What becomes of an arm on its limit's case. It has a worker of its own: it may read outside its tensors."""
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(options, settings, Path(folder) / "worker.log", records.append)
        try:
            asker.run_case(name, case, [source])
        except Unfit as error:
            fail(str(error), NOTHING_RAN)
        finally:
            asker.kill()
    return records[0]


def in_words(limit: dict[str, Any]) -> str:
    return f"{limit['key']}={'/'.join(limit['values'])}: {limit['reason']}"


def describe(record: Record) -> str:
    """What became of an arm on its limit's case, in one line."""
    if record.verdict is Verdict.SKIPPED:
        return f"not tried: {record.detail}"
    if record.verdict is Verdict.PASSED:
        return "PASSED: no longer there?"
    failed = [check.name for check in record.checks if check.verdict not in (Verdict.PASSED, Verdict.VACUOUS)]
    return f"still there: {record.verdict.value} " + (f"({', '.join(failed)})" if failed else record.detail)
