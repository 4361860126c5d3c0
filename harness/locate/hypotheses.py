"""Which suspected fault explains a wrong output: the reference again on some of the bad rows, as each fault would have computed them.

A hypothesis says which entries a faulty kernel would have used, or what it would have done to scales, sink or outputs (suspects.py lists
them). The one under which most of the bad elements are within budget, and the fewest good ones are not, is named with the share that it
explains. No launch is needed: only what the arm gave and what it was given.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from arms.kernel import Outputs
from cases.inputs import Inputs
from cases.sparse_prefill import D_V
from cases.values import Values
from harness.compare import margin, values_differ
from references.sparse_prefill import Expected, full_precision, reference

NAMES = ("out", "max_logits", "lse")
BAD_ROWS, GOOD_ROWS, HEADS = 16, 8, 8
WORK = {"cpu": 1 << 30, "cuda": 1 << 36}
"""Floating-point operations that one hypothesis may take: fewer rows are looked at where they are wide."""
LEAST = 0.5  # share of the bad elements that the named hypothesis explains at least
HOPE = 0.2  # and on the few rows on which all are tried first
ELSEWHERE = 0.02  # weight of what a hypothesis would do to rows that are right
TIE = 1e-3  # scores this near are one
FREEDOM = 0.1  # by how much more a hypothesis that is fitted to the outputs must explain than one that is not


@dataclasses.dataclass(frozen=True)
class View:
    """What is looked at: some query rows and heads of a case.

    rows int64 [n], heads int64 [m]; entry int64 [n, topk], their indices as they are; length int64 [n] and given: topk_length (topk where
    none was given); every_length int64 [s_q]; counts bool [n, topk], the entries that count. All on the inputs' device.
    """

    inputs: Inputs
    expected: Expected
    rows: torch.Tensor
    heads: torch.Tensor
    every_length: torch.Tensor
    given: bool

    @functools.cached_property
    def entry(self) -> torch.Tensor:
        return self.inputs.indices[self.rows, 0].long()

    @functools.cached_property
    def counts(self) -> torch.Tensor:
        return self.inputs.valid_entries[self.rows]

    @functools.cached_property
    def real(self) -> torch.Tensor:
        """bool [n, topk]: entries that name a key, whether or not they are before the length."""
        return (self.entry >= 0) & (self.entry < self.inputs.case.s_kv)

    @property
    def position(self) -> torch.Tensor:
        return torch.arange(self.entry.shape[1], device=self.entry.device)

    @property
    def length(self) -> torch.Tensor:
        """int64 [n, 1]."""
        return self.every_length[self.rows][:, None]

    @functools.cached_property
    def right(self) -> torch.Tensor:
        """int64 [n, topk]: the entries that count, -1 for the others."""
        return torch.where(self.counts, self.entry, -1)

    def part(self, got: Outputs, bad: int, good: int, heads: int) -> View:
        """A view of fewer of its rows and heads."""
        ratios = margins((got[0][self.rows][:, self.heads], got[1][self.rows][:, self.heads], got[2][self.rows][:, self.heads]),
                         self.some(self.expected))
        pairs = (ratios[0] > 1).any(-1) | (ratios[1] > 1) | (ratios[2] > 1)
        kept = _spread(pairs.any(0).nonzero()[:, 0], heads)
        return dataclasses.replace(self, rows=self.rows[_some_rows(pairs[:, kept], bad, good)], heads=self.heads[kept])

    def some(self, expected: Expected, rows: torch.Tensor | None = None, heads: torch.Tensor | None = None) -> Expected:
        """The rows and heads looked at (or others in their place) of a whole case's expected values."""
        rows, heads = self.rows if rows is None else rows, self.heads if heads is None else heads
        return Expected(**{f.name: getattr(expected, f.name)[rows][:, heads] for f in dataclasses.fields(Expected)})


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A suspected fault. What is None is as it should be.

    entries: view -> int64 [n, any width], the kv rows that are used, -1 for none, s_kv for a row of zeros; a View method gives what is
    right. change: view -> new values of q_scale, kv_scale (floats) or sink (fp32 [h_q] or None). after: (expected of these rows and heads,
    view) -> the same as the fault leaves it. fitted: (the outputs of these rows and heads, expected) -> the same, with a
    number that is read off the outputs themselves; None where it cannot be the fault.
    """

    name: str
    entries: Callable[[View], torch.Tensor] | None = None
    change: Callable[[View], dict[str, float | torch.Tensor | None]] | None = None
    after: Callable[[Expected, View], Expected] | None = None
    fitted: Callable[[Outputs, Expected], Expected | None] | None = None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How well a hypothesis does. share: of the bad elements, those within budget under it; harm: of the good ones, those that then are
    not. Each output that has bad elements weighs the same in `score`. others: names of hypotheses that cannot be told from it here."""

    name: str
    share: float
    score: float
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        others = f" (here the same as: {'; '.join(self.others[:5])})" if self.others else ""
        return f"explained by: {self.name}; under it {self.share:.0%} of the bad elements are within budget{others}"


def margins(got: Outputs, expected: Expected) -> list[torch.Tensor]:
    """Error over budget of out, max_logits and lse, elementwise."""
    return [margin(value, getattr(expected, name), getattr(expected, f"{name}_budget")) for name, value in zip(NAMES, got)]


def make_view(inputs: Inputs, expected: Expected, bad: list[torch.Tensor], length: torch.Tensor | None) -> View:
    """Some of the bad rows and heads, and a few good rows, as many as the work allows. bad: the outputs' masks; length: int32 [s_q]."""
    case, device = inputs.case, inputs.device
    pairs = bad[0].any(-1) | bad[1] | bad[2]
    heads = _spread(pairs.any(0).nonzero()[:, 0], HEADS)
    room = WORK[device.type] // (len(heads) * case.topk * 2 * (case.d_qk + 512) * 3)
    every = torch.full((case.s_q,), case.topk, device=device) if length is None else length.long()
    return View(inputs, expected, _some_rows(pairs, min(BAD_ROWS, room), min(GOOD_ROWS, room // 4)), heads, every, length is not None)


def _some_rows(pairs: torch.Tensor, bad: int, good: int) -> torch.Tensor:
    """int64: at least one of the rows with something bad, and some of the others, ascending. pairs: bool [s_q, heads]."""
    wrong = pairs.any(1)
    rows = [_spread(wrong.nonzero()[:, 0], max(1, bad)), _spread((~wrong).nonzero()[:, 0], good)]
    ordered: torch.Tensor = torch.cat(rows).sort().values
    return ordered


def _spread(values: torch.Tensor, most: int) -> torch.Tensor:
    """At most that many of the values, from first to last."""
    if len(values) <= most or most <= 0:
        return values[: max(0, most)]
    return values[torch.linspace(0, len(values) - 1, most, device=values.device).round().long()]


def explain(got: Outputs, view: View, hypotheses: list[Hypothesis]) -> Explanation | None:
    """The hypothesis that explains the wrong outputs best, if one explains half of them. got: of the whole case.

    All are tried on a few rows first. The first of the list is taken where several do equally well; others that use the same entries are
    named as well.
    """
    full = Contest(got, view)
    if not any(bool(mask.any()) for mask in full.bad):
        return None
    few = Contest(got, view.part(got, 3, 1, 2), quick=True)
    hopeful = [hypothesis for hypothesis in hypotheses if few.score(hypothesis) >= HOPE]
    for hypothesis in hopeful:
        full.score(hypothesis)
    best = full.best
    return best if best is not None and best.share >= LEAST and best.score >= LEAST else None


class Contest:
    """Hypotheses on one view, and the best so far. quick: without budgets of their own, to see which are worth a closer look."""

    def __init__(self, got: Outputs, view: View, quick: bool = False) -> None:
        self.quick = quick
        out, max_logits, lse = (value[view.rows][:, view.heads] for value in got)
        self.view, self.seen = view, (out, max_logits, lse)
        right = view.some(view.expected)
        self.bad, self.off = [ratio > 1 for ratio in margins(self.seen, right)], errors(self.seen, right)
        self.rows = self.bad[0].any(-1).any(1) | self.bad[1].any(1) | self.bad[2].any(1)
        self.known: dict[bytes, Explanation] = {_signature(view.right): Explanation("", 0.0, 0.0)}
        self.best: Explanation | None = None

    def score(self, hypothesis: Hypothesis) -> float:
        """Try one: how well it does, 0 for one that changes nothing."""
        signature = _signature(hypothesis.entries(self.view)) if hypothesis.entries else None
        if signature in self.known:  # the same entries as another's, or as they should be
            twin = self.known[signature]
            if self.best is not None and twin.name == self.best.name:
                self.best = dataclasses.replace(self.best, others=(*self.best.others, hypothesis.name))
            return twin.score
        expected = expected_under(hypothesis, self.view, self.quick)
        if hypothesis.fitted and expected is not None:
            expected = hypothesis.fitted(self.seen, expected)
        if expected is None:
            return 0.0
        ratios, now = margins(self.seen, expected), errors(self.seen, expected)
        fits = [(ratio <= 1) & (new < old / 2) for ratio, new, old in zip(ratios, now, self.off)]
        found = _judge(hypothesis.name, self.bad, fits, [ratio > 1 for ratio in ratios], self.rows)
        if signature is not None:
            self.known[signature] = found
        if self.best is None or found.score > self.best.score + (FREEDOM if hypothesis.fitted else TIE):
            self.best = found
        elif hypothesis.fitted:
            pass  # it holds whatever is a case of it
        elif found.score > self.best.score - TIE:
            self.best = dataclasses.replace(self.best, others=(*self.best.others, found.name))
        return found.score


def _signature(entries: torch.Tensor) -> bytes:
    """Equal for equal multisets of used entries, row by row."""
    ordered = entries.clamp(min=-1).sort(1, descending=True).values
    width = int((ordered >= 0).sum(1).max()) if ordered.numel() else 0
    return ordered[:, :width].int().cpu().numpy().tobytes() + bytes([width % 251])


def errors(got: Outputs, expected: Expected) -> list[torch.Tensor]:
    """Distance of each element to what is expected, infinite where only one of them is a number."""
    pairs = [(value.to(want.dtype), want) for value, want in ((value, getattr(expected, name)) for name, value in zip(NAMES, got))]
    return [torch.where(values_differ(value, want), (value - want).abs().nan_to_num(torch.inf), 0.0) for value, want in pairs]


def _judge(name: str, bad: list[torch.Tensor], fits: list[torch.Tensor], wrong: list[torch.Tensor], rows: torch.Tensor) -> Explanation:
    """bad: which elements are out of budget; fits: which are within it under the hypothesis, and nearer than before (a budget that covers
    everything explains nothing); wrong: which are out of it then; rows: bool [n], those with a bad element. Rows that are right weigh
    little: a fault may be one of some rows."""
    cured, total, shares, harm = 0, 0, [], 0.0
    for was, good, now in zip(bad, fits, wrong):
        count, fixed = int(was.sum()), int((was & good).sum())
        cured, total = cured + fixed, total + count
        shares += [fixed / count] if count else []
        for which, weight in ((rows, 1.0), (~rows, ELSEWHERE)):
            others = ~was[which]
            harm += weight * int((others & now[which]).sum()) / max(1, int(others.sum()))
    return Explanation(name, cured / total, sum(shares) / len(shares) - harm)


def expected_under(hypothesis: Hypothesis, view: View, quick: bool = False) -> Expected | None:
    """Expected values of the view's rows and heads under a hypothesis; None where it has nothing to change. quick: with loose budgets,
    made from those of the right values."""
    change = hypothesis.change(view) if hypothesis.change else {}
    if hypothesis.change and not change:
        return None
    if hypothesis.entries or change:
        entries = hypothesis.entries(view) if hypothesis.entries else view.right
        expected = _quickly(view, entries, change) if quick else reference(_problem(view, entries, change), view.expected.out.dtype)
    else:
        expected = view.some(view.expected)
    return hypothesis.after(expected, view) if hypothesis.after else expected


def _quickly(view: View, entries: torch.Tensor, change: dict[str, float | torch.Tensor | None]) -> Expected:
    """out, lse and max_logits as the reference defines them, in a quarter of its operations."""
    inputs, dtype = view.inputs, view.expected.out.dtype
    values = {name: change.get(name, getattr(inputs.values, name)) for name in ("q_scale", "kv_scale")}
    used, real = entries >= 0, (entries >= 0) & (entries < inputs.case.s_kv)  # one at s_kv is a row of zeros
    key = torch.where(real, entries, 0)
    k = (_taken(inputs.kv, key.view(-1)).view(*key.shape, -1).to(dtype) * values["kv_scale"]).masked_fill_(~real[..., None], 0.0)
    q = _taken(inputs.q, view.rows)[:, view.heads].to(dtype) * values["q_scale"]
    with full_precision(entries.device):
        score = (torch.bmm(q, k.mT) * inputs.case.scale).masked_fill_(~used[:, None], -torch.inf)
        lse = torch.logsumexp(score, -1)
        out = torch.bmm(torch.softmax(score, -1), k[..., :D_V])
    sink = change.get("sink", inputs.sink)
    if isinstance(sink, torch.Tensor):
        out = out * torch.sigmoid(lse - sink[view.heads].to(dtype))[..., None]
    empty = ~used.any(1)[:, None]
    right = view.some(view.expected)
    loose = {f"{name}_budget": 8 * getattr(right, f"{name}_budget") + 1e-3 for name in NAMES}
    out, lse, highest = out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, torch.inf), score.amax(-1)  # -inf where empty
    return Expected(out, lse, highest, row_budget=right.row_budget, **loose)


def _problem(view: View, entries: torch.Tensor, change: dict[str, float | torch.Tensor | None]) -> Inputs:
    """The case of these rows, heads and entries alone, over the kv rows that they name and one of zeros."""
    inputs = view.inputs
    s_kv = inputs.case.s_kv
    keys = entries[(entries >= 0) & (entries < s_kv)].unique()
    index = torch.searchsorted(keys, entries.clamp(0, s_kv - 1)) if len(keys) else torch.zeros_like(entries)
    index = torch.where(entries == s_kv, len(keys), torch.where((entries >= 0) & (entries < s_kv), index, -1)).int()
    case = dataclasses.replace(inputs.case, s_q=len(view.rows), h_q=len(view.heads), s_kv=len(keys) + 1, topk=entries.shape[1], rows="full",
                               requests="-", pad_rows=0, metadata_rows=0, index_topk=0, lead=0, holes=0.0, tail="pad")
    old = inputs.values
    values = Values(_taken(old.q, view.rows)[:, view.heads], _with_zeros(old.kv, keys),
                    None if old.q_fp8 is None else _taken(old.q_fp8, view.rows)[:, view.heads],
                    None if old.kv_fp8 is None else _with_zeros(old.kv_fp8, keys), old.q_scale, old.kv_scale)
    values = dataclasses.replace(values, **{name: value for name, value in change.items() if name != "sink"})  # type: ignore[arg-type]
    sink = change.get("sink", inputs.sink)
    assert sink is None or isinstance(sink, torch.Tensor)
    full = torch.full((len(view.rows),), entries.shape[1], device=entries.device)
    return Inputs(case, values, index[:, None], full.int(), None if sink is None else sink[view.heads], full,
                  torch.ones(len(keys) + 1, dtype=torch.bool, device=entries.device))


def _taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, by bytes, since few operations know e4m3."""
    if tensor.element_size() > 1:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def _with_zeros(kv: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """These kv rows and one of zeros behind them."""
    out = torch.zeros((len(keys) + 1, *kv.shape[1:]), dtype=torch.float32, device=kv.device).to(kv.dtype)
    raw = torch.uint8 if kv.element_size() == 1 else torch.int16
    out.view(raw)[: len(keys)] = kv.view(raw)[keys]
    return out
