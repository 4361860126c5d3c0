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
from collections.abc import Callable, Iterator
from typing import Any

import torch

from arms.broken.fault import FAULTS
from arms.kernel import KERNELS, load_file, load_package
from cases import Case, parse_case
from cases.counter import digest
from harness import availability, doctor_probes, rejudging, worker_outputs
from harness.families import FAMILIES, Trial
from harness.holding import Held, held
from harness.machine import describe_machine, gpu_names, gpu_uuid
from harness.record import Record
from harness.roofline import least, machine
from harness.timing import Timed, Untimed, measure
from harness.trial import synchronize
from harness.verdicts import Verdict, worst

ARM_PHASES = ("prepare", "first launch", "launch", "timing", "sample")
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
        self.case: Case | None = None  # that there is a reference for
        self.made: Case | None = None  # that there are inputs for
        self.inputs: Any = None  # of the case's family, as is what is expected
        self.expected: Any = None
        self.trial: Trial | None = None  # of the last run_case
        self.digests: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.held: Held | None = None
        self.held_name = ""
        self.comparable: Callable[[Any], dict[str, torch.Tensor]] = dict

    def send(self, event: str, **fields: Any) -> None:
        """One JSON line, flushed."""
        self.out.write(json.dumps({"event": event, **fields}) + "\n")
        self.out.flush()

    def phase(self, arm: str, name: str) -> None:
        """Say what is about to happen."""
        self.now = name
        self.send("phase", arm=arm, phase=name)

    def describe(self, cases: list[str]) -> None:
        """Answer with the machine and every kernel, and for each case of its family the arms that do not take it and why."""
        kernels = [availability.described(kernel, self.device, cases) for kernel in KERNELS.values()]
        self.send("described", device=str(self.device), machine=describe_machine(self.device), kernels=kernels, gpus=gpu_names(self.device))

    def faults(self) -> None:
        """Answer with what every kernel of arms/broken that is registered is there for."""
        self.send("faults", faults=[dataclasses.asdict(fault) for fault in FAULTS.values()])

    def doctor(self, probe: str) -> None:
        """Try one thing on the device. Answers with what came of it."""
        self.phase("", probe)
        self.send("examined", facts=doctor_probes.examine(probe, self.device))

    def probe(self, name: str) -> None:
        """Import one kernel's package: answer why that fails, and why it has a none arm alone. Both "" if neither."""
        self.phase(name, "import")
        problem = availability.import_problem(KERNELS[name])
        self.send("probed", problem=problem, none_only="" if problem else availability.no_length(KERNELS[name]))

    def run_case(self, text: str, name: str, arms: list[str], contract: str, samples: int, fp64: bool,
                 time_wrong: bool, launches: int) -> None:
        """Run arms of one kernel on one case of its family, then time those that passed; with time_wrong also those whose answer is
        wrong. launches: how many run-to-run makes back to back, 0 for the family's own number. Sends a `checked` record for each, with
        `timed`: whether its time is to come."""
        kernel, case = KERNELS[name], parse_case(text)
        if case.family != kernel.family:
            raise ValueError(f"{name} is a kernel of {kernel.family}, {text} is no case of it")
        self.trial = None
        self._make(case, fp64)
        current = [""]
        trial = FAMILIES[kernel.family].trial(kernel, self.inputs, self.expected, self.digests,
                                              lambda phase: self.phase(current[0], phase))
        self.trial = trial
        trial.launches = launches or trial.launches
        to_time: list[str] = []
        spoiled = False
        for arm in arms:
            current[0] = f"{name}/{arm}"
            record = self._arm(trial, arm, current[0], text)
            spoiled |= has_spoiled(record)
            timed = bool(contract) and (record.verdict is Verdict.PASSED or (time_wrong and bool(record.checks)))
            self.send("checked", record=dataclasses.asdict(record), timed=timed, gpu=gpu_uuid(self.device))
            if timed:
                to_time.append(arm)
        if to_time:
            self._time(trial, name, to_time, contract, samples)
        if spoiled:
            self.case = self.made = None  # the next kernel on this case gets inputs of its own
        self.send("done")

    def save(self, arm: str, path: str, about: dict[str, str]) -> None:
        """Write the outputs of an arm of the last run_case into a file. Answers with its bytes, or why that cannot be done."""
        self.phase("", "save")
        self.send("saved", **worker_outputs.attempt(lambda: {"bytes": worker_outputs.save(self.trial, arm, path, about)}))

    def compare(self, arm: str, path: str, labels: list[str]) -> None:
        """Hold those outputs against the ones in a file. Answers with a check, or why that cannot be done."""
        self.phase("", "compare")
        self.send("compared", **worker_outputs.attempt(
            lambda: {"check": dataclasses.asdict(worker_outputs.compare(self.trial, arm, path, (labels[0], labels[1])))}))

    def rejudge(self, text: str, arm: str, path: str, inputs: dict[str, str], outputs: dict[str, str], ways: dict[str, int],
                fp64: bool) -> None:
        """Judge the outputs in a file anew; no kernel is launched. text, arm (in full), inputs, outputs, ways: the record's. Answers with
        the checks, or why there are none."""
        case, name = parse_case(text), arm.rpartition("/")[0]
        if case != self.made:
            self._make_inputs(case)

        def judged() -> dict[str, Any]:
            rejudging.check_inputs(self.digests, inputs)
            tensors = rejudging.saved_outputs(path, {"case": text, "arm": arm}, outputs, ways)
            if case != self.case:
                self._make_reference(case, fp64)
            self.phase("", "judge")
            on_device = {output: tensor.to(self.device) for output, tensor in tensors.items()}
            return {"checks": [dataclasses.asdict(check) for check in rejudging.judge(self.inputs, self.expected, on_device, name)]}

        self.phase("", "read")
        self.send("rejudged", **worker_outputs.attempt(judged))

    def hold(self, text: str, name: str, arm: str, contract: str, flush: bool) -> None:
        """Prepare one arm to be timed in bursts, without judging it. Answers with its inputs' fingerprints, what a call takes, and the
        speed of light for it."""
        kernel, case, family = KERNELS[name], parse_case(text), FAMILIES[KERNELS[name].family]
        self.held = None
        if case != self.made:
            self._make_inputs(case)
        self.held_name = f"{name}/{arm}"
        self.phase(self.held_name, "first launch" if kernel.requires.entry else "prepare")
        timed, self.comparable = family.timed(kernel, self.inputs, arm)
        self.held = held(timed, contract, flush, self.device)
        least_us, least_of = least(family.work(self.inputs), machine(self.device))
        self.send("held", inputs=self.digests, us=self.held.us, host_us=self.held.host_us, hidden=self.held.hidden, least_us=least_us,
                  least_of=least_of, gpu=gpu_uuid(self.device), pid=os.getpid())

    def sample(self, count: int) -> None:
        """Time the held arm `count` times."""
        assert self.held
        self.phase(self.held_name, "sample")
        us, begin, end = self.held.burst(count)
        self.send("sampled", us=us, begin=begin, end=end)

    def release(self) -> None:
        """Let go of the held arm. Answers with the fingerprints of what its last timed call gave."""
        assert self.held
        outputs = {name: digest(tensor) for name, tensor in self.comparable(self.held.last).items()}
        self.held = None
        self.send("released", outputs=outputs)

    def _make(self, case: Case, fp64: bool) -> None:
        if case == self.case:
            return
        self._make_inputs(case)  # also where they are there: an arm that was timed may have written into them
        self._make_reference(case, fp64)

    def _make_reference(self, case: Case, fp64: bool) -> None:
        """What is expected, from the inputs that are there."""
        made = time.perf_counter()
        self.phase("", "reference")
        self.expected = FAMILIES[case.family].reference(self.inputs, torch.float64 if fp64 else torch.float32)
        synchronize(self.device)
        self.seconds["reference"] = time.perf_counter() - made
        self.case = case

    def _make_inputs(self, case: Case) -> None:
        """Make a case's tensors where those of another were."""
        self.case = self.made = self.inputs = self.expected = self.trial = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.phase("", "inputs")
        torch.set_default_dtype(torch.float32)  # a kernel may have left another
        torch.set_default_device(None)
        start = time.perf_counter()
        self.inputs = FAMILIES[case.family].make_inputs(case, self.device)
        self.digests = self.inputs.digests()
        synchronize(self.device)
        self.seconds = {"inputs": time.perf_counter() - start}
        self.made = case

    def _arm(self, trial: Trial, arm: str, full_name: str, text: str) -> Record:
        start = time.perf_counter()
        try:
            run = trial.run(arm)
        except Exception as error:
            verdict, detail = self._classify(error)
            record = Record(text, full_name, verdict, detail, inputs=self.digests)
            if self._is_poisoned():
                record.verdict = Verdict.CRASHED
                self.send("checked", record=dataclasses.asdict(record), timed=False)
                raise Poisoned from error
            return record
        return Record(
            text, full_name, worst([check.verdict for check in run.checks]), checks=run.checks, inputs=self.digests,
            outputs={name: digest(tensor) for name, tensor in run.tensors.items()}, lengths=run.lengths, note=run.note, extra=run.extra,
            ways=run.ways, memory=run.memory, seconds={**self.seconds, "arm": time.perf_counter() - start})

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

    def _time(self, trial: Trial, name: str, arms: list[str], contract: str, samples: int) -> None:
        self.phase(f"{name}/{arms[0]}", "timing")
        last: dict[str, Any] = {}
        timed = {arm: _kept(trial.timed(arm), last, arm) for arm in arms}
        self.phase(f"{name}/{arms[0]}", "timing")  # again: a trial may have announced that it prepares
        begin = time.monotonic()
        try:
            times = measure(timed, contract, samples, self.device)
        except Untimed as error:
            self.send("untimed", reason=str(error))
            return
        end = time.monotonic()
        for arm, timing in times.items():
            check = trial.check_timed(arm, last[arm])
            self.send("timed", arm=f"{name}/{arm}", timing=dataclasses.asdict(timing), check=dataclasses.asdict(check),
                      begin=begin, end=end)


def _kept(timed: Timed, last: dict[str, Any], arm: str) -> Timed:
    """The same, with what the last launch returned left under `arm`."""
    def launch(length: torch.Tensor | None) -> None:
        last[arm] = timed.launch(length)

    return Timed(timed.derive, launch)


def has_spoiled(record: Record) -> bool:
    """Whether an arm may have left the case's inputs other than they were: it says so, or it ended where they were rewritten."""
    return not record.checks or any(c.name == "inputs-unchanged" and c.verdict is not Verdict.PASSED for c in record.checks)


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
        except RuntimeError as error:
            out.write(json.dumps({"event": "unfit", "reason": f"--device {device}: {one_line(error)}"}) + "\n")
            return 0
        for event, problem in (("unloadable", _load(broken == "1", files)), ("unfit", _touched(worker.device))):
            if problem:
                worker.send(event, reason=problem)
                return 0
        gc.freeze()  # what was imported stays: collecting before each case would take longer than a small case itself
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


def _load(broken: bool, files: list[str]) -> str:
    """Register kernels. Why a file cannot be loaded, in one line, or ""."""
    load_package("arms.sparse_prefill")
    load_package("arms.indexer_topk")
    if broken:
        load_package("arms.broken")
    for path in files:
        try:
            load_file(path)
        except Exception as error:
            return f"--load {path}: {type(error).__name__}: {one_line(error)}"
    return ""


def _touched(device: torch.device) -> str:
    """Why a device cannot be used, in one line, or ""."""
    try:
        if device.type not in ("cpu", "cuda"):
            raise ValueError("only cpu and cuda")
        torch.zeros(1, device=device)
    except Exception as error:
        return f"--device {device}: {one_line(error)}"
    return ""


def one_line(error: Exception) -> str:
    """The first line of what it says, as text that can be written anywhere; its repr where it says nothing."""
    text = str(error).strip() or repr(error)
    return text.splitlines()[0].encode("utf-8", "backslashreplace").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
