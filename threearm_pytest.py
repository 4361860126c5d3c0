"""What pytest loads (entry point pytest11): the options. Only where one asks for cases is the rest loaded, harness/pytest_plugin.py.

A module of its own beside `threearm.py`, and nothing imported at the top: a repository whose root has a package named `harness` must be
able to run its own tests while threearm is installed.
"""
from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("threearm", "cases through sparse-attention kernels (threearm)")
    add = group.addoption
    add("--threearm-suite", metavar="NAME", default="", help="Cases of a suite, or of a file: an item an arm.")
    add("--threearm-case", metavar="TEXT", action="append", default=[], help="One case; repeat for several.")
    add("--threearm-arm", metavar="K", action="append", default=[], help="kernel or kernel/arm; repeat for several.")
    add("--threearm-device", metavar="D", default="auto", help="cpu, cuda, cuda:1, or auto: cuda where there is one.")
    add("--threearm-time", metavar="C", default="none", help="none, or a contract: auto, kernel, span, wall.")
    add("--threearm-samples", metavar="N", type=int, default=30, help="Timing samples per arm.")
    add("--threearm-load", metavar="FILE", action="append", default=[], help="A kernel file; repeat for several.")
    add("--threearm-runs", metavar="DIR", default="runs", help="Where the run folder is made.")
    add("--threearm-timeout", metavar="S", type=float, default=0.0, help="Seconds per launch phase; 0: from the case's work.")
    add("--threearm-launches", metavar="N", type=int, default=0, help="Launches back to back in run-to-run; 0: three or four.")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse options on the command line that are about no case: they would be a green run of nothing. In a configuration file they stand
    for the runs that have cases."""
    if not config.option.threearm_suite and not config.option.threearm_case:
        given = next((word for word in map(str, config.invocation_params.args) if word.startswith("--threearm-")), "")
        if given:
            raise pytest.UsageError(f"{given}: needs --threearm-suite=NAME or --threearm-case=TEXT, which say what is run")
        return
    from threearm import shadowed

    if problem := shadowed():
        raise pytest.UsageError(f"threearm: {problem}")
    from harness.pytest_plugin import Plugin

    config.pluginmanager.register(Plugin(config), "threearm-cases")
