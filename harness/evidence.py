"""Carries out what `threearm evidence` plans: every part on every kernel, a worker a kernel, then pairs of fresh processes. Parent side."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from harness.asking import Settings
from harness.client import WorkerOptions
from harness.comparing import Interrupted, compare
from harness.comparison import Pairing, Rule, TimeComparison, TimeVerdict
from harness.evidence_folder import EvidenceFolder, PartInfo
from harness.evidence_plans import (
    CPU_PROCESSES,
    CPU_SAMPLES,
    PROCESSES,
    RUN,
    Asked,
    EvidencePlan,
    Part,
    arms_in,
    keys_of,
    pairings,
    parts_of,
)
from harness.runfolder import RunInfo, exit_code
from harness.runner import Runner, cases_of
from harness.sampling import AUTO, Plan, Side
from harness.stats import in_words

MEASURED = Rule(threshold=1e6, floor_us=0.0, source="none: measured, not judged", widest=1e-9)
"""No ratio is a change by this rule, and none is SAME: evidence states an interval, the verdict is the gate's. So no interval is narrow
enough either, and the number of processes does not depend on what they show."""

WRONG, NOTHING_RAN = 1, 5

Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what is under way."""


def part_info(part: Part, reduced: bool, asked: Asked) -> PartInfo:
    """A part as evidence.json has it."""
    if part.kind != RUN:
        count = asked.processes if asked.processes > 0 else CPU_PROCESSES if reduced else PROCESSES
        return PartInfo(part.name, part.title, part.kind, AUTO["cpu" if reduced else "cuda"], count)
    samples = (asked.samples or (CPU_SAMPLES if reduced else part.samples)) if part.contract else 0
    return PartInfo(part.name, part.title, part.kind, "wall" if reduced and part.contract else part.contract, samples)


class Evidence:
    """Runs the parts and writes them into the folder. asked: what decides how."""

    def __init__(self, folder: EvidenceFolder, plan: EvidencePlan, options: WorkerOptions, asked: Asked, progress: Progress) -> None:
        self.folder, self.plan, self.options, self.asked, self.progress = folder, plan, options, asked, progress
        self.parts = parts_of(plan, folder.info.reduced, asked)
        for part in self.parts:
            if part.kind == RUN:
                folder.info.part(part.name).count = len(keys_of(part, folder.info.kernels, part.cases(folder.info.reduced)))
        self.total = sum(folder.info.part(part.name).count for part in self.parts if part.kind == RUN)

    def run(self) -> None:
        """Every part. Raises RunError, Unfit, KeyboardInterrupt; what is known is then in the folder."""
        runners = {part.name: self._runner(part) for part in self.parts if part.kind == RUN}
        try:
            for kernel in self.folder.info.kernels:
                self._kernel(kernel, runners)
        finally:
            for runner in runners.values():
                runner.asker.kill()
                runner.asker.watch.close()
        for name in runners:
            self.folder.runs[name].finish()
        for part in self.parts:
            if part.kind != RUN:
                self._pairs(part)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _runner(self, part: Part) -> Runner:
        """A part's runner, with its run folder, which says how it is repeated."""
        info, about = self.folder.info, self.folder.info.part(part.name)
        settings = Settings(about.contract, max(1, about.samples), timeout=self.asked.timeout, time_wrong=part.time_wrong)
        kernels = [arms_in(kernel, part) for kernel in info.kernels]
        options = {"worker": dataclasses.asdict(self.options), "settings": dataclasses.asdict(settings)}
        run = RunInfo(info.started, info.command, part.cases(info.reduced), kernels, info.machine, options)
        folder = self.folder.begin(part.name, run)
        return Runner(folder, self.options, settings, kernels, self._told(part), self.folder.path / "worker.log")

    def _told(self, part: Part) -> Callable[[str, str, str], None]:
        def told(case: str, arm: str, phase: str) -> None:
            self.progress(self._done(), self.total, f"{part.name}  {arm}  {phase}  {case.partition(':')[2]}")

        return told

    def _done(self) -> int:
        return sum(len(run.records) for run in self.folder.runs.values())

    def _kernel(self, kernel: dict[str, Any], runners: dict[str, Runner]) -> None:
        """One kernel through all parts, in one worker as long as it lives: importing a kernel takes longer than most parts."""
        problems: tuple[str, str] | None = None
        worker = None
        for name, runner in runners.items():
            began = time.monotonic()
            own = next(each for each in runner.kernels if each["name"] == kernel["name"])
            problems = problems or runner.imported(own)
            runner.asker.worker = worker
            for case in cases_of(own, runner.folder.info.cases) if problems else ():
                runner.take(own, case, problems or ("", ""))
            worker, runner.asker.worker = runner.asker.worker, None
            self.folder.info.part(name).seconds += time.monotonic() - began
        if worker is not None:
            worker.close()

    # --- pairs --------------------------------------------------------------------------------------------------------

    def _pairs(self, part: Part) -> None:
        """Base against candidate of the cases of other parts, in as many pairs of fresh processes as were planned."""
        began, about = time.monotonic(), self.folder.info.part(part.name)
        records = self.folder.records_of(part.of)
        planned = pairings(self.plan, part, self.folder.info.reduced, self.folder.info.kernels, records)
        about.count = len(planned)
        halved = dataclasses.replace(self.options, memory=self.options.memory // 2)  # both sides hold a case at the same time
        base, candidate = (Side(halved, self.folder.path / f"{part.name}-{side}.log") for side in ("base", "candidate"))
        plan = Plan(about.contract, processes=about.samples, most=about.samples, rounds=1 if self.folder.info.reduced else 2,
                    timeout=self.asked.timeout)

        def progress(done: int, of: int, what: str) -> None:
            self.progress(done, of, f"{part.name}  {what}")

        def checked(pairing: Pairing) -> tuple[dict[str, str], dict[str, str]]:
            return records[pairing.case, pairing.base].outputs, records[pairing.case, pairing.candidate].outputs

        try:
            found = compare(planned, base, candidate, plan, lambda pairing: MEASURED, progress, checked)
        except Interrupted as interrupted:
            self._keep(interrupted.comparisons)
            raise
        self._keep(found)
        about.seconds = time.monotonic() - began

    def _keep(self, found: dict[Pairing, TimeComparison]) -> None:
        for pairing, comparison in found.items():
            self.folder.add(pairing, measured(comparison))


def measured(found: TimeComparison) -> TimeComparison:
    """A comparison that says that it is an interval and no verdict; INVALID stays what it is."""
    if found.verdict is TimeVerdict.INVALID or found.estimate is None:
        return found
    return dataclasses.replace(found, why=f"measured, not judged: {in_words(found.estimate)}")


def code_of(folder: EvidenceFolder) -> int:
    """The exit code of what is there: of all records together, and 1 for a time that is none (INVALID)."""
    code = exit_code([record for run in folder.runs.values() for record in run.records])
    invalid = any(found.verdict is TimeVerdict.INVALID for _, found in folder.pairs)
    return WRONG if invalid and code != NOTHING_RAN else code
