"""A session without an agent: it records what the screen asks and says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from peri_tui.core.ids import make_ulid
from peri_tui.core.messages import CancelAccepted, CancelNoop, JobInfo, TaskEvent, Welcome
from peri_tui.errors import PeriError


@dataclass
class FakeNews:
    """News of the link."""

    state: str
    detail: str = ""
    task: str = ""
    tasks: tuple[str, ...] = ()


@dataclass
class FakeSession:
    """Implements ``tui.ports.Session``; ``open`` is its ``Opener``."""

    welcome: Welcome = field(
        default_factory=lambda: Welcome(re="1", instance="i", pid=1, proto=1, session="s", may_write=True)
    )
    ack: bool = True
    refuse: PeriError | None = None
    submitted: list[tuple[str, str, str]] = field(default_factory=list)
    cancels: list[tuple[str, str, int]] = field(default_factory=list)
    answers: list[tuple[str, str, str]] = field(default_factory=list)
    trusted: list[bool] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    job_list: list[JobInfo] = field(default_factory=list)
    job_acts: list[tuple[str, str, str]] = field(default_factory=list)
    closed: bool = False
    cut_seq: int = 0
    count: int = 0
    on_event: Callable[[TaskEvent], None] = lambda _event: None
    on_link: Callable[[Any], None] = lambda _news: None

    async def open(
        self, on_event: Callable[[TaskEvent], None], on_link: Callable[[Any], None]
    ) -> FakeSession:
        self.on_event, self.on_link = on_event, on_link
        return self

    async def connect(self) -> Welcome:
        return self.welcome

    def new_task_id(self) -> str:
        self.count += 1
        return make_ulid(1_700_000_000_000 + self.count, bytes(10))

    async def submit(self, prompt: str, *, approve: str | None = None, task: str | None = None) -> str:
        assert task is not None
        self.submitted.append((task, prompt, approve or ""))
        if self.refuse is not None:
            raise self.refuse
        return task

    async def cancel(
        self, task: str, *, mode: str = "graceful", reason: str = "user", pressed_mono: int = 0
    ) -> CancelAccepted | CancelNoop:
        self.cancels.append((task, mode, pressed_mono))
        if not self.ack:
            await asyncio.Event().wait()
        return CancelAccepted(
            re="r", task=task, state="cancelling", cancel_id="c1", first=True, reason=reason, mode=mode,
            cut_seq=self.cut_seq, deadline_ms=8000,
        )  # fmt: skip

    async def jobs(self) -> list[JobInfo]:
        return list(self.job_list)

    async def act_on_job(self, task: str, job: str, action: str) -> None:
        self.job_acts.append((task, job, action))
        if self.refuse is not None:
            raise self.refuse
        change = {"service": True} if action == "promote" else {"state": "ended", "how": "signal 2"}
        self.job_list = [
            msgspec.structs.replace(one, **change) if one.job == job else one for one in self.job_list
        ]

    async def answer(self, task: str, qid: str, outcome: str, text: str = "") -> bool:
        self.answers.append((task, qid, outcome))
        return True

    async def trust(self, trusted: bool) -> None:
        self.trusted.append(trusted)

    def acknowledge_end(self, task: str) -> None:
        self.ends.append(task)

    def decline_kill(self, task: str) -> None:
        self.declined.append(task)

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeDrafts:
    """Keeps the draft in memory, and every version of it."""

    text: str = ""
    queued: tuple[str, ...] = ()
    saved: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def load(self) -> FakeDrafts:
        return self

    def save(self, draft: Any) -> None:
        self.text, self.queued = draft.text, tuple(draft.queued)
        self.saved.append((self.text, self.queued))


@dataclass
class FakeLane:
    """Remembers where it was aimed."""

    aims: list[tuple[str, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def aim(self, kind: str, task: str = "") -> None:
        self.aims.append((kind, task))

    def settled(self, task: str) -> None:
        self.ended.append(task)


class FakeClock:
    """Monotonic nanoseconds that move only when told to."""

    def __init__(self, now: int = 1_000_000_000_000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def pass_ms(self, ms: float) -> None:
        self.now += int(ms * 1e6)
