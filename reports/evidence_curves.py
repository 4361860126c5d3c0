"""The tables of dense against LiteTopk, of the sweeps, and useful work over every timing. One function a block: it takes the folder and
returns Markdown, "" where there is nothing to show."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from cases import parse_case
from cases.indexer_topk import IndexerTopkCase
from harness.evidence_folder import EvidenceFolder
from harness.evidence_plans import PUBLISHED_INDEXER
from harness.record import Record
from harness.verdicts import Verdict
from reports import sweeps
from reports.evidence_common import NO_FIGURE, about_pairs, paired_ratio, under
from reports.evidence_naming import naming
from reports.evidence_numbers import (
    by_case,
    cell,
    filled_table,
    kernels_of,
    ratio,
    timed,
    times,
)

GIB = 2**30


def dense_against_litetopk(folder: EvidenceFolder) -> str:
    """litetopk: both arms at every length, memory, the published table, and where the two cross."""
    records = [record for part in ("crossover", "scale") if part in folder.runs for record in folder.runs[part].records]
    pairs = [(dense, lite) for dense in kernels_with(records, "dense") for lite in kernels_with(records, "litetopk")]
    return "\n\n".join(_topk_table(folder, records, *pair) for pair in pairs)


def kernels_with(records: Sequence[Record], source: str) -> list[str]:
    """The kernels that have this arm."""
    return list(dict.fromkeys(record.kernel for record in records if record.source == source))


def _topk_table(folder: EvidenceFolder, records: list[Record], dense: str, litetopk: str) -> str:
    own = [record for record in records if record.kernel in (dense, litetopk)]
    arms = dict(sorted(by_case(own).items(), key=lambda item: sweeps.keys_of(item[0])))
    names = naming([folder], arms).own
    rows, points, wrong = [], [], []
    for case, found in arms.items():
        above, below, keys = found.get("dense"), found.get("litetopk"), sweeps.keys_of(case)
        value = ratio(above, below)
        points += [] if value is None else [(keys, value)]
        wrong += [keys] if above and above.verdict is not Verdict.PASSED else []
        paired = paired_ratio(folder, case, f"{litetopk}/litetopk", f"{dense}/dense")
        rows.append([names[case], cell(above), cell(below), _marked(times(value), above, below), paired, _memory(above), _memory(below),
                     _b200(case, folder)])
    head = ["case", f"{dense} (dense), ms", f"{litetopk} (litetopk), ms", "dense / litetopk", "by fresh processes [95 %]",
            "transient memory, GiB: dense", "litetopk", "B200, published: dense / LiteTopk, ms"]
    marked = any(record.time and record.verdict is not Verdict.PASSED for record in own)
    more = ["requests: rows/keys",
            "each kernel has a process of its own, so these two are timed one after the other; by fresh processes: in turns",
            about_pairs(folder),
            "wrong: the arm's choice is not an exact top-k (see what did not pass); its time is no time of the same work" if marked else "",
            "transient memory: the most that a launch held beyond inputs and indices",
            NO_FIGURE if folder.info.reduced else
            "B200: DeepGEMM and vLLM's top-k against LiteTopk, 8192 rows, 32 heads, topk 2048, 2026-08: another GPU, another dense top-k"]
    part = "scale" if "scale" in folder.runs else "crossover"
    return (filled_table(head, rows) + "\n\n" + sweeps.crossover_text(points, wrong) + under(folder, part, own, *more)) if rows else ""


def _marked(text: str, *arms: Record | None) -> str:
    return f"{text}\n**wrong dense**" if text and arms[0] and arms[0].verdict is not Verdict.PASSED else text


def _memory(record: Record | None) -> str:
    return f"{record.memory / GIB:.3g}" if record and record.memory is not None else ""


def _b200(case: str, folder: EvidenceFolder) -> str:
    parsed = parse_case(case)
    assert isinstance(parsed, IndexerTopkCase)
    found = PUBLISHED_INDEXER.get(parsed.s_kv) if not folder.info.reduced else None
    return f"{found[0]:.2f} / {found[1]:.2f} ({found[0] / found[1]:.2f}x)" if found else ""


def length_sweep(folder: EvidenceFolder) -> str:
    """Time against topk_length, a table a kernel."""
    return _sweep(folder, "topk-length-sweep", sweeps.length_sweep)


def keys_sweep(folder: EvidenceFolder) -> str:
    """Time against keys, a table a kernel."""
    return _sweep(folder, "s-kv-sweep", sweeps.keys_sweep)


def _sweep(folder: EvidenceFolder, part: str, table: Callable[[list[Record], dict[str, str], dict[str, str]], str]) -> str:
    run = folder.runs.get(part)
    parts = []
    for kernel in kernels_of(run.records) if run else ():
        assert run
        own = [record for record in run.records if record.kernel == kernel]
        text = table(own, naming([folder], (record.case for record in own)).own, folder.info.machine)
        parts += [f"##### {kernel}\n\n{text}" + under(folder, part, own)] if text else []
    return "\n\n".join(parts)


def roofline(folder: EvidenceFolder) -> str:
    """Useful work over every timing."""
    parts = []
    for name, run in folder.runs.items():
        if not timed(run.records):
            continue
        names, about = naming([folder], (record.case for record in run.records)), folder.info.part(name)
        table = sweeps.roofline(run.records, names.own, folder.info.machine)
        parts += [f"##### {about.title}: contract `{about.contract}`\n\n{table}\n\n{names.line()}"] if table else []
    family = next((run.records[0].family for run in folder.runs.values() if run.records), "")
    return "\n\n".join([*parts, f"{sweeps.ABOUT_WORK[family]}  \n{sweeps.peaks_line(folder.info.machine)}"]) if parts else ""
