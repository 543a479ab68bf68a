"""Task states and every legal transition; compare-and-set as a pure function.

Layer 3 owns the states, every other layer follows them. A transition is a function of a record and what the
caller believes about it (version, epoch); stores apply the same function inside their transaction, so that no
store can allow what another refuses. A refusal is a value here; stores raise the matching error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class TaskState(StrEnum):
    """The life of a task; the wire, the store and the screen use these very words."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCEL_FAILED = "cancel_failed"

    @property
    def is_final(self) -> bool:
        """True when nothing can change this state any more."""
        return self in FINAL

    @property
    def is_stoppable(self) -> bool:
        """True while a stop would have something to do."""
        return not self.is_final and self is not TaskState.CANCEL_FAILED


class StopReason(StrEnum):
    """Why a task ended other than by completing; the first reason given is kept."""

    USER = "user"
    LIMIT_TURNS = "limit_turns"
    LIMIT_TOKENS = "limit_tokens"
    LIMIT_SECONDS = "limit_seconds"
    LIMIT_MEMORY = "limit_memory"
    LIMIT_PROCESSES = "limit_processes"
    LIMIT_OUTPUT = "limit_output"
    LIMIT_CPU = "limit_cpu"
    SILENCE = "silence"
    MODEL_ERROR = "model_error"
    UNAPPROVED = "unapproved"
    INTERNAL_ERROR = "internal_error"
    OWNER_LOST = "owner_lost"
    AGENT_KILLED = "agent_killed"
    DISCONNECT = "disconnect"
    SHUTDOWN = "shutdown"

    @property
    def is_limit(self) -> bool:
        """True for the limits that the user set (exit code 53)."""
        return self.value.startswith("limit_")


FINAL: Final = frozenset({TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED})

LEGAL: Final[dict[TaskState, frozenset[TaskState]]] = {
    TaskState.QUEUED: frozenset({TaskState.RUNNING, TaskState.CANCELLED, TaskState.FAILED}),
    # running -> failed is legal only while nothing was touched and nothing is open; the caller vouches for it.
    TaskState.RUNNING: frozenset(
        {TaskState.WAITING, TaskState.CANCELLING, TaskState.COMPLETED, TaskState.FAILED}
    ),
    TaskState.WAITING: frozenset({TaskState.RUNNING, TaskState.CANCELLING}),
    TaskState.CANCELLING: frozenset({TaskState.CANCELLED, TaskState.FAILED, TaskState.CANCEL_FAILED}),
    TaskState.CANCEL_FAILED: frozenset({TaskState.CANCELLING, TaskState.CANCELLED, TaskState.FAILED}),
    TaskState.COMPLETED: frozenset(),
    TaskState.FAILED: frozenset(),
    TaskState.CANCELLED: frozenset(),
}

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_AUTH: Final = 41
EXIT_INPUT: Final = 42
EXIT_CONFIG: Final = 52
EXIT_LIMIT: Final = 53
EXIT_NOT_CLEAN: Final = 74
EXIT_TRY_AGAIN: Final = 75
EXIT_STOPPED: Final = 130
EXIT_TERMINATED: Final = 143


class Refusal(StrEnum):
    """Why a compare-and-set was refused."""

    STALE_EPOCH = "stale_epoch"
    STALE_VERSION = "stale_version"
    ILLEGAL = "illegal"


@dataclass(frozen=True, slots=True)
class TaskVersion:
    """What a compare-and-set compares: the state, its version and the owner's epoch."""

    state: TaskState
    version: int
    epoch: int

    def to(self, state: TaskState, *, version: int, epoch: int) -> TaskVersion | Refusal:
        """Return the successor with ``version + 1``, or why it is refused.

        Args:
            state: the wanted state.
            version: the version that the caller read.
            epoch: the caller's epoch as owner.
        """
        if epoch != self.epoch:
            return Refusal.STALE_EPOCH
        if version != self.version:
            return Refusal.STALE_VERSION
        if state not in LEGAL[self.state]:
            return Refusal.ILLEGAL
        return replace(self, state=state, version=self.version + 1)


def exit_code(
    state: TaskState, reason: StopReason | None, *, sigterm: bool = False, auth: bool = False
) -> int:
    """Return the process exit code for a task's end (see the interface's table of exit codes).

    Args:
        state: the state of ``task.end``.
        reason: why it ended, when it did not complete.
        sigterm: the stop came from SIGTERM.
        auth: the model refused the key.
    """
    if state is TaskState.CANCEL_FAILED or not state.is_final:
        return EXIT_NOT_CLEAN
    if state is TaskState.COMPLETED:
        return EXIT_DONE
    if reason is not None and reason.is_limit:
        return EXIT_LIMIT
    if state is TaskState.CANCELLED:
        return EXIT_TERMINATED if sigterm else EXIT_STOPPED
    return EXIT_AUTH if auth else EXIT_FAILED
