"""Which arms `threearm gate --arm` pairs, and what it says of those that cannot be."""
from __future__ import annotations

from typing import Any

import pytest
import typer
from processes import TINY, TINY_TOPK

from harness.gate_pairs import all_pairs, named_pairs
from harness.verdicts import SOURCES


def kernel(name: str, family: str = "sparse_prefill", arms: tuple[str, ...] = SOURCES, why_not: str = "") -> dict[str, Any]:
    return {"name": name, "family": family, "arms": list(arms), "why_not": why_not}


A, B, WITHOUT = kernel("a"), kernel("b"), kernel("a", why_not="no package")
DENSE, LITE = kernel("dense", "indexer_topk", ("dense",)), kernel("lite", "indexer_topk", ("litetopk",))
CASES = [TINY, TINY_TOPK]
EVERY = tuple((source, source) for source in SOURCES)


def test_without_names_every_kernel_that_runs_anywhere() -> None:
    gone = [A, B, kernel("broken_a"), kernel("nowhere", why_not="x")]
    new = [WITHOUT, kernel("c", arms=("none",)), kernel("broken_a"), kernel("nowhere", why_not="x")]
    pairs = all_pairs(gone, new, CASES, False)
    assert [(pair.names, pair.base is not None, pair.candidate is not None) for pair in pairs] == [
        (("a", "a"), True, True), (("b", "b"), True, False), (("c", "c"), False, True)]
    assert pairs[0].arms == EVERY and pairs[2].arms == (("none", "none"),)
    assert "broken_a" in [pair.names[0] for pair in all_pairs(gone, new, CASES, True)]
    assert all_pairs(gone, new, [TINY_TOPK], False) == []


def test_of_a_stored_run_what_it_has_records_of() -> None:
    sides = [A, B, kernel("broken_a")]
    pairs = all_pairs(sides, sides, CASES, True, {"a/none", "broken_a/none", "a/metadata", "gone/none"})
    assert [(pair.names[0], pair.arms) for pair in pairs] == [
        ("a", (("none", "none"), ("metadata", "metadata"))), ("broken_a", (("none", "none"),))]
    assert pairs[0].base and pairs[0].candidate and pairs[0].base["arms"] == pairs[0].candidate["arms"] == ["none", "metadata"]


def test_an_arm_that_one_side_lacks_takes_part() -> None:
    pair = all_pairs([A], [kernel("a", arms=("none",))], CASES, False)[0]
    assert pair.arms == EVERY and pair.candidate and pair.candidate["arms"] == ["none"]


@pytest.mark.parametrize(("texts", "names", "arms"), [
    (["a"], ("a", "a"), EVERY), (["a/none"], ("a", "a"), (("none", "none"),)), (["a=b"], ("a", "b"), EVERY),
    (["a/none=b/metadata"], ("a", "b"), (("none", "metadata"),)), (["dense=lite"], ("dense", "lite"), (("dense", "litetopk"),)),
    (["a/none", "a/metadata", "a/none"], ("a", "a"), (("none", "none"), ("metadata", "metadata")))])
def test_names(texts: list[str], names: tuple[str, str], arms: tuple[tuple[str, str], ...]) -> None:
    pairs = named_pairs([A, B, DENSE, LITE], [A, B, DENSE, LITE], CASES, texts)
    assert [(pair.names, pair.arms) for pair in pairs] == [(names, arms)]
    assert pairs[0].base and pairs[0].base["arms"] == [arm for arm in (*SOURCES, "dense") if arm in dict(arms)]


@pytest.mark.parametrize(("texts", "said"), [
    (["c"], "the base has no kernel 'c'"), (["a=c"], "the candidate has no kernel 'c'"), (["a/dense"], "no arm 'dense'"),
    (["a/none=b"], "on both sides or on neither"), (["a=dense"], "of indexer_topk"), (["a=b", "a=a"], "a is in two pairs of the base"),
    (["a=b", "b=b"], "b is in two pairs of the candidate"), (["sparse"], "the base has no kernel"), ([""], "the base has no kernel ''"),
    (["more"], "no arm in common")])
def test_what_cannot_be_paired_is_one_line(texts: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    more, less = kernel("more", arms=("none", "backscan")), kernel("more", arms=("metadata",))
    with pytest.raises(typer.Exit) as raised:
        named_pairs([A, B, DENSE, more], [A, B, DENSE, less], CASES, texts)
    assert raised.value.exit_code == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1


def test_a_family_without_a_case_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        named_pairs([A], [A], [TINY_TOPK], ["a"])
    assert "there is no case" in capsys.readouterr().err
