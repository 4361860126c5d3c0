"""The localiser, scored on the broken arms: where a fault has a place or a cause with a name, is that what a failure says?

`python tests/test_localiser.py` prints the table of docs/localiser.md.
"""
from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from faults import run_fault, run_on
from topk_problems import problem
from trials import expected_of, inputs_of, prepared

from arms.broken.fault import FAULTS
from arms.topk import TopkResult
from harness.locate.attribution import attribute
from harness.locate.diagnose import derived, told_if_it_fails
from harness.locate.hypotheses import explain, make_view, margins
from harness.locate.suspects import suspects
from harness.locate.suspects_values import SCALED
from harness.locate.topk_hypotheses import Choice, TopkHypothesis, TopkView, explain_choice, faults_of
from harness.locate.topk_localise import Windows
from harness.locate.topk_suspects import suspects as topk_suspects
from harness.locate.topk_suspects_gates import gates
from harness.locate.topk_wrong import tell_ranks
from harness.topk_inplace import reads_inputs
from harness.topk_relations import dense_vs_litetopk, same_choice
from harness.topk_sets import Band
from harness.verdicts import CUDA_CHECKS, Check, Verdict
from harness.words import counted

SCORED = {name: fault for name, fault in FAULTS.items() if fault.boundary and fault.check not in ("raises", "timed-output", *CUDA_CHECKS)}
SAME = " (here the same as: "
NAMING = ("pattern: ", "explained by: ", "heads ", "columns ")
"""Lines that name a border or a cause. Those that list rows and positions could hold any of them by accident."""
ENOUGH = 0.8

RAGGED = "sparse_prefill:s_q=12,s_kv=3000,h_q=2,topk=384,rows=ragged,holes=0.02,seed=3"
TELLING = {
    "broken_length_minus_one": RAGGED, "broken_skips_last_pair": RAGGED, "broken_length_minus_a_block": RAGGED,
    "broken_last_pair_half_processed": RAGGED, "broken_zero_rows_scored": RAGGED,
    "broken_ignores_length": "sparse_prefill:s_q=12,s_kv=900,h_q=2,topk=384,rows=ragged,tail=live",
    "broken_ends_at_a_block_of_pads": "sparse_prefill:s_q=6,s_kv=900,h_q=2,topk=384,rows=ragged,lead=128,holes=0.02",
    "broken_last_tile_of_keys_skipped": "indexer_topk:requests=40/1000,topk=64",
    "broken_columns_past_4096_dropped": "indexer_topk:requests=4/6000,topk=64",
    "broken_stale_threshold_loosens": "indexer_topk:requests=8/2000,topk=32",
}
"""Cases that tell causes apart which a fault's own case cannot, since all its rows are alike."""


def lines_of(name: str, text: str | None = None) -> list[str]:
    """The naming lines of a fault's own check, over its arms, each once."""
    runs = run_fault(name) if text is None else run_on(name, text)
    found = [line for run in runs.values() for check in run.checks if check.name == FAULTS[name].check
             and check.verdict is not Verdict.PASSED for line in check.where]
    return [line for line in dict.fromkeys(found) if line.startswith(NAMING)]


@functools.cache
def standing(name: str, text: str | None = None) -> str:
    """`first`: the planted boundary is what a line names; `among`: one that the case cannot tell from it is, and the line says so."""
    boundary, lines = FAULTS[name].boundary, lines_of(name, text)
    if any(boundary in line.partition(SAME)[0] for line in lines):
        return "first"
    return "among" if any(boundary in line for line in lines) else "no"


def test_the_planted_boundary_is_the_one_that_is_named() -> None:
    """On each fault's own case, which was chosen to show it and not to tell it from others."""
    found = {name: standing(name) for name in SCORED}
    named = [name for name, how in found.items() if how == "first"]
    assert len(SCORED) >= 60
    assert len(named) >= ENOUGH * len(SCORED), {name: how for name, how in found.items() if how != "first"}
    assert sum(how != "no" for how in found.values()) >= 0.9 * len(SCORED), found


@pytest.mark.parametrize("name", TELLING)
def test_a_case_whose_rows_differ_tells_causes_apart(name: str) -> None:
    assert standing(name, TELLING[name]) == "first", lines_of(name, TELLING[name])


def test_boundaries_are_in_the_localisers_own_words() -> None:
    """A boundary that nobody can name would be a miss by its spelling."""
    assert {fault.check for fault in SCORED.values()} >= {"reference", "lengths", "set", "shape", "status"}
    attention, choice = [h.name for h in suspects(True)], [h.name for h in topk_suspects()]
    assert len(attention) == len(set(attention)) and len(choice) == len(set(choice))
    names = attention + choice
    causes = [fault for fault in SCORED.values() if any(fault.boundary in name for name in names)]
    assert len(causes) >= 50


def test_it_never_fails_itself() -> None:
    for name in SCORED:
        assert not [line for run in run_fault(name).values() for check in run.checks for line in check.where if "itself failed" in line]


def test_an_error_of_the_localiser_is_a_line_and_one_of_the_device_is_not() -> None:
    check = Check("reference", Verdict.FAILED)
    with told_if_it_fails([check]):
        raise ValueError("x")
    assert check.where == ["the localiser itself failed: ValueError: x"]
    with pytest.raises(RuntimeError), told_if_it_fails([check]):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


# --- what a right kernel, or nothing, is told -------------------------------------------------------------------------


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    inputs, expected = inputs_of(RAGGED), expected_of(RAGGED)
    got = prepared("torch_blocks", inputs)(None)
    bad = [ratio > 1 for ratio in margins(got, expected)]
    assert not any(bool(mask.any()) for mask in bad)
    everything = [torch.ones_like(mask) for mask in bad]
    view = make_view(inputs, expected, everything, None)
    assert explain(got, view, suspects(False)) is None
    assert attribute(got, view, everything[1].any(1)) == []


def test_no_cause_is_made_up_for_noise() -> None:
    """Outputs that are wrong in a way that no fault has: nothing explains them, and no entries are blamed."""
    inputs, expected = inputs_of(RAGGED), expected_of(RAGGED)
    out, max_logits, lse = (x.clone() for x in prepared("torch_blocks", inputs)(None))
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    got = ((out.float() + noise * out.float().abs().mean()).bfloat16(), max_logits, lse)
    bad = [ratio > 1 for ratio in margins(got, expected)]
    view = make_view(inputs, expected, bad, None)
    assert explain(got, view, suspects(False)) is None
    assert attribute(got, view, bad[0].any(-1).any(1)) == []


def test_a_budget_that_covers_everything_explains_nothing() -> None:
    """Without a scale all scores grow so large that a budget holds any value; a hypothesis must also be nearer than what is right."""
    text = "sparse_prefill:dtype=fp8,s_q=6,s_kv=300,h_q=2"
    inputs, expected = inputs_of(text), expected_of(text)
    out, max_logits, lse = prepared("torch_blocks", inputs)(None)
    got = ((out.float() + 3).bfloat16(), max_logits, lse)
    bad = [ratio > 1 for ratio in margins(got, expected)]
    found = explain(got, make_view(inputs, expected, bad, None), suspects(False))
    assert found is None, found


@pytest.mark.parametrize(("positions", "line"), [
    ([0], "pattern: the first entry that counts; it explains 100% of the entries left out, 100% overlap"),
    (list(range(64)), "pattern: positions below 64; it explains 100% of the entries left out, 100% overlap"),
    (list(range(1, 256, 2)), "pattern: odd positions; it explains 100% of the entries left out, 100% overlap"),
    ([3, 17, 200], "entries left out: 18 in 6 of 6 rows looked at; positions 3, 17, 200 (3 of 256)")])
def test_entries_that_are_left_out_are_found_without_a_hypothesis(positions: list[int], line: str) -> None:
    text = "sparse_prefill:s_q=6,s_kv=900,h_q=4"
    inputs, expected = inputs_of(text), expected_of(text)
    wrong = inputs.indices.clone()
    wrong[..., positions] = -1
    got = prepared("torch_blocks", dataclasses.replace(inputs, indices=wrong))(None)
    bad = [ratio > 1 for ratio in margins(got, expected)]
    said = attribute(got, make_view(inputs, expected, bad, None), bad[2].any(1))
    assert any(found.startswith(line) for found in said), said


SUNK = "sparse_prefill:s_q=8,s_kv=40,h_q=1,topk=2,rows=ragged,sink=mixed,values=large"
"""Rows of one or two entries whose values are large beside lse's 1: there an out scaled down looks like an entry left out."""


@pytest.mark.parametrize(("way", "cause"), [
    ("once more", "the sink counted twice (out scaled by it once more)"),
    ("below 0", "the sink counted twice, in heads whose lse is below 0"), ("constant", SCALED)])
def test_an_out_that_is_scaled_has_no_entries_left_out(way: str, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lse is right, and could not be without them."""
    inputs, expected = inputs_of(SUNK), expected_of(SUNK)
    out, max_logits, lse = prepared("torch_blocks", inputs)(None)
    assert inputs.sink is not None
    factor = torch.sigmoid(lse - inputs.sink).nan_to_num(1.0)
    factor = {"once more": factor, "below 0": torch.where(lse < 0, factor, 1.0), "constant": torch.full_like(factor, 0.02)}[way]
    got = ((out.float() * factor[..., None]).bfloat16(), max_logits, lse)
    bad = [ratio > 1 for ratio in margins(got, expected)]
    view = make_view(inputs, expected, bad, None)
    assert bool(bad[0].any()) and not bool(bad[2].any())
    assert attribute(got, view, bad[0].any(-1).any(1)) == []
    found = explain(got, view, suspects(False))
    assert found is not None and found.name == cause, found
    monkeypatch.setattr("harness.locate.attribution._lse_agrees", lambda *_: True)
    assert attribute(got, view, bad[0].any(-1).any(1))[0].startswith("entries left out: ")  # what was said before


def test_a_factor_that_is_fitted_gives_way_to_what_has_a_name() -> None:
    inputs, expected = inputs_of(RAGGED), expected_of(RAGGED)
    out, max_logits, lse = prepared("torch_blocks", inputs)(None)
    half = out * 0.5
    for got, cause in (((-out, max_logits, lse), "out negated"), ((half, max_logits, lse), SCALED), ((half, max_logits, lse + 1), "")):
        bad = [ratio > 1 for ratio in margins(got, expected)]
        found = explain(got, make_view(inputs, expected, bad, None), suspects(False))
        assert ("" if found is None else found.name) == cause and (found is None or not found.others)


@pytest.mark.parametrize(("way", "line"), [
    (lambda told: told - 1, "one less than it should be"), (lambda told: told.roll(1), "that of the row before"),
    (lambda told: -(-told // 128) * 128, "rounded up to 128"), (lambda told: told + 64, "")])
def test_how_a_length_was_made(way, line: str) -> None:  # type: ignore[no-untyped-def]
    inputs = inputs_of("sparse_prefill:s_q=12,s_kv=300,h_q=1,rows=ragged")
    said = derived(way(inputs.valid).int(), inputs)
    assert ([f"explained by: the length is {line};" in text for text in said] == [True]) if line else said == []


# --- keys by their scores ---------------------------------------------------------------------------------------------


def told(scores: list[float], chosen: list[int], topk: int) -> list[str]:
    """What is said of one row's choice among keys with these scores, without a margin."""
    score = torch.tensor([scores])
    ks, ke = torch.zeros(1, dtype=torch.int32), torch.full((1,), len(scores), dtype=torch.int32)
    band = Band(lambda row0, row1: score, score.sort(1, descending=True).values[:, topk - 1], torch.zeros(1), ks, ke, len(scores))
    indices = torch.tensor([chosen + [-1] * (topk - len(chosen))], dtype=torch.int32)
    windows = Windows(ks.long(), ke.long(), topk, ((0, 1, 0, len(scores)),))
    return tell_ranks(indices, band, windows, torch.ones(1, dtype=torch.bool))


def test_ranks_and_scores_of_dropped_keys_are_told() -> None:
    """40 keys, rising; of the 16 best, ranks 0 to 3 were dropped and ranks 16 to 19 taken."""
    said = told([float(64 + x) for x in range(40)], [*range(20, 36)], 16)
    assert said[0] == ("dropped, by score: 4 in 1 of 1 row looked at, ranks 0 to 3 (topk 16), scores 100 to 103, 100% share its octave")
    assert any(line.startswith("do not belong, by score: 4 in 1 of 1 row looked at, ranks 16 to 19 (topk 16), scores 84 to 87")
               for line in said)


def test_ties_of_a_short_row_are_told() -> None:
    """Ten keys tie at the k-th; a row that took only those above names too few."""
    said = told([9.0, 8.0, *[5.0] * 10, 1.0], [0, 1], 6)
    assert said[0] == ("dropped, by score: 10 in 1 of 1 row looked at, ranks 2 (topk 6), scores 5 to 5, 100% tie with the k-th, "
                       "100% share its first 20 bits")
    assert said[1] == "pattern: keys that tie with the k-th; it explains 100% of the keys that were dropped, 100% overlap"


def test_a_bucket_of_16_bits_is_told() -> None:
    """2 and 2 + 2^-10: one fp16 value, but not one that 20 bits hold."""
    said = told([4.0, 3.0, 2.0 + 2.0**-10, 2.0, 1.0], [0, 1, 3], 3)
    assert said[0] == "do not belong, by score: 1 in 1 of 1 row looked at, ranks 3 (topk 3), scores 2 to 2, 100% share its fp16 value"
    assert said[1].startswith("pattern: ")


# --- suspects that a case says nothing of -----------------------------------------------------------------------------


def choice_view(scores: list[list[float]], chosen: list[list[int]]) -> TopkView:
    """A view of one request per row, as many keys each as it has scores, without a margin."""
    p = problem([(1, len(row)) for row in scores], len(chosen[0]))
    score = torch.full((len(scores), p.s_kv), -torch.inf)
    for number, row in enumerate(scores):
        score[number, int(p.ks[number]) : int(p.ke[number])] = torch.tensor(row)
    return TopkView(p, torch.arange(len(scores)), torch.tensor(chosen, dtype=torch.int32), score, torch.zeros(len(scores), 1))


def test_no_nan_is_blamed_where_none_was_chosen() -> None:
    """A row of NaN alone must name no key. If it names those of another row, NaN as a number explains their count, but not them."""
    numbers = [float(x) for x in range(40)]
    ranked = [TopkHypothesis(name, gates()[name]) for name in ("NaN ranked first", "NaN ranked last")]
    never = TopkHypothesis("another", lambda v: Choice(inside=v.inside & (v.key < 2)))
    strangers = choice_view([[torch.nan] * 3, numbers], [[9, 10, 11], [42, 41, 40]])
    before, left = (int(faults_of(strangers, choice)[0].sum()) for choice in (Choice(), Choice(strangers.score.nan_to_num(torch.inf))))
    assert (before, left) == (6, 3)
    assert explain_choice(strangers, [*ranked[:1], never]) == ""
    own = choice_view([[torch.nan, 3.0, 2.0, torch.nan, 1.0], numbers], [[0, 3, 1], [44, 43, 42]])
    assert explain_choice(own, [*ranked, never]) == "explained by: NaN ranked first; it leaves 0% of what is wrong with the keys"
    all_of_few = choice_view([[torch.nan, 3.0, 1.0], numbers], [[0, 1, 2], [42, 41, 40]])
    assert explain_choice(all_of_few, [*ranked, never, never]).endswith("(here the same as: NaN ranked last)")


def test_no_suspect_is_named_where_most_cannot_be_told_apart() -> None:
    view = choice_view([[3.0, 2.0, 1.0]], [[1, 2]])

    def fits(name: str) -> TopkHypothesis:
        return TopkHypothesis(name, lambda v: Choice(inside=v.inside & (v.key >= 1)))

    other = TopkHypothesis("other", lambda v: Choice())
    assert explain_choice(view, [fits("a"), fits("b"), other, other]).endswith("keys (here the same as: b)")
    assert explain_choice(view, [fits("a"), fits("b"), fits("c"), other, other]) == ""


# --- choices that differ, but by no key -------------------------------------------------------------------------------


@pytest.mark.parametrize(("chosen", "apart"), [
    ([[9, 8], [9, 77]], "entries that are no keys of the window: 1 in {0}, 0 in {1}; keys: 1 in {0}, 2 in {1} (in 1 row)"),
    ([[9, 9], [9, 9]], "entries that repeat another: 2 in {0}, 0 in {1}; keys: 2 in {0}, 4 in {1} (in 2 rows)"),
    ([[9, 8], [9, -1]], "keys: 1 in {0}, 2 in {1} (in 1 row)")])
def test_what_differs_where_no_key_does(chosen: list[list[int]], apart: str) -> None:
    """Keys 9 and 8 are right, and tie; what a choice has in place of one of them is said, not `0 keys`."""
    p = problem([(2, 10)], 2)
    ks, ke = torch.zeros(2, dtype=torch.int32), torch.full((2,), 10, dtype=torch.int32)
    p = dataclasses.replace(p, ks=ks, ke=ke)
    score = torch.tensor([[0.0] * 8 + [5.0] * 2] * 2)
    band = Band(lambda row0, row1: score[row0:row1], torch.full((2,), 5.0), torch.zeros(2), ks, ke, 10)
    windows = Windows(ks.long(), ke.long(), 2, ((0, 2, 0, 10),))
    got, right = TopkResult(torch.tensor(chosen, dtype=torch.int32)), TopkResult(torch.tensor([[9, 8], [9, 8]], dtype=torch.int32))
    check, _ = dense_vs_litetopk(got, right, band, windows)
    said = "no key differs beyond ties and margins, but the entries do: "
    assert (check.verdict, check.detail) == (Verdict.FAILED, said + apart.format("litetopk", "dense"))
    check = reads_inputs(p, lambda: got, lambda: right, band, lambda row0, row1, at: torch.zeros(at.shape), windows)
    rewritten = "q, k, kv_scale and weights rewritten in place: "
    assert (check.verdict, check.detail) == (Verdict.FAILED, rewritten + said + apart.format("the launch", "torch_dense"))
    check = same_choice("run-to-run", got, right, band, windows, ("launch 1", "launch 2"))
    assert check.detail.startswith(f"not made up of the same keys: {apart.format('launch 1', 'launch 2')}")


def test_one_is_one() -> None:
    assert (counted(1, "row"), counted(2000, "row"), counted(0, "key")) == ("1 row", "2,000 rows", "0 keys")


def markdown() -> str:
    """The table of docs/localiser.md."""
    rows = []
    for name, fault in SCORED.items():
        own = standing(name)
        telling = standing(name, TELLING[name]) if name in TELLING else ""
        rows.append(f"| {name.removeprefix('broken_')} | {fault.check} | {fault.boundary} | {own} | {telling} |")
    count = {how: sum(standing(name) == how for name in SCORED) for how in ("first", "among", "no")}
    head = [f"{len(SCORED)} faults have a boundary: {count['first']} named first ({count['first'] / len(SCORED):.0%}), "
            f"{count['among']} among those that the case cannot tell apart, {count['no']} not named.", "",
            "| fault | check | planted | own case | telling case |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


if __name__ == "__main__":
    print(markdown())
