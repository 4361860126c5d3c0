"""`threearm merge`: run folders of parts of one case list (`run --shard`) put together to one."""
from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.options import errors, fail, open_run, stored_options
from harness.report_command import show, tell_missing
from harness.runfolder import RunError, RunFolder, gather_logs
from harness.shards import Merged, merge
from harness.stored import code_of


def merge_folders(folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Run folders of one case list.")],
                  into: Annotated[Path, typer.Option("--into", help="The folder to make.")],
                  times_apart: Annotated[bool, typer.Option("--times-apart", help="Keep times of different GPU models, each with its "
                                                            "own.")] = False) -> None:
    """Put runs of parts of one case list together: table, what is missing, exit code."""
    parts = [open_run(path) for path in dict.fromkeys(folders)]
    try:
        merged = merge(parts, sys.argv, times_apart)
        folder = write(merged, into)
    except RunError as error:
        fail(str(error))
    show(folder, *stored_options(folder))
    for note in merged.notes:
        errors.print(f"note: {note}", highlight=False, markup=False)
    tell_missing(folder)
    raise typer.Exit(code_of(folder))


def write(merged: Merged, into: Path) -> RunFolder:
    """Make the folder, with the parts' saved outputs and logs. Raises RunError."""
    folder = RunFolder.make(into, merged.info)
    for record in merged.records:
        folder.add(record)
        origin = merged.origins[record.case, record.arm]
        source, target = origin.folder.output_file(origin.record), folder.output_file(record)
        if source and target and source.is_file():
            try:
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
            except OSError as error:
                raise RunError(f"cannot write {target}: {error.strerror}") from None
    parts = dict.fromkeys(origin.folder.path for origin in merged.origins.values())
    gather_logs(into / "worker.log", [(str(path), path / "worker.log") for path in parts if path])
    if not merged.missing:
        folder.finish()
    return folder
