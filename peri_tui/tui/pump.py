"""The one way in for what the agent says: state at once or with the next flush, text 15 times a second.

Facts about the state (a stop, a question, an end) never wait behind text. Text keeps its order and its pace: a flush
takes at most 2,000 characters, so that a flood cannot hold a key press; when more than a second of text waits, a
flush takes 64 KiB, because the blocks in between are drawn later in a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from peri_tui.core.messages import Delta, TaskEnded, TaskEvent
from peri_tui.tui.desk import URGENT

FLUSH_HZ: Final = 15
FLUSH_CHARS: Final = 2000
BACKLOG_CHARS: Final = FLUSH_HZ * FLUSH_CHARS
MOST_CHARS: Final = 64 * 1024


class Pump:
    """Two queues: facts for the state, everything for the conversation.

    Args:
        facts: applies events to the state, in order.
        tell: applies one event to the conversation.
        flushed: called after a flush that changed something.
    """

    def __init__(
        self,
        facts: Callable[[list[TaskEvent]], None],
        tell: Callable[[TaskEvent], None],
        flushed: Callable[[], None],
    ) -> None:
        self._apply = facts
        self._tell = tell
        self._flushed = flushed
        self._facts: list[TaskEvent] = []
        self._story: deque[TaskEvent] = deque()
        self.waiting = 0

    def push(self, event: TaskEvent) -> None:
        """Take one event, on the app's loop."""
        self._story.append(event)
        if isinstance(event, Delta):
            self.waiting += len(event.text)
        self._facts.append(event)
        if isinstance(event, URGENT):
            self._state()
            if isinstance(event, TaskEnded) or self.waiting <= FLUSH_CHARS:
                self.flush()

    def flush(self) -> None:
        """Apply what waits, text within the budget of one flush. Called at ``FLUSH_HZ``."""
        if not self._story and not self._facts:
            return
        self._state()
        budget = FLUSH_CHARS if self.waiting <= BACKLOG_CHARS else MOST_CHARS
        while self._story and budget > 0:
            event = self._story.popleft()
            if isinstance(event, Delta):
                event = self._cut(event, budget)
                budget -= len(event.text)
                self.waiting -= len(event.text)
            self._tell(event)
        self._flushed()

    def _cut(self, event: Delta, budget: int) -> Delta:
        if len(event.text) <= budget:
            return event
        head, rest = event.text[:budget], event.text[budget:]
        self._story.appendleft(_part(event, rest, event.off + budget))
        return _part(event, head, event.off)

    def _state(self) -> None:
        # A burst of text says one thing to the state: that the task is alive. The newest piece is enough.
        facts, self._facts = self._facts, []
        if facts:
            following = [*facts[1:], None]
            self._apply(
                [fact for fact, after in zip(facts, following, strict=True) if not _repeats(fact, after)]
            )


def _repeats(event: TaskEvent, after: TaskEvent | None) -> bool:
    return isinstance(event, Delta) and isinstance(after, Delta) and event.task == after.task


def _part(event: Delta, text: str, off: int) -> Delta:
    return Delta(
        task=event.task, seq=event.seq, ts=event.ts, ch=event.ch, part=event.part, text=text, off=off,
        seq_to=event.seq_to,
    )  # fmt: skip
