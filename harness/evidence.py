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
from harness.evidence_folder import RUN, EvidenceFolder, PartInfo
from harness.evidence_plans import CPU_PROCESSES, CPU_SAMPLES, PROCESSES, EvidencePlan, Part
from harness.record import Record
from harness.runfolder import RunInfo, exit_code
from harness.runner import Runner, cases_of
from harness.sampling import AUTO, Plan, Side
from harness.stats import in_words
from harness.verdicts import Verdict

MEASURED = Rule(threshold=1e6, floor_us=0.0, source="none: measured, not judged", widest=1e-9)
"""No ratio is a change by this rule, and none is SAME: evidence states an interval, the verdict is the gate's. So no interval is narrow
enough either, and the number of processes does not depend on what they show."""

WRONG, NOTHING_RAN = 1, 5

Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what is under way."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a person may set besides the name. samples, timeout: 0 for the plan's own; processes: pairs of them, 0 for none, -1 for the
    plan's own."""

    sweeps: bool = True
    samples: int = 0
    processes: int = -1
    timeout: float = 0.0


def parts_of(plan: EvidencePlan, reduced: bool, asked: Asked) -> list[Part]:
    """The parts that are run: those with cases for the device, and what compares their cases."""
    parts = [part for part in plan.parts if part.kind == RUN and part.cases(reduced) and (asked.sweeps or not part.sweep)]
    names = {part.name for part in parts}
    return parts + [part for part in plan.parts if names & set(part.of) and asked.processes]


def part_info(part: Part, reduced: bool, asked: Asked) -> PartInfo:
    """A part as evidence.json has it."""
    if part.kind != RUN:
        count = asked.processes if asked.processes > 0 else CPU_PROCESSES if reduced else PROCESSES
        return PartInfo(part.name, part.title, part.kind, AUTO["cpu" if reduced else "cuda"], count)
    samples = (asked.samples or (CPU_SAMPLES if reduced else part.samples)) if part.contract else 0
    return PartInfo(part.name, part.title, part.kind, "wall" if reduced and part.contract else part.contract, samples)


def arms_in(kernel: dict[str, Any], part: Part) -> dict[str, Any]:
    """A kernel with those of its arms that take part."""
    return {**kernel, "arms": [arm for arm in kernel["arms"] if not part.arms or arm in part.arms]}


class Evidence:
    """Runs the parts and writes them into the folder. asked: what decides how."""

    def __init__(self, folder: EvidenceFolder, plan: EvidencePlan, options: WorkerOptions, asked: Asked, progress: Progress) -> None:
        self.folder, self.plan, self.options, self.asked, self.progress = folder, plan, options, asked, progress
        self.parts = parts_of(plan, folder.info.reduced, asked)
        self.total = sum(len(arms_in(kernel, part)["arms"]) * len(cases_of(kernel, part.cases(folder.info.reduced)))
                         for part in self.parts for kernel in folder.info.kernels)

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
        records = {(record.case, record.arm): record for name in part.of for record in self._records(name)}
        pairings = self.pairings(part, records)
        halved = dataclasses.replace(self.options, memory=self.options.memory // 2)  # both sides hold a case at the same time
        base, candidate = (Side(halved, self.folder.path / f"{part.name}-{side}.log") for side in ("base", "candidate"))
        plan = Plan(about.contract, processes=about.samples, most=about.samples, rounds=1 if self.folder.info.reduced else 2,
                    timeout=self.asked.timeout)

        def progress(done: int, of: int, what: str) -> None:
            self.progress(done, of, f"{part.name}  {what}")

        def checked(pairing: Pairing) -> tuple[dict[str, str], dict[str, str]]:
            return records[pairing.case, pairing.base].outputs, records[pairing.case, pairing.candidate].outputs

        try:
            found = compare(pairings, base, candidate, plan, lambda pairing: MEASURED, progress, checked)
        except Interrupted as interrupted:
            self._keep(interrupted.comparisons)
            raise
        self._keep(found)
        about.seconds = time.monotonic() - began

    def _records(self, part: str) -> list[Record]:
        return self.folder.runs[part].records if part in self.folder.runs else []

    def pairings(self, part: Part, records: dict[tuple[str, str], Record]) -> list[Pairing]:
        """What is compared: on each case base and candidate arm of a kernel, or of any two kernels where no kernel has both. An arm that
        did not pass is left out, unless its part says that wrong ones are timed."""
        timed_wrong = [self.plan.part(name) for name in part.of if self.plan.part(name).time_wrong]
        wrong = {case for other in timed_wrong for case in other.cases(self.folder.info.reduced)}
        names = {arm: [k["name"] for k in self.folder.info.kernels if arm in k["arms"]] for arm in part.pair}
        base, candidate = part.pair

        def usable(case: str, arm: str) -> bool:
            record = records.get((case, arm))
            return record is not None and (record.verdict is Verdict.PASSED or (case in wrong and bool(record.checks)))

        both = [(f"{x}/{base}", f"{y}/{candidate}") for x in names[base] for y in names[candidate]
                if x == y or (y not in names[base] and x not in names[candidate])]
        cases = dict.fromkeys(case for case, _ in records)
        return [Pairing(case, x, y) for x, y in both for case in cases if usable(case, x) and usable(case, y)]

    def _keep(self, found: dict[Pairing, TimeComparison]) -> None:
        for pairing, comparison in found.items():
            self.folder.add(pairing, measured(comparison))


def measured(found: TimeComparison) -> TimeComparison:
    """A comparison that says that it is an interval and no verdict; INVALID stays what it is."""
    if found.verdict is TimeVerdict.INVALID or found.estimate is None:
        return found
    return dataclasses.replace(found, why=f"measured, not judged: {in_words(found.estimate)}")


def code_of(folder: EvidenceFolder) -> int:
    """The exit code of what is there: of all records together, and 1 for a time that is none (INVALID). 5 where a part could not be run."""
    code = exit_code([record for run in folder.runs.values() for record in run.records])
    if any(found.verdict is TimeVerdict.INVALID for _, found in folder.pairs) and code != NOTHING_RAN:
        code = WRONG
    return NOTHING_RAN if any(part.problem for part in folder.info.parts) and code != WRONG else code
