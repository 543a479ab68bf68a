"""Makes stops and ends durable, and says so honestly where the store does not take them.

An end is published in any case: a store that is away must not leave a task *Stopping* for ever. What could not be
recorded is published as not verified, with layer 3 named, and tried again later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec

from peri_tui.agent.scheduler.events import EventLog
from peri_tui.agent.scheduler.run import Run
from peri_tui.agent.scheduler.store import CancelResult, StateStore, TaskRow
from peri_tui.core import faults
from peri_tui.core.messages import LayerEvidence, TaskEnded, TaskStateChanged
from peri_tui.core.states import EXIT_NOT_CLEAN, StopReason, TaskState
from peri_tui.errors import IllegalTransition, StaleEpoch, StaleVersion, StoreUnavailable, UnknownTask

T = TypeVar("T")

STORE_S: Final = 3.0
_TRIES: Final = 8


class Recorder:
    """Writes a scheduler's changes of state; each operation is bounded by ``STORE_S``.

    An end tries again for ``patience_s`` before it is published without being recorded.
    """

    def __init__(
        self,
        store: StateStore,
        events: EventLog,
        *,
        wall: Callable[[], float] = time.time,
        patience_s: float = 1.0,
    ) -> None:
        self._patience_s = patience_s
        self._store = store
        self._events = events
        self._wall = wall

    async def cancel(self, task: str, *, reason: StopReason, cancel_id: str, mode: str) -> CancelResult:
        """Make a stop durable and publish its event.

        Raises:
            StoreUnavailable: it is not known to be durable.
        """
        if faults.active("scheduler.refuse_cas"):
            raise StoreUnavailable("the compare-and-set was refused (fault scheduler.refuse_cas)")
        result = await bounded(
            self._store.request_cancel(task, reason=reason, cancel_id=cancel_id, mode=mode)
        )
        self._events.publish(task, result.events)
        return result

    async def move(self, run: Run, to: TaskState, cause: str = "") -> TaskRow:
        """Take an arrow for a run, after everything it emitted before.

        Raises:
            IllegalTransition: a stop was first. Also StaleEpoch, StoreUnavailable.
        """
        await bounded(self._events.flush(run.task))
        for _ in range(_TRIES):
            self._refuse_stopped(run, to)
            event = TaskStateChanged(
                task=run.task, state=to, prev=run.row.state, epoch=run.epoch, cause=cause, ts=self._wall()
            )
            step = self._store.transition(run.task, to, version=run.row.version, epoch=run.epoch, event=event)
            try:
                run.learn(await bounded(step))
            except StaleVersion:
                run.learn(await self._row(run))
                continue
            self._events.publish(run.task, [msgspec.structs.replace(event, seq=run.row.last_seq)])
            return run.row
        raise StoreUnavailable(f"task {run.task} changes too fast")

    async def complete(self, run: Run, end: TaskEnded) -> bool:
        """Record a completion; False: a stop was first.

        Raises:
            StaleEpoch: another agent owns the task. StoreUnavailable: it is not known to be recorded.
        """
        try:
            return await self._patiently(lambda: self._complete_once(run, end))
        except IllegalTransition:
            if run.row.state in (TaskState.CANCELLING, TaskState.CANCELLED):
                return False
            raise

    async def _complete_once(self, run: Run, end: TaskEnded) -> bool:
        await bounded(self._events.flush(run.task))
        # A token that is set is a stop on its way to the store; the completion may not overtake it there.
        if run.token.is_set:
            return False
        await self._finish(run, end)
        return True

    async def end(self, run: Run, end: TaskEnded) -> tuple[TaskEnded, Exception | None]:
        """Record and publish an end. Returns it as published, and the error when it could not be recorded."""
        end = _signed(end, run)
        try:
            await self._patiently(lambda: self._end_once(run, end))
        except (StoreUnavailable, StaleEpoch, IllegalTransition, UnknownTask) as error:
            marked = unrecorded(end, error)
            self._events.publish_undurable(run.task, marked)
            return marked, error
        return run.recorded or end, None

    async def _end_once(self, run: Run, end: TaskEnded) -> None:
        await bounded(self._events.flush(run.task))
        await self._finish(run, end)

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        for pause in (self._patience_s / 4, self._patience_s / 4, self._patience_s / 2):
            try:
                return await work()
            except StoreUnavailable:
                await asyncio.sleep(pause)
        return await work()

    async def record_late(self, run: Run, end: TaskEnded) -> None:
        """Record an end that was published without being durable.

        Raises:
            StateError: it is still not possible.
        """
        run.learn(await self._row(run))
        if not run.row.has_ended:
            await self._finish(run, end, published=True)

    async def _finish(self, run: Run, end: TaskEnded, *, published: bool = False) -> None:
        to = TaskState(end.state)
        end = msgspec.structs.replace(end, ts=end.ts or self._wall())
        for _ in range(_TRIES):
            run.learn(await self._row(run))
            if run.row.epoch != run.epoch:
                raise StaleEpoch(f"task {run.task} has another owner")
            if run.row.has_ended:
                # Only the owner writes ends: this one is ours, and its answer was lost; or it was never started.
                await self._adopt_end(run, published)
                return
            if to is not TaskState.COMPLETED and run.row.state is not TaskState.CANCELLING:
                # A queued task ends by this; then the next round finds its end.
                await self._pass_cancelling(run, end)
                continue
            step = self._store.finish(
                run.task, to, end, version=run.row.version, epoch=run.epoch, history=run.history
            )
            try:
                run.learn(await bounded(step))
            except StaleVersion:
                continue
            run.recorded = msgspec.structs.replace(end, seq=run.row.last_seq)
            if not published:
                self._events.publish(run.task, [run.recorded])
                await self._let_fill(run)
            return
        raise StoreUnavailable(f"task {run.task} changes too fast")

    async def _adopt_end(self, run: Run, published: bool) -> None:
        found = await bounded(self._store.events(run.task, run.row.last_seq - 1))
        run.recorded = next((event for event in found if isinstance(event, TaskEnded)), None)
        if not published:
            self._events.refresh(run.task)
            await self._let_fill(run)

    async def _let_fill(self, run: Run) -> None:
        try:
            await bounded(self._events.filled(run.task))
        except StoreUnavailable:
            # The end is durable; subscribers see it when they resume.
            return

    async def _pass_cancelling(self, run: Run, end: TaskEnded) -> None:
        reason = StopReason(end.stop_reason or StopReason.INTERNAL_ERROR)
        result = await self.cancel(run.task, reason=reason, cancel_id=end.cancel_id, mode="graceful")
        if result.row is not None:
            run.learn(result.row)
        run.refused = False

    async def _row(self, run: Run) -> TaskRow:
        row = await bounded(self._store.get(run.task))
        if row is None:
            raise UnknownTask(f"no task {run.task}")
        return row

    def _refuse_stopped(self, run: Run, to: TaskState) -> None:
        if run.token.is_set or run.row.state is TaskState.CANCELLING:
            raise IllegalTransition(f"task {run.task} is being stopped, it cannot become {to}")


async def bounded(work: Awaitable[T], seconds: float = STORE_S) -> T:
    """Await a part of the store, at most for a while.

    Raises:
        StoreUnavailable: it did not answer in time; what it was asked may still happen.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise StoreUnavailable(f"the state store did not answer in {seconds:g} s") from None


def unrecorded(end: TaskEnded, error: Exception) -> TaskEnded:
    """Return the end as it may be shown when the store did not take it: not verified, layer 3 named."""
    missing = f"the end is not recorded: {error}"
    evidence = [one for one in end.evidence if one.layer != 3]
    evidence.append(LayerEvidence(layer=3, ok=False, missing=missing))
    # What completed stays completed: nothing was stopped. A stop that is not durable is a failed stop.
    stopped = end.state != TaskState.COMPLETED
    return msgspec.structs.replace(
        end,
        state=TaskState.CANCEL_FAILED if stopped else end.state,
        verified=False,
        message=end.message or missing,
        evidence=sorted(evidence, key=lambda one: one.layer),
        residue=[*end.residue, missing],
        exit_code=EXIT_NOT_CLEAN,
    )


def _signed(end: TaskEnded, run: Run) -> TaskEnded:
    """Fill in who stopped it and why, where the executor left it open."""
    if end.state == TaskState.COMPLETED:
        return end
    cause = run.token.cause
    reason = end.stop_reason or (cause.reason if cause else StopReason.INTERNAL_ERROR)
    cancel_id = end.cancel_id or run.row.cancel_id or (cause.cancel_id if cause else "")
    signed = msgspec.structs.replace(end, stop_reason=str(reason), cancel_id=cancel_id)
    if any(one.layer == 3 for one in end.evidence):
        return signed
    proof = LayerEvidence(layer=3, ok=True, summary=f"cancelling → {end.state}")
    return msgspec.structs.replace(signed, evidence=[proof, *end.evidence])
