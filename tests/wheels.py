"""Shared by tests: a wheel of a package that has a version and a function, written as it stands: a zip with a module and its metadata."""
from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(folder: Path, version: str) -> Path:
    """threearm-test-package of a version. faulty/gated.py has a kernel that needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"threearm_test_package-{version}-py3-none-any.whl", f"threearm_test_package-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("threearm_test_package.py", f"VERSION = {version!r}\n\n\ndef forward(topk_length): ...\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: threearm-test-package\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
