"""What `threearm doctor` found, a line each, with how to put it right; last the sentence that counts."""
from __future__ import annotations

from collections import Counter

from rich.text import Text

from harness.doctor import Finding, Level
from harness.options import console, say
from harness.words import counted

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def verdict(found: list[Finding], device: str) -> str:
    """The sentence that counts. device: "" where no worker can run."""
    count = Counter(each.level for each in found)
    problems, warnings = counted(count[Level.PROBLEM], "problem"), counted(count[Level.WARNING], "warning")
    if count[Level.PROBLEM]:
        return f"NOT trustworthy: {problems}, {warnings}"
    if device == "cpu":
        return f"answers are trustworthy, times are no evidence: {warnings}"
    return f"trustworthy with {warnings}" if count[Level.WARNING] else "trustworthy: nothing found"


def show(found: list[Finding], machine: dict[str, str]) -> None:
    """The verdict, each finding, each remedy under it."""
    say("  ".join(f"{key} {machine[key]}" for key in ("gpu", "cpu", "driver", "torch", "python") if key in machine), style="dim")
    width = max(len(each.subject) for each in found)
    for each in found:
        line = Text.assemble((f"{each.level.value:8}", STYLES[each.level]), f"  {each.subject:{width}}  {each.says}")
        console.print(line, soft_wrap=True)
        if each.remedy:
            say(f"{'':8}  {'':{width}}  put right: {each.remedy}", style="dim")
    say(verdict(found, machine.get("device", "")))
