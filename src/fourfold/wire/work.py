"""A collective under way. An algorithm is a generator: it yields what it has to wait for, then goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Protocol

Steps = Generator["Pending", None, None]
"""An algorithm: yields each transfer that must be complete before its next line may run."""


class Pending(Protocol):
    """Transfers that a backend has accepted."""

    def done(self) -> bool:
        """Complete for certain; False where the backend cannot tell without blocking."""
        ...

    def wait(self) -> None:
        """Block until complete; raise what went wrong."""
        ...


class Observer(Protocol):
    """Who hears of a work's life: the axis, for its ledger, its watch and its errors."""

    def waiting(self, work: Work) -> None:
        """The caller blocks in it."""
        ...

    def resumed(self, work: Work) -> None:
        """The caller goes on; the work is not finished."""
        ...

    def finished(self, work: Work) -> None:
        """Its results are in place."""
        ...

    def failed(self, work: Work, error: Exception) -> Exception:
        """What to raise for the error that a backend raised."""
        ...


class Work:
    """A collective that was issued. Its tensors belong to it until `wait` has returned.

    `advance` lets a collective of several rounds (an all-reduce: exchange, sum, gather) start its next round while
    the caller computes on. Rounds carry their own tags, so ranks may advance at different moments; only *issuing*
    must happen in the same order on every rank. Where a backend cannot tell what is complete (gloo, of messages), that
    starts nothing: `proceed` is for a caller that has computed for a while and has as much to compute again.

    Attributes:
        op, kind, bytes, number: what is under way, the bytes this rank hands over for it, and which call it is.
        issued, exposed: when it was issued, and how long callers have blocked in `wait` (ns).
    """

    __slots__ = ("_observer", "_pending", "_rounds", "_steps", "bytes", "exposed", "issued", "kind", "number", "op")

    def __init__(
        self,
        op: str,
        kind: str,
        nbytes: int,
        number: int,
        steps: Steps | None,
        observer: Observer | None,
        rounds: int = 1,
    ) -> None:
        self.op, self.kind, self.bytes, self.number = op, kind, nbytes, number
        self.issued, self.exposed = time.perf_counter_ns(), 0
        self._steps, self._observer, self._rounds = steps, observer, rounds
        self._pending: Pending | None = None
        if steps is not None:
            self._guarded(self._next)

    @classmethod
    def complete(cls, op: str, kind: str) -> Work:
        """A work with nothing left to do (an axis of one rank)."""
        return cls(op, kind, 0, 0, None, None)

    @property
    def done(self) -> bool:
        """All rounds are complete and the results are in place."""
        return self._steps is None

    def advance(self) -> bool:
        """Run every round that can run without blocking; True when all are complete."""
        while self._pending is not None:
            if not self._pending.done():
                return False
            self._guarded(self._round)
        return self.done

    def proceed(self) -> None:
        """Block until the first of two rounds is complete, and begin the second; do nothing in the last round.

        Call it for works in the order in which they were issued, as `wait`.

        Raises:
            WireError: as `wait`.
        """
        if self._pending is None or self._rounds == 1:
            return
        began = time.perf_counter_ns()
        if self._observer is not None:
            self._observer.waiting(self)
        self._guarded(self._round)
        self.exposed += time.perf_counter_ns() - began
        if self._observer is not None:
            self._observer.resumed(self)

    def wait(self) -> None:
        """Block until the results are in place. Waiting again does nothing.

        Raises:
            WireError: the collective failed, or a rank did not come in time.
        """
        if self._steps is None:
            return
        began = time.perf_counter_ns()
        if self._observer is not None:
            self._observer.waiting(self)
        while self._pending is not None:
            self._guarded(self._round, began)

    def _round(self) -> None:
        assert self._pending is not None
        self._pending.wait()
        self._rounds = max(1, self._rounds - 1)
        self._next()

    def _next(self) -> None:
        assert self._steps is not None
        self._pending = next(self._steps, None)

    def _guarded(self, action: Callable[[], None], began: int | None = None) -> None:
        try:
            action()
        except Exception as error:
            self._steps = self._pending = None
            if self._observer is None:
                raise
            raise self._observer.failed(self, error) from error
        if self._pending is None:
            self._steps = None
            self.exposed += 0 if began is None else time.perf_counter_ns() - began
            if self._observer is not None:
                self._observer.finished(self)
