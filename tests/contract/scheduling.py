"""What the tests of layer 3 share: submissions, a store to bring into any state, an executor under control."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from peri_tui.agent.scheduler.run import Run
from peri_tui.agent.scheduler.store import StateStore, TaskRow
from peri_tui.core.ids import make_ulid
from peri_tui.core.messages import Submit, TaskEnded, TaskEvent, TaskStateChanged
from peri_tui.core.states import StopReason, TaskState

_numbers = itertools.count(1)

# How a task comes into each state: the arrows after queued.
PATHS: dict[TaskState, Sequence[TaskState]] = {
    TaskState.QUEUED: [],
    TaskState.RUNNING: [TaskState.RUNNING],
    TaskState.WAITING: [TaskState.RUNNING, TaskState.WAITING],
    TaskState.CANCELLING: [TaskState.RUNNING, TaskState.CANCELLING],
    TaskState.CANCELLED: [TaskState.CANCELLED],
    TaskState.COMPLETED: [TaskState.RUNNING, TaskState.COMPLETED],
    TaskState.FAILED: [TaskState.FAILED],
    TaskState.CANCEL_FAILED: [TaskState.RUNNING, TaskState.CANCELLING, TaskState.CANCEL_FAILED],
}


def make_id() -> str:
    """Return the next ULID."""
    return make_ulid(1_700_000_000_000 + next(_numbers), bytes(10))


def make_submit(
    task: str | None = None, *, session: str | None = None, workspace: str = "/w", prompt: str = "do"
) -> Submit:
    return Submit(
        id=make_id(), task=task or make_id(), session=session or make_id(), workspace=workspace, prompt=prompt
    )


async def step(store: StateStore, row: TaskRow, to: TaskState) -> TaskRow:
    """Take one arrow by ``transition``."""
    event = TaskStateChanged(task=row.task, state=to, prev=row.state, epoch=row.epoch)
    return await store.transition(row.task, to, version=row.version, epoch=row.epoch, event=event)


async def bring(
    store: StateStore, to: TaskState, *, owner: str = "A", submit: Submit | None = None
) -> TaskRow:
    """Return a new task in a state."""
    row = await store.submit(submit or make_submit(), owner)
    for state in PATHS[to]:
        if state.is_final or state is TaskState.CANCEL_FAILED:
            end = TaskEnded(task=row.task, state=state)
            row = await store.finish(row.task, state, end, version=row.version, epoch=row.epoch)
        else:
            row = await step(store, row, state)
    return row


class FakeExecutor:
    """Does what the test says: each run waits for ``release`` or for its token, then ends.

    ``swallow`` completes in spite of the token; ``boom`` raises.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.recovered: list[TaskRow] = []
        self.started = asyncio.Condition()
        self.release: dict[str, asyncio.Event] = {}
        self.swallow = False
        self.boom: Exception | None = None
        self.recover_boom: Exception | None = None
        self.hold_recovery: asyncio.Event | None = None

    def finish(self, task: str) -> None:
        """Let a task complete."""
        self.release.setdefault(task, asyncio.Event()).set()

    async def until_started(self, *tasks: str) -> None:
        """Wait until these tasks run."""
        async with asyncio.timeout(10), self.started:
            await self.started.wait_for(lambda: {run.task for run in self.runs} >= set(tasks))

    async def execute(self, run: Run) -> TaskEnded:
        async with self.started:
            self.runs.append(run)
            self.started.notify_all()
        if self.boom is not None:
            raise self.boom
        release = self.release.setdefault(run.task, asyncio.Event())
        done = asyncio.create_task(release.wait())
        stop = asyncio.create_task(run.token.wait())
        await asyncio.wait({done} if self.swallow else {done, stop}, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        stop.cancel()
        if run.token.is_set and not self.swallow:
            return TaskEnded(task=run.task, state=TaskState.CANCELLED, exit_code=130)
        return TaskEnded(task=run.task, state=TaskState.COMPLETED, answer="42")

    async def recover(self, row: TaskRow) -> TaskEnded:
        self.recovered.append(row)
        if self.recover_boom is not None:
            raise self.recover_boom
        if self.hold_recovery is not None:
            await self.hold_recovery.wait()
        return TaskEnded(
            task=row.task, state=TaskState.CANCELLED, stop_reason=row.stop_reason or StopReason.USER
        )


class Seen:
    """A subscriber that keeps what it saw."""

    def __init__(self) -> None:
        self.events: list[TaskEvent] = []
        self._changed = asyncio.Event()

    def __call__(self, events: Sequence[TaskEvent]) -> None:
        self.events.extend(events)
        self._changed.set()

    def of(self, task: str) -> list[TaskEvent]:
        return [event for event in self.events if event.task == task]

    async def end_of(self, task: str, count: int = 1) -> TaskEnded:
        """Wait for the ``count``-th end of a task."""
        async with asyncio.timeout(10):
            while True:
                ends = [event for event in self.of(task) if isinstance(event, TaskEnded)]
                if len(ends) >= count:
                    return ends[count - 1]
                self._changed.clear()
                await self._changed.wait()
