"""Thresholds from A/A comparisons, the file that they are kept in, and the command that takes them (with made-up times)."""
from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import TINY, Done, invoke
from simulated_times import FEWEST, MACHINES, Machine, generations, normal, process

from harness import calibrate_command, cli, options
from harness.calibrate_command import calibrate, split
from harness.client import WorkerOptions
from harness.comparison import Estimate, Pairing, Round, Rule, TimeVerdict
from harness.sampling import Plan, Side
from harness.stats import estimate, judge, same, suspect
from harness.thresholds import (
    CaseThreshold,
    ThresholdError,
    Thresholds,
    calibrated,
    default_rule,
    fingerprint,
    key,
    load,
    rule_for,
    rule_of,
    save,
)

GPU = {"device": "cuda:0", "gpu": "NVIDIA H200", "driver": "580.1", "power limit": "700.00 W", "max SM clock": "1980 MHz", "ECC": "Enabled",
       "cpu": "some CPU", "torch": "2.11.0"}
CPU = {"device": "cpu", "cpu": "some CPU, 2 cores, 2 torch threads", "torch": "2.11.0"}
NOISY = MACHINES["normal offsets"]


def comparisons(seed: int, count: int = 5, machine: Machine = NOISY, change: float = 0.0) -> list[list[list[Round]]]:
    rng = np.random.default_rng(seed)
    return [generations(rng, machine, FEWEST, change) for _ in range(count)]


def calibration(seed: int, **how: Any) -> CaseThreshold:
    found = calibrated(comparisons(seed, **how), "cuda:0", "span", "then")
    assert found is not None
    return found


# --- from comparisons to a threshold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_smallest_under_which_every_comparison_is_same(seed: int) -> None:
    found, taken = calibration(seed), [estimate(each) for each in comparisons(seed)]
    assert found.threshold > 0.01, "these scatter by more than the least"
    rule = dataclasses.replace(rule_of(found, "cuda"), widest=0.0)  # some of these are wider than may be called SAME
    assert all(each and same(each, rule) for each in taken)
    smaller = dataclasses.replace(rule, threshold=found.threshold - 2e-4)
    assert not all(each and same(each, smaller) for each in taken)
    assert found.largest <= found.threshold < found.largest + 1.01e-4


@pytest.mark.parametrize("seed", range(20))
def test_a_change_as_large_as_it_says_is_seen_in_each(seed: int) -> None:
    found = calibration(seed)
    for sign in (1, -1):
        changed = [estimate(each) for each in comparisons(seed, change=(1 + found.detectable * 1.001) ** sign - 1)]
        assert all(suspect(each, rule_of(found, "cuda")) for each in changed)
    less = [estimate(each) for each in comparisons(seed, change=found.threshold * 0.9)]
    assert not all(suspect(each, rule_of(found, "cuda")) for each in less)


def test_a_floor_of_microseconds_is_in_what_can_be_seen() -> None:
    short = [[[dataclasses.replace(one, bursts=[dataclasses.replace(b, us=[us / 25 for us in b.us]) for b in one.bursts])
               for one in rounds] for rounds in taken] for taken in comparisons(0)]
    found = calibrated(short, "cuda")
    assert found is not None and found.median_us == pytest.approx(4, rel=0.02)
    assert found.detectable == pytest.approx(1.25 * (1 + found.largest) - 1, rel=0.02), "1 us of 4 us"


def test_quiet_machines_get_the_least() -> None:
    quiet = comparisons(0, machine=Machine(normal(1e-4), noise=1e-4))
    for device, least, floor in (("cuda:1", 0.01, 1.0), ("cpu", 0.03, 20.0)):
        found = calibrated(quiet, device)
        assert found is not None and (found.threshold, found.floor_us) == (least, floor)
        assert (found.fired, found.unresolved, found.by_default) == (0, 0, 0) and found.largest < 0.002


def test_false_alarms_are_told_of_thresholds_from_the_others() -> None:
    """One A/A comparison that looks like a change of 30 %, among quiet ones."""
    odd = comparisons(0, 4, Machine(normal(1e-4))) + comparisons(0, 1, Machine(normal(1e-4)), change=0.3)
    found = calibrated(odd, "cuda")
    assert found is not None and (found.fired, found.unresolved, found.by_default, found.comparisons) == (1, 0, 1, 5)
    assert found.threshold > 0.3, "it must not fire"
    wide = comparisons(0, 4, Machine(normal(1e-4))) + comparisons(1, 1, Machine(normal(0.1)))
    found = calibrated(wide, "cuda")
    assert found is not None and (found.fired, found.unresolved, found.by_default) == (0, 1, 1)


def test_a_comparison_that_lost_a_process_does_not_count() -> None:
    taken = comparisons(0)
    for one in taken[2][1]:
        one.unclean = "throttled"
    found = calibrated(taken, "cuda")
    assert found is not None and (found.comparisons, found.incomplete) == (4, 1)
    with_it = estimate(taken[2])
    assert with_it and math.log(with_it.high / with_it.low) / 2 > math.log1p(found.threshold), "two processes would have made it wide"
    assert calibrated([], "cuda") is None and calibrated([taken[2], [[], [], []]], "cuda") is None


# --- rules ------------------------------------------------------------------------------------------------------------


def stored(**thresholds: float) -> Thresholds:
    cases = {key("case", f"kernel/{arm}"): CaseThreshold(threshold, 1.0, 5, 1, 0.015, 0.04, contract="span")
             for arm, threshold in thresholds.items()}
    return Thresholds(fingerprint(GPU), cases=cases)


def pair(base: str, candidate: str) -> Pairing:
    return Pairing("case", f"kernel/{base}", f"kernel/{candidate}")


def test_a_noisy_calibration_calls_nothing_the_same_that_goes_beyond_the_default() -> None:
    """+10 % under a threshold of 20 % is neither a change nor none."""
    rule = rule_for(stored(loud=0.2), pair("loud", "loud"), "cuda:0")
    ten = Estimate(1.1, 1.09, 1.11, 1000.0, 1100.0, 3, 6)
    assert (rule.threshold, rule.widest) == (0.2, 0.03)
    assert judge(ten, None, rule)[0] is TimeVerdict.UNRESOLVED
    assert judge(dataclasses.replace(ten, ratio=1.0, low=0.98, high=1.02), None, rule)[0] is TimeVerdict.SAME
    assert judge(dataclasses.replace(ten, ratio=1.3, low=1.25, high=1.35), ten, rule)[0] is TimeVerdict.UNRESOLVED, "not confirmed"


def test_which_rule_holds() -> None:
    found, default = stored(none=0.012, metadata=0.02, loud=0.2), default_rule("cuda:0")
    assert default == Rule(0.03, 1.0) and default_rule("cpu") == Rule(0.10, 20.0)
    assert rule_for(None, pair("none", "none"), "cuda:0") == default
    assert rule_for(found, pair("none", "none"), "cuda:0") == Rule(
        0.012, 1.0, 0.95, "calibrated: 5 A/A comparisons, 1 fired, sees 4 %", widest=0.03)
    assert rule_for(found, pair("none", "metadata"), "cuda:0").threshold == 0.02
    assert rule_for(found, pair("metadata", "none"), "cuda:0").threshold == 0.02
    assert rule_for(found, pair("none", "unknown"), "cuda:0") == default, "of one of them nothing is known"
    assert rule_for(found, pair("unknown", "loud"), "cuda:0").threshold == 0.2
    assert rule_for(found, pair("none", "none"), "cuda:0", "wall") == default, "another contract"
    assert rule_for(found, pair("none", "none"), "cuda:0", "span").threshold == 0.012
    assert rule_for(found, dataclasses.replace(pair("none", "none"), case="another"), "cuda:0") == default


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_comes_back(tmp_path: Path) -> None:
    path, kept = tmp_path / "thresholds.json", stored(none=0.012)
    kept.made, kept.command = "now", ["threearm", "calibrate"]
    save(kept, path)
    assert load(path, GPU) == kept and [each.name for each in tmp_path.iterdir()] == [path.name]
    written = json.loads(path.read_text())
    assert written["schema"] == 1 and written["cases"]["case|kernel/none"]["threshold"] == 0.012


def test_what_makes_it_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    assert list(fingerprint(GPU)) == ["gpu", "driver", "power limit", "max SM clock", "ECC"] and list(fingerprint(CPU)) == ["cpu"]
    save(stored(none=0.012), path)
    assert load(path, {**GPU, "cpu": "another", "torch": "2.12", "device": "cuda:3"})
    for name in fingerprint(GPU):
        with pytest.raises(ThresholdError) as told:
            load(path, {**GPU, name: "another"})
        assert str(told.value) == f"{path} is of another machine: {name} {GPU[name]}, here another"
    with pytest.raises(ThresholdError, match=r"cpu none, here some CPU.*gpu NVIDIA H200, here none"):
        load(path, CPU)
    with pytest.raises(ThresholdError, match=r"driver 580.1, here none$"):
        load(path, {name: value for name, value in GPU.items() if name != "driver"})


@pytest.mark.parametrize(("content", "told"), [
    (b"", "holds no thresholds"), (b"[]", "holds no thresholds"), (b"\xff\xfe{}", "holds no thresholds"), (b'{"cases": {}}', "fingerprint"),
    (b'{"fingerprint": {}, "schema": 2}', "has schema 2; this version reads 1"),
    (b'{"fingerprint": {}, "cases": {"a|b/c": {"threshold": "x"}}}', "holds no thresholds"),
    (b'{"fingerprint": {}, "cases": {"a|b/c": {"threshold": 0, "floor_us": 1, "comparisons": 5, "fired": 0, "largest": 0.1, '
     b'"detectable": 0.2}}}', "a|b/c: threshold and floor must be numbers above 0"),
])
def test_a_file_that_is_none(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "thresholds.json"
    path.write_bytes(content)
    with pytest.raises(ThresholdError) as error:
        load(path, GPU)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ThresholdError, match="No such file"):
        load(tmp_path / "none.json", GPU)
    with pytest.raises(ThresholdError, match="cannot write"):
        save(stored(), tmp_path / "none" / "thresholds.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ThresholdError, match="cannot write"):
        save(stored(), tmp_path / "folder.json")
    assert [each.name for each in tmp_path.iterdir()] == ["folder.json"], "nothing half written is left"


# --- the command ------------------------------------------------------------------------------------------------------


OTHER = TINY.replace("s_q=2", "s_q=3")
KERNELS = [{"name": "plain", "family": "sparse_prefill", "arms": ["none", "metadata"], "why_not": "", "imports": "",
            "refused": {TINY: {"metadata": "takes no length"}, OTHER: {}}},
           {"name": "elsewhere", "family": "sparse_prefill", "arms": ["none"], "why_not": "needs a GPU", "imports": "",
            "refused": {TINY: {}, OTHER: {}}}]


@dataclasses.dataclass
class Asked:
    """What the command asked of sampling, and what it is given."""

    machine: Machine = NOISY
    dead: tuple[str, ...] = ()
    interrupt: bool = False
    described: list[WorkerOptions] = dataclasses.field(default_factory=list)
    sides: list[Side] = dataclasses.field(default_factory=list)
    plans: list[Plan] = dataclasses.field(default_factory=list)
    pairings: list[Pairing] = dataclasses.field(default_factory=list)
    generations: int = 0

    def describe(self, options: WorkerOptions, cases: list[str]) -> dict[str, Any]:
        self.described.append(options)
        return {"kernels": KERNELS, "device": options.device.replace("auto", "cpu"), "machine": GPU if "cuda" in options.device else CPU}

    def sample(self, pairings: list[Pairing], base: Side, candidate: Side, plan: Plan, generations: int, progress: Any
               ) -> dict[Pairing, list[list[Round]]]:
        self.sides, self.plans, self.pairings, self.generations = [base, candidate], [plan], pairings, generations
        progress(1, generations, "under way")
        if self.interrupt:
            raise KeyboardInterrupt
        rng = np.random.default_rng(8)
        return {pairing: [process(rng, self.machine, 0.0) for _ in range(2 if pairing.base in self.dead else generations)]
                for pairing in pairings}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The command with a worker that is made up, registered if it is not yet."""
    made_up = Asked()
    monkeypatch.setattr(options, "describe", made_up.describe)
    monkeypatch.setattr(calibrate_command, "sample_pairs", made_up.sample)
    if "calibrate" not in {command.callback.__name__ for command in cli.app.registered_commands if command.callback}:
        monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
        cli.app.command()(calibrate)
    return made_up


def test_every_arm_against_itself(asked: Asked, tmp_path: Path) -> None:
    out = tmp_path / "thresholds.json"
    done = invoke("calibrate", TINY, OTHER, "--device", "cpu", "--comparisons", "4", "--out", str(out), "--env", "A=b=c",
                  "--python", "/bin/sh")
    assert done.code == 0, done.text
    assert [(each.case, each.base) for each in asked.pairings] == [(TINY, "plain/none"), (OTHER, "plain/none"), (OTHER, "plain/metadata")]
    assert all(each.base == each.candidate for each in asked.pairings) and asked.generations == 4 * 3
    assert asked.sides[0] == asked.sides[1] and asked.sides[0].options.python == "/bin/sh" and asked.plans[0].contract == "wall"
    assert "A=b=c" in asked.sides[0].options.environment and asked.described[0].python == "/bin/sh"
    written = load(out, CPU)
    assert set(written.cases) == {key(each.case, each.base) for each in asked.pairings}
    first = written.cases[key(TINY, "plain/none")]
    assert (first.comparisons, first.processes, first.contract, first.threshold) == (4, 3, "wall", 0.03)
    assert "12 A/A comparisons of 3 pairs of processes: each under the threshold of the others, 0 fired, 0 unresolved; under the default " \
           "one 0 not SAME" in done.lines
    assert f"thresholds: {out}" in done.lines and any("plain/metadata" in line and "3 %" in line for line in done.lines)
    assert not any("elsewhere" in line for line in done.lines), "nobody asked for it"


def test_what_the_file_holds_of_others_is_kept(asked: Asked, tmp_path: Path) -> None:
    out = tmp_path / "thresholds.json"
    invoke("calibrate", TINY, OTHER, "--device", "cpu", "--out", str(out))
    before = load(out, CPU).cases
    asked.machine = Machine(normal(0.05))
    done = invoke("calibrate", OTHER, "--device", "cpu", "--arm", "plain/none", "--out", str(out))
    after = load(out, CPU).cases
    assert list(after) == list(before) and [name for name in after if after[name] != before[name]] == [key(OTHER, "plain/none")]
    assert f"wide: plain/none on {OTHER}: " in done.text and "without calibration it is 10 %" in done.text


def test_an_arm_that_could_not_be_timed(asked: Asked, tmp_path: Path) -> None:
    out = tmp_path / "thresholds.json"
    asked.dead = ("plain/metadata",)
    done = invoke("calibrate", OTHER, "--device", "cpu", "--out", str(out))
    assert done.code == 4 and list(load(out, CPU).cases) == [key(OTHER, "plain/none")]
    assert f"threearm run '{OTHER}' --arm plain/metadata may say why" in done.text
    asked.dead = ("plain/none", "plain/metadata")
    before = out.read_bytes()
    assert invoke("calibrate", OTHER, "--device", "cpu", "--out", str(out)).code == 5 and out.read_bytes() == before


def test_an_interrupt_writes_nothing(asked: Asked, tmp_path: Path) -> None:
    asked.interrupt = True
    done = invoke("calibrate", TINY, "--device", "cpu", "--out", str(tmp_path / "thresholds.json"))
    assert done.code == 130 and "interrupted: nothing was written" in done.text and not list(tmp_path.iterdir())


def refused(asked: Asked, *arguments: str) -> Done:
    """A command that must end before anything is timed."""
    done = invoke("calibrate", TINY, *arguments)
    assert asked.generations == 0 and len(done.lines) <= 2, done.text
    return done


def test_what_is_refused_before_anything_is_timed(asked: Asked, tmp_path: Path) -> None:
    out = tmp_path / "thresholds.json"
    save(stored(none=0.012), out)
    done = refused(asked, "--device", "cpu", "--out", str(out))
    assert done.code == 2 and f"--out {out} is of another machine: cpu none, here some CPU" in done.text
    done = refused(asked, "--device", "cpu", "--out", str(tmp_path / "none" / "t.json"))
    assert done.code == 2 and "no such folder" in done.text
    for wrong in ("A", "=b"):
        assert refused(asked, "--device", "cpu", "--env", wrong).text.strip() == f"threearm: --env {wrong}: it must be NAME=value"
    done = refused(asked, "--device", "cpu", "--contract", "span")
    assert done.code == 2 and done.text.strip() == "threearm: --contract span: allowed on cpu is auto | wall"
    done = refused(asked, "--device", "cuda", "--contract", "kernel", "--out", str(out))
    assert done.code == 2 and done.text.strip() == "threearm: --contract kernel: allowed on cuda is auto | span | wall"
    done = refused(asked, "--device", "cpu", "--arm", "elsewhere", "--out", str(tmp_path / "new.json"))
    assert done.code == 5 and f"not calibrated: elsewhere/none on {TINY}: needs a GPU" in done.text and "no arm can run here" in done.text


def test_no_process_is_in_two_comparisons() -> None:
    numbered: list[Any] = [[number] for number in range(8)]
    assert split(numbered, 3) == [[[0], [1], [2]], [[3], [4], [5]]] and split(numbered[:2], 3) == []
