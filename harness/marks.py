"""Which of our folders a path is, and in words what it is instead of the one that was meant."""
from __future__ import annotations

from pathlib import Path

RUN, GATE, EVIDENCE = "run.json", "gate.json", "evidence.json"
KINDS = {GATE: "a gate's folder", EVIDENCE: "an evidence folder", RUN: "a run's folder"}
"""The file that tells a kind, first what has run folders inside."""


def mark_of(path: Path) -> str:
    """The file that tells which folder a path is, or "" of none of ours."""
    return next((mark for mark in KINDS if (path / mark).is_file()), "")


def what_it_is(path: Path) -> str:
    """`there is no such path`, `it is a gate's folder; run folders in it: base, candidate`: for whoever gave the wrong one."""
    if not path.exists():
        return "there is no such path"
    if not path.is_dir():
        return "it is a file"
    mark = mark_of(path)
    if mark == RUN:
        return f"it is {KINDS[mark]}"
    inside = below(path)
    if mark:
        return f"it is {KINDS[mark]}" + (f"; run folders in it: {', '.join(each.name for each in inside)}" if inside else "")
    if not inside:
        return f"it has no {' or '.join(sorted(KINDS))}"
    return f"it holds {len(inside):,} of them; name one, such as {inside[-1]}"


def below(path: Path) -> list[Path]:
    """Folders of ours one level down, in the order of their names."""
    try:
        return sorted(each for each in path.iterdir() if mark_of(each))
    except OSError:
        return []
