"""The checks that hold a choice of keys against another one (another launch, another arm), against what the arm says of its rows,
and against the memory it may take. See topk_checks.py for the choice itself."""
from __future__ import annotations

import torch

from arms.topk import UNBOUNDED, WAYS, TopkResult
from harness.compare import values_differ
from harness.locate.picture import locate_members
from harness.locate.topk_localise import Windows
from harness.topk_checks import REFUSED
from harness.topk_sets import SHOWN, Band, Difference, compare, in_window
from harness.verdicts import Check, Verdict
from harness.words import counted


def status(result: TopkResult, wrong: torch.Tensor, windows: Windows) -> Check | None:
    """What the arm says of its rows: a wrong row that it certifies is the worst there is, and a row that it gives up is no pass.

    wrong: bool [num_q], rows in which another check found the choice wrong. None if the arm says nothing.
    """
    if result.status is None:
        return None
    said = result.status
    unknown = (said < 0) | (said >= len(WAYS))
    refused = said == REFUSED
    lies, kept = wrong & ~refused, refused & (result.indices != -1).any(1)
    bad = unknown | refused | lies
    check = Check("status", Verdict.PASSED, f"every row certified: {in_words(ways(result))}", bad=int(bad.sum()), total=len(said))
    if check.bad:
        check.verdict = Verdict.FAILED
        found = {"certified though wrong": lies, "given up (status failed)": refused & ~kept,
                 "given up, yet with keys in place of -1": kept, f"with a status outside 0..{len(WAYS) - 1}": unknown}
        check.detail = "; ".join(f"{int(rows.sum()):,} rows {name}" for name, rows in found.items() if bool(rows.any()))
        words = {row: int(said[row]) for row in bad.nonzero()[:SHOWN, 0].tolist()}
        check.first = [f"[row {row}] status {WAYS[number] if 0 <= number < len(WAYS) else number}" for row, number in words.items()]
        locate_members(check, bad, windows)
    return check


def ways(result: TopkResult) -> dict[str, int]:
    """How many rows came to their result which way; {} where the arm does not say."""
    if result.status is None:
        return {}
    return {way: count for number, way in enumerate(WAYS) if (count := int((result.status == number).sum()))}


def in_words(counts: dict[str, int]) -> str:
    """`30 scan, 2 rescan`."""
    return ", ".join(f"{count:,} {way}" for way, count in counts.items())


def malformed_entries(a: torch.Tensor, b: torch.Tensor, far: torch.Tensor, band: Band, labels: tuple[str, str]) -> str:
    """What sets two choices apart in rows whose keys differ by none that is beyond ties and margins: entries that are no keys of the
    window, keys named again, keys too few or too many. far: bool [num_q]."""
    ks, ke = band.ks[far], band.ke[far]
    counts = []
    for indices in (a[far], b[far]):
        named = in_window(indices, ks, ke)[0]
        ordered = indices.sort(1)
        again = (ordered.values[:, 1:] == ordered.values[:, :-1]) & (ordered.values[:, 1:] != -1)
        keys = named.sum(1) - (again & named.gather(1, ordered.indices[:, 1:])).sum(1)
        counts.append((((indices != -1) & ~named).sum(1), again.sum(1), keys))
    kinds = ("entries that are no keys of the window", "entries that repeat another", "keys")
    parts = [f"{kind}: {', '.join(f'{int(n.sum()):,} in {label}' for n, label in zip(pair, labels))}"
             for kind, pair in zip(kinds, zip(*counts)) if bool((pair[0] != pair[1]).any())]
    return f"{'; '.join(parts)} (in {counted(int(far.sum()), 'row')})"


def _differs(found: Difference) -> str:
    differ = "differs" if found.keys == 1 else "differ"
    parts = [f"{counted(found.keys, 'key')} {differ}, in {counted(int(found.rows.sum()), 'row')}"] if found.keys else []
    return ", ".join([*parts, f"{found.moved:,} rows in another order"] if found.moved else parts)


def same_choice(name: str, got: TopkResult, other: TopkResult, band: Band, windows: Windows, labels: tuple[str, str],
                verdict: Verdict = Verdict.FAILED, bitwise: bool = False) -> Check:
    """Two launches chose the same keys, but for keys that tie with the k-th or are within its margin. Order is told, not judged.

    bitwise: each key's score has the same bits in both, so the values of two exact choices, in order, do too, whichever of equal ones they
    are of; where an arm returns values, that is judged as well.
    """
    found = compare(got.indices, other.indices, band, labels)
    check = Check(name, Verdict.PASSED, "the same keys in the same order", bad=int(found.far.sum()), total=len(found.rows))
    told = _differs(found)
    if told:
        check.detail = f"the same keys but for ties and margins: {told}"
    if check.bad:
        check.verdict, check.first = verdict, found.first
        apart = f"{counted(found.far_keys, 'key')} beyond ties and margins in one choice only, in {counted(check.bad, 'row')}"
        if not found.far_keys:
            apart = f"not made up of the same keys: {malformed_entries(got.indices, other.indices, found.far, band, labels)}"
        check.detail = f"{apart}; all told: {told}" if told else apart
        locate_members(check, found.far, windows, found.places)
    if got.values is not None and other.values is not None:
        _add_values(check, _ordered_values(got), _ordered_values(other), windows, labels, verdict if bitwise else Verdict.PASSED)
    return check


def _add_values(check: Check, mine: torch.Tensor, theirs: torch.Tensor, windows: Windows, labels: tuple[str, str],
                verdict: Verdict) -> None:
    """Tell in a check of two choices where the arm's own values differ, and judge it where the verdict is not PASSED. fp32 [num_q, topk],
    in order."""
    differ = values_differ(mine, theirs)
    moved = differ.any(1)
    if not bool(moved.any()):
        return
    check.detail += f"; the arm's own values differ in {int(moved.sum()):,} rows"
    if verdict is not Verdict.PASSED and check.verdict is Verdict.PASSED:
        check.verdict, check.bad = verdict, int(moved.sum())
        check.detail += ", though the kernel promises scores whose bits follow from row and key alone"
        check.first = [f"[row {row}, value {place} from below] {labels[0]} {float(mine[row, place]):.9g}, {labels[1]} "
                       f"{float(theirs[row, place]):.9g}" for row, place in differ.nonzero()[:SHOWN].tolist()]
        locate_members(check, moved, windows)


def _ordered_values(result: TopkResult) -> torch.Tensor:
    """fp32 [num_q, topk]: the values of the chosen keys, ascending, behind -inf for the pads."""
    assert result.values is not None
    return torch.where(result.indices >= 0, result.values, -torch.inf).sort(1).values


def written(fresh: TopkResult, before: TopkResult, band: Band, windows: Windows) -> Check:
    """The same choice when every tensor made without values starts as NaN, or as the largest integer."""
    check = same_choice("written", fresh, before, band, windows, ("on poisoned memory", "before"))
    unset = {"slots of indices": fresh.indices == torch.iinfo(torch.int32).max}
    if fresh.values is not None and before.values is not None:
        unset["values"] = fresh.values.isnan() & ~before.values.isnan() & (fresh.indices >= 0)
    if fresh.status is not None:
        unset["slots of status"] = fresh.status == torch.iinfo(torch.int32).max
    left = {name: int(mask.sum()) for name, mask in unset.items() if bool(mask.any())}
    if left:
        rows = torch.stack([mask.view(len(mask), -1).any(1) for mask in unset.values()]).any(0)
        check.verdict, check.bad = Verdict.FAILED, int(rows.sum())
        check.detail = f"unwritten: {', '.join(f'{n:,} {name}' for name, n in left.items())}; " + check.detail
        locate_members(check, rows, windows)
    elif check.verdict is Verdict.PASSED:
        check.detail = "every slot written over NaN and the largest integer; " + check.detail
    return check


def dense_vs_litetopk(result: TopkResult, dense: TopkResult, band: Band, windows: Windows) -> tuple[Check, int]:
    """A litetopk arm's keys against those of torch_dense, by torch_dense's own scores; and the number of keys that differ.

    band: from `band_of_arm`; its margin is the error that both arms may have.
    """
    labels = ("litetopk", "dense")
    found = compare(result.indices, dense.indices, band, labels)
    check = Check("dense-vs-litetopk", Verdict.PASSED, "the same keys in every row", bad=int(found.far.sum()), total=len(found.rows))
    if found.keys:
        check.detail = f"{_differs(found)}, all of them ties or within the margins"
    if check.bad:
        check.verdict, check.first = Verdict.FAILED, found.first
        check.detail = (f"{found.far_keys:,} beyond ties and margins, of {counted(found.keys, 'key')} in one choice only, in "
                        f"{counted(check.bad, 'row')}")
        if not found.far_keys:
            apart = malformed_entries(result.indices, dense.indices, found.far, band, labels)
            check.detail = f"no key differs beyond ties and margins, but the entries do: {apart}"
        locate_members(check, found.far, windows, found.places)
    return check, found.keys


def band_of_arm(arm: TopkResult, band: Band, eps: torch.Tensor) -> Band:
    """A band around an arm's own k-th score, its lowest chosen value. eps [num_q]. Falls back to the reference's scores where the arm
    exposes not both scores and values."""
    if arm.logits is None or arm.values is None:
        return Band(band.scores, band.kth, eps, band.ks, band.ke, band.s_kv)
    kth = torch.where(arm.indices >= 0, arm.values, torch.inf).amin(1)
    return Band(arm.logits, kth, eps, band.ks, band.ke, band.s_kv)


def memory(peak: int, bound: int, num_q: int, s_kv: int) -> Check | None:
    """The most that a launch holds beyond inputs and indices, against what the kernel declares. None if it declares nothing.

    A litetopk that holds rows x keys shows where that is more than the bound: on the scale suite, not on small cases."""
    if bound >= UNBOUNDED:
        return None
    matrix = 4 * num_q * s_kv
    detail = f"{mib(peak)} at the peak, {mib(bound)} declared; all scores together are {mib(matrix)}"
    return Check("memory", Verdict.FAILED if peak > bound else Verdict.PASSED, detail, bad=int(peak > bound), total=1)


def mib(size: int) -> str:
    """Bytes as MiB with three digits."""
    return f"{size / (1 << 20):.3g} MiB" if size < 1000 << 20 else f"{size / (1 << 30):.3g} GiB"
