"""The `threearm` command: makes sure that its five packages are its own, then hands over to harness/cli.py."""
from __future__ import annotations

import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("arms", "cases", "harness", "references", "reports")


class ReaderGone(BaseException):
    """Nobody reads what is written any more. It is no OSError: typer and rich end the process with 1 at a BrokenPipeError, which says
    that something is wrong."""


class Pipe(io.FileIO):
    """stdout or stderr, which may be a pipe. A worker's pipes are none of these."""

    def write(self, data: Any) -> int:
        """As ever, but for ReaderGone."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise ReaderGone from None


def through_pipe(stream: Any) -> Any:
    """The stream anew, on a Pipe; itself where it has no descriptor."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):
        return stream
    at_once = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(io.BufferedWriter(Pipe(descriptor, "w", closefd=False)), stream.encoding, stream.errors, line_buffering=at_once)


def forget(*streams: Any) -> None:
    """Have what streams still hold, which is written at exit, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())


def shadowed() -> str:
    """Which of the packages is not the one installed beside this file, and where it comes from; "" if none."""
    home = Path(__file__).resolve().parent
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != home / name:
            return f"package {name!r} is taken from {found or 'nowhere'}, not from {home / name}: another package shadows it"
    return ""


def main() -> None:
    """Entry point of the console script."""
    problem = shadowed()
    if problem:
        print(f"threearm: {problem}", file=sys.stderr)
        sys.exit(5)
    sys.stdout, sys.stderr = through_pipe(sys.stdout), through_pipe(sys.stderr)
    try:
        try:
            from harness.cli import main as run

            run()
        finally:
            sys.stdout.flush()  # what was printed may not have been written yet
    except KeyboardInterrupt:
        sys.exit(130)
    except ReaderGone:  # `threearm run | head`
        forget(sys.stdout, sys.stderr)
        sys.exit(141)
    except OSError as error:  # a full disk behind stdout
        print(f"threearm: {error}", file=sys.stderr)
        forget(sys.stdout)
        sys.exit(5)


if __name__ == "__main__":
    main()
