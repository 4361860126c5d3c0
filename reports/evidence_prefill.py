"""The tables of sparse_prefill's evidence: kernel time, what the wrapper costs, source equivalence, what a causal prompt saves. One
function a block: it takes the folder and returns Markdown, "" where there is nothing to show."""
from __future__ import annotations

from collections.abc import Callable

from cases import parse_case
from cases.sparse_prefill import SparsePrefillCase
from harness.evidence_folder import EvidenceFolder
from harness.evidence_plans import PUBLISHED_RATIOS, PUBLISHED_SAVINGS
from harness.record import Record
from harness.verdicts import SOURCES, Check, Verdict
from reports import evidence
from reports.cells import markdown_table
from reports.evidence_common import NO_FIGURE, about_pairs, paired_ratio, paired_saving, under
from reports.evidence_naming import naming, naming_of
from reports.evidence_numbers import (
    by_case,
    cell,
    contract_line,
    derive_us,
    expected_saving,
    filled_table,
    kernels_of,
    largest_kernel,
    middle,
    nominal_saving,
    paired_savings,
    percent,
    quartiles,
    ratio,
    time_us,
    times,
)

SOURCE_PAIRS = (("none", "backscan"), ("none", "metadata"), ("backscan", "metadata"))
OUTPUTS = ("out", "max_logits", "lse")


def kernel_time(folder: EvidenceFolder) -> str:
    """q8kv8-topk-length: the three arms by row pattern, with the published ratio."""
    parts = []
    run = folder.runs.get("kernel-time")
    for kernel in kernels_of(run.records) if run else ():
        assert run
        own = [record for record in run.records if record.kernel == kernel]
        told = any(largest_kernel(record) for record in own)
        names = naming([folder], (record.case for record in own)).own
        rows = [[names[case], *_kernel_row(case, arms, folder, told)] for case, arms in by_case(own).items()]
        head = ["case", "mean length", "none, ms", "backscan, ms", "metadata, ms", "none / backscan", "none / metadata",
                *(["attention kernel alone"] if told else []), "by fresh processes: none / metadata [95 %]", "published: none / metadata"]
        more = [about_ratios(own)]
        more += ["attention kernel alone: the dearest of the kernels that a call launches; with a length the wrapper launches more, its "
                 "range validation"] if told else []
        more += [about_pairs(folder), published_ratio(folder)]
        parts.append(f"##### {kernel}\n\n" + filled_table(head, rows) + under(folder, "kernel-time", own, *more))
    return "\n\n".join(parts)


def about_ratios(records: list[Record]) -> str:
    """What the medians are of: contract kernel has the derivation apart, the others have it in."""
    contracts = {record.time.contract for record in records if record.time}
    what = "the call, the derivation apart" if contracts == {"kernel"} else "derivation and call together"
    return f"none / backscan and none / metadata: medians of {what}" if contracts else ""


def _kernel_row(case: str, arms: dict[str, Record], folder: EvidenceFolder, told: bool) -> list[str]:
    parsed = parse_case(case)
    assert isinstance(parsed, SparsePrefillCase)
    none, metadata = arms.get("none"), arms.get("metadata")
    lengths = metadata.lengths if metadata else None
    alone = [largest_kernel(arm) if arm else None for arm in (none, metadata)]
    attention = f"{times(alone[0] / alone[1])}\n({alone[0] / 1e3:.4g} / {alone[1] / 1e3:.4g} ms)" if alone[0] and alone[1] else ""
    published = "" if folder.info.reduced else PUBLISHED_RATIOS.get(parsed.rows, "")
    return [f"{lengths.mean:,.0f}" if lengths else "", *(cell(arms.get(source)) for source in SOURCES),
            times(ratio(none, arms.get("backscan"))), times(ratio(none, metadata)), *([attention] if told else []),
            paired_ratio(folder, case, f"{metadata.kernel if metadata else ''}/metadata"), published]


def published_ratio(folder: EvidenceFolder) -> str:
    """Where the published ratios are from."""
    if folder.info.reduced:
        return NO_FIGURE
    return ("published: the attention kernel's time by torch.profiler, 30 iterations, the change's evidence as it was given to this "
            "project; no public page with these ratios is known to us. "
            "sglang#31888: kernel time −25.9 % at s_q=437: not the same case")


def wrapper(folder: EvidenceFolder) -> str:
    """What a call costs beyond its kernels: between the events, and for the host."""
    kernel, span, wall = (by_arm(folder, part) for part in ("kernel-time", "wrapper-span", "wrapper-wall"))
    rows = []
    names = naming([folder], (record.case for record in kernel.values()))
    for key, record in kernel.items():
        if not all(key in found and found[key].time for found in (kernel, span, wall)):
            continue
        assert record.time
        alone = time_us(record) + derive_us(record)
        rows.append([names.own[record.case], record.arm, str(record.time.kernels), f"{alone:,.1f}", _us(span[key]), _us(wall[key]),
                     f"{time_us(span[key]) - alone:+.1f}", f"{time_us(wall[key]) - time_us(span[key]):+.1f}"])
    head = ["case", "arm", "kernels a call", "kernel time with derivation, us", "span, us", "wall, us", "span − kernel time, us",
            "wall − span, us"]
    lines = [contract_line([found[key] for key in kernel if key in found], "sparse_prefill") for found in (span, wall)]
    told = ["span − kernel time: gaps between kernels on the device, waiting for the host among them; wall − span: what the host adds "
            "before the first kernel and after the last. With a length, the wrapper copies the range of the lengths to the host twice a "
            "call",
            "differences are of medians, the three contracts one after the other in one process"]
    return filled_table(head, rows) + "\n\n" + "  \n".join(line for line in (names.line(), *lines, *told) if line) if rows else ""


def _us(record: Record) -> str:
    assert record.time
    low, high = quartiles(record.time.us)
    return f"{middle(record.time.us):,.1f} [{low:,.1f} {high:,.1f}]"


def by_arm(folder: EvidenceFolder, part: str) -> dict[tuple[str, str], Record]:
    """The records of a part by case and arm."""
    run = folder.runs.get(part)
    return {(record.case, record.arm): record for record in run.records} if run else {}


def equivalence(folder: EvidenceFolder) -> str:
    """Which outputs of which arms are equal: bit for bit, by the kernel's stated rule, or not."""
    run = folder.runs.get("equivalence")
    rows = []
    for kernel in kernels_of(run.records) if run else ():
        assert run
        arms = by_case(run.records, kernel)
        for pair in SOURCE_PAIRS:
            found = [case_equivalence(case, pair) for case in arms.values() if set(pair) <= set(case)]
            if found:
                by_output = (counted_words([each[name] for each in found]) for name in OUTPUTS)
                rows.append([kernel, " and ".join(pair), str(len(found)), *by_output])
    head = ["kernel", "arms", "case-runs", *OUTPUTS]
    told = ("bitwise: the outputs' fingerprints are equal. by rule: some bits differ, and every difference is of the kind that the kernel "
            "states (`threearm arms`; the table of early exit below has counts, ULP and columns). differs: neither. Published: 24 of 24 "
            "case-runs equal; sglang documents the early exit as bit-exact")
    return markdown_table(head, rows) + "\n\n" + told if rows else ""


def case_equivalence(arms: dict[str, Record], pair: tuple[str, str]) -> dict[str, str]:
    """For each output of two arms of one case: bitwise, by rule, differs, or not compared where one has no output."""
    first, second = (arms[source] for source in pair)
    check = next((check for record in (first, second) for check in record.checks if check.name == f"{pair[0]}-vs-{pair[1]}"), None)
    return {name: one_equivalence(first.outputs.get(name), second.outputs.get(name), check) for name in OUTPUTS}


def one_equivalence(mine: str | None, other: str | None, check: Check | None) -> str:
    """Two fingerprints and the check that compared the arms: the check says whether what differs may."""
    if mine is None or other is None:
        return "not compared"
    if mine == other:
        return "bitwise"
    return "by rule" if check and check.verdict is Verdict.PASSED else "differs"


def counted_words(words: list[str]) -> str:
    """`6 bitwise, 18 by rule`; what differs stands out."""
    order = ("bitwise", "by rule", "differs", "not compared")
    counts = {word: words.count(word) for word in order}
    return ", ".join(f"**{count} {word}**" if word in order[2:] else f"{count} {word}" for word, count in counts.items() if count)


def early_exit(folder: EvidenceFolder) -> str:
    """Where arms that skip and arms that walk masked pairs differ. Cases that differ in their seed alone share a row."""
    text = _without_title(folder, evidence.early_exit)
    if not text:
        return ""
    cases = [record.case for record in folder.runs["equivalence"].records]
    seeds = " or ".join(str(seed) for seed in dict.fromkeys(parse_case(case).seed for case in cases))
    return f"{text}\n\n{naming_of(map(evidence.without_seed, cases)).line(f', and seed {seeds}')}"


def sentinels(folder: EvidenceFolder) -> str:
    """Rows without a valid key."""
    return _without_title(folder, evidence.sentinels)


def _without_title(folder: EvidenceFolder, section: Callable[[list[Record]], str]) -> str:
    run = folder.runs.get("equivalence")
    return section(run.records).partition("\n\n")[2] if run else ""


def savings(folder: EvidenceFolder) -> str:
    """bf16-topk-length: what metadata saves, measured in pairs in one process, by fresh processes, expected, and published."""
    run = folder.runs.get("span")
    parts = []
    for kernel in kernels_of(run.records) if run else ():
        assert run
        own = [record for record in run.records if record.kernel == kernel]
        names = naming([folder], (record.case for record in own)).own
        rows = [[names[case], *_savings_row(case, arms, folder)] for case, arms in by_case(own).items()]
        head = ["case", "none, ms", "backscan, ms", "metadata, ms", "saving, pairs of samples", "saving, fresh processes [95 %]",
                "expected: pairs left out", "topk / 2L", "published"]
        prompts = any(row[head.index("topk / 2L")] for row in rows)
        more = ["saving: 1 − metadata / none; pairs of samples: median [quartiles] over samples of the same round in one process",
                "expected: the share of the 128-key pairs that the lengths leave out",
                "topk / 2L: the share of the keys that a causal prompt of L tokens does not have" if prompts else "", about_pairs(folder),
                NO_FIGURE if folder.info.reduced else "published: causal prompts at topk 2048, given in the same way as the ratios "
                "of q8kv8-topk-length"]
        parts.append(f"##### {kernel}\n\n" + filled_table(head, rows) + under(folder, "span", own, *more))
    return "\n\n".join(parts)


def _savings_row(case: str, arms: dict[str, Record], folder: EvidenceFolder) -> list[str]:
    parsed = parse_case(case)
    assert isinstance(parsed, SparsePrefillCase)
    none, metadata = arms.get("none"), arms.get("metadata")
    measured = ""
    if none and metadata and none.time and metadata.time:
        savings = paired_savings(none.time, metadata.time)
        low, high = quartiles(savings)
        measured = f"{percent(middle(savings))} [{percent(low)} {percent(high)}]"
    nominal, published = nominal_saving(parsed), ""
    if not folder.info.reduced:
        published = {"ramp": PUBLISHED_SAVINGS.get(parsed.s_q, ""), "full": "none to expect"}.get(parsed.rows, "")
    return [*(cell(arms.get(source)) for source in SOURCES), measured,
            paired_saving(folder, case, f"{metadata.kernel if metadata else ''}/metadata"),
            percent(expected_saving(metadata.lengths)) if metadata and metadata.lengths else "",
            "" if nominal is None else percent(nominal), published]
