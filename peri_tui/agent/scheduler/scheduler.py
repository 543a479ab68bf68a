"""The scheduler: a queue of tasks, one supervisor a running task, and the one function behind every stop.

A stop sets the task's token synchronously, before anything is awaited; the durable compare-and-set runs beside what
the token set off, and only the acknowledgement waits for the commit. A task of another living agent is stopped
through the store and a nudge; a task whose agent is proven dead is taken over, once, and only rolled back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from peri_tui.agent.cancel import CancelCause
from peri_tui.agent.scheduler.events import EventLog
from peri_tui.agent.scheduler.keeper import Keeper
from peri_tui.agent.scheduler.ownership import Liveness
from peri_tui.agent.scheduler.recorder import Recorder, bounded
from peri_tui.agent.scheduler.run import Executor, Route, Run
from peri_tui.agent.scheduler.store import CancelKind, CancelResult, StateStore, TaskRow
from peri_tui.agent.scheduler.supervisor import Supervisor
from peri_tui.agent.scheduler.table import RunTable
from peri_tui.core.ids import make_ulid
from peri_tui.core.messages import (
    CancelAccepted,
    CancelNoop,
    Submit,
    TaskEnded,
    TaskEvent,
)
from peri_tui.core.states import StopReason, TaskState
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import StateError, StoreUnavailable
from peri_tui.log import Log

T = TypeVar("T")

DEADLINE_MS: Final = {"graceful": 9000, "force": 6000}
NUDGE_S: Final = 1.0
_NEVER_STARTED: Final = (
    (Layer.SCHEDULER, Ev.TOKEN_SET),
    (Layer.SCHEDULER, Ev.TASK_UNWOUND),
    (Layer.MODEL, Ev.MODEL_QUIET),
    (Layer.ROLLBACK, Ev.TREE_EMPTY),
    (Layer.ROLLBACK, Ev.ROLLBACK_DONE),
    (Layer.ROLLBACK, Ev.RESOURCES_CLEAN),
    (Layer.SCHEDULER, Ev.ENDED),
)


@dataclass(frozen=True, slots=True)
class _Ask:
    """One request to stop. ``received``: monotonic nanoseconds; ``facts``: what the trace says of it."""

    task: str
    mode: str
    cause: CancelCause
    first: bool
    received: int
    facts: dict[str, Any]


class Scheduler:
    """Runs and stops the tasks of one agent.

    Args:
        store: opened by the caller, who closes it after ``close``.
        log: log and trace.
        executor: does the work.
        instance: this agent's id; register it in the store before ``start``.
        concurrency: how many tasks run at once; tasks of one session run one after the other.
        liveness: proves owners dead; None: nobody is ever proven dead.
        route: nudges a living owner.
        poll_s: how often our tasks are re-read, so that a lost nudge costs at most this.
        patience_s: how long an end waits for a store that refuses.
        wall, mono, make_id: clocks (seconds, nanoseconds) and cancel ids.
    """

    def __init__(
        self,
        store: StateStore,
        log: Log,
        executor: Executor,
        *,
        instance: str,
        concurrency: int = 4,
        liveness: Liveness | None = None,
        route: Route | None = None,
        poll_s: float = 1.0,
        patience_s: float = 1.0,
        wall: Callable[[], float] = time.time,
        mono: Callable[[], int] = time.monotonic_ns,
        make_id: Callable[[], str] = lambda: make_ulid(int(time.time() * 1000), os.urandom(10)),
    ) -> None:
        self.instance = instance
        self.events = EventLog(store, log, on_fenced=self._fenced, wall=wall)
        self._store = store
        self._log = log
        self._liveness = liveness
        self._route = route
        self._mono = mono
        self._make_id = make_id
        self._recorder = Recorder(store, self.events, wall=wall, patience_s=patience_s)
        self._supervisor = Supervisor(
            store, log, executor, events=self.events, recorder=self._recorder, wall=wall
        )
        self._spawn = self._supervisor.spawn
        self._table = RunTable(concurrency, self._start_run)
        self._keeper = Keeper(
            store, log, self, instance=instance, events=self.events, recorder=self._recorder,
            supervisor=self._supervisor, table=self._table, liveness=liveness, mono=mono,
        )  # fmt: skip
        self._poll_s = poll_s
        self._closing = False

    # --- the agent's life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to re-read our tasks."""
        self._keeper.start(self._poll_s)

    async def check(self) -> None:
        """Re-read our tasks once; see ``Keeper.check``."""
        await self._keeper.check()

    async def recover_dead(self) -> list[TaskRow]:
        """Take over the tasks of every agent that is proven dead; see ``Keeper.recover_dead``."""
        return await self._keeper.recover_dead()

    async def close(self, timeout: float = 20.0) -> bool:
        """Take no more tasks, wait for the ends of those that run, and stop. False: some had not ended in time.

        Nothing is stopped here: call ``stop_all`` before.
        """
        self._closing = True
        ended = await self.idle(timeout)
        await self._keeper.stop()
        await self.events.stop()
        return ended

    async def idle(self, timeout: float) -> bool:
        """Wait until this agent has no task but held ones, queued ones included. False: not in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._table.empty.wait()
        except TimeoutError:
            return False
        return True

    def running(self) -> list[TaskRow]:
        """Return the tasks that this agent has: running, waiting, stopping, queued; not those that are held."""
        return [run.row for run in self._table.all() if not self._table.is_held(run)]

    # --- starting ---------------------------------------------------------------------------------------------------

    async def submit(self, submit: Submit) -> TaskRow:
        """Queue a task, and start it when its turn comes. The same submission again changes nothing.

        A queued task taken over from a dead agent is held until its client submits it again.

        Raises:
            Conflict: the id is known with other content. StoreUnavailable: nothing was queued, or we are closing.
        """
        if self._closing:
            raise StoreUnavailable("the agent is closing, it takes no more tasks")
        return await asyncio.shield(self._spawn(self._submit(submit), "submit"))

    async def _submit(self, submit: Submit) -> TaskRow:
        row = await bounded(self._store.submit(submit, self.instance))
        self._table.release(row.task)
        if self._table.get(row.task) is None and row.owner == self.instance:
            if row.state is TaskState.QUEUED:
                self.events.open(row, shown=0)
                self.events.refresh(row.task)
                self._table.enqueue(Run(row, self))
            elif row.has_ended and not self.events.knows(row.task):
                self._log.event("task cancelled before it came", task=row.task, layer=3)
                self.events.open(row, shown=0)
                self.events.refresh(row.task)
        self._table.pump()
        return row

    def _start_run(self, run: Run) -> None:
        self._spawn(self._supervisor.supervise(run, self._table), run.task)

    # --- what a run may ask -----------------------------------------------------------------------------------------

    def emit(self, task: str, event: TaskEvent) -> bool:
        """Take an event of a task; see ``EventLog.emit``."""
        return self.events.emit(task, event)

    async def drain(self, task: str) -> None:
        """Wait while the task is too far ahead of the disk."""
        await self.events.drain(task)

    async def move(self, run: Run, to: TaskState, cause: str) -> TaskRow:
        """Take an arrow; see ``Run.set_state``."""
        return await asyncio.shield(self._spawn(self._recorder.move(run, to, cause), run.task))

    async def complete(self, run: Run, end: TaskEnded) -> bool:
        """Record a completion; see ``Run.complete``."""
        return await self._supervisor.complete(run, end)

    async def stop(self, run: Run, reason: StopReason, source: str) -> None:
        """Stop a run from inside; see ``Run.stop``."""
        await self.cancel(run.task, reason=reason, source=source)

    def _fenced(self, task: str) -> None:
        self._keeper.fenced(task)

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def cancel(
        self,
        task: str,
        *,
        reason: StopReason = StopReason.USER,
        mode: str = "graceful",
        source: str = "",
        cancel_id: str = "",
        attempt: int = 1,
        mono: int | None = None,
        epoch: int = 0,
    ) -> CancelAccepted | CancelNoop:
        """Stop a task, wherever it is: the one function behind every route, and behind every internal stop.

        The token of a task that runs here is set before the first await. Returns after the commit; the caller fills
        in ``re``. Any number of calls have one effect, and answer with the first one's id and reason.

        Args:
            mode: graceful, or force (no grace periods from now on).
            source: the route or the part that asks.
            cancel_id: made here when empty.
            attempt: which try of the client this is.
            mono: monotonic nanoseconds of the key press; default now.
            epoch: only traced. A task is never run twice, so a stop that names an older owner means this task too.

        Raises:
            StoreUnavailable: nothing of the task runs here, and the store cannot be written.
        """
        received = self._mono()
        cause = CancelCause(reason, source, cancel_id or self._make_id(), mono or received)
        run = self._table.get(task)
        first = self._keeper.set_token(run, cause, mode) if run is not None else False
        told = self._mono()
        facts = {"source": source, "attempt": attempt, "mode": mode, "epoch": epoch}
        cause = run.token.cause or cause if run is not None else cause
        ask = _Ask(task, mode, cause, first, received, facts)
        if run is not None:
            self._trace_received(ask, "")
        self._log.event("cancel received", task=task, layer=3, source=source, reason=reason, mode=mode)
        if first and run is not None and (run.started or self._table.is_active(run)):
            self.events.trace(task, Ev.TOKEN_SET, ask.cause.cancel_id, mono=told, source=source)
        return await asyncio.shield(self._spawn(self._cancel(ask, run), task))

    async def stop_all(
        self, reason: StopReason, *, mode: str = "graceful", source: str = ""
    ) -> list[CancelAccepted | CancelNoop]:
        """Stop every task that this agent has. What the store refused is left out; it was stopped all the same."""
        tasks = [run.task for run in self._table.all()]
        stops = [self.cancel(task, reason=reason, mode=mode, source=source) for task in tasks]
        replies = await asyncio.gather(*stops, return_exceptions=True)
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    def _trace_received(self, ask: _Ask, known_id: str) -> None:
        cancel_id = known_id or ask.cause.cancel_id
        self.events.trace(ask.task, Ev.RECEIVED, cancel_id, mono=ask.received, **ask.facts)

    async def _cancel(self, ask: _Ask, run: Run | None) -> CancelAccepted | CancelNoop:
        try:
            result = await self._recorder.cancel(
                ask.task, reason=ask.cause.reason, cancel_id=ask.cause.cancel_id, mode=ask.mode
            )
        except StoreUnavailable as error:
            if run is None:
                self._trace_received(ask, "")
            return self._stopped_undurably(ask, run, error)
        row = result.row
        if run is None:
            # The stop may have an id already: a press that came late belongs to it, it is not another stop.
            self._trace_received(ask, row.cancel_id if row is not None else "")
        if row is None:
            self._log.event("cancel kept for a task to come", task=ask.task, layer=3)
            return CancelNoop(re="", task=ask.task, state="tombstone")
        if run is not None:
            run.learn(row)
        if result.kind is CancelKind.NOOP:
            if run is not None and not run.started:
                self._table.drop(run)
                self.events.refresh(ask.task)
            return CancelNoop(re="", task=ask.task, state=row.state, stop_reason=row.stop_reason)
        self._keeper.note_stop(run, row, result)
        try:
            routed = await self._reach(ask, run, row)
        except StateError as error:
            # The stop is durable, so it is acknowledged; the owner re-reads its tasks.
            self._log.event("owner not reached", task=ask.task, layer=3, error=str(error))
            routed = row.owner
        return _accepted(ask, row, result, routed)

    def _stopped_undurably(
        self, ask: _Ask, run: Run | None, error: StoreUnavailable
    ) -> CancelAccepted | CancelNoop:
        self.events.trace(ask.task, Ev.CAS, ask.cause.cancel_id, ok=False, durable=False, said=str(error))
        self._log.event("state not set", task=ask.task, layer=3, error=str(error))
        if run is None:
            raise error
        run.refused = True
        if not run.started and ask.first and not self._table.is_active(run):
            self._spawn(self._supervisor.end_unstarted(run, self._table), run.task)
        return CancelAccepted(
            re="", task=ask.task, state=TaskState.CANCELLING, cancel_id=ask.cause.cancel_id, first=ask.first,
            reason=ask.cause.reason, mode=ask.mode, cut_seq=run.row.last_seq, deadline_ms=DEADLINE_MS[ask.mode],
            durable=False,
        )  # fmt: skip

    async def _reach(self, ask: _Ask, run: Run | None, row: TaskRow) -> str:
        """Make sure that somebody acts on the stop; return who, when it is another agent."""
        if row.state is TaskState.CANCELLED:
            for layer, ev in _NEVER_STARTED:
                self._log.trace(ask.task, layer, ev, cancel_id=row.cancel_id, said="never started")
            if run is not None:
                self._table.drop(run)
        elif run is not None and not run.started and not self._table.is_active(run):
            # Its start became durable, but the answer was lost: it has no body, and nobody else ends it.
            run.started = True
            self._spawn(self._supervisor.recover(run, self._table), run.task)
        if run is not None or row.state is not TaskState.CANCELLING:
            return "" if row.owner == self.instance else await self._nudge(ask, row)
        if row.owner == self.instance:
            self._keeper.recover(row)
            return ""
        return await self._nudge(ask, row)

    async def _nudge(self, ask: _Ask, row: TaskRow) -> str:
        known = {one.instance: one for one in await bounded(self._store.instances())}
        owner = known.get(row.owner)
        # An agent leaves the list only by its own hand, or by that of one who proved it dead.
        if owner is None or (self._liveness is not None and self._liveness.is_dead(owner)):
            await self._keeper.take_over(row.owner)
            return ""
        self.events.trace(ask.task, Ev.ROUTED, row.cancel_id, owner=row.owner)
        if self._route is not None:
            self._spawn(bounded(self._route(owner, ask.task), NUDGE_S), f"nudge {row.owner}")
        return row.owner


def _accepted(ask: _Ask, row: TaskRow, result: CancelResult, routed: str) -> CancelAccepted:
    return CancelAccepted(
        re="",
        task=row.task,
        state=row.state,
        cancel_id=row.cancel_id,
        first=result.first,
        reason=row.stop_reason,
        mode=row.mode,
        cut_seq=result.cut_seq,
        deadline_ms=DEADLINE_MS.get(row.mode, DEADLINE_MS["graceful"]),
        routed=routed,
    )
