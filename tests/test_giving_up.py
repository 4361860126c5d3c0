"""When an arm is asked no more, in an Asker whose worker is a table of what each arm does."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.asking import Asker, Settings
from harness.client import WorkerDied, WorkerOptions
from harness.record import Record
from harness.verdicts import Verdict

ARMS = ["none", "backscan", "metadata"]
PASSED, HUNG, CRASHED = Verdict.PASSED, Verdict.TIMEOUT, Verdict.CRASHED


class Told(Asker):
    """An Asker that is told what becomes of (case, arm); the rest pass. asked: what a worker was asked for."""

    def __init__(self, fates: dict[tuple[str, str], Verdict], give_up: int) -> None:
        self.records: list[Record] = []
        super().__init__(WorkerOptions("cpu", False, (), 1), Settings(give_up=give_up), Path("/dev/null"), self.records.append)
        self.fates, self.asked = fates, []  # type: ignore[var-annotated]

    def _ask(self, name: str, case: str, arms: list[str], keep: Callable[[Record], None], timed: bool = True) -> None:
        for arm in arms:
            self.asked.append((case, arm))
            fate = self.fates.get((case, arm), PASSED)
            if fate in (HUNG, CRASHED):
                raise WorkerDied(fate, "it died", f"{name}/{arm}", "launch")
            keep(Record(case, f"{name}/{arm}", fate))

    def verdicts(self, *cases: str) -> list[list[Verdict]]:
        for case in cases:
            self.run_case("k", case, ARMS)
        return [[next(r.verdict for r in self.records if (r.case, r.source) == (case, arm)) for arm in ARMS] for case in cases]


def test_an_arm_that_hung_twice_is_asked_no_more() -> None:
    asker = Told({(case, "none"): HUNG for case in "abc"}, 2)
    assert asker.verdicts("a", "b", "c") == [[HUNG, PASSED, PASSED], [HUNG, PASSED, PASSED], [Verdict.SKIPPED, PASSED, PASSED]]
    assert asker.records[-3].detail == "given up: hung on 2 cases before" and ("c", "none") not in asker.asked


def test_a_crash_counts_and_a_pass_between_does_not() -> None:
    assert Told({("a", "none"): CRASHED, ("b", "none"): CRASHED}, 2).verdicts("a", "b", "c")[2][0] is Verdict.SKIPPED
    between = Told({("a", "none"): HUNG, ("c", "none"): HUNG}, 2)
    assert [row[0] for row in between.verdicts("a", "b", "c", "d")] == [HUNG, PASSED, HUNG, PASSED]


def test_a_kernel_that_hangs_arm_after_arm_is_given_up_whole() -> None:
    asker = Told({(case, arm): HUNG for case in "ab" for arm in ARMS}, 2)
    assert asker.verdicts("a", "b") == [[HUNG, HUNG, Verdict.SKIPPED], [Verdict.SKIPPED] * 3]
    assert next(record.detail for record in asker.records if record.verdict is Verdict.SKIPPED) == "given up: k hung 2 times in a row"
    assert len(asker.asked) == 2


def test_a_kernel_that_crashes_arm_after_arm_is_not() -> None:
    assert Told({("a", arm): CRASHED for arm in ARMS}, 2).verdicts("a", "b") == [[CRASHED] * 3, [PASSED] * 3]


def test_nobody_is_given_up_unless_asked_for() -> None:
    asker = Told({(case, arm): HUNG for case in "abc" for arm in ARMS}, 0)
    assert asker.verdicts("a", "b", "c") == [[HUNG] * 3] * 3
