"""The localiser, scored on the broken arms: where a fault has a place or a cause with a name, is that what a failure says?

`python tests/test_localiser.py` prints the table of docs/localiser.md.
"""
from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from faults import run_fault, run_on
from trials import expected_of, inputs_of, prepared

from arms.broken.fault import FAULTS
from harness.attribution import attribute
from harness.diagnose import derived, told_if_it_fails
from harness.hypotheses import explain, make_view, margins
from harness.suspects import suspects
from harness.topk_localise import Windows
from harness.topk_sets import Band
from harness.topk_suspects import suspects as topk_suspects
from harness.topk_wrong import tell_ranks
from harness.verdicts import CUDA_CHECKS, Check, Verdict

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
    assert said[0] == ("dropped, by score: 4 in 1 of 1 rows looked at, ranks 0 to 3 (topk 16), scores 100 to 103, 100% share its octave")
    assert any(line.startswith("do not belong, by score: 4 in 1 of 1 rows looked at, ranks 16 to 19 (topk 16), scores 84 to 87")
               for line in said)


def test_ties_of_a_short_row_are_told() -> None:
    """Ten keys tie at the k-th; a row that took only those above names too few."""
    said = told([9.0, 8.0, *[5.0] * 10, 1.0], [0, 1], 6)
    assert said[0] == ("dropped, by score: 10 in 1 of 1 rows looked at, ranks 2 (topk 6), scores 5 to 5, 100% tie with the k-th, "
                       "100% share its first 20 bits")
    assert said[1] == "pattern: keys that tie with the k-th; it explains 100% of the keys that were dropped, 100% overlap"


def test_a_bucket_of_16_bits_is_told() -> None:
    """2 and 2 + 2^-10: one fp16 value, but not one that 20 bits hold."""
    said = told([4.0, 3.0, 2.0 + 2.0**-10, 2.0, 1.0], [0, 1, 3], 3)
    assert said[0] == "do not belong, by score: 1 in 1 of 1 rows looked at, ranks 3 (topk 3), scores 2 to 2, 100% share its fp16 value"
    assert said[1].startswith("pattern: ")


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
