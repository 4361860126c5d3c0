"""compute-sanitizer around one arm on one case: `threearm replay --sanitize`. Parent side. docs/faults.md says what each tool finds."""
from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harness.asking import Progress, Settings
from harness.client import WorkerOptions
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo, now
from harness.runner import Runner
from harness.verdicts import Check, Verdict, worst
from harness.words import counted

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OWN_ALLOCATIONS = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""Torch lays tensors side by side into blocks of 2 MiB and more, where a store past the end of one is a store into another, and legal.
With this set each tensor is an allocation of its own; then no CUDA graph can be made of a launch that allocates."""
NOT_MADE = "graph-replay"
SHOWN = 3  # errors that are told in full
MARK = re.compile(r"^=========( ?)")
COUNT = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
NOTHING_WATCHED = "terminated before first instrumented API call"
BROKEN = "Internal Sanitizer Error"
NO_ERROR = re.compile(rf"COMPUTE-SANITIZER|.* SUMMARY: |.*{NOTHING_WATCHED}|{BROKEN}|Target application returned|"
                      ".*terminate successfully|Warning")
"""Lines that begin where an error would, and are none."""
UNFOLLOWED = ("racecheck", "initcheck")
"""Tools that do not follow TMA: they take its barriers for none and what it wrote for unwritten, and so report errors in cuBLAS and in
torch's copies of what cuBLAS wrote, in a right arm too (seen on an H200: 3,072 hazards in one product, 8,220 reads). Their errors in the
kernels of these libraries are told and not counted."""
LIBRARIES = re.compile(r"\bat (?:void )?(?:at::|c10::|nvjet_|cublas|sm\d+_xmma)")
PRINTED = 10_000  # errors; the tool's own limit of 100 could be used up by libraries
LEFT_OUT = ("Saved host backtrace", "Host Frame", "Device Frame")


@dataclasses.dataclass
class Report:
    """What a tool wrote. count: of its summaries, or of the errors listed where it was ended before one; whole: it came to its summary;
    watched: it saw a process that used the GPU; errors: the lines of each, the first saying what, those after it where; libraries: how many
    are not among them because they are in kernels that the tool does not follow; unseen: how many it counted besides and did not print."""

    count: int
    whole: bool
    watched: bool
    errors: list[list[str]]
    libraries: int = 0
    unseen: int = 0


def find_program() -> str | None:
    """compute-sanitizer, on PATH or in CUDA's folder (CUDA_HOME, /usr/local/cuda)."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(os.path.join(home, where) for where in ("bin", PROGRAM)))


def watched(options: WorkerOptions, program: str, tool: str, logs: Path) -> WorkerOptions:
    """The options of a worker that runs under the tool. API errors are left to torch, which raises those that matter: it makes calls that
    fail in any process."""
    alone = () if os.environ.get(OWN_ALLOCATIONS) else (f"{OWN_ALLOCATIONS}=1",)
    prefix = (program, "--tool", tool, "--log-file", str(logs / f"{tool}-%p.log"), "--print-limit", str(PRINTED))
    quiet = ("--report-api-errors", "no") if tool == "memcheck" else ()
    return dataclasses.replace(options, prefix=(*prefix, *quiet), environment=(*options.environment, *alone))


def sanitized(options: WorkerOptions, plan: Settings, kernel: dict[str, Any], case: str, tool: str, program: str,
              progress: Progress = lambda case, arm, phase: None) -> list[Record]:
    """A record for each of the kernel's arms, each run in a process of its own under the tool, with a check of the tool's name.

    The logs of an arm of which the check did not pass are kept, in a temporary folder that it names. Raises what Runner.run raises.
    """
    records = []
    for arm in kernel["arms"]:
        logs = Path(tempfile.mkdtemp(prefix=f"threearm-{tool}-"))
        folder = RunFolder(None, RunInfo(now(), [], [case], [{**kernel, "arms": [arm]}], {}, {}))
        try:
            Runner(folder, watched(options, program, tool, logs), plan, folder.info.kernels, progress, logs / "worker.log").run()
            judged = [with_report(record, read(logs, tool), tool, options.device, logs) for record in folder.records]
        except BaseException:
            shutil.rmtree(logs, ignore_errors=True)
            raise
        records += judged
        if all(check.verdict is Verdict.PASSED for record in judged for check in record.checks if check.name == tool):
            shutil.rmtree(logs, ignore_errors=True)
    return records


def read(logs: Path, tool: str) -> Report:
    """What the tool wrote into its logs, one for each process that it watched."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(logs.glob(f"{tool}-*.log"))]
    errors = [error for text in texts for error in blocks(text)]
    counts = [[int(count) for count in COUNT.findall(text)] for text in texts]
    whole = bool(counts) and all(counts) and not any(BROKEN in text for text in texts)
    watched = any(NOTHING_WATCHED not in text for text in texts)
    own = errors if tool not in UNFOLLOWED else [error for error in errors if not any(map(LIBRARIES.search, error))]
    if whole and len(own) == len(errors):
        return Report(sum(map(sum, counts)), whole, watched, own)
    unseen = max(0, sum(map(sum, counts)) - len(errors)) if whole else 0
    return Report(len(own), whole, watched, own, len(errors) - len(own), unseen)


def blocks(text: str) -> list[list[str]]:
    """The errors of one log. An error begins where a line is not indented; frames of the host are left out."""
    found: list[list[str]] = []
    within = False
    for line in text.splitlines():
        mark = MARK.match(line)
        if not mark:
            continue
        words = line[mark.end():]
        if words.strip() and not words.startswith(" "):
            within = not NO_ERROR.match(words)
            found += [[words.strip()]] if within else []
        elif within and words.strip() and not words.strip().startswith(LEFT_OUT):
            found[-1].append(words.strip())
    return found


def with_report(record: Record, report: Report, tool: str, device: str, logs: Path) -> Record:
    """The record with the tool's check, and without the one that cannot be made under it."""
    if record.verdict is Verdict.SKIPPED:
        return record
    checks = [check for check in record.checks if check.name != NOT_MADE]
    verdicts = [check.verdict for check in checks] if record.checks else [record.verdict]
    found = check_of(report, tool, device, logs, died=not record.checks)
    return dataclasses.replace(record, checks=[*checks, found], verdict=worst([*verdicts, found.verdict]))


def check_of(report: Report, tool: str, device: str, logs: Path, died: bool = False) -> Check:
    """What the report says of the arm. died: it ended its worker or raised, and may have ended the tool as well."""
    said, where = f"{PROGRAM} {tool}: {counted(report.count, 'error')}", f"its log: {logs}"
    lines = [line for error in report.errors[:SHOWN] for line in (error[0], *(f"  {line}" for line in error[1:]))]
    if report.count:
        return Check(tool, Verdict.FAILED, f"{said}; {where}", bad=report.count, first=lines)
    if not report.whole and not died:
        return Check(tool, Verdict.ERROR, f"{PROGRAM} {tool} came to no summary; {where}")
    if not report.whole or not report.watched or report.unseen or not device.startswith("cuda"):
        why = "it was ended before its summary" if not report.whole else f"it printed only the first {PRINTED:,} of those in libraries" \
            if report.unseen else "it watches what runs on a GPU, and nothing did"
        return Check(tool, Verdict.VACUOUS, f"{said}, but {why}; {where}")
    others = f" in the arm's own kernels; {report.libraries:,} in those of torch and cuBLAS, which this tool does not follow"
    return Check(tool, Verdict.PASSED, said + (others if report.libraries else ""))
