"""The cancel token of a task: set once, heard at once by everything that must stop.

``set`` runs on the event loop, synchronously: the listeners (shut the model's socket, tell the supervisors) are
called before it returns, then the body gets ``asyncio.Task.cancel`` exactly once. A second ``cancel`` would cut
cleanups that await, which is why nothing else in the agent cancels a body.

The idea that a cancellation carries who asked and why is trio's (``trio.Cancelled``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from peri_tui.core.states import StopReason


@dataclass(frozen=True, slots=True)
class CancelCause:
    """Who asked for the stop, why and when (``mono`` in monotonic nanoseconds)."""

    reason: StopReason
    source: str
    cancel_id: str
    mono: int


class CancelToken:
    """One task's stop: not set, set (graceful), or forced. Not thread-safe: one event loop."""

    def __init__(self) -> None:
        self.cause: CancelCause | None = None
        self.forced = False
        self.errors: list[Exception] = []
        self._event = asyncio.Event()
        self._force_event = asyncio.Event()
        self._on_set: list[Callable[[CancelCause], None]] = []
        self._on_force: list[Callable[[], None]] = []
        self._body: asyncio.Task[object] | None = None

    @property
    def is_set(self) -> bool:
        """True from the first ``set`` on."""
        return self.cause is not None

    def bind(self, body: asyncio.Task[object]) -> None:
        """Name the task that ``set`` cancels; cancelled at once if the token is set already."""
        self._body = body
        if self.is_set:
            body.cancel(str(self.cause))

    def on_set(self, listener: Callable[[CancelCause], None]) -> Callable[[], None]:
        """Call ``listener`` at the stop (now, if it came already). Returns a function that removes it."""
        if self.cause is not None:
            self._call(lambda: listener(self.cause) if self.cause else None)
            return lambda: None
        self._on_set.append(listener)
        return lambda: self._on_set.remove(listener) if listener in self._on_set else None

    def on_force(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` when the stop is forced (now, if it was). Returns a function that removes it."""
        if self.forced:
            self._call(listener)
            return lambda: None
        self._on_force.append(listener)
        return lambda: self._on_force.remove(listener) if listener in self._on_force else None

    def set(self, cause: CancelCause) -> bool:
        """Stop the task. True for the first call; later ones change nothing (the first cause is kept)."""
        if self.cause is not None:
            return False
        self.cause = cause
        for listener in list(self._on_set):
            self._call(lambda listener=listener: listener(cause))  # type: ignore[misc]
        self._event.set()
        if self._body is not None:
            self._body.cancel(f"{cause.reason} by {cause.source}")
        return True

    def force(self) -> bool:
        """Skip every grace period from now on. True for the first call; needs a ``set`` before."""
        if self.cause is None or self.forced:
            return False
        self.forced = True
        for listener in list(self._on_force):
            self._call(listener)
        self._force_event.set()
        return True

    async def wait(self) -> CancelCause:
        """Wait until the token is set and return the cause."""
        await self._event.wait()
        assert self.cause is not None
        return self.cause

    async def wait_forced(self) -> None:
        """Wait until the stop is forced."""
        await self._force_event.wait()

    def _call(self, listener: Callable[[], object]) -> None:
        # One listener that fails must not keep the others from stopping their part.
        try:
            listener()
        except Exception as error:
            self.errors.append(error)
