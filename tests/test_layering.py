"""What may import what, read from the source. The worker must start in any environment that has torch and a kernel."""
from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = ("arms", "cases", "harness", "references", "reports")


def at_import(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported: all but those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from at_import(child)


def names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that an import statement may load: `from a import b` may load a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0 and node.module, "relative imports are not used"
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path) -> set[str]:
    """Dotted names that importing this file loads directly."""
    return {name for node in at_import(tree(file)) for name in names(node)}


def imports_anywhere(file: Path) -> set[str]:
    """Also those inside functions."""
    return {name for node in ast.walk(tree(file)) if isinstance(node, (ast.Import, ast.ImportFrom)) for name in names(node)}


def file_of(name: str) -> Path | None:
    """The project's file behind a dotted name, or None."""
    place = ROOT / Path(*name.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)


def loaded_with(start: Path) -> set[Path]:
    """A file and every project file that importing it loads, packages' __init__ among them."""
    found, waiting = set(), [start]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for name in imports(file):
            parts = name.split(".")
            files = (file_of(".".join(parts[:upto])) for upto in range(1, len(parts) + 1))
            waiting += [each for each in files if each is not None]
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def worker_side() -> list[Path]:
    """cases, references and arms, and the worker with everything that it loads."""
    files = {file for package in ("cases", "references", "arms") for file in sources(package)} | loaded_with(ROOT / "harness/worker.py")
    return sorted(files - {ROOT / "cases/strategies.py"})


def short(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def is_triton(file: Path) -> bool:
    """Whether it holds Triton kernels, which is what its name says; not a kernel's own file, which registers anywhere."""
    return file.name.endswith("_triton.py") and file.parent.name in ("arms", "litetopk")


@pytest.mark.parametrize("file", worker_side(), ids=short)
def test_worker_side_needs_torch_and_the_standard_library(file: Path) -> None:
    roots = {name.partition(".")[0] for name in imports(file)}
    allowed = {"torch", *PROJECT[:4], *(["triton"] if is_triton(file) else [])}
    assert roots - allowed - set(sys.stdlib_module_names) == set()


def test_worker_side_holds_what_it_should() -> None:
    found = {short(file) for file in worker_side()}
    assert {"cases/inputs.py", "arms/sparse_prefill/torch_blocks.py", "arms/broken/sparse_prefill.py", "arms/backscan_triton.py",
            "references/sparse_prefill.py", "harness/worker.py", "harness/trial.py", "harness/checks.py", "harness/timing.py",
            "harness/record.py", "harness/verdicts.py"} <= found
    assert found.isdisjoint({"harness/cli.py", "harness/runner.py", "harness/runfolder.py", "harness/client.py", "cases/strategies.py"})


def kernel_files() -> list[Path]:
    """What a worker imports for its kernels to register."""
    return [file for package in ("arms/sparse_prefill", "arms/indexer_topk", "arms/broken") for file in sources(package)]


@pytest.mark.parametrize("file", [*kernel_files(), ROOT / "harness/worker.py"], ids=short)
def test_no_kernel_loads_triton_before_it_is_prepared(file: Path) -> None:
    """Triton's modules are imported in functions, so a machine without triton still has the kernels of torch."""
    assert any(is_triton(file) for file in sources("arms"))
    assert {short(loaded) for loaded in loaded_with(file) if is_triton(loaded)} == set()


@pytest.mark.parametrize("file", [f for package in PROJECT for f in sources(package)] + [ROOT / "threearm.py"], ids=short)
def test_only_the_command_line_imports_reports(file: Path) -> None:
    if short(file).startswith("reports/") or short(file).endswith("_command.py") \
            or short(file) in ("harness/cli.py", "harness/pytest_plugin.py"):
        return
    assert {name for name in imports_anywhere(file) if name.partition(".")[0] == "reports"} == set()


@pytest.mark.parametrize(("package", "above"), [
    ("cases", {"arms", "references", "harness", "reports"}), ("references", {"arms", "harness", "reports"}),
    ("arms", {"references", "harness", "reports"})])
def test_lower_packages_do_not_know_the_upper_ones(package: str, above: set[str]) -> None:
    for file in sources(package):
        assert {name.partition(".")[0] for name in imports_anywhere(file)} & above == set(), short(file)


def test_strategies_are_imported_only_when_cases_are_drawn() -> None:
    """They need hypothesis, which a user who draws none may lack."""
    for package in PROJECT:
        for file in sources(package):
            assert {"cases.strategies", "hypothesis"}.isdisjoint(imports(file)) or short(file) == "cases/strategies.py", short(file)


def test_the_command_line_does_not_load_torch() -> None:
    """The parent holds the clock and no CUDA context, and `--help` is instant."""
    code = "import sys, harness.cli; print(sorted({'torch', 'triton', 'hypothesis', 'matplotlib', 'jinja2', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
