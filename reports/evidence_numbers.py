"""What an evidence page computes from records: medians, useful work and its share of what the machine can do, expected savings, and the
line that says what a number is. Pure functions. docs/evidence-command.md has the formulas."""
from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Sequence

from cases import Case, parse_case
from cases.sparse_prefill import D_V, SparsePrefillCase
from harness.record import Lengths, Record, Timing
from harness.verdicts import Verdict
from harness.watch import slowed
from reports import table, topk_table
from reports.cells import markdown_table

HEAD_DIM = 128  # of an indexer head
CTA_HEADS = 64  # heads that share a gathered key
CLOCKS = re.compile(r"(\d+) to (\d+) MHz, (\d+) to (\d+) W, throttle reasons 0x([0-9a-f]+)")
INTERVAL = "median [quartiles of the samples]"


# --- samples ----------------------------------------------------------------------------------------------------------


def middle(us: Sequence[float]) -> float:
    """Their median."""
    return statistics.median(us)


def quartiles(us: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one sample, itself twice."""
    if len(us) < 2:
        return us[0], us[0]
    low, _, high = statistics.quantiles(us, n=4, method="inclusive")
    return low, high


def ms(us: Sequence[float]) -> str:
    """`1.865 [1.86 1.87]`, in milliseconds."""
    low, high = quartiles(us)
    return f"{middle(us) / 1e3:.4g} [{low / 1e3:.4g} {high / 1e3:.4g}]"


def time_us(record: Record) -> float:
    """The median of a call; contract kernel: without the derivation."""
    assert record.time
    return middle(record.time.us)


def derive_us(record: Record) -> float:
    """The median of the derivation, where it is timed apart, else 0."""
    return middle(record.time.derive_us) if record.time and record.time.derive_us else 0.0


def paired_savings(base: Timing, candidate: Timing) -> list[float]:
    """1 - candidate / base, sample by sample: the two of a pair were taken one right after the other."""
    return [1 - mine / theirs for theirs, mine in zip(base.us, candidate.us)]


def largest_kernel(record: Record) -> float | None:
    """The median us of the dearest of the kernels that a call launches: the attention alone. None unless kernels were told apart."""
    return max(record.time.breakdown.values()) if record.time and record.time.breakdown else None


def percent(share: float) -> str:
    """0.2471 is `24.7 %`."""
    return f"{100 * share:.1f} %"


# --- work -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Useful:
    """What a call has to do. flops: a multiplication and an addition are two; bytes: what is gathered or read; fp8: its tensor cores'
    type."""

    flops: float
    bytes: float
    fp8: bool


def valid_keys(case: SparsePrefillCase, lengths: Lengths | None) -> int | None:
    """Valid entries of all rows. From the row pattern where that says it; else from the metadata lengths. None where neither does, as where
    entries are missing inside the range."""
    if case.holes or case.lead or case.pad_rows:
        return None
    most = min(case.limit, case.s_kv)
    if case.rows in ("full", "half"):
        return case.s_q * min(case.limit if case.rows == "full" else case.limit // 2, case.s_kv)
    if case.rows == "ramp":
        ramp = min(case.s_q, most)
        return ramp * (ramp + 1) // 2 + (case.s_q - ramp) * most
    return round(lengths.mean * case.s_q) if lengths else None


def useful(text: str, lengths: Lengths | None) -> Useful | None:
    """The work of a case, whatever the arm: what is skipped, and what is masked, is no work. lengths: of the metadata arm."""
    case: Case = parse_case(text)
    if isinstance(case, SparsePrefillCase):
        keys = valid_keys(case, lengths)
        if keys is None:
            return None
        fp8 = case.dtype == "fp8"
        gathers = -(-case.h_q // CTA_HEADS)
        return Useful(2.0 * case.h_q * (case.d_qk + D_V) * keys, float(gathers * keys * case.d_qk * (1 if fp8 else 2)), fp8)
    pairs = sum(_seen(rows, keys, case.window, case.span) for rows, keys in case.request_lengths)
    return Useful(2.0 * HEAD_DIM * case.h * pairs, float((case.s_kv + case.num_q * case.h) * (HEAD_DIM + 4)), True)


def _seen(rows: int, keys: int, window: str, span: int) -> int:
    """(query, key) pairs of one request: its rows are its last positions."""
    if window == "full":
        return rows * keys
    if span:
        return sum(min(span, keys - rows + row + 1) for row in range(rows))
    return rows * (keys - rows) + rows * (rows + 1) // 2


@dataclasses.dataclass(frozen=True)
class Rate:
    """Work over a time. of_peak, of_memory: shares of the machine's, None where they are not known."""

    tflops: float
    tbytes: float
    of_peak: float | None
    of_memory: float | None


def rate(work: Useful, us: float, machine: dict[str, str]) -> Rate:
    """What a call that takes `us` does in a second. machine: run.json's, whose peaks are those at the highest clock."""
    tflops, tbytes = work.flops / us / 1e6, work.bytes / us / 1e6
    peak, memory = number(machine, "peak fp8" if work.fp8 else "peak bf16"), number(machine, "peak memory")
    return Rate(tflops, tbytes, tflops / peak if peak else None, tbytes / memory if memory else None)


def number(machine: dict[str, str], key: str) -> float | None:
    """`1070 TFLOP/s` as 1070.0; None where the machine does not say."""
    try:
        return float(machine[key].split()[0])
    except (KeyError, ValueError, IndexError):
        return None


def share(value: float | None) -> str:
    """53 %, or nothing."""
    return "" if value is None else f"{value:.0%}"


def expected_saving(lengths: Lengths) -> float:
    """The share of the 128-key pairs that these lengths leave out: what a call would save if time were pairs."""
    return 1 - lengths.pairs_run


def nominal_saving(case: SparsePrefillCase) -> float | None:
    """topk / (2 L): the share of the keys that a causal prompt of L tokens does not have; None of another pattern, or a prompt that is
    shorter than topk."""
    return case.limit / (2 * case.s_q) if case.rows == "ramp" and case.s_q >= case.limit and case.s_kv >= case.limit else None


# --- words ------------------------------------------------------------------------------------------------------------


def timed(records: Sequence[Record]) -> list[Record]:
    """Those with a time."""
    return [record for record in records if record.time]


def by_case(records: Sequence[Record], kernel: str = "") -> dict[str, dict[str, Record]]:
    """case -> source -> record, of one kernel or of all; indexer kernels have other sources, so none is lost."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if not kernel or record.kernel == kernel:
            found.setdefault(record.case, {})[record.source] = record
    return found


def kernels_of(records: Sequence[Record]) -> list[str]:
    """Kernels in the order in which they were run."""
    return list(dict.fromkeys(record.kernel for record in records))


def cell(record: Record | None) -> str:
    """An arm's time, marked where its answer is wrong; its verdict where there is no time."""
    if record is None:
        return ""
    if not record.time:
        return record.verdict.value
    text = ms(record.time.us) + (f"\n+{derive_us(record) / 1e3:.3g} derive" if derive_us(record) else "")
    if record.verdict is Verdict.PASSED:
        return text
    return f"{text}\n**{'wrong' if record.verdict is Verdict.FAILED else record.verdict.value}**"


def ratio(above: Record | None, below: Record | None) -> float | None:
    """Median over median; None unless both were timed under one contract."""
    if above is None or below is None or not above.time or not below.time or above.time.contract != below.time.contract:
        return None
    return time_us(above) / time_us(below)


def filled_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table without the columns that are empty in every row."""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    return markdown_table([head[place] for place in kept], [[row[place] for place in kept] for row in rows])


def times(value: float | None) -> str:
    """`1.90x`, or nothing."""
    return "" if value is None else f"{value:.3g}x" if value >= 10 else f"{value:.2f}x"


def contract_line(records: Sequence[Record], family: str) -> str:
    """One line: what was timed, cache, order, samples, the contract's name, and what stands in brackets. "" where nothing was timed."""
    found = [record.time for record in timed(records) if record.time]
    if not found:
        return ""
    contracts = topk_table.CONTRACTS if family == "indexer_topk" else table.CONTRACTS
    lines = []
    for contract in dict.fromkeys(time.contract for time in found):
        some = [time for time in found if time.contract == contract]
        counts = sorted({len(time.us) for time in some})
        samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        orders, caches = (" or ".join(dict.fromkeys(values)) for values in ([t.order for t in some], [t.cache for t in some]))
        lines.append(f"contract `{contract}`: {contracts[contract]}; {caches}; {orders}; {INTERVAL} of {samples} samples in one process")
    return "; ".join(lines)


def clocks_line(records: Sequence[Record]) -> str:
    """SM clock, power and what slowed the GPU while these were timed; "" where no clock was read. Arms of a kernel on a case are timed
    together: one reading each."""
    read = dict.fromkeys((record.case, record.kernel, record.time.clocks) for record in timed(records) if record.time)
    found = [match for _, _, clocks in read if (match := CLOCKS.search(clocks))]
    if not found:
        return ""
    low, high, least, most = ([int(match[place]) for match in found] for place in (1, 2, 3, 4))
    slow = [words for match in found if (words := slowed(int(match[5], 16)))]
    told = f"; {' and '.join(dict.fromkeys(slow))} in {len(slow)} of {len(found)} timings" if slow else "; nothing slowed it"
    return f"clocks while timed: {min(low)} to {max(high)} MHz, {min(least)} to {max(most)} W{told}"
