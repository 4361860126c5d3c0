"""Declared limits are tried: one that is still there, one that is not; and every declaration names a case that it refuses."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import FAULTY, TINY, invoke, threearm

from arms.kernel import KERNELS, Limit, load_package
from cases import parse_case
from harness import limits_command, options
from harness.asking import Settings
from harness.availability import refusal
from harness.client import WorkerOptions
from harness.limits_command import Found, find
from harness.record import Record
from harness.verdicts import Verdict

load_package("arms.sparse_prefill")
load_package("arms.indexer_topk")
LIMITS = [(kernel.name, limit, arm) for kernel in KERNELS.values() for limit in kernel.requires.limits
          for arm in kernel.arms if arm in limit.sources]


@pytest.mark.parametrize(("name", "limit", "arm"), LIMITS)
def test_a_limit_names_a_case_that_it_refuses(name: str, limit: Limit, arm: str) -> None:
    case = parse_case(limit.case)
    assert str(case) == limit.case
    assert limit.reason in refusal(KERNELS[name], arm, case)


def test_a_limit_that_is_there_and_one_that_is_outgrown() -> None:
    loaded = ("--load", str(FAULTY / "limited.py"), "--arm", "limited", "--arm", "outgrown")
    done = threearm("limits", "--device", "cpu", *loaded, COLUMNS="140")
    assert done.code == 1
    assert "still there: FAILED" in done.text and "no sink without a length" in done.text
    assert "outgrown/none passes sparse_prefill:" in done.text.replace("\n", " ")
    assert "2 limits tried, 1 still there; 0 not tried" in done.text
    told = next(number for number, line in enumerate(done.lines) if line.startswith("1 of 2  limited/none  sink=normal/mixed: takes no"))
    assert told < done.lines.index("2 of 2  outgrown/none  sink=normal/mixed: takes no sink without a length  PASSED: no longer there?")


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the limits of its kernels are tried")
def test_what_cannot_be_tried_says_why() -> None:
    done = threearm("limits", "--device", "cpu", "--arm", "sglang_q8kv8", COLUMNS="140")
    assert done.code == 5
    assert "not tried: needs a cuda device" in done.text


# --- what is tried, in this process -----------------------------------------------------------------------------------


def described(name: str, *limits: tuple[str, ...], imports: str = "") -> dict[str, Any]:
    """A kernel as a worker describes it, with limits of these arms."""
    of = [{"sources": list(sources), "key": "sink", "values": ["normal"], "reason": "no sink", "case": TINY} for sources in limits]
    return {"name": name, "family": "sparse_prefill", "arms": ["none", "metadata"], "why_not": "", "imports": imports, "limits": of}


KERNELS_HERE = [described("plain"), described("limited", ("none",)), described("packaged", ("none",), ("none", "metadata"), imports="a:b")]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands run nothing: every arm passes. What was probed and tried."""
    calls: list[str] = []

    def probe(options: WorkerOptions, log: Path, name: str) -> tuple[str, str]:
        calls.append(f"probe {name}")
        return "", "takes no length"

    def passes(options: WorkerOptions, settings: Settings, name: str, source: str, case: str) -> Record:
        calls.append(f"{name}/{source} {settings.timeout:g} {options.memory >> 30}")
        return Record(case, f"{name}/{source}", Verdict.PASSED)

    monkeypatch.setattr(options, "describe", lambda options, cases: {"kernels": KERNELS_HERE})
    monkeypatch.setattr(limits_command, "probe", probe)
    monkeypatch.setattr(limits_command, "try_limit", passes)
    return calls


def test_a_package_is_probed_once_and_options_reach_the_worker(tried: list[str]) -> None:
    done = invoke("limits", "--device", "cpu", "--timeout", "7", "--memory", "3")
    assert tried == ["limited/none 7 3", "probe packaged", "packaged/none 7 3", "packaged/none 7 3"]
    assert done.code == 1 and "not tried: takes no length" in done.text
    assert "3 limits tried, 0 still there; 1 not tried" in done.lines and "declares no limit" not in done.text


@pytest.mark.parametrize(("arguments", "code", "told"), [
    (["--arm", "limted"], 2, "threearm: unknown kernel 'limted': did you mean 'limited'? kernels are plain, limited, packaged"),
    (["--arm", "limited/non"], 2, "threearm: unknown arm 'non' in --arm limited/non: limited has none, metadata"),
    (["--arm", "limited", "--family", "indexer_topk"], 2,
     "threearm: --arm limited: it is a kernel of sparse_prefill, the cases are of indexer_topk"),
    (["--family", "attention"], 2, "threearm: --family attention: families are sparse_prefill and indexer_topk"),
    (["--arm", "plain"], 5, "plain declares no limit"),
    (["--arm", "limited/metadata"], 5, "limited declares no limit of metadata"),
    (["--family", "indexer_topk"], 5, "no kernel of indexer_topk declares a limit"),
])
def test_nothing_to_try_is_one_line(tried: list[str], arguments: list[str], code: int, told: str) -> None:
    done = invoke("limits", "--device", "cpu", *arguments)
    assert (done.code, done.lines, tried) == (code, [told], [])


def test_an_arm_s_own_limits_alone_are_tried(tried: list[str]) -> None:
    done = invoke("limits", "--device", "cpu", "--arm", "limited/none", "--arm", "plain", "--family", "sparse_prefill", "--memory", "1")
    assert (done.code, tried) == (1, ["limited/none 0 1"])
    assert "plain declares no limit" in done.lines and "1 limit tried, 0 still there; 0 not tried" in done.lines


def test_an_interrupt_shows_what_was_found(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(kernels: list[dict[str, Any]], options: WorkerOptions, settings: Settings, found: Found, total: int) -> None:
        find(kernels[:2], options, settings, found, total)
        found[0][2].verdict = Verdict.FAILED
        raise KeyboardInterrupt

    monkeypatch.setattr(limits_command, "find", interrupted)
    done = invoke("limits", "--device", "cpu")
    assert done.code == 130 and "interrupted after 1 of 4 limits" in done.lines
    assert "still there: FAILED" in done.text and "1 limit tried, 1 still there; 3 not tried" in done.lines
