"""What evidence computes: crossover, early-exit model, expected savings, useful work, intervals. Known answers."""
from __future__ import annotations

import pytest
import torch

from cases import parse_case
from cases.indexer_inputs import make_indexer_inputs
from cases.indexer_topk import IndexerTopkCase
from cases.inputs import make_inputs
from cases.sparse_prefill import SparsePrefillCase
from harness.asking import Settings
from harness.cli import why_no_time
from harness.client import WorkerOptions
from harness.comparison import Burst, Estimate, Pairing, Round, Rule, TimeComparison, TimeVerdict
from harness.evidence import MEASURED, measured, part_info
from harness.evidence_plans import PLANS, Asked, parts_of
from harness.lengths import summary
from harness.machine import peaks
from harness.record import Lengths, Record, Timing
from harness.roofline import Machine
from harness.stats import estimate, judge, narrow, suspect
from harness.verdicts import Check, Verdict
from reports import evidence_numbers as numbers
from reports import failure, sweeps
from reports.evidence_common import repeat_line
from reports.evidence_page import case_runs, command, told_arms, why
from reports.evidence_prefill import about_ratios, counted_words, one_equivalence

CPU = torch.device("cpu")


def record(arm: str, us: list[float] | None = None, verdict: Verdict = Verdict.PASSED, case: str = "sparse_prefill:s_q=2",
           **more: object) -> Record:
    time = Timing("span", "L2 flushed", "interleaved, ABBA", us) if us else None
    return Record(case, arm, verdict, time=time, **more)  # type: ignore[arg-type]


# --- crossover --------------------------------------------------------------------------------------------------------


def test_a_crossover_is_interpolated_over_log_keys() -> None:
    found, = sweeps.crossings([(400, 2.0), (100, 0.5)])
    assert found.keys == pytest.approx(100 * 4 ** (1 / 3))
    assert (found.below, found.above, found.rising) == (100, 400, True)


def test_a_ratio_that_passes_1_twice_crosses_twice() -> None:
    assert [each.rising for each in sweeps.crossings([(1, 0.9), (2, 1.1), (4, 0.9)])] == [True, False]


@pytest.mark.parametrize(("ratios", "says"), [
    ([0.3, 0.4], "none between 100 and 200 keys: dense is faster throughout; nearest to 1 at 200 (0.40x)"),
    ([1.2, 1.1], "none between 100 and 200 keys: litetopk is faster throughout; nearest to 1 at 200 (1.10x)"),
    ([0.5, 2.0], "about 130 keys, between 100 (0.50x) and 200 (2.00x), above which litetopk is faster"),
    ([0.5], "not enough lengths")])
def test_a_crossover_names_its_neighbours_or_says_that_there_is_none(ratios: list[float], says: str) -> None:
    assert says in sweeps.crossover_text(list(zip((100, 200), ratios)))


def test_a_crossover_beside_a_wrong_dense_says_so() -> None:
    assert "200 (2.00x, dense wrong)" in sweeps.crossover_text([(100, 0.5), (200, 2.0)], [200])


# --- the early-exit model ---------------------------------------------------------------------------------------------


def test_the_model_finds_the_line_that_the_times_lie_on() -> None:
    model = sweeps.fit([1, 2, 8, 16], [130 + 104 * pairs for pairs in (1, 2, 8, 16)])
    assert model is not None
    assert model.fixed == pytest.approx(130) and model.per_pair == pytest.approx(104)
    assert max(map(abs, model.residuals)) < 1e-6


def test_a_point_beside_the_line_is_a_residual() -> None:
    model = sweeps.fit([1, 2, 3, 4], [10, 20, 35, 40])
    assert model is not None
    assert model.residuals[2] == pytest.approx(35 - model.at(3))
    assert model.residuals[2] == max(model.residuals, key=abs)
    assert sum(model.residuals) == pytest.approx(0)


@pytest.mark.parametrize("pairs", [[1, 2], [3, 3, 3]])
def test_no_line_goes_through_too_few_points(pairs: list[float]) -> None:
    assert sweeps.fit(pairs, [1.0] * len(pairs)) is None


def test_the_staircase_tells_a_step_from_what_lies_on_it() -> None:
    told = sweeps.staircase([1, 127, 128, 129, 256], [100.0, 101.0, 102.0, 150.0, 151.0])
    assert told == ("Within a step, 1 pair: 100.0 to 102.0 us over 3 lengths, 2 pairs: 150.0 to 151.0 us over 2 lengths; "
                    "over a step, 128 to 129: +48.0 us.")


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "s_q=20,s_kv=64,topk=16,rows=ramp", "s_q=9,s_kv=64,topk=16,rows=ramp", "s_q=20,s_kv=8,topk=16,rows=ramp",
    "s_q=5,s_kv=64,topk=16,rows=half", "s_q=5,s_kv=64,topk=16,index_topk=7",
    "s_q=6,s_kv=64,topk=16,rows=ragged", "s_q=6,s_kv=64,topk=16,rows=short"])
def test_valid_keys_are_those_that_the_indices_hold(text: str) -> None:
    case = parse_case(f"sparse_prefill:{text},h_q=1,d_qk=512")
    assert isinstance(case, SparsePrefillCase)
    inputs = make_inputs(case, CPU)
    lengths = summary(inputs.valid.clamp(max=case.limit).int(), case.topk, 128)
    assert numbers.valid_keys(case, lengths) == int(inputs.valid_entries.sum())


@pytest.mark.parametrize("text", ["rows=ragged,holes=0.5", "lead=3", "pad_rows=1", "rows=ragged"])
def test_valid_keys_that_are_not_known_are_not_guessed(text: str) -> None:
    case = parse_case(f"sparse_prefill:{text}")
    assert isinstance(case, SparsePrefillCase)
    assert numbers.valid_keys(case, None) is None


def test_useful_work_of_the_public_shape() -> None:
    work = numbers.useful("sparse_prefill:dtype=fp8,s_q=4096,s_kv=65536,topk=2048", None)
    assert work == numbers.Useful(2 * 64 * (576 + 512) * 4096 * 2048, 4096 * 2048 * 576, True)
    bf16 = numbers.useful("sparse_prefill:s_q=4096,s_kv=65536,h_q=128,topk=2048", None)
    assert bf16 and (bf16.bytes, bf16.fp8) == (2 * 4096 * 2048 * 576 * 2, False)
    assert numbers.rate(bf16, 1e6 * bf16.flops / 600e12, {"peak bf16": "1000 TFLOP/s"}).of_peak == pytest.approx(0.6)
    assert numbers.rate(bf16, 1.0, {"peak bf16": "?"}).of_peak is None


@pytest.mark.parametrize("text", ["requests=3/50+4/9", "requests=3/50,window=full", "requests=6/50,span=47"])
def test_the_indexers_work_is_every_key_of_every_window(text: str) -> None:
    case = parse_case(f"indexer_topk:{text},topk=4")
    assert isinstance(case, IndexerTopkCase)
    inputs = make_indexer_inputs(case, CPU)
    work = numbers.useful(str(case), None)
    assert work and work.flops == 2 * 128 * 32 * int((inputs.ke - inputs.ks).sum())


# --- savings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "nominal", "by_pairs"), [(4096, 0.25, 0.234375), (8192, 0.125, 0.1171875)])
def test_what_a_causal_prompt_is_expected_to_save(tokens: int, nominal: float, by_pairs: float) -> None:
    case = parse_case(f"sparse_prefill:s_q={tokens},s_kv={tokens},topk=2048,rows=ramp")
    assert isinstance(case, SparsePrefillCase)
    lengths = summary(torch.arange(1, tokens + 1).clamp(max=2048).int(), 2048, 128)
    assert lengths and numbers.expected_saving(lengths) == pytest.approx(by_pairs)
    assert numbers.nominal_saving(case) == nominal


@pytest.mark.parametrize("text", ["s_q=1024,s_kv=1024,topk=2048,rows=ramp", "s_q=4096,s_kv=4096,topk=2048"])
def test_no_nominal_saving_where_the_formula_does_not_hold(text: str) -> None:
    case = parse_case(f"sparse_prefill:{text}")
    assert isinstance(case, SparsePrefillCase)
    assert numbers.nominal_saving(case) is None


def test_savings_are_paired_sample_by_sample() -> None:
    """A drift that hits both samples of a pair leaves no trace; medians apart would not see which belong together."""
    base, candidate = record("k/none", [100, 200, 400]).time, record("k/metadata", [75, 150, 300]).time
    assert base and candidate
    assert numbers.paired_savings(base, candidate) == [0.25] * 3


def test_times_of_two_contracts_have_no_ratio() -> None:
    wall = record("k/none", [10.0])
    assert wall.time
    wall.time.contract = "wall"
    assert numbers.ratio(wall, record("k/metadata", [5.0])) is None
    assert numbers.ratio(record("k/none", [10.0]), record("k/metadata", [5.0])) == 2


def test_a_wrong_arm_that_was_timed_is_marked() -> None:
    assert numbers.cell(record("k/dense", [1000.0], Verdict.FAILED)) == "1 [1 1]\n**wrong**"
    assert numbers.cell(record("k/dense", [1000.0])) == "1 [1 1]"
    assert numbers.cell(record("k/dense", None, Verdict.CRASHED)) == "CRASHED"


def test_clocks_are_the_extremes_and_name_what_slowed_the_gpu() -> None:
    slow, fast = record("k/none", [1.0], case="sparse_prefill:s_q=1"), record("k/none", [1.0])
    assert slow.time and fast.time
    slow.time.clocks = "1635 to 1980 MHz, 210 to 690 W, throttle reasons 0x4"
    fast.time.clocks = "1965 to 1980 MHz, 300 to 400 W, throttle reasons 0x0"
    assert numbers.clocks_line([slow, fast]) == "clocks while timed: 1635 to 1980 MHz, 210 to 690 W; power cap in 1 of 2 timings"
    assert numbers.clocks_line([fast]).endswith("nothing slowed it")
    assert numbers.clocks_line([record("k/none", [1.0])]) == ""


# --- what is said of records ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mine", "other", "verdict", "says"), [
    ("a", "a", Verdict.PASSED, "bitwise"), ("a", "b", Verdict.PASSED, "by rule"), ("a", "b", Verdict.FAILED, "differs"),
    ("a", "b", None, "differs"), (None, "b", Verdict.PASSED, "not compared")])
def test_equivalence_of_one_output(mine: str | None, other: str, verdict: Verdict | None, says: str) -> None:
    assert one_equivalence(mine, other, Check("none-vs-metadata", verdict) if verdict else None) == says


def test_what_differs_stands_out() -> None:
    assert counted_words(["bitwise", "differs", "bitwise"]) == "2 bitwise, **1 differs**"


def test_a_case_run_passes_only_with_all_its_arms() -> None:
    records = [record("k/none"), record("k/metadata", verdict=Verdict.FAILED), record("m/none"),
               record("m/metadata", verdict=Verdict.SKIPPED)]
    planned = [(each.case, each.arm) for each in records]
    assert case_runs(records, planned) == (1, 2)
    assert case_runs(records[2:], planned) == (1, 2), "what has no record has not passed"
    assert case_runs(records[:3], planned) == (0, 2)
    assert case_runs([], planned) == (0, 2)
    assert told_arms(records[2:3]) == {}
    assert told_arms(records[:2]) == {"k/none": "PASSED on 1 cases", "k/metadata": "FAILED on 1 of 1 cases"}


def test_why_tells_the_check_that_says_most() -> None:
    checks = [Check("run-to-run", Verdict.FLAKY, "flickers"), Check("reference", Verdict.FAILED, "over budget"),
              Check("guards", Verdict.PASSED)]
    assert why(record("k/none", verdict=Verdict.FAILED, checks=checks)) == "reference: over budget; also run-to-run"


def test_a_repeat_line_does_not_say_where_results_were_put() -> None:
    words = ["threearm", "evidence", "litetopk", "--runs", "x", "--out=y", "--compare", "z", "--arm", "deep_gemm"]
    assert command(words) == ["evidence", "litetopk", "--arm", "deep_gemm"]


def test_a_column_that_is_empty_in_every_row_is_left_out() -> None:
    assert numbers.filled_table(["case", "a", "b"], [["x", "", "1"], ["y", "", ""]]) == "| case | b |\n|---|---|\n| x | 1 |\n| y |  |"


@pytest.mark.parametrize(("contract", "says"), [
    ("kernel", "medians of the call, the derivation apart"), ("span", "medians of derivation and call together"),
    ("wall", "medians of derivation and call together")])
def test_what_a_ratio_is_of_follows_from_the_contract(contract: str, says: str) -> None:
    timed = record("k/none", [1.0])
    assert timed.time
    timed.time.contract = contract
    assert about_ratios([timed]).endswith(says)
    assert about_ratios([record("k/none")]) == ""


# --- a timing told again ----------------------------------------------------------------------------------------------


def test_a_record_in_full_tells_its_time_and_how_it_was_taken() -> None:
    timed = record("k/metadata", [1000.0, 2000.0, 3000.0])
    assert ("  time: 2 [1.5 2.5] ms; contract span: CUDA events around derivation and call, launch hidden; L2 flushed; interleaved, ABBA; "
            "median [quartiles of the samples] of 3 samples in one process\n") in failure.describe(timed, [], always=True)
    assert "time:" not in failure.describe(record("k/metadata"), [], always=True)


def test_under_contract_kernel_the_derivation_and_the_kernels_are_told_apart() -> None:
    timed = record("k/metadata", [1000.0])
    assert timed.time
    timed.time.contract, timed.time.derive_us, timed.time.kernels = "kernel", [20.0], 2
    timed.time.breakdown, timed.time.clocks = {"small": 5.0, "attention": 995.0}, "1965 to 1980 MHz, 300 to 400 W, throttle reasons 0x4"
    assert failure.describe_time(timed)[1:] == [
        "  derivation of topk_length: 0.02 [0.02 0.02] ms", "  2 kernels a call, median us: attention 995.0, small 5.0",
        "  clocks while timed: 1965 to 1980 MHz, 300 to 400 W; power cap in 1 of 1 timings"]


def test_a_replay_that_has_no_time_says_why() -> None:
    failed = record("k/none", verdict=Verdict.FAILED, checks=[Check("reference", Verdict.FAILED)])
    assert why_no_time(failed) == "an arm that did not pass is not timed, except with --time-wrong"
    assert why_no_time(record("k/none", verdict=Verdict.CRASHED)) == "an arm that did not pass is not timed"
    assert why_no_time(record("k/none")) == "it was not measured"


def test_a_line_that_repeats_the_time_of_a_wrong_arm_times_it() -> None:
    options = WorkerOptions("cpu", False, (), 1 << 30)
    wrong, right = record("k/dense", [1.0], Verdict.FAILED), record("k/dense", [1.0])
    assert repeat_line(wrong, options, Settings("wall", 9, time_wrong=True)).endswith("--time wall --samples 9 --time-wrong")
    assert repeat_line(right, options, Settings("wall", 9, time_wrong=True)).endswith("--time wall --samples 9")


# --- an interval is no verdict ----------------------------------------------------------------------------------------


def processes(ratio: float) -> list[list[Round]]:
    """Three, a thousandth apart."""
    return [[Round([Burst(side, [100.0 * (ratio * (1 + off) if side == "candidate" else 1)])
                    for side in ("base", "candidate", "candidate", "base")])] for off in (-0.001, 0.0, 0.001)]


@pytest.mark.parametrize("ratio", [0.2, 1.0, 5.0])
def test_by_the_rule_of_evidence_nothing_is_faster_or_the_same_and_nothing_stops_early(ratio: float) -> None:
    found = estimate(processes(ratio))
    assert found is not None
    assert not suspect(found, MEASURED) and not narrow(found, MEASURED)
    assert judge(found, None, MEASURED)[0] is TimeVerdict.UNRESOLVED
    assert narrow(found, Rule(0.03, 0.0)), "by a rule of the gate it would stop"


def test_a_measured_comparison_says_that_it_is_one_and_an_invalid_one_stays_invalid() -> None:
    found = TimeComparison(TimeVerdict.UNRESOLVED, "x", MEASURED, "span", "warm", [], estimate=Estimate(0.5, 0.49, 0.51, 2.0, 1.0, 3, 6))
    assert measured(found).why == "measured, not judged: -50.0 % [-51.0 %, -49.0 %]"
    found.verdict = TimeVerdict.INVALID
    assert measured(found).why == "x"
    assert Pairing("c", "k/none", "k/metadata")  # what it is stored with


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS.values(), ids=lambda plan: plan.name)
def test_plans_hold_the_published_shapes_and_smaller_ones(plan: object) -> None:
    from harness.evidence_plans import EvidencePlan
    assert isinstance(plan, EvidencePlan)
    for reduced in (False, True):
        parts = parts_of(plan, reduced, Asked())
        assert plan.main in [part.name for part in parts] and parts[-1].name == "processes"
        infos = [part_info(part, reduced, Asked()) for part in parts]
        assert all(info.contract in (("", "wall") if reduced else ("", "kernel", "span", "wall")) for info in infos)
    assert not any(part.sweep for part in parts_of(plan, False, Asked(sweeps=False)))
    assert not any(part.of for part in parts_of(plan, False, Asked(processes=0)))
    assert part_info(parts_of(plan, True, Asked())[-1], True, Asked(processes=5)).samples == 5
    largest = max(parse_case(text).work for part in plan.parts for text in part.cases(True))
    assert largest < min(parse_case(text).work for text in plan.part(plan.main).cases(False))


def test_the_published_evidence_is_what_is_planned() -> None:
    q8, bf16, litetopk = (PLANS[name] for name in ("q8kv8-topk-length", "bf16-topk-length", "litetopk"))
    assert len(q8.part("equivalence").cases(False)) == 24
    assert [len(q8.part(name).cases(False)) for name in ("kernel-time", "wrapper-span", "wrapper-wall")] == [3, 3, 3]
    assert q8.part("kernel-time").samples == 30 and bf16.part("span").samples == 50
    assert [sweeps.keys_of(case) for case in litetopk.part("scale").cases(False)] == [262144, 524288, 786432, 1048576]
    lengths = [sweeps.length_of(case) for case in q8.part("topk-length-sweep").cases(False)]
    assert {127, 128, 129, 256, 257} <= set(lengths) and lengths == sorted(lengths)


def test_lengths_that_are_given_once_a_case_hold_for_every_arm() -> None:
    lengths = Lengths(78.0, 1, 128, 0.25, "x")
    case = "sparse_prefill:dtype=fp8,s_q=8,topk=512,rows=short"
    records = [record("k/none", [10.0], case=case), record("k/metadata", [5.0], case=case, lengths=lengths)]
    table = sweeps.roofline(records, {case: "rows=short"}, {})  # 2 * 64 * (576 + 512) * 78 * 8 operations
    assert table.count("| 8.69e-05 |") == 2


# --- the machine ------------------------------------------------------------------------------------------------------


def test_peaks_are_written_so_that_they_can_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = Machine(4.917e12, 62914560, (1070.5e12, 2141.1e12))
    monkeypatch.setattr("harness.machine.machine", lambda device: h200)
    told = peaks(torch.device("cuda"))
    assert told == {"peak bf16": "1070 TFLOP/s", "peak fp8": "2141 TFLOP/s", "peak memory": "4.92 TB/s", "L2": "62914560 B"}
    assert numbers.number(told, "L2") == 62914560 and "1070 TFLOP/s" in sweeps.peaks_line(told)
    assert peaks(CPU) == {} and "none" in sweeps.peaks_line({})
    monkeypatch.setattr("harness.machine.machine", lambda device: None)
    assert peaks(torch.device("cuda")) == {}
