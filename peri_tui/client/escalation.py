"""One stop as the client drives it: send, repeat, go over to HTTP, and against an embedded agent that is deaf: signal,
warn, kill. ``core.stop_plan`` says what comes when; here it is done, and each step is traced.

An acknowledgement of any route ends the escalation; the run goes on watching until ``task.end``, because an agent that
falls silent after its acknowledgement has to be reported too.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Final, Protocol

from msgspec.structs import replace

from peri_tui.client.http_route import Post, cancel_over_http
from peri_tui.core.messages import Cancel, CancelAccepted, CancelNoop
from peri_tui.core.states import TaskState
from peri_tui.core.stop_plan import Action, ActiveTime, Heard, Step, StopPlan
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import AgentUnreachable
from peri_tui.log import Log

Ack = CancelAccepted | CancelNoop

# A successor is started within CONNECT_S of the session; only after that is nobody going to answer.
SUCCESSOR_S: Final = 20.0
TICK_S: Final = 0.5
HTTP_TIMEOUT_S: Final = 1.0
FRESH_AT_ATTEMPT: Final = 4
LATE_WORD_S: Final = 0.5


class StopRoutes(Protocol):
    """What a stop needs of the session."""

    @property
    def socket(self) -> Path:
        """The agent's socket as of now."""
        ...

    async def send_cancel(self, request: Cancel) -> bool:
        """Send over control; False if the connection is not open (it is sent as soon as it is)."""
        ...

    def refresh_control(self) -> None:
        """Make a fresh control connection."""
        ...

    def signal_agent(self) -> bool:
        """Ask the embedded agent to shut down; False if there is none alive."""
        ...

    def kill_agent(self) -> bool:
        """Kill the embedded agent; False if there is none alive."""
        ...

    def other_tasks(self, task: str) -> tuple[str, ...]:
        """Return the other tasks that would end with the agent."""
        ...

    def announce(self, state: str, *, task: str, detail: str = "", tasks: tuple[str, ...] = ()) -> None:
        """Tell the screen."""
        ...


class StopRun:
    """Drives one cancel until the task ended.

    Args:
        request: the cancel; its id stays the same on every route and attempt.
        routes: how to reach the agent.
        log: for the trace.
        embedded: the agent is our own child.
        pressed: monotonic seconds of the key press.
        post: the HTTP cancel; ``net.post_cancel`` unless a test says otherwise.
    """

    def __init__(
        self,
        request: Cancel,
        routes: StopRoutes,
        log: Log,
        *,
        embedded: bool,
        pressed: float,
        post: Post | None = None,
    ) -> None:
        self._request = request
        self._routes = routes
        self._log = log
        self._post = post
        self._plan = StopPlan(embedded, random=random.random, horizon=60.0)
        self._pressed = pressed
        self._clock = ActiveTime(pressed)
        self._taken: list[Step] = []
        self._heard = Heard()
        self._changed = asyncio.Event()
        self._posts: set[asyncio.Task[None]] = set()
        self.acked: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()

    @property
    def task(self) -> str:
        """The task that is being stopped."""
        return self._request.task

    @property
    def request(self) -> str:
        """The request id."""
        return self._request.id

    # --- what happens meanwhile -------------------------------------------------------------------------------------

    def acknowledge(self, answer: Ack, route: str) -> None:
        """Take the agent's answer; only the first one counts."""
        if self.acked.done():
            return
        now = time.monotonic()
        tries = max((step.attempt for step in self._taken), default=1)
        self._log.trace(
            self.task, Layer.CLIENT, Ev.ACKED, route=route, attempts=tries, state=answer.state,
            ms=round((now - self._pressed) * 1e3, 3),
            said=f"accepted by agent, {tries} attempt{'s' if tries > 1 else ''}",
        )  # fmt: skip
        self.acked.set_result(answer)
        noop = isinstance(answer, CancelNoop) and answer.state != TaskState.CANCEL_FAILED
        self._note(acked=True, ended=noop, last_word_ms=(now - self._pressed) * 1e3)

    def hear(self) -> None:
        """The agent said something of this task."""
        self._note(last_word_ms=(time.monotonic() - self._pressed) * 1e3)

    def end(self) -> None:
        """``task.end`` came."""
        self._note(ended=True)

    def decline(self) -> None:
        """The user does not want the agent killed."""
        self._note(declined=True)

    def _note(self, **facts: object) -> None:
        known = {name: getattr(self._heard, name) for name in Heard.__dataclass_fields__}
        self._heard = Heard(**(known | facts))
        self._changed.set()

    # --- what the client does ---------------------------------------------------------------------------------------

    async def drive(self) -> None:
        """Do what the plan says until it is through; fails ``acked`` if no route ever answered."""
        try:
            while (coming := self._plan.next(self._taken, self._heard)) is not None:
                elapsed = self._clock.tick(time.monotonic()) * 1e3
                step = self._plan.due(elapsed, self._taken, self._heard)
                if step is None:
                    await self._pause(min(TICK_S, (coming.at_ms - elapsed) / 1e3))
                else:
                    self._taken.append(step)
                    await self._do(step)
            await self._await_successor()
            await self._await_late_word()
        finally:
            for post in self._posts:
                post.cancel()
            self._conclude()

    async def _await_successor(self) -> None:
        """After a kill the end comes from the next agent, which has to start and to restore first."""
        if Action.KILL_AGENT not in {step.action for step in self._taken}:
            return
        until = time.monotonic() + SUCCESSOR_S
        while not (self._heard.ended or self.acked.done()) and time.monotonic() < until:
            await self._pause(TICK_S)
        if not (self._heard.ended or self.acked.done()):
            self._report()

    async def _await_late_word(self) -> None:
        # The end may overtake the acknowledgement, which comes on the other socket; the trace wants both.
        if not self.acked.done():
            try:
                async with asyncio.timeout(LATE_WORD_S):
                    await asyncio.shield(self.acked)
            except TimeoutError:
                return

    def _conclude(self) -> None:
        if self.acked.done():
            return
        if self._heard.ended:
            # What is over needs no stopping: as good an answer as any, and recorded as what it is.
            self._log.trace(
                self.task, Layer.CLIENT, Ev.ACKED, route="end", attempts=len(self._taken),
                said=f"no acknowledgement came; the end did, {self._last_resort()}",
            )  # fmt: skip
            self.acked.set_result(CancelNoop(re=self.request, task=self.task, state=TaskState.CANCELLED))
        else:
            self.acked.set_exception(AgentUnreachable(f"no answer to the stop of task {self.task}"))
            # Whoever asked may be gone; a future that nobody reads is no error.
            self.acked.exception()

    def _last_resort(self) -> str:
        taken = {step.action for step in self._taken}
        if Action.KILL_AGENT in taken:
            return "after the kill of its agent"
        return "after SIGTERM to its agent" if Action.SIGNAL_AGENT in taken else "first"

    async def _pause(self, seconds: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _do(self, step: Step) -> None:
        match step.action:
            case Action.SEND_CONTROL:
                await self._send(step)
            case Action.SEND_HTTP:
                self._send_http(step)
            case Action.SIGNAL_AGENT:
                if self._routes.signal_agent():
                    self._escalated("sigterm", "the agent was asked to shut down")
            case Action.WARN_KILL:
                self._warn()
            case Action.KILL_AGENT:
                if self._routes.kill_agent():
                    self._escalated("sigkill", "the agent was killed; a new one recovers from the journal")
            case Action.REPORT if Action.KILL_AGENT not in {step.action for step in self._taken}:
                self._report()
            case _:
                pass
        others = bool(self._routes.other_tasks(self.task))
        if others != self._heard.others:
            self._note(others=others)

    async def _send(self, step: Step) -> None:
        if step.attempt == FRESH_AT_ATTEMPT:
            # A connection that swallowed three frames is deaf; a new one sends what is not answered by itself.
            self._routes.refresh_control()
            return
        self._request = replace(self._request, attempt=step.attempt)
        # Stamped before the write: the answer must never look older than the question.
        at = time.monotonic_ns()
        if await self._routes.send_cancel(self._request):
            self._trace_sent("control", step.attempt, at)

    def _trace_sent(self, route: str, attempt: int, at: int) -> None:
        ev = Ev.SENT if attempt == 1 and route == "control" else Ev.RETRIED
        self._log.trace(self.task, Layer.CLIENT, ev, mono=at, route=route, attempt=attempt, id=self.request)

    def _send_http(self, step: Step) -> None:
        self._trace_sent("http", step.attempt, time.monotonic_ns())
        post = asyncio.create_task(self._post_one())
        self._posts.add(post)
        post.add_done_callback(self._posts.discard)

    async def _post_one(self) -> None:
        try:
            answer = await asyncio.to_thread(
                cancel_over_http, self._routes.socket, self._request, timeout=HTTP_TIMEOUT_S, post=self._post
            )
        except AgentUnreachable as error:
            self._log.event("http cancel failed", layer=2, task=self.task, error=str(error))
            return
        if isinstance(answer, Ack):
            self.acknowledge(answer, "http")

    def _escalated(self, route: str, detail: str) -> None:
        self._log.trace(self.task, Layer.CLIENT, Ev.ESCALATED, route=route, said=detail)
        self._log.event("stop escalated", layer=2, task=self.task, route=route)
        self._routes.announce("escalated", task=self.task, detail=detail)

    def _warn(self) -> None:
        others = self._routes.other_tasks(self.task)
        self._log.trace(self.task, Layer.CLIENT, Ev.ESCALATED, route="warning", tasks=list(others))
        self._routes.announce(
            "killing",
            task=self.task,
            tasks=others,
            detail="the agent does not answer and will be killed in 3 s",
        )
        self._note(warned_ms=self._clock.tick(time.monotonic()) * 1e3)

    def _report(self) -> None:
        detail = (
            "the agent fell silent after its acknowledgement" if self._heard.acked else "no acknowledgement"
        )
        self._log.event("stop not answered", layer=2, task=self.task, detail=detail)
        self._routes.announce("unanswered", task=self.task, detail=detail)
