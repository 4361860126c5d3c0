"""What `threearm evidence NAME` measures: the published evidence of three changes, part by part, as plain data. docs/evidence-command.md
has it in words.

Each part names its shapes twice: as published, for a GPU, and reduced, for portable kernels on a CPU.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cases import family_of, format_case, load_suite, parse_case
from harness.comparison import Pairing
from harness.record import Record
from harness.verdicts import Verdict

RUN, PAIRED = "run", "pairs"
"""Kinds of parts: every arm on every case, or arms against each other by fresh processes."""
PROCESSES = 3
"""Pairs of fresh processes behind each interval. Fixed beforehand: nothing looks at the ratio to decide whether to go on."""
CPU_SAMPLES, CPU_PROCESSES = 5, 2
"""Of reduced runs, which are to show that the command works."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One part. gpu, cpu: cases; suite: a suite whose cases stand for `gpu`; a part without cases for a device is left out there.
    contract: on a GPU; on a CPU `wall` takes its place; "" is not timed. samples: of each arm and case on a GPU. arms: those that take
    part, all where empty. sweep: left out by --no-sweeps. time_wrong: also arms whose answer is wrong are timed. of, pair: of a part of
    kind `pairs`, the parts whose cases are compared, and the arms."""

    name: str
    title: str
    gpu: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    suite: str = ""
    contract: str = ""
    samples: int = 0
    arms: tuple[str, ...] = ()
    sweep: bool = False
    time_wrong: bool = False
    of: tuple[str, ...] = ()
    pair: tuple[str, str] = ("", "")

    @property
    def kind(self) -> str:
        return PAIRED if self.of else RUN

    def cases(self, reduced: bool) -> list[str]:
        """The part's cases in their shortest form. Raises CaseError only if this file is wrong."""
        if self.suite and not reduced:
            return [format_case(case) for case in load_suite(self.suite)]
        return [format_case(parse_case(text)) for text in (self.cpu if reduced else self.gpu)]


@dataclasses.dataclass(frozen=True)
class EvidencePlan:
    """One piece of evidence. main: the part that holds its case-runs."""

    name: str
    about: str
    gpu: tuple[str, ...]
    cpu: tuple[str, ...]
    main: str
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part:
        """The part of that name. Raises StopIteration."""
        return next(part for part in self.parts if part.name == name)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a person may set besides the name. samples, timeout: 0 for the plan's own; processes: pairs of them, 0 for none, -1 for the
    plan's own."""

    sweeps: bool = True
    samples: int = 0
    processes: int = -1
    timeout: float = 0.0


def parts_of(plan: EvidencePlan, reduced: bool, asked: Asked) -> list[Part]:
    """The parts that are run: those with cases for the device, and what compares their cases."""
    parts = [part for part in plan.parts if part.kind == RUN and part.cases(reduced) and (asked.sweeps or not part.sweep)]
    names = {part.name for part in parts}
    return parts + [part for part in plan.parts if names & set(part.of) and asked.processes]


def arms_in(kernel: dict[str, Any], part: Part) -> dict[str, Any]:
    """A kernel with those of its arms that take part."""
    return {**kernel, "arms": [arm for arm in kernel["arms"] if not part.arms or arm in part.arms]}


def keys_of(part: Part, kernels: list[dict[str, Any]], cases: list[str]) -> list[tuple[str, str]]:
    """(case, arm) of every record of a part of kind `run`: kernel by kernel, each on the cases of its family."""
    return list(dict.fromkeys((case, f"{kernel['name']}/{arm}") for kernel in kernels for case in cases
                              if family_of(case) == kernel["family"] for arm in arms_in(kernel, part)["arms"]))


def pairings(plan: EvidencePlan, part: Part, reduced: bool, kernels: list[dict[str, Any]],
             records: Mapping[tuple[str, str], Record]) -> list[Pairing]:
    """What a part of kind `pairs` compares: on each case base and candidate arm of a kernel, or of any two kernels where no kernel has
    both. An arm that did not pass is left out, unless its part says that wrong ones are timed."""
    wrong = {case for name in part.of if plan.part(name).time_wrong for case in plan.part(name).cases(reduced)}
    names = {arm: [kernel["name"] for kernel in kernels if arm in kernel["arms"]] for arm in part.pair}
    base, candidate = part.pair

    def usable(case: str, arm: str) -> bool:
        record = records.get((case, arm))
        return record is not None and (record.verdict is Verdict.PASSED or (case in wrong and bool(record.checks)))

    both = [(f"{x}/{base}", f"{y}/{candidate}") for x in names[base] for y in names[candidate]
            if x == y or (y not in names[base] and x not in names[candidate])]
    cases = dict.fromkeys(case for case, _ in records)
    return [Pairing(case, x, y) for x, y in both for case in cases if usable(case, x) and usable(case, y)]


PATTERNS = ("full", "half", "short")
LENGTHS = (1, 64, 127, 128, 129, 192, 256, 257, 384, 512, 768, 1024, 1536, 1920, 2048)
KEYS = tuple(4096 << step for step in range(7))
Q8 = "sparse_prefill:dtype=fp8,s_q={},s_kv={},topk=2048,rows={}"
TINY = "s_kv=512,h_q=2,d_qk=512"


def _patterns(text: str, *shape: int) -> tuple[str, ...]:
    return tuple(text.format(*shape, pattern) for pattern in PATTERNS)


def _sweeps(shape: str, small: str) -> tuple[Part, Part]:
    """Time against length, the staircase of 128, with none as the line without a benefit; and time against keys, across the L2's size."""
    at_length = f"sparse_prefill:{shape},s_q=2048,s_kv=65536,topk=2048,index_topk={{}}"
    at_keys = f"sparse_prefill:{shape},s_q=2048,s_kv={{}},topk=2048"
    small_length = f"sparse_prefill:{small},s_q=4,s_kv=512,topk=512,index_topk={{}}"
    small_keys = f"sparse_prefill:{small},s_q=4,s_kv={{}},topk=128"
    return (
        Part("topk-length-sweep", "Time against topk_length", tuple(map(at_length.format, LENGTHS)),
             tuple(map(small_length.format, (1, 128, 129, 512))), contract="kernel", samples=10, arms=("none", "metadata"), sweep=True),
        Part("s-kv-sweep", "Time against the number of keys", tuple(map(at_keys.format, KEYS)), tuple(map(small_keys.format, (256, 1024))),
             contract="kernel", samples=10, arms=("none",), sweep=True))


Q8_PARTS = (
    Part("kernel-time", "Time by row pattern", _patterns(Q8, 4096, 65536),
         tuple(f"sparse_prefill:dtype=fp8,s_q=4,{TINY},topk=512,rows={pattern}" for pattern in PATTERNS), contract="kernel", samples=30),
    Part("equivalence", "Source equivalence, early exit, rows without a key", suite="q8kv8-topk-length",
         cpu=tuple(f"sparse_prefill:dtype=fp8,s_q=8,{TINY},topk=256,rows={rows},seed={seed}"
                   for rows in ("ragged,holes=0.02", "mixed,pad_rows=2") for seed in (1, 2))),
    Part("wrapper-span", "The same calls by CUDA events", _patterns(Q8, 4096, 65536), contract="span", samples=30),
    Part("wrapper-wall", "The same calls by the host's clock", _patterns(Q8, 4096, 65536), contract="wall", samples=30),
    *_sweeps("dtype=fp8", "dtype=fp8,h_q=2,d_qk=512"),
    Part("processes", "none against metadata, by fresh processes", of=("kernel-time",), pair=("none", "metadata")),
)

BF16_PARTS = (
    Part("span", "Causal prompts", suite="bf16-topk-length",
         cpu=tuple(f"sparse_prefill:{shape},h_q=1,d_qk=512,topk=256" for shape in (
             "s_q=32,s_kv=32,rows=ramp", "s_q=64,s_kv=64,rows=ramp", "s_q=16,s_kv=512")), contract="span", samples=50),
    *_sweeps("h_q=128", "h_q=2,d_qk=512"),
    Part("processes", "none against metadata, by fresh processes", of=("span",), pair=("none", "metadata")),
)


def _indexer(*keys: int) -> tuple[str, ...]:
    return tuple(f"indexer_topk:requests=8192/{count},weights=mixed,scales=any" for count in keys)


def _small_indexer(*keys: int) -> tuple[str, ...]:
    return tuple(f"indexer_topk:requests=4/{count},topk=32,weights=mixed,scales=any" for count in keys)


LITETOPK_PARTS = (
    Part("scale", "Published lengths", _indexer(262144, 524288, 786432, 1048576), _small_indexer(512, 1024), contract="span", samples=9,
         time_wrong=True),
    Part("crossover", "Where the two cross", _indexer(32768, 65536, 98304, 131072), _small_indexer(128, 256), contract="span", samples=9,
         time_wrong=True, sweep=True),
    Part("processes", "dense against litetopk, by fresh processes", of=("crossover", "scale"), pair=("dense", "litetopk")),
)

PLANS = {plan.name: plan for plan in (
    EvidencePlan("q8kv8-topk-length", "topk_length on the FP8 kernel: time, source equivalence, early exit, what the wrapper costs",
                 ("sglang_q8kv8",), ("torch_blocks",), "equivalence", Q8_PARTS),
    EvidencePlan("bf16-topk-length", "topk_length on the bf16 kernels: what a causal prompt of 4096 and 8192 tokens saves",
                 ("flash_mla", "sgl_kernel"), ("torch_blocks",), "span", BF16_PARTS),
    EvidencePlan("litetopk", "dense against LiteTopk, 32K to 1M keys: time, memory, where the two cross",
                 ("deep_gemm", "litetopk_cuda"), ("torch_dense", "litetopk_torch"), "scale", LITETOPK_PARTS),
)}


PUBLISHED_RATIOS = {"full": "1.00x", "half": "1.95x", "short": "4.7x"}
"""none / metadata of the q8kv8 kernel alone, kernel time of 30 iterations: the evidence of the change as this project was given it. No
public page with these ratios is known to us."""
PUBLISHED_SAVINGS = {4096: "about 25 %", 8192: "about 12 %"}
"""Of a causal prompt of so many tokens at topk 2048: given in the same way."""
PUBLISHED_INDEXER = {262144: (13.05, 10.61), 524288: (25.90, 20.47), 786432: (39.25, 30.02), 1048576: (51.81, 40.18)}
"""Keys: dense (DeepGEMM and vLLM's top-k) and LiteTopk, ms, 8192 rows, one B200, 2026-08: LiteTopk's public table."""
