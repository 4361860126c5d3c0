"""What a side of a gate is taken for, and the environments made for requirements. Nothing is downloaded: pip is given no index."""
from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import wheel

from harness import environments
from harness.environments import DONE, EnvironmentProblem, Kind, fingerprint, make, read_side, torch_version, torch_words


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


@pytest.mark.parametrize("text", ["sgl-flash-mla==1.0.0", "sgl-kernel", "kernel[cuda]>=2,<3", "pkg@https://example.org/pkg.whl",
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


def test_a_file_that_cannot_be_run_is_no_requirement(tmp_path: Path) -> None:
    (tmp_path / "python==3").touch()
    with pytest.raises(EnvironmentProblem, match="neither"):
        read_side(str(tmp_path / "python==3"))


def test_a_gates_folder_says_what_of_it_can_be_taken(tmp_path: Path) -> None:
    (tmp_path / "gate.json").touch()
    with pytest.raises(EnvironmentProblem, match="run folders"):
        read_side(str(tmp_path))


# --- environments -----------------------------------------------------------------------------------------------------


def test_an_environment_is_made_once_for_each_version(tmp_path: Path) -> None:
    one, two = str(wheel(tmp_path, "1.0")), str(wheel(tmp_path, "2.0"))
    said: list[str] = []
    first = make(one, True, said.append, tmp_path / "cache")
    second = make(two, True, said.append, tmp_path / "cache")
    assert (version_seen(first), version_seen(second)) == ("1.0 True", "2.0 True")
    assert len(said) == 2
    assert make(one, True, said.append, tmp_path / "cache") == first
    assert len(said) == 2, "made anew though it was there"


def test_a_half_made_environment_is_made_anew(tmp_path: Path) -> None:
    path, cache = str(wheel(tmp_path, "1.0")), tmp_path / "cache"
    half = cache / fingerprint([path], True)
    half.mkdir(parents=True)
    (half / "left over").touch()
    python = make(path, True, cache=cache)
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
