"""Tests that belong together, kept in one process of pytest-xdist; loaded only where pytest-xdist asks for a scheduler.

Its own schedulers of groups may wait for ever after a process has died (pytest-xdist 3.8): whoever takes over its work is given finished
groups, or one test alone, with which a process does not begin before it has the next one or knows that there is none.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdist.scheduler import LoadScopeScheduling


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Deals out groups. A test whose process died is not run again; the others of its group are, in one process."""

    def __init__(self, config: Any, log: Any, group_of: Callable[[str], str]) -> None:
        """group_of: what a test's id has in common with those of its group."""
        super().__init__(config, log)
        self.group_of = group_of

    def _split_scope(self, nodeid: str) -> str:
        return self.group_of(nodeid)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """A process that found other tests than the rest is of no use."""
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            node.shutdown()

    def remove_node(self, node: Any) -> str | None:
        """A process has ended. Returns the test that it was at, None where nothing was left to it."""
        workload: dict[str, dict[str, bool]] = self.assigned_work.pop(node)  # by group, its tests and whether they are done
        if self.collection is None:  # nothing is dealt out before its successor has collected, too
            self.registered_collections.pop(node, None)
        left = [(tests, nodeid) for tests in workload.values() for nodeid, done in tests.items() if not done]
        if not left:
            return None
        tests, crashed = left[0]
        tests[crashed] = True
        self.workqueue.update({group: tests for group, tests in workload.items() if not all(tests.values())})
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Give a process what it needs to go on: two tests, or word that no more will come."""
        if node not in self.registered_collections:  # it gets its share when it has collected
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        try:
            super()._assign_work_unit(node)
        except OSError:  # it has just died: what it was given comes back when that is reported
            node.shutdown()
