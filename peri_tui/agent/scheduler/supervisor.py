"""The supervisors: one a run, from its start to its recorded end. Nobody cancels them.

The executor's work runs in a task of its own, so that however it ends (return, error, a stray cancellation) the
supervisor is there to put things back and to record an end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from peri_tui.agent.scheduler.events import EventLog
from peri_tui.agent.scheduler.recorder import Recorder, bounded
from peri_tui.agent.scheduler.run import Executor, Run
from peri_tui.agent.scheduler.store import StateStore
from peri_tui.agent.scheduler.table import RunTable
from peri_tui.core.messages import TaskEnded, TaskStateChanged
from peri_tui.core.states import EXIT_NOT_CLEAN, StopReason, TaskState
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import IllegalTransition, StaleEpoch, StaleVersion, StateError, StoreUnavailable
from peri_tui.log import Log

T = TypeVar("T")


class Supervisor:
    """Carries out the runs of a table.

    ``unrecorded`` holds the ends that were published although the store did not take them.
    """

    def __init__(
        self,
        store: StateStore,
        log: Log,
        executor: Executor,
        *,
        events: EventLog,
        recorder: Recorder,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.unrecorded: dict[str, tuple[Run, TaskEnded]] = {}
        self._store = store
        self._log = log
        self._executor = executor
        self._events = events
        self._recorder = recorder
        self._wall = wall
        self._work: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a part that its caller may leave; an error that nobody awaits is logged."""
        task = asyncio.create_task(work, name=f"scheduler: {name}")
        self._work.add(task)
        task.add_done_callback(self._reap)
        return task

    async def supervise(self, run: Run, table: RunTable) -> None:
        """Carry a run from its turn to its end."""
        try:
            begun = await self._begin(run)
        except StoreUnavailable as error:
            self._log.event("task cannot start", task=run.task, layer=3, error=str(error))
            if not run.token.is_set:
                # Nothing has started; the next look at the queue tries again.
                table.give_back(run)
                table.enqueue(run, first=True)
                return
            begun = False
        if begun:
            await self._carry_out(run)
        table.give_back(run)
        if begun or not run.token.is_set:
            table.drop(run)
        elif run.refused:
            await self.end_unstarted(run, table)
        elif run.row.state is TaskState.CANCELLING and not run.started:
            await self.recover(run, table)
        # Else its stop is on its way to the store, and drops it.
        table.pump()

    async def recover(self, run: Run, table: RunTable) -> None:
        """Roll back a run that has no body here, and end it."""
        run.started = True
        await self._end(run, await self._roll_back(run, "the task's agent is gone"))
        table.drop(run)

    async def end_unstarted(self, run: Run, table: RunTable) -> None:
        """End a run that was stopped before it started, when the store did not take that stop."""
        reason = run.token.cause.reason if run.token.cause else StopReason.USER
        text = "stopped before it started"
        await self._end(
            run, TaskEnded(task=run.task, state=TaskState.CANCELLED, stop_reason=reason, message=text)
        )
        table.drop(run)

    async def complete(self, run: Run, end: TaskEnded) -> bool:
        """Record a completion; see ``Run.complete``."""
        done = await asyncio.shield(self.spawn(self._recorder.complete(run, end), run.task))
        if not done:
            self._events.trace(run.task, Ev.LATE, run.row.cancel_id, said="completed after the stop")
            self._log.event("late completion refused", task=run.task, layer=3)
        return done

    async def _begin(self, run: Run) -> bool:
        run.history = await bounded(self._store.history(run.row.session))
        if run.token.is_set:
            return False
        event = TaskStateChanged(
            task=run.task, state=TaskState.RUNNING, prev=TaskState.QUEUED, epoch=run.epoch, ts=self._wall()
        )
        step = self._store.transition(
            run.task, TaskState.RUNNING, version=run.row.version, epoch=run.epoch, event=event
        )
        try:
            run.learn(await bounded(step))
        except (IllegalTransition, StaleVersion, StaleEpoch) as error:
            if not await self._began_before(run):
                self._log.event("task does not start", task=run.task, layer=3, error=str(error))
                self._events.refresh(run.task)
                return False
        run.started = True
        self._events.refresh(run.task)
        self._log.event("task started", task=run.task, layer=3)
        return True

    async def _began_before(self, run: Run) -> bool:
        """Tell whether an earlier try did start the task, and only its answer was lost: nobody else may start it."""
        row = await bounded(self._store.get(run.task))
        if row is None or row.epoch != run.epoch:
            return False
        run.learn(row)
        return row.state in (TaskState.RUNNING, TaskState.CANCELLING)

    async def _carry_out(self, run: Run) -> None:
        try:
            end = await _outcome(self._executor.execute(run))
        except Exception as error:
            self._log.event("executor failed", task=run.task, layer=3, error=repr(error))
            await self._stop_quietly(run)
            end = await self._roll_back(run, f"internal error: {error!r}")
        await self._end(run, end)

    async def _stop_quietly(self, run: Run) -> None:
        try:
            await run.stop(StopReason.INTERNAL_ERROR, "executor")
        except StateError as error:
            self._log.event("stop not recorded", task=run.task, layer=3, error=str(error))

    async def _roll_back(self, run: Run, why: str) -> TaskEnded:
        """Let the executor put things back without the body; a failure of that is an end too."""
        try:
            return await _outcome(self._executor.recover(run.row))
        except Exception as error:
            self._log.event("recovery failed", task=run.task, layer=5, error=repr(error))
            text = f"{why}; recovery failed: {error!r}"
            return TaskEnded(
                task=run.task, state=TaskState.CANCEL_FAILED, verified=False, message=text, residue=[text],
                exit_code=EXIT_NOT_CLEAN,
            )  # fmt: skip

    async def _end(self, run: Run, end: TaskEnded) -> None:
        completed = run.recorded is None and end.state == TaskState.COMPLETED
        if completed and not await self._may_complete(run, end):
            end = await self._roll_back(run, "completed after the stop")
        refusal: Exception | None = None
        if run.recorded is None:
            end, refusal = await self._recorder.end(run, end)
        if isinstance(refusal, StoreUnavailable):
            self.unrecorded[run.task] = (run, end)
        self._log_end(run, run.recorded or end, refusal)

    async def _may_complete(self, run: Run, end: TaskEnded) -> bool:
        """Record a completion. False: a stop was first. True also when the store does not answer."""
        try:
            return await self.complete(run, end)
        except StateError as error:
            self._log.event("completion not recorded", task=run.task, layer=3, error=str(error))
            return not run.token.is_set

    def _log_end(self, run: Run, end: TaskEnded, error: Exception | None) -> None:
        said = "" if error is None else str(error)
        cancel_id = end.cancel_id or run.row.cancel_id
        if end.state != TaskState.COMPLETED:
            dropped = self._events.dropped(run.task)
            self._log.trace(
                run.task, Layer.SCHEDULER, Ev.ENDED, cancel_id=cancel_id, ok=error is None, state=end.state,
                said=said or end.state, dropped=dropped,
            )  # fmt: skip
        self._log.event(
            "task ended", task=run.task, layer=3, state=end.state, recorded=error is None, error=said
        )

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.event("work failed", layer=3, work=task.get_name(), error=repr(error))


async def _outcome(work: Coroutine[Any, Any, TaskEnded]) -> TaskEnded:
    """Run a part that may end in any way, and return its end.

    Raises:
        Exception: what it raised; RuntimeError when it ended as cancelled, which nobody asked for.
    """
    task = asyncio.ensure_future(work)
    await asyncio.wait({task})
    if task.cancelled():
        raise RuntimeError("the executor ended as cancelled")
    return task.result()
