"""One run: what the scheduler hands to the executor, and the executor's only way back to the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Protocol

import msgspec

from peri_tui.agent.cancel import CancelToken
from peri_tui.agent.scheduler.store import InstanceRow, TaskRow
from peri_tui.core.messages import Submit, TaskEnded, TaskEvent
from peri_tui.core.states import StopReason, TaskState


class Desk(Protocol):
    """What a run may ask of its scheduler."""

    def emit(self, task: str, event: TaskEvent) -> bool:
        """Take an event of the task."""

    async def drain(self, task: str) -> None:
        """Wait while the task is too far ahead of the disk."""

    async def move(self, run: Run, to: TaskState, cause: str) -> TaskRow:
        """Take an arrow for the run."""

    async def complete(self, run: Run, end: TaskEnded) -> bool:
        """Record a completion."""

    async def stop(self, run: Run, reason: StopReason, source: str) -> None:
        """Stop the run from inside."""


class Run:
    """One task while this agent has it, from the queue to its end.

    ``row`` is the newest known row, ``epoch`` the one under which this agent owns the task; ``history`` the session's conversation, which the executor extends and the end
    stores (None: leave what is stored). ``recorded`` is the end once it is durable. ``refused`` is true while the
    store did not take the stop.
    """

    def __init__(self, row: TaskRow, desk: Desk) -> None:
        self.row = row
        # Not the row's: a row that we read later may already belong to another owner.
        self.epoch = row.epoch
        self.token = CancelToken()
        self.history: list[dict[str, Any]] | None = None
        self.recorded: TaskEnded | None = None
        self.refused = False
        self.started = False
        self._desk = desk

    @property
    def task(self) -> str:
        """The task's id."""
        return self.row.task

    @cached_property
    def submit(self) -> Submit:
        """What was asked for."""
        return msgspec.json.decode(self.row.submit, type=Submit)

    @property
    def cut_seq(self) -> int:
        """The last sequence number before the stop; 0 without one."""
        return self.row.cut_seq

    @property
    def durable(self) -> bool:
        """False when the store refused to record the stop (it is tried again, and may heal)."""
        return not self.refused

    def learn(self, row: TaskRow) -> None:
        """Keep the newer of two rows: answers of the store may be heard out of order."""
        if (row.epoch, row.version, row.last_seq) >= (self.row.epoch, self.row.version, self.row.last_seq):
            self.row = row

    def emit(self, event: TaskEvent) -> bool:
        """Take one event, at once; False: dropped, because the task was stopped (text) or has ended."""
        return self._desk.emit(self.task, event)

    async def drain(self) -> None:
        """Wait while the events run too far ahead of the disk; await it after each ``emit`` of a stream."""
        await self._desk.drain(self.task)

    async def set_state(self, to: TaskState, cause: str = "") -> TaskRow:
        """Take an arrow (running ⇄ waiting), after everything emitted before is durable.

        Raises:
            IllegalTransition: a stop was first; also StaleEpoch, StoreUnavailable.
        """
        return await self._desk.move(self, to, cause)

    async def complete(self, end: TaskEnded) -> bool:
        """Make a completion durable while everything can still be undone.

        Returns False when a stop was first: then the executor does the stop sequence and returns its end.

        Raises:
            StoreUnavailable: it is not known to be recorded.
        """
        return await self._desk.complete(self, end)

    async def stop(self, reason: StopReason, source: str) -> None:
        """Stop this run from inside: a limit, a model's error. Sets the token at once, like any other stop."""
        await self._desk.stop(self, reason, source)


class Executor(Protocol):
    """Does the work of tasks. Both methods run in a task that nobody cancels."""

    async def execute(self, run: Run) -> TaskEnded:
        """Do the whole task, including the stop sequence when the token is set, and return the end.

        The token may be set already when this is called: then nothing may be started.
        """

    async def recover(self, row: TaskRow) -> TaskEnded:
        """Roll back a task whose body is gone (lost owner, late completion, another try). Never run it again."""


# Nudges the living owner of a task that its state changed; may fail, the owner re-reads its tasks anyway.
Route = Callable[[InstanceRow, str], Awaitable[None]]
