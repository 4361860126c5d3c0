"""One worker that is asked to take cases through a kernel, and replaced when it dies: its events become records."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cases import Case, family_of, parse_case
from harness.client import WorkerDied, WorkerOptions, WorkerProcess
from harness.record import Record, Timing
from harness.verdicts import Check, Verdict, worst
from harness.watch import Watch, in_words
from harness.words import counted


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides how cases are run. contract "" times nothing, "auto" is the family's own; timeout 0 lets it follow from
    the case's work; time_wrong: arms whose answer is wrong are timed, too; launches: back to back for run-to-run, 0 for a few.
    give_up: an arm that hung or crashed on so many cases in a row is asked no more, 0 for never; save_outputs: a runner keeps them."""

    contract: str = ""
    samples: int = 30
    fp64: bool = False
    timeout: float = 0.0
    time_wrong: bool = False
    launches: int = 0
    give_up: int = 0
    save_outputs: bool = False


AUTO_ON_CUDA = {"sparse_prefill": "kernel", "indexer_topk": "span"}
"""Contract `auto`. An indexer kernel is many launches and may read counts back in between: what they cost together is its time."""

SECONDS_FOR_OUTPUTS = 600.0
"""For writing or comparing outputs: gigabytes, on a slow disk."""

SLOWER = 20
"""How much longer a phase may take in a worker that another program watches; compute-sanitizer slows kernels down by 10 and more."""

Progress = Callable[[str, str, str], None]
"""Called with case, arm and phase as they change."""


def contract_of(family: str, contract: str, device: str) -> str:
    """The contract that `contract` stands for in a family, on a device."""
    if contract != "auto":
        return contract
    return AUTO_ON_CUDA[family] if device.startswith("cuda") else "wall"


def seconds_allowed(case: Case, device: str, launches: int = 0) -> float:
    """How long one phase may take without a sign of life: 60 s, plus a pessimistic rate for the work of a dozen launches, or of as many
    as are made back to back."""
    return 60 + max(12, launches) * case.work / rate(device)


def rate(device: str) -> float:
    """Operations a second that the slowest kernel makes which is not taken to hang."""
    return 1e12 if device.startswith("cuda") else 2e9


def deadline(case: Case, options: WorkerOptions, settings: Settings) -> tuple[float, str]:
    """The seconds that one phase may take, and what they follow from."""
    if settings.timeout:
        return settings.timeout, f"--timeout {settings.timeout:g}"
    seconds = seconds_allowed(case, options.device, settings.launches)
    work, most = short(case.work), short(rate(options.device))
    why = f"60 s + {max(12, settings.launches)} launches of {work} operations at {most} a second"
    if options.prefix:
        return SLOWER * seconds, f"{SLOWER} times {seconds:.0f} s under {Path(options.prefix[0]).name}: {why}"
    return seconds, why


def short(number: float) -> str:
    """2.5e9."""
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


class Asker:
    """Takes cases through kernels in a worker process that it starts when it is first needed and replaces when it dies.

    add: called with each record as it is known.
    """

    def __init__(self, options: WorkerOptions, settings: Settings, log: Path, add: Callable[[Record], None],
                 progress: Progress = lambda case, arm, phase: None) -> None:
        self.options, self.settings, self.log, self.add, self.progress = options, settings, log, add, progress
        self.worker: WorkerProcess | None = None
        self.stopped = False
        self.watch = Watch()
        self.held: set[tuple[str, str]] = set()  # (case, kernel/arm) whose outputs the worker has
        self.deaths: dict[str, list[Verdict]] = {}  # of each arm, and hangs of each kernel, in a row up to now

    def run_case(self, name: str, case: str, arms: list[str]) -> None:
        """One kernel on one case. An arm that ends the worker gets its verdict, and a fresh worker takes those that have none yet."""
        known: set[str] = set()
        dead: set[str] = set()
        idle_deaths = 0

        def keep(record: Record) -> None:
            if record.arm not in known:
                known.add(record.arm)
                self._remember(record)
                self.add(record)

        while todo := [arm for arm in arms if arm not in dead]:
            for arm in [arm for arm in todo if f"{name}/{arm}" not in known and self._given_up(name, arm)]:
                dead.add(arm)
                keep(Record(case, f"{name}/{arm}", Verdict.SKIPPED, self._given_up(name, arm)))
            todo = [arm for arm in todo if arm not in dead]
            if all(f"{name}/{arm}" in known for arm in todo):
                return
            try:
                self._ask(name, case, todo, keep)
                for arm in (f"{name}/{arm}" for arm in todo if f"{name}/{arm}" not in known):
                    self.close()  # whatever made it forget one is in there still
                    keep(Record(case, arm, Verdict.ERROR, "the worker was done without a word of it"))
                return
            except WorkerDied as death:
                self.worker = None
                if self.stopped:
                    return
                idle_deaths += death.phase == "idle"
                if death.phase == "idle" and idle_deaths < 3:
                    continue  # it died of something earlier: not this case's doing
                culprit = death.arm.rpartition("/")[2]
                record = Record(case, f"{name}/{culprit}", death.verdict, death.detail)
                if culprit in todo and death.phase != "timing":
                    dead.add(culprit)
                    keep(record)
                else:  # not one arm's doing: the case cannot be made here, or timing ended the worker
                    for other in todo:
                        keep(dataclasses.replace(record, arm=f"{name}/{other}"))
                    return

    def _given_up(self, name: str, arm: str) -> str:
        """Why an arm is asked no more, or "". An arm dies alone; where a kernel hangs in one arm and then in the next, none is worth the
        time that finding out takes."""
        deaths, hangs, most = self.deaths.get(f"{name}/{arm}", []), self.deaths.get(name, []), self.settings.give_up
        if most and len(deaths) >= most:
            return f"given up: {'hung' if deaths[-1] is Verdict.TIMEOUT else 'crashed'} on {counted(len(deaths), 'case')} before"
        return f"given up: {name} hung {len(hangs)} times in a row" if most and len(hangs) >= most else ""

    def _remember(self, record: Record) -> None:
        if record.verdict in (Verdict.TIMEOUT, Verdict.CRASHED):
            self.deaths.setdefault(record.arm, []).append(record.verdict)
        elif record.verdict is not Verdict.SKIPPED:
            self.deaths.pop(record.arm, None)
        if record.verdict is Verdict.TIMEOUT:
            self.deaths.setdefault(record.kernel, []).append(record.verdict)
        elif record.verdict is not Verdict.SKIPPED:
            self.deaths.pop(record.kernel, None)

    def save(self, record: Record, path: Path) -> str:
        """Have the outputs of a record's arm written into a file. Returns why that cannot be done, or ""."""
        answer = self._of_outputs(record, op="save", path=str(path), about={"case": record.case, "arm": record.arm})
        return str(answer["problem"])

    def compare(self, record: Record, path: Path, labels: tuple[str, str]) -> tuple[Check | None, str]:
        """Have the outputs of a record's arm held against those in a file: the check, or why that cannot be done. labels: what
        the arm's and the file's are called."""
        answer = self._of_outputs(record, op="compare", path=str(path), labels=list(labels))
        return (None if answer["problem"] else msgspec.convert(answer["check"], Check)), answer["problem"]

    def _of_outputs(self, record: Record, **request: Any) -> dict[str, Any]:
        """The answer to a request about outputs. Where no worker has them any more, the arm is launched on its case again."""
        try:
            if self.worker is None or (record.case, record.arm) not in self.held:
                self._ask(record.kernel, record.case, [record.source], lambda record: None, timed=False)
            self.progress(record.case, record.arm, request["op"])
            for event in self._worker().ask(SECONDS_FOR_OUTPUTS, arm=record.source, **request):
                if event["event"] == "broken":
                    self.close()
                    return {"problem": event["detail"]}
                if event["event"] != "phase":
                    return event
        except WorkerDied as death:
            self.worker = None
            return {"problem": death.detail}
        raise AssertionError("unreachable: ask() ends only by an exception")

    def _ask(self, name: str, case: str, arms: list[str], keep: Callable[[Record], None], timed: bool = True) -> None:
        """Send one request and turn its events into records. Whatever is known is kept, also when the worker dies."""
        self.held = set()
        waiting: dict[str, Record] = {}
        limit, why = deadline(parse_case(case), self.options, self.settings)
        contract = contract_of(family_of(case), self.settings.contract, self.options.device) if timed else ""
        request = {"op": "run_case", "text": case, "name": name, "arms": arms, "contract": contract,
                   "samples": self.settings.samples, "fp64": self.settings.fp64, "time_wrong": self.settings.time_wrong,
                   "launches": self.settings.launches}
        try:
            for event in self._worker().ask(limit, why, **request):
                if event["event"] == "phase":
                    self.progress(case, event["arm"] or name, event["phase"])
                elif event["event"] == "checked":
                    record = msgspec.convert(event["record"], Record)
                    if event["timed"]:
                        waiting[record.arm] = record  # its time is still to come
                        self.watch.open(event["gpu"])
                    else:
                        keep(record)
                elif event["event"] == "timed":
                    event["timing"]["clocks"] = in_words(self.watch.between(event["begin"], event["end"]))
                    keep(with_time(waiting.pop(event["arm"]), event["timing"], event["check"]))
                elif event["event"] == "untimed":
                    waiting = {arm: dataclasses.replace(r, note=f"not timed: {event['reason']}") for arm, r in waiting.items()}
                elif event["event"] == "broken":
                    for arm in (f"{name}/{arm}" for arm in arms):
                        found = waiting.pop(arm, Record(case, arm, Verdict.ERROR))
                        keep(dataclasses.replace(found, verdict=Verdict(event["verdict"]), detail=event["detail"]))
                    self.close()  # it may be short of memory, or about to die
                    return
                elif event["event"] == "done":
                    self.held = {(case, f"{name}/{arm}") for arm in arms}
                    return
        except WorkerDied as death:
            if self.stopped:  # that was us, and no arm's doing
                raise
            waiting = {arm: dataclasses.replace(r, note="not timed: another arm ended the worker") for arm, r in waiting.items()}
            if death.phase == "timing":
                waiting = {arm: dataclasses.replace(r, verdict=death.verdict, detail=death.detail) for arm, r in waiting.items()}
            raise
        finally:
            for record in waiting.values():
                keep(record)

    def _worker(self) -> WorkerProcess:
        if self.worker is None:
            self.worker = WorkerProcess(self.options, self.log)
            if self.stopped:  # meanwhile: stop() found no worker to end
                self.worker.end_process()
        return self.worker

    def close(self) -> None:
        """Let the worker end by itself."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def stop(self) -> None:
        """End the worker from another thread than the one that is asking it; run_case then returns with what it has."""
        self.stopped = True
        worker = self.worker
        if worker is not None:
            worker.end_process()

    def kill(self) -> None:
        """End the worker at once."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


def with_time(record: Record, timing: dict[str, Any], check: dict[str, Any]) -> Record:
    """The record with its time and the check of the timed loop's output."""
    checks = [*record.checks, msgspec.convert(check, Check)]
    return dataclasses.replace(record, checks=checks, verdict=worst([c.verdict for c in checks]), time=msgspec.convert(timing, Timing))
