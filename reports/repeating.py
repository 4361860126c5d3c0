"""What the line that repeats a stored record needs besides its case and arm."""
from __future__ import annotations

import sys
from collections.abc import Callable

from harness.gate_folder import GateFolder
from harness.options import replay_options, stored_options
from harness.record import Record
from harness.runfolder import RunFolder
from harness.transitions import as_it_ended


def of_run(folder: RunFolder) -> Callable[[Record], list[str]]:
    """Of a run's records."""
    options, plan = stored_options(folder)
    return lambda record: replay_options(record, options, plan)


def of_gate(folder: GateFolder) -> Callable[[str, Record], list[str]]:
    """Of the records of base or candidate."""
    stored = {name: stored_options(run) for name, run in folder.sides.items()}

    def repeat(side: str, record: Record) -> list[str]:
        options, plan = stored[side]
        other = ["--python", options.python] if options and options.python != sys.executable else []
        return [*replay_options(as_it_ended(record) or record, options, plan), *other]

    return repeat
