"""The parent of a local group: it shows progress, passes signals on, and names who failed, died or stalls.

A backend may abort a rank without an exception, so the ranks' own words are not enough: the parent reads what they
wrote (failures, and the watch files of the wire), sees how their processes ended, and ends the rest in time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fourfold.training import failure
from fourfold.training.agent import Agent
from fourfold.training.failure import Failure
from fourfold.training.folder import RunFolder
from fourfold.training.journal import Follower, Record
from fourfold.training.process import living
from fourfold.training.progress import Screen
from fourfold.training.stop import Stop
from fourfold.wire import watch

GRACE = 2.0
"""Seconds that the other ranks have to end by themselves once one has failed."""
JOINING = 60.0
"""Seconds that every rank has at least to start and to join: on a busy machine imports alone take several."""
STOPPING = 8.0
"""Seconds without progress that a group has once somebody wishes to stop: a collective that is stuck never ends."""
POLL = 0.1
"""Seconds between two looks."""


@dataclass
class Group:
    """One start of all ranks: which processes they are, and what is known about their end.

    Attributes:
        attempt: 0, then one more for each restart.
        failing_since: when the parent first saw that a rank had failed (monotonic seconds); None while all is well.
        ended: ranks that the parent has ended itself: their exit is a consequence.
        verdict: the parent's own finding, such as a stall.
        signalled: the ranks were told of the wish to stop.
        stopping_since: when the parent first heard of the wish to stop (monotonic seconds).
    """

    attempt: int
    began: float = field(default_factory=time.monotonic)
    failing_since: float | None = None
    ended: set[int] = field(default_factory=set)
    verdict: Failure | None = None
    signalled: bool = False
    stopping_since: float | None = None


class Supervisor:
    """Watches a group from start to end."""

    def __init__(
        self, agent: Agent, folder: RunFolder, size: int, *, stall_after: float, screens: Sequence[Screen]
    ) -> None:
        """Put together what is watched.

        Args:
            agent: not started yet.
            folder: of the run.
            size: ranks.
            stall_after: seconds without progress of any rank after which the group is ended.
            screens: shown every journal record.
        """
        self.agent, self.folder, self.size = agent, folder, size
        self.stall_after, self.screens = stall_after, screens
        self.failures: list[Failure] = []
        self.ending: Record | None = None
        self._follower = Follower(folder.journal)
        self._group = Group(0)

    def run(self) -> bool:
        """Start the group, watch it to its end, and return whether it ended well."""
        with Stop() as stop:
            self.agent.start()
            try:
                while self.agent.running:
                    self.agent.join(POLL)
                    self._look(stop)
            except BaseException:  # a second Ctrl-C, or a defect here: nobody is left behind
                self._end(living(self._ranks))
                raise
        self._show()
        self._follower.close()
        self._conclude_groups()
        return self.agent.ok

    def _look(self, stop: Stop) -> None:
        self._show()
        self._conclude_groups()
        if stop():
            self.agent.give_up()
            self._pass_on()
        pids = living(self._ranks)
        if self._group.failing_since is None and self._someone_failed(pids):
            self._group.failing_since = time.monotonic()
        if self._group.failing_since is None:
            self._watch_for_stall()
        elif time.monotonic() - self._group.failing_since > GRACE:
            self._end(pids)

    def _show(self) -> None:
        for record in self._follower.poll():
            if record["kind"] == "end":
                self.ending = record
            for screen in self.screens:
                screen.show(record)

    # ---- the ranks' processes

    @property
    def _ranks(self) -> Path:
        return self.folder.ranks(self._group.attempt)

    def _someone_failed(self, pids: dict[int, int]) -> bool:
        """A rank wrote why it failed, or its process is gone without having said that it was done."""
        return any(self._ranks.glob("*.failure.json")) or any(not _alive(pid) for pid in pids.values())

    def _pass_on(self) -> None:
        """Every rank hears of the wish to stop, once; they agree on the step after which they do."""
        self._group.stopping_since = self._group.stopping_since or time.monotonic()
        pids = living(self._ranks)
        if not self._group.signalled and len(pids) == self.size:
            self._group.signalled = True
            for pid in pids.values():
                _signal(pid, signal.SIGTERM)

    def _end(self, pids: dict[int, int]) -> None:
        for rank, pid in pids.items():
            if _alive(pid):
                self._group.ended.add(rank)
                _signal(pid, signal.SIGKILL)

    # ---- stalls

    def _watch_for_stall(self) -> None:
        seen = watch.read_all(self._ranks)
        latest = max((sighting.at / 1e9 for sighting in seen), default=self._group.began)
        patience = self.stall_after if len(seen) == self.size else max(self.stall_after, JOINING)
        # Ranks that save or compute when asked to stop may take their time; one that waits for others may not.
        if self._group.stopping_since is not None and (
            len(seen) < self.size or any(sighting.waiting for sighting in seen)
        ):
            latest, patience = max(latest, self._group.stopping_since), min(patience, STOPPING)
        if time.monotonic() - latest <= patience:
            return
        self._group.failing_since = time.monotonic() - GRACE  # they have had their time
        self._group.verdict = self._stalled(seen, patience)
        self._end(living(self._ranks))

    def _stalled(self, seen: list[watch.Sighting], patience: float) -> Failure:
        absent = sorted(set(range(self.size)) - {sighting.rank for sighting in seen})
        late = absent or watch.culprits(seen)
        others = "; ".join(str(sighting) for sighting in seen)
        if absent:
            reason = f"did not join within {patience:g} s"
        elif late:
            reason = f"stalled: no progress for {patience:g} s while others wait ({others})"
        else:
            reason = f"no rank made progress for {patience:g} s ({others}); if a step may take so long, "
            reason += "raise launch.stall_after"
        if self._group.stopping_since is not None:
            reason += "; a signal had asked the run to stop, so it was ended"
        rank = late[0] if late else 0
        return Failure(rank, _step_of(seen, rank), reason)

    # ---- what became of a group

    def _conclude_groups(self) -> None:
        """For every group that the agent has seen fail: find the cause, and turn to the next group."""
        while len(self.failures) < len(self.agent.failed):
            self.failures.append(self._cause(self.agent.failed[len(self.failures)]))
            self._group = Group(self._group.attempt + 1)

    def _cause(self, codes: dict[int, int]) -> Failure:
        if self._group.verdict is not None:
            return self._group.verdict
        told = failure.read(self._ranks)
        seen = watch.read_all(self._ranks)
        silent = [rank for rank in codes if rank not in {one.rank for one in told}]
        found = list(told)
        for rank in silent:
            output = self.agent.output(self._group.attempt, rank)
            ended = failure.of_exit(codes[rank], rank, _step_of(seen, rank), output)
            # A rank that somebody killed explains those that lost it; one that we or the agent ended explains nothing.
            by_us = rank in self._group.ended or codes[rank] == -signal.SIGTERM
            found.append(replace(ended, consequence=by_us))
        return failure.cause(found) or Failure(min(codes, default=0), None, "ended without a reason")


def _step_of(seen: list[watch.Sighting], rank: int) -> int | None:
    return next((max(0, sighting.step) for sighting in seen if sighting.rank == rank), None)


def _alive(pid: int) -> bool:
    """The process runs (one that has ended but was not waited for does not)."""
    import psutil

    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended in between
