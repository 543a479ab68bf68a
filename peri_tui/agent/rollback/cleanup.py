"""The cleanups of one task: newest first, each with its own deadline, none able to stop the others.

The order is that of ``contextlib.AsyncExitStack``; unlike there, every cleanup runs in a task of its own, so one
that swallows its cancellation is left behind and named instead of waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

GRACE: Final = 0.05
"""Seconds that a cancelled cleanup gets to end."""


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """How one cleanup ended; ``error`` is empty when ok, ``seconds`` how long it took."""

    name: str
    ok: bool
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Cleanup:
    name: str
    make: Callable[[], Coroutine[Any, Any, object]]
    deadline: float


class Cleanups:
    """A stack of cleanups. ``run`` belongs in a supervisor task that nothing cancels."""

    def __init__(self, *, mono: Callable[[], float] = time.monotonic) -> None:
        self._stack: list[_Cleanup] = []
        self._mono = mono
        self.abandoned: set[asyncio.Task[object]] = set()

    def register(self, name: str, make: Callable[[], Coroutine[Any, Any, object]], deadline_s: float) -> None:
        """Add a cleanup: ``make`` returns its coroutine, which has ``deadline_s`` seconds."""
        self._stack.append(_Cleanup(name, make, deadline_s))

    async def run(self) -> list[CleanupResult]:
        """Run all, newest first, and return how each ended; each runs once, however often this is called."""
        results = []
        while self._stack:
            results.append(await self._run(self._stack.pop()))
        return results

    async def _run(self, cleanup: _Cleanup) -> CleanupResult:
        start = self._mono()
        try:
            task: asyncio.Task[object] = asyncio.ensure_future(cleanup.make())
        except Exception as error:
            return CleanupResult(cleanup.name, False, self._mono() - start, _words(error))
        try:
            done, _ = await asyncio.wait({task}, timeout=cleanup.deadline)
            if not done:
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE)
        except asyncio.CancelledError:
            task.cancel()
            raise
        words = self._judge(task, late=not done, deadline=cleanup.deadline)
        return CleanupResult(cleanup.name, not words, self._mono() - start, words)

    def _judge(self, task: asyncio.Task[object], *, late: bool, deadline: float) -> str:
        if not task.done():
            # Kept, so that it is not collected while running; its end is read, so that nothing is logged for it.
            self.abandoned.add(task)
            task.add_done_callback(self._forget)
            return f"did not end within {deadline:g} s and ignores its cancellation"
        if late:
            if not task.cancelled():
                task.exception()
            return f"did not end within {deadline:g} s"
        if task.cancelled():
            return "cancelled itself"
        failure = task.exception()
        return _words(failure) if failure is not None else ""

    def _forget(self, task: asyncio.Task[object]) -> None:
        self.abandoned.discard(task)
        if not task.cancelled():
            task.exception()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
