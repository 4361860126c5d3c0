"""What is drawn: within the work that was asked for, at the borders, and taken by the kernel that it is drawn for."""
from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from arms.kernel import KERNELS, Kernel, Limit, Requires, load_package
from arms.lengths import SOURCES
from cases import Case, IndexerTopkCase, SparsePrefillCase, indexer_topk, parse_case, sparse_prefill
from cases.fits import Fits, read_fits
from cases.strategies import ANY, indexer_topk_cases, most_elements, sparse_prefill_cases
from harness import availability
from harness.drawing import Batch, shrink

load_package("arms.sparse_prefill")
load_package("arms.indexer_topk")
MANY = 240
PLURAL = {key: key.upper() for key in ("rows", "values", "scales", "ties", "weights")}
EVERY_SOURCE = tuple(SOURCES)


def drawn(strategy: Any, count: int = MANY) -> list[Any]:
    """So many examples, the same ones every time."""
    found: list[Any] = []
    rules = settings(max_examples=count, phases=(Phase.generate,), database=None, deadline=None, suppress_health_check=tuple(HealthCheck))
    seed(0)(rules(given(strategy)(lambda case: found.append(case))))()
    return found


@pytest.fixture(scope="module")
def sparse() -> list[SparsePrefillCase]:
    return drawn(sparse_prefill_cases(1 << 16))


@pytest.fixture(scope="module")
def indexer() -> list[IndexerTopkCase]:
    return drawn(indexer_topk_cases(1 << 20))


@pytest.mark.parametrize("work", [1, 1 << 10, 1 << 26])
def test_cases_stay_within_the_work_and_the_elements_asked_for(work: int) -> None:
    for case in drawn(sparse_prefill_cases(work), 80):
        assert case.work <= work * 2 * (576 + 512) and case.elements <= most_elements(work)
    for topk_case in drawn(indexer_topk_cases(work), 80):
        least = 32  # of the fewest heads on one key
        assert topk_case.num_q * topk_case.s_kv * topk_case.h <= max(work, least) and topk_case.elements <= most_elements(work)


def test_a_gpu_is_given_large_cases() -> None:
    cases = drawn(sparse_prefill_cases(1 << 26), 150)
    assert all(max(getattr(case, key) for case in cases) >= least for key, least in {"topk": 2048, "s_q": 2048, "s_kv": 1 << 15}.items())
    topk_cases = drawn(indexer_topk_cases(1 << 28), 150)
    assert max(case.s_kv for case in topk_cases) >= 1 << 15 and max(case.num_q for case in topk_cases) >= 1023


def test_every_border_and_every_word_is_drawn(sparse: list[SparsePrefillCase], indexer: list[IndexerTopkCase]) -> None:
    sizes = {size for case in sparse for size in (case.topk, case.s_q, case.s_kv, case.lead)}
    topk_sizes = {size for case in indexer for size in (case.topk, case.num_q, case.s_kv, case.span)}
    assert {1, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 511, 512, 513} <= sizes | topk_sizes
    assert {1, 64, 128} <= sizes & topk_sizes and {1, 16, 64, 128} <= {case.h_q for case in sparse}
    for key in ("rows", "values", "tail", "sink", "order", "scales"):
        assert {getattr(case, key) for case in sparse} == set(getattr(sparse_prefill, PLURAL.get(key, f"{key}s".upper()))), key
    for key in ("values", "ties", "weights", "order", "scales", "window"):
        assert {getattr(case, key) for case in indexer} == set(getattr(indexer_topk, PLURAL.get(key, f"{key}s".upper()))), key


def test_numbers_are_short(sparse: list[SparsePrefillCase], indexer: list[IndexerTopkCase]) -> None:
    pairs = ((sparse, ("holes", "sm_scale", "peak")), (indexer, ("share", "sigma", "empty")))
    for number in (getattr(case, key) for cases, keys in pairs for case in cases for key in keys):
        assert number == 0 or (number >= 1e-3 and float(f"{number:.3g}") == number), number


def test_the_unusual_is_not_rare(sparse: list[SparsePrefillCase], indexer: list[IndexerTopkCase]) -> None:
    share = {
        "odd block counts": sum(-(-case.topk // 64) % 2 for case in sparse), "wide rows": sum(case.topk >= 128 for case in sparse),
        "holes": sum(0 < case.holes < 1 for case in sparse), "fillers": sum(case.tail != "pad" for case in sparse),
        "masked first entries": sum(case.lead > 0 for case in sparse),
        "several requests": sum("+" in case.requests for case in indexer),
        "windows inside": sum(0 < case.span < case.s_kv for case in indexer),
        "something to choose": sum(case.topk < case.s_kv for case in indexer),
        "about as many keys as are chosen": sum(abs(case.topk - case.s_kv) <= 1 for case in indexer),
        "ties": sum(case.ties != "none" for case in indexer)}
    assert {name: count for name, count in share.items() if count < MANY / 12} == {}


@pytest.mark.parametrize(("family", "part", "smallest"), [
    ("sparse_prefill", "rows=ragged", "sparse_prefill:s_q=1,s_kv=1,h_q=1,topk=129,rows=ragged"),
    ("indexer_topk", "weights=mixed", "indexer_topk:requests=1/1,topk=129,weights=mixed")])
def test_a_failing_case_shrinks_to_a_short_line(family: str, part: str, smallest: str) -> None:
    """What a fault does not need is left at its default, or at the least."""
    batches = [Batch(family, ANY, 1 << 16, seed, "k", 0) for seed in range(4)]
    found = [shrink(batch, lambda text: part in text and topk_of(text) > 128) for batch in batches]
    assert smallest in found, found


def topk_of(text: str) -> int:
    return parse_case(text).topk


def described(requires: Requires, family: str = "sparse_prefill") -> Fits:
    """What a worker would say of such a kernel, as it comes through JSON."""
    kernel: Any = Kernel("k", lambda p: None, requires, None, None, SOURCES, "")  # type: ignore[arg-type,return-value]
    if family == "indexer_topk":
        kernel = dataclasses.replace(KERNELS["torch_dense"], requires=requires)  # type: ignore[arg-type]
    data = dataclasses.asdict(availability.fits(kernel))
    return read_fits({key: list(value) if isinstance(value, tuple) else value for key, value in data.items()})


def test_fits_read_back_as_they_were() -> None:
    for kernel in KERNELS.values():
        assert dataclasses.replace(described(kernel.requires, kernel.family), arms=kernel.arms) == availability.fits(kernel)


@functools.cache
def drawn_for(family: str, fits: Fits) -> list[Case]:
    """Draws for a kernel. They follow from what it takes, which is the same for most."""
    strategy = {"sparse_prefill": sparse_prefill_cases, "indexer_topk": indexer_topk_cases}[family]
    return drawn(strategy(1 << 26, fits), 50)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_nearly_every_draw_is_taken_by_the_kernel_it_is_drawn_for(name: str) -> None:
    fits = availability.fits(KERNELS[name])
    cases = drawn_for(KERNELS[name].family, fits)
    taken = Counter(any(not fits.refusal(arm, case) for arm in fits.arms) for case in cases)
    assert taken[False] == 0, f"{taken[False]} of {len(cases)}"


def test_a_narrow_kernel_gets_what_it_takes_and_its_least_case_where_work_is_too_little() -> None:
    narrow = described(Requires(dtypes=("fp8",), heads=(64, 128), d_qk=(512,), topk_multiple=128,
                                limits=(Limit(EVERY_SOURCE, "sink", ("normal", "mixed"), "none", "sparse_prefill:"),)))
    for case in drawn(sparse_prefill_cases(1 << 20, narrow), 60):
        assert case.dtype == "fp8" and case.h_q in (64, 128) and case.d_qk == 512 and case.topk % 128 == 0 and case.sink == "none"
    assert {(case.h_q, case.topk, case.s_q) for case in drawn(sparse_prefill_cases(1, narrow), 20)} == {(64, 128, 1)}
    one = described(Requires(heads=(32,), topk_in=(2048,), keys=(12288, 1 << 20), keys_multiple=4, requests_max=1), "indexer_topk")
    for topk_case in drawn(indexer_topk_cases(1 << 26, one), 60):
        assert (topk_case.h, topk_case.topk, topk_case.s_kv % 4, "+" in topk_case.requests) == (32, 2048, 0, False)
        assert topk_case.s_kv >= 12288
