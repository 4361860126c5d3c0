"""What a side of a gate is taken for, and the environments made for requirements. Nothing is downloaded: pip is given no index."""
from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from wheels import wheel

from harness import environments
from harness.environments import DONE, fingerprint, make, torch_version, torch_words
from harness.given import EnvironmentProblem, Kind, read_side


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def package(folder: Path, version: str, name: str = "threearm-test-package", more: str = "") -> Path:
    """A source tree of a package with one module; setuptools, which builds it, is taken from here."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    (folder / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "{name}"\n'
        f'version = "{version}"\n{more}\n[tool.setuptools]\npy-modules = ["{module}"]\n')
    (folder / f"{module}.py").write_text(f"VERSION = {version!r}\n")
    return folder


def version_seen(python: str) -> str:
    code = "import threearm_test_package as p, importlib.util as u; print(p.VERSION, bool(u.find_spec('torch')))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.strip()


# --- what a side is ---------------------------------------------------------------------------------------------------


def test_an_interpreter_by_path_by_name_and_by_its_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").touch()
    link = str(tmp_path / "bin" / "python")
    assert read_side(link).place == link, "a venv's python must not be resolved"
    assert read_side(str(tmp_path)).place == link
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    found = read_side("python")
    assert (found.kind, found.place) == (Kind.INTERPRETER, link)


def test_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    assert read_side(str(tmp_path)).kind is Kind.RUN_FOLDER


@pytest.mark.parametrize("text", ["sgl-flash-mla==1.0.0", "kernel[cuda]", "kernel[cuda]>=2,<3", "pkg@https://example.org/pkg.whl",
                                  "a==1 torch==2.8.0"])
def test_a_requirement(text: str) -> None:
    found = read_side(text)
    assert (found.kind, found.place) == (Kind.REQUIREMENT, text)


def test_a_wheel_and_a_source_tree_are_requirements(tmp_path: Path) -> None:
    assert read_side(str(wheel(tmp_path / "a b", "1"))).kind is Kind.REQUIREMENT
    assert read_side(str(package(tmp_path / "tree", "1"))).kind is Kind.REQUIREMENT


@pytest.mark.parametrize("text", ["./no/such/python", "/nowhere/bin/python", "python3.99", "pypy9", "runs/2026 gone", ""])
def test_what_is_nothing_of_these_is_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentProblem) as raised:
        read_side(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["s2", "pyhton", "sgl-kernel", "runs.old"])
def test_a_mistyped_name_fetches_no_strangers_package(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentProblem, match=f"^{text}: no such file or interpreter; for a package write {text}==VERSION$"):
        read_side(text)


def test_a_file_that_cannot_be_run_is_no_requirement(tmp_path: Path) -> None:
    (tmp_path / "python==3").touch()
    with pytest.raises(EnvironmentProblem, match="neither"):
        read_side(str(tmp_path / "python==3"))


def test_a_gates_folder_says_what_of_it_can_be_taken(tmp_path: Path) -> None:
    (tmp_path / "gate.json").touch()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "run.json").touch()
    with pytest.raises(EnvironmentProblem, match="it is a gate's folder; run folders in it: base"):
        read_side(str(tmp_path))


# --- environments -----------------------------------------------------------------------------------------------------


def test_an_environment_is_made_once_for_each_version(tmp_path: Path) -> None:
    one, two = str(wheel(tmp_path, "1.0")), str(wheel(tmp_path, "2.0"))
    said: list[str] = []
    first = make(one, True, said.append, tmp_path / "cache")
    second = make(two, True, said.append, tmp_path / "cache")
    assert (version_seen(first), version_seen(second)) == ("1.0 True", "2.0 True")
    assert make(one, True, said.append, tmp_path / "cache") == first
    assert [line.split()[0] for line in said] == ["making", "environment", "making", "environment", "environment"]
    digest = hashlib.sha256(Path(one).read_bytes()).hexdigest()[:12]
    assert said[-1].startswith(f"environment of {one}, made 2") and said[-1].endswith(f": threearm-test-package 1.0 sha256 {digest}")


def test_a_half_made_environment_is_made_anew(tmp_path: Path) -> None:
    path, cache = str(wheel(tmp_path, "1.0")), tmp_path / "cache"
    python = make(path, True, cache=cache)
    half = Path(python).parents[1]
    (half / DONE).unlink()
    shutil.rmtree(half / "lib")
    (half / "left over").touch()
    assert make(path, True, cache=cache) == python
    assert version_seen(python) == "1.0 True"
    assert not (half / "left over").exists() and (half / DONE).is_file()


def test_without_inheritance_our_packages_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "torch_words", lambda words: [])
    python = make(str(wheel(tmp_path, "1.0")), False, cache=tmp_path / "cache")
    assert version_seen(python) == "1.0 False"


def test_an_inherited_package_is_hidden_by_the_requirements_own(tmp_path: Path) -> None:
    """The environment's own packages come before ours: the wheel under test must win."""
    path = wheel(tmp_path, "1.0")
    python = make(str(path), True, cache=tmp_path / "cache")
    order = subprocess.run([python, "-c", "import sys; print('\\n'.join(sys.path))"], capture_output=True, text=True, check=True).stdout
    lines = order.splitlines()
    own, ours = (next(n for n, line in enumerate(lines) if line.startswith(start)) for start in (str(tmp_path / "cache"), sys.prefix))
    assert own < ours


# --- what is measured is what was given -------------------------------------------------------------------------------


NAME = "threearm-test-package"


def build_seen(python: str, module: str = "threearm_test_package") -> str:
    done = subprocess.run([python, "-c", f"import {module} as p; print(p.BUILD)"], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.strip()


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip finds packages in, and no other place."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Version 1.0 is installed beside threearm, build "old"."""
    ours, here = tmp_path / "ours", site.getsitepackages()
    with zipfile.ZipFile(wheel(tmp_path / "old", "1.0", "old")) as archive:
        archive.extractall(ours)
    monkeypatch.setattr(site, "getsitepackages", lambda: [*here, str(ours)])
    return ours


@pytest.mark.parametrize("form", ["{path}", NAME + "==1.0", NAME + "@file://{path}"])
def test_a_rebuilt_wheel_of_the_version_that_is_installed_here_is_installed(form: str, tmp_path: Path, links: Path,
                                                                                         installed: Path) -> None:
    words = form.format(path=wheel(links, "1.0", "rebuilt"))
    python = make(words, True, cache=tmp_path / "cache")
    assert build_seen(python) == "rebuilt", "the installed package would be compared with itself"


def test_a_package_that_pip_leaves_out_is_noticed(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: the environment itself is looked into."""
    real = environments._pip
    monkeypatch.setattr(environments, "_pip", lambda python, words, log: real(python, ["--dry-run", *words], log))
    with pytest.raises(EnvironmentProblem, match=f"{NAME} 1.0 is not in "):
        make(str(wheel(tmp_path, "1.0", "rebuilt")), True, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob(f"*/{DONE}"))


@pytest.mark.parametrize("form", [NAME + "==1.0", NAME + ">=0", NAME + " @ file://{path}", NAME + "@file://{path}", "-r {folder}/names"])
def test_a_rebuilt_wheel_is_another_environment(form: str, tmp_path: Path, links: Path) -> None:
    words = form.format(path=wheel(links, "1.0", "first"), folder=tmp_path)
    (tmp_path / "names").write_text(NAME)
    said: list[str] = []
    first = make(words, True, said.append, tmp_path / "cache")
    wheel(links, "1.0", "second")
    second = make(words, True, said.append, tmp_path / "cache")
    assert (build_seen(first), build_seen(second)) == ("first", "second"), "a stale environment was used again, or one in use was changed"
    assert said[1] != said[3] and f": {NAME} 1.0 sha256 " in said[3]


def test_a_rebuilt_dependency_is_another_environment(tmp_path: Path, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "torch_words", lambda words: [])
    path = wheel(tmp_path, "1.0", needs="threearm-test-core")
    said: list[str] = []
    for build in ("first", "second"):
        wheel(links, "3", build, name="threearm-test-core")
        for inherit in (True, False):
            python = make(str(path), inherit, said.append, tmp_path / "cache")
            assert build_seen(python, "threearm_test_core") == build
    assert said[-1].endswith(" and 1 more")


def test_dependencies_that_are_installed_here_are_inherited(tmp_path: Path, installed: Path) -> None:
    path = wheel(tmp_path, "3", needs=NAME, name="threearm-test-user")
    assert build_seen(make(str(path), True, cache=tmp_path / "cache")) == "old"


def test_what_changes_while_it_is_installed_is_noticed(tmp_path: Path, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(links, "1.0", "first")
    real = environments._install

    def late(*given: object) -> None:
        wheel(links, "1.0", "second")
        real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(environments, "_install", late)
    with pytest.raises(EnvironmentProblem, match="changed while it was installed"):
        make(f"{NAME}==1.0", True, cache=tmp_path / "cache")


def test_a_name_that_pip_cannot_be_asked_about_is_not_taken_for_the_same(tmp_path: Path, links: Path) -> None:
    path = wheel(links, "1.0")
    python = make(f"{NAME}==1.0", True, cache=tmp_path / "cache")
    path.unlink()
    with pytest.raises(EnvironmentProblem, match=r"cannot be asked.*unchecked: environment of .*sha256") as raised:
        make(f"{NAME}==1.0", True, cache=tmp_path / "cache")
    folder = str(raised.value).partition("Give ")[2].split()[0]
    assert read_side(folder).place == python, "what the message advises must work"


def test_a_file_can_be_used_again_where_pip_cannot_be_asked(tmp_path: Path, links: Path) -> None:
    path, core = wheel(tmp_path, "1.0", needs="threearm-test-core"), wheel(links, "3", name="threearm-test-core")
    said: list[str] = []
    python = make(str(path), True, said.append, tmp_path / "cache")
    core.unlink()
    assert make(str(path), True, said.append, tmp_path / "cache") == python
    assert "Could not be checked, for pip says: " in said[-1] and "\n" not in said[-1]


BACKEND = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from wheels import wheel
def build_wheel(folder, config_settings=None, metadata_directory=None): return wheel(Path(folder), "1.0", {build!r}).name
"""


def sources(folder: Path, build: str) -> Path:
    """A source tree whose wheel is written as it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n')
    (folder / "backend.py").write_text(BACKEND.format(tests=str(Path(__file__).parent), build=build))
    return folder


def test_a_changed_source_tree_is_another_environment(tmp_path: Path) -> None:
    tree = sources(tmp_path / "tree", "first")
    first = make(str(tree), True, cache=tmp_path / "cache")
    sources(tree, "second, longer")
    second = make(str(tree), True, cache=tmp_path / "cache")
    assert (build_seen(first), build_seen(second)) == ("first", "second, longer")


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_branch_that_moved_is_another_environment(tmp_path: Path) -> None:
    words = f"{NAME} @ git+file://{tmp_path}/tree@work"
    git = ["git", "-C", str(tmp_path / "tree"), "-c", "user.name=a", "-c", "user.email=a@b"]
    found = []
    for build, start in (("first", ["init", "-q", "-b", "work"]), ("second", ["status"])):
        sources(tmp_path / "tree", build)
        for step in (start, ["add", "."], ["commit", "-qm", build]):
            subprocess.run([*git, *step], check=True, capture_output=True)
        found.append(build_seen(make(words, True, cache=tmp_path / "cache")))
    assert found == ["first", "second"]


def test_a_wheel_that_pip_built_of_an_earlier_file_is_refused(tmp_path: Path, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's cache knows a wheel that it built by the address of its source."""
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    links.mkdir()
    for build in ("first", "second"):
        with tarfile.open(links / "threearm_test_package-1.0.tar.gz", "w:gz") as packed:
            packed.add(sources(tmp_path / build, build), "threearm_test_package-1.0")
        if build == "first":
            assert build_seen(make(f"{NAME}==1.0", True, cache=tmp_path / "cache")) == "first"
    with pytest.raises(EnvironmentProblem, match="set PIP_NO_CACHE_DIR=1"):
        make(f"{NAME}==1.0", True, cache=tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    assert build_seen(make(f"{NAME}==1.0", True, cache=tmp_path / "cache")) == "second"


# --- what can go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inherit", "words"), [(True, "threearm-no-such-package==1"), (False, "threearm-no-such-package==1")])
def test_what_pip_says_is_one_line_with_its_log(tmp_path: Path, inherit: bool, words: str) -> None:
    with pytest.raises(EnvironmentProblem) as raised:
        make(words, inherit, cache=tmp_path)
    message = str(raised.value)
    assert "\n" not in message and "threearm-no-such-package==1" in message
    log = Path(message.partition("(log: ")[2].rstrip(")"))
    assert "threearm-no-such-package" in log.read_text()
    assert not list(tmp_path.glob(f"*/{DONE}"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="cannot make an environment"):
        make("a==1", True, cache=tmp_path / "file" / "cache")


def _make_and_report(path: str, cache: Path, queue: multiprocessing.queues.Queue) -> None:  # type: ignore[type-arg]
    said: list[str] = []
    queue.put((make(path, True, said.append, cache), said))


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    path, context = str(wheel(tmp_path, "1.0")), multiprocessing.get_context("spawn")
    queue = context.Queue()
    both = [context.Process(target=_make_and_report, args=(path, tmp_path / "cache", queue)) for _ in range(2)]
    for process in both:
        process.start()
    found = [queue.get(timeout=60) for _ in both]
    for process in both:
        process.join()
    assert found[0][0] == found[1][0]
    assert sum(line.startswith("making") for _, said in found for line in said) == 1
    assert all(said[-1].startswith("environment of") for _, said in found)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environments.default_cache() == tmp_path / "threearm" / "environments"


def test_a_changed_file_is_another_environment(tmp_path: Path) -> None:
    path = wheel(tmp_path, "1.0")
    before = fingerprint([str(path)], False)
    assert before == fingerprint([str(path)], False)
    assert before != fingerprint([str(path)], True)
    path.write_bytes(path.read_bytes() + b"x")
    assert before != fingerprint([str(path)], False)
    tree = package(tmp_path / "tree", "1")
    before = fingerprint([str(tree)], False)
    for built in ("build/lib", "threearm_test_package.egg-info", "__pycache__"):
        (tree / built).mkdir(parents=True)
        (tree / built / "written").touch()
    assert before == fingerprint([str(tree)], False), "building a tree must not make it another"
    (tree / "threearm_test_package.py").write_text("VERSION = 'another'\n")
    assert before != fingerprint([str(tree)], False)


def test_our_torch_comes_along_unless_the_requirement_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_version()
    monkeypatch.setattr(environments, "torch_version", lambda: "2.13.0+cpu")
    assert torch_words(["kernel==1"]) == ["torch==2.13.0+cpu", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert torch_words(["torch-harmonics"]) != []
    assert torch_words(["kernel==1", "torch>=2.8"]) == torch_words(["torch"]) == []
    monkeypatch.setattr(environments, "torch_version", lambda: "2.13.0")
    assert torch_words(["kernel==1"]) == ["torch==2.13.0"]
