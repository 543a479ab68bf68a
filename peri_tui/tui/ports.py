"""What the screen needs from below, as contracts: the session, the stop lane, the keeper of drafts.

The screen is written against these, so that a test hands in doubles and the client may change inside. Times are
monotonic nanoseconds of this host where a name ends in ``mono``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from peri_tui.core.messages import CancelAccepted, CancelNoop, JobInfo, TaskEvent, Welcome
from peri_tui.core.stop_plan import Press

AimKind = Literal["none", "task", "dismiss"]


class LinkStatus(Protocol):
    """News of the link to the agent."""

    @property
    def state(self) -> str:
        """open, lost, restarting, restarted, failed, escalated, killing or unanswered."""

    @property
    def detail(self) -> str:
        """One line for people; may be empty."""

    @property
    def task(self) -> str:
        """The task whose stop it is about; may be empty."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that a kill of the agent would end too."""


class PressReport(Protocol):
    """A press of a stop key that the stop lane made into a cancel, and sees through until it is acknowledged."""

    @property
    def press(self) -> Press:
        """STOP or FORCE."""

    @property
    def task(self) -> str:
        """The task that is to stop."""

    @property
    def t_mono(self) -> int:
        """When the key byte was read."""

    @property
    def sent(self) -> bool:
        """True when the cancel has left this process already; else the lane's thread is at it."""


class Session(Protocol):
    """The client's side of one conversation with an agent process. Events arrive on the caller's loop."""

    async def connect(self) -> Welcome:
        """Start or find the agent and open both sockets."""

    def new_task_id(self) -> str:
        """Return the id for the next submission, before anything travels."""

    async def submit(self, prompt: str, *, approve: str | None = None, task: str | None = None) -> str:
        """Ask for a task and return its id."""

    async def cancel(
        self, task: str, *, mode: str = "graceful", reason: str = "user", pressed_mono: int = 0
    ) -> CancelAccepted | CancelNoop:
        """Ask for the end of a task; returns the agent's answer."""

    async def answer(self, task: str, qid: str, outcome: str, text: str = "") -> bool:
        """Answer an open question: allow, allow_session or deny. False if it was closed meanwhile."""

    async def trust(self, trusted: bool) -> None:
        """Say whether the workspace's own instructions may be read."""

    async def jobs(self) -> Sequence[JobInfo]:
        """Return the background jobs of the agent's tasks, services included."""

    async def act_on_job(self, task: str, job: str, action: str) -> None:
        """Promote a background job to a service, or stop it."""

    def acknowledge_end(self, task: str) -> None:
        """Say that ``task.end`` was applied."""

    def decline_kill(self, task: str) -> None:
        """Say no to the kill of the agent that was announced for the stop of ``task``."""

    async def close(self) -> None:
        """Close both sockets; the agent follows its policy."""


class Opener(Protocol):
    """Starts or finds the agent and returns a session that is not connected yet."""

    async def __call__(
        self, on_event: Callable[[TaskEvent], None], on_link: Callable[[LinkStatus], None]
    ) -> Session:
        """Return the session; its callbacks run on the caller's loop."""


class Lane(Protocol):
    """The stop lane: told whom the next stop key belongs to, before it is pressed."""

    def aim(self, kind: AimKind, task: str = "") -> None:
        """Publish whom the next stop key belongs to."""

    def settled(self, task: str) -> None:
        """Say that the task ended: nothing more is sent for it."""


class Draft(Protocol):
    """What was typed and not sent."""

    @property
    def text(self) -> str:
        """The prompt as it stands."""

    @property
    def queued(self) -> Sequence[str]:
        """Prompts that wait for their turn, first one first."""


class DraftKeeper(Protocol):
    """Keeps the draft across crashes. Both calls block and run in a thread."""

    def load(self) -> Draft:
        """Return what was kept; empty when there is nothing."""

    def save(self, draft: Draft) -> None:
        """Save a draft (``text``, ``queued``) atomically."""


class Tracer(Protocol):
    """Appends one trace record of layer 1 (``Log.trace``)."""

    def __call__(
        self, task: str, layer: int, ev: str, *, cancel_id: str = "", mono: int | None = None, **data: Any
    ) -> object:
        """Append the record."""
