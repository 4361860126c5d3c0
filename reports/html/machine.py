"""Where a result comes from and how to repeat it, as a section."""
from __future__ import annotations

from typing import Any

from markupsafe import Markup

from harness.gate_folder import GateInfo
from harness.runfolder import RunInfo
from reports.evidence import command_line
from reports.gate_things import facts
from reports.html.parts import Section, render, table


def of_run(anchor: str, info: RunInfo) -> Section:
    """The machine and versions of a run."""
    return about(anchor, info.command, info.machine, info.kernels, info.started, info.finished)


def about(anchor: str, command: list[str], machine: dict[str, str], kernels: list[dict[str, Any]], started: str, finished: str) -> Section:
    """Command, time, machine, and the versions of kernels that have one."""
    versions = {kernel["name"]: str(kernel["version"]) for kernel in kernels if kernel.get("version")}
    rows = [["started", started], ["finished", finished or "not finished"], *map(list, machine.items()), *map(list, versions.items())]
    return Section(f"{anchor}-machine", "Machine, versions, how to repeat", repeat(command) + table(["", ""], rows))


def of_gate(anchor: str, info: GateInfo) -> Section:
    """Both sides: what differs first."""
    common, differ = facts(info)
    rows = [[key, before or "none", after or "none"] for key, (before, after) in differ.items()]
    sides = table(["", f"base: {info.base.what}", f"candidate: {info.candidate.what}"], rows or [["versions", "the same", "the same"]])
    same = [["threearm", info.threearm or "unknown"], ["started", info.started], ["finished", info.finished or "not finished"]]
    return Section(f"{anchor}-machine", "Both sides, machine, how to repeat",
                   repeat(info.command) + sides + table(["the same on both sides", ""], same + [list(item) for item in common.items()]))


def repeat(command: list[str]) -> Markup:
    """The command again."""
    return render("repeat", command=command_line(command))
