"""Ranks as threads of one process: exact, in rank order, and every mistake between ranks has a name.

What a rank sends is copied when it is issued (posted) and read when it is waited for (met), so nothing can deadlock
that would not on a network. Torch's default generator is process-wide: ranks that seed it race, so wire never
touches it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fourfold.wire.errors import Mismatch, RankFailed, Stalled, WireError
from fourfold.wire.work import Pending, Steps

HURRY = 8.0
"""Seconds that a collective may take once somebody wishes to stop: one that is stuck must not hold up the end."""


class Post(NamedTuple):
    """What one rank put down for one slot: what it says that it is doing, and copies of its parts."""

    signature: str
    parts: Sequence[Tensor]


@dataclass
class Meeting:
    """The posts of one slot, how many members have read them, and what wakes those who wait for the last post."""

    full: threading.Condition
    posts: dict[int, Post] = field(default_factory=dict)
    read: int = 0


class Room:
    """Where the ranks of one launch meet: their posts, who has failed, who is gone.

    One lock for all. A meeting wakes its own members, and only when it is full: were all ranks woken by every post,
    most would find that they must wait on, and n ranks would take some n² turns a collective instead of n. `changed`
    is for letters, and for the launching thread.
    """

    def __init__(self, size: int, timeout: float, turn: threading.Lock | None = None) -> None:
        """A room for so many ranks.

        Args:
            turn: held by the one rank that may run; whoever waits for others gives it back meanwhile. None: all run.
        """
        self.size, self.timeout, self.turn = size, timeout, turn
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.meetings: dict[Hashable, Meeting] = defaultdict(lambda: Meeting(threading.Condition(lock)))
        self.letters: dict[Hashable, deque[Tensor]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.gone: set[int] = set()
        self.hurried: float | None = None

    def fail(self, rank: int, error: BaseException) -> None:
        """A rank raised: break all others out. Only the first failure counts."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self._wake()

    def finish(self, rank: int) -> None:
        """A rank's body has returned: it will post nothing more."""
        with self.changed:
            self.gone.add(rank)
            self._wake()

    def hurry(self) -> None:
        """Somebody wishes to stop: from now on a collective has `HURRY` seconds."""
        with self.changed:
            self.hurried = self.hurried or time.monotonic()
            self._wake()

    def post(self, key: Hashable, index: int, post: Post, size: int) -> None:
        """Put down what one of `size` members sends."""
        with self.changed:
            self.check()
            meeting = self.meetings[key]
            meeting.posts[index] = post
            if len(meeting.posts) == size:
                meeting.full.notify_all()

    def meet(self, key: Hashable, members: Sequence[int], what: str) -> list[Post]:
        """Every member's post, in order, once all are there."""

        with self.changed:
            meeting = self.meetings[key]

            def missing() -> list[int]:
                return [rank for index, rank in enumerate(members) if index not in meeting.posts]

            self.until(missing, what, meeting.full)
            meeting.read += 1
            if meeting.read == len(members):
                del self.meetings[key]
            return [meeting.posts[index] for index in range(len(members))]

    def until(self, missing: Callable[[], list[int]], what: str, woken: threading.Condition) -> None:
        """Wait (holding the lock) until nobody is missing; `woken` is told of what may end the wait.

        Raises:
            RankFailed: another rank raised.
            Stalled: a missing rank has returned, or did not come in time.
        """
        began = time.monotonic()
        while late := missing():
            self.check()
            names = ", ".join(map(str, late))
            if ended := [rank for rank in late if rank in self.gone]:
                raise Stalled(f"{what}: rank {ended[0]} has returned and will never enter it")
            left, limit = self._left(began)
            if left <= 0:
                raise Stalled(f"{what}: rank {names} did not enter it within {limit}")
            woken.wait(left)

    def _wake(self) -> None:
        """Whoever waits looks again (the caller holds the lock)."""
        self.changed.notify_all()
        for meeting in self.meetings.values():
            meeting.full.notify_all()

    def _left(self, began: float) -> tuple[float, str]:
        """Seconds left to a wait, and the limit in words."""
        now = time.monotonic()
        left, limit = began + self.timeout - now, f"{self.timeout:g} s"
        if self.hurried is not None and max(began, self.hurried) + HURRY - now < left:
            left, limit = max(began, self.hurried) + HURRY - now, f"{HURRY:g} s, after a signal to stop"
        return left, limit

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a wait (without the lock of the room): others may run."""
        if self.turn is None:
            yield
            return
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def check(self) -> None:
        """Raise if another rank has failed."""
        if self.failure is not None:
            rank, error = self.failure
            raise RankFailed(rank, self.size, f"{type(error).__name__}: {error}") from error


class ThreadFabric:
    """One rank's way into the room."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank = room, rank
        self._made: Counter[Hashable] = Counter()

    def channel(self, name: str, members: Sequence[int], ordered: bool) -> ThreadChannel:
        """A channel among `members`; the n-th of a rank meets the n-th of the others. Sums are always in rank order."""
        key = (name, tuple(members))
        self._made[key] += 1
        return ThreadChannel(self.room, (*key, self._made[key]), tuple(members), self.rank)

    def leave(self) -> None:
        """Nothing to let go of."""


class ThreadChannel:
    """A group of thread ranks as one of them sees it."""

    native_all_reduce = native_reduce_scatter = False

    def __init__(self, room: Room, key: Hashable, members: tuple[int, ...], rank: int) -> None:
        self.room, self.key, self.members = room, key, members
        self.size, self.index = len(members), members.index(rank)
        self.cancelled = False
        self.thread = threading.get_ident()
        """The rank's own: only it can have the turn."""
        self._signatures: dict[int, str] = {}
        self._slots = 0

    def reserve(self, signature: str) -> int:
        """A number, and what this rank says that will cross; compared when the ranks meet."""
        self._slots += 1
        self._signatures[self._slots] = signature
        return self._slots

    def all_gather(
        self, slot: int, out: Tensor, shard: Tensor, splits: Sequence[int], *, later: bool = False
    ) -> Pending:
        """Post the shard, meet, copy every part."""

        def take(posts: list[Post]) -> None:
            for part, post in zip(out.split(list(splits)), posts, strict=True):
                part.copy_(post.parts[0])

        return self._meeting(slot, [shard.clone()], take)

    def all_to_all(
        self, slot: int, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        """Post all parts, meet, copy those for this rank."""
        signature = self._signatures[slot]

        def take(posts: list[Post]) -> None:
            for sender, (part, post) in enumerate(zip(out.split(list(out_splits)), posts, strict=True)):
                found = post.parts[self.index].numel()
                if found != part.numel():
                    raise Mismatch(
                        f"{signature}: rank {self.members[self.index]} expects {part.numel()} elements from rank "
                        f"{self.members[sender]}, which sends {found}; make out_splits here equal in_splits there"
                    )
                part.copy_(post.parts[self.index])

        return self._meeting(slot, inp.clone().split(list(in_splits)), take)

    def driven(self, steps: Steps) -> Steps:
        """As it is: the caller polls."""
        return steps

    def all_reduce(self, slot: int, tensor: Tensor) -> Pending:
        """Never called."""
        raise WireError(f"slot {slot}: thread ranks have no sums of their own; wire composes them")

    def reduce_scatter(self, slot: int, out: Tensor, full: Tensor) -> Pending:
        """Never called."""
        return self.all_reduce(slot, full)

    def broadcast(self, slot: int, tensor: Tensor, source: int) -> Pending:
        """The source posts, all meet."""
        return self._meeting(
            slot,
            [tensor.clone()] if self.index == source else [],
            lambda posts: None if self.index == source else tensor.copy_(posts[source].parts[0]),
        )

    def send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        """Put a copy into the receiver's box."""
        with self.room.changed:
            self.room.check()
            self.room.letters.setdefault((self.key, self.index, to, tag), deque()).append(tensor.clone())
            self.room.changed.notify_all()
        return _Done()

    def receive(self, tensor: Tensor, source: int, tag: int) -> Pending:
        """Take the oldest letter from the box."""
        return _Letter(self, tensor, source, tag)

    def cancel(self) -> None:
        """Whoever waits here for a letter waits no longer."""
        with self.room.changed:
            self.cancelled = True
            self.room.changed.notify_all()

    def _meeting(self, slot: int, parts: Sequence[Tensor], take: Callable[[list[Post]], object]) -> Pending:
        self.room.post((self.key, slot), self.index, Post(self._signatures[slot], parts), self.size)
        return _Meet(self, slot, self._signatures.pop(slot), take)


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class _Meet:
    def __init__(self, channel: ThreadChannel, slot: int, signature: str, take: Callable[[list[Post]], object]) -> None:
        self._channel, self._slot, self._signature, self._take = channel, slot, signature, take

    def done(self) -> bool:
        room = self._channel.room
        with room.changed:
            return len(room.meetings[self._channel.key, self._slot].posts) == self._channel.size

    def wait(self) -> None:
        members, room = self._channel.members, self._channel.room
        with nullcontext() if self.done() else room.aside():
            posts = room.meet((self._channel.key, self._slot), members, self._signature)
        _agree(members, [post.signature for post in posts])
        self._take(posts)


class _Letter:
    def __init__(self, channel: ThreadChannel, tensor: Tensor, source: int, tag: int) -> None:
        self._channel, self._tensor, self._source, self._tag = channel, tensor, source, tag
        self._key = (channel.key, source, channel.index, tag)

    def done(self) -> bool:
        return self._key in self._channel.room.letters

    def wait(self) -> None:
        room, sender = self._channel.room, self._channel.members[self._source]
        what = f"receive with tag {self._tag} on rank {self._channel.members[self._channel.index]}"

        def missing() -> list[int]:
            if self._channel.cancelled:
                raise WireError(f"{what}: broken off")
            return [] if self._key in room.letters else [sender]

        own = threading.get_ident() == self._channel.thread
        with room.aside() if own else nullcontext(), room.changed:
            room.until(missing, what, room.changed)
            box = room.letters[self._key]
            letter = box.popleft()
            if not box:  # tags may never come again: an empty box for each would stay for ever
                del room.letters[self._key]
        if letter.numel() != self._tensor.numel() or letter.dtype != self._tensor.dtype:
            raise Mismatch(
                f"{what}: expected {self._tensor.numel()} × {self._tensor.dtype} from rank {sender}, "
                f"found {letter.numel()} × {letter.dtype}"
            )
        self._tensor.copy_(letter)


def _agree(members: Sequence[int], signatures: Sequence[str]) -> None:
    """All ranks say the same, or an error that names those who differ from most."""
    (usual, _), *others = Counter(signatures).most_common()
    if others:
        odd = [f"rank {rank} in {mine}" for rank, mine in zip(members, signatures, strict=True) if mine != usual]
        raise Mismatch(f"ranks entered different collectives: {'; '.join(odd)}; the others in {usual}")
