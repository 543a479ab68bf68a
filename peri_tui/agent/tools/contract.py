"""What a tool is, what it gets, and what it gives back.

A tool decodes its arguments into a struct, may say beforehand what it would do (``preview``), and runs. What it cannot
do is a ``ToolError``: one line to the model, and the task goes on. Tools read the workspace through ``Root`` and change
it through the rollback layer only, both in the one thread of ``in_thread``; they start processes through
``processes`` only.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from peri_tui.agent.cancel import CancelToken
from peri_tui.agent.permissions import Preview
from peri_tui.agent.processes.jobs import TaskJobs
from peri_tui.agent.rollback.beneath import Root, show
from peri_tui.agent.rollback.diff import Change
from peri_tui.agent.rollback.window import WindowChange
from peri_tui.core.messages import TaskEvent
from peri_tui.errors import ToolError

R = TypeVar("R")
A = TypeVar("A", bound=msgspec.Struct)


class InThread(Protocol):
    """Runs a function in the task's one file thread and returns its result."""

    def __call__(self, function: Callable[..., R], /, *args: Any) -> Awaitable[R]:
        """Start it now; the awaitable ends when the function did."""
        ...


class WorkspaceFiles(Protocol):
    """The rollback layer's side of the tools (``rollback.transaction``); synchronous, called in the file thread."""

    def edit(self, path: str, data: bytes | None, *, expected_sha: str | None) -> Change:
        """Change one file, journaled. ``expected_sha``: hash of what must stand there, "" for nothing."""
        ...

    def window_open(self) -> object:
        """Look at the workspace before a command."""
        ...

    def window_close(self) -> list[WindowChange]:
        """Return the paths that differ now."""
        ...


class CommandDesk(Protocol):
    """Starts commands (``processes.spawn.Processes``); the only way to a process."""

    async def spawn(
        self,
        task: str,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        on_output: Callable[[bytes, int], None] | None = None,
        spill: str | None = None,
    ) -> Any:
        """Start ``argv``; ``on_output`` gets fresh bytes and how many before them it does not get.

        ``spill`` names the file that keeps long output.
        """
        ...

    def list_refs(self, task: str) -> Sequence[Any]:
        """Return the processes of a task that are known to live."""
        ...


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``text`` is for the model, ``summary`` for the screen's one line, ``diff`` a unified diff."""

    text: str
    summary: str = ""
    diff: str = ""
    ok: bool = True


@dataclass(slots=True)
class ToolContext:
    """What one call of a tool may use.

    ``jobs`` are the task's background jobs, None where there can be none.
    ``seen`` maps a workspace path to the hash of the bytes that the model knows; it lives as long as the task.
    ``bound`` maps a path to the hash that the approval was given for.
    """

    task: str
    call: str
    root: Root
    files: WorkspaceFiles
    processes: CommandDesk
    in_thread: InThread
    emit: Callable[[TaskEvent], object]
    token: CancelToken
    env: Mapping[str, str]
    jobs: TaskJobs | None = None
    seen: dict[str, str] = field(default_factory=dict)
    bound: Mapping[str, str] = field(default_factory=dict)

    @property
    def workspace(self) -> Path:
        """The folder of the task, links resolved."""
        return self.root.path

    async def heed(self) -> None:
        """Raise CancelledError if the task was stopped; nothing may be begun after that."""
        if self.token.is_set:
            await asyncio.sleep(0)  # the body's own cancel is due here
            raise asyncio.CancelledError(str(self.token.cause))

    async def thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run ``function`` in the file thread; see ``settled``."""
        return await settled(self.in_thread(function, *args))


class Tool(abc.ABC, Generic[A]):
    """One tool; stateless."""

    name: ClassVar[str]
    description: ClassVar[str]
    arguments: ClassVar[type[msgspec.Struct]]
    touches: ClassVar[bool] = False

    def decode(self, raw: str) -> A:
        """Return the checked arguments.

        Raises:
            ToolError: ``raw`` is no JSON object, or a field is missing or of the wrong type; names the field.
        """
        try:
            value = msgspec.json.decode(raw or "{}")
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
            raise ToolError(f"{self.name}: the arguments are not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise ToolError(f"{self.name}: the arguments must be a JSON object, got {type(value).__name__}")
        try:
            return msgspec.convert(value, self.arguments, strict=False)  # type: ignore[return-value]
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: {error}") from None

    def schema(self) -> dict[str, Any]:
        """Return the tool as OpenAI's chat completions want it."""
        (parameters,) = msgspec.json.schema_components([self.arguments])[1].values()
        parameters.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @abc.abstractmethod
    def summary(self, args: A) -> str:
        """Return the one line for the screen."""

    def needs_approval(self, args: A) -> bool:
        """Tell whether the user is asked in mode ``ask``."""
        return self.touches

    async def preview(self, args: A, ctx: ToolContext) -> Preview:
        """Return what the call would do; changes nothing. Raises ToolError where it cannot be done."""
        return Preview(title=self.name, detail=self.summary(args))

    @abc.abstractmethod
    async def run(self, args: A, ctx: ToolContext) -> ToolResult:
        """Do it. Raises ToolError."""


async def settled(work: Awaitable[R]) -> R:
    """Await work that cannot be interrupted (a thread's) to its very end; a cancel is raised after that.

    Otherwise a stopped body would unwind while its thread still changes a file, beside the rollback.
    """
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()
        raise cancelled
    return future.result()


def shown(path: str) -> str:
    """Return a path as one printable line, at most 200 characters."""
    text = show(path)
    return text if len(text) <= 200 else f"…{text[-199:]}"
