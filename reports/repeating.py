"""What the line that repeats a stored record needs besides its case and arm."""
from __future__ import annotations

import shlex
import sys
from collections.abc import Callable

from harness.comparison import Pairing
from harness.gate_folder import GateFolder, GateInfo
from harness.options import replay_options, stored_options
from harness.record import Record
from harness.runfolder import RunFolder
from harness.transitions import as_it_ended


def of_run(folder: RunFolder) -> Callable[[Record], list[str]]:
    """Of a run's records."""
    options, plan = stored_options(folder)
    return lambda record: replay_options(record, options, plan)


OF_ALL = ("--suite", "--arm", "--markdown", "--junit", "--runs")
"""Options of a gate's command, each with a value, that one of its comparisons replaces or does not need."""
FLAGS = ("--bitwise", "--broken", "--fp64", "--inherit-packages", "--keep-outputs")
"""Those without a value."""


def gate_again(info: GateInfo, pairing: Pairing) -> str:
    """The command that compares one pairing again, from that of the whole gate."""
    arms = pairing.base if pairing.base == pairing.candidate else f"{pairing.base}={pairing.candidate}"
    kept: list[str] = []
    rest = iter(info.command[2:])
    for word in rest:
        value = [] if "=" in word or word in FLAGS or not word.startswith("--") else [next(rest, "")]
        if word.startswith("--") and word.partition("=")[0] not in OF_ALL:
            kept += [word, *value]
    return shlex.join(["threearm", "gate", pairing.case, "--arm", arms, *kept])


def of_gate(folder: GateFolder) -> Callable[[str, Record], list[str]]:
    """Of the records of base or candidate."""
    stored = {name: stored_options(run) for name, run in folder.sides.items()}

    def repeat(side: str, record: Record) -> list[str]:
        options, plan = stored[side]
        other = ["--python", options.python] if options and options.python != sys.executable else []
        return [*replay_options(as_it_ended(record) or record, options, plan), *other]

    return repeat
