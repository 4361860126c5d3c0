"""Faults on the GPU: the culprit is named, and a good kernel still gets its verdicts afterwards."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.asking import Settings
from harness.client import WorkerOptions, default_memory
from harness.record import Record
from harness.runfolder import RunFolder, RunInfo, now
from harness.runner import Runner, describe
from harness.verdicts import Verdict

CASE = "sparse_prefill:s_q=4,h_q=2,topk=128"
FAULTS = str(Path(__file__).parent / "faulty_cuda" / "faults.py")


def run(kernels: list[str], timeout: float = 0.0) -> list[Record]:
    """Records of the kernels, in order, on one small case."""
    options = WorkerOptions("cuda", False, (FAULTS,), default_memory(), sys.executable)
    known = {kernel["name"]: kernel for kernel in describe(options, [CASE])["kernels"]}
    folder = RunFolder(None, RunInfo(now(), [], [CASE], [known[name] for name in kernels], {}, {}))
    Runner(folder, options, Settings(timeout=timeout), folder.info.kernels, lambda *_: None).run()
    return folder.records


@pytest.mark.cuda
@pytest.mark.parametrize(("kernel", "verdict", "word"), [
    ("faulty_access", Verdict.CRASHED, "assert"),
    ("faulty_memory", Verdict.OOM, "memory"),
])
def test_fault_is_named_and_the_next_kernel_runs(kernel: str, verdict: Verdict, word: str) -> None:
    records = run([kernel, "torch_blocks"])
    assert [record.verdict for record in records] == [verdict] * 3 + [Verdict.PASSED] * 3
    assert all(word in record.detail for record in records[:3])


@pytest.mark.cuda
def test_hang_on_the_gpu_is_a_timeout_and_the_gpu_is_free_afterwards() -> None:
    records = run(["faulty_hang", "torch_blocks"], timeout=10)
    assert [record.verdict for record in records] == [Verdict.TIMEOUT] * 3 + [Verdict.PASSED] * 3
