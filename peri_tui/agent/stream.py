"""One client's stream: replay what it missed, then live events, never more than its credit.

The feed subscribes before it replays and holds live events back until the replay has reached them, so that no event
is lost between the two and none is sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from peri_tui.core.link import StreamOutbox
from peri_tui.core.messages import TaskEnded, TaskEvent, TaskStateChanged, encode

REPLAY_BATCH: Final = 500

Replay = Callable[[str, int, int], Awaitable[Sequence[TaskEvent]]]


class StreamFeed:
    """Feeds one stream connection.

    Args:
        send: sends one frame; may wait for the socket.
        replay: ``(task, after_seq, limit)`` to stored events in order.
    """

    def __init__(self, send: Callable[[str], Awaitable[None]], replay: Replay) -> None:
        self._send = send
        self._replay = replay
        self._outbox = StreamOutbox()
        self._held: dict[str, list[TaskEvent]] = {}
        self._sent: dict[str, int] = {}
        self._wake = asyncio.Event()
        self.frames = 0

    def hold(self, resume: Mapping[str, int]) -> None:
        """Hold live events of these tasks back until ``catch_up`` has replayed them."""
        for task, after in resume.items():
            self._held[task] = []
            self._sent[task] = after

    def grant(self, frames: int) -> None:
        """The client takes ``frames`` more."""
        self._outbox.grant(frames)
        self._wake.set()

    def publish(self, events: Sequence[TaskEvent]) -> None:
        """Take live events; those of a task that is being replayed wait for the replay."""
        for event in events:
            held = self._held.get(event.task)
            if held is not None:
                held.append(event)
            elif event.seq > self._sent.get(event.task, 0):
                self._offer(event)
        self._wake.set()

    async def catch_up(self, task: str, after: int) -> None:
        """Send what was stored of ``task`` after ``after``, then go over to live events."""
        held = self._held.setdefault(task, [])
        self._sent[task] = after
        while batch := await self._replay(task, self._sent[task], REPLAY_BATCH):
            for event in batch:
                self._offer(event)
            self._wake.set()
        self._held.pop(task, None)
        self.publish(held)

    async def run(self) -> None:
        """Send for ever; ends with the connection's error or a cancel."""
        while True:
            self._wake.clear()
            for event in self._outbox.take():
                self.frames += 1
                await self._send(encode(event))
            if not self._wake.is_set():
                await self._wake.wait()

    def _offer(self, event: TaskEvent) -> None:
        self._sent[event.task] = max(event.seq, getattr(event, "seq_to", 0) or 0)
        # The cut travels with the state change, so that text queued here does not run on after Stop.
        if isinstance(event, TaskStateChanged) and event.cut_seq:
            self._outbox.cut(event.task, event.cut_seq)
        if isinstance(event, TaskEnded):
            self._held.pop(event.task, None)
        self._outbox.offer(event)
