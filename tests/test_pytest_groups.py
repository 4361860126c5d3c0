"""Groups of tests under pytest-xdist, with processes that die: every test is run once or was died at, in the process of its group, and
there is an end. The processes are played: like pytest-xdist's, they begin with a test when they have the next one, or word that none
comes."""
from __future__ import annotations

import collections
import random
from typing import Any

import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

from xdist.remote import Producer

from harness.pytest_groups import ByGroup


def group_of(nodeid: str) -> str:
    return nodeid.partition("/")[0]


class Process:
    """One process of pytest-xdist, seen from its controller, and what is on its way to it."""

    def __init__(self, name: str) -> None:
        self.gateway = type("Gateway", (), {"id": name})
        self.queue: collections.deque[int] = collections.deque()
        self.shutting_down = self.dead = False

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.dead:
            raise OSError("cannot send")
        self.queue.extend(indices)

    def shutdown(self) -> None:
        self.shutting_down = True


class Session:
    """What of pytest-xdist's controller decides about the end. deadly: tests whose process dies at them. Events come in an order that
    `chance` picks."""

    def __init__(self, tests: list[str], processes: int, deadly: set[str], chance: random.Random) -> None:
        option = type("Option", (), {"loadscopereorder": True})
        config: Any = type("Config", (), {"option": option, "getvalue": lambda self, name: [f"{processes}*popen"]})()
        self.sched = ByGroup(config, Producer("test", enabled=False), group_of)
        self.tests, self.deadly, self.chance = tests, set(deadly), chance
        self.ran: list[tuple[str, str]] = []  # (test, process)
        self.crashed: list[str] = []
        self.stopping, self.started = False, 0
        self.starting: list[Process] = []
        self.ready: list[Process] = []
        self.going: list[Process] = []
        for _ in range(processes):
            self.start()

    def start(self) -> None:
        self.starting.append(Process(f"gw{self.started}"))
        self.started += 1

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            for node in self.sched.nodes:
                node.shutdown()

    def run(self) -> bool:
        """To the end; False where nobody can go on."""
        while self.starting or self.ready or self.going:
            able = [(self.be_ready, p) for p in self.starting] + [(self.collect, p) for p in self.ready]
            able += [(self.step, p) for p in self.going if p.dead or p.shutting_down or len(p.queue) > 1]
            if not able:
                return False
            what, process = self.chance.choice(able)
            what(process)
            if self.sched.tests_finished:
                self.stop()
        return True

    def be_ready(self, process: Process) -> None:
        self.starting.remove(process)
        self.ready.append(process)
        if self.stopping:
            process.shutdown()
        else:
            self.sched.add_node(process)

    def collect(self, process: Process) -> None:
        self.ready.remove(process)
        self.going.append(process)
        if not self.stopping:
            self.sched.add_node_collection(process, self.tests)
            if self.sched.collection_is_completed:
                self.sched.schedule()

    def step(self, process: Process) -> None:
        """A test is over; or it died at one, which the controller is told later; or it has ended."""
        if process.dead:
            self.going.remove(process)
            at = self.sched.remove_node(process) if process in self.sched.nodes else None
            self.crashed += [at] if at else []
            self.stopping = False
            self.start()
        elif process.queue:
            index = process.queue.popleft()
            if self.tests[index] in self.deadly:
                self.deadly.remove(self.tests[index])
                process.dead = process.shutting_down = True
                return
            self.ran.append((self.tests[index], process.gateway.id))
            self.sched.mark_test_complete(process, index)
        else:
            self.going.remove(process)
            if process in self.sched.nodes:
                assert not self.sched.remove_node(process)


@pytest.mark.parametrize("deaths", [0, 1, 2, 5])
def test_it_ends_wherever_processes_die(deaths: int) -> None:
    """Thousands of sessions: groups of one to four tests, one to four processes."""
    for seed in range(1500):
        chance = random.Random(seed)
        tests = [f"g{group}/{number}" for group in range(chance.randint(1, 6)) for number in range(chance.randint(1, 4))]
        deadly = set(chance.sample(tests, min(deaths, len(tests))))
        session = Session(tests, chance.randint(1, 4), deadly, chance)
        assert session.run(), f"nobody goes on: seed {seed}, died at {deadly}"
        assert sorted(session.crashed) == sorted(deadly), seed
        assert sorted(test for test, _ in session.ran) == sorted(set(tests) - deadly), seed
        together: dict[str, set[str]] = {}
        for test, process in session.ran:
            together.setdefault(group_of(test), set()).add(process)
        for group, processes in together.items():  # one, and one more for each that died at it
            assert len(processes) <= 1 + sum(group_of(test) == group for test in deadly), seed


def test_work_for_a_process_that_just_died_is_not_lost() -> None:
    """The controller does not know yet; what it deals out comes back."""
    session = Session([f"g{group}/0" for group in range(8)], 2, set(), random.Random(1))
    for process in list(session.starting):
        session.be_ready(process)
    first, second = session.ready
    for process in (first, second):
        session.collect(process)
    first.dead = True
    session.sched.mark_test_complete(first, first.queue.popleft())
    assert first.shutting_down
    assert session.run()
    assert len(session.crashed) == 1 and len(session.ran) == 6 and session.started == 3


def test_a_process_that_found_other_tests_gets_none() -> None:
    session = Session(["g0/0", "g1/0", "g2/0"], 1, {"g0/0"}, random.Random(1))
    process = session.starting[0]
    session.be_ready(process)
    session.collect(process)
    other = Process("gw1")
    session.sched.add_node(other)
    session.sched.add_node_collection(other, ["g0/0"])
    assert other.shutting_down and not other.queue
