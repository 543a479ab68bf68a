"""Both ends of a session without its sockets: what was applied, what is owed, what may be sent.

``ClientLink`` sees every event of the stream socket and says what to do with it; it remembers the requests of the
control socket that nobody has answered. ``StreamOutbox`` is the agent's queue for one stream connection. The shape
(a state object that never touches a socket, thin shells around it) is that of ``websockets.protocol``.

The rules that both ends keep:

* A frame covers the sequence numbers ``seq`` to ``seq_to`` (``seq_to`` 0: only ``seq``), and the frames of one task
  follow each other without a hole. So a hole is always an error, never a matter of taste.
* Text that a stop made worthless is taken out of the queue, its numbers are not: one *hollow* delta (empty ``text``)
  covers them, sent right before the task's next event. The receiver needs no rule for skipped numbers, and does not
  have to know of the stop to keep its count.
* A frame of which only a part is new cannot be applied (nobody knows where in its text the new part begins); it is
  a GAP, and a resume from ``resume_points`` brings the rest.
* An event with ``seq`` 0 has no number (it was never durable): it is applied as it comes and changes no count.
* Each stream connection starts with a window of ``CREDIT_WINDOW`` frames on both ends; every frame that arrives
  costs one, whatever became of it, and ``Credit`` gives them back in batches.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from msgspec.structs import replace

from peri_tui.core.messages import (
    CREDIT_WINDOW,
    Answer,
    Cancel,
    Delta,
    Job,
    Request,
    Submit,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    Trust,
)
from peri_tui.core.states import TaskState

MERGED_MAX: Final = 64 * 1024
BACKLOG_HIGH: Final = 1024 * 1024


class Verdict(StrEnum):
    """What to do with an event."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    """Known already: drop. A ``task.end`` is acknowledged again, because the acknowledgement was lost."""
    GAP = "gap"
    """Something before it is missing: drop it and resume the stream from ``resume_points``."""
    CUT = "cut"
    """Text from after the stop: drop, counted in ``cut_deltas``."""
    LATE = "late"
    """Came after the task's last message: drop, counted in ``late``."""


@dataclass(slots=True)
class _Seen:
    """What the client knows of one task's stream."""

    last: int = 0
    cut: int | None = None
    ended: bool = False


class ClientLink:
    """The client's end. Not thread-safe; a reconnect keeps the object."""

    def __init__(self, *, window: int = CREDIT_WINDOW) -> None:
        self.unknown = 0
        self.cut_deltas = 0
        self.late = 0
        self._batch = max(1, window // 2)
        self._used = 0
        self._tasks: dict[str, _Seen] = {}
        self._pending: dict[str, Submit | Cancel | Answer | Trust | Job] = {}

    # --- events -------------------------------------------------------------------------------------------------

    def receive(self, event: TaskEvent) -> Verdict:
        """Take one event of the stream and say what to do with it.

        On APPLY and CUT the task's count moves on, else nothing changes. A state event that says *cancelling* sets
        the cut by itself, so a lost acknowledgement does not let text through.
        """
        seen = self._tasks.setdefault(event.task, _Seen())
        verdict = _judge(seen, event)
        if verdict in (Verdict.APPLY, Verdict.CUT):
            seen.last = max(seen.last, _last_seq(event))
        if verdict is Verdict.APPLY:
            self._note(seen, event)
        elif verdict is Verdict.CUT:
            self.cut_deltas += _last_seq(event) - event.seq + 1
        elif verdict is Verdict.LATE:
            self.late += 1
        return verdict

    def _note(self, seen: _Seen, event: TaskEvent) -> None:
        if isinstance(event, TaskEnded):
            seen.ended = True
        elif isinstance(event, TaskStateChanged) and event.state == TaskState.CANCELLING:
            self.cut(event.task, event.cut_seq or event.seq)

    def cut(self, task: str, seq: int) -> None:
        """Show no text of the task above ``seq`` any more; of several cuts the lowest holds."""
        seen = self._tasks.setdefault(task, _Seen())
        seen.cut = seq if seen.cut is None else min(seen.cut, seq)

    def start_at(self, task: str, seq: int) -> None:
        """Count a task as applied up to ``seq``: 0 for one just submitted, more when its past is not wanted.

        Makes it part of ``resume_points``. Never moves back.
        """
        seen = self._tasks.setdefault(task, _Seen())
        seen.last = max(seen.last, seq)

    def last_seq(self, task: str) -> int:
        """Return the last sequence number applied, 0 for none."""
        return self._tasks[task].last if task in self._tasks else 0

    def resume_points(self) -> dict[str, int]:
        """Return task → last applied number, for ``hello.resume``; tasks that ended are not in it."""
        return {task: seen.last for task, seen in self._tasks.items() if not seen.ended}

    def forget(self, task: str) -> None:
        """Drop what is known of a task (its conversation was left)."""
        self._tasks.pop(task, None)

    def count_unknown(self) -> None:
        """Count a frame whose type this version does not know."""
        self.unknown += 1

    # --- credit -------------------------------------------------------------------------------------------------

    def stream_opened(self) -> None:
        """A new stream connection has a full window: nothing is owed."""
        self._used = 0

    def consumed(self, n: int = 1) -> int:
        """Count ``n`` frames as done with; return how many to grant now (0: not yet, send nothing)."""
        self._used += n
        if self._used < self._batch:
            return 0
        granted, self._used = self._used, 0
        return granted

    # --- requests -----------------------------------------------------------------------------------------------

    def sent(self, request: Request) -> None:
        """Remember a request until it is answered. Requests that belong to one connection are not remembered."""
        if isinstance(request, Submit | Cancel | Answer | Trust | Job):
            self._pending[request.id] = request

    def answered(self, re: str) -> Request | None:
        """Return the request that a reply answers and forget it; None if it was answered before."""
        return self._pending.pop(re, None)

    def pending(self) -> list[Request]:
        """Return what nobody has answered, oldest first."""
        return list(self._pending.values())

    def resend(self) -> list[Request]:
        """Return what to send again after a reconnect: cancels first, then the rest in order, ids unchanged.

        Each cancel counts one ``attempt`` more, which is how a trace shows that it was repeated.
        """
        for request in self._pending.values():
            if isinstance(request, Cancel):
                self._pending[request.id] = replace(request, attempt=request.attempt + 1)
        return sorted(self._pending.values(), key=lambda request: not isinstance(request, Cancel))


def _judge(seen: _Seen, event: TaskEvent) -> Verdict:
    if event.seq:
        if _last_seq(event) <= seen.last:
            return Verdict.DUPLICATE
        if not seen.ended and event.seq != seen.last + 1:
            return Verdict.GAP
    if seen.ended:
        return Verdict.LATE
    if isinstance(event, Delta) and seen.cut is not None and (event.seq == 0 or event.seq > seen.cut):
        return Verdict.CUT
    return Verdict.APPLY


def _last_seq(event: TaskEvent) -> int:
    return max(event.seq, event.seq_to) if isinstance(event, Delta) else event.seq


@dataclass(slots=True)
class _Run:
    """Deltas of one (task, ch, part) that leave as one frame. Pieces stay apart, so a cut can fall between them."""

    pieces: list[Delta]
    size: int

    @property
    def task(self) -> str:
        return self.pieces[0].task

    def accepts(self, delta: Delta, size: int) -> bool:
        """Tell whether ``delta`` carries on where this run ends, and fits."""
        first, last = self.pieces[0], self.pieces[-1]
        return (
            (first.ch, first.part) == (delta.ch, delta.part)
            and first.seq > 0
            and delta.seq == _last_seq(last) + 1
            and self.size + size <= MERGED_MAX
        )

    def frame(self) -> Delta:
        if len(self.pieces) == 1:
            return self.pieces[0]
        text = "".join(piece.text for piece in self.pieces)
        return replace(self.pieces[0], text=text, seq_to=_last_seq(self.pieces[-1]))


class StreamOutbox:
    """The agent's queue for one stream connection.

    Events leave in the order of arrival, except that text which still waits takes the text after it along (same
    task, ``ch`` and ``part``, numbers without a hole, at most 64 KiB of UTF-8 a frame). Nothing but text is merged,
    and nothing but text above a cut is left out. Nothing is lost however long the backlog: an owner that sees
    ``is_full`` slows its tasks down, or closes the connection and lets the client resume from the durable log.

    Args:
        credit: frames that may leave before the first ``grant``.
    """

    def __init__(self, *, credit: int = CREDIT_WINDOW) -> None:
        self._window = max(credit, CREDIT_WINDOW)
        self._credit = credit
        self._queue: deque[_Run | TaskEvent] = deque()
        self._open: dict[str, _Run] = {}
        self._cuts: dict[str, int] = {}
        self._skipped: dict[str, Delta] = {}
        self._backlog = 0

    @property
    def backlog(self) -> int:
        """Bytes of text that wait."""
        return self._backlog

    @property
    def is_full(self) -> bool:
        """True when more than 1 MiB of text waits."""
        return self._backlog > BACKLOG_HIGH

    @property
    def credit(self) -> int:
        """Frames that may leave now."""
        return self._credit

    @property
    def ready(self) -> bool:
        """True when ``take`` would return something."""
        return bool(self._queue) and self._credit > 0

    def __len__(self) -> int:
        """Frames that wait."""
        return len(self._queue)

    def offer(self, event: TaskEvent) -> None:
        """Queue one event; of a task, in the order of its numbers."""
        if isinstance(event, Delta):
            if self._is_cut(event):
                self._skip(event)
            else:
                self._offer_text(event)
            return
        self._append(event)
        if isinstance(event, TaskEnded):
            self._cuts.pop(event.task, None)

    def grant(self, n: int) -> None:
        """Allow ``n`` more frames; never more than one window in all, whatever the peer says."""
        self._credit = min(self._window, self._credit + max(0, n))

    def take(self, limit: int = CREDIT_WINDOW) -> list[TaskEvent]:
        """Return the frames to send now, at most ``limit`` and as many as there is credit, and pay for them."""
        taken: list[TaskEvent] = []
        while self._queue and self._credit > 0 and len(taken) < limit:
            taken.append(self._pop())
            self._credit -= 1
        return taken

    def cut(self, task: str, seq: int) -> None:
        """Leave out the task's text above ``seq``, queued or still to come; of several cuts the lowest holds.

        Call it in the same step in which ``seq`` is chosen: text that has left cannot be taken back.
        """
        self._cuts[task] = min(seq, self._cuts.get(task, seq))
        self._open.pop(task, None)
        behind = self._skipped.pop(task, None)
        queue, self._queue, self._backlog = self._queue, deque(), 0
        for entry in queue:
            self._requeue(entry, task)
        if behind is not None:
            self._skip(behind)

    def _requeue(self, entry: _Run | TaskEvent, task: str) -> None:
        if entry.task == task and not isinstance(entry, _Run):
            self._append(entry)
        elif isinstance(entry, _Run) and entry.task == task:
            for piece in entry.pieces:
                self.offer(piece)
        else:
            self._queue.append(entry)
            self._backlog += entry.size if isinstance(entry, _Run) else 0

    def _is_cut(self, delta: Delta) -> bool:
        cut = self._cuts.get(delta.task)
        return cut is not None and (delta.seq == 0 or delta.seq > cut)

    def _append(self, event: TaskEvent) -> None:
        # The numbers that were left out go first, so that the receiver sees no hole.
        hollow = self._skipped.pop(event.task, None)
        if hollow is not None:
            self._queue.append(hollow)
        self._queue.append(event)
        self._open.pop(event.task, None)

    def _offer_text(self, delta: Delta) -> None:
        size = _utf8_size(delta.text)
        run = self._open.get(delta.task)
        if run is not None and run.accepts(delta, size):
            run.pieces.append(delta)
            run.size += size
        else:
            run = self._open[delta.task] = _Run([delta], size)
            self._queue.append(run)
        self._backlog += size

    def _skip(self, delta: Delta) -> None:
        if delta.seq == 0:
            return
        hollow = self._skipped.get(delta.task)
        first = hollow or delta
        to = _last_seq(delta)
        self._skipped[delta.task] = replace(first, text="", seq_to=to if to > first.seq else 0)

    def _pop(self) -> TaskEvent:
        entry = self._queue.popleft()
        if not isinstance(entry, _Run):
            return entry
        if self._open.get(entry.task) is entry:
            del self._open[entry.task]
        self._backlog -= entry.size
        return entry.frame()


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
