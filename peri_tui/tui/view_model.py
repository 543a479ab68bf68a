"""What the screen knows, as frozen values, and the facts that only the screen itself can report.

``reducer.reduce`` is the one function that changes them; widgets read, and nothing else writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from peri_tui.core.messages import (
    Asked,
    CancelAccepted,
    CancelNoop,
    Files,
    JobChanged,
    TaskEnded,
    TaskSummary,
)
from peri_tui.core.states import TaskState
from peri_tui.core.trace import Layer


class LampState(StrEnum):
    """One lamp of the strip."""

    PENDING = "pending"
    ACTIVE = "active"
    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lamp:
    """One layer: state, words (short, for the strip), what it said (for the card), ms since the press."""

    layer: Layer
    state: LampState = LampState.PENDING
    words: str = ""
    said: str = ""
    ms: float | None = None


Lamps = tuple[Lamp, Lamp, Lamp, Lamp, Lamp]
DARK: Final[Lamps] = (
    Lamp(Layer.UI), Lamp(Layer.CLIENT), Lamp(Layer.SCHEDULER), Lamp(Layer.MODEL), Lamp(Layer.ROLLBACK),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """One file that differs from what it was before the task."""

    path: str
    kind: str
    by: str
    added: int = 0
    removed: int = 0
    diff: str = ""


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task as the screen knows it. Times are monotonic nanoseconds."""

    task: str
    prompt: str = ""
    state: TaskState = TaskState.QUEUED
    confirmed: bool = False
    seq: int = 0
    started: int = 0
    alive: int = 0
    step: int = 0
    doing: str = ""
    detail: str = ""
    cpu: float = 0.0
    rss: int = 0
    processes: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    exact: bool = True
    rate: float = 0.0
    rate_mark: tuple[int, int] = (0, 0)
    produced: bool = False
    pressed: int = 0
    forced: bool = False
    cancel_id: str = ""
    cut_seq: int = 0
    dropped: int = 0
    lamps: Lamps = DARK
    question: Asked | None = None
    files: tuple[ChangedFile, ...] = ()
    jobs: tuple[JobChanged, ...] = ()
    end: TaskEnded | None = None

    @property
    def is_over(self) -> bool:
        """True once ``task.end`` came."""
        return self.end is not None

    @property
    def is_stopping(self) -> bool:
        """True from the press (or the agent's own stop) to ``task.end``."""
        return self.end is None and (self.pressed > 0 or self.state is TaskState.CANCELLING)

    @property
    def can_stop(self) -> bool:
        """True while a first press would do something."""
        return self.end is None and not self.is_stopping

    @property
    def settled(self) -> bool:
        """True once the end may be shown: it came, its press was painted (or too late), its cancel answered (or not)."""
        return self.end is not None and all(lamp.state is not LampState.ACTIVE for lamp in self.lamps[:2])

    @property
    def concerned(self) -> tuple[Lamp, ...]:
        """The lamps that this end must light: all five after a press, the agent's three otherwise."""
        return self.lamps if self.pressed else self.lamps[2:]

    @property
    def verified(self) -> bool:
        """True when ``task.end`` carries the proof and every lamp concerned is ok."""
        if self.end is None or not self.end.verified or self.end.state == TaskState.CANCEL_FAILED:
            return False
        return all(lamp.state is LampState.OK for lamp in self.concerned)

    @property
    def awaits_frame(self) -> bool:
        """True while a press was taken and nothing that shows it is on the screen yet."""
        return self.pressed > 0 and self.lamps[0].state is LampState.ACTIVE

    @property
    def was_stopped(self) -> bool:
        """True once it ended other than by finishing."""
        return self.end is not None and self.end.state != TaskState.COMPLETED

    @property
    def is_unclean(self) -> bool:
        """True when its stop failed, or a press of this screen ended without all five layers' word."""
        failed = self.end is not None and self.end.state == TaskState.CANCEL_FAILED
        return failed or (self.pressed > 0 and self.was_stopped and not self.verified)

    def waits_for(self) -> Lamp | None:
        """Return the first layer that has not acknowledged the stop; a failed one before a silent one."""
        open_lamps = [lamp for lamp in self.concerned if lamp.state is not LampState.OK]
        failed = [lamp for lamp in open_lamps if lamp.state is LampState.FAILED]
        return next(iter(failed or open_lamps), None)


@dataclass(frozen=True, slots=True)
class ViewState:
    """The whole screen. ``tasks`` keep the order of their submission; ``shown`` is the conversation's task."""

    tasks: Mapping[str, TaskView] = field(default_factory=dict)
    shown: str = ""
    queued: tuple[str, ...] = ()
    held: bool = False
    link: str = "connecting"
    link_detail: str = ""
    card: str = ""
    ask_trust: tuple[str, ...] = ()
    undone: str = ""

    @property
    def task(self) -> TaskView | None:
        """The task that the bar and the strip show."""
        return self.tasks.get(self.shown)

    @property
    def running(self) -> TaskView | None:
        """The task that a stop key belongs to: the shown one, else the newest that is not over."""
        shown = self.task
        if shown is not None and not shown.is_over:
            return shown
        return next((task for task in reversed(list(self.tasks.values())) if not task.is_over), None)

    def with_task(self, task: TaskView) -> ViewState:
        """Return the state with this task put in its place."""
        return replace(self, tasks={**self.tasks, task.task: task})


# --- local facts: what the screen itself knows -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """The user sent a prompt; the id exists before the network knows."""

    task: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Pressed:
    """A stop key, the button or a command, aimed at a task. ``mode``: stop or force."""

    task: str
    mono: int
    mode: str = "stop"


@dataclass(frozen=True, slots=True)
class Painted:
    """The frame with *Stopping* is on the screen."""

    task: str
    mono: int


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The agent answered a cancel."""

    answer: CancelAccepted | CancelNoop
    mono: int
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class CancelLost:
    """No route brought the cancel to the agent."""

    task: str
    mono: int
    why: str


@dataclass(frozen=True, slots=True)
class Known:
    """The tasks that the agent told of when the link came up."""

    tasks: tuple[TaskSummary, ...]
    ask_trust: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link to the agent is now in this state."""

    state: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed; only silence is judged by it."""


Fact = Submitted | Pressed | Painted | Acknowledged | CancelLost | Known | LinkChanged | Ticked


def five(lamps: tuple[Lamp, ...]) -> Lamps:
    """Return the lamps as what they always are: five."""
    first, second, third, fourth, fifth = lamps
    return (first, second, third, fourth, fifth)


def light(task: TaskView, layer: Layer, state: LampState, words: str, said: str, mono: int) -> TaskView:
    """Return the task with one lamp set; a time before the press counts as 0 ms."""
    ms = max(0.0, (mono - task.pressed) / 1e6) if task.pressed else None
    lamp = Lamp(layer, state, words, said or words, ms)
    return replace(task, lamps=five(tuple(lamp if old.layer is layer else old for old in task.lamps)))


def files_of(task: TaskView) -> Files:
    """Return what became of the files, empty before the end."""
    return task.end.files if task.end is not None else Files()
