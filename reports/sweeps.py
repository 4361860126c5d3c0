"""Curves: time against topk_length with the early-exit model, time against keys, and where dense and LiteTopk cross. Numbers here are
pure functions of points; tables are Markdown."""
from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy

from cases import parse_case
from cases.indexer_topk import IndexerTopkCase
from cases.sparse_prefill import SparsePrefillCase
from harness.record import Record
from reports.evidence_numbers import by_case, derive_us, filled_table, number, rate, ratio, share, time_us, times, useful

PAIR = 128  # keys that are skipped together
ABOUT_LENGTH = "index_topk: the topk_length of every row."


@dataclasses.dataclass(frozen=True)
class Model:
    """us = fixed + per_pair * pairs, by least squares. residuals: measured less model, us, in the order of the points."""

    fixed: float
    per_pair: float
    residuals: list[float]

    def at(self, pairs: float) -> float:
        """What the model says."""
        return self.fixed + self.per_pair * pairs


def fit(pairs: Sequence[float], us: Sequence[float]) -> Model | None:
    """The early-exit model; None of fewer than three points, or of points that all lie at one number of pairs."""
    if len(pairs) < 3 or len(set(pairs)) < 2:
        return None
    columns = numpy.column_stack([numpy.ones(len(pairs)), numpy.asarray(pairs, dtype=float)])
    found = numpy.linalg.lstsq(columns, numpy.asarray(us, dtype=float), rcond=None)[0]
    fixed, per_pair = (float(value) for value in found)
    return Model(fixed, per_pair, [value - fixed - per_pair * x for x, value in zip(pairs, us)])


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Where a ratio passes 1. keys: between `below` and `above`, on a straight line over the logarithm of the keys. rising: it is above
    1 on the larger side."""

    keys: float
    below: int
    above: int
    rising: bool


def crossings(points: Sequence[tuple[int, float]]) -> list[Crossing]:
    """Every place at which dense / litetopk passes 1, from the fewest keys on. points: (keys, ratio)."""
    found = []
    ordered = sorted(points)
    for (x0, y0), (x1, y1) in itertools.pairwise(ordered):
        if (y0 < 1) != (y1 < 1):
            part = (1 - y0) / (y1 - y0)
            found.append(Crossing(math.exp(math.log(x0) + part * (math.log(x1) - math.log(x0))), x0, x1, y1 > y0))
    return found


def crossover_text(points: Sequence[tuple[int, float]], wrong: Sequence[int] = ()) -> str:
    """Where the two cross, with both neighbours; or which is faster throughout. wrong: keys at which dense is wrong."""
    if len(points) < 2:
        return "Crossover: not enough lengths."
    ratios, found = dict(points), crossings(points)

    def at(keys: int) -> str:
        return f"{keys:,} ({times(ratios[keys])}{', dense wrong' if keys in wrong else ''})"

    if not found:
        low, high = min(ratios), max(ratios)
        nearest = min(ratios, key=lambda keys: abs(ratios[keys] - 1))
        faster = "litetopk" if ratios[low] >= 1 else "dense"
        return f"Crossover: none between {low:,} and {high:,} keys: {faster} is faster throughout; nearest to 1 at {at(nearest)}."
    told = [f"about {rounded(each.keys):,} keys, between {at(each.below)} and {at(each.above)}, above which "
            f"{'litetopk' if each.rising else 'dense'} is faster" for each in found]
    return f"Crossover (dense / litetopk passes 1, on a line over log keys): {'; '.join(told)}."


def rounded(keys: float) -> int:
    """To two digits: an interpolation is no measurement."""
    return int(float(f"{keys:.2g}"))


# --- time against topk_length -----------------------------------------------------------------------------------------


def length_sweep(records: list[Record], names: dict[str, str], machine: dict[str, str]) -> str:
    """The staircase, of one kernel: a row a length; the model and what its steps are. names: what each case is called."""
    arms = by_case(records)
    shown = {length_of(case): found for case, found in arms.items() if "metadata" in found and found["metadata"].time}
    if not shown:
        return ""
    ordered = sorted(shown)
    pairs = [-(-length // PAIR) for length in ordered]
    us = [time_us(shown[length]["metadata"]) for length in ordered]
    model = fit(pairs, us)
    rows = []
    for place, length in enumerate(ordered):
        found = shown[length]
        none, metadata = found.get("none"), found["metadata"]
        work = useful(metadata.case, metadata.lengths)
        done = rate(work, us[place], machine) if work else None
        rows.append([
            names[metadata.case], str(pairs[place]), f"{time_us(none):.1f}" if none and none.time else "", f"{us[place]:.1f}",
            times(ratio(none, metadata)), f"{model.at(pairs[place]):.1f}" if model else "",
            f"{model.residuals[place]:+.1f}" if model else "", f"{done.tflops:.3g}" if done else "",
            share(done.of_peak if done else None), f"{done.tbytes:.3g}" if done else ""])
    head = ["case", "pairs of 128", "none, us", "metadata, us", "none / metadata", "model, us", "measured − model, us",
            "useful TFLOP/s (metadata)", "of peak", "gathered TB/s"]
    told = [ABOUT_LENGTH, _model_text(model, ordered, us), staircase(ordered, us)]
    return filled_table(head, rows) + "\n\n" + "  \n".join(filter(None, told))


def length_of(case: str) -> int:
    """The topk_length of every row of a case of the sweep."""
    parsed = parse_case(case)
    assert isinstance(parsed, SparsePrefillCase)
    return parsed.limit


def _model_text(model: Model | None, lengths: Sequence[int], us: Sequence[float]) -> str:
    if model is None:
        return "Early-exit model: too few lengths."
    worst = max(range(len(us)), key=lambda place: abs(model.residuals[place]))
    off = model.residuals[worst]
    return (f"Early-exit model, least squares over {len(us)} lengths: metadata = {model.fixed:.1f} us + {model.per_pair:.2f} us a pair; "
            f"farthest from it: {off:+.1f} us ({off / us[worst]:+.1%}) at length {lengths[worst]:,}.")


def staircase(lengths: Sequence[int], us: Sequence[float]) -> str:
    """How far apart times are of lengths that run the same number of pairs, and what the step over a multiple of 128 costs."""
    measured = dict(zip(lengths, us))
    same: dict[int, list[float]] = {}
    for length, value in measured.items():
        same.setdefault(-(-length // PAIR), []).append(value)
    told = [f"{pairs} pair{'s' if pairs > 1 else ''}: {min(values):.1f} to {max(values):.1f} us over {len(values)} lengths"
            for pairs, values in same.items() if len(values) > 1]
    steps = [f"{at} to {at + 1}: {measured[at + 1] - measured[at]:+.1f} us" for at in measured if at % PAIR == 0 and at + 1 in measured]
    return "; ".join(filter(None, [f"Within a step, {', '.join(told)}" if told else "",
                                   f"over a step, {', '.join(steps)}" if steps else ""])) + ("." if told or steps else "")


# --- time against keys ------------------------------------------------------------------------------------------------


def keys_sweep(records: list[Record], names: dict[str, str], machine: dict[str, str]) -> str:
    """none against the number of kv rows, of one kernel, with the size of kv beside the L2's. names: what each case is called."""
    cache = number(machine, "L2")
    timed = {parse_case(record.case): record for record in records if record.source == "none" and record.time}
    cases = sorted((case for case in timed if isinstance(case, SparsePrefillCase)), key=lambda case: case.s_kv)
    rows = []
    for case in cases:
        record = timed[case]
        size = case.s_kv * case.d_qk * (1 if case.dtype == "fp8" else 2)
        work = useful(record.case, None)
        done = rate(work, time_us(record), machine) if work else None
        rows.append([names[record.case], f"{size / 2**20:,.1f}", f"{size / cache:.2f}" if cache else "", f"{time_us(record):,.1f}",
                     times(time_us(record) / time_us(timed[cases[0]])), f"{done.tflops:.3g}" if done else "",
                     share(done.of_peak if done else None), f"{done.tbytes:.3g}" if done else "", share(done.of_memory if done else None)])
    head = ["case", "kv, MiB", "kv / L2", "none, us", "to the fewest", "useful TFLOP/s", "of peak", "gathered TB/s", "of memory's peak"]
    told = f"L2: {cache / 2**20:.1f} MiB." if cache else "The size of the L2 is not known here."
    return filled_table(head, rows) + "\n\n" + told if rows else ""


# --- roofline ---------------------------------------------------------------------------------------------------------


ABOUT_WORK = {
    "sparse_prefill": (
        "useful FLOP = 2 h_q (d_qk + 512) × valid keys; gathered bytes = ⌈h_q / 64⌉ × valid keys × d_qk × bytes an element; each over the "
        "median. Masked entries are no work, so an arm that walks them shows a lower rate. Gathers come from the L2, too: more than the "
        "memory's peak is possible"),
    "indexer_topk": (
        "useful FLOP = 2 × 128 × h for every (query, key) of a row's window; bytes = q and k with their weights and scales, read once; "
        "each over the median"),
}


def roofline(records: list[Record], names: dict[str, str], machine: dict[str, str]) -> str:
    """Every timing's useful work, and its share of what the machine can do. names: what each case is called."""
    rows = []
    for case, arms in by_case_and_arm(records).items():
        lengths = next((record.lengths for record in arms if record.source == "metadata"), None)
        work = useful(case, lengths)
        for record in arms if work else ():
            assert work
            us = time_us(record) + derive_us(record)
            done = rate(work, us, machine)
            rows.append([names[case], record.arm, f"{us:,.1f}", f"{work.flops / 1e12:.4g}", f"{done.tflops:.4g}", share(done.of_peak),
                         f"{work.bytes / 1e9:.4g}", f"{done.tbytes:.3g}", share(done.of_memory)])
    head = ["case", "arm", "median, us", "useful TFLOP", "TFLOP/s", "of peak", "GB", "TB/s", "of memory's peak"]
    return filled_table(head, rows) if rows else ""


def by_case_and_arm(records: list[Record]) -> dict[str, list[Record]]:
    """Timed records by case."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.time:
            found.setdefault(record.case, []).append(record)
    return found


def peaks_line(machine: dict[str, str]) -> str:
    """What shares are of; or that there are none."""
    if "peak bf16" not in machine:
        return "shares of a peak: none, the peaks of this machine are not known"
    bf16, fp8, memory, cache = (machine.get(key, "not known") for key in ("peak bf16", "peak fp8", "peak memory", "L2"))
    return (f"peaks at the highest clock ({machine.get('max SM clock', 'as the driver says')}): bf16 {bf16}, fp8 {fp8}, memory {memory}; "
            f"L2 {cache}")


def keys_of(case: str) -> int:
    """The keys of an indexer case."""
    parsed = parse_case(case)
    assert isinstance(parsed, IndexerTopkCase)
    return parsed.s_kv
