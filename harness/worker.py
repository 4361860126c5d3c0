"""The worker: a process that takes case texts on one descriptor and gives back JSON lines on another.

Started by harness/client.py as `python -m harness.worker IN OUT OPTIONS`, with any interpreter that has torch and the
kernel under test. It announces what it is about to do before doing it, so that whoever holds the clock can name the
culprit when it dies. Only OUT carries results, so what a kernel prints by accident forges nothing; a kernel that means to
deceive runs in this process and could.
"""
from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from arms.kernel import KERNELS, Kernel, load_file, load_package, normalise
from arms.lengths import SOURCES
from cases.counter import digest
from cases.inputs import Inputs, make_inputs
from cases.sparse_prefill import SparsePrefillCase, parse_case
from harness import availability
from harness.checks import NAMES
from harness.compare import bits_differ
from harness.machine import describe_machine, version_of
from harness.record import Lengths, Record
from harness.timing import Timed, Untimed, measure
from harness.trial import ArmRun, KernelTrial, synchronize
from harness.verdicts import Check, Verdict, worst
from references.sparse_prefill import Expected, reference

ARM_PHASES = ("prepare", "first launch", "launch", "timing")
"""Phases in which what happens is the arm's doing; in the others it is the harness's."""


class Poisoned(Exception):
    """The CUDA context is unusable: this process must end."""


class Worker:
    """Answers requests one at a time. `out` is the private descriptor's file."""

    def __init__(self, out: Any, device: str) -> None:
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self.out, self.device, self.now = out, torch.device(found if device == "auto" else device), ""
        if self.device.type == "cuda" and self.device.index is not None and torch.cuda.is_available():
            torch.cuda.set_device(self.device)  # for kernels that launch on the current one
        self.case: SparsePrefillCase | None = None
        self.inputs: Inputs | None = None
        self.expected: Expected | None = None
        self.digests: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def send(self, event: str, **fields: Any) -> None:
        """One JSON line, flushed."""
        self.out.write(json.dumps({"event": event, **fields}) + "\n")
        self.out.flush()

    def phase(self, arm: str, name: str) -> None:
        """Say what is about to happen."""
        self.now = name
        self.send("phase", arm=arm, phase=name)

    def describe(self, cases: list[str]) -> None:
        """Answer with the machine, every kernel, and for each case the arms that do not take it and why."""
        kernels = []
        for kernel in KERNELS.values():
            why = availability.unavailable(kernel, self.device)
            refused: dict[str, dict[str, str]] = {}
            for text in cases:
                case = parse_case(text)
                reasons = {source: availability.refusal(kernel, source, case) for source in SOURCES}
                refused[text] = {source: reason for source, reason in reasons.items() if reason}
            kernels.append({
                "name": kernel.name, "version": version_of(kernel.requires.distribution), "why_not": why,
                "imports": kernel.requires.entry, "requires": availability.requirements(kernel), "promise": str(kernel.promise),
                "refused": refused})
        self.send("described", device=str(self.device), machine=describe_machine(self.device), kernels=kernels)

    def probe(self, name: str) -> None:
        """Import one kernel's package: answer why that fails, and why it has a none arm alone. Both "" if neither."""
        self.phase(name, "import")
        problem = availability.import_problem(KERNELS[name])
        self.send("probed", problem=problem, none_only="" if problem else availability.no_length(KERNELS[name]))

    def run_case(self, text: str, name: str, sources: list[str], contract: str, samples: int, fp64: bool) -> None:
        """Run the arms of one kernel on one case, then time those that passed. Sends a `checked` record for each arm."""
        self._make(parse_case(text), fp64)
        assert self.inputs is not None and self.expected is not None
        kernel = KERNELS[name]
        current = [""]
        trial = KernelTrial(kernel, self.inputs, self.expected, self.digests, lambda phase: self.phase(current[0], phase))
        passed: list[str] = []
        for source in sources:
            current[0] = f"{name}/{source}"
            record = self._arm(trial, source, text)
            self.send("checked", record=dataclasses.asdict(record))
            if record.verdict is Verdict.PASSED:
                passed.append(source)
        if contract and passed:
            self._time(trial, kernel, passed, contract, samples)
        self.send("done")

    def _make(self, case: SparsePrefillCase, fp64: bool) -> None:
        if case == self.case:
            return
        self.case = self.inputs = self.expected = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.phase("", "inputs")
        start = time.perf_counter()
        self.inputs = make_inputs(case, self.device)
        self.digests = self.inputs.digests()
        synchronize(self.device)
        made = time.perf_counter()
        self.phase("", "reference")
        self.expected = reference(self.inputs, torch.float64 if fp64 else torch.float32)
        synchronize(self.device)
        self.seconds = {"inputs": made - start, "reference": time.perf_counter() - made}
        self.case = case

    def _arm(self, trial: KernelTrial, source: str, text: str) -> Record:
        start = time.perf_counter()
        arm = f"{trial.kernel.name}/{source}"
        try:
            run = trial.run(source)
        except Exception as error:
            verdict, detail = self._classify(error)
            record = Record(text, arm, verdict, detail, inputs=self.digests)
            if self._is_poisoned():
                record.verdict = Verdict.CRASHED
                self.send("checked", record=dataclasses.asdict(record))
                raise Poisoned from error
            return record
        return Record(
            text, arm, worst([check.verdict for check in run.checks]), checks=run.checks, inputs=self.digests,
            outputs={name: digest(value) for name, value in zip(NAMES, run.outputs)}, lengths=_lengths(run, trial.kernel),
            note=run.note, extra=run.extra, seconds={**self.seconds, "arm": time.perf_counter() - start})

    def _classify(self, error: Exception) -> tuple[Verdict, str]:
        """An exception's verdict: out of memory, the arm's fault, or the harness's, by the phase it came from."""
        first = one_line(error)
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        detail = f"{type(error).__name__} in phase {self.now}: {first}{place}"
        if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "can't allocate memory" in first:
            return Verdict.OOM, detail
        traceback.print_exc()
        if self.now in ARM_PHASES:
            return Verdict.FAILED, detail
        return Verdict.ERROR, detail

    def _is_poisoned(self) -> bool:
        """Whether the CUDA context still answers. A sticky error fails every later call."""
        try:
            synchronize(self.device)
        except Exception:
            return True
        return False

    def _time(self, trial: KernelTrial, kernel: Kernel, sources: list[str], contract: str, samples: int) -> None:
        assert self.inputs is not None
        self.phase(f"{kernel.name}/{sources[0]}", "timing")
        launch = trial.prepared()
        finals: dict[str, Any] = {}

        def timed(source: str) -> Timed:
            def call(length: torch.Tensor | None) -> None:
                finals[source] = launch(length)

            assert self.inputs is not None
            return Timed(kernel.sources[source].prepare(self.inputs), call)

        try:
            times = measure({source: timed(source) for source in sources}, contract, samples, self.device)
        except Untimed as error:
            self.send("untimed", reason=str(error))
            return
        if len({outputs[0].data_ptr() for outputs in finals.values()}) < len(finals):  # one buffer for all arms: the last one's is left
            finals = {source: tuple(x.clone() for x in launch(trial.done[source].length)) for source in finals}
        for source, timing in times.items():
            last = normalise(finals[source], kernel.convention)
            stale = [name for name, a, b in zip(NAMES, last, trial.done[source].outputs) if bool(bits_differ(a, b).any())]
            check = Check("timed-output", Verdict.FLAKY if stale else Verdict.PASSED,
                          f"{' and '.join(stale)} of the last timed call differ from the checked ones" if stale
                          else "the last timed call gave what was checked")
            self.send("timed", arm=f"{kernel.name}/{source}", timing=dataclasses.asdict(timing), check=dataclasses.asdict(check))


def _lengths(run: ArmRun, kernel: Kernel) -> Lengths | None:
    if run.length is None:
        return None
    length, pair = run.length.float(), kernel.promise.pair
    pairs = torch.ceil(length / pair).sum() / (len(length) * -(-run.rows.topk // pair))
    return Lengths(float(length.mean()), int(length.min()), int(length.max()), float(pairs), digest(run.length))


def requests(file: Any) -> Iterator[dict[str, Any]]:
    """The parent's requests, until it closes the descriptor."""
    for line in file:
        yield json.loads(line)


def main(arguments: list[str]) -> int:
    """IN OUT DEVICE BROKEN [FILE...]: descriptors, device, whether to register arms/broken, kernel files to load."""
    warnings.filterwarnings("ignore")
    inbound, outbound, device, broken, *files = arguments
    for descriptor in (int(inbound), int(outbound)):
        os.set_inheritable(descriptor, False)
    with open(int(outbound), "w", encoding="utf-8") as out, open(int(inbound), encoding="utf-8") as incoming:
        try:
            worker = Worker(out, device)
            problem = _start(worker, broken == "1", files)
        except RuntimeError as error:
            out.write(json.dumps({"event": "unfit", "reason": f"--device {device}: {one_line(error)}"}) + "\n")
            return 0
        if problem:
            worker.send("unfit", reason=problem)
            return 0
        worker.send("ready")
        for request in requests(incoming):
            operation = getattr(worker, request.pop("op"))
            try:
                operation(**request)
            except Poisoned:
                return 3
            except Exception as error:
                verdict, detail = worker._classify(error)
                worker.send("broken", verdict=verdict.value, detail=detail)
                if worker._is_poisoned():
                    return 3
        out.flush()
        sys.stdout.flush()
        os._exit(0)  # the interpreter's own way out takes torch a second


def _start(worker: Worker, broken: bool, files: list[str]) -> str:
    """Register kernels and touch the device. Why that cannot be done, in one line, or ""."""
    load_package("arms.sparse_prefill")
    if broken:
        load_package("arms.broken")
    for path in files:
        try:
            load_file(path)
        except Exception as error:
            return f"--load {path}: {type(error).__name__}: {one_line(error)}"
    try:
        if worker.device.type not in ("cpu", "cuda"):
            raise ValueError("only cpu and cuda")
        torch.zeros(1, device=worker.device)
    except Exception as error:
        return f"--device {worker.device}: {one_line(error)}"
    return ""


def one_line(error: Exception) -> str:
    """The first line of what it says, as text that can be written anywhere; its repr where it says nothing."""
    text = str(error).strip() or repr(error)
    return text.splitlines()[0].encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
