"""A machine that is one worker of a pipeline: bodies run in the calling thread, moves travel between ranks.

Compute never waits for a transfer that it does not need: what is sent goes out beside it, and what has arrived is
taken whenever an action ends. Bodies run in one thread for `Inline`'s reasons.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from fourfold.schedule.action import Action, ScheduleError
from fourfold.schedule.inline import Inline
from fourfold.schedule.machine import Body, Completion
from fourfold.schedule.program import Lane, Program

Content = TypeVar("Content")


class Post(Protocol[Content]):
    """What carries moves between workers. A move goes by its number in the program, the same on every rank."""

    def expect(self, source: int, count: int) -> None:
        """In the step that begins, `count` moves will come from `source`."""
        ...

    def send(self, number: int, move: Action) -> None:
        """Hand over what the move reads; returns at once, however long it takes to go."""
        ...

    def poll(self) -> tuple[int, int, Content] | None:
        """(source, number, content) of a move that has come, or None. Never blocks; raises if one was lost."""
        ...

    def receive(self) -> tuple[int, int, Content]:
        """The same, once one has come."""
        ...

    def put(self, move: Action, content: Content) -> None:
        """Make the content what the move writes."""
        ...


class Ranks(Generic[Content]):
    """Worker `worker` of a program.

    A move from this worker is complete when it was handed over: whoever carries it keeps what is under way, and the
    next one need not wait. A move to it is complete when it has come; one that comes before the program wants it is
    kept. It may drive the program again and again, a step each time.

    Exceptions carry a note that names the action.
    """

    def __init__(self, program: Program, worker: int, bodies: Mapping[str, Body], post: Post[Content]) -> None:
        self.owns = (worker,)
        self._inline, self._queued = Inline(bodies, worker), 0
        self._actions, self._post = program.actions, post
        own = [(number, one) for number, one in enumerate(program.actions) if worker in (one.worker, one.source)]
        self._numbers = {id(one): number for number, one in own if one.source is not None}
        self._comes = {number: one.source for number, one in own if one.source not in (None, worker)}
        self._size, self._left = len(own), 0
        self._kept: dict[int, Content] = {}
        self._wanted: dict[int, float] = {}
        self._outstanding: set[int] = set()
        self._done: deque[Completion] = deque()

    def issue(self, action: Action, lane: Lane) -> None:
        """Queue an action, send a move, or want one; the first of a step announces how many will come.

        Raises:
            ScheduleError: there is no body for its kind.
        """
        if not self._left:
            self._begin()
        if action.source is None:
            self._inline.issue(action, lane)
            self._queued += 1
            return
        number, now = self._numbers[id(action)], perf_counter()
        if number not in self._comes:
            self._send(number, action, now)
        elif number in self._kept:
            self._arrive(number, self._kept.pop(number), now)
        else:
            self._wanted[number] = now

    def next(self) -> Completion:
        """What has arrived, else the body that waits longest, else what arrives next."""
        while not self._done:
            found = self._come(wait=not self._queued)
            if found is not None:
                self._sort(*found)
            else:
                self._queued -= 1
                self._done.append(self._inline.next())
        self._left -= 1
        return self._done.popleft()

    def due(self) -> bool:
        """Whether something has been handed over, or has come."""
        while (found := self._come(wait=False)) is not None:
            self._sort(*found)
        return bool(self._done)

    def _begin(self) -> None:
        self._left, self._outstanding = self._size, set(self._comes)
        for source, count in Counter(self._comes.values()).items():
            assert source is not None
            self._post.expect(source, count)

    def _send(self, number: int, move: Action, now: float) -> None:
        try:
            self._post.send(number, move)
        except Exception as error:
            error.add_note(f"during {move}")
            raise
        self._done.append(Completion(move, now, perf_counter()))

    def _come(self, *, wait: bool) -> tuple[int, int, Content] | None:
        """What has come."""
        try:
            return self._post.receive() if wait else self._post.poll()
        except Exception as error:
            for number in self._wanted:
                error.add_note(f"during {self._actions[number]}")
            raise

    def _sort(self, source: int, number: int, content: Content) -> None:
        """An arrival goes to the move that wants it, or is kept for it."""
        if self._comes.get(number) != source or number not in self._outstanding:
            known = str(self._actions[number]) if 0 <= number < len(self._actions) else "none that there is"
            raise ScheduleError(
                f"worker {self.owns[0]}: worker {source} sent action {number} ({known}), which is not, or no more, a "
                "move between the two; lay out the same program on every rank"
            )
        self._outstanding.remove(number)
        if number in self._wanted:
            self._arrive(number, content, self._wanted.pop(number))
        else:
            self._kept[number] = content

    def _arrive(self, number: int, content: Content, start: float) -> None:
        move = self._actions[number]
        self._post.put(move, content)
        self._done.append(Completion(move, start, perf_counter()))
