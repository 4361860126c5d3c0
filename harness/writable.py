"""Whether a folder can be made and written, by trying: permissions do not say it of /proc, of a mount, or to root. Parent side."""
from __future__ import annotations

import os
import tempfile
from pathlib import Path


def why_not(folder: Path) -> str:
    """Why nothing can be written into a folder, or below where it is to be made, in some words; "" where it can. Leaves nothing there."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    try:
        tempfile.TemporaryDirectory(prefix=".threearm-", dir=place).cleanup()
    except OSError as error:
        return f"{place}: {error.strerror}" if place != folder.absolute() else error.strerror or str(error)
    return ""
