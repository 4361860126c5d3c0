"""The environments made for the pip requirements of a gate: one venv each, kept in a cache.

Parent side. docs/gate.md explains it.
"""
from __future__ import annotations

import contextlib
import dataclasses
import datetime
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
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from harness.client import FOREIGN
from harness.given import EnvironmentProblem

WHEELS = "https://download.pytorch.org/whl/"
"""Where builds of torch are that PyPI does not have; a version's local part (+cpu, +cu128) names the folder."""
DONE = "made.json"
"""Written last: an environment without it is half made, and made anew."""
PINNED = re.compile(r"#(.*&)?sha256=[0-9a-f]{64}|@[0-9a-f]{40}(#|$)")
"""In a word: the content is named by its hash."""
BUILT = ("build", "dist", ".git")
"""Folders at the top of a source tree that building it, or git, writes to. They are no part of its contents."""


@dataclasses.dataclass(frozen=True)
class Package:
    """What pip installs. content: "sha256 ..." of an archive, "commit ..." of a repository, "tree ..." of a source tree, its hash.
    named: the requirement names it; else it is a dependency. source: what tells pip to install just this. needs: it has dependencies."""

    name: str
    version: str
    content: str
    named: bool
    source: str
    needs: bool

    def __str__(self) -> str:
        kind, _, digest = self.content.partition(" ")
        return f"{self.name} {self.version} {kind} {digest[:12]}"


class PipProblem(Exception):
    """pip ended with an error: its last line."""


def make(requirement: str, inherit: bool, say: Callable[[str], None] = lambda line: None, cache: Path | None = None) -> str:
    """The interpreter of an environment in which a requirement is installed, made if the cache has none of what pip would install now.

    requirement: pip requirements, written without spaces, separated by spaces. torch of the version that is installed here comes
    with it, unless the requirement names torch. inherit: the environment sees the packages that are installed here; what the requirement
    names is installed into it all the same, and so are dependencies that are not installed here. say: told a line before what takes
    long, and a line on what the environment has. Raises EnvironmentProblem.
    """
    words = _split(requirement)
    root = cache or default_cache()
    if importlib.util.find_spec("pip") is None:
        raise EnvironmentProblem(f"pip is not installed beside {sys.executable}; give an interpreter that has {requirement}")
    try:
        name = fingerprint(words, inherit)
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{name}.lock", lambda: say(f"another process is making the environment of {requirement}: waiting")):
            log = root / f"{name}.log"
            log.unlink(missing_ok=True)
            try:
                packages = _ask(words, inherit, log)
            except PipProblem as problem:
                folder = _unchecked(requirement, words, root, name, f"{problem} (log: {log})")
                say(f"{_told(folder, requirement)}. Could not be checked, for pip says: {problem}")
                return str(folder / "bin" / "python")
            folder = root / f"{name}-{_digest(repr(sorted(_facts(packages))))}"
            if not (folder / DONE).is_file():
                say(f"making an environment of {requirement} in {folder}")
                shutil.rmtree(folder, ignore_errors=True)
                _install(folder, words, inherit, packages, log)
                about = {"requirement": words, "inherit": inherit, "made by": sys.executable,
                         "made": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
                         "packages": [dataclasses.asdict(package) for package in packages]}
                (folder / DONE).write_text(json.dumps(about, indent=1), encoding="utf-8")
            say(_told(folder, requirement))
    except OSError as error:
        raise EnvironmentProblem(f"cannot make an environment in {root}: {error.filename or ''}: {error.strerror}") from None
    return str(folder / "bin" / "python")


def default_cache() -> Path:
    """threearm's folder for environments, under the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "threearm" / "environments"


def fingerprint(words: list[str], inherit: bool) -> str:
    """The first part of an environment's name: the requirement (of a file or source tree its contents, too), interpreter and torch.
    The second part is what pip would install for it."""
    facts = [*words, *(_contents(word) for word in words), sys.version, sys.base_prefix, torch_version(), sys.prefix if inherit else ""]
    return _digest("\0".join(facts))


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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _split(requirement: str) -> list[str]:
    """The requirement's words; "name @ address" is one."""
    words: list[str] = []
    for word in shlex.split(requirement):
        if words and (word == "@" or words[-1].endswith("@")):
            words[-1] += word
        else:
            words.append(word)
    return words


def _local(address: str) -> Path:
    """The path that a word, or an address without a name, stands for. It need not exist."""
    address = re.sub(r"^[\w.\-]+(\[[\w.\-,]*\])?@(?=file:)", "", address)
    return Path(url2pathname(urlsplit(address).path) if address.startswith("file:") else address)


def _contents(word: str) -> str:
    """A fingerprint of a file or a source tree that a word names; "" of any other word. What building writes into a tree is left out."""
    path = _local(word)
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if not path.is_dir():
        return ""
    inner = {file: file.relative_to(path).parts for file in sorted(path.rglob("*")) if file.is_file()}
    files = [file for file, parts in inner.items() if (len(parts) == 1 or parts[0] not in BUILT)
             and not any(part == "__pycache__" or part.endswith(".egg-info") for part in parts)]
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


def _create(folder: Path, inherit: bool) -> Path:
    """A venv with nothing installed into it; its interpreter."""
    venv.create(folder, symlinks=True)
    if inherit:
        _show_ours(folder)
    return folder / "bin" / "python"


def _pip(python: Path, words: list[str], log: Path) -> list[Package]:
    """What `pip install` of words does, or with --dry-run would do, to an interpreter. Raises PipProblem."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.json")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--python", str(python), "install",
               "--log", str(log), "--report", str(report), *words]
        done = subprocess.run(pip, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
                              env={name: value for name, value in os.environ.items() if name not in FOREIGN})
        if done.returncode:
            told = done.stderr.strip().splitlines() or ["no reason"]
            raise PipProblem(([line for line in told if line.startswith("ERROR:")] or told)[-1].removeprefix("ERROR: "))
        return [_package(item) for item in json.loads(report.read_text(encoding="utf-8"))["install"]]


def _package(item: dict[str, Any]) -> Package:
    """An entry of pip's report. Raises EnvironmentProblem if it does not say what would be installed."""
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    info = item["download_info"]
    url, source, archive = info["url"], f"{name}=={version}", info.get("archive_info", {})
    digest = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").partition("sha256=")[2]
    path = _local(url)
    if "vcs_info" in info:
        content = f"commit {info['vcs_info']['commit_id']}"
        url = f"{info['vcs_info']['vcs']}+{url}@{info['vcs_info']['commit_id']}"
    elif "dir_info" in info:
        content = f"tree {_digest(_contents(url))}"
    elif not digest:
        raise EnvironmentProblem(f"pip gives no sha256 of {url}: download it and give the file")
    elif url.startswith("file:") and path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        # pip keeps the wheels it builds by the address of their source, and would install the one built from an earlier file there
        raise EnvironmentProblem(f"pip takes {name} {version} from its cache, built from an earlier {path}: set PIP_NO_CACHE_DIR=1")
    else:
        content = f"sha256 {digest}"
    if item["is_direct"]:
        source = f"{name} @ {url}" + (f"#subdirectory={info['subdirectory']}" if "subdirectory" in info else "")
    return Package(name, version, content, bool(item["requested"]), source, bool(item["metadata"].get("requires_dist")))


def _ask(words: list[str], inherit: bool, log: Path) -> list[Package]:
    """What pip would install into an environment that has nothing of its own. Raises PipProblem and EnvironmentProblem."""
    with tempfile.TemporaryDirectory() as place:
        python = _create(Path(place), inherit)
        if not inherit:
            return _pip(python, ["--dry-run", *words, *torch_words(words)], log)
        named = _pip(python, ["--dry-run", "--ignore-installed", "--no-deps", *words], log)
        # a second question, because --ignore-installed would bring anew every dependency that is installed here, torch among them
        others = _pip(python, ["--dry-run", *words], log) if any(package.needs for package in named) else []
    names = {_plain(package.name) for package in named}
    return named + [package for package in others if _plain(package.name) not in names]


def _install(folder: Path, words: list[str], inherit: bool, packages: list[Package], log: Path) -> None:
    """Make the venv where it is to stay (its programs name their place), and install what pip said it would. Raises EnvironmentProblem."""
    # --ignore-installed: else pip leaves out what is installed here in the same version, and the side would be what is installed here
    sharing = ["--ignore-installed", "--no-deps", *words, *(package.source for package in packages if not package.named)]
    try:
        installed = _pip(_create(folder, inherit), sharing if inherit else [*words, *torch_words(words)], log)
    except PipProblem as problem:
        raise EnvironmentProblem(f"pip could not install {' '.join(words)}: {problem} (log: {log})") from None
    if changed := _facts(installed) ^ _facts(packages):
        raise EnvironmentProblem(f"{sorted(changed)[0][0]} changed while it was installed: start again")
    _confirm(folder, packages)


def _confirm(folder: Path, packages: list[Package]) -> None:
    """See that packages lie in the environment itself, not where those are that it inherits. Raises EnvironmentProblem."""
    paths = [str(_site(folder, kind)) for kind in ("purelib", "platlib")]
    own = {(_plain(each.metadata["Name"]), each.version) for each in importlib.metadata.distributions(path=paths)}
    missing = [package for package in packages if (_plain(package.name), package.version) not in own]
    if missing:
        raise EnvironmentProblem(f"{missing[0].name} {missing[0].version} is not in {folder}, though pip says that it installed it")


def _facts(packages: list[Package]) -> set[tuple[str, str, str]]:
    return {(_plain(package.name), package.version, package.content) for package in packages}


def _plain(name: str) -> str:
    """A package's name as those who compare names write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _unchecked(requirement: str, words: list[str], root: Path, name: str, problem: str) -> Path:
    """The newest environment of a requirement that pip cannot be asked about, if its words name contents. Raises EnvironmentProblem."""
    made = sorted(root.glob(f"{name}-*/{DONE}"), key=lambda file: file.stat().st_mtime)
    if not made:
        raise EnvironmentProblem(f"pip could not install {requirement}: {problem}")
    folder = made[-1].parent
    if not all(_contents(word) or PINNED.search(word) for word in words):
        raise EnvironmentProblem(f"pip cannot be asked whether it would still install the same: {problem}. Give {folder} to take it "
                                 f"unchecked: {_told(folder, requirement)}")
    return folder


def _told(folder: Path, requirement: str) -> str:
    """What an environment has: what the requirement names, by content, and how many besides."""
    about = json.loads((folder / DONE).read_text(encoding="utf-8"))
    packages = [Package(**package) for package in about["packages"]]
    named = [str(package) for package in packages if package.named]
    more = f" and {len(packages) - len(named)} more" if len(packages) > len(named) else ""
    return f"environment of {requirement}, made {about['made']}: {', '.join(named)}{more}"


def _site(folder: Path, kind: str) -> Path:
    """Where a venv's packages lie. kind: purelib or platlib."""
    return Path(sysconfig.get_path(kind, "posix_prefix", vars={"base": str(folder), "platbase": str(folder)}))


def _show_ours(folder: Path) -> None:
    """Let an environment see the packages of this one, behind its own. A venv of a venv would see those of the interpreter below."""
    place = _site(folder, "purelib")
    place.mkdir(parents=True, exist_ok=True)
    ours = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("platlib")])
    (place / "threearm-inherited.pth").write_text("".join(f"{path}\n" for path in ours), encoding="utf-8")
