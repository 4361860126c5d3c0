"""`threearm limits`: whether each declared limit of a kernel is still there. An arm that passes has outgrown its declaration."""
from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import typer
from rich.table import Column, Table

from harness.asking import Asker, Settings
from harness.client import Unfit, WorkerDied, WorkerOptions
from harness.options import NOTHING_RAN, Arms, Device, Load, ask, console, fail, say, worker_options
from harness.record import Record
from harness.runner import probe
from harness.verdicts import Verdict

OUTGROWN = 1


def limits(arm: Arms = None, device: Device = "auto", load: Load = None) -> None:
    """Run every declared limit of every kernel: arms that `run` skips, on the case that shows why. Exit 1 if one of them passes."""
    options = worker_options(device, load, False, arm, 0.0)
    kernels = [kernel for kernel in ask(options, [])["kernels"] if not arm or kernel["name"] in arm]
    heads = (*(Column(head, no_wrap=True) for head in ("kernel", "arm")), *(Column(head, overflow="fold") for head in ("limit", "found")))
    table = Table(*heads, title="declared limits", title_justify="left", title_style="bold")
    found = [(kernel["name"], limit, record) for kernel in kernels for limit in kernel["limits"]
             for record in try_limit(options, kernel, limit)]
    for name, limit, record in found:
        what = f"{limit['key']}={'/'.join(limit['values'])}: {limit['reason']}"
        table.add_row(name, record.source, what, describe(record))
    console.print(table)
    ran = [record for _, _, record in found if record.verdict is not Verdict.SKIPPED]
    outgrown = [record for record in ran if record.verdict is Verdict.PASSED]
    for record in outgrown:
        say(f"{record.arm} passes {record.case}: its limit is no longer there, or this case does not show it")
    say(f"{len(ran)} limits tried, {len(ran) - len(outgrown)} still there; {len(found) - len(ran)} not tried")
    raise typer.Exit(OUTGROWN if outgrown else 0 if ran else NOTHING_RAN)


def try_limit(options: WorkerOptions, kernel: dict[str, Any], limit: dict[str, Any]) -> list[Record]:
    """A record for each arm that the limit is about. Each has a worker of its own: it may read outside its tensors."""
    sources = [arm for arm in kernel["arms"] if arm in limit["sources"]]
    why = kernel["why_not"]
    try:
        why = why or (probe(options, Path("/dev/null"), kernel["name"])[0] if kernel["imports"] else "")
    except WorkerDied as death:
        why = death.detail
    if why:
        return [Record(limit["case"], f"{kernel['name']}/{source}", Verdict.SKIPPED, why) for source in sources]
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            asker = Asker(options, Settings(), Path(folder) / "worker.log", records.append)
            try:
                asker.run_case(kernel["name"], limit["case"], [source])
            except Unfit as error:
                fail(str(error), NOTHING_RAN)
            finally:
                asker.kill()
    return records


def describe(record: Record) -> str:
    """What became of an arm on its limit's case, in one line."""
    if record.verdict is Verdict.SKIPPED:
        return f"not tried: {record.detail}"
    if record.verdict is Verdict.PASSED:
        return "PASSED: no longer there?"
    failed = [check.name for check in record.checks if check.verdict not in (Verdict.PASSED, Verdict.VACUOUS)]
    return f"still there: {record.verdict.value} " + (f"({', '.join(failed)})" if failed else record.detail)
