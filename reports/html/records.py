"""What a run's records are on the page: the matrix of cases and arms, failures with pictures, plots, every record in full."""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from markupsafe import Markup

from cases import family_of
from harness.record import Record
from harness.verdicts import SEVERITY, SOURCES, Check, Verdict
from reports import failure
from reports.cells import labels, names
from reports.frame import reason
from reports.html import plots_groups, plots_margins, plots_sweeps
from reports.html.figures import Plot, microseconds
from reports.html.parts import Cell, Finding, Section, level, render, section, steps, table
from reports.html.picture import Drawn, draw
from reports.html.plots_groups import Line
from reports.table import by_family, legend
from reports.topk_table import ORDER

ABOUT_TIMES = ("time in ms", "noise", "clocks")
"""How the lines of a table's legend begin that a matrix needs, too."""
TELLING = ("reference", "set", "shape")
"""The checks that say most of what is wrong."""
LONGEST = 160
OPEN, IN_FULL = 8, 1
"""Failures that are unfolded, and those of which the text is, too; paper shows all."""
Options = Callable[[Record], list[str]]


@dataclasses.dataclass(frozen=True)
class Shown:
    """A check of a failure with what can be seen of it: the picture, and how many elements differ by how many ULP (step, count, share of
    the largest in percent)."""

    check: Check
    picture: Drawn | None
    ulp: list[tuple[str, int, float]]


@dataclasses.dataclass(frozen=True)
class Failure:
    """A record that did not pass, or another that has a place on the page. text: in full; why: in a line; told_as: the arm before it that
    has the same findings, or ""; number: its place among the failures, from 0, or -1 of what stays folded."""

    anchor: str
    record: Record
    label: str
    level: str
    text: str
    why: str = ""
    told_as: str = ""
    shown: list[Shown] = dataclasses.field(default_factory=list)
    number: int = -1

    @property
    def unfolded(self) -> bool:
        """Whether its pictures are seen at once."""
        return 0 <= self.number < OPEN

    @property
    def in_full(self) -> bool:
        """Whether its text is seen at once."""
        return self.unfolded and (self.number < IN_FULL or bool(self.told_as))

    @property
    def lines(self) -> list[tuple[str, str]]:
        """See `told_lines`."""
        return told_lines(self.text)


def anchors(anchor: str, records: list[Record]) -> list[str]:
    """An id for each record."""
    return [f"{anchor}-r{number}" for number in range(len(records))]


# --- matrix -----------------------------------------------------------------------------------------------------------


def matrix(anchor: str, records: list[Record]) -> Section:
    """Cases by arms, a table a family; a cell leads to its record."""
    links = dict(zip(map(id, records), anchors(anchor, records)))
    tables = Markup().join(_matrix(group, links) for group in by_family(records) if group)
    return Section(f"{anchor}-matrix", "Verdicts", tables or render("nothing", text="There are no records."))


def _matrix(records: list[Record], links: dict[int, str]) -> Markup:
    cases = list(dict.fromkeys(record.case for record in records))
    arms = sorted(dict.fromkeys((record.kernel, record.source) for record in records), key=lambda arm: _place(arm, records))
    cells: dict[tuple[str, str, str], Cell] = {}
    for record in sorted(records, key=lambda record: SEVERITY.index(record.verdict)):  # of two of one arm the worse
        cells[record.case, record.kernel, record.source] = _cell(record, links[id(record)])
    heads: list[tuple[str, int]] = []
    for kernel, _ in arms:
        heads = [*heads[:-1], (kernel, heads[-1][1] + 1)] if heads and heads[-1][0] == kernel else [*heads, (kernel, 1)]
    common, own = labels(cases)
    rows = [(own[case].replace(",", ", "), [cells.get((case, *arm)) for arm in arms]) for case in cases]
    told = [line for line in legend(records).split("\n") if line.startswith(ABOUT_TIMES)]
    return render("matrix", family=records[0].family, heads=heads, arms=[source for _, source in arms], rows=rows,
                  common=common.replace(",", ", "), legend=told)


def _place(arm: tuple[str, str], records: list[Record]) -> tuple[int, int]:
    """Kernels as they come, their arms in the usual order; of indexer_topk dense arms first."""
    kernel, source = arm
    kernels = list(dict.fromkeys(record.kernel for record in records))
    if source in ORDER:
        return ORDER.index(source), kernels.index(kernel)
    return kernels.index(kernel), SOURCES.index(source) if source in SOURCES else len(SOURCES)


def _cell(record: Record, link: str) -> Cell:
    """The verdict, then what did not pass, or the time."""
    wrong = wrong_checks(record)
    lines = [record.verdict.value]
    if wrong:
        lines.append(wrong[0] + (f" +{len(wrong) - 1}" if len(wrong) > 1 else ""))
    elif record.verdict not in (*failure.HARMLESS, Verdict.VACUOUS) and " in phase " in record.detail:
        lines.append(record.detail.partition(" in phase ")[2].partition(":")[0].partition(",")[0][:24])
    if record.time and record.time.us:
        lines.append(microseconds(statistics.median(record.time.us)))
    return Cell(level(record.verdict), lines, link)


def wrong_checks(record: Record) -> list[str]:
    """The names of those that did not pass, the most telling first."""
    wrong = [check.name for check in record.checks if check.verdict not in failure.HARMLESS]
    return sorted(wrong, key=lambda name: name not in TELLING)


# --- what is wrong ----------------------------------------------------------------------------------------------------


def findings(anchor: str, records: list[Record]) -> list[Finding]:
    """What did not pass, each kind once: the same checks of one kernel. Worst first."""
    links, own = anchors(anchor, records), names(list(dict.fromkeys(record.case for record in records)))
    groups: dict[tuple[str, Verdict, frozenset[str]], list[int]] = {}
    for number, record in enumerate(records):
        if record.verdict not in failure.HARMLESS:
            wrong = frozenset(failure.ARM_NAMES.sub("arm", check.name) for check in record.checks
                              if check.verdict not in failure.HARMLESS and check.name != failure.ONCE)
            groups.setdefault((record.kernel, record.verdict, wrong), []).append(number)
    found = []
    for (kernel, verdict, _), group in groups.items():
        of = [records[number] for number in group]
        arms, cases = ",".join(dict.fromkeys(r.source for r in of)), list(dict.fromkeys(r.case for r in of))
        first = shortened(own[cases[0]].replace(",", ", "), LONGEST)
        where = f"{kernel}/{arms.replace(',', ', ')} on {first if len(cases) == 1 else f'{len(cases)} cases, first {first}'}"
        found.append((-SEVERITY.index(verdict), -len(group), Finding(verdict.value, level(verdict), where, _why(of[0]), links[group[0]])))
    return [each for _, _, each in sorted(found, key=lambda item: item[:2])]


def _why(record: Record) -> str:
    """The checks, and what the localiser says of the fault: what explains it, else the border that fits."""
    wrong = wrong_checks(record)
    lines = [line for check in record.checks if check.name in wrong for line in check.where]
    told = next((line for start in ("explained by: ", "pattern: ") for line in lines if line.startswith(start)), "")
    if not wrong:
        return shortened(reason(record), LONGEST)
    if not told:
        telling = min(record.checks, key=lambda check: (check.name not in wrong, check.name not in TELLING))
        told = f"{telling.name}: {telling.detail}"
    return f"{', '.join(wrong)}; {shortened(told.partition('; ')[0], LONGEST)}"


def shortened(text: str, most: int) -> str:
    """At most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def told_lines(text: str) -> list[tuple[str, str]]:
    """The lines of a failure's text without their indent, each with the classes that it has on the page: how far it is indented, and what
    it says of a check."""
    found = []
    for line in text.splitlines():
        plain = line.lstrip()
        word = plain.partition(" ")[0]
        kind = level(Verdict(word)) if word in Verdict.__members__ else ""
        found.append((f"i{min(3, (len(line) - len(plain) + 3) // 4)}{f' {kind}' if kind else ''}", plain))
    return found


# --- failures ---------------------------------------------------------------------------------------------------------


def failures(anchor: str, records: list[Record], options: Options) -> list[Section]:
    """Each record that did not pass, with its pictures. [] where all did."""
    bad = [(record, link) for record, link in zip(records, anchors(anchor, records)) if record.verdict not in failure.HARMLESS]
    if not bad:
        return []
    own = names(list(dict.fromkeys(record.case for record in records)))
    wrong, shown = [record for record, _ in bad], []
    texts = zip(bad, failure.describe_all(wrong, options), failure.told_as(wrong))
    for number, ((record, link), text, told_as) in enumerate(texts):
        pictures = [] if told_as else seen(record.checks)
        shown.append(Failure(link, record, own[record.case], level(record.verdict), text, _why(record), told_as, pictures, number))
    return [section(f"{anchor}-failures", f"What did not pass ({len(bad)})", "failures", failures=shown, steps=steps())]


def seen(checks: list[Check]) -> list[Shown]:
    """The checks that have something to see, the most telling first."""
    found = []
    for check in sorted(checks, key=lambda check: check.name not in TELLING):
        most = max(check.ulp.values(), default=0)
        ulp = [(step, count, 100 * count / most) for step, count in check.ulp.items()] if check.verdict is not Verdict.PASSED else []
        picture = draw(check.picture)
        if picture or ulp:
            found.append(Shown(check, picture, ulp))
    return found


# --- plots ------------------------------------------------------------------------------------------------------------


def plots(anchor: str, records: list[Record]) -> list[Section]:
    """Margins, times, sweeps, as far as there are any."""
    return [*margins(anchor, records), *times(anchor, records), *sweeps(anchor, records)]


def margins(anchor: str, records: list[Record]) -> list[Section]:
    """How near passing checks came to failing."""
    return _plots(f"{anchor}-margins", "Margins of checks that pass", plots_margins.plots(records, anchor))


def times(anchor: str, records: list[Record]) -> list[Section]:
    """Every sample."""
    return _plots(f"{anchor}-times", "Times", samples(anchor, records))


def sweeps(anchor: str, records: list[Record]) -> list[Section]:
    """Time over a number."""
    return _plots(f"{anchor}-sweeps", "Sweeps", plots_sweeps.plots(records, anchor))


def _plots(anchor: str, title: str, found: list[Plot]) -> list[Section]:
    return [section(anchor, title, "plots", plots=found)] if found else []


def samples(anchor: str, records: list[Record]) -> list[Plot]:
    """All samples: of sparse_prefill a plot a kernel, of indexer_topk one for all."""
    timed = [record for record in records if record.time and record.time.us]
    own = names(list(dict.fromkeys(record.case for record in timed)))
    sets: dict[tuple[str, str], dict[str, list[Line]]] = {}
    for record in timed:
        time = record.time
        assert time is not None
        topk = family_of(record.case) == "indexer_topk"
        title = "indexer_topk" if topk else record.kernel
        note = "" if record.verdict is Verdict.PASSED else "wrong"
        caption = f"contract {time.contract}, {time.cache}, {time.order}"
        sets.setdefault((title, caption), {}).setdefault(own[record.case], []).append(
            Line(record.kernel if topk else record.source, time.us, note))
    return [plot for number, ((title, caption), groups) in enumerate(sets.items())
            for plot in plots_groups.samples(list(groups.items()), title, f"{anchor}-times-{number}",
                                             f"{caption}. Left: every sample as a time; right: as its distance from the arm's median, with "
                                             "the quartiles as a bar.")]


# --- all of them ------------------------------------------------------------------------------------------------------


def every_record(anchor: str, records: list[Record], options: Options) -> list[Section]:
    """The records that passed or were skipped, in full; the others are among the failures. [] of none."""
    own = names(list(dict.fromkeys(record.case for record in records)))
    shown = [Failure(link, record, own[record.case], level(record.verdict), failure.describe(record, options(record), always=True))
             for record, link in zip(records, anchors(anchor, records)) if record.verdict in failure.HARMLESS]
    return [section(f"{anchor}-all", f"What passed or was skipped ({len(shown)})", "failures", failures=shown, steps=[])] if shown else []


def skipped(anchor: str, records: list[Record]) -> list[Section]:
    """Arms that were not run, each reason once. [] of none."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.verdict is Verdict.SKIPPED:
            groups.setdefault((record.kernel, reason(record)), []).append(record)
    rows = [[f"{kernel}/{','.join(dict.fromkeys(r.source for r in of))}", str(len({r.case for r in of})), why]
            for (kernel, why), of in groups.items()]
    return [Section(f"{anchor}-skipped", "Not run", table(["arm", "cases", "why"], rows))] if rows else []
