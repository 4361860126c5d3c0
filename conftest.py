"""Markers: a test that needs a GPU is skipped with the reason where there is none."""
from __future__ import annotations

import pytest
import torch

CAPABILITY = {"sm90": 9, "sm100": 10}


def why_not(marker: str) -> str:
    """Why tests with this marker cannot run here, or ""."""
    if marker != "cuda" and marker not in CAPABILITY:
        return ""
    if not torch.cuda.is_available():
        return "no CUDA device"
    major = torch.cuda.get_device_capability()[0]
    if marker in CAPABILITY and major != CAPABILITY[marker]:
        return f"needs SM{CAPABILITY[marker]}0, this GPU is SM{major}0"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers():
            reason = why_not(marker.name)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
