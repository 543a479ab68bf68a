"""Doubles for everything that a task's body works with: a scripted model, files without a journal, a question desk.

``Body`` puts them together over a real workspace folder; the pieces that exist (``Root``, the tools, the history, the
permissions) are the real ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peri_tui.agent.cancel import CancelCause, CancelToken
from peri_tui.agent.history import History
from peri_tui.agent.models import call
from peri_tui.agent.permissions import Permissions, SessionRules
from peri_tui.agent.questions import Reply
from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.rollback.diff import Change, describe
from peri_tui.agent.rollback.window import WindowChange
from peri_tui.agent.runner import Outcome, run_task
from peri_tui.agent.task_context import TaskContext
from peri_tui.agent.tools.contract import ToolContext
from peri_tui.core.messages import Asked, Budget, Submit, TaskEvent, Usage
from peri_tui.core.states import StopReason, TaskState
from peri_tui.errors import FileChanged, ModelError, SpawnFailed

TASK = "01J00000000000000000000000"


def says(*pieces: str) -> list[call.ModelEvent]:
    """Return the events of an answer without calls."""
    return [*(call.TextDelta(piece) for piece in pieces), call.UsageReport(10, 5), call.Finished("stop")]


def calls(*wanted: tuple[str, str], text: str = "") -> list[call.ModelEvent]:
    """Return the events of a message with tool calls (name, arguments)."""
    events: list[call.ModelEvent] = [call.TextDelta(text)] if text else []
    events += [call.ToolCall(n, f"call_{n}", name, args) for n, (name, args) in enumerate(wanted)]
    return [*events, call.UsageReport(10, 5), call.Finished("tool_calls")]


@dataclass
class FakeModel:
    """Plays one list of events a request; an exception in it is raised, a callable is called, "wait" waits for ever."""

    script: Sequence[Sequence[Any]]
    name: str = "fake"
    requests: list[call.ModelRequest] = field(default_factory=list)
    streams_closed: int = 0
    last_life: float = 0.0
    phase: str = "idle"
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    _usage: Usage = field(default_factory=Usage)

    async def stream(self, request: call.ModelRequest) -> AsyncGenerator[call.ModelEvent]:
        """Yield the next list of the script."""
        self.requests.append(request)
        try:
            for event in self.script[min(len(self.requests), len(self.script)) - 1]:
                await asyncio.sleep(0)
                if event == "wait":
                    self.reached.set()
                    await asyncio.Event().wait()
                elif isinstance(event, ModelError):
                    raise event
                elif callable(event):
                    event()
                else:
                    self._count(event)
                    yield event
        finally:
            self.streams_closed += 1

    def _count(self, event: call.ModelEvent) -> None:
        if isinstance(event, call.UsageReport):
            self._usage = Usage(
                tokens_in=self._usage.tokens_in + event.tokens_in,
                tokens_out=self._usage.tokens_out + event.tokens_out,
            )

    def usage(self) -> Usage:
        """Return the sum of the reports."""
        return self._usage

    def shut(self) -> list[Any]:
        """Nothing is open."""
        return []

    def open_sockets(self) -> list[str]:
        """Nothing is open."""
        return []

    def far_end(self) -> call.FarEnd:
        """Nobody is there."""
        return "none"

    async def aclose(self) -> None:
        """Nothing is held."""


class FakeFiles:
    """Changes files like the rollback layer, without its journal; ``hold`` blocks an edit until it is set."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._before: dict[str, bytes] | None = None
        self.edits: list[str] = []
        self.error: Exception | None = None
        self.on_edit: Callable[[], None] | None = None

    def edit(self, path: str, data: bytes | None, *, expected_sha: str | None) -> Change:
        """Write the file, if it is what is expected."""
        if self.error is not None:
            raise self.error
        if self.on_edit is not None:
            self.on_edit()
        target = self._root.path / path
        old = target.read_bytes() if target.exists() else None
        sha = hashlib.sha256(old).hexdigest() if old is not None else ""
        if expected_sha is not None and sha != expected_sha:
            raise FileChanged(f"{path}: is not what you have read")
        assert data is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self.edits.append(path)
        return describe(path, "modified" if old is not None else "added", old, data)

    def window_open(self) -> None:
        """Remember every file."""
        self._before = self._all()

    def window_close(self) -> list[WindowChange]:
        """Return what differs; nothing where no window is open."""
        if self._before is None:
            return []
        now, before, self._before = self._all(), self._before, None
        found = dict.fromkeys(now.keys() - before.keys(), "added")
        found |= dict.fromkeys(before.keys() - now.keys(), "deleted")
        found |= {path: "modified" for path in now.keys() & before.keys() if now[path] != before[path]}
        return [WindowChange(path, kind) for path, kind in sorted(found.items())]

    def _all(self) -> dict[str, bytes]:
        base = self._root.path
        return {str(p.relative_to(base)): p.read_bytes() for p in base.rglob("*") if p.is_file()}


class NoProcesses:
    """Starts nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def spawn(self, task: str, argv: Sequence[str], **_: Any) -> Any:
        """Refuse."""
        self.asked.append(list(argv))
        raise SpawnFailed("no processes in this test", errno=2, stage="exec")

    def list_refs(self, task: str) -> Sequence[Any]:
        """Nothing lives."""
        return ()


class Body:
    """A task's body over a workspace.

    Args:
        workspace: the folder.
        script: what the model plays, one list a request.
        answers: the outcomes of questions, in order; "wait" never answers.
    """

    def __init__(
        self,
        workspace: Path,
        script: Sequence[Sequence[Any]] = (),
        *,
        approve: str = "all",
        interactive: bool = True,
        answers: Sequence[str | Reply | Callable[[], str]] = (),
        budget: Budget | None = None,
        processes: Any = None,
        private: Sequence[Path] = (),
        rules: SessionRules | None = None,
        history: History | None = None,
        prompt: str = "do it",
        answer_within: float = 30.0,
        **extra: Any,
    ) -> None:
        self.workspace = workspace
        self.root = Root(workspace)
        self.files = FakeFiles(self.root)
        self.model = FakeModel(script)
        self.processes = processes or NoProcesses()
        self.token = CancelToken()
        self.events: list[Any] = []
        self.states: list[TaskState] = []
        self.history = history or History()
        self.env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        self.asked = asyncio.Event()
        self._answers = list(answers)
        self._thread = ThreadPoolExecutor(1)
        self.permissions = Permissions(
            TASK,
            mode=approve,
            interactive=interactive,
            workspace=self.root.path,
            ask=self._ask,
            emit=self.emit,
            set_state=self._set_state,
            environ=self.env,
            private=private,
            rules=rules,
            answer_within=answer_within,
        )
        submit = Submit(
            id="1", task=TASK, session=TASK, workspace=str(workspace), prompt=prompt, approve=approve,
            interactive=interactive, budget=budget or Budget(),
        )  # fmt: skip
        self.context = TaskContext(
            submit=submit,
            token=self.token,
            model=self.model,
            processes=self.processes,
            files=self.files,
            root=self.root,
            history=self.history,
            permissions=self.permissions,
            emit=self.emit,
            in_thread=self.in_thread,
            env=self.env,
            **extra,
        )

    def close(self) -> None:
        """End the thread and close the folder."""
        self._thread.shutdown()
        self.root.close()

    def emit(self, event: TaskEvent) -> bool:
        """Keep the event."""
        self.events.append(event)
        return True

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run in the one thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def _set_state(self, state: TaskState) -> None:
        self.states.append(state)

    async def _ask(self, asked: Asked) -> Reply:
        self.asked.set()
        answer = self._answers.pop(0)
        if callable(answer):
            answer = answer()
        if answer == "wait":
            await asyncio.Event().wait()
        return answer if isinstance(answer, Reply) else Reply(str(answer))

    async def run(self) -> Outcome:
        """Run the body to its own end."""
        return await run_task(self.context)

    def start(self) -> asyncio.Task[Outcome]:
        """Start the body under its token."""
        body = asyncio.create_task(self.run())
        self.token.bind(body)  # type: ignore[arg-type]
        return body

    def stop(self) -> None:
        """Press Stop."""
        self.token.set(CancelCause(StopReason.USER, "test", "c1", time.monotonic_ns()))

    def tool_context(self, call_id: str = "call_0", seen: dict[str, str] | None = None) -> ToolContext:
        """Return what one call of a tool gets."""
        return ToolContext(
            task=TASK,
            call=call_id,
            root=self.root,
            files=self.files,
            processes=self.processes,
            in_thread=self.in_thread,
            emit=self.emit,
            token=self.token,
            env=self.env,
            seen={} if seen is None else seen,
        )

    def tool_messages(self) -> list[str]:
        """Return the results that the last request held."""
        return [m["content"] for m in self.model.requests[-1].messages if m["role"] == "tool"]
