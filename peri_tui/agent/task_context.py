"""What one task's loop works with; made by the executor, which owns all of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from peri_tui.agent.cancel import CancelToken
from peri_tui.agent.history import History
from peri_tui.agent.instructions import Instruction
from peri_tui.agent.models import call
from peri_tui.agent.permissions import Permissions
from peri_tui.agent.processes.jobs import TaskJobs
from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.tools.contract import CommandDesk, InThread, WorkspaceFiles
from peri_tui.agent.tools.registry import ToolRegistry, default_tools
from peri_tui.core.messages import Submit, TaskEvent

MAX_OUTPUT_TOKENS: Final = 8192


async def _no_wait() -> None:
    """The default of ``TaskContext.drain``."""


@dataclass(slots=True)
class TaskContext:
    """Everything one task's loop works with; made by the executor, which owns all of it.

    Args:
        submit: what was asked for.
        token: the task's stop.
        model, processes, files, root: the four doors: to the model, to commands, to changes, to reading.
        history: the session's conversation so far; the loop adds the prompt and all that follows.
        permissions: decides what needs the user.
        emit: takes an event at once; ``drain`` waits while events run too far ahead of the disk.
        in_thread: runs a function in the task's file thread.
        env: the environment of commands.
        jobs: the task's background jobs; without, there can be none.
        instructions: what the project says, if it is trusted.
        clock: monotonic seconds.
        max_tokens: how much the model may write in one message.
    """

    submit: Submit
    token: CancelToken
    model: call.Model
    processes: CommandDesk
    files: WorkspaceFiles
    root: Root
    history: History
    permissions: Permissions
    emit: Callable[[TaskEvent], object]
    in_thread: InThread
    env: Mapping[str, str] = field(default_factory=dict)
    jobs: TaskJobs | None = None
    instructions: Sequence[Instruction] = ()
    drain: Callable[[], Awaitable[None]] = _no_wait
    clock: Callable[[], float] = time.monotonic
    tools: ToolRegistry = field(default_factory=default_tools)
    max_tokens: int = MAX_OUTPUT_TOKENS
