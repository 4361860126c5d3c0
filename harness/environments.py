"""What a side of a gate may be given as, and the environments made for requirements: one venv each, kept in a cache.

Parent side. docs/gate.md explains it.
"""
from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.client import FOREIGN

WHEELS = "https://download.pytorch.org/whl/"
"""Where builds of torch are that PyPI does not have; a version's local part (+cpu, +cu128) names the folder."""
DONE = "made.json"
"""Written last: an environment without it is half made, and made anew."""
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
    if (path / "run.json").is_file():
        return Given(text, Kind.RUN_FOLDER, str(path))
    if (path / "gate.json").is_file():
        raise EnvironmentProblem(f"{text} is a gate's folder; its {text}/base and {text}/candidate are run folders")
    python = path / "bin" / "python" if (path / "pyvenv.cfg").is_file() else path
    found = shutil.which(str(python))
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
    return Given(text, Kind.REQUIREMENT, text)


def make(requirement: str, inherit: bool, say: Callable[[str], None] = lambda line: None, cache: Path | None = None) -> str:
    """The interpreter of an environment in which a requirement is installed, made if there is none in the cache.

    requirement: pip requirements, written without spaces, separated by spaces. torch of the version that is installed here comes
    with it, unless the requirement names torch. inherit: the environment sees the packages that are installed here, and only what the
    requirement brings besides is installed. say: told a line before what takes long. Raises EnvironmentProblem.
    """
    words = shlex.split(requirement)
    root = cache or default_cache()
    folder = root / fingerprint(words, inherit)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{folder.name}.lock", lambda: say(f"another process is making the environment of {requirement}: waiting")):
            if not (folder / DONE).is_file():
                say(f"making an environment of {requirement} in {folder}")
                shutil.rmtree(folder, ignore_errors=True)
                _make(folder, words, inherit, root / f"{folder.name}.log")
                about = {"requirement": words, "inherit": inherit, "made by": sys.executable}
                (folder / DONE).write_text(json.dumps(about), encoding="utf-8")
    except OSError as error:
        raise EnvironmentProblem(f"cannot make an environment in {root}: {error.filename or ''}: {error.strerror}") from None
    return str(folder / "bin" / "python")


def default_cache() -> Path:
    """threearm's folder for environments, under the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "threearm" / "environments"


def fingerprint(words: list[str], inherit: bool) -> str:
    """What decides what is installed: the requirement (of a file or source tree its contents, too), interpreter and torch."""
    facts = [*words, *(_contents(word) for word in words), sys.version, sys.base_prefix, torch_version(), sys.prefix if inherit else ""]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def torch_version() -> str:
    """The version of torch that is installed here; "" without one. (Not imported: the parent never does.)"""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def torch_words(words: list[str]) -> list[str]:
    """What pip is told so that torch of our version comes along; [] where the requirement names torch."""
    version = torch_version()
    if not version or any(re.match(r"torch\b(?!-)", word) for word in words):
        return []
    build = version.partition("+")[2]
    return [f"torch=={version}", *(["--extra-index-url", WHEELS + build] if build else [])]


def _contents(word: str) -> str:
    """A fingerprint of a file or a source tree that a word names; "" of any other word."""
    path = Path(word.removeprefix("file://"))
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if not path.is_dir():
        return ""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return "\0".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


@contextlib.contextmanager
def _locked(file: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock on a file, which ends with this process, however it ends."""
    with open(file, "w", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(folder: Path, words: list[str], inherit: bool, log: Path) -> None:
    """Make the venv where it is to stay (its programs name their place), and install. Raises EnvironmentProblem."""
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentProblem(f"pip is not installed beside {sys.executable}; give an interpreter that has {' '.join(words)}")
    venv.create(folder, symlinks=True)
    if inherit:
        _show_ours(folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python", str(folder / "bin" / "python"), "install",
           "--log", str(log), *words, *([] if inherit else torch_words(words))]
    log.unlink(missing_ok=True)
    done = subprocess.run(pip, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
                          env={name: value for name, value in os.environ.items() if name not in FOREIGN})
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.strip().splitlines() or ["no reason"]
        raise EnvironmentProblem(f"pip could not install {' '.join(words)}: {told[-1].removeprefix('ERROR: ')} (log: {log})")


def _show_ours(folder: Path) -> None:
    """Let an environment see the packages of this one, behind its own. A venv of a venv would see those of the interpreter below."""
    place = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    place.mkdir(parents=True, exist_ok=True)
    ours = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("platlib")])
    (place / "threearm-inherited.pth").write_text("".join(f"{path}\n" for path in ours), encoding="utf-8")
