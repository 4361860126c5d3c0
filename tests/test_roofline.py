"""The least time that the work can take: counted by hand for small cases, and never more than a right kernel needs."""
from __future__ import annotations

import pytest
import torch

from cases import parse_case
from cases.indexer_inputs import make_indexer_inputs
from cases.inputs import make_inputs
from harness.roofline import Machine, Work, indexer_topk_work, least, machine, sparse_prefill_work

CPU = torch.device("cpu")
GPU = Machine(bandwidth=4e12, cache=50_000_000, flops=(1e15, 2e15))


def test_sparse_prefill_counts_what_valid_entries_need() -> None:
    inputs = make_inputs(parse_case("sparse_prefill:s_q=4,s_kv=64,h_q=8,topk=128,rows=ragged,holes=0.2,pad_rows=1"), CPU)  # type: ignore[arg-type]
    pairs = sum(int(0 <= int(key) < 64 and at < int(n)) for row, n in zip(inputs.indices[:, 0], inputs.valid) for at, key in enumerate(row))
    rows = len([row for row in inputs.valid_entries if bool(row.any())])
    named = len({int(key) for row, counts in zip(inputs.indices[:, 0], inputs.valid_entries) for key, c in zip(row, counts) if c})
    work = sparse_prefill_work(inputs)
    assert rows < 4 and work == Work((rows * 8 + named) * 576 * 2 + 4 * pairs, 2.0 * 8 * pairs * (576 + 512), False)


def test_indexer_topk_counts_rows_that_have_to_choose() -> None:
    inputs = make_indexer_inputs(parse_case("indexer_topk:requests=8/512,topk=508,h=32"), CPU)  # type: ignore[arg-type]
    widths = [int(ke) - int(ks) for ks, ke in zip(inputs.ks, inputs.ke)]
    choosing = [width for width in widths if width > 508]
    assert 0 < len(choosing) < 8
    assert indexer_topk_work(inputs) == Work(max(choosing) * 132 + len(choosing) * 32 * 132, 2.0 * 32 * 128 * sum(choosing), True)


def test_the_least_is_the_larger_of_moving_and_computing_and_the_cache_may_hold_it_all() -> None:
    assert least(Work(450_000_000, 1e9, False), GPU) == (pytest.approx(100.0), "400,000,000 bytes beyond the L2 at 4.00 TB/s")
    assert least(Work(450_000_000, 1e12, False), GPU)[0] == pytest.approx(1000.0)
    assert least(Work(450_000_000, 1e12, True), GPU)[0] == pytest.approx(500.0)
    assert least(Work(40_000_000, 0.0, False), GPU)[0] == 0.0
    assert least(Work(1, 1.0, False), None) == (0.0, "not known for this GPU")


def test_a_cpu_has_a_limit_too() -> None:
    found = machine(CPU)
    assert found and found.flops[0] >= 16e12
    assert least(Work(10**12, 0.0, False), found)[0] == 0.0


@pytest.mark.cuda
@pytest.mark.perf
def test_a_product_does_not_beat_the_machine_and_comes_near_it() -> None:
    device = torch.device("cuda")
    a = torch.full((8192, 8192), 0.5, device=device, dtype=torch.bfloat16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        a @ a
    begin.record()
    a @ a
    end.record()
    torch.cuda.synchronize()
    us, bound = begin.elapsed_time(end) * 1e3, least(Work(0, 2.0 * 8192**3, False), machine(device))[0]
    assert 0.4 * us < bound <= us
