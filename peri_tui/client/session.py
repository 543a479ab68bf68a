"""Layer 2: one client's session with an agent.

Two sockets with loops of their own (``channels``), the bookkeeping of ``core.link`` (sequence numbers, what is not
answered), stops that escalate (``escalation``), and the life of the embedded agent: when its process dies a new one is
started, which ends and rolls back what the old one left, and the ends of the tasks arrive by resume.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from peri_tui.client import launcher
from peri_tui.client.agent_keeper import AgentKeeper, Launch, LinkNews
from peri_tui.client.channels import ControlChannel, StreamChannel, Target
from peri_tui.client.escalation import Ack, StopRun
from peri_tui.client.http_route import Post
from peri_tui.client.launcher import AgentHandle
from peri_tui.client.mint import fresh_id
from peri_tui.client.requests import RequestBook, as_error
from peri_tui.client.stop_lane import StopLane
from peri_tui.config import Paths, Settings
from peri_tui.core.link import ClientLink, Verdict
from peri_tui.core.messages import (
    MAX_CONTROL,
    PROTOCOL,
    Answer,
    Budget,
    Cancel,
    CancelAccepted,
    CancelNoop,
    EndAck,
    Failure,
    Hello,
    Job,
    JobInfo,
    JobList,
    ModelChoice,
    Reply,
    Submit,
    SubmitOk,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    Trust,
    Welcome,
    encode,
    scrub,
)
from peri_tui.core.states import TaskState
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import (
    AgentUnreachable,
    InputError,
    PeriError,
)
from peri_tui.log import Log

CONNECT_S: Final = 20.0
_CLOSED: Final = "E_CLOSED"


class AgentSession:
    """Speaks ``peri.v1`` with one agent. Use from one event loop.

    Args:
        agent: the handle of an embedded agent, or the socket of one that runs by itself (never signalled or killed).
        paths, log, settings: of this process.
        workspace: the folder of the session, absolute.
        session: "" for a new conversation, "last", or an id.
        on_event: takes each event once, in order; if it returns an awaitable, credit is given after that.
        on_link: takes news of the link; must not block.
        environ: the environment of an agent that has to be started again.
        lane: a stop lane to keep aimed at the living agent.
        launch: starts an agent, ``launcher.start`` unless a test says otherwise.
        post: the HTTP cancel, ``net.post_cancel`` unless a test says otherwise.
    """

    def __init__(
        self,
        agent: AgentHandle | Path,
        *,
        paths: Paths,
        log: Log,
        workspace: Path,
        settings: Settings,
        on_event: Callable[[TaskEvent], Awaitable[None] | None],
        on_link: Callable[[LinkNews], None] = lambda news: None,
        session: str = "",
        environ: Mapping[str, str] = os.environ,
        lane: StopLane | None = None,
        launch: Launch | None = None,
        post: Post | None = None,
    ) -> None:
        self._log = log
        self._workspace = workspace
        self._settings = settings
        self._on_event = on_event
        self._on_link = on_link
        self._session = session
        self._lane = lane
        self._keeper = AgentKeeper(
            agent, paths=paths, log=log, workspace=workspace, announce=on_link,
            launch=launch or (lambda paths, workspace: launcher.start(paths, workspace, environ=environ)),
        )  # fmt: skip
        self._post = post
        self.link = ClientLink()
        self.welcome: Welcome | None = None
        self._welcomed = asyncio.Event()
        self._stops: dict[str, StopRun] = {}
        self._states: dict[str, str] = {}
        self._end_acks: dict[str, bool] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._failure: PeriError | None = None
        self._was_lost = False
        self._control = ControlChannel(
            self._where, self._hello, on_welcome=self._take_welcome, on_reply=self._take_reply,
            on_lost=self._lost, on_unknown=self.link.count_unknown,
        )  # fmt: skip
        self._requests = RequestBook(self.link, self._control.send)
        self._stream = StreamChannel(
            self._where_stream, self._hello_stream, on_event=self._take_event,
            on_opened=self.link.stream_opened, consumed=self.link.consumed, on_unknown=self.link.count_unknown,
        )  # fmt: skip

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The session's id, once connected."""
        return self._session

    @property
    def socket(self) -> Path:
        """The socket of the agent as of now."""
        return self._keeper.socket

    @property
    def agent(self) -> AgentHandle | None:
        """The embedded agent as of now."""
        return self._keeper.handle

    @property
    def connected(self) -> bool:
        """True while the control connection is open."""
        return self._control.open

    async def connect(self) -> Welcome:
        """Open both sockets and return the agent's welcome.

        Raises:
            AgentUnreachable: no welcome within 20 s.
            VersionMismatch, NotAuthorized: the agent refuses this client.
        """
        self._spawn(self._run(self._control.run()))
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._welcomed.wait()
        except TimeoutError:
            await self.close()
            raise AgentUnreachable(f"the agent at {self.socket} does not answer") from None
        if self._failure is not None or self.welcome is None:
            await self.close()
            raise self._failure or AgentUnreachable(f"the agent at {self.socket} does not answer")
        self._spawn(self._run(self._stream.run()))
        return self.welcome

    async def close(self) -> None:
        """Close both sockets and let go of an embedded agent (it follows its policy for a client that left)."""
        for job in list(self._jobs):
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        self._requests.fail(AgentUnreachable("the session was closed"))
        self._keeper.close()

    def _spawn(self, work: Awaitable[None]) -> None:
        job = asyncio.ensure_future(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _run(self, work: Awaitable[None]) -> None:
        try:
            await work
        except PeriError as error:
            self._failure = error
            self._log.event("link failed", layer=2, error=str(error))
            self._requests.fail(error)
            self._welcomed.set()
            self.announce("failed", detail=str(error))

    # --- requests ---------------------------------------------------------------------------------------------------

    def new_task_id(self) -> str:
        """Return an id for a task; a stop for it works before it was submitted."""
        return fresh_id()

    async def submit(
        self, prompt: str, *, approve: str | None = None, task: str | None = None, interactive: bool = True
    ) -> str:
        """Ask for a task; returns its id when the agent has it durably.

        Args:
            prompt: what to do.
            approve: approval mode, else the setting.
            task: the id from ``new_task_id``, else a new one.
            interactive: somebody is there to answer questions.

        Raises:
            InputError: the prompt is too long for one message.
            AgentUnreachable: no answer within 15 s (the task may run all the same, and can be stopped).
            PeriError: the agent's refusal.
        """
        settings = self._settings
        request = Submit(
            id=fresh_id(), task=task or self.new_task_id(), session=self._session, workspace=str(self._workspace),
            prompt=scrub(prompt), approve=approve or settings.approve, on_stop=settings.on_stop,
            interactive=interactive,
            model=ModelChoice(provider=settings.provider, base_url=settings.base_url, model=settings.model),
            budget=Budget(turns=settings.max_turns, tokens=settings.max_tokens, seconds=settings.max_seconds),
        )  # fmt: skip
        _check_size(request)
        # From here on a reconnect asks for its events, also when the answer gets lost.
        self.link.start_at(request.task, 0)
        self._states[request.task] = TaskState.QUEUED
        reply = await self._requests.ask(request)
        if isinstance(reply, SubmitOk):
            return reply.task
        self.link.forget(request.task)
        self._states.pop(request.task, None)
        raise as_error(reply)

    async def cancel(
        self, task: str, *, mode: str = "graceful", reason: str = "user", pressed_mono: int = 0
    ) -> CancelAccepted | CancelNoop:
        """Stop a task; any number of calls have one effect. Returns the agent's acknowledgement.

        A lost acknowledgement escalates by itself: repeats, HTTP, and for an embedded agent signal and kill. It never
        queues behind other requests.

        Args:
            task: the task.
            mode: graceful or force.
            reason: a ``StopReason``.
            pressed_mono: monotonic nanoseconds of the key press, where the deadlines start.

        Raises:
            AgentUnreachable: no route answered within a minute.
        """
        key = f"{task} {mode}"
        run = self._stops.get(key)
        if run is None:
            request = Cancel(id=fresh_id(), task=task, reason=reason, mode=mode, t_ui=pressed_mono)
            pressed = pressed_mono / 1e9 if pressed_mono else time.monotonic()
            run = StopRun(
                request, self, self._log, embedded=self._keeper.embedded, pressed=pressed, post=self._post
            )
            self._stops[key] = run
            self.link.sent(request)
            self._spawn(self._drive(key, run))
        return await asyncio.shield(run.acked)

    async def _drive(self, key: str, run: StopRun) -> None:
        try:
            await run.drive()
        finally:
            self.link.answered(run.request)
            if self._stops.get(key) is run:
                del self._stops[key]

    async def answer(self, task: str, qid: str, outcome: str, text: str = "") -> bool:
        """Answer a question; False if it was closed meanwhile (a stop answers it *cancelled*).

        Raises:
            PeriError: the agent's refusal, or no answer within 15 s.
        """
        reply = await self._requests.ask(
            Answer(id=fresh_id(), task=task, qid=qid, outcome=outcome, text=scrub(text))
        )
        if isinstance(reply, Failure) and reply.code == _CLOSED:
            return False
        if isinstance(reply, Failure):
            raise as_error(reply)
        return True

    async def trust(self, trusted: bool) -> None:
        """Say whether the workspace's own instructions may be read.

        Raises:
            PeriError: the agent's refusal, or no answer within 15 s.
        """
        reply = await self._requests.ask(
            Trust(id=fresh_id(), workspace=str(self._workspace), trusted=trusted)
        )
        if isinstance(reply, Failure):
            raise as_error(reply)

    async def jobs(self) -> list[JobInfo]:
        """Return the background jobs of the agent's tasks, services included, oldest first.

        Raises:
            PeriError: the agent's refusal, or no answer within 15 s.
        """
        reply = await self._requests.ask(Job(id=fresh_id(), action="list"))
        if not isinstance(reply, JobList):
            raise as_error(reply)
        return reply.jobs

    async def act_on_job(self, task: str, job: str, action: str) -> None:
        """Promote a background job to a service, or stop it; a stop returns when it is proven to be gone.

        Raises:
            PeriError: the agent's refusal (unknown, over, not ended), or no answer within 15 s.
        """
        reply = await self._requests.ask(Job(id=fresh_id(), task=task, job=job, action=action))
        if isinstance(reply, Failure):
            raise as_error(reply)

    def acknowledge_end(self, task: str) -> None:
        """Say that ``task.end`` was applied; it is said again if the agent asks again."""
        self._end_acks[task] = False
        self._spawn(self._ack_end(task))

    async def _ack_end(self, task: str) -> None:
        self._end_acks[task] = await self._control.send(EndAck(task=task))

    def decline_kill(self, task: str) -> None:
        """Say no to the kill of the agent that ``LinkNews("killing")`` announced."""
        for run in self._stops.values():
            if run.task == task:
                run.decline()

    # --- what a stop needs (``escalation.StopRoutes``) ----------------------------------------------------------------

    async def send_cancel(self, request: Cancel) -> bool:
        """Send over control, if it is open; remembered for a reconnect in any case."""
        self.link.sent(request)
        return await self._control.send(request) if self._control.open else False

    def refresh_control(self) -> None:
        """Make a fresh control connection."""
        self._control.abort()

    def signal_agent(self) -> bool:
        """Send SIGTERM to the embedded agent."""
        return self._keeper.terminate()

    def kill_agent(self) -> bool:
        """Kill the embedded agent; a new one is started by the reconnect."""
        return self._keeper.kill()

    def other_tasks(self, task: str) -> tuple[str, ...]:
        """Return the tasks of this session that live beside ``task``."""
        return tuple(
            name for name, state in self._states.items() if name != task and TaskState(state).is_stoppable
        )

    def announce(self, state: str, *, task: str = "", detail: str = "", tasks: tuple[str, ...] = ()) -> None:
        """Tell the screen of the link."""
        self._on_link(LinkNews(state, detail, task, tasks))

    # --- connections ------------------------------------------------------------------------------------------------

    async def _where(self) -> Target:
        if await self._keeper.revive():
            if self._lane is not None:
                self._lane.retarget(self.socket)
            self._stream.abort()
        return self._keeper.target()

    async def _where_stream(self) -> Target:
        # Only the control loop starts agents.
        return self._keeper.target()

    def _hello(self) -> Hello:
        return Hello(
            id=fresh_id(), proto=[PROTOCOL], client=f"peri {os.getpid()}", workspace=str(self._workspace),
            session=self._session,
        )  # fmt: skip

    def _hello_stream(self) -> Hello:
        hello = self._hello()
        points = self.link.resume_points()
        for summary in self.welcome.tasks if self.welcome else []:
            if self.link.last_seq(summary.task) == 0:
                points[summary.task] = 0
        hello.resume = points
        return hello

    async def _take_welcome(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self._session = welcome.session
        for summary in welcome.tasks:
            self._states[summary.task] = summary.state
        for request in self.link.resend():
            await self._control.send(request)
            if isinstance(request, Cancel):
                self._log.trace(
                    request.task, Layer.CLIENT, Ev.RETRIED, route="reconnect", attempt=request.attempt
                )
        for task in [task for task, sent in self._end_acks.items() if not sent]:
            await self._ack_end(task)
        if self._was_lost:
            for task in {run.task for run in self._stops.values()}:
                self._log.trace(task, Layer.CLIENT, Ev.RECONNECTED, route="control")
        self._was_lost = False
        self._welcomed.set()
        self._stream.nudge()
        self.announce("open")

    def _lost(self, reason: str) -> None:
        self._log.event("control lost", layer=2, reason=reason)
        if not self._was_lost:
            self.announce("lost", detail=reason)
        self._was_lost = True

    # --- what comes in ----------------------------------------------------------------------------------------------

    def _take_reply(self, reply: Reply) -> None:
        if isinstance(reply, CancelAccepted):
            self.link.cut(reply.task, reply.cut_seq)
        if isinstance(reply, Ack):
            self.link.answered(reply.re)
            for run in list(self._stops.values()):
                if run.request == reply.re:
                    run.acknowledge(reply, "control")
            return
        if not self._requests.take(reply) and isinstance(reply, Failure):
            self._log.event("agent error", layer=2, code=reply.code, msg=reply.msg)

    async def _take_event(self, event: TaskEvent) -> bool:
        verdict = self.link.receive(event)
        if verdict is Verdict.GAP:
            return False
        if verdict is Verdict.DUPLICATE and isinstance(event, TaskEnded) and event.task in self._end_acks:
            self.acknowledge_end(event.task)
        if verdict is not Verdict.APPLY:
            return True
        self._follow(event)
        try:
            pending = self._on_event(event)
            if pending is not None:
                await pending
        except Exception as error:
            # The screen's trouble with one event must not look like a lost connection, nor stop the events after it.
            self._log.event(
                "event not taken", layer=1, task=event.task, kind=type(event).__name__, error=repr(error)
            )
        return True

    def _follow(self, event: TaskEvent) -> None:
        if isinstance(event, TaskStateChanged | TaskEnded):
            self._states[event.task] = event.state
        for run in [run for run in self._stops.values() if run.task == event.task]:
            if isinstance(event, TaskEnded):
                run.end()
            else:
                run.hear()
        if isinstance(event, TaskEnded) and self._lane is not None:
            self._lane.settled(event.task)


__all__ = ["AgentSession", "LinkNews"]


def _check_size(request: Submit) -> None:
    # The agent would close the connection over it, and a reconnect would send it again, for ever.
    size = len(encode(request).encode())
    if size > MAX_CONTROL:
        raise InputError(
            f"the prompt: {size:,} bytes as a message, more than {MAX_CONTROL:,}; put it into a file and name that"
        )
