"""The checks on one choice of keys: its form, its members, its own scores and values, what it says of itself.

Each takes tensors and gives a Check, or None where the case has nothing that it could find; `shape` and `own_scores` give what later
checks need besides. None launches the arm's choice (topk_trial.py does); `own_scores` asks for the arm's scores, which an arm may compute.
Every check has a broken arm in arms/broken that names it; tests/test_broken_topk.py runs them.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from arms.topk import WAYS, TopkResult
from harness.compare import bits_differ, margin
from harness.locate.picture import locate_members
from harness.locate.topk_localise import PLACES, Places, Windows
from harness.topk_sets import SHOWN, Band, Tally, add_places, at, chosen_keys, chunks, in_window, look
from harness.topk_sets import windows as windows_of
from harness.verdicts import Check, Verdict

BIGGEST = 1e30  # JSON has no infinity
VALUE_ROWS = 64  # rows whose error bounds are made at a time
REFUSED = WAYS.index("failed")

ScoreError = Callable[[int, int, torch.Tensor], torch.Tensor]
"""(row0, row1, indices of those rows, int64 and in range) -> bound on the error of an arm's own score, of indices' shape."""


def malformed(indices: torch.Tensor, count: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor) -> dict[str, torch.Tensor]:
    """What can be wrong with a row's form whatever the scores are, and the rows it holds for: bool [num_q].

    indices int32 [num_q, topk]; count int64 [num_q], how many keys each row must name.
    """
    named = indices >= 0
    ordered = indices.sort(1).values
    return {
        "not min(topk, valid) keys": named.sum(1) != count,
        "a pad before a key": (named[:, 1:] & ~named[:, :-1]).any(1),
        "a pad that is not -1": (indices < -1).any(1),
        "a key twice": ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1),
        "a key outside [ks, ke)": (named & ((indices < ks[:, None]) | (indices >= ke[:, None]))).any(1),
    }


def shape(indices: torch.Tensor, count: torch.Tensor, judged: torch.Tensor, windows: Windows, band: Band) -> tuple[Check, torch.Tensor]:
    """Exactly min(topk, valid) keys, first in the row, -1 behind them, none twice, all inside [ks, ke). And the rows where not.
    judged: bool [num_q], the rows that the arm does not itself give up."""
    rows = {problem: bad & judged for problem, bad in malformed(indices, count, band.ks, band.ke).items()}
    bad = torch.stack(list(rows.values())).any(0)
    check = Check("shape", Verdict.PASSED, f"{int(count.sum()):,} keys, each once, inside its window, -1 behind", total=len(bad))
    if bool(bad.any()):
        found = {problem: int(where.sum()) for problem, where in rows.items() if bool(where.any())}
        check.verdict, check.bad = Verdict.FAILED, int(bad.sum())
        check.detail = ", ".join(f"{problem} in {n:,} rows" for problem, n in found.items())
        for row in bad.nonzero()[:SHOWN, 0].tolist():
            line = indices[row].tolist()
            what = ", ".join(problem for problem in found if bool(rows[problem][row]))
            check.first.append(f"[row {row}] {what}: {_shorten(line)}; must name {int(count[row])} of "
                               f"[{int(band.ks[row])}, {int(band.ke[row])})")
        locate_members(check, bad, windows, {"outside": _strangers(indices, bad, band)})
    return check, bad


def _shorten(line: list[int]) -> str:
    ends = [*line[:5], "...", *line[-4:]] if len(line) > 10 else line
    return ", ".join(map(str, ends))


def _strangers(indices: torch.Tensor, bad: torch.Tensor, band: Band) -> torch.Tensor:
    """(row, key) of entries outside their windows, at most PLACES. int64 [n, 2]"""
    strange = bad[:, None] & (indices >= 0) & ((indices < band.ks[:, None]) | (indices >= band.ke[:, None]))
    places = strange.nonzero()[:PLACES]
    return torch.stack([places[:, 0], indices[places[:, 0], places[:, 1]].long()], 1)


def members(found: Tally, indices: torch.Tensor, band: Band, judged: torch.Tensor, choice: torch.Tensor, windows: Windows) -> Check | None:
    """The set against the reference: every key above the k-th and its margin is in, none below them is.

    judged: bool [num_q] as in shape; choice: rows with more valid keys than topk, the only ones that have anything to choose. None
    if there is no such row, or if in all of them the scores tie as far as fp32 can tell and the margin covers them: such a case is
    there for its form. VACUOUS if the margins cover scores that do differ.
    """
    rows = choice & judged
    if not bool((rows & (found.decides | ~found.level)).any()):
        return None
    bad = rows & ((found.dropped > 0) | (found.extra > 0))
    lost, deficit = (torch.where(rows, x, 0).double() for x in (found.lost, found.deficit))
    dropped, extra = int(found.dropped[rows].sum()), int(found.extra[rows].sum())
    decided = int((rows & found.decides).sum())
    check = Check("set", Verdict.PASSED, bad=int(bad.sum()), total=int(rows.sum()))
    within = rows & (band.eps > 0)
    if bool(within.any()):
        check.margins = {name: min(BIGGEST, float((x[within] / band.eps[within]).max()))
                         for name, x in {"best left out": lost, "worst chosen": deficit}.items()}
    check.detail = (f"{dropped:,} members dropped, {extra:,} that do not belong, value deficit {float(deficit.max()):.3g}, "
                    f"in {check.bad:,} of {check.total:,} rows with more valid keys than topk")
    if check.bad:
        check.verdict = Verdict.FAILED
        check.first, places = _wrong_members(indices, band, bad)
        locate_members(check, bad, windows, places)
    elif not decided:
        check.verdict = Verdict.VACUOUS
        check.detail = "no choice could fail: in every row the margin around the k-th score covers all scores"
    else:
        check.detail += f"; {decided:,} of them decide" if decided < check.total else ""
    return check


def _wrong_members(indices: torch.Tensor, band: Band, bad: torch.Tensor) -> tuple[list[str], Places]:
    """The first wrong members as text, and where they are."""
    first: list[str] = []
    places: Places = {}
    for row0, row1 in chunks(len(indices), band.s_kv, indices.device):
        if not bool(bad[row0:row1].any()):
            continue
        chunk = look(band, row0, row1)
        chosen = chosen_keys(indices[row0:row1], band.ks[row0:row1], band.ke[row0:row1], band.s_kv)
        kinds = {"dropped": chunk.above & ~chosen, "do not belong": chunk.below & chosen}
        for kind, mask in kinds.items():
            add_places(places, kind, mask & bad[row0:row1, None], row0)
        wrong = torch.stack(list(kinds.values())).any(0) & bad[row0:row1, None]
        for row, key in wrong.nonzero()[: SHOWN - len(first)].tolist():
            first.append(f"{at(chunk, band, row, key)}: {'does not belong' if bool(chosen[row, key]) else 'dropped'}")
        if all(len(found) >= PLACES for found in places.values()):
            break
    return first, places


def nan_chosen(found: Tally, judged: torch.Tensor, windows: Windows) -> Check | None:
    """A key whose score is NaN is never chosen. None if the case has none."""
    rows = found.unread & judged
    if not bool(rows.any()):
        return None
    bad = (found.nan > 0) & rows
    check = Check("nan-chosen", Verdict.PASSED, f"{int(rows.sum()):,} rows with a NaN among their scores, none chosen",
                  bad=int(found.nan[bad].sum()), total=int(rows.sum()))
    if check.bad:
        check.verdict, check.detail = Verdict.FAILED, f"{check.bad:,} keys whose score is NaN are chosen, in {int(bad.sum()):,} rows"
        locate_members(check, bad, windows)
    return check


@dataclasses.dataclass
class OwnScores:
    """What `own_scores` found. wrong: bool [num_q]; chosen: fp32 [num_q, topk], the arm's own score of each entry, or None."""

    check: Check | None
    wrong: torch.Tensor
    chosen: torch.Tensor | None


def own_scores(result: TopkResult, judged: torch.Tensor, windows: Windows, band: Band) -> OwnScores:
    """The choice is an exact top-k of the arm's own scores: nothing left out beats what is chosen, ties are free.

    No check if the arm exposes no scores, or no row leaves a key out.
    """
    wrong = torch.zeros_like(judged)
    if result.logits is None:
        return OwnScores(None, wrong, None)
    check, parts, dropped, nan_rows, deficit = Check("own-scores", Verdict.PASSED), [], 0, 0, 0.0
    for row0, row1 in chunks(len(wrong), band.s_kv, wrong.device):
        rows, own = slice(row0, row1), _own(result.logits, row0, row1, band.s_kv)
        inside = windows_of(band.ks[rows], band.ke[rows], band.s_kv)
        chosen = chosen_keys(result.indices[rows], band.ks[rows], band.ke[rows], band.s_kv)
        left_out = inside & ~chosen & ~own.isnan()
        lowest = torch.where(chosen, own, torch.inf).amin(1, keepdim=True)
        better = left_out & (own > lowest) & judged[rows, None]
        takes_nan = (chosen & own.isnan()).any(1) & judged[rows]
        wrong[rows] = better.any(1) | takes_nan
        nan_rows += int(takes_nan.sum())
        parts.append(own.gather(1, in_window(result.indices[rows], band.ks[rows], band.ke[rows])[1]))
        check.total += int((left_out.any(1) & judged[rows]).sum())
        if bool(better.any()):
            dropped += int(better.sum())
            deficit = max(deficit, float(torch.where(better, own - lowest, 0).max()))
            check.first += [f"[row {row0 + row}, key {key}] own score {float(own[row, key]):.9g}, left out; "
                            f"lowest chosen {float(lowest[row]):.9g}" for row, key in better.nonzero()[: SHOWN - len(check.first)].tolist()]
    check.detail, check.bad = f"an exact top-k of its own scores in {check.total:,} rows that leave a key out", int(wrong.sum())
    if check.bad:
        check.verdict = Verdict.FAILED
        found = [f"{dropped:,} keys left out beat one that is chosen, by the arm's own scores, by up to {deficit:.3g}"] if dropped else []
        check.detail = "; ".join([*found, *([f"{nan_rows:,} rows choose a key whose own score is NaN"] if nan_rows else [])])
        locate_members(check, wrong, windows)
    return OwnScores(check if check.total or check.bad else None, wrong, torch.cat(parts))


def _own(logits: Callable[[int, int], torch.Tensor], row0: int, row1: int, s_kv: int) -> torch.Tensor:
    """The arm's scores of some rows. Raises ValueError unless they are fp32 [row1 - row0, s_kv]."""
    own = logits(row0, row1)
    if not isinstance(own, torch.Tensor):
        raise ValueError(f"logits must give a tensor, the kernel's gave {type(own).__name__}")
    if tuple(own.shape) != (row1 - row0, s_kv) or own.dtype != torch.float32:
        want = f"{torch.float32} {[row1 - row0, s_kv]}"
        raise ValueError(f"logits({row0}, {row1}) must give {want}, the kernel's gave {own.dtype} {list(own.shape)}")
    return own


def values(result: TopkResult, want: torch.Tensor, own: torch.Tensor | None, error: ScoreError, windows: Windows,
           band: Band) -> Check | None:
    """The value beside each chosen key: within its bound of the reference's score, and bitwise the arm's own where it exposes them. Of an
    arm that exposes scores but returns no values, its own scores of the chosen keys.

    want [num_q, topk]: the reference's scores of the entries; own: the arm's, fp32, or None. None if the arm has neither, or no row
    names a key; VACUOUS if zeros would do although no score is 0.
    """
    named, index = in_window(result.indices, band.ks, band.ke)
    stated = own if result.values is None else result.values
    if stated is None or not bool(named.any()):
        return None
    steps = range(0, len(index), VALUE_ROWS)
    bound = torch.cat([error(row, min(row + VALUE_ROWS, len(index)), index[row : row + VALUE_ROWS]) for row in steps])
    ratio = torch.where(named, margin(stated, want, bound), 0.0)
    bad = ratio > 1
    if own is not None:
        bad |= named & bits_differ(own, stated)
    check = Check("values", Verdict.PASSED, "within their bounds" + ("" if own is None else ", and bitwise the arm's own scores"),
                  margins={"values": min(BIGGEST, float(ratio.max()))}, bad=int(bad.sum()), total=int(named.sum()))
    if check.bad:
        check.verdict, places = Verdict.FAILED, bad.nonzero()[:PLACES]
        check.detail = f"{check.bad:,} of {check.total:,} values are not the scores of their keys"
        check.first = [f"[row {row}, entry {entry}, key {int(index[row, entry])}] want {float(want[row, entry]):.9g}, value "
                       f"{float(stated[row, entry]):.9g}, budget {float(bound[row, entry]):.3g}"
                       + ("" if own is None else f", own score {float(own[row, entry]):.9g}") for row, entry in places[:SHOWN].tolist()]
        locate_members(check, bad.any(1), windows, {"values": torch.stack([places[:, 0], index[places[:, 0], places[:, 1]]], 1)})
    elif bool((bound > 0).any()) and not bool((named & (want.abs() > bound)).any()):
        check.verdict, check.detail = Verdict.VACUOUS, "zeros would pass: the bounds exceed every score"
    return check
