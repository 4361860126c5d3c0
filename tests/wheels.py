"""Shared by tests: a wheel of a package that has a version and a function, written as it stands: a zip with a module and its metadata."""
from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(folder: Path, version: str, build: str = "", needs: str = "", name: str = "threearm-test-package") -> Path:
    """A package of a version, threearm-test-package unless named: faulty/gated.py has a kernel that needs it. build: what its BUILD is;
    needs: a requirement of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    path, info = folder / f"{module}-{version}-py3-none-any.whl", f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}.py", f"VERSION, BUILD = {version!r}, {build!r}\n\n\ndef forward(topk_length): ...\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                         + (f"Requires-Dist: {needs}\n" if needs else ""))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path
