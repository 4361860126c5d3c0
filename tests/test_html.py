"""The page of stored runs and gates, of records made by hand, and of a run with broken arms: what is on it, and in a browser."""
from __future__ import annotations

import html
import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from harness.comparison import Change, Pairing, TimeVerdict, Transition
from harness.evidence_folder import EvidenceFolder
from harness.gate_folder import GateFolder
from harness.mutants_file import load
from harness.record import Lengths, Record, Timing
from harness.runfolder import RunError, RunFolder, RunInfo
from harness.stored import open_folder
from harness.verdicts import Check, Verdict
from reports.html.page import build
from reports.html.sweeps import LENGTH, find
from tests.processes import ROOT, invoke, threearm

EVIDENCE = ROOT / "docs" / "evidence"
CASE = "sparse_prefill:s_q=16,h_q=8,topk=512"
EVIL = '</pre><script>document.title="owned"</script> $\\frac{1}{0}$ {{ 7 * 7 }} & "quoted"'
VOID_TAGS = ("meta", "link", "br", "img", "hr")


class Reader(html.parser.HTMLParser):
    """Ids, links, open tags, scripts and what is fetched."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        self.tags.append(tag)
        self.ids += [known["id"] or ""] if "id" in known else []
        href = known.get("href") or ""
        self.links += [href[1:]] if tag == "a" else []
        self.fetched += [value for name in ("src", "href", "xlink:href") if (value := known.get(name) or "") and value[0] != "#"]
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID_TAGS:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def run_of(*records: Record, finished: str = "later") -> RunFolder:
    """A run in memory."""
    folder = RunFolder(None, RunInfo("now", ["threearm", "run", "--runs", "/elsewhere", "--arm", "k"], [], [], {"gpu": "none"}, {},
                                     finished=finished))
    folder.records = list(records)
    return folder


def timed(case: str, arm: str, *us: float, mean: float = 0.0, verdict: Verdict = Verdict.PASSED) -> Record:
    lengths = Lengths(mean, 1, int(mean), 0.5, "x") if mean else None
    return Record(case, arm, verdict, lengths=lengths, time=Timing("span", "warm", "ABBA", list(us)))


def stored(*names: str) -> str:
    return build([open_folder(EVIDENCE / name) for name in names], "stored")


def text_of(page: str) -> str:
    """The page's text, without tags and styles."""
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", " ", page, flags=re.S)))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with a broken arm of each family; one's `none` is right."""
    runs = tmp_path_factory.mktemp("runs")
    done = threearm("run", f"{CASE},rows=ragged", "indexer_topk:requests=8/1000,topk=64", "--arm",
                    "broken_skips_last_pair", "--arm", "broken_last_tile_of_keys_skipped", "--time", "none", "--runs", str(runs))
    assert done.code == 1, done.text
    folder = open_folder(next(runs.iterdir()))
    assert isinstance(folder, RunFolder)
    return folder


# --- form -------------------------------------------------------------------------------------------------------------


ALL = ("runs/timing-fp8", "runs/litetopk-scale-time-wrong", "runs/edge", "runs/fuzz-sparse-prefill-seed-1", "gates/same", "gates/slow")


@pytest.fixture(scope="module")
def page_of_all() -> str:
    return stored(*ALL)


def test_it_is_well_formed_and_its_links_lead_somewhere(page_of_all: str) -> None:
    page = Reader(page_of_all)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    assert set(page.links) <= set(page.ids)


def test_it_needs_no_network_no_script_and_no_other_file(page_of_all: str) -> None:
    page = Reader(page_of_all)
    assert "script" not in page.tags
    assert page.fetched == ["data:,"]
    assert "@import" not in page_of_all
    assert set(re.findall(r"url\((.)", page_of_all)) <= {"#"}


def test_the_same_sources_give_the_same_page() -> None:
    assert stored(*ALL[:2], *ALL[4:]) == stored(*ALL[:2], *ALL[4:])


def test_a_run_of_many_records_is_below_two_megabytes() -> None:
    page = stored("runs/indexer-edge")
    assert len(page) < 2e6
    assert page.count('<details class="record ') == 273


# --- content ----------------------------------------------------------------------------------------------------------


def test_a_run_that_passed() -> None:
    page = stored("runs/timing-fp8")
    text = text_of(page)
    assert '<div class="banner good">' in page
    assert "PASSED: 15 of 15 arm runs PASSED" in text
    assert "threearm run --suite topk-length-timing --set dtype=fp8 --arm sglang_q8kv8" in text
    assert "NVIDIA H200" in text
    assert "time over mean topk_length" in text
    assert "contract kernel" in text
    assert "What did not pass" not in text


def test_a_run_with_a_wrong_arm_says_so_first_and_marks_its_times() -> None:
    page = stored("runs/litetopk-scale-time-wrong")
    text = text_of(page)
    assert '<div class="banner bad">' in page
    assert "FAILED: 5 of 12 arm runs FAILED, 7 PASSED; INCOMPLETE: 12 of " in text
    assert re.search(r"Missing \(\d+\)", text)
    assert "deep_gemm/dense (x: wrong)" in text
    assert "they cross at" in text
    assert text.index("FAILED: 5 of 12") < text.index("Verdicts") < text.index("What did not pass (5)") < text.index("Sweeps")


def test_a_gate_shows_its_verdict_and_the_interval_of_every_time() -> None:
    text = text_of(stored("gates/slow"))
    assert "SLOWER (exit 3)" in text
    assert text.count("SLOWER") >= 10
    assert "Candidate over base" in text
    assert "OK (exit 0)" in text_of(stored("gates/same"))


def test_a_gate_that_got_worse_shows_what() -> None:
    before, after = Record(CASE, "k/none", Verdict.PASSED), Record(CASE, "k/none", Verdict.FAILED, checks=[
        Check("reference", Verdict.FAILED, "over budget", where=["rows 3"])])
    gate = open_folder(EVIDENCE / "gates" / "same")
    assert isinstance(gate, GateFolder)
    pairing = Pairing(CASE, "k/none", "k/none")
    gate.transitions = [Transition(pairing, Change.BROKE, "reference: over budget", before.verdict, after.verdict)]
    gate.sides["base"].records, gate.sides["candidate"].records = [before], [after]
    page = build([gate], "worse")
    assert '<div class="banner bad">' in page
    assert "PASS->FAIL" in text_of(page)
    assert "where: rows 3" in text_of(page)
    assert "What got worse, and what fails on both sides (1)" in text_of(page)


def test_several_sources_are_listed_with_their_verdicts(page_of_all: str) -> None:
    assert page_of_all.count("<article ") == len(ALL)
    listed = page_of_all[page_of_all.index('<ol class="sources">') : page_of_all.index("</header>")]
    assert listed.count("<li>") == len(ALL)
    assert "SLOWER" in listed


def test_several_sources_begin_with_what_they_come_to(page_of_all: str) -> None:
    """Not with the first's colour: the worst of them all."""
    def first(*names: str) -> str:
        page = stored(*names)
        found = re.search('<div class="banner (.*?)">\\s*(?:<p class="what">.*?</p>\\s*)?<p class="verdict">(.*?)</p>', page)
        assert found
        return f"{found[1]} {found[2]}"

    assert first("runs/smoke", "gates/slow", "runs/fuzz-sparse-prefill-seed-2", "runs/litetopk-scale-others") == (
        "bad 1 of 4 FAILED, 1 SLOWER, 1 INCOMPLETE, 1 PASSED")
    assert first("runs/smoke", "runs/edge") == "good 2 of 2 PASSED"
    assert first("runs/smoke") == "good PASSED: 118 of 118 arm runs PASSED; 74 SKIPPED"


def test_what_is_no_evidence_says_so_first() -> None:
    """Of a run at reduced shapes: not green, and its text without Markdown's marks."""
    folder = open_folder(EVIDENCE / "commands/bf16-topk-length")
    assert isinstance(folder, EvidenceFolder)
    before = build([folder], "gpu")
    assert '<div class="banner good">' in before and "no evidence" not in before
    folder.info.reduced, folder.info.notes = True, ["left out without a GPU: wrapper (contract `span`)"]
    page = build([folder], "cpu")
    assert '<div class="banner idle">' in page and "contract <code>span</code>" in page and "`" not in text_of(page)
    head = text_of(page[page.index("<main>") :])
    assert head.index("no evidence of a GPU kernel. PASSED: ") < head.index("arm runs PASSED") and "31 of 31 case-runs" not in page
    both = build([folder, open_folder(EVIDENCE / "runs/smoke")], "both")
    listed = both[both.index('<ol class="sources">') : both.index("</header>")]
    assert "NO EVIDENCE" in listed and "no evidence of a GPU kernel" in listed


def test_a_failure_has_its_text_its_picture_and_its_histogram(broken: RunFolder) -> None:
    page = build([broken], "broken")
    text = text_of(page)
    assert "FAILED: 3 of 4 arm runs FAILED, 1 PASSED" in text
    assert "explained by: the last pair of 128 skipped" in text
    assert "explained by: the last, partial tile of 128 keys" in text
    assert page.count('<svg class="picture"') >= 4
    assert '<path class="l9"' in page
    assert "over 16 ULP" in text
    assert "threearm replay" in text
    assert "as broken_skips_last_pair/backscan" in text  # metadata's findings are the same
    fine = build([run_of(*(record for record in broken.records if record.verdict is Verdict.PASSED))], "fine")
    assert '<svg class="picture"' not in fine
    assert "FAILED" not in text_of(fine)


def test_pictures_are_of_the_rows_that_differ(broken: RunFolder) -> None:
    record = next(record for record in broken.records if record.arm == "broken_skips_last_pair/backscan")
    reference = next(check for check in record.checks if check.name == "reference")
    assert reference.picture is not None
    assert (reference.picture.rows, reference.picture.across) == (16, "head")
    passed = [check for check in record.checks if check.verdict is Verdict.PASSED]
    assert passed
    assert all(check.picture is None for check in passed)


def test_nothing_ran_and_no_records() -> None:
    assert '<div class="banner warn">' in build([run_of()], "empty")
    skipped = build([run_of(Record(CASE, "k/none", Verdict.SKIPPED, "needs a GPU"))], "skipped")
    assert "NOTHING RAN; 1 SKIPPED" in text_of(skipped)
    assert "needs a GPU" in text_of(skipped)
    assert '<div class="banner good">' in build([run_of(Record(CASE, "k/none", Verdict.PASSED))], "one")


def test_vacuous_is_no_pass() -> None:
    page = build([run_of(Record(CASE, "k/none", Verdict.VACUOUS, "zeros would pass"), Record(CASE, "k/metadata", Verdict.PASSED))], "v")
    assert '<div class="banner warn">' in page
    assert "VACUOUS: 1 of 2 arm runs VACUOUS, 1 PASSED" in text_of(page)


def test_the_folders_place_is_left_out_of_the_command() -> None:
    page = build([run_of(Record(CASE, "k/none", Verdict.PASSED))], "one")
    assert "threearm run --arm k" in text_of(page)
    assert "/elsewhere" not in page


def evil_run() -> RunFolder:
    check = Check("reference", Verdict.FAILED, EVIL, margins={EVIL: 2.0}, where=[EVIL], first=[EVIL], ulp={EVIL: 3})
    fine = Check("reference", Verdict.PASSED, EVIL, margins={EVIL: 0.5})
    arm = f"{EVIL.replace('/', '')}/none"
    records = [Record(CASE, arm, Verdict.FAILED, EVIL, [check], note=EVIL), Record(f"{CASE},seed=2", arm, Verdict.PASSED, checks=[fine]),
               *(timed(f"{CASE},s_kv={size}", arm, 5.0, 6.0, 7.0) for size in (1024, 2048, 4096))]
    run = run_of(*records)
    run.info.machine = {"gpu": EVIL, EVIL: "x"}
    run.info.command = ["threearm", "run", EVIL]
    return run


def test_everything_is_escaped() -> None:
    page = build([evil_run()], EVIL)
    reader = Reader(page)
    assert "script" not in reader.tags
    assert reader.open == []
    assert text_of(page).count("7 * 7") >= 5
    assert "49" not in re.sub(r"<svg.*?</svg>|<style>.*?</style>", "", page, flags=re.S)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_cases_that_differ_in_one_number_form_a_sweep() -> None:
    records = [timed(f"sparse_prefill:s_kv={size}", "k/none", size / 100) for size in (8192, 4096, 16384)]
    [sweep] = find(records)
    assert (sweep.key, [point.x for point in sweep.lines["k/none"]]) == ("s_kv", [4096, 8192, 16384])
    assert find(records[:2]) == []
    assert find([*records[:2], timed("sparse_prefill:s_kv=16384,h_q=128", "k/none", 1.0)]) == []
    assert find([timed(f"sparse_prefill:seed={seed}", "k/none", 1.0) for seed in (1, 2, 3)]) == []


def test_lengths_are_swept_by_their_mean() -> None:
    records = [record for size in (128, 256, 2048) for record in (
        timed(f"sparse_prefill:topk=2048,index_topk={size}", "k/none", 9.0),
        timed(f"sparse_prefill:topk=2048,index_topk={size}", "k/metadata", size / 200, mean=size))]
    [sweep] = find(records)
    assert (sweep.key, list(sweep.lines)) == (LENGTH, ["k/none", "k/metadata"])
    assert [(point.x, point.name) for point in sweep.lines["k/none"]] == [(128, ""), (256, ""), (2048, "")]
    patterns = [timed(f"sparse_prefill:topk=2048,rows={rows}", "k/metadata", mean / 200, mean=mean)
                for rows, mean in (("full", 2048), ("half", 1024), ("short", 100))]
    of_patterns, cut = find([*records, *patterns])  # a line joins cases of one kind
    assert [point.name for point in of_patterns.lines["k/metadata"]] == ["short", "half", "full"] and cut == sweep


def test_dense_and_litetopk_of_two_kernels_share_a_sweep_over_keys() -> None:
    records = [timed(f"indexer_topk:requests=64/{keys}", arm, us) for arm, us in (("b/litetopk", 2.0), ("a/dense", 1.0))
               for keys in (4096, 8192, 16384)]
    records[-1].verdict = Verdict.FAILED
    [sweep] = find(records)
    assert (sweep.key, list(sweep.lines)) == ("keys", ["a/dense", "b/litetopk"])
    assert [point.ok for point in sweep.lines["a/dense"]] == [True, True, False]


# --- mutants ----------------------------------------------------------------------------------------------------------


def test_a_mutants_matrix_is_stored_and_shown(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    done = threearm("mutants", "--arm", "negated", "--json", str(file), "--html", str(tmp_path / "page.html"))
    assert done.code == 0, done.text
    matrix = load(file)
    page = build([matrix], "threearm mutants")
    assert page == (tmp_path / "page.html").read_text()
    assert "1 of 1 faults caught; no false alarm" in text_of(page)
    assert "negated" in text_of(page)
    matrix.cells = []
    survived = build([matrix], "survived")
    assert '<div class="banner bad">' in survived
    assert "0 of 1 faults caught, 1 SURVIVED" in text_of(survived)
    file.write_bytes(msgspec.json.encode({"faults": 1}))
    with pytest.raises(RunError, match="no file of `threearm mutants --json`"):
        load(file)


def test_report_writes_the_page(tmp_path: Path) -> None:
    done = invoke("report", str(EVIDENCE / "runs/timing-fp8"), str(EVIDENCE / "gates/slow"), "--html", str(tmp_path / "page.html"))
    assert done.code == 3, done.text
    assert (tmp_path / "page.html").read_text().count("<article ") == 2
    assert TimeVerdict.SLOWER.value in (tmp_path / "page.html").read_text()


# --- in a browser -----------------------------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium to look at the page with")
WIDTHS = (390, 1280)  # a phone, a desktop
MEASURE = """<script>addEventListener("load", () => {
  document.title = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement, style = element => frame.contentWindow.getComputedStyle(element);
    const text = page.querySelector(".plots svg text");
    return [root.scrollWidth, root.clientWidth, style(page.body).backgroundColor, style(page.body).color, text ? style(text).fill : "",
            page.title].join("|");
  }).join("\\n");
});</script>"""


def in_browser(page: str, where: Path, dark: bool = False) -> tuple[list[list[str]], list[str]]:
    """The page in a frame of each width: [scrollWidth, clientWidth, background, colour, colour of a plot's text, title] of each, and what
    the browser's console says."""
    file = where / "framed.html"
    frames = "".join(f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS)
    file.write_text(f"<!DOCTYPE html><meta charset=utf-8>{frames}{MEASURE}", encoding="utf-8")
    assert BROWSER is not None
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900", "--virtual-time-budget=3000",
                           f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--user-data-dir={where / 'profile'}",
                           "--enable-logging=stderr", "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert found, done.stderr[-2000:]
    frames_found = [line.split("|") for line in html.unescape(found[1]).split("\n")]
    return frames_found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_on_a_phone_and_on_a_desktop_nothing_scrolls_sideways(broken: RunFolder, tmp_path: Path, dark: bool) -> None:
    page = build([broken, open_folder(EVIDENCE / "gates/slow"), open_folder(EVIDENCE / "runs/smoke")], "widths")
    frames, told = in_browser(page, tmp_path, dark)
    assert told == []
    assert len(frames) == len(WIDTHS)
    for (scroll, client, background, colour, of_plot, title), width in zip(frames, WIDTHS):
        assert title == "widths"
        assert int(scroll) == int(client) <= width
        assert (background, colour) == (("rgb(19, 22, 26)", "rgb(228, 232, 236)") if dark else ("rgb(255, 255, 255)", "rgb(27, 31, 36)"))
        assert of_plot == colour


@needs_browser
def test_the_browser_test_notices_a_page_that_is_too_wide_and_one_that_complains(tmp_path: Path) -> None:
    wide = build([run_of()], "wide").replace("<main>", '<main><div style="width:2000px">x</div><script>console.error("no")</script>')
    frames, told = in_browser(wide, tmp_path)
    assert all(int(scroll) > int(client) for scroll, client, *_ in frames)
    assert len(told) == len(WIDTHS)


@needs_browser
def test_no_text_of_a_kernel_is_run(tmp_path: Path) -> None:
    frames, told = in_browser(build([evil_run()], "harmless"), tmp_path)
    assert told == []
    for scroll, client, *_, title in frames:
        assert (title, int(scroll)) == ("harmless", int(client))
