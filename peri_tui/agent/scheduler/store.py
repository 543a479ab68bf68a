"""The contract of the state store: what layer 3 asks of whatever keeps the tasks.

Every arrow of the state machine is one compare-and-set on (state, version, epoch) in one transaction with its event,
so that nobody can ever read a state whose event is missing, or an event whose state is not there. A cancel is durable
state first; telling the owner is a nudge that may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import msgspec

from peri_tui.core.messages import (
    LayerEvidence,
    Submit,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
)
from peri_tui.core.states import StopReason, TaskState, exit_code

# A tombstone must outlive the time in which a submit that was overtaken by its cancel can arrive (60 s). Keeping it
# longer is harmless, because a task id is never used for a second task.
TOMBSTONE_KEPT_S: Final = 3600.0
OPEN_STATES: Final = (TaskState.QUEUED, TaskState.RUNNING, TaskState.WAITING, TaskState.CANCELLING)


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task as the store knows it.

    ``version`` grows by one with each change of state, ``epoch`` with each owner. ``submit`` is the Submit message as
    JSON. Times are wall-clock seconds, 0 where not yet. ``last_seq`` numbers the newest event. ``cut_seq`` is the
    last sequence number before the stop, ``mode`` how the stop was asked for (graceful, force).
    """

    task: str
    session: str
    workspace: str
    prompt: str
    state: TaskState
    version: int
    epoch: int
    owner: str
    stop_reason: str
    cancel_id: str
    submit: bytes
    created: float
    started: float
    ended: float
    last_seq: int
    end_acked: bool
    cut_seq: int = 0
    mode: str = "graceful"

    @property
    def has_ended(self) -> bool:
        """True when the newest ``task.end`` is recorded (a failed stop may be tried again and end once more)."""
        return self.state.is_final or self.state is TaskState.CANCEL_FAILED


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One agent process. ``boot_id`` and ``start_time`` tell a process from a later one with the same pid."""

    instance: str
    pid: int
    start_time: int
    boot_id: str
    workspace: str
    socket: str
    started: float
    orphaned: bool = False


class CancelKind(StrEnum):
    """What a cancel met."""

    ACCEPTED = "accepted"
    NOOP = "noop"
    TOMBSTONE = "tombstone"


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What ``request_cancel`` did.

    ``row`` is None only for a tombstone. ``first`` tells whether this very call moved the task. ``prev`` is the state
    before, ``events`` what was appended in the same transaction.
    """

    kind: CancelKind
    row: TaskRow | None
    first: bool
    cut_seq: int
    prev: TaskState | None = None
    events: tuple[TaskEvent, ...] = ()


class StateStore(Protocol):
    """Keeps tasks, their events, the conversations and the agents. All methods raise ``StoreUnavailable``.

    Whatever a method wrote stays written when its awaiter is cancelled; operations of one store object happen in the
    order in which they were called, so a later read tells what became of it.
    """

    async def open(self) -> None:
        """Connect, and create what is missing."""

    async def close(self) -> None:
        """Finish what was asked, then disconnect."""

    async def register(self, instance: InstanceRow) -> None:
        """Make an agent known."""

    async def unregister(self, instance: str) -> bool:
        """Forget an agent that owns nothing open any more. False: it does, so it stays for a successor to find."""

    async def set_orphaned(self, instance: str, orphaned: bool) -> None:
        """Record whether an agent lost its client."""

    async def instances(self) -> list[InstanceRow]:
        """Return all known agents, oldest first."""

    async def submit(self, submit: Submit, owner: str) -> TaskRow:
        """Queue a task durably; the same content again returns the same row.

        A task that was cancelled before comes out as ``cancelled`` and is never queued.

        Raises:
            Conflict: the id is known with other content.
        """

    async def get(self, task: str) -> TaskRow | None:
        """Return a task, or None when the id is unknown."""

    async def transition(
        self,
        task: str,
        to: TaskState,
        *,
        version: int,
        epoch: int,
        event: TaskStateChanged,
        reason: str | None = None,
        cancel_id: str | None = None,
    ) -> TaskRow:
        """Take one arrow; ``event`` gets the returned row's ``last_seq``.

        Raises:
            UnknownTask, IllegalTransition, StaleVersion, StaleEpoch: and nothing was changed.
        """

    async def request_cancel(
        self, task: str, *, reason: StopReason, cancel_id: str, mode: str = "graceful"
    ) -> CancelResult:
        """Make a stop durable, whatever the task's state is.

        queued → cancelled with its end; running, waiting, cancel_failed → cancelling; cancelling stays, with the id
        and reason of the first cancel (force is remembered); a final state is a no-op; an unknown id leaves a
        tombstone.
        """

    async def append(self, task: str, events: Sequence[TaskEvent], *, epoch: int) -> list[TaskEvent]:
        """Append events and return them with their sequence numbers, dense from 1.

        Raises:
            UnknownTask, StaleEpoch, IllegalTransition: the task has ended.
        """

    async def finish(
        self,
        task: str,
        to: TaskState,
        end: TaskEnded,
        *,
        version: int,
        epoch: int,
        history: list[dict[str, Any]] | None = None,
    ) -> TaskRow:
        """Record the end: state, last event and conversation in one transaction.

        Raises:
            UnknownTask, IllegalTransition, StaleVersion, StaleEpoch: and nothing was changed.
        """

    async def events(self, task: str, after: int = 0, limit: int = 1000) -> list[TaskEvent]:
        """Return the events with ``seq`` above ``after``, oldest first."""

    async def history(self, session: str) -> list[dict[str, Any]]:
        """Return the conversation of a session; empty when there is none."""

    async def tasks(
        self, *, workspace: str | None = None, session: str | None = None, limit: int = 100
    ) -> list[TaskRow]:
        """Return the newest ``limit`` tasks, oldest first."""

    async def unacked_ends(self, session: str) -> list[TaskEnded]:
        """Return the ends that no client of the session has acknowledged, oldest first."""

    async def ack_end(self, task: str) -> None:
        """Record that a client has applied the end."""

    async def last_session(self, workspace: str) -> str | None:
        """Return the session of the workspace's newest task."""

    async def take_over(self, dead_instance: str, new_owner: str) -> list[TaskRow]:
        """Give a dead agent's unfinished tasks to ``new_owner`` under the next epoch, and forget the agent.

        running and waiting become cancelling (owner_lost); cancelling, cancel_failed and queued keep their state.
        Returns the rows that this call took; of two successors each row goes to one.
        """

    async def cancelling_of(self, owner: str) -> list[TaskRow]:
        """Return the owner's tasks that are to be stopped."""


def content_of(submit: Submit) -> bytes:
    """Return what must be equal for two submissions to be the same (all but the request id)."""
    return msgspec.json.encode(msgspec.structs.replace(submit, id=""))


def never_started_end(task: str, *, reason: str, cancel_id: str, ts: float) -> TaskEnded:
    """Return the end of a task that was stopped while queued.

    The evidence is by construction: no body, connection, process or file of it ever existed.
    """
    return TaskEnded(
        task=task,
        ts=ts,
        state=TaskState.CANCELLED,
        stop_reason=reason,
        message="stopped before it started",
        cancel_id=cancel_id,
        evidence=[LayerEvidence(layer=layer, ok=True, summary="never started") for layer in (3, 4, 5)],
        exit_code=exit_code(TaskState.CANCELLED, StopReason(reason)),
    )
