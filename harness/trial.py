"""One arm on one case: what is launched, in which order, and which checks judge it. Runs inside the worker."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from arms.kernel import Kernel, Launch, Outputs, Problem, make_problem, normalise
from arms.lengths import backscan_torch
from cases.inputs import Inputs
from cases.values import put_nan
from harness import checks
from harness.compare import bits_differ
from harness.inplace import reads_inputs
from harness.lengths import other_backscans, summary
from harness.locate.diagnose import diagnose
from harness.locate.localise import Rows, describe_rows
from harness.locate.picture import locate
from harness.metamorphic import busy_stream, cut_at_length, graph_replay, relations, run_to_run, told
from harness.record import Lengths
from harness.timing import Timed
from harness.variations import Subject, copied
from harness.verdicts import Check, Verdict
from references.sparse_prefill import Expected, unquantised_out

REPEATS = 3  # launches back to back, after the first, unless told otherwise
UNQUANTISED_ROWS = 64
_LAUNCHED: set[tuple[str, str]] = set()  # (kernel, source) launched by this process


@dataclasses.dataclass
class ArmRun:
    """What an arm produced: its lengths (None: no topk_length), its outputs in the harness's convention, its checks.
    Satisfies families.Run."""

    source: str
    length: torch.Tensor | None
    outputs: Outputs
    rows: Rows
    checks: list[Check]
    lengths: Lengths | None = None
    note: str = ""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    ways: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: int | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The outputs by name."""
        return dict(zip(checks.NAMES, self.outputs))


class KernelTrial:
    """One kernel on one case: its arms are run one after the other and compared with those before them. A families.Trial."""

    def __init__(self, kernel: Kernel, inputs: Inputs, expected: Expected, digests: dict[str, str],
                 phase: Callable[[str], None]) -> None:
        self.kernel, self.inputs, self.expected, self.digests, self.phase = kernel, inputs, expected, digests, phase
        self.problem = make_problem(inputs)
        self.launches = REPEATS
        self.launch: Launch | None = None
        self.done: dict[str, ArmRun] = {}
        self.buffers: dict[str, int] = {}  # where the last timed call of each arm left its out
        self.full_width_done = self.cut_done = False

    def prepared(self) -> Launch:
        """The kernel's launch callable; built on first use (a first use may compile)."""
        if self.launch is None:
            self.phase("prepare")
            self.launch = made_ready(self.kernel, self.problem)
        return self.launch

    def run(self, source: str) -> ArmRun:
        """Launch one arm as often as its checks need, and judge it. Raises what the kernel raises."""
        launch = self.prepared()
        # A packaged kernel may be compiled when it is first launched, which takes minutes for nvcc.
        first = bool(self.kernel.requires.entry) and (self.kernel.name, source) not in _LAUNCHED
        self.phase("first launch" if first else "launch")
        length = self.kernel.sources[source].prepare(self.inputs)()
        handed = None if length is None else length.clone()
        outputs = self._call(launch, length)
        _LAUNCHED.add((self.kernel.name, source))
        self.phase("launch")
        rows = describe_rows(handed, self.inputs.valid_entries, self.inputs.valid, self.inputs.indices[:, 0])
        run = ArmRun(source, length, outputs, rows, [], summary(length, rows.topk, self.kernel.promise.pair))
        if source == "metadata" and length is None:
            run.note = "the metadata has another row count than the batch: the guard fell back to none"
        run.checks += self._own_checks(run, launch, handed)
        self.phase("judge")
        run.checks += self._comparisons(run, launch)
        diagnose(run.checks, outputs, self.inputs, self.expected, handed)
        run.extra = self._unquantised(run)
        self.done[source] = run
        return run

    def timed(self, source: str) -> Timed:
        """Derivation and launch of an arm that was run."""
        launch = self.prepared()

        def call(length: torch.Tensor | None) -> Outputs:
            outputs = launch(length)
            self.buffers[source] = outputs[0].data_ptr()
            return outputs

        return Timed(self.kernel.sources[source].prepare(self.inputs), call)

    def check_timed(self, source: str, last: Outputs) -> Check:
        """Whether the last timed call's outputs are the checked ones."""
        if list(self.buffers.values()).count(self.buffers[source]) > 1:  # one buffer for several arms: another one's outputs are left
            last = self.prepared()(self.done[source].length)
        pairs = zip(checks.NAMES, normalise(last, self.kernel.convention), self.done[source].outputs)
        stale = {name: bad for name, a, b in pairs if bool((bad := bits_differ(a, b)).any())}
        if stale:
            check = Check("timed-output", Verdict.FLAKY, f"{' and '.join(stale)} of the last timed call differ from the checked ones")
            output, bad = next(iter(stale.items()))
            locate(check, bad, self.done[source].rows, output)
            return check
        return Check("timed-output", Verdict.PASSED, "the last timed call gave what was checked")

    def _call(self, launch: Launch, length: torch.Tensor | None) -> Outputs:
        return self._finish(self._normalised(launch)(length), self.problem)

    def _normalised(self, launch: Launch) -> Launch:
        return lambda length: normalise(launch(length), self.kernel.convention)

    def _finish(self, outputs: Outputs, problem: Problem) -> Outputs:
        synchronize(self.inputs.device)
        check_shapes(outputs, problem)
        return copied(outputs)  # a kernel may return the same tensors every time

    def _relations(self, run: ArmRun, subject: Subject) -> list[Check]:
        """The arm against itself on variations of the problem, on poisoned memory, between guard bands, and on CUDA under stress."""
        found = relations(subject)
        if run.length is not None and not self.cut_done:
            self.cut_done = True
            found += told("cut-at-length", lambda: cut_at_length(subject))
        if self.inputs.device.type == "cuda":
            self.phase("launch")
            found.append(busy_stream(subject))
            self.phase("launch")
            replay = graph_replay(subject)
            why = "" if replay else f"not run: graph-replay: {self.kernel.requires.uncapturable}"
            found += [replay] if replay else []
            run.note = "; ".join(filter(None, [run.note, why]))
        return found

    def _own_checks(self, run: ArmRun, launch: Launch, handed: torch.Tensor | None) -> list[Check]:
        """The arm against itself: back to back, after another problem, with NaN in kv, on variations of the problem; its inputs."""
        subject = Subject(self.kernel, self.inputs, self.expected, self.problem, run.length, run.outputs, run.rows,
                          lambda problem: self._normalised(self.kernel.prepare(problem)), self._finish, self.phase)
        found = [run_to_run(subject, self._normalised(launch), self.launches), self._after_another(run, launch), self._nan_leak(run),
                 *told("reads-inputs", lambda: reads_inputs(subject)), *self._relations(run, subject), self._inputs_unchanged(run, handed)]
        return [check for check in found if check]

    def _nan_leak(self, run: ArmRun) -> Check | None:
        """Fill with NaN every kv row that no valid entry names, and the first and the last one, where clamped pads end up, and q of
        every other row without a valid entry, as padding rows hold anything: a query row that names none of them must not change. None
        if that leaves nothing to compare."""
        leaked = run.outputs[0].isnan()
        if self.inputs.case.values == "poison" and bool(leaked.any()):  # the case itself has NaN in the unnamed rows
            check = Check("nan-leak", Verdict.FAILED, "NaN of an unnamed key", bad=int(leaked.sum()), total=leaked.numel(),
                          first=checks.first_elements(leaked, run.outputs[0], self.expected.out))
            locate(check, leaked, run.rows, "out")
            return check
        poisoned = ~self.inputs.named
        poisoned[[0, -1]] = True
        entries = self.inputs.indices[:, 0].clamp(0, len(poisoned) - 1).long()
        empty = ~self.inputs.valid_entries.any(1)
        garbage = empty & (empty.cumsum(0) % 2 == 0)
        clean = ~(poisoned[entries] & self.inputs.valid_entries).any(1) & ~garbage
        if not bool(clean.any()):
            return None
        q, kv = self.problem.q.clone(), self.problem.kv.clone()
        put_nan(q, garbage)
        put_nan(kv, poisoned)
        outputs = self._call(self.kernel.prepare(dataclasses.replace(self.problem, q=q, kv=kv)), run.length)
        kept = [torch.where(clean.view(-1, *[1] * (new.dim() - 1)), new, old) for new, old in zip(outputs, run.outputs)]
        check = checks.same("nan-leak", (kept[0], kept[1], kept[2]), run.outputs, run.rows, ("with NaN in kv", "before"))
        if check.verdict is Verdict.PASSED:
            padding = f", and q of {int(garbage.sum())} rows without a key" if bool(garbage.any()) else ""
            check.detail = f"{int(poisoned.sum())} kv rows{padding} set to NaN, {int(clean.sum())} query rows that name none unchanged"
        return check

    def _after_another(self, run: ArmRun, launch: Launch) -> Check | None:
        """Launch on the rows in reverse order, then again as before: a kernel that keeps something may bring it along."""
        if self.inputs.case.s_q == 1:
            return None
        reverse = dataclasses.replace(self.problem, indices=self.problem.indices.flip(0))
        self.kernel.prepare(reverse)(None if run.length is None else run.length.flip(0))
        check = checks.same("after-another", self._call(launch, run.length), run.outputs, run.rows, ("after another problem", "before"))
        if check.verdict is Verdict.PASSED:
            check.detail = "unchanged after a launch on the rows in reverse order"
        return check

    def _inputs_unchanged(self, run: ArmRun, handed: torch.Tensor | None) -> Check:
        """handed: a copy of topk_length as it was before the first launch."""
        now = self.inputs.digests()
        changed = [name for name in self.digests if name != "all" and now[name] != self.digests[name]]
        fresh = make_problem(self.inputs)
        pairs = {"topk_length": (run.length, handed), "q_scale": (self.problem.q_scale, fresh.q_scale),
                 "kv_scale": (self.problem.kv_scale, fresh.kv_scale)}
        changed += [name for name, (a, b) in pairs.items() if a is not None and b is not None and not torch.equal(a, b)]
        if changed:
            detail = f"the arm wrote into {', '.join(changed)}"
            return Check("inputs-unchanged", Verdict.FAILED, detail, bad=len(changed), total=len(now) + 2)
        return Check("inputs-unchanged", Verdict.PASSED, "inputs, scales and topk_length as before", total=len(now) + 2)

    def _comparisons(self, run: ArmRun, launch: Launch) -> list[Check]:
        """Against the reference, the contract, and the arms that ran before."""
        found = [checks.against_reference(run.outputs, self.expected, run.rows)]
        empty = (run.rows.counting == 0).nonzero()[:1, 0]
        handed = "none" if run.length is None else ",".join(str(int(run.length[i])) for i in empty)
        exact = {"torch": backscan_torch(self.inputs.indices[:, 0])}
        if run.source == "backscan":
            exact |= other_backscans(self.inputs)
        found += [c for c in (
            checks.sentinels(run.outputs, run.rows, handed),
            checks.lengths(run.source, run.length, exact, self.inputs.valid_entries, self.inputs.indices, run.rows),
        ) if c]
        if "backscan" in self.done and run.length is not None:
            found.append(self._skip_check("backscan-vs-metadata", run, self.done["backscan"]))
        if "none" in self.done and run.length is not None:
            found.append(self._skip_check(f"none-vs-{run.source}", run, self.done["none"]))
            if not self.full_width_done:
                found.append(self._full_width(run, launch))
        return found

    def _skip_check(self, name: str, run: ArmRun, other: ArmRun) -> Check:
        """Compare two arms; rows in which one of them skips a pair more are held to the kernel's promise."""
        pair = self.kernel.promise.pair
        mine, theirs = (-(-r.rows.length // pair) for r in (run, other))
        fewer, more = (run, other) if bool((mine <= theirs).all()) else (other, run)
        labels = tuple(f"{self.kernel.name}/{r.source}" for r in (fewer, more))
        if self.kernel.promise.within_budget:
            return checks.near(name, fewer.outputs, more.outputs, self.expected, run.rows, (labels[0], labels[1]))
        return checks.skipping(name, fewer.outputs, more.outputs, mine != theirs, self.kernel.promise, run.rows,
                               (labels[0], labels[1]))

    def _full_width(self, run: ArmRun, launch: Launch) -> Check:
        """topk_length = topk everywhere must be bitwise none: nothing is skipped, only the variant differs."""
        self.full_width_done = True
        self.phase("launch")
        full = torch.full((self.inputs.case.s_q,), self.inputs.case.topk, dtype=torch.int32, device=self.inputs.device)
        outputs = self._call(launch, full)
        rows = dataclasses.replace(run.rows, length=full.cpu().long())
        if self.kernel.promise.within_budget:
            return checks.near("full-width", outputs, self.done["none"].outputs, self.expected, rows, ("topk_length = topk", "none"))
        return checks.same("full-width", outputs, self.done["none"].outputs, rows, ("topk_length = topk", "none"))

    def _unquantised(self, run: ArmRun) -> dict[str, float]:
        """fp8: relative distance of out to the unquantised case, over some rows. Reported, not judged."""
        if self.inputs.case.dtype != "fp8" or self.inputs.case.values == "poison":
            return {}
        s_q = self.inputs.case.s_q
        some = torch.arange(0, s_q, -(-s_q // UNQUANTISED_ROWS), device=self.inputs.device)
        want = unquantised_out(self.inputs, some)
        norm = float(torch.linalg.vector_norm(want))
        error = float(torch.linalg.vector_norm(run.outputs[0][some].float() - want))
        return {"unquantised relative error": error / norm if norm else 0.0}


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that an error surfaces at the launch that caused it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def made_ready(kernel: Any, problem: Any) -> Any:
    """The launch of a kernel, of either family, for a problem. Raises what the kernel raises, and TypeError unless it can be called."""
    launch = kernel.prepare(problem)
    if not callable(launch):
        what = "None" if launch is None else f"a {type(launch).__name__}"
        raise TypeError(f"{kernel.name} must return a callable that launches it, it returned {what}")
    return launch


def check_shapes(outputs: Any, inputs: Inputs | Problem) -> None:
    """Raise ValueError unless the outputs are out bf16 [s_q, h_q, 512] and two fp32 [s_q, h_q], of q's rows and heads."""
    pair = tuple(inputs.q.shape[:2])
    want = (((*pair, 512), torch.bfloat16), (pair, torch.float32), (pair, torch.float32))
    for name, tensor, (shape, dtype) in zip(checks.NAMES, outputs, want):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, the kernel returned {tensor.dtype} {list(tensor.shape)}")
