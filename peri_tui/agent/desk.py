"""What the agent answers: requests of clients turned into calls of the scheduler.

Stopping is cheap, starting is dear: everything but ``hello``, ``cancel`` and ``end.ack`` needs the token, and only a
store that works; a cancel needs neither.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from peri_tui.agent import instructions
from peri_tui.agent.presence import Presence
from peri_tui.agent.processes.jobs import Jobs
from peri_tui.agent.questions import OUTCOMES, QuestionDesk, Reply
from peri_tui.agent.scheduler.scheduler import Scheduler
from peri_tui.agent.scheduler.store import StateStore, TaskRow
from peri_tui.agent.stream import StreamFeed
from peri_tui.core import messages
from peri_tui.core.ids import is_ulid, make_ulid
from peri_tui.core.states import StopReason, TaskState
from peri_tui.errors import Conflict, InputError, PeriError, ProcessError, StoreUnavailable

_LIST_LIMIT: Final = 200
_MODES: Final = frozenset({"graceful", "force"})
JOB_ACTIONS: Final = ("list", "promote", "stop")


class ControlDesk:
    """Answers one agent's requests.

    Args:
        instance: this agent's id.
        scheduler, store, questions, presence: the parts that do the work.
        trust: the trust store.
        notes: what a client is told when it comes; may still grow.
        jobs: the background jobs.
    """

    def __init__(
        self,
        instance: str,
        *,
        scheduler: Scheduler,
        store: StateStore,
        questions: QuestionDesk,
        presence: Presence,
        trust: instructions.TrustStore,
        notes: Sequence[str] = (),
        jobs: Jobs | None = None,
    ) -> None:
        self._instance = instance
        self._scheduler = scheduler
        self._store = store
        self._questions = questions
        self._trust = trust
        self._jobs = jobs
        self._notes = notes  # Not a copy: recoveries that are still under way add to it.
        self._feeds: dict[str, set[StreamFeed]] = {}
        self._sessions: dict[str, str] = {}
        self.presence = presence
        scheduler.events.subscribe(self._publish)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def answer(self, request: messages.Request, *, may_write: bool) -> messages.Reply | None:
        """Carry out one request and return its reply, or None where none is due. Never raises a PeriError."""
        re = getattr(request, "id", "")
        try:
            return await self._dispatch(request, may_write)
        except Conflict as error:
            return messages.Failure(code="E_CONFLICT", msg=str(error), re=re)
        except StoreUnavailable as error:
            return messages.Failure(code="E_STORE", msg=str(error), re=re)
        except InputError as error:
            return messages.Failure(code="E_INPUT", msg=str(error), re=re)
        except PeriError as error:
            return messages.Failure(code="E_INTERNAL", msg=str(error), re=re)

    async def _dispatch(self, request: messages.Request, may_write: bool) -> messages.Reply | None:
        match request:
            case messages.Cancel():
                return await self.cancel(request, "control")
            case messages.Hello():
                return await self._welcome(request, may_write)
            case messages.EndAck():
                await self._store.ack_end(request.task)
                return None
            case messages.Submit() | messages.Answer() | messages.Trust() | messages.Job() if not may_write:
                return messages.Failure(code="E_AUTH", msg="this needs the agent's token", re=request.id)
            case messages.Submit():
                return await self._submit(request)
            case messages.Answer():
                return self._answer_question(request)
            case messages.Job():
                return await self._job(request)
            case messages.Trust():
                await asyncio.to_thread(self._trust.set, Path(request.workspace), request.trusted)
                return messages.Ok(re=request.id)
            case _:
                return None

    async def cancel(
        self, request: messages.Cancel, route: str
    ) -> messages.CancelAccepted | messages.CancelNoop | messages.Failure:
        """Stop a task: the one function behind every cancel route."""
        if not is_ulid(request.task):
            return messages.Failure(
                code="E_UNKNOWN_TASK", msg=f"{request.task!r} is no task id", re=request.id
            )
        if request.mode not in _MODES or request.reason not in list(StopReason):
            return messages.Failure(code="E_PROTO_FIELD", msg="unknown mode or reason", re=request.id)
        reply = await self._scheduler.cancel(
            request.task,
            reason=StopReason(request.reason),
            mode=request.mode,
            source=route,
            epoch=request.epoch,
            attempt=request.attempt,
            mono=request.t_ui or time.monotonic_ns(),
        )
        reply.re = request.id
        return reply

    async def _welcome(self, hello: messages.Hello, may_write: bool) -> messages.Reply:
        if messages.PROTOCOL not in hello.proto:
            spoken = ", ".join(map(str, hello.proto)) or "none"
            text = f"this agent speaks peri.v{messages.PROTOCOL}, the client {spoken}: update the older of the two"
            return messages.Failure(code="E_PROTO", msg=text, re=hello.id)
        session = await self._session(hello)
        rows = await self._store.tasks(session=session, limit=_LIST_LIMIT) if session else []
        workspace = Path(hello.workspace)
        ask = (
            instructions.what_there_is(workspace)
            if hello.workspace and not self._trust.known(workspace)
            else []
        )
        return messages.Welcome(
            re=hello.id,
            instance=self._instance,
            pid=os.getpid(),
            proto=messages.PROTOCOL,
            session=session,
            may_write=may_write,
            tasks=[summarize(row) for row in sorted(rows, key=lambda row: row.created)],
            ask_trust=ask,
            notes=list(self._notes),
        )

    def _to_trust(self, workspace: Path) -> list[str]:
        return [] if self._trust.known(workspace) else instructions.what_there_is(workspace)

    async def _session(self, hello: messages.Hello) -> str:
        if hello.session == "last":
            found = await self._store.last_session(hello.workspace)
            return found or _fresh_id()
        if hello.session and not is_ulid(hello.session):
            raise InputError(f"{hello.session!r} is no session id")
        return hello.session or _fresh_id()

    async def _submit(self, submit: messages.Submit) -> messages.Reply:
        for what, value in (("task", submit.task), ("session", submit.session)):
            if not is_ulid(value):
                raise InputError(f"{value!r} is no {what} id")
        if not submit.prompt.strip():
            raise InputError("the prompt is empty")
        await asyncio.to_thread(_check_workspace, Path(submit.workspace))
        self._sessions[submit.task] = submit.session
        row = await self._scheduler.submit(submit)
        return messages.SubmitOk(re=submit.id, task=row.task, state=row.state.value, epoch=row.epoch)

    def _answer_question(self, answer: messages.Answer) -> messages.Reply:
        if answer.outcome not in OUTCOMES:
            return messages.Failure(
                code="E_PROTO_FIELD", msg=f"unknown outcome {answer.outcome!r}", re=answer.id
            )
        if self._questions.answer(answer.task, answer.qid, Reply(answer.outcome, answer.text)):
            return messages.Ok(re=answer.id)
        return messages.Failure(code="E_CLOSED", msg="the question is closed", re=answer.id)

    async def _job(self, request: messages.Job) -> messages.Reply:
        if self._jobs is None or request.action not in JOB_ACTIONS:
            text = f"unknown action {request.action[:40]!r}; known: {', '.join(JOB_ACTIONS)}"
            return messages.Failure(code="E_PROTO_FIELD", msg=text, re=request.id)
        if request.action == "list":
            return messages.JobList(re=request.id, jobs=await self._jobs.list())
        try:
            job = self._jobs.find(request.task, request.job)
            if request.action == "promote":
                self._jobs.promote(job)
                return messages.Ok(re=request.id)
        except ProcessError as error:
            return messages.Failure(code="E_JOB", msg=str(error), re=request.id)
        evidence = await self._jobs.stop(job)
        if evidence.survivors:
            left = ", ".join(f"pid {one.pid} {one.command} ({one.reason})" for one in evidence.survivors)
            return messages.Failure(code="E_JOB", msg=f"job {job.id}: not ended: {left}", re=request.id)
        return messages.Ok(re=request.id)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def list_tasks(self) -> object:
        """Return the newest tasks of every workspace, newest first."""
        rows = await self._store.tasks(limit=_LIST_LIMIT)
        return [summarize(row) for row in sorted(rows, key=lambda row: row.created, reverse=True)]

    async def describe(self, task: str) -> object:
        """Return one task, or None if it is unknown; ``owner`` tells a task that runs elsewhere."""
        row = await self._store.get(task)
        return None if row is None else summarize(row)

    # --- streams ----------------------------------------------------------------------------------------------------

    def subscribe(self, session: str, resume: Mapping[str, int], feed: StreamFeed) -> Callable[[], None]:
        """Send the live events of a session to ``feed``. Returns a function that ends it."""
        feed.hold(resume)
        feeds = self._feeds.setdefault(session, set())
        feeds.add(feed)
        return lambda: feeds.discard(feed)

    async def catch_up(self, session: str, resume: Mapping[str, int], feed: StreamFeed) -> None:
        """Send what ``feed`` missed of the tasks in ``resume``, oldest first."""
        for task in resume:
            row = await self._store.get(task)
            if row is not None and row.session == session:
                self._sessions[task] = session
        for task, after in sorted(resume.items()):
            await feed.catch_up(task, after)

    async def replay(self, task: str, after: int, limit: int) -> Sequence[messages.TaskEvent]:
        """Return stored events of a task after a sequence number."""
        return await self._store.events(task, after, limit)

    def _publish(self, events: Sequence[messages.TaskEvent]) -> None:
        for event in events:
            session = self._sessions.get(event.task, "")
            for feed in list(self._feeds.get(session, ())):
                feed.publish([event])
            if isinstance(event, messages.TaskEnded):
                self.presence.work_ended()


def summarize(row: TaskRow) -> messages.TaskSummary:
    """Return the one line about a task."""
    return messages.TaskSummary(
        task=row.task,
        state=row.state.value,
        prompt=row.prompt[:200],
        workspace=row.workspace,
        session=row.session,
        stop_reason=row.stop_reason or "",
        owner=row.owner
        if row.state not in (TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED)
        else "",
        created=row.created,
        ended=row.ended or 0,
        last_seq=row.last_seq,
    )


def _check_workspace(workspace: Path) -> None:
    if not workspace.is_absolute() or not workspace.is_dir():
        raise InputError(f"{workspace}: no such folder")
    if not os.access(workspace, os.R_OK | os.X_OK):
        raise InputError(f"{workspace}: cannot be read")


def _fresh_id() -> str:
    return make_ulid(int(time.time() * 1000), os.urandom(10))
