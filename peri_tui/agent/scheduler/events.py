"""The event log: from a runner that never waits for the disk to subscribers that only see what is durable.

``emit`` is synchronous. One writer merges adjacent deltas, appends a batch to the store, which gives the sequence
numbers, and only then tells the subscribers, in order and without gaps. A stop cuts a task's log: text that was not
durable by then is dropped and counted, because after a stop nobody may see it appear.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import msgspec

from peri_tui.agent.scheduler.store import StateStore, TaskRow
from peri_tui.core.messages import Delta, TaskEnded, TaskEvent, Traced
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import StaleEpoch, StateError, StoreUnavailable
from peri_tui.log import Log

Subscriber = Callable[[Sequence[TaskEvent]], None]

# Above this much undurable work the runner has to wait; memory stays bounded when the disk is slow.
HIGH_EVENTS: Final = 512
HIGH_CHARS: Final = 256 * 1024
# A merged delta stays far below a frame's limit, and is one flush or a few for the screen.
MERGED_CHARS: Final = 16 * 1024
# Text waits this long for more text; everything else, and a flush, goes at once.
GATHER_S: Final = 0.01
RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_PAGE: Final = 500


@dataclass(slots=True)
class _Channel:
    """One task's way to the store. ``shown`` is the last sequence number that subscribers have seen."""

    epoch: int
    shown: int
    pending: list[TaskEvent] = field(default_factory=list)
    chars: int = 0
    writing: bool = False
    cut: bool = False
    ended: bool = False
    dropped: int = 0
    late: int = 0
    gap: bool = False
    end_shown: bool = False
    sealed: bool = False
    trouble: str = ""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    roomy: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self) -> None:
        """Tell those who wait for an empty or roomy channel."""
        full = len(self.pending) > HIGH_EVENTS or self.chars > HIGH_CHARS
        _switch(self.idle, (not self.pending and not self.writing) or bool(self.trouble))
        _switch(self.roomy, not full or self.ended)


class EventLog:
    """The events of one agent's tasks.

    Args:
        store: where they become durable.
        log: told of trouble.
        on_fenced: called with a task's id when the store says that another agent owns it now.
        wall: wall-clock seconds, for ``ts``.
    """

    def __init__(
        self,
        store: StateStore,
        log: Log,
        *,
        on_fenced: Callable[[str], None] = lambda task: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._log = log
        self._on_fenced = on_fenced
        self._wall = wall
        self._channels: dict[str, _Channel] = {}
        self._subscribers: list[Subscriber] = []
        self._dirty = asyncio.Event()
        self._urgent = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._filling: dict[str, asyncio.Task[None]] = {}

    # --- a task's life ----------------------------------------------------------------------------------------------

    def open(self, row: TaskRow, *, shown: int | None = None) -> None:
        """Let a task's events in, under the row's epoch; ``shown``: what subscribers saw (default: all so far)."""
        old = self._channels.get(row.task)
        seen = row.last_seq if shown is None else shown
        self._channels[row.task] = _Channel(row.epoch, max(seen, old.shown if old else 0))
        self._channels[row.task].settle()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write(), name="event log")

    def knows(self, task: str) -> bool:
        """Tell whether the task was opened."""
        return task in self._channels

    def emit(self, task: str, event: TaskEvent) -> bool:
        """Take one event; False: dropped and counted, because the task has ended or was cut."""
        channel = self._channels.get(task)
        if channel is None:
            return False
        if channel.ended:
            channel.late += 1
            return False
        is_text = isinstance(event, Delta)
        if is_text and channel.cut:
            channel.dropped += 1
            return False
        channel.pending.append(event if event.ts else msgspec.structs.replace(event, ts=self._wall()))
        channel.chars += len(event.text) if isinstance(event, Delta) else 0
        channel.settle()
        self._dirty.set()
        if not is_text:
            self._urgent.set()
        return True

    def trace(self, task: str, ev: Ev, cancel_id: str, *, mono: int | None = None, **data: Any) -> None:
        """Write a trace record of layer 3, and show it."""
        record = self._log.trace(task, Layer.SCHEDULER, ev, cancel_id=cancel_id, mono=mono, **data)
        self.emit(task, Traced(task=task, layer=3, ev=ev, cancel_id=cancel_id, mono=record.mono, data=data))

    def cut(self, task: str) -> int:
        """Stop the task's text: what is not with the store yet is dropped, later text too. Returns how many now."""
        channel = self._channels.get(task)
        if channel is None or channel.cut:
            return 0
        kept: list[TaskEvent] = [event for event in channel.pending if not isinstance(event, Delta)]
        dropped = len(channel.pending) - len(kept)
        channel.pending, channel.chars, channel.cut = kept, 0, True
        channel.dropped += dropped
        channel.settle()
        return dropped

    def dropped(self, task: str) -> int:
        """Return how many pieces of text the cut dropped, and events that came after the end."""
        channel = self._channels.get(task)
        return channel.dropped + channel.late if channel else 0

    async def drain(self, task: str) -> None:
        """Wait while the task is too far ahead of the disk. The runner awaits this after each emit."""
        channel = self._channels.get(task)
        if channel is not None:
            await channel.roomy.wait()

    async def flush(self, task: str) -> None:
        """Wait until everything emitted so far is durable and published. The caller sets the deadline.

        Raises:
            StoreUnavailable: the store does not take it now (the writer goes on trying).
        """
        channel = self._channels.get(task)
        if channel is None:
            return
        if not channel.idle.is_set():
            self._urgent.set()
            await channel.idle.wait()
        if channel.trouble and channel.pending:
            raise StoreUnavailable(channel.trouble)

    def refresh(self, task: str) -> None:
        """Publish, in a moment, what the store has and subscribers have not seen."""
        if task in self._channels:
            self._fill(task)

    async def filled(self, task: str) -> None:
        """Wait until gaps are filled. The caller sets the deadline."""
        work = self._filling.get(task)
        if work is not None:
            await asyncio.wait({work})

    def close(self, task: str) -> None:
        """Let nothing in any more. What comes is dropped and counted."""
        channel = self._channels.get(task)
        if channel is not None:
            channel.ended = True
            channel.pending, channel.chars = [], 0
            channel.settle()

    # --- out to the subscribers -------------------------------------------------------------------------------------

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Call back with each batch of durable events, from now on. Returns a function that ends it."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback) if callback in self._subscribers else None

    def publish(self, task: str, events: Sequence[TaskEvent]) -> None:
        """Publish events that became durable elsewhere (a change of state); a gap is filled from the store first."""
        channel = self._channels.get(task)
        fresh = [event for event in events if channel is None or event.seq > channel.shown]
        if not fresh:
            return
        if channel is not None and fresh[0].seq != channel.shown + 1:
            self._fill(task)
            return
        self._show(channel, fresh)

    def publish_undurable(self, task: str, end: TaskEnded) -> None:
        """Publish what is pending and an end that the store refused, numbered provisionally, and close the task."""
        channel = self._channels.get(task)
        if channel is None:
            self._tell([end])
            return
        if channel.end_shown:
            # It did become durable: only the answer was lost, and a look at the store has found it.
            return
        last = [*merge(channel.pending), end]
        numbered = [
            msgspec.structs.replace(event, seq=channel.shown + place, ts=event.ts or self._wall())
            for place, event in enumerate(last, 1)
        ]
        self._show(channel, numbered)
        # A batch that is with the store right now may still become durable; after the end nobody may see it.
        channel.sealed = True
        self.close(task)

    async def replay(self, task: str, after: int = 0) -> list[TaskEvent]:
        """Return the durable events of a task above ``after``, oldest first."""
        found: list[TaskEvent] = []
        while page := await self._store.events(task, after, _PAGE):
            found += page
            after = page[-1].seq
        return found

    async def stop(self) -> None:
        """End the writer; what is pending is not written."""
        workers = [work for work in (self._writer, *self._filling.values()) if work is not None]
        for work in workers:
            work.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        self._writer = None

    # --- the writer -------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        failures = 0
        while True:
            await self._dirty.wait()
            await self._gather()
            self._dirty.clear()
            self._urgent.clear()
            whole = True
            for task in [task for task, channel in self._channels.items() if channel.pending]:
                whole = await self._append(task) and whole
            failures = 0 if whole else failures + 1
            if not whole:
                self._dirty.set()
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S)) - 1])

    async def _gather(self) -> None:
        try:
            async with asyncio.timeout(GATHER_S):
                await self._urgent.wait()
        except TimeoutError:
            return

    async def _append(self, task: str) -> bool:
        """Write one task's batch. False: the store does not answer, so the batch is kept."""
        channel = self._channels[task]
        batch, channel.pending, channel.chars = list(merge(channel.pending)), [], 0
        if not batch:
            return True
        channel.writing = True
        try:
            self._show(channel, await self._store.append(task, batch, epoch=channel.epoch))
            channel.trouble = ""
        except StoreUnavailable as error:
            self._keep(channel, batch)
            channel.trouble = str(error)
            self._log.event("events.delayed", task=task, layer=3, error=str(error))
            return False
        except StateError as error:
            self._refused(task, channel, len(batch), error)
        except (ValueError, TypeError, OverflowError) as error:
            # One event that cannot be encoded must not take the others of its batch with it.
            await self._append_singly(task, channel, batch, error)
        finally:
            channel.writing = False
            channel.settle()
        return True

    async def _append_singly(
        self, task: str, channel: _Channel, batch: Sequence[TaskEvent], error: Exception
    ) -> None:
        self._log.event("events.malformed", task=task, layer=3, error=str(error))
        for event in batch:
            try:
                self._show(channel, await self._store.append(task, [event], epoch=channel.epoch))
            except (ValueError, TypeError, OverflowError, StateError):
                channel.dropped += 1

    def _keep(self, channel: _Channel, batch: list[TaskEvent]) -> None:
        if channel.cut:
            batch = [event for event in batch if not isinstance(event, Delta)]
        if not channel.ended:
            channel.pending = batch + channel.pending
            channel.chars = sum(len(event.text) for event in channel.pending if isinstance(event, Delta))

    def _refused(self, task: str, channel: _Channel, count: int, error: StateError) -> None:
        channel.late += count
        channel.ended = True
        self._log.event("events.refused", task=task, layer=3, count=count, error=str(error))
        if isinstance(error, StaleEpoch):
            self._on_fenced(task)

    # --- order ------------------------------------------------------------------------------------------------------

    def _show(self, channel: _Channel | None, events: Sequence[TaskEvent]) -> None:
        if channel is not None:
            events = [event for event in events if event.seq > channel.shown]
            if not events or channel.sealed:
                return
            if events[0].seq != channel.shown + 1:
                self._fill(events[0].task)
                return
            channel.shown = events[-1].seq
            channel.end_shown = isinstance(events[-1], TaskEnded)
            if channel.end_shown:
                self.close(events[-1].task)
        self._tell(events)

    def _tell(self, events: Sequence[TaskEvent]) -> None:
        for subscriber in list(self._subscribers):
            try:
                subscriber(events)
            except Exception as error:
                self._log.event("events.subscriber_failed", layer=3, error=repr(error))

    def _fill(self, task: str) -> None:
        """Read what others wrote in between, and publish it in order."""
        self._channels[task].gap = True
        if task not in self._filling:
            work = asyncio.create_task(self._fill_from_store(task), name=f"fill {task}")
            self._filling[task] = work
            work.add_done_callback(lambda done: self._filling.pop(task, None))

    async def _fill_from_store(self, task: str) -> None:
        channel = self._channels[task]
        failures = 0
        # What becomes durable while we read is asked for once more.
        while channel.gap:
            channel.gap = False
            try:
                self._show(channel, await self.replay(task, channel.shown))
            except StoreUnavailable as error:
                self._log.event("events.gap", task=task, layer=3, error=str(error))
                channel.gap = True
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
                failures += 1


def merge(events: Sequence[TaskEvent]) -> Iterator[TaskEvent]:
    """Yield the events with adjacent pieces of the same part joined, each up to ``MERGED_CHARS`` characters."""
    for key, group in groupby(events, key=_part):
        if key is None:
            yield from group
        else:
            yield from _joined([event for event in group if isinstance(event, Delta)])


def _part(event: TaskEvent) -> tuple[str, str] | None:
    return (event.ch, event.part) if isinstance(event, Delta) else None


def _joined(deltas: Sequence[Delta]) -> Iterator[Delta]:
    run: list[Delta] = []
    size = 0
    for delta in deltas:
        follows = bool(run) and delta.off == run[0].off + size
        if run and (not follows or size + len(delta.text) > MERGED_CHARS):
            yield msgspec.structs.replace(run[0], text="".join(piece.text for piece in run))
            run, size = [], 0
        run.append(delta)
        size += len(delta.text)
    if run:
        yield msgspec.structs.replace(run[0], text="".join(piece.text for piece in run))


def _switch(event: asyncio.Event, on: bool) -> None:
    if on:
        event.set()
    else:
        event.clear()
