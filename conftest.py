"""Markers: a test that needs a GPU is skipped with the reason where there is none. Profiles of property tests: HYPOTHESIS_PROFILE or
--hypothesis-profile picks one. Under pytest-xdist, which files go to a process together, and which first."""
from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# ci: the same examples every time, so that a change that is no fault of the code under test cannot turn it red. nightly: other ones every
# night, and ten times as many (tests/profiles.py). A first launch may compile: no test has a deadline.
settings.register_profile("ci", derandomize=True, database=None, deadline=None)
settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

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


SHARED = dict.fromkeys(("test_broken_arms", "test_broken_topk", "test_localiser"), "faults")
"""Files that read one table of tests/faults.py, which a process makes once; the others go by themselves, for their module's fixtures."""
LONG_FIRST = ("faults", "test_gate", "test_evidence", "test_faults_survived", "test_pytest_plugin", "test_fuzz", "test_families",
              "test_worker", "test_cli", "test_ray", "test_html", "test_many_gpus", "test_docs", "test_run_output", "test_resume",
              "test_sampling")
"""Whoever begins with what takes long does not wait for it at the end (make test says --no-loadscope-reorder)."""


def group_of(nodeid: str) -> str:
    """Tests of a group run in one process, in their order."""
    file = Path(nodeid.partition("::")[0]).stem
    return SHARED.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """--dist loadfile, with groups for files. (The marks of --dist loadgroup do nothing in pytest-xdist 3.8 under pytest 9.2.)"""
    from harness.pytest_groups import ByGroup

    return ByGroup(config, log, group_of) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        order = {group: place for place, group in enumerate(LONG_FIRST)}
        items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))
    for item in items:
        for marker in item.iter_markers():
            reason = why_not(marker.name)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def interpret_triton() -> None:
    """Without a GPU, have this process's Triton interpret kernels: its own library is bound to one way when it is first imported.

    The variable does not stay set: the workers that tests start would offer the interpreted arms, which are slow.
    """
    if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            importlib.import_module("triton.language")


interpret_triton()
