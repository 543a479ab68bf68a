"""``peri -p``: one task without a screen. The answer goes to standard output, progress to standard error.

What a model or a tool wrote is cleaned wherever a terminal may read it. SIGINT and SIGTERM are a stop; a second one forces. The exit code is that of ``task.end``: nothing is said to be stopped
before the agent has shown it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, Protocol, TextIO

from peri_tui.client.agent_keeper import LinkNews
from peri_tui.core.messages import (
    Asked,
    CancelAccepted,
    CancelNoop,
    Delta,
    FileChanged,
    TaskEnded,
    TaskEvent,
    TaskStateChanged,
    ToolStarted,
    Welcome,
    encode,
)
from peri_tui.core.sanitize import clean, one_line
from peri_tui.core.states import EXIT_FAILED, EXIT_NOT_CLEAN, EXIT_STOPPED, EXIT_TERMINATED, TaskState
from peri_tui.core.trace import Ev, Layer
from peri_tui.errors import AgentUnreachable, PeriError
from peri_tui.log import Log

OutputFormat = Literal["text", "json", "stream-json"]
NEVER_STARTED_S: Final = 2.0
END_ACK_S: Final = 0.05
WIDTH: Final = 200


class HeadlessLink(Protocol):
    """What a task without a screen needs of ``AgentSession``."""

    async def connect(self) -> Welcome:
        """Connect."""
        ...

    def new_task_id(self) -> str:
        """Return an id."""
        ...

    async def submit(
        self, prompt: str, *, approve: str | None = None, task: str | None = None, interactive: bool = True
    ) -> str:
        """Submit."""
        ...

    async def cancel(
        self, task: str, *, mode: str = "graceful", reason: str = "user", pressed_mono: int = 0
    ) -> CancelAccepted | CancelNoop:
        """Stop."""
        ...

    async def answer(self, task: str, qid: str, outcome: str, text: str = "") -> bool:
        """Answer a question."""
        ...

    def acknowledge_end(self, task: str) -> None:
        """Acknowledge the end."""
        ...

    async def close(self) -> None:
        """Close."""
        ...


Factory = Callable[[Callable[[TaskEvent], None], Callable[[LinkNews], None]], Awaitable[HeadlessLink]]


async def run_headless(
    session_factory: Factory,
    prompt: str,
    *,
    output_format: OutputFormat = "text",
    approve: str = "ask",
    stdout: TextIO,
    stderr: TextIO,
    log: Log,
    task: str | None = None,
) -> int:
    """Run one task and return the exit code of the process.

    Args:
        session_factory: makes a session that is not connected yet, from ``on_event`` and ``on_link``.
        prompt: what to do.
        output_format: text, json (only ``task.end``), stream-json (every message, one a line).
        approve: approval mode; with ``ask`` each question is answered with *deny*, and the exit code is 1.
        stdout, stderr: where answer and progress go.
        log: for the trace of a stop.
        task: the task's id, else a new one.

    Raises:
        PeriError: no agent, or it refused the task.
    """
    run = _Run(prompt, output_format, approve, stdout, stderr, log)
    return await run.run(session_factory, task)


class _Run:
    def __init__(
        self,
        prompt: str,
        output_format: OutputFormat,
        approve: str,
        stdout: TextIO,
        stderr: TextIO,
        log: Log,
    ) -> None:
        self._prompt = prompt
        self._format = output_format
        self._approve = approve
        self._stdout = stdout
        self._stderr = stderr
        self._log = log
        self._session: HeadlessLink | None = None
        self._task = ""
        self._end: asyncio.Future[TaskEnded] = asyncio.get_running_loop().create_future()
        self._jobs: set[asyncio.Task[None]] = set()
        self._opening: asyncio.Future[HeadlessLink]
        self._signals: list[int] = []
        self._denied = False
        self._told = False
        self._broken = False
        self._submitted = False
        self._part = ("", "")

    async def run(self, factory: Factory, task: str | None) -> int:
        loop = asyncio.get_running_loop()
        # Before anything is started, so that no signal finds us without a handler.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        self._opening = asyncio.ensure_future(self._open(factory, task))
        try:
            await asyncio.wait({self._opening})
            if self._opening.cancelled():
                # Stopped before anything was asked for: nothing ran, so nothing has to be waited for.
                return EXIT_TERMINATED if self._signals[0] == signal.SIGTERM else EXIT_STOPPED
            session = self._opening.result()
            self._submitted = True
            await session.submit(self._prompt, approve=self._approve, task=self._task, interactive=False)
            return await self._finish(session)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            await self._let_go()

    async def _open(self, factory: Factory, task: str | None) -> HeadlessLink:
        self._session = await factory(self.take, self.hear)
        self._task = task or self._session.new_task_id()
        await self._session.connect()
        return self._session

    async def _let_go(self) -> None:
        jobs: list[asyncio.Future[Any]] = [self._opening, *self._jobs]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._end.done() and not self._end.cancelled():
            # Read, so that an error which was told otherwise is not told again at exit.
            self._end.exception()

    async def _finish(self, session: HeadlessLink) -> int:
        end = await self._end
        session.acknowledge_end(self._task)
        self._print_end(end)
        # The acknowledgement leaves in the background; closing at once would cut it off.
        await asyncio.sleep(END_ACK_S)
        return self._exit_code(end)

    # --- what comes in ----------------------------------------------------------------------------------------------

    def take(self, event: TaskEvent) -> None:
        """Take one event of the session; those of other tasks are not ours."""
        if event.task != self._task:
            return
        if self._format == "stream-json":
            self._write(encode(event) + "\n")
        match event:
            case TaskEnded():
                if not self._end.done():
                    self._end.set_result(event)
            case Asked():
                self._deny(event)
            case Delta(ch="text"):
                self._show(event)
            case _:
                self._progress(event)

    def hear(self, news: LinkNews) -> None:
        """Take news of the link."""
        if news.state in ("lost", "restarting", "restarted", "escalated", "killing", "unanswered"):
            self._tell(f"agent {news.state}: {news.detail}")
        if news.state == "failed" and not self._end.done():
            self._end.set_exception(AgentUnreachable(news.detail))

    def _show(self, delta: Delta) -> None:
        # The answer is the last piece of text; what was said before it on the way was progress.
        part, text = self._part
        self._part = (delta.part, (text if delta.part == part else "") + delta.text)

    def _progress(self, event: TaskEvent) -> None:
        if isinstance(event, ToolStarted):
            self._tell(f"{event.name} {event.summary}".rstrip())
        elif isinstance(event, FileChanged):
            self._tell(f"{event.kind} {event.path}")
        elif isinstance(event, TaskStateChanged) and event.state in (TaskState.CANCELLING, TaskState.QUEUED):
            asked = event.cause in ("user", "shutdown")
            ending = "stopping" if asked else f"ending: {event.cause.replace('_', ' ')}"
            self._tell(ending if event.state == TaskState.CANCELLING else "queued")

    def _deny(self, question: Asked) -> None:
        self._denied = True
        if not self._told:
            self._told = True
            self._tell("a tool needs an approval and was denied; use --approve all to allow all")
        self._spawn(self._answer(question))

    async def _answer(self, question: Asked) -> None:
        assert self._session is not None
        try:
            await self._session.answer(question.task, question.qid, "deny", "nobody is here to approve this")
        except PeriError as error:
            self._tell(f"the question was not answered: {error}")

    # --- stopping ---------------------------------------------------------------------------------------------------

    def _stop(self, number: int) -> None:
        pressed = time.monotonic_ns()
        self._signals.append(number)
        if not self._submitted:
            self._opening.cancel()
            return
        mode = "graceful" if len(self._signals) == 1 else "force"
        self._log.trace(
            self._task, Layer.UI, Ev.PRESSED, mono=pressed, key=signal.Signals(number).name, mode=mode
        )
        self._spawn(self._cancel(mode, pressed))

    async def _cancel(self, mode: str, pressed: int) -> None:
        assert self._session is not None
        try:
            answer = await self._session.cancel(self._task, mode=mode, pressed_mono=pressed)
        except PeriError as error:
            self._tell(f"not stopped: {error}")
            if not self._end.done():
                self._end.set_exception(error)
            return
        if isinstance(answer, CancelAccepted) and answer.routed:
            self._tell(f"the task runs in agent {answer.routed}")
        if isinstance(answer, CancelNoop) and answer.state == "tombstone":
            # The agent vouches that a late submission will not start; where it has no row, it has no end to send.
            await asyncio.sleep(NEVER_STARTED_S)
            if not self._end.done():
                self._end.set_result(
                    TaskEnded(
                        task=self._task,
                        state=TaskState.CANCELLED,
                        stop_reason="user",
                        message="stopped before it started",
                        exit_code=EXIT_STOPPED,
                    )
                )

    def _spawn(self, work: Awaitable[None]) -> None:
        job = asyncio.ensure_future(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    # --- what goes out ----------------------------------------------------------------------------------------------

    def _print_end(self, end: TaskEnded) -> None:
        if self._format == "json":
            self._write(encode(end) + "\n")
        elif self._format == "text" and (answer := end.answer or self._part[1]):
            self._write((clean(answer) if self._stdout.isatty() else answer).rstrip("\n") + "\n")
        if end.state != TaskState.COMPLETED:
            word = end.state if end.verified else f"{end.state}, not verified"
            self._tell(f"{word}: {end.message or end.stop_reason}".rstrip(": "))
        for line in end.residue:
            self._tell(f"left: {line}")

    def _exit_code(self, end: TaskEnded) -> int:
        code = end.exit_code
        if end.state == TaskState.CANCEL_FAILED or not end.verified:
            return EXIT_NOT_CLEAN
        if code == EXIT_STOPPED and self._signals and self._signals[0] == signal.SIGTERM:
            return EXIT_TERMINATED
        return EXIT_FAILED if code == 0 and self._denied else code

    def _write(self, text: str) -> None:
        if self._broken or not text:
            return
        coding = self._stdout.encoding or "utf-8"
        try:
            self._stdout.write(text.encode(coding, "backslashreplace").decode(coding))
            self._stdout.flush()
        except (OSError, ValueError) as error:
            self._reader_left(error)

    def _reader_left(self, error: Exception) -> None:
        # Whoever read the answer is gone (``| head``), or the disk is full. Nobody gets the rest: that is a stop.
        self._broken = True
        if not isinstance(error, BrokenPipeError):
            self._tell(f"the output cannot be written: {error}")
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())
        if not self._end.done():
            self._stop(signal.SIGINT)

    def _tell(self, text: str) -> None:
        coding = self._stderr.encoding or "utf-8"
        line = f"peri: {one_line(text, WIDTH)}\n"
        with contextlib.suppress(OSError, ValueError):
            self._stderr.write(line.encode(coding, "backslashreplace").decode(coding))
            self._stderr.flush()
