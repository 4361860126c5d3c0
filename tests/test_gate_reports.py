"""What a gate's screen and page say, from transitions made by hand and by harness/transitions.py from records."""
from __future__ import annotations

import dataclasses
import io
import itertools
from pathlib import Path

import pytest
from processes import ROOT, invoke
from rich.console import Console

from harness.comparison import Burst, Change, Estimate, Pairing, Round, Rule, TimeComparison, TimeVerdict, Transition
from harness.gate_folder import LIVE, STORED, GateInfo, SideInfo
from harness.record import Record
from harness.transitions import transition
from harness.verdicts import Check, Verdict
from reports import gate
from reports.gate_page import markdown, untold_texts
from reports.gate_things import signature, things

SOURCES = ("none", "backscan", "metadata")
ROWS = ("full", "half", "ramp", "ragged", "mixed", "short", "allpad", "causal,requests=10/300+6,pad_rows=4",
        "ragged,holes=0.02,sink=normal", "mixed,values=integer,tail=wild,h_q=128")
CASES = [f"sparse_prefill:s_q={s_q},rows={rows}" for s_q in (16, 26, 4096) for rows in ROWS]
RULE = Rule(0.02, 1.0, source="calibrated: 12 A/A comparisons, 0 fired, sees 3.1 %")
MACHINE = {"device": "cuda", "gpu": "NVIDIA H200", "driver": "590.1", "cpu": "EPYC", "python": "3.12.3", "torch": "2.11.0"}


def side(what: str, version: str, kind: str = LIVE) -> SideInfo:
    python = "" if kind == STORED else f"/opt/{version}/bin/python"
    return SideInfo(what, kind, python, {**MACHINE, "sgl-flash-mla": version}, [{"name": "flash_mla", "version": version}])


def info(**changes: object) -> GateInfo:
    base, candidate = (side(f"sgl-flash-mla=={version}", version) for version in ("1.0.0", "1.1.0"))
    found = GateInfo("2027-01-02T03:04:05+00:00", ["threearm", "gate", "--base", base.what], CASES, [], base, candidate,
                     {"bitwise": False, "time": "span"}, finished="2027-01-02T03:08:05+00:00")
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def good(case: str, arm: str, bits: str = "1", margin: float = 0.31) -> Record:
    checks = [Check("run-to-run", Verdict.PASSED), Check("reference", Verdict.PASSED, margins={"out": margin, "lse": 0.125}, total=64)]
    return Record(case, arm, Verdict.PASSED, checks=checks, inputs={"all": "i", "q": "i"},
                  outputs={"out": bits, "lse": "1", "max_logits": "1"})


def wrong(case: str, arm: str, **reference: object) -> Record:
    values: dict[str, object] = {"detail": "over budget: out in 2,048 of 6,144", "margins": {"out": 2.5, "lse": 0.25},
                                 "bad": 2048, "total": 6144, "first": ["[0, 1, 2]  want 1  got 2  budget 0.4"],
                                 "where": ["in out:", "rows 16..31 (16 of 32)", "explained by: topk_length - 64; under it 100% of the bad "
                                           "elements are within budget"], **reference}
    check = Check("reference", Verdict.FAILED, **values)  # type: ignore[arg-type]
    return Record(case, arm, Verdict.FAILED, checks=[Check("padded", Verdict.FAILED, "differs in 3 rows"), check],
                  inputs={"all": "i", "q": "i"}, outputs={"out": "bad", "lse": "1", "max_logits": "1"})


def ended(case: str, arm: str, verdict: Verdict, detail: str) -> Record:
    return Record(case, arm, verdict, detail)


def time(verdict: TimeVerdict, ratio: float, half: float = 0.004, base_us: float = 120.0, throttled: int = 0) -> TimeComparison:
    found = Estimate(ratio, ratio - half, ratio + half, base_us, base_us * ratio, 3, 6)
    rounds = [Round([Burst("base", [base_us] * 5), Burst("candidate", [base_us * ratio] * 5)])]
    why = f"{(ratio - 1) * 100:+.1f} % [{(ratio - half - 1) * 100:+.1f} %, {(ratio + half - 1) * 100:+.1f} %], threshold 2 %"
    return TimeComparison(verdict, why, RULE, "span", "L2 flushed", [rounds] * 3, estimate=found, stopped="the interval is narrow enough",
                          samples=360, throttled=throttled, least_us=40.0, least_of="1.2 GB at 4.8 TB/s")


def compared(base: Record | None, candidate: Record | None, numbers: Check | None = None,
             timed: TimeComparison | None = None) -> Transition:
    some = candidate or base
    assert some is not None
    found = transition(Pairing(some.case, base.arm if base else some.arm, some.arm), base, candidate, numbers)
    return dataclasses.replace(found, time=timed)


def apart(ulp: int = 1) -> Check:
    detail = f"out differs in 412 of 6144; equal: max_logits, lse; out: at most {ulp} ULP, 0.00049"
    return Check("numbers", Verdict.FAILED, detail, bad=412, total=6144,
                 where=["in out:", "rows 16..31 (16 of 32)", "columns 256..511 (256 of 512)"],
                 ulp={"1": 400, "2" if ulp < 3 else "3-4": 12},
                 first=["[16, 0, 256]  base 0.125  candidate 0.1255"])


def ninety() -> list[tuple[Record | None, Record | None, Transition]]:
    """90 comparisons, a dozen of them bad in most of the ways there are; the records of both sides."""
    found = []
    for number, (case, source) in enumerate(itertools.product(CASES, SOURCES)):
        arm = f"flash_mla/{source}"
        base: Record | None = good(case, arm)
        candidate: Record | None = good(case, arm)
        numbers, timing = None, time(TimeVerdict.SAME, 1 + 0.003 * (number % 5 - 2), throttled=number % 7)
        if number in (0, 1, 2, 5):
            candidate, timing = wrong(case, arm), None  # type: ignore[assignment]
        elif number == 7:
            candidate, timing = ended(case, arm, Verdict.CRASHED, "signal SIGSEGV in phase launch"), None  # type: ignore[assignment]
        elif number == 11:
            detail = "no answer for 75 s in phase launch (60 s + 12 launches of 2.5e9 operations at 2e9 a second)"
            candidate, timing = ended(case, arm, Verdict.TIMEOUT, detail), None  # type: ignore[assignment]
        elif number == 20:
            candidate, timing = wrong(case, arm, first=["[5, 1, 511]  want -0.1032  got nan  budget 0.00348"]), None  # type: ignore[assignment]
        elif number == 24:
            detail = "out differs in 1 of 6144; equal: max_logits, lse; 1 of 3 launches differ from the first"
            flaky = Check("run-to-run", Verdict.FLAKY, detail)
            candidate = dataclasses.replace(good(case, arm), verdict=Verdict.FLAKY, checks=[flaky])
            timing = None  # type: ignore[assignment]
        elif number in (30, 31, 32):
            base_2 = wrong(case, arm, detail="over budget: lse in 12 of 12", margins={"out": 0.3, "lse": 23e4},
                           where=["in lse:", "explained by: lse in base 2; under it 100% of the bad elements are within budget"])
            candidate, timing = dataclasses.replace(base_2, checks=base_2.checks[1:]), None  # type: ignore[assignment]
        elif number == 40:
            candidate, timing = None, None  # type: ignore[assignment]
        elif number in (50, 51, 52):
            candidate, numbers = good(case, arm, "2", margin=0.95 if number == 50 else 0.33), apart(number - 49)
        elif number in (60, 61):
            timing = time(TimeVerdict.SLOWER, 1.102 + number / 1000)
        elif number == 62:
            timing = time(TimeVerdict.UNRESOLVED, 1.02, half=0.03)
        elif number in (70, 71):
            base = candidate = wrong(case, arm)
            timing = None  # type: ignore[assignment]
        elif number == 80:
            base = candidate = ended(case, arm, Verdict.SKIPPED, "takes bf16, the case is fp8")
            timing = None  # type: ignore[assignment]
        elif number in (84, 85):
            timing = time(TimeVerdict.FASTER, 0.8)
        found.append((base, candidate, compared(base, candidate, numbers, timing)))
    return found


def screen(transitions: list[Transition], about: GateInfo, width: int, path: str = "") -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(gate.terminal(transitions, about, path))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def page(found: list[tuple[Record | None, Record | None, Transition]], about: GateInfo) -> str:
    base, candidate = ({(record.case, record.arm): record for sides in found if (record := sides[place])} for place in (0, 1))
    return markdown([each for _, _, each in found], about, base, candidate)


# --- the screen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_ninety_comparisons_fit_on_a_screen(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "runs/20270102-030405-gate-ab12"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "summary.md").touch()
    monkeypatch.chdir(tmp_path)
    lines = screen([found for _, _, found in ninety()], info(), width, folder)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert text.startswith("WORSE (exit 1): 12 of 89 comparisons got worse: 1 new crash, 1 new hang, 4 PASS->FAIL, 1 new NaN, 1 new "
                           "nondeterminism, 1 arm gone, 3 promises changed; besides, 2 SLOWER")
    assert "the others: 2 still failing, 3 numbers changed, 72 bitwise same, 1 not run on either side" in text
    assert "base sgl-flash-mla==1.0.0: sgl-flash-mla 1.0.0" in text
    assert "exit 1; all of it: runs/20270102-030405-gate-ab12/summary.md" in text
    titles = [line.split("  ")[0].partition(" flash_mla")[0].strip() for line in lines if "flash_mla/" in line and not line.startswith(" ")]
    assert titles == ["new crash", "new hang", "PASS->FAIL", "new NaN", "new nondeterminism", "arm gone", "promise changed", "SLOWER",
                      "UNRESOLVED", "still failing", "margin risen", "numbers changed"]


def test_the_same_thing_is_told_once() -> None:
    found = {thing.title: thing for thing in things([each for _, _, each in ninety()])}
    broke, base_2 = found["PASS->FAIL"], found["promise changed"]
    assert (broke.arms, len(broke.cases), len(broke.found)) == ("flash_mla/none,backscan,metadata", 2, 4)
    assert (base_2.arms, len(base_2.cases), base_2.why) == ("flash_mla/none,backscan,metadata", 1, "another base: lse in base 2")
    assert found["SLOWER"].shown.pairing.candidate == "flash_mla/backscan"  # the slower of the two
    assert found["numbers changed"].shown.pairing == found["numbers changed"].found[2].pairing  # the one that is most ULP apart
    assert found["margin risen"].why == "out 0.31 -> 0.95"
    assert signature("reference (like none - 64): 5 of 6") == signature("reference (like metadata - 128): 7 of 8")
    assert signature("reference: 5 of 6") != signature("set: 5 of 6")


def test_what_does_not_fit_is_counted() -> None:
    found = []
    for number, case in enumerate(CASES):
        crash = ended(case, f"kernel_{number}/none", Verdict.CRASHED, "signal SIGSEGV in phase launch")
        found.append(compared(good(case, crash.arm), crash))
    for width in (80, 200):
        lines = screen(found, info(), width)
        assert len(lines) <= 40
        shown = sum(line.startswith("new crash") for line in lines)
        assert 5 <= shown <= 15
        assert f"... and {30 - shown} more" in lines


def test_the_first_line_says_how_it_stands() -> None:
    same = [compared(good(case, "k/none"), good(case, "k/none")) for case in CASES]
    slower = [dataclasses.replace(same[0], time=time(TimeVerdict.SLOWER, 1.1)), *same[1:]]
    unsure = [dataclasses.replace(same[0], time=time(TimeVerdict.UNRESOLVED, 1.02, half=0.03)), *same[1:]]
    other = [compared(good(CASES[0], "k/none"), good(CASES[0], "k/none", "2"), apart()), *same[1:]]
    for found, about, said in [
            (same, info(), "OK (exit 0): nothing got worse in 30 comparisons"),
            (other, info(), "OK (exit 0): nothing got worse in 30 comparisons; 1 gave other numbers, within budget"),
            (other, info(options={"bitwise": True}), "WORSE (exit 1): 1 of 30 comparisons got worse: 1 numbers changed"),
            (slower, info(), "SLOWER (exit 3): the answers are as good as before; 1 of 1 times are SLOWER"),
            (unsure, info(), "UNRESOLVED (exit 4): nothing is known to be worse in 30 comparisons, but not everything could be told: "
                             "times 1 UNRESOLVED"),
            ([], info(), "VOID (exit 5): nothing was compared"),
            ([idle()], info(), "VOID (exit 5): nothing was compared: takes bf16, the case is fp8"),
            ([idle(), *same], info(), "OK (exit 0): nothing got worse in 30 comparisons"),
            ([idle(), *same], info(options={"named": True}), "UNRESOLVED (exit 4): nothing was tested of j: takes bf16, the case is fp8; "
                                                             "nothing is known to be worse in 30 comparisons"),
            (same, info(void=["no such device"]), "VOID (exit 5): no comparison: no such device"),
            (same, info(interrupted=True), "INCOMPLETE (exit 130): interrupted after 30 comparisons; so far OK: nothing got worse in "
                                           "30 comparisons")]:
        lines = screen(found, about, 300)
        assert lines[0] == said
        code = said.partition("exit ")[2].partition(")")[0]
        assert lines[-1] == f"exit {code}"
        assert markdown(found, about, {}, {}).startswith(f"**{said}**")


@pytest.mark.parametrize(("many", "code", "said"), [
    (0, 4, "after 0 comparisons"), (1, 4, "after 1 comparison; so far OK: nothing got worse in 1 comparison"),
    (3, 4, "after 3 comparisons; so far SLOWER: the answers are as good as before; 1 of 1 times are SLOWER"),
    (4, 1, "after 4 comparisons; so far WORSE: 1 of 4 comparisons got worse: 1 new crash; besides, 1 SLOWER")])
@pytest.mark.parametrize("interrupted", [True, False])
def test_a_gate_that_was_cut_short_is_told_so(many: int, code: int, said: str, interrupted: bool) -> None:
    """Shown again it has no exit code of an interrupt; a killed one has only what was known."""
    same = [compared(good(case, "k/none"), good(case, "k/none")) for case in CASES[:2]]
    crash = compared(good(CASES[3], "k/none"), ended(CASES[3], "k/none", Verdict.CRASHED, "signal SIGSEGV in phase launch"))
    slower = compared(good(CASES[2], "k/none"), good(CASES[2], "k/none"), timed=time(TimeVerdict.SLOWER, 1.1))
    found, about = [*same, slower, crash][:many], info(finished="", interrupted=interrupted)
    how = "interrupted" if interrupted else "cut short, or still running,"
    console = Console(width=300, file=io.StringIO(), color_system=None)
    console.print(gate.terminal(found, about, again=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == f"INCOMPLETE (exit {code}): {how} {said}" and lines[-1] == f"exit {code}"
    assert ("times: not compared: the gate did not get so far" in lines) is (many < 3)
    assert markdown(found, about, {}, {}, again=True).startswith(f"**{lines[0]}**")


def idle() -> Transition:
    """Of another kernel, which ran nowhere."""
    record = ended(CASES[0], "j/none", Verdict.SKIPPED, "takes bf16, the case is fp8")
    return compared(record, record)


def test_given_up_is_not_asked_any_more() -> None:
    ends = [(Verdict.TIMEOUT, "no answer for 4 s in phase launch")] * 2 + [(Verdict.SKIPPED, "given up: hung on 2 cases before")] * 7
    found = [compared(good(case, "k/none"), ended(case, "k/none", *end)) for case, end in zip(CASES, ends)]
    lines = screen(found, info(), 200)
    assert lines[0] == "WORSE (exit 1): 9 of 9 comparisons got worse: 9 new hangs, 7 of them given up"
    told = [" ".join(line.split()) for line in lines if line.startswith("new hang")]
    assert told[0].startswith("new hang k/none 2 cases") and told[1].startswith("new hang k/none 7 cases")
    text = markdown(found, info(), {}, {})
    assert text.count("| **new hang** |") == 2 + 2 and text.count("| **new hang** (given up) |") == 7


def test_the_page_is_named_where_there_is_one(tmp_path: Path) -> None:
    same = compared(good(CASES[0], "k/none"), good(CASES[0], "k/none"))
    crash = compared(good(CASES[1], "k/none"), ended(CASES[1], "k/none", Verdict.CRASHED, "signal SIGSEGV in phase launch"))
    without = screen([same], info(), 300, str(tmp_path))
    assert without[-1] == f"exit 0; all of it: threearm report {tmp_path} --markdown; again: threearm report {tmp_path}"
    (tmp_path / "summary.md").touch()
    assert f"all of it: {tmp_path}/summary.md" in screen([same], info(), 300, str(tmp_path))[-1]
    assert screen([same, crash], info(), 300, str(tmp_path))[-1] == f"failures in full: threearm report {tmp_path} --failures"


def test_no_version_is_known_of_a_kernel_without_a_package() -> None:
    found = [compared(good(CASES[0], "mine/none"), good(CASES[0], "mine/none"))]
    kernels = [{"name": "mine", "version": None}]
    about = info(base=SideInfo("python", LIVE, "/p", MACHINE, kernels), candidate=SideInfo("python", LIVE, "/p", MACHINE, kernels))
    lines = screen(found, about, 120)
    assert "base       python: no version known of mine" in lines and not any("same versions" in line for line in lines)
    assert "No version known of mine." in markdown(found, about, {}, {})
    about.base = about.candidate = SideInfo("python", LIVE, "/p", MACHINE, [{"name": "mine", "version": "1.0"}])
    assert "base       python: same versions" in screen(found, about, 120)


def test_many_notes_leave_the_screen_its_room() -> None:
    lines = screen([found for _, _, found in ninety()], info(notes=[f"note {number}" for number in range(40)]), 120)
    assert len(lines) <= 40 and "... and 35 more notes" in lines and "new crash" in "".join(lines)


def test_a_stored_run_has_no_times_and_says_so() -> None:
    why = "the base is a stored run: times of two runs are never compared"
    about = info(base=side("runs/yesterday", "1.0.0", STORED), options={"time": why})
    found = [compared(good(CASES[0], "k/none"), good(CASES[0], "k/none"))]
    text = "\n".join(screen(found, about, 120))
    assert "base       runs/yesterday, a stored run: sgl-flash-mla 1.0.0" in text
    assert "times: not compared: the base is a stored run" in text
    assert "Not compared: the base is a stored run" in markdown(found, about, {}, {})


def test_times_in_lines() -> None:
    lines = screen([found for _, _, found in ninety()], info(), 200)
    head = next(number for number, line in enumerate(lines) if line.startswith("times"))
    assert lines[head].startswith("times (span, L2 flushed): 75, geomean -0.09 %; 0.79 % of 27,000 samples throttled")
    told = "SLOWER 2 geomean +16.2 %, slowest +16.3 % [+15.9 %, +16.7 %] flash_mla/backscan s_q=4096,rows=full"
    assert " ".join(lines[head + 1].split()) == told
    assert lines[head].endswith("throttled; thresholds: 75 of 75 calibrated")
    assert [line.split()[0] for line in lines[head + 1: head + 6]] == ["SLOWER", "UNRESOLVED", "sampling", "FASTER", "SAME"]
    assert lines[head + 3].strip() == ("sampling stopped: the interval is narrow enough (1); what helps: --seconds, --processes, a quieter "
                                       "machine, threearm calibrate")


def test_thresholds_and_why_sampling_stopped_at_80() -> None:
    """What is not calibrated counts; why no more was sampled is told by reason."""
    found = []
    for number, case in enumerate(CASES):
        timed = time(TimeVerdict.UNRESOLVED if number < 10 else TimeVerdict.SAME, 1.01, half=0.03)
        timed.rule = RULE if number % 3 else Rule(0.03, 1.0)
        timed.stopped = "time cap of 5 s" if number % 5 else "9 pairs of processes"
        found.append(compared(good(case, "k/none"), good(case, "k/none"), timed=timed))
    lines = [line.strip() for line in screen(found, info(), 80)]
    assert "thresholds: 20 of 30 calibrated, else 3 %" in lines
    assert "sampling stopped: time cap of 5 s (8), 9 pairs of processes (2)" in lines
    assert "what helps: --seconds, --processes, a quieter machine, threearm calibrate" in lines


def test_two_kernels_and_two_arms() -> None:
    pairs = [compared(good(CASES[0], "a/none"), good(CASES[0], "b/none", "2"), apart()),
             compared(good(CASES[0], "a/dense"), good(CASES[0], "b/litetopk", "2"), apart())]
    assert things(pairs[:1])[0].arms == "a=b/none"
    assert things(pairs[1:])[0].arms == "a/dense=b/litetopk"
    text = markdown(pairs, info(), {}, {})
    assert "#### a to b" in text and "| case | none | a/dense<br>b/litetopk |" in text


def test_markup_in_a_name_is_text() -> None:
    found = [compared(good(CASES[0], "odd[/red]/none"), None)]
    assert any("odd[/red]/none" in line for line in screen(found, info(), 120))


@pytest.mark.parametrize("verdict", [TimeVerdict.SLOWER, TimeVerdict.UNRESOLVED, TimeVerdict.INVALID])
def test_all_that_takes_a_gate_from_0_is_told_in_full(verdict: TimeVerdict) -> None:
    """Also where nothing is wrong; with the line that compares one of them again."""
    about = info(command=["threearm.py", "gate", "--suite", "gate", CASES[2], "--base", "a==1", "--candidate=b==2", "--bitwise",
                          "--arm", "k", "--runs", "x", "--seconds", "9"])
    found = [compared(good(CASES[0], "k/none"), good(CASES[0], "k/none"), timed=time(verdict, 1.1)),
             compared(good(CASES[1], "k/none"), good(CASES[1], "k/none"), timed=time(TimeVerdict.SAME, 1.0))]
    [text] = untold_texts(found, about)
    assert text.startswith(f"{verdict.value}  k/none  {CASES[0]}\n  ") and "medians " in text
    assert text.endswith(f"  repeat: threearm gate {CASES[0]} --arm k/none --base a==1 --candidate=b==2 --bitwise --seconds 9")
    assert untold_texts(found[1:], about) == []


@pytest.mark.parametrize(("name", "code", "first", "many"), [
    ("slow", 3, "SLOWER (exit 3): ", 10), ("same", 0, "nothing got worse, and nothing fails on both sides", 0)])
def test_a_stored_gates_failures(name: str, code: int, first: str, many: int) -> None:
    done = invoke("report", str(ROOT / "docs/evidence/gates" / name), "--failures")
    assert done.code == code and done.text.startswith(first) and done.text.count("\nSLOWER  flash_mla/none  ") == many


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_has_everything() -> None:
    text = page(ninety(), info())
    assert len(text) < 65_536  # what GitHub takes
    for said in ("| sgl-flash-mla | 1.0.0 | 1.1.0 |", "The same on both sides: device cuda; gpu NVIDIA H200",
                 "| s_q=16,rows=full | **PASS->FAIL** | **PASS->FAIL** | **PASS->FAIL** |",
                 "bitwise same<br>**SLOWER** +16.2 % [+15.8 %, +16.6 %]", "where: explained by: topk_length - 64",
                 "  as flash_mla/none above",
                 "new NaN, in the base PASSED: NaN in out: reference", "[5, 1, 511]  want -0.1032  got nan",
                 "new hang, in the base PASSED\nTIMEOUT  flash_mla/metadata", "out 0.31 -> 0.95<br>lse 0.12 -> 0.125<br>**risen**",
                 "1: 400, 2: 12", "base, median us<br>(span, L2 flushed)", "3 + 0; 360, 1 throttled",
                 "2 %, 1 us<br>calibrated: 12 A/A comparisons, 0 fired, sees 3.1 %",
                 "| flash_mla/metadata | 1 | not run on either side: takes bf16, the case is fp8 |",
                 "`threearm gate --base sgl-flash-mla==1.0.0`"):
        assert said in text, said


def test_both_sides_can_be_repeated() -> None:
    case = CASES[0]
    sides = (good(case, "a/none"), wrong(case, "b/none"))
    records = [{(record.case, record.arm): record} for record in sides]
    text = markdown([compared(*sides)], info(), *records, lambda which, record: ["--device", which])
    assert f"repeat: threearm replay {case} --arm b/none --device candidate" in text
    assert f"repeat the base: threearm replay {case} --arm a/none --device base" in text


def test_many_failures_are_told_in_short_after_the_first() -> None:
    found = [(good(case, "k/none"), wrong(case, "k/none")) for case in CASES]
    text = page([(*sides, compared(*sides)) for sides in found], info())
    assert "(the first 20 in full)" in text
    assert text.count("rows 16..31 (16 of 32)") == 20
    assert text.count("  repeat: threearm replay") == 30


@pytest.mark.parametrize("many", [21, 200, 3000])
def test_the_page_is_short_enough_however_much_fails(many: int) -> None:
    found = []
    for number in range(many):
        case = f"sparse_prefill:s_q={number + 16},rows=full"
        sides = (good(case, "k/none"), wrong(case, "k/none", where=["in out:", *(f"rows {number} of {'x' * 100}" for _ in range(8))]))
        found.append((*sides, compared(*sides)))
    text = page(found, info())
    assert len(text) <= 60_000
    assert text.count("want 1  got 2") in (range(10, 21) if many == 21 else range(1, 6))
    assert text.count("```") == 2 and ("all: threearm report GATE --failures" in text) is (many > 200)
    assert ("shortened to 60,000 characters" in text) is (many == 3000)


def test_medians_are_whole_numbers_and_what_is_slower_is_bold() -> None:
    timed = compared(good(CASES[0], "k/none"), good(CASES[0], "k/none"), timed=time(TimeVerdict.SLOWER, 1.1, base_us=51_000.4))
    text = markdown([timed], info(), {}, {})
    assert "| 51,000 | 56,100 |" in text and "e+04" not in text
    assert text.count("**SLOWER**") == 3  # what to look at, the case's cell, the table of times


def test_what_failed_before_is_shown_on_both_sides() -> None:
    sides = (wrong(CASES[0], "k/none", detail="over budget: out in 3 of 6,144", bad=3), wrong(CASES[0], "k/none"))
    text = page([(*sides, compared(*sides))], info())
    assert "still failing, in the base FAILED: FAILED reference, padded (like topk_length - 64)" in text
    assert "other findings: reference 3 -> 2,048 wrong" in text
    assert "in the base:\nFAILED  k/none" in text
    assert Change.STILL_BAD.value in text
