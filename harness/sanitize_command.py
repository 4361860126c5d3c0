"""`threearm replay --sanitize`: what a tool of compute-sanitizer says of an arm on one case."""
from __future__ import annotations

from typing import Any, NoReturn

import typer

from harness.asking import Settings
from harness.client import Unfit, WorkerDied, WorkerOptions
from harness.options import INTERRUPTED, NOTHING_RAN, fail, replay_options, say
from harness.runfolder import RunError, exit_code
from harness.sanitize import PROGRAM, TOOLS, find_program, sanitized
from reports import failure


def sanitizer(tool: str) -> str:
    """The program, or one line and exit 2 (no such tool) or 5 (no such program)."""
    if tool not in TOOLS:
        fail(f"--sanitize {tool}: allowed is {' | '.join(TOOLS)}")
    program = find_program()
    if program is None:
        fail(f"--sanitize {tool}: {PROGRAM} is neither on PATH nor in CUDA_HOME", NOTHING_RAN)
    return program


def replay_sanitized(options: WorkerOptions, plan: Settings, kernel: dict[str, Any], case: str, tool: str, program: str) -> NoReturn:
    """Run each of the kernel's arms under the tool, tell every check in full, and exit."""
    try:
        records = sanitized(options, plan, kernel, case, tool, program)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (RunError, Unfit, WorkerDied) as error:
        fail(str(error), NOTHING_RAN)
    for record in records:
        say(failure.describe(record, [*replay_options(record, options, plan), "--sanitize", tool], always=True))
    raise typer.Exit(exit_code(records))
