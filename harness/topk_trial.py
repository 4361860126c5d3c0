"""One indexer top-k kernel on one case: what is launched, in which order, and which checks judge it. Runs inside the worker."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from arms.kernel import KERNELS
from arms.topk import TopkKernel, TopkLaunch, TopkProblem, TopkResult
from cases.indexer_inputs import IndexerInputs
from harness import topk_checks as checks
from harness import topk_relations as relations
from harness.guard import poisoned_memory
from harness.locate.diagnose import diagnose_choice
from harness.locate.topk_localise import Windows
from harness.record import Lengths
from harness.timing import Timed
from harness.topk_downstream import downstream
from harness.topk_inplace import reads_inputs
from harness.topk_launches import beside_a_busy_stream, guarded, in_a_row, reason_of, replayed_from_a_graph, taken, without_logits
from harness.topk_memory import Meter, whole_bytes
from harness.topk_metamorphic import judged, raised, variations
from harness.topk_sets import Band, Tally, tally
from harness.trial import made_ready
from harness.verdicts import Check, Verdict
from references.indexer_topk import TopkExpected
from references.sparse_prefill import free_memory

REPEATS = 4  # launches back to back, after the first two, unless told otherwise
PEER = "torch_dense"  # the arm that others are compared with
_LAUNCHED: set[str] = set()  # kernels launched by this process


def make_topk_problem(inputs: IndexerInputs) -> TopkProblem:
    """The kernel's view of a case's tensors (no copies)."""
    return TopkProblem(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, inputs.ks, inputs.ke, inputs.case.topk,
                       inputs.requests)


@dataclasses.dataclass
class TopkRun:
    """What the arm chose, and what the checks say of it. Satisfies families.Run."""

    result: TopkResult
    checks: list[Check]
    note: str = ""
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    ways: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    lengths: Lengths | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The choice, as it came and in order (its set), and the values beside it."""
        named = {"indices": self.result.indices, "set": self.result.indices.sort(1).values}
        return named if self.result.values is None else named | {"values": self.result.values}


class TopkTrial:
    """One kernel on one case. A families.Trial."""

    def __init__(self, kernel: TopkKernel, inputs: IndexerInputs, expected: TopkExpected, digests: dict[str, str],
                 phase: Callable[[str], None]) -> None:
        self.kernel, self.inputs, self.expected, self.digests, self.phase = kernel, inputs, expected, digests, phase
        self.problem = make_topk_problem(inputs)
        p = self.problem
        self.windows = Windows(p.ks.cpu().long(), p.ke.cpu().long(), p.topk, p.requests)
        self.ks, self.ke = p.ks.clone(), p.ke.clone()  # an arm may write into its own
        self.band = Band(expected.scores, expected.kth, expected.eps[kernel.accumulate], self.ks, self.ke, p.s_kv)
        self.launch: TopkLaunch | None = None
        self.launches = REPEATS  # that run-to-run makes back to back; the worker sets another number
        self.bound = 0  # bytes that a launch may hold, once it is measured
        self.done: TopkRun | None = None
        self.missing: list[str] = []  # `check: reason` of relations that this kernel or case rules out

    def run(self, arm: str) -> TopkRun:
        """Launch the kernel as often as its checks need, and judge it. Raises what the kernel raises."""
        first, result, peak = self._measured()
        run = TopkRun(result, [], ways=relations.ways(result), memory=peak)
        run.checks += self._own_checks(result, first)
        judged = torch.ones_like(self.ks, dtype=torch.bool) if result.status is None else result.status != checks.REFUSED
        self.phase("judge")
        found = tally(result.indices, self.band)
        run.checks += self._choice(run, found, judged)
        run.checks += [c for c in (relations.memory(peak, self.bound, self.problem.num_q, self.problem.s_kv),) if c]
        run.checks += self._against_dense(run)
        diagnose_choice(run.checks, result, self.problem, self.band, self.windows, self.expected.count)
        run.note = self._note(run)
        self.done = run
        return run

    def timed(self, arm: str) -> Timed:
        """The launch of the arm that was run; there is nothing to derive."""
        launch = self._prepared()
        return Timed(lambda: None, lambda _: launch())

    def check_timed(self, arm: str, last: Any) -> Check:
        """Whether the last timed call chose the checked keys."""
        assert self.done is not None
        check = relations.same_choice("timed-output", self._taken(last), self.done.result, self.band, self.windows,
                                      ("the last timed call", "the checked one"), Verdict.FLAKY)
        if check.verdict is Verdict.PASSED:
            check.detail = f"the last timed call gave what was checked: {check.detail}"
        return check

    def _prepared(self) -> TopkLaunch:
        if self.launch is None:
            self.phase("prepare")
            self.launch = made_ready(self.kernel, self.problem)
        return self.launch

    def _measured(self) -> tuple[TopkResult, TopkResult, int]:
        """The first launch's result, the second's, and the most bytes that a launch held beyond inputs and indices: the second one's,
        since the first may compile, with what set-up and the first one kept."""
        p = self.problem
        meter = Meter(p.device, [p.q_fp8, p.k_fp8, p.kv_scale, p.weights, p.ks, p.ke])
        self.phase("prepare")
        self.bound = whole_bytes(self.kernel)(p)
        launch, _ = meter.watch(lambda: made_ready(self.kernel, p))
        self.launch = launch
        self.phase("first launch" if self.kernel.requires.entry and self.kernel.name not in _LAUNCHED else "launch")
        raw, _ = meter.watch(launch)
        _LAUNCHED.add(self.kernel.name)
        first = without_logits(self._taken(raw))
        meter.discount(sum(x.nbytes for x in (first.indices, first.values, first.status) if x is not None))
        del raw
        self.phase("launch")
        raw, peak = meter.watch(launch)
        result = self._taken(raw)
        return first, result, max(0, peak - result.indices.nbytes)

    def _taken(self, raw: Any) -> TopkResult:
        return taken(raw, self.problem)

    def _own_checks(self, result: TopkResult, first: TopkResult) -> list[Check]:
        """The arm against itself: launched again, on poisoned memory, after another problem; its inputs."""
        found = [self._run_to_run(result, first)]
        self.phase("launch")  # the clock of a long case starts anew
        with poisoned_memory():  # prepared again: its buffers may have been made there
            fresh = self._taken(self.kernel.prepare(self.problem)())
        found.append(relations.written(fresh, result, self.band, self.windows))
        self.phase("launch")
        found.append(self._after_another(result))
        found += self._reads_inputs()
        found += self._variations(result)
        found += self._elsewhere(result)
        found.append(self._inputs_unchanged())
        return found

    def _variations(self, result: TopkResult) -> list[Check]:
        """The arm on problems whose choice follows from this one's."""
        found = []
        every = variations(self.problem, self.kernel.requires, self.band, self.expected.valid, self._score_error)
        for variation in every:
            self.phase("launch")
            try:
                launched = [taken(made_ready(self.kernel, p)(), p) for p in variation.problems]
            except Exception as error:
                found += raised(variation, reason_of(error, self.problem.device))
                continue
            found += judged(variation, launched, result, self.band, self.windows, self.kernel.place_free) if launched else []
            self.missing += variation.missing
        return found

    def _elsewhere(self, result: TopkResult) -> list[Check]:
        """The same launch between guard bands; on CUDA beside a busy stream and from a graph."""
        def same(name: str, got: TopkResult, where: str, verdict: Verdict) -> Check:
            return self._same(name, got, result, (where, "before"), verdict)

        self.phase("launch")
        found = [guarded(self.kernel, self.problem, same)]
        if self.problem.device.type != "cuda":
            return found
        launch, declared = self._prepared(), self.kernel.requires.uncapturable
        self.phase("launch")
        found.append(beside_a_busy_stream(launch, self.problem, same))
        self.phase("launch")
        replay = replayed_from_a_graph(launch, self.problem, same, declared)
        self.missing += [] if replay else [f"graph-replay: {declared}"]
        return [*found, *([replay] if replay else [])]

    def _reads_inputs(self) -> list[Check]:
        if PEER not in KERNELS:
            return []
        peer: TopkKernel = KERNELS[PEER]  # type: ignore[assignment]

        def apart(row0: int, row1: int, indices: torch.Tensor) -> torch.Tensor:
            return sum(self.expected.rounding(arm.accumulate, row0, row1, indices) for arm in (self.kernel, peer))  # type: ignore[return-value]

        self.phase("launch")
        return [reads_inputs(self.problem, lambda: self._taken(self._prepared()()),
                             lambda: self._taken(peer.prepare(self.problem)()), self.band, apart, self.windows)]

    def _same(self, name: str, got: TopkResult, other: TopkResult, labels: tuple[str, str], verdict: Verdict = Verdict.FAILED) -> Check:
        return relations.same_choice(name, got, other, self.band, self.windows, labels, verdict)

    def _run_to_run(self, result: TopkResult, first: TopkResult) -> Check:
        """The first launch and self.launches back to back, each against the second. As many at a time as there is room for their results;
        one by one where they share a buffer, in which only the last would be left."""
        check = self._same("run-to-run", first, result, ("launch 1", "launch 2"), Verdict.FLAKY)
        if check.verdict is not Verdict.PASSED:
            return check
        told = [check.detail]
        room = free_memory(self.problem.device) // 4
        group = max(REPEATS, room // max(1, sum(x.nbytes for x in (result.indices, result.values, result.status) if x is not None)))
        for begin in range(0, self.launches, group):
            self.phase("launch")
            again, how = in_a_row(self._prepared(), self.problem, min(group, self.launches - begin))
            for number, other in enumerate(again, 3 + begin):
                check = self._same("run-to-run", other, result, (f"launch {number}", "launch 2"), Verdict.FLAKY)
                if check.verdict is not Verdict.PASSED:
                    return check
                told += [check.detail] if check.detail not in told else []
        in_groups = f", {group} at a time" if self.launches > group else ""
        check.detail = f"{2 + self.launches} launches, {self.launches} of them {how}{in_groups}: {'; '.join(told)}"
        return check

    def _after_another(self, result: TopkResult) -> Check:
        """Launch on another problem of the same shape, then as before: an arm that keeps something may bring it along. In the other
        one q is in reverse order, every row, also one that was short or empty, sees all keys, and even rows score higher than before,
        odd ones lower: a threshold that is carried over is then too strict in some and too loose in others."""
        p = self.problem
        sign = torch.where(torch.arange(p.num_q, device=p.device) % 2 == 0, 2.0, -1.0)[:, None]
        other = dataclasses.replace(p, q_fp8=p.q_fp8.flip(0), weights=p.weights.abs() * sign, ks=torch.zeros_like(p.ks),
                                    ke=torch.full_like(p.ke, p.s_kv), requests=((0, p.num_q, 0, p.s_kv),))
        self.kernel.prepare(other)()
        check = self._same("after-another", self._taken(self._prepared()()), result, ("after another problem", "before"))
        if check.verdict is Verdict.PASSED:
            check.detail = f"after a launch on other queries over all keys: {check.detail}"
        return check

    def _inputs_unchanged(self) -> Check:
        now = self.inputs.digests()
        changed = [name for name in self.digests if name != "all" and now[name] != self.digests[name]]
        if changed:
            detail = f"the arm wrote into {', '.join(changed)}"
            return Check("inputs-unchanged", Verdict.FAILED, detail, bad=len(changed), total=len(now) - 1)
        return Check("inputs-unchanged", Verdict.PASSED, "every input as before", total=len(now) - 1)

    def _choice(self, run: TopkRun, found: Tally, judged: torch.Tensor) -> list[Check]:
        """The choice itself: form, members, own scores, values, and what the arm says of its rows."""
        result, band, windows, expected = run.result, self.band, self.windows, self.expected
        form, bad_form = checks.shape(result.indices, expected.count, judged, windows, band)
        choice = expected.valid > self.problem.topk
        some = [form, checks.members(found, result.indices, band, judged, choice, windows), checks.nan_chosen(found, judged, windows)]
        self.phase("launch")  # the arm's own scores are its own doing
        own = checks.own_scores(result, judged, windows, band)
        self.phase("judge")
        some += [own.check, checks.values(result, found.scores, own.chosen, self._score_error, windows, band)]
        some.append(relations.status(result, bad_form | own.wrong | (found.wrong & judged), windows))
        recall = (found.hits.double() / expected.count.clamp(min=1)).clamp(max=1)[expected.count > 0]
        run.extra = {
            "recall worst": float(recall.min()) if len(recall) else 1.0, "recall mean": float(recall.mean()) if len(recall) else 1.0,
            "members dropped": float(found.dropped.sum()), "members extra": float(found.extra.sum()),
            "value deficit": min(checks.BIGGEST, float(found.deficit.max()))}
        return [check for check in some if check]

    def _score_error(self, row0: int, row1: int, indices: torch.Tensor) -> torch.Tensor:
        return self.expected.score_error(self.kernel.accumulate, row0, row1, indices)

    def _against_dense(self, run: TopkRun) -> list[Check]:
        """Against torch_dense on the same inputs: the keys, and what they do downstream."""
        if self.kernel.name == PEER or PEER not in KERNELS:
            return []
        self.phase("judge")
        peer: TopkKernel = KERNELS[PEER]  # type: ignore[assignment]
        dense = self._taken(peer.prepare(self.problem)())
        found: list[Check] = []
        if self.kernel.arm == "litetopk":
            eps = self.band.eps + self.expected.eps[peer.accumulate]
            check, keys = relations.dense_vs_litetopk(run.result, dense, relations.band_of_arm(dense, self.band, eps), self.windows)
            run.extra["keys unlike torch_dense"] = float(keys)
            found.append(check)
        self.phase("judge")
        after, run.extra["downstream relative error"] = downstream(run.result, dense, self.band, self.inputs.case.seed, self.windows)
        return [*found, after] if after else found

    def _note(self, run: TopkRun) -> str:
        """What a reader must know: rows that were not simply scanned, that no row had anything to choose, and relations left out."""
        notes = []
        if set(run.ways) - {"scan"}:
            notes.append(f"rows: {relations.in_words(run.ways)}")
        if not any(check.name == "set" for check in run.checks):
            notes.append("no set check: in every row all valid keys are chosen, or all scores tie")
        notes += [f"not run: {reason}" for reason in self.missing]
        return "; ".join(notes)
