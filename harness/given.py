"""What a side of a gate may be given as: an interpreter, a pip requirement, or the folder of a run (docs/gate.md). Parent side."""
from __future__ import annotations

import dataclasses
import enum
import os
import re
import shlex
import shutil
from pathlib import Path

from harness.marks import RUN, mark_of, what_it_is

COMPARATORS = re.compile(r"[=<>~!]=|[<>]|@")
PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")


class Kind(enum.Enum):
    """What a side was given as."""

    INTERPRETER = "interpreter"
    REQUIREMENT = "requirement"
    RUN_FOLDER = "run folder"


class EnvironmentProblem(Exception):
    """A side that is none of these, or an environment that cannot be made: one line."""


@dataclasses.dataclass(frozen=True)
class Given:
    """A side as it was given, and what it is. place: the interpreter's path, the requirement's words, or the folder's path."""

    text: str
    kind: Kind
    place: str


def read_side(text: str) -> Given:
    """What a side is: a run folder, an interpreter (or the folder of a venv), or a pip requirement. Raises EnvironmentProblem."""
    path = Path(text).expanduser()
    if mark_of(path) == RUN:
        return Given(text, Kind.RUN_FOLDER, str(path))
    if mark_of(path):
        raise EnvironmentProblem(f"{text} is not a run folder: {what_it_is(path)}")
    python = path / "bin" / "python" if (path / "pyvenv.cfg").is_file() else path
    found = shutil.which(str(python.absolute() if os.sep in text else python))  # a Path forgets that it began with ./
    if found:
        return Given(text, Kind.INTERPRETER, os.path.abspath(found))  # not resolved: a venv's python is a link to another's
    if any((path / name).is_file() for name in PROJECT_FILES) or (path.is_file() and path.suffix in (".whl", ".gz", ".zip")):
        return Given(text, Kind.REQUIREMENT, shlex.quote(str(path.resolve())))
    if path.exists():
        raise EnvironmentProblem(f"{text} is neither an interpreter, nor a run folder, nor a package")
    if not COMPARATORS.search(text) and ("/" in text or not re.fullmatch(r"[\w.\-\[\],]+", text)):
        raise EnvironmentProblem(f"{text}: no such file")
    if re.fullmatch(r"(python|pypy)[\d.]*", text):
        raise EnvironmentProblem(f"{text}: no such interpreter on PATH")
    if re.fullmatch(r"[\w.\-]+", text):  # a mistyped folder would fetch a stranger's package of that name
        raise EnvironmentProblem(f"{text}: no such file or interpreter; for a package write {text}==VERSION")
    return Given(text, Kind.REQUIREMENT, text)
