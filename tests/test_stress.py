"""Many launches, a busy second stream, a CUDA graph: with a stand-in for CUDA, and for real where there is one."""
from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable

import pytest
import torch
from arms_under_test import HALF, ONE, Length, kernel_of, subject_of
from processes import invoke
from trials import expected_of, inputs_of

from arms.broken.fault import FAULTS
from arms.kernel import KERNELS, Kernel, Outputs, Problem, Requires, load_package, make_problem
from arms.lengths import SOURCES
from arms.sparse_prefill.torch_blocks import attention
from cases import parse_case
from cases.inputs import make_inputs
from harness import metamorphic, stress
from harness.asking import Settings, seconds_allowed
from harness.client import WorkerOptions
from harness.options import replay_options
from harness.record import Record
from harness.stress import BUSY, NotCaptured, replayed, while_busy
from harness.trial import ArmRun, KernelTrial
from harness.verdicts import CUDA_CHECKS, Check, Verdict
from harness.worker import Worker
from references import reference

load_package("arms.broken")


# --- many launches ----------------------------------------------------------------------------------------------------


def test_more_launches_back_to_back_find_a_rare_difference() -> None:
    count = [0]

    def rare(p: Problem, length: Length) -> Outputs:
        count[0] += 1
        out, max_logits, lse = attention(p, length)
        return out, max_logits, lse + (count[0] in (30, 40))

    inputs = make_inputs(parse_case(ONE), "cpu")
    trial = KernelTrial(kernel_of(rare), inputs, expected_of(ONE), inputs.digests(), lambda phase: None)
    trial.launches = 60
    check = next(c for c in trial.run("none").checks if c.name == "run-to-run")
    assert check.verdict is Verdict.FLAKY and check.detail.endswith("2 of 60 launches differ from the first")


def test_launches_go_in_groups_where_their_outputs_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metamorphic, "free_memory", lambda device: 4 * 10 * (512 * 2 + 8))
    phases: list[str] = []
    subject = dataclasses.replace(subject_of(ONE), phase=phases.append)
    check = metamorphic.run_to_run(subject, subject.ready(subject.problem), 25)
    assert check.detail == "26 launches, 25 of them back to back in groups of 10, bitwise equal" and phases == ["launch"] * 3


def test_a_race_is_repeated_with_as_many_launches_and_given_the_time() -> None:
    plan, options = Settings(launches=200), WorkerOptions("cpu", False, (), 1 << 30)
    record = Record(HALF, "kernel/none", Verdict.FLAKY, checks=[Check("run-to-run", Verdict.FLAKY), Check("reference", Verdict.PASSED)])
    assert replay_options(record, options, plan) == ["--launches", "200"]
    assert replay_options(record, options, Settings()) == []
    assert replay_options(Record(HALF, "kernel/none", Verdict.FAILED, checks=[Check("run-to-run", Verdict.PASSED)]), options, plan) == []
    case = parse_case("sparse_prefill:s_q=8192,s_kv=65536,h_q=128,topk=2048")
    assert seconds_allowed(case, "cuda") == seconds_allowed(case, "cuda", 12) < seconds_allowed(case, "cuda", 200)


def test_launches_reach_the_trial() -> None:
    out = io.StringIO()
    Worker(out, "cpu").run_case(ONE, "torch_blocks", ["backscan"], "", 1, False, False, 25)
    records = [json.loads(line)["record"] for line in out.getvalue().splitlines() if '"checked"' in line]
    assert [c["detail"] for c in records[0]["checks"] if c["name"] == "run-to-run"] == [
        "26 launches, 25 of them back to back, bitwise equal"]


def test_launches_is_an_option_of_a_run_and_of_a_replay() -> None:
    for command in ("run", "replay"):
        assert "--launches" in invoke(command, "--help").text
    assert invoke("run", ONE, "--launches", "-1").code == 2


# --- CUDA: with a stand-in, and for real ------------------------------------------------------------------------------


class FakeCuda:
    """Streams and graphs as far as stress.py uses them: work is done at once; a graph repeats what was launched under capture."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.capturing: FakeGraph | None = None
        self.refuses = False

    def Stream(self, device: object = None) -> FakeStream:
        return FakeStream(self)

    def stream(self, stream: FakeStream) -> FakeStream:
        return stream

    def current_stream(self) -> FakeStream:
        return FakeStream(self)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __enter__(self) -> None:
        self.cuda.log.append("side")

    def __exit__(self, *_: object) -> None:
        self.cuda.log.append("main")

    def wait_stream(self, other: object) -> None:
        self.cuda.log.append("wait")

    def synchronize(self) -> None:
        self.cuda.log.append("synchronize one")

    def query(self) -> bool:
        return False


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.work = cuda, [lambda: None]

    def capture_begin(self) -> None:
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing = None
        if self.cuda.refuses:
            raise RuntimeError("the capture was not valid")

    def replay(self) -> None:
        for work in self.work:
            work()


def test_a_replay_gives_what_the_inputs_hold_then() -> None:
    cuda, x, out = FakeCuda(), torch.zeros(2), torch.zeros(2)

    def launch() -> torch.Tensor:
        if cuda.capturing:
            cuda.capturing.work.append(lambda: out.copy_(x + 1))
        return out

    result, _ = replayed(launch, lambda: x.fill_(5), cuda)
    assert result.tolist() == [6.0, 6.0]
    assert cuda.log[:3] == ["wait", "side", "main"]  # launched there once before it is captured


def test_a_launch_that_cannot_be_captured_says_why() -> None:
    cuda = FakeCuda()
    cuda.refuses = True

    def launch() -> None:
        if cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(NotCaptured, match=r"^RuntimeError: operation not permitted when stream is capturing$"):
        replayed(launch, lambda: None, cuda)
    assert cuda.capturing is None


def test_results_beside_a_busy_stream_are_all_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "SIDES", (4, 8))
    cuda, count = FakeCuda(), iter(range(100))
    results, covered = while_busy(lambda: next(count), torch.device("cpu"), cuda)
    assert results == list(range(1, 1 + BUSY)) and covered == BUSY  # the first one only takes the time
    assert cuda.log.count("side") == 2 + BUSY  # the load's first product, eight to take the time, then one load a launch


def test_a_long_launch_gets_a_load_of_larger_units(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[int] = []
    monkeypatch.setattr(stress, "_load", lambda device, side, cuda: sides.append(side) or stress.Load(device, side, cuda))
    monkeypatch.setattr(stress, "SIDES", (4, 8))
    monkeypatch.setattr(stress, "_seconds", lambda call, cuda: call() or 1e-3)
    while_busy(lambda: None, torch.device("cpu"), FakeCuda())
    monkeypatch.setattr(stress, "_seconds", lambda call, cuda: call() or (1e-3 if call.__name__ == "<lambda>" else 9.0))

    def long() -> None:
        return None

    while_busy(long, torch.device("cpu"), FakeCuda())
    assert sides == [4, 4, 8]


def test_a_load_that_a_launch_outlasts_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[int, int]] = []
    monkeypatch.setattr(stress, "SIDES", (4, 8))
    monkeypatch.setattr(stress, "MOST", 40)
    monkeypatch.setattr(stress, "_load", stress.Load)
    monkeypatch.setattr(stress, "_seconds", lambda call, cuda: call() or 1e-3)
    monkeypatch.setattr(stress.Load, "queue", lambda self, units: queued.append((self.side, units)))
    monkeypatch.setattr(stress.Load, "busy", lambda self: len(queued) > 7)
    _, covered = while_busy(lambda: None, torch.device("cpu"), FakeCuda())
    made = [[(4, 1), (4, 8)], [(8, 1), (8, 8)]]  # what the making of a load queues
    assert queued == [*made[0], (4, 18), (4, 40), *made[1], (8, 8), *[(8, 32)] * 5] and covered == 5


def test_the_checks_under_stress_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(HALF, "backscan")
    wrong = (subject.outputs[0], subject.outputs[1], subject.outputs[2] + 1)
    for results, verdict in (([subject.outputs] * BUSY, Verdict.PASSED), ([subject.outputs, wrong], Verdict.FLAKY)):
        monkeypatch.setattr(metamorphic, "while_busy", lambda launch, device, results=results: (results, len(results)))
        assert metamorphic.busy_stream(subject).verdict is verdict

    def eager(launch: Callable[[], Outputs], update: Callable[[], None]) -> tuple[Outputs, object]:
        update()
        return launch(), None

    def stale(launch: Callable[[], Outputs], update: Callable[[], None]) -> tuple[Outputs, object]:
        outputs = launch()
        update()
        return outputs, None

    def never(launch: Callable[[], Outputs], update: Callable[[], None]) -> tuple[Outputs, object]:
        raise NotCaptured("RuntimeError: no")

    silent = dataclasses.replace(subject, kernel=dataclasses.replace(subject.kernel, requires=Requires()))
    assert subject.kernel.requires.uncapturable
    found: list[Check] = []
    for way in (eager, stale, never):
        monkeypatch.setattr(metamorphic, "replayed", way)
        check = metamorphic.graph_replay(silent)
        assert check
        found.append(check)
    assert metamorphic.graph_replay(subject) is None  # it has said so
    assert [check.verdict for check in found] == [Verdict.PASSED, Verdict.FAILED, Verdict.FAILED]
    assert found[0].detail == "bitwise equal after indices and topk_length were updated in place"
    assert "cannot be made of it" in found[2].detail
    assert torch.equal(subject.problem.indices, make_problem(inputs_of(HALF)).indices)  # its own copies are updated


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name, x in FAULTS.items() if x.family == "sparse_prefill" and x.check in CUDA_CHECKS])
def test_a_fault_that_needs_cuda_is_caught(name: str) -> None:
    fault = FAULTS[name]
    runs = on_the_gpu(KERNELS[name], fault.case)  # type: ignore[arg-type]
    found = {check.verdict for arm in runs.values() for check in arm.checks if check.name == fault.check} - {Verdict.PASSED}
    assert found == {Verdict.FLAKY if fault.check == "busy-stream" else Verdict.FAILED}


@pytest.mark.cuda
def test_the_portable_kernel_passes_on_the_gpu_and_says_that_no_graph_is_made() -> None:
    runs = on_the_gpu(KERNELS["torch_blocks"], "sparse_prefill:s_q=26,s_kv=300,h_q=2,rows=mixed,sink=normal")  # type: ignore[arg-type]
    assert [(c.name, c.detail) for arm in runs.values() for c in arm.checks if c.verdict is not Verdict.PASSED] == []
    assert all("not run: graph-replay: it waits for the device" in arm.note for arm in runs.values())
    assert {"busy-stream", "guards", "padded"} <= {c.name for c in runs["none"].checks}


@pytest.mark.cuda
def test_a_kernel_that_waits_and_does_not_say_so_fails_graph_replay() -> None:
    runs = on_the_gpu(kernel_of(attention), HALF)
    found = [check for arm in runs.values() for check in arm.checks if check.name == "graph-replay"]
    assert len(found) == 3 and all(c.verdict is Verdict.FAILED and "cannot be made of it" in c.detail for c in found)


def on_the_gpu(kernel: Kernel, text: str) -> dict[str, ArmRun]:
    """Every arm of a kernel on a case."""
    inputs = make_inputs(parse_case(text), "cuda")
    trial = KernelTrial(kernel, inputs, reference(inputs), inputs.digests(), lambda phase: None)
    return {source: trial.run(source) for source in SOURCES}
