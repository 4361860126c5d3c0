"""The documentation: every command that it shows parses, every link leads somewhere, and every session was run and gives what it shows.

A command is a line that begins with `threearm` in a block of code. A session is a block that begins with ```console: lines with `$ ` are
run, in a shell, and what stands below one must come out, line by line in this order. `...` is for lines that are left out. Numbers may
differ, and so may spaces and the lines of tables. A ```python block that begins with `# NAME.py` is the file that a session uses.
"""
from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.core
import typer.main

from cases.suites import suite_names
from harness import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "arms" / "ADD_ARM.md", ROOT / "cases" / "ADD_CASE.md", *(ROOT / "docs").glob("*.md"),
                *(ROOT / "docs" / "evidence").glob("*.md")])
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s#]+)")
SKIPPED = re.compile(r"[\s─━│┃┏┓┗┛┡┩╇┳┻└┘┴┬┼├┤]+")


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """Blocks of code: what stands behind ``` (or "" for an indented one), and the lines."""
    found: list[tuple[str, list[str]]] = []
    fence, indented = "", False
    for line in text.splitlines():
        if line.startswith("```"):
            fence = "" if fence else line + " "
            if fence:
                found.append((line.removeprefix("```").strip(), []))
            indented = False
        elif fence:
            found[-1][1].append(line)
        elif line.startswith("    "):
            if not indented:
                found.append(("", []))
            indented = True
            found[-1][1].append(line[4:])
        else:
            indented = False
    return found


def commands(page: Path) -> list[str]:
    """The threearm command lines of a page, continued lines joined."""
    found = []
    for _, lines in blocks(page.read_text(encoding="utf-8")):
        for line in "\n".join(lines).replace("\\\n", " ").splitlines():
            text = line.removeprefix("$ ").strip()
            text = re.sub(r"^([A-Z_]+=\S+ )+", "", text)
            if text.startswith("threearm "):
                found.append(re.split(r"\s+#|\s[|>]|;|\s&&", text)[0])
    return found


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_command_parses(page: Path) -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    for text in commands(page):
        words = [word for word in shlex.split(text) if not re.fullmatch(r"\[.*\]", word)][1:]
        if not words or not re.fullmatch("[a-z]+", words[0]):
            continue
        assert words[0] in group.commands, f"{text}: no command {words[0]}"
        try:
            context = group.commands[words[0]].make_context(words[0], words[1:])
        except Exception as error:  # click's own classes differ between typer's versions
            pytest.fail(f"{text}: {getattr(error, 'message', None) or repr(error)}")
        suite = context.params.get("suite")
        assert not suite or suite.isupper() or suite in suite_names() or suite.endswith(".txt") or "/" in suite, text


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{short(page)} links to {target}"


@dataclasses.dataclass(frozen=True)
class Session:
    page: Path
    lines: tuple[str, ...]
    files: tuple[tuple[str, str], ...]


def sessions() -> list[Session]:
    """Every ```console block, with the files that the page shows before it."""
    found = []
    for page in PAGES:
        files: dict[str, str] = {}
        for kind, lines in blocks(page.read_text(encoding="utf-8")):
            if kind == "python" and lines and (name := re.fullmatch(r"# (\w+\.py)", lines[0])):
                files[name[1]] = "\n".join(lines) + "\n"
            elif kind == "console":
                found.append(Session(page, tuple(lines), tuple(files.items())))
    return found


def steps(lines: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Commands, and what each must give."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() != "...":
            found[-1][1].append(line)
    return found


def plain(line: str) -> str:
    """A line without what may differ: numbers, ids of runs, spaces, and the lines of tables."""
    line = re.sub(r"\d{8}-\d{6}-\w+-\w{4}", "RUN", line)
    line = re.sub(r"[+-]?\d[\d.,]*(e[+-]?\d+)?%?", "N", line)
    return SKIPPED.sub(" ", line).strip()


@pytest.mark.parametrize("session", sessions(), ids=lambda session: f"{session.page.stem}-{session.lines[0][2:60]}")
def test_every_session_gives_what_it_shows(session: Session, tmp_path: Path) -> None:
    for name, text in session.files:
        (tmp_path / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "130"}
    environment.pop("GITHUB_STEP_SUMMARY", None)
    for command, wanted in steps(session.lines):
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, text=True, timeout=300, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        got = [plain(line) for line in done.stdout.splitlines()]
        place = 0
        for line in filter(None, map(plain, wanted)):
            assert line in got[place:], f"{command}: no line like {line!r} in\n{done.stdout}"
            place = got.index(line, place) + 1


def test_there_are_sessions() -> None:
    assert len(sessions()) >= 6


def test_a_session_that_lies_is_found(tmp_path: Path) -> None:
    lie = Session(ROOT / "README.md", ("$ echo 3 PASSED", "3 FAILED"), ())
    with pytest.raises(AssertionError, match="no line like"):
        test_every_session_gives_what_it_shows(lie, tmp_path)
