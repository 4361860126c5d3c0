"""Which arm of the base is compared with which of the candidate: what `threearm gate --arm` says. Parent side."""
from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from harness.gate import Pair
from harness.options import fail
from harness.runner import cases_of

Kernels = list[dict[str, Any]]


def all_pairs(base: Kernels, candidate: Kernels, cases: list[str], broken: bool, recorded: set[str] | None = None) -> list[Pair]:
    """Every kernel of the cases' families that can run on either side, with itself; broken ones only if asked for. recorded: take these
    kernel/arm alone, which a stored run has records of."""
    sides = [{kernel["name"]: kernel for kernel in kernels if cases_of(kernel, cases)} for kernels in (base, candidate)]
    pairs = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        found = [side.get(name) for side in sides]
        here = [kernel for kernel in found if kernel]
        if any(not kernel["why_not"] for kernel in here) and (broken or not name.startswith("broken_")):
            arms = dict.fromkeys(arm for kernel in here for arm in kernel["arms"] if recorded is None or f"{name}/{arm}" in recorded)
            if arms:
                one, two = (kernel and _with_arms(kernel, set(arms)) for kernel in found)
                pairs.append(Pair(one, two, tuple((arm, arm) for arm in arms)))
    return pairs


def named_pairs(base: Kernels, candidate: Kernels, cases: list[str], texts: list[str]) -> list[Pair]:
    """The pairs that are named: `K`, `K/arm`, `A=B`, `A/x=B/y`. One line and exit 2 for one that does not exist, or that would have a
    kernel in two pairs."""
    found: dict[tuple[str, str], Pair] = {}
    for text in texts:
        left, _, right = text.partition("=")
        pair = _pair(base, candidate, left, right or left, text)
        if not cases_of(pair.any, cases):
            fail(f"--arm {text}: it is of {pair.any['family']}, of which there is no case")
        known = found.get(pair.names)
        found[pair.names] = pair if known is None else dataclasses.replace(known, arms=tuple(dict.fromkeys([*known.arms, *pair.arms])))
    for side in (0, 1):
        names = [pair[side] for pair in found]
        twice = next((name for name in names if names.count(name) > 1), "")
        if twice:
            fail(f"--arm: {twice} is in two pairs of the {('base', 'candidate')[side]}; compare them one after the other")
    return [_cut(pair) for pair in found.values()]


def _pair(base: Kernels, candidate: Kernels, left: str, right: str, text: str) -> Pair:
    (one, x), (two, y) = _find(base, left, text, "base"), _find(candidate, right, text, "candidate")
    if one["family"] != two["family"]:
        fail(f"--arm {text}: {one['name']} is a kernel of {one['family']}, {two['name']} of {two['family']}")
    if bool(x) != bool(y):
        fail(f"--arm {text}: name the arm on both sides or on neither")
    if x:
        return Pair(one, two, ((x, y),))
    common = tuple((arm, arm) for arm in one["arms"] if arm in two["arms"])
    if not common and len(one["arms"]) == len(two["arms"]) == 1:  # dense and litetopk: each all that its kernel has
        common = ((one["arms"][0], two["arms"][0]),)
    if not common:
        fail(f"--arm {text}: they have no arm in common: {', '.join(one['arms'])}; {', '.join(two['arms'])}")
    return Pair(one, two, common)


def _find(kernels: Kernels, text: str, whole: str, side: str) -> tuple[dict[str, Any], str]:
    """The kernel that is named, and the arm, "" for none."""
    name, slash, arm = text.partition("/")
    kernel = next((kernel for kernel in kernels if kernel["name"] == name), None)
    if kernel is None:
        names = [kernel["name"] for kernel in kernels]
        near = difflib.get_close_matches(name, names, n=1)
        right = [name for name in names if not name.startswith("broken_")]
        fail(f"--arm {whole}: the {side} has no kernel {name!r}: {f'did you mean {near[0]!r}? ' if near else ''}"
             f"it has {', '.join(right) or 'none'}")
    if slash and arm not in kernel["arms"]:
        fail(f"--arm {whole}: {name} of the {side} has no arm {arm!r}, it has {', '.join(kernel['arms'])}")
    return kernel, arm


def _cut(pair: Pair) -> Pair:
    """The pair with those arms alone in its kernels that take part."""
    assert pair.base and pair.candidate
    base, candidate = ({arm[side] for arm in pair.arms} for side in (0, 1))
    return Pair(_with_arms(pair.base, base), _with_arms(pair.candidate, candidate), pair.arms)


def _with_arms(kernel: dict[str, Any], arms: set[str]) -> dict[str, Any]:
    return {**kernel, "arms": [arm for arm in kernel["arms"] if arm in arms]}
