"""The workflows and the file for SGLang's CI: that they parse, that each command they run is one that there is, and that the file runs."""
from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from processes import ROOT, TINY, environment, new_mark

from harness import cli

WORKFLOWS = ROOT / ".github" / "workflows"
FILES = ("cpu.yml", "gpu.yml", "gate.yml")
SGLANG = ROOT / "docs" / "sglang_ci" / "test_threearm_sparse.py"
EXPRESSION = re.compile(r"\$\{\{.*?\}\}", re.DOTALL)
VARIABLE = re.compile(r"\$(?:\{\w+\}|\w+)")
OPERATORS = {"||", "&&", "|", ";", ">", ">>", "<", "&"}
yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install -e '.[test]'")


def workflow(name: str) -> dict[str, Any]:
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    found["on"] = found.pop(True)  # YAML 1.1 reads the key `on` as a truth
    return found


def steps(name: str) -> list[tuple[str, dict[str, Any]]]:
    """(job, step) of a workflow, in their order."""
    return [(job, step) for job, about in workflow(name)["jobs"].items() for step in about["steps"]]


def scripts() -> list[tuple[str, str]]:
    """(where, script) of every step that runs one; what GitHub fills in is a 1."""
    return [(f"{name} {job}: {step.get('name', '')}", EXPRESSION.sub("1", step["run"])) for name in FILES for job, step in steps(name)
            if "run" in step]


def commands(script: str) -> list[list[str]]:
    """The words of every `threearm ...` in a shell script, variables as 1."""
    found = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(VARIABLE.sub("1", line.replace(";", " ; ")), comments=True)
        starts = [place for place, word in enumerate(words) if word.rpartition("/")[2] == "threearm"]
        for start in starts:
            rest = words[start + 1:]
            found.append(rest[: next((place for place, word in enumerate(rest) if word in OPERATORS), len(rest))])
    return found


def parse(words: list[str]) -> None:
    """Parse a command as the command line would, without running it. Raises what it raises."""
    group: Any = typer.main.get_command(cli.app)
    assert words and words[0] in group.commands, f"no command {words[:1]}"
    group.commands[words[0]].make_context(words[0], list(words[1:]))


@pytest.mark.parametrize("name", FILES)
def test_a_workflow_has_what_each_must(name: str) -> None:
    found = workflow(name)
    assert found["permissions"] == {"contents": "read"} and "pull_request_target" not in found["on"]
    for about in found["jobs"].values():
        assert about["timeout-minutes"]
        assert about["runs-on"] == "ubuntu-latest" or EXPRESSION.fullmatch(about["runs-on"]), "labels of GPU runners are inputs"
    uses = [step["uses"] for _, step in steps(name) if "uses" in step]
    assert uses and all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in uses)
    uploads = [step for _, step in steps(name) if step.get("uses", "").startswith("actions/upload-artifact")]
    assert uploads and all(step["if"] == "always()" for step in uploads)


def test_commands_of_the_workflows_are_commands() -> None:
    found = [(where, words) for where, script in scripts() for words in commands(script)]
    assert {words[0] for _, words in found} == {"run", "doctor", "fuzz", "calibrate", "gate"}
    for _, words in found:
        parse(words)


@pytest.mark.parametrize("line", ["threearm run --sweet smoke", "threearm run --samples many", "threearm gate --base 1", "threearm cure",
                                  "code=0; threearm doctor --fast || code=$?"])
def test_a_command_that_is_none_is_seen(line: str) -> None:
    with pytest.raises(Exception, match=r"No such option|valid integer|Missing parameter|no command"):
        parse(commands(line)[0])


def test_scripts_are_shell() -> None:
    for where, script in [*scripts(), ("", "")]:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, (where, done.stderr)
    assert subprocess.run(["bash", "-n"], input="if true; then", text=True, capture_output=True, check=False).returncode


def test_nothing_given_by_hand_is_pasted_into_a_script() -> None:
    """Inputs reach a script as variables: pasted, they would be commands."""
    for name in FILES:
        for _, step in steps(name):
            assert "${{" not in step.get("run", ""), step


@pytest.mark.parametrize(("name", "job"), [("gpu.yml", "gpu"), ("gate.yml", "gate")])
def test_a_gpu_is_examined_first_and_shared_with_nothing(name: str, job: str) -> None:
    about = workflow(name)["jobs"][job]
    assert about["concurrency"]["group"].startswith("threearm-gpu-") and about["concurrency"]["cancel-in-progress"] is False
    ran = [words[0] for step in about["steps"] if "run" in step for words in commands(step["run"])]
    assert ran[0] == "doctor" and len(ran) > 1


def test_what_gpu_runs_is_an_input() -> None:
    assert {"h100", "b200", "suites", "fuzz"} <= set(workflow("gpu.yml")["on"]["workflow_dispatch"]["inputs"])
    assert {"base", "candidate", "suite", "runner"} <= set(workflow("gate.yml")["on"]["workflow_dispatch"]["inputs"])
    assert "schedule" in workflow("gpu.yml")["on"] and workflow("gate.yml")["on"]["pull_request"]["paths"] == [".github/kernels.txt"]


def shell(script: str, folder: Path, **variables: str) -> dict[str, str]:
    """Run a step's script as GitHub does; what it wrote to GITHUB_OUTPUT."""
    out = folder / "output"
    out.touch()
    subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=folder, check=True,
                   env={"PATH": os.environ["PATH"], "GITHUB_OUTPUT": str(out), "HOME": str(folder), **variables})
    return dict(line.split("=", 1) for line in out.read_text(encoding="utf-8").splitlines())


def script_of(name: str, ident: str) -> str:
    return str(next(step["run"] for _, step in steps(name) if step.get("id") == ident))


@pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed; GitHub's runners have it")
@pytest.mark.parametrize(("given", "machines"), [
    ({"H100": "", "B200": ""}, []), ({"H100": "self-hosted, h100", "B200": ""}, [{"name": "H100", "labels": ["self-hosted", "h100"]}]),
    ({"H100": "a", "B200": "b"}, [{"name": "H100", "labels": ["a"]}, {"name": "B200", "labels": ["b"]}])])
def test_runners_follow_from_their_labels(tmp_path: Path, given: dict[str, str], machines: list[Any]) -> None:
    assert json.loads(shell(script_of("gpu.yml", "list"), tmp_path, **given)["machines"]) == machines


@pytest.mark.skipif(not shutil.which("jq"), reason="jq is not installed; GitHub's runners have it")
def test_a_bump_is_what_the_branches_have(tmp_path: Path) -> None:
    place = tmp_path / ".github" / "kernels.txt"
    place.parent.mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    place.write_text("# wheels\nsgl-flash-mla==1.0.0\nsgl-deep-gemm==0.1.5\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    before = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    place.write_text("sgl-flash-mla==1.0.1\n\nsgl-deep-gemm==0.1.5\n")
    script = script_of("gate.yml", "read")
    found = shell(script, tmp_path, BASE="", CANDIDATE="", LABELS="self-hosted,h100", BEFORE=before)
    assert found == {"base": "sgl-flash-mla==1.0.0 sgl-deep-gemm==0.1.5", "candidate": "sgl-flash-mla==1.0.1 sgl-deep-gemm==0.1.5",
                     "labels": '["self-hosted","h100"]'}
    (tmp_path / "output").unlink()
    found = shell(script, tmp_path, BASE="a==1", CANDIDATE="a==2", LABELS="", BEFORE="")
    assert found == {"base": "a==1", "candidate": "a==2", "labels": "[]"}


def test_the_wheels_in_use_are_pinned() -> None:
    lines = [line for line in (ROOT / ".github" / "kernels.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[a-z-]+==[\w.]+", line) for line in lines)


def registrations(source: str) -> list[dict[str, Any]]:
    """What SGLang reads from a file, by its own rules: calls of register_cuda_ci at the top, literals alone. Raises ValueError."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "register_cuda_ci":
            if node.value.args or not all(isinstance(word.value, ast.Constant) for word in node.value.keywords):
                raise ValueError("literals alone, by name")
            found.append({str(word.arg): ast.literal_eval(word.value) for word in node.value.keywords})
    return found


def has_main(source: str) -> bool:
    """Whether it ends with what `python3 file.py` runs, and hands on pytest's code."""
    last = ast.parse(source).body[-1]
    return isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'" and "sys.exit(pytest.main(" in ast.unparse(last)


def test_the_file_for_sglang_is_registered_as_sglang_reads_it() -> None:
    source = SGLANG.read_text(encoding="utf-8")
    assert registrations(source) == [{"est_time": 240, "stage": "base-b-kernel-unit", "runner_config": "1-gpu-large"}] and has_main(source)
    with pytest.raises(ValueError, match="literals alone"):
        registrations(source.replace("est_time=240", "est_time=4 * 60"))
    assert not has_main(source.replace("sys.exit(pytest.main(", "print(pytest.main("))


@pytest.fixture
def in_sglang(tmp_path: Path) -> Path:
    """A folder with the file, and an SGLang of which there is nothing but the function that it calls."""
    ci = tmp_path / "sglang" / "test" / "ci"
    ci.mkdir(parents=True)
    for folder in (ci, *list(ci.parents)[:2]):
        (folder / "__init__.py").touch()
    (ci / "ci_register.py").write_text("def register_cuda_ci(est_time, *, stage, runner_config):\n    return None\n")
    shutil.copy(SGLANG, tmp_path)
    return tmp_path


def run_file(folder: Path, *before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As SGLang's CI runs it."""
    (folder / "tiny.txt").write_text(f"{TINY}\n")
    env = environment(new_mark(), PYTHONPATH=str(folder), THREEARM_SUITE="tiny.txt", THREEARM_DEVICE="cpu", **variables)
    return subprocess.run([sys.executable, *before, SGLANG.name, "-f"], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=120, check=False, env=env)


def test_the_file_for_sglang_runs(in_sglang: Path) -> None:
    done = run_file(in_sglang, THREEARM_ARMS="torch_blocks")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


def test_the_file_for_sglang_fails_with_a_wrong_kernel(in_sglang: Path) -> None:
    done = run_file(in_sglang, THREEARM_ARMS="broken_negated/none")
    assert done.returncode == 1 and "repeat: threearm replay" in done.stdout, done.stdout


def test_the_file_for_sglang_is_no_success_without_threearm(in_sglang: Path) -> None:
    """An image that lost the package must not be green."""
    done = run_file(in_sglang, "-c", "import sys, runpy; sys.modules['threearm_pytest'] = None\n"
                    "import importlib.util; importlib.util.find_spec = lambda name: None; "
                    "runpy.run_path('test_threearm_sparse.py', run_name='__main__')")
    assert done.returncode == 1 and "pip install threearm" in done.stdout, done.stdout
