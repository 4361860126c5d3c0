"""pytest's items: an arm on a case each. Loaded by threearm_pytest.py where --threearm-suite or --threearm-case asks for cases.

The arms of one kernel on one case are compared with each other, so the first of them that is run runs them all, and each item gets its
record. Under pytest-xdist such a group stays in one process; each process has a GPU's workers and a part of the run folder, which the
controller puts together.
"""
from __future__ import annotations

import collections
import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cases import family_of
from harness.asking import Settings
from harness.client import Unfit, WorkerDied
from harness.many import Imports, Lane, on_gpu
from harness.marks import RUN
from harness.options import replay_options
from harness.pytest_plan import Part, check_processes, make_plan, processes_of
from harness.record import Record
from harness.runfolder import RunError, RunFolder, RunInfo, gather_logs, listed, now
from harness.runner import cases_of
from harness.verdicts import SEVERITY, Verdict
from harness.words import counted
from reports import failure

PREFIX = "threearm"
MARKERS = ("cuda: needs a CUDA device", "sm90: needs an SM90 GPU (H100, H200)", "sm100: needs an SM100 GPU (B200)", "perf: measures time")
NOTHING_RAN = 5


class NotPassed(Exception):
    """A record that is no pass, in full."""


class ArmItem(pytest.Item):
    """One arm of a kernel on a case."""

    def __init__(self, *, kernel: dict[str, Any], case: str, arm: str, plugin: Plugin, **more: Any) -> None:
        super().__init__(**more)
        self.kernel, self.case, self.arm, self.plugin = kernel, case, arm, plugin

    def runtest(self) -> None:
        try:
            record = self.plugin.record(self.kernel, self.case, self.arm)
        except (RunError, Unfit, WorkerDied) as error:
            raise NotPassed(f"{type(error).__name__}: {error}") from None
        self.user_properties.append(("verdict", record.verdict.value))
        if record.verdict is Verdict.SKIPPED:
            pytest.skip(record.detail)
        if record.verdict is not Verdict.PASSED:
            raise NotPassed(failure.describe(record, replay_options(record, self.plugin.plan.options, self.plugin.plan.settings)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, NotPassed) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        """The last is a failure's headline. Not the item's name: pytest would write that with :: for every point."""
        return self.config.rootpath / PREFIX, None, f"{self.kernel['name']}/{self.arm}  {self.case}"


class Cases(pytest.Collector):
    """The node above all items."""

    def collect(self) -> Iterator[ArmItem]:
        """Kernel by kernel, since each has a worker of its own."""
        plugin: Plugin = self.config.pluginmanager.get_plugin("threearm-cases")  # type: ignore[assignment]
        for kernel in plugin.plan.kernels:
            for case in cases_of(kernel, plugin.plan.cases):
                for arm in kernel["arms"]:
                    name = item_id(case, f"{kernel['name']}/{arm}").partition("::")[2]
                    item = ArmItem.from_parent(self, name=name, kernel=kernel, case=case, arm=arm, plugin=plugin)
                    for mark in marks_of(kernel, plugin.plan.settings):
                        item.add_marker(mark)
                    yield item


def marks_of(kernel: dict[str, Any], settings: Settings) -> list[str]:
    """The markers of a kernel's items. One that runs on several generations of GPUs needs none of them."""
    generations = {version[0] for version in kernel["capability"]}
    return [*(["cuda"] if kernel["device"] == "cuda" else []), *(["sm90"] if generations == {9} else []),
            *(["sm100"] if generations == {10} else []), *(["perf"] if settings.contract else [])]


def named_item(argument: str) -> str:
    """The id of an item of ours that an argument is, as pytest prints it from any folder; "" where it is none."""
    path, colons, name = argument.partition("::")
    return f"{PREFIX}::{name}" if colons and Path(path).name == PREFIX else ""


def item_id(case: str, arm: str) -> str:
    """The id of an item. arm: kernel/arm."""
    return f"{PREFIX}::{case}[{arm}]"


def group_of(nodeid: str) -> str:
    """What items of one kernel on one case have in common."""
    return nodeid.rpartition("/")[0]


class Plugin:
    """The hooks, in the controller, in a process of pytest-xdist, or in the only process there is."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        told = getattr(config, "workerinput", {}).get(PREFIX)
        self.part = msgspec.json.decode(told, type=Part) if told else None
        self.plan = self.part.plan if self.part else make_plan(config)
        self.processes = processes_of(config)
        check_processes(self.plan, self.processes, config.getoption("dist", "no"))
        self.folder: RunFolder | None = None
        self.lane: Lane | None = None
        self.selected = self.plan.cases
        self.gpu_of: dict[Any, int] = {}  # by process of pytest-xdist
        self.told: dict[str, bool] = {}  # items that were reported, and whether they ran
        for line in MARKERS:
            config.addinivalue_line("markers", line)
        given = config.args if config.args_source is config.ArgsSource.ARGS else []
        self.wanted = [named for argument in given if (named := named_item(argument))]
        config.args = [argument for argument in given if not named_item(argument)]  # without a path, the cases alone

    # -- items

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Ours first; then pytest's own -k and -m see them like any other."""
        node = Cases.from_parent(session, name=PREFIX, path=config.rootpath, nodeid=PREFIX)
        collected = node.ihook.pytest_make_collect_report(collector=node)
        node.ihook.pytest_collectreport(report=collected)  # whoever counts items is told
        ours: list[pytest.Item] = collected.result
        missing = set(self.wanted) - {item.nodeid for item in ours}
        if missing:
            raise pytest.UsageError(f"not found: {min(missing)}")
        items[:0] = [item for item in ours if not self.wanted or item.nodeid in self.wanted]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What was deselected is no part of the run."""
        chosen = {item.case for item in session.items if isinstance(item, ArmItem)}
        self.selected = [case for case in self.plan.cases if case in chosen]

    def record(self, kernel: dict[str, Any], case: str, arm: str) -> Record:
        """An arm's record; the first of a group runs them all. Raises RunError, Unfit."""
        found = self._found(kernel, case, arm)
        if found is None:
            self._lane().take(kernel, case)
            found = self._found(kernel, case, arm)
        if found is None:
            raise RunError(f"there is no record of {kernel['name']}/{arm}")
        return found

    def _found(self, kernel: dict[str, Any], case: str, arm: str) -> Record | None:
        records = self.folder.records if self.folder else []
        return next((record for record in reversed(records) if (record.case, record.arm) == (case, f"{kernel['name']}/{arm}")), None)

    def _lane(self) -> Lane:
        if self.lane is None:
            options = self.plan.options
            if self.part and self.part.gpu >= 0:
                options = on_gpu(options, self.part.gpu)
            info = self._info()
            self.folder = RunFolder.make(Path(self.part.folder), info) if self.part else RunFolder.create(self._runs(), info)
            assert self.folder.path
            self.lane = Lane(self.folder, options, self.plan.settings, Imports(), self.folder.path / "worker.log")
        return self.lane

    def _runs(self) -> Path:
        return self.config.invocation_params.dir / str(self.config.option.threearm_runs)

    def _info(self) -> RunInfo:
        options = {"worker": dataclasses.asdict(self.plan.options), "settings": dataclasses.asdict(self.plan.settings),
                   "unavailable": self.plan.unavailable}
        return RunInfo(now(), sys.argv, self.selected, self.plan.kernels, self.plan.machine, options)

    # -- several processes

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Whatever --dist says of other tests, a group of ours is not taken apart."""
        from xdist.scheduler import LoadFileScheduling, LoadGroupScheduling, LoadScopeScheduling

        from harness.pytest_groups import ByGroup

        known = {"loadfile": LoadFileScheduling, "loadscope": LoadScopeScheduling, "loadgroup": LoadGroupScheduling}
        dist = config.getvalue("dist")
        of_others = known[dist](config, log)._split_scope if dist in known else str  # str: each test by itself
        return ByGroup(config, log, lambda nodeid: group_of(nodeid) if nodeid.startswith(f"{PREFIX}::") else of_others(nodeid))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a process what is to be run, on the GPU that fewest have, and where its part goes."""
        if self.folder is None:
            try:
                self.folder = RunFolder.create(self._runs(), self._info())
            except RunError as error:
                raise pytest.UsageError(str(error)) from None
        assert self.folder.path
        gpu = -1
        if self.plan.options.device == "cuda":
            taken = list(self.gpu_of.values())
            gpu = self.gpu_of[node] = min(range(len(self.plan.gpus)), key=taken.count)
        options = dataclasses.replace(self.plan.options, memory=self.plan.options.memory // self.processes)
        part = Part(dataclasses.replace(self.plan, options=options), gpu, str(self.folder.path / "parts" / node.gateway.id))
        node.workerinput[PREFIX] = msgspec.json.encode(part).decode()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """The controller collects nothing: a process tells what was deselected."""
        if self.folder:
            planned = self._planned()
            chosen = {planned[nodeid][0] for nodeid in ids if nodeid in planned}
            self.folder.info.cases = [case for case in self.plan.cases if case in chosen]

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """A process died at an item: that is its verdict, whatever the next process makes of it."""
        found = self._planned().get(crashitem)
        if self.folder and found:
            record = Record(*found, Verdict.CRASHED, f"pytest's process {report.node.gateway.id} died at this case")
            self.folder.add(record)
            report.longrepr = failure.describe(record, replay_options(record, self.plan.options, self.plan.settings))

    def _planned(self) -> dict[str, tuple[str, str]]:
        """(case, kernel/arm) by the id of the item."""
        return {item_id(*key): key for key in listed(self._info())}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Its GPU is free for the process that takes its place."""
        self.gpu_of.pop(node, None)

    # -- the end

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.startswith(f"{PREFIX}::"):
            ran = report.failed or (report.when == "call" and report.passed)
            self.told[report.nodeid] = self.told.get(report.nodeid, False) or ran

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End workers and the folder, after pytest-xdist has ended its processes. Cases that were all skipped are no success."""
        if self.lane:
            self.lane.close()
        if self.folder:
            self._finish(self.folder)
        if self.part is None and self.told and not any(self.told.values()) and session.exitstatus == 0:
            session.exitstatus = NOTHING_RAN

    def _finish(self, folder: RunFolder) -> None:
        assert folder.path
        if self.processes and self.part is None:
            put_together(folder)
        if not folder.missing():
            folder.finish()

    def pytest_report_header(self) -> str:
        times = f"timed: {self.plan.settings.contract}" if self.plan.settings.contract else "not timed"
        names = ", ".join(kernel["name"] for kernel in self.plan.kernels) or "no kernel can run here"
        return f"threearm: {counted(len(self.plan.cases), 'case')}; {names}; {self.plan.options.device}, {times}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Of the items that were reported: the folder may have more, which they were compared with."""
        if self.folder is None:
            return
        terminalreporter.write_sep("=", PREFIX)
        terminalreporter.write_line(failure.summary([r for r in self.folder.records if item_id(r.case, r.arm) in self.told]))
        for family, count in collections.Counter(map(family_of, self.plan.cases)).items():
            if not any(kernel["family"] == family for kernel in self.plan.kernels):
                terminalreporter.write_line(f"not run: {counted(count, 'case')} of {family}: no chosen kernel is of that family")
        for why in dict.fromkeys(self.plan.unavailable.values()):
            names = [name for name, reason in self.plan.unavailable.items() if reason == why]
            terminalreporter.write_line(f"not available: {', '.join(names)}: {why}")
        terminalreporter.write_line(f"records: {self.folder.path}")


def put_together(folder: RunFolder) -> None:
    """The parts of processes as one run, with the records that the folder has already: of what they died at. Of several records of an
    arm on a case the worst counts. Raises RunError."""
    assert folder.path
    place = folder.path / "parts"
    parts = [RunFolder.load(path.parent) for path in sorted(place.glob(f"*/{RUN}"))]
    best: dict[tuple[str, str], Record] = {}
    for record in (record for part in (folder, *parts) for record in part.records):
        before = best.get((record.case, record.arm))
        if before is None or SEVERITY.index(record.verdict) > SEVERITY.index(before.verdict):
            best[record.case, record.arm] = record
    folder.records = list(best.values())
    folder.arrange()
    folder.save_info()
    gather_logs(folder.path / "worker.log", [(part.path.name, part.path / "worker.log") for part in parts if part.path])
    shutil.rmtree(place, ignore_errors=True)
