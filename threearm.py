"""The `threearm` command: makes sure that its five packages are its own, then hands over to harness/cli.py."""
from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

PACKAGES = ("arms", "cases", "harness", "references", "reports")


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
    try:
        from harness.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `threearm run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # a full disk behind stdout
        print(f"threearm: {error}", file=sys.stderr)
        sys.exit(5)


if __name__ == "__main__":
    main()
