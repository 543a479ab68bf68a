"""Looks after what nobody pushed to us: stops that came through the store, refusals to try again, dead agents.

A nudge may be lost, so our tasks are re-read once a second. A dead agent's tasks are taken over in one transaction
and rolled back, never run again; its queued ones are held until their client asks for them once more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from peri_tui.agent.cancel import CancelCause
from peri_tui.agent.scheduler.events import EventLog
from peri_tui.agent.scheduler.ownership import Liveness
from peri_tui.agent.scheduler.recorder import Recorder, bounded
from peri_tui.agent.scheduler.run import Desk, Run
from peri_tui.agent.scheduler.store import CancelResult, StateStore, TaskRow
from peri_tui.agent.scheduler.supervisor import Supervisor
from peri_tui.agent.scheduler.table import RunTable
from peri_tui.core.messages import TaskEnded
from peri_tui.core.states import StopReason, TaskState
from peri_tui.core.trace import Ev
from peri_tui.errors import StateError, StoreUnavailable
from peri_tui.log import Log


class Keeper:
    """Keeps a table of runs true to the store."""

    def __init__(
        self,
        store: StateStore,
        log: Log,
        desk: Desk,
        *,
        instance: str,
        events: EventLog,
        recorder: Recorder,
        supervisor: Supervisor,
        table: RunTable,
        liveness: Liveness | None,
        mono: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._instance = instance
        self._store = store
        self._log = log
        self._desk = desk
        self._events = events
        self._recorder = recorder
        self._supervisor = supervisor
        self._table = table
        self._liveness = liveness
        self._mono = mono
        self._poller: asyncio.Task[None] | None = None

    def start(self, poll_s: float) -> None:
        """Begin to re-read our tasks every ``poll_s`` seconds."""
        self._poller = asyncio.create_task(self._poll(poll_s), name="scheduler poll")

    async def stop(self) -> None:
        """End that, after a last try to record what the store has refused."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
        try:
            await self._record_all_late()
        except StoreUnavailable as error:
            self._log.event("ends not recorded", layer=3, error=str(error))

    # --- stops ------------------------------------------------------------------------------------------------------

    def set_token(self, run: Run, cause: CancelCause, mode: str) -> bool:
        """Stop a run, at once and without a word to the store. True: this was the first stop."""
        first = run.token.set(cause)
        if mode == "force":
            run.token.force()
        if first:
            self._events.cut(run.task)
            self._table.withdraw(run)
        return first

    def fenced(self, task: str) -> None:
        """The store says that another agent owns a task that runs here: stop it."""
        run = self._table.get(task)
        if run is not None:
            cause = CancelCause(StopReason.OWNER_LOST, "store", run.row.cancel_id, self._mono())
            self.set_token(run, cause, "graceful")
            self._log.event("task has another owner", task=task, layer=3)

    def note_stop(self, run: Run | None, row: TaskRow, result: CancelResult) -> None:
        """Trace that a stop is durable, the first time."""
        if result.first or (run is not None and run.refused):
            self._events.trace(
                row.task, Ev.CAS, row.cancel_id, ok=True, ver=row.version, durable=True, to=row.state,
                prev=result.prev,
            )  # fmt: skip
            self._log.event("state set", task=row.task, layer=3, state=row.state, version=row.version)
        if run is not None:
            run.refused = False

    # --- the store, re-read ------------------------------------------------------------------------------------------

    async def _poll(self, poll_s: float) -> None:
        while True:
            await asyncio.sleep(poll_s)
            try:
                await self.check()
            except Exception as error:
                # Whatever it was, the next look must come: this loop is what finds a stop whose nudge was lost.
                self._log.event("store does not answer", layer=3, error=repr(error))

    async def check(self) -> None:
        """Re-read our tasks once: obey stops that came through the store, try again what it refused.

        Raises:
            StoreUnavailable: it still does not answer.
        """
        self._table.pump()
        for row in await bounded(self._store.cancelling_of(self._instance)):
            await self._obey(row)
        for run in self._table.queued():
            await self._look_after(run)
        for run in [run for run in self._table.all() if run.refused]:
            await self._try_again(run)
        await self._record_all_late()

    async def _record_all_late(self) -> None:
        for run, end in list(self._supervisor.unrecorded.values()):
            await self._record_late(run, end)

    async def _record_late(self, run: Run, end: TaskEnded) -> None:
        try:
            await self._recorder.record_late(run, end)
        except StoreUnavailable:
            raise
        except StateError as error:
            # Somebody else ended it meanwhile, or owns it now: theirs is the word that counts.
            self._log.event("end superseded", task=run.task, layer=3, error=str(error))
        else:
            self._log.event("end recorded late", task=run.task, layer=3)
        self._supervisor.unrecorded.pop(run.task, None)

    async def _obey(self, row: TaskRow) -> None:
        run = self._table.get(row.task)
        if run is None:
            # The row may be older than an end that was recorded since.
            now = await bounded(self._store.get(row.task))
            if now is not None and now.state is TaskState.CANCELLING and self._table.get(row.task) is None:
                self.recover(now)
            return
        run.learn(row)
        if self.set_token(run, self._cause_of(row), row.mode):
            self._events.trace(row.task, Ev.TOKEN_SET, row.cancel_id, source="store")
            self._events.refresh(row.task)

    async def _look_after(self, run: Run) -> None:
        """Let go of a queued task that another agent has cancelled."""
        row = await bounded(self._store.get(run.task))
        if row is not None and row.state.is_final and run in self._table.queued():
            run.learn(row)
            self._events.refresh(run.task)
            self._table.drop(run)

    async def _try_again(self, run: Run) -> None:
        cause = run.token.cause
        assert cause is not None
        mode = "force" if run.token.forced else "graceful"
        result = await self._recorder.cancel(
            run.task, reason=cause.reason, cancel_id=cause.cancel_id, mode=mode
        )
        if result.row is not None:
            run.learn(result.row)
            self.note_stop(run, result.row, result)

    async def recover_dead(self) -> list[TaskRow]:
        """Take over the tasks of every agent that is proven dead, in all workspaces, and roll them back.

        Returns the rows taken: cancelling ones are being rolled back, queued ones are held.
        """
        taken: list[TaskRow] = []
        for other in await bounded(self._store.instances()):
            if other.instance != self._instance and self._liveness and self._liveness.is_dead(other):
                taken += await self.take_over(other.instance)
        return taken

    async def take_over(self, dead: str) -> list[TaskRow]:
        """Take a dead agent's tasks. The caller has the proof."""
        rows = await bounded(self._store.take_over(dead, self._instance))
        if self._liveness is not None:
            self._liveness.forget(dead)
        for row in rows:
            self._log.event("task taken over", task=row.task, layer=3, owner=dead, state=row.state)
            if row.state is TaskState.CANCELLING:
                self._trace_taken(row)
                self.recover(row)
            elif row.state is TaskState.QUEUED:
                self._events.open(row)
                self._table.enqueue(Run(row, self._desk), held=True)
        return rows

    def _trace_taken(self, row: TaskRow) -> None:
        """Trace what a stop has and this one got from its dead owner, or from the take-over itself."""
        said = "its agent is proven dead, taken over"
        self._events.trace(row.task, Ev.RECEIVED, row.cancel_id, source="recovery", said=said)
        self._events.trace(
            row.task, Ev.CAS, row.cancel_id, ok=True, ver=row.version, durable=True, to=row.state, said=said
        )
        self._events.trace(
            row.task, Ev.TASK_UNWOUND, row.cancel_id, ok=True, said="its code ended with its agent's process"
        )

    def recover(self, row: TaskRow) -> None:
        """Roll back a task that has no body here."""
        if self._table.get(row.task) is not None or row.task in self._supervisor.unrecorded:
            return
        run = Run(row, self._desk)
        run.started = True
        self._events.open(row)
        self._table.add(run)
        self.set_token(run, self._cause_of(row), row.mode)
        self._events.trace(
            row.task, Ev.TOKEN_SET, row.cancel_id, source="recovery", said="rolled back without its body"
        )
        self._supervisor.spawn(self._supervisor.recover(run, self._table), row.task)

    def _cause_of(self, row: TaskRow) -> CancelCause:
        known = row.stop_reason in list(StopReason)
        reason = StopReason(row.stop_reason) if known else StopReason.OWNER_LOST
        return CancelCause(reason, "store", row.cancel_id, self._mono())
