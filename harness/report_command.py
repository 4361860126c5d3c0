"""`threearm report`: what a stored run, gate or evidence folder says, again, without a GPU; and what a run leaves for CI when it ends."""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cases import family_of
from harness.asking import Settings
from harness.client import WorkerOptions
from harness.evidence_folder import EvidenceFolder
from harness.gate_folder import GateFolder
from harness.mutants_file import MutantsFile
from harness.mutants_file import load as load_matrix
from harness.options import NOTHING_RAN, Junit, console, errors, fail, replay_options, say, stored_options
from harness.rejudge_command import rejudge_folder
from harness.runfolder import RunError, RunFolder
from harness.runner import cases_of
from harness.stored import Stored, code_of, open_folder, records_of
from harness.writable import why_not
from reports import evidence, failure, github, junit, run_line, table
from reports.gate_things import verdict
from reports.repeating import of_gate, of_run

SHOWN_FAILURES = 10
WORST = (0, 4, 3, 5, 1)
"""Exit codes of several folders: the last of these that one of them has."""
SUMMARY = "GITHUB_STEP_SUMMARY"


def report(paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="A folder of a run, a gate or evidence.")],
           markdown: Annotated[bool, typer.Option(help="The whole run as Markdown, for a pull request.")] = False,
           failures: Annotated[bool, typer.Option(help="Every record that did not pass, in full.")] = False,
           html: Annotated[Path | None, typer.Option(help="Write one page that needs nothing else; takes several folders.")] = None,
           mutants: Annotated[Path | None, typer.Option(help="What `threearm mutants --json` wrote, as part of the page.")] = None,
           junit_file: Junit = None,
           on_github: Annotated[bool, typer.Option("--github", help="A GitHub job's summary and annotations.")] = False,
           rejudge: Annotated[bool, typer.Option(help="Judge anew what is stored, by today's rules and budgets.")] = False) -> None:
    """Show a stored run, gate or evidence folder again, or write it for other readers. Needs no GPU."""
    written = [file for file in (html, junit_file) if file]
    if len(paths) > 1 and (not written or markdown or failures or on_github):
        fail("several folders are told together by --html and --junit alone")
    if markdown and failures:
        fail("--markdown has what did not pass in it: give one of --markdown and --failures")
    if mutants and not html:
        fail("--mutants is a part of --html")
    if on_github and not os.environ.get(SUMMARY):
        fail(f"--github is for a step of a GitHub job: {SUMMARY} is not set")
    before_work({"--html": html, "--junit": junit_file}, on_github)
    folders = [opened(path) for path in paths]
    refused = [rejudge_folder(folder) for folder in folders] if rejudge else []
    codes = [code_again(folder) for folder in folders]
    code = max([*codes, *refused], key=WORST.index)
    if html:
        from reports.html.page import build
        write(html, build([*folders, *matrix(mutants)], paths[0].name if len(paths) == 1 else f"{len(paths)} folders").encode(), "--html")
    if junit_file:
        told = why(folders, codes) or "not every saved output could be judged anew"
        write(junit_file, junit.document([suite for folder in folders for suite in suites(folder)], code, told), "--junit")
    if on_github:
        try:
            tell_github(folders[0], code, again=True)
        except OSError as error:
            fail(f"{SUMMARY} {error.filename}: {error.strerror}", NOTHING_RAN)
    if (written or on_github) and not (markdown or failures):
        for folder in folders:
            say(f"{folder.path}: {in_a_line(folder)}")
        raise typer.Exit(code)
    show_again(folders[0], markdown, failures, code)


def opened(path: Path) -> Stored:
    """Read a folder, or one line and exit 2."""
    try:
        return open_folder(path)
    except RunError as error:
        fail(str(error))


def matrix(file: Path | None) -> list[MutantsFile]:
    """The mutants matrix of a file, if there is one to be read, or one line and exit 2."""
    try:
        return [load_matrix(file)] if file else []
    except RunError as error:
        fail(str(error))


def before_work(files: Mapping[str, Path | None], on_github: bool = True) -> None:
    """What can be known before the work of the files that it is to leave, {option: file}: exit 2 where one cannot be written, or two are
    one. Of a GitHub job's summary, which the caller did not name, a warning; after the work it is exit 5."""
    taken: dict[Path, str] = {}
    for option, file in files.items():
        if file and (problem := unwritable(file)):
            fail(f"{option} {file}: {problem}")
        if file and (other := taken.setdefault(file.resolve(), option)) != option:
            fail(f"{option} {file}: {other} is the same file")
    summary = os.environ.get(SUMMARY)
    if on_github and summary and (problem := unwritable(Path(summary))):
        errors.print(f"warning: {SUMMARY} {summary}: {problem}; the job will have no summary", highlight=False, markup=False)


def unwritable(file: Path) -> str:
    """Why a file cannot be written, as far as can be told without touching it; "" where it can."""
    if file.is_dir():
        return "it is a folder"
    if not file.parent.is_dir():
        return f"no such folder as {file.parent}"
    if file.exists():
        return "" if os.access(file, os.W_OK) else "it may not be written"
    return why_not(file.parent)


def write(file: Path, content: bytes, option: str) -> None:
    """Write a report, or one line and exit 5."""
    try:
        file.write_bytes(content)
    except OSError as error:
        fail(f"{option} {file}: {error.strerror}", NOTHING_RAN)


# --- on the terminal --------------------------------------------------------------------------------------------------


def show_again(folder: Stored, markdown: bool, failures: bool, code: int) -> NoReturn:
    """One folder, as the command that made it shows it; or as Markdown, or all that did not pass. Exits with `code`."""
    if isinstance(folder, GateFolder):
        from harness.gate_command import report_gate
        report_gate(folder, markdown, failures)
    elif isinstance(folder, EvidenceFolder):
        show_evidence(folder, markdown, failures)
    else:
        if markdown:
            print(evidence.page(folder.info, folder.records), end="")
        elif failures:
            tell_failures(folder)
        else:
            show(folder, *stored_options(folder))
        tell_missing(folder)
    raise typer.Exit(code)


def show_evidence(folder: EvidenceFolder, markdown: bool, failures: bool) -> None:
    """An evidence folder."""
    from harness.evidence_command import show as show_page
    from reports.evidence_page import page
    if failures:
        for run in folder.runs.values():
            tell_failures(run)
    elif markdown:
        print(page(folder), end="")
    else:
        show_page(folder, again=True)


def tell_failures(folder: RunFolder) -> None:
    """Every record that did not pass, in full."""
    bad = [record for record in folder.records if record.verdict not in failure.HARMLESS]
    for text in failure.describe_all(bad, of_run(folder)):
        say(text)


def tell_missing(folder: RunFolder) -> None:
    """Where a run has not finished, how far it is and what it lacks."""
    if folder.info.finished:
        return
    errors.print(f"incomplete: {run_line.how_far(folder.info, folder.records)}", highlight=False, markup=False)
    for text in run_line.named(run_line.missing(folder.info, folder.records)):
        errors.print(f"  {text}", highlight=False, markup=False)


def show(folder: RunFolder, options: WorkerOptions | None, plan: Settings | None) -> None:
    """The run as a person reads it: machine, table, what did not pass, summary, where it is kept."""
    machine = folder.info.machine
    say("  ".join(f"{key} {machine[key]}" for key in ("gpu", "gpu not used", "cpu", "driver", "torch") if key in machine), style="dim")
    console.print(table.terminal(folder.records))
    bad = [record for record in folder.records if record.verdict not in failure.HARMLESS]
    for text in failure.describe_all(bad[:SHOWN_FAILURES], lambda record: replay_options(record, options, plan)):
        say(text)
    if len(bad) > SHOWN_FAILURES:
        say(f"... and {len(bad) - SHOWN_FAILURES} more that did not pass; all: threearm report {folder.path} --failures")
    log = folder.path / "worker.log" if folder.path else None
    if log and log.is_file() and any(map(failure.raised, bad)):
        say(f"tracebacks: {log}")
    say(failure.summary(folder.records))
    if not folder.info.finished:
        say(run_line.line(folder.info, folder.records))
    unmet = [family_of(case) for case in folder.info.cases if not any(cases_of(kernel, [case]) for kernel in folder.info.kernels)]
    for family, count in Counter(unmet).items():
        say(f"{count} case{'s' if count > 1 else ''} of {family} {'were' if count > 1 else 'was'} not run: "
            "no chosen kernel is of that family")
    for name, reason in folder.info.options.get("unavailable", {}).items():
        say(f"not available: {name}: {reason}", style="dim")
    say(f"records: {folder.path}")


# --- for CI -----------------------------------------------------------------------------------------------------------


def after_run(folder: Stored, code: int, junit_file: Path | None = None, page: str = "") -> int:
    """What a command that has run leaves besides its folder: --junit FILE, and in a GitHub job its summary and annotations.

    code: the exit code it is about to leave with; page: its Markdown, where that of the folder's kind is not meant. Returns the exit code
    to leave with: 5 in place of 0 where something could not be written, with one line that says what."""
    try:
        if junit_file:
            junit_file.write_bytes(junit.document(suites(folder), code, why([folder], [code])))
        if os.environ.get(SUMMARY):
            tell_github(folder, code, page)
    except OSError as error:
        errors.print(f"threearm: cannot write {error.filename}: {error.strerror}", style="red", highlight=False, markup=False)
        return code or NOTHING_RAN
    return code


def tell_github(folder: Stored, code: int, page: str = "", again: bool = False) -> None:
    """Append the page to the job's summary, and print annotations. again: of a stored folder. Raises OSError."""
    file = Path(os.environ[SUMMARY])
    room = github.LARGEST_SUMMARY - (file.stat().st_size if file.is_file() else 0)
    text = github.summary(page or page_of(folder, again), f"threearm report {folder.path} --markdown", room)
    with open(file, "a", encoding="utf-8") as summary:
        summary.write(text)
    for line in annotations_of(folder, code, again):
        print(line, flush=True)


def page_of(folder: Stored, again: bool) -> str:
    """A folder as Markdown."""
    if isinstance(folder, GateFolder):
        from harness.gate_command import markdown_page
        return markdown_page(folder, again)
    if isinstance(folder, RunFolder):
        return evidence.page(folder.info, folder.records)
    from reports.evidence_page import page
    return page(folder)


def annotations_of(folder: Stored, code: int, again: bool) -> list[str]:
    """GitHub's, of a folder."""
    if isinstance(folder, GateFolder):
        return github.of_transitions(folder.transitions, folder.info, again)
    told = {id(record): of_run(run) for run in runs_of(folder) for record in run.records}
    return github.of_records(records_of(folder), lambda record: told[id(record)](record), code, in_a_line(folder),
                             folder.info.finished != "")


def suites(folder: Stored) -> list[junit.Suite]:
    """A folder's testsuites."""
    if isinstance(folder, GateFolder):
        records = folder.records("base"), folder.records("candidate")
        return junit.of_gate(folder.transitions, folder.info, *records, of_gate(folder))
    if isinstance(folder, RunFolder):
        return junit.of_run(folder.info, folder.records, of_run(folder))
    found = [suite for name, run in folder.runs.items() for suite in junit.of_run(run.info, run.records, of_run(run), name)]
    pairs = [junit.of_pairs(f"{folder.info.name}.pairs", folder.pairs, folder.info.started, folder.info.machine)]
    return [*found, *(pairs if folder.pairs else [])]


def runs_of(folder: RunFolder | EvidenceFolder) -> list[RunFolder]:
    """A run, or the runs of an evidence folder's parts."""
    return [folder] if isinstance(folder, RunFolder) else list(folder.runs.values())


def code_again(folder: Stored) -> int:
    """The exit code of a stored folder."""
    return verdict(folder.transitions, folder.info, again=True)[0] if isinstance(folder, GateFolder) else code_of(folder)


def in_a_line(folder: Stored) -> str:
    """What a folder says, shortest."""
    if isinstance(folder, GateFolder):
        return verdict(folder.transitions, folder.info, again=True)[1]
    if isinstance(folder, RunFolder):
        return f"{run_line.line(folder.info, folder.records)} (exit {code_of(folder)})"
    from reports.evidence_page import verdict as of_evidence
    return f"{of_evidence(folder).strip('*').rstrip('.')} (exit {code_of(folder)})"


def why(folders: list[Stored], codes: list[int]) -> str:
    """Why the exit code is not 0, a line a folder, with what an unfinished run lacks."""
    told = []
    for folder in (folder for folder, code in zip(folders, codes) if code):
        told.append(f"{folder.path}: {in_a_line(folder)}")
        if isinstance(folder, RunFolder):
            keys = run_line.missing(folder.info, folder.records)
            told += [f"  missing: {text}" for text in run_line.named(keys, len(keys))]
    return "\n".join(told)
