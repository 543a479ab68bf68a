"""Running one command to its end, with bounded output that streams while it runs.

The end of a command is its exit, never the end of its output: a grandchild may hold the pipe for ever. What still runs
after that is counted, and ends at the latest with the task.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from peri_tui.agent.processes.shown import ShownText
from peri_tui.agent.tools.contract import ToolContext
from peri_tui.core.messages import Delta

MAX_SHOWN: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: exit code or signal number, what it printed, how many of its processes still run.

    ``kept`` says where the whole output is, when ``output`` is not all of it.
    """

    code: int | None
    signal: int | None
    output: str
    orphans: int = 0
    timed_out: bool = False
    kept: str = ""

    @property
    def how(self) -> str:
        """Return the end in words."""
        if self.timed_out:
            return "timed out"
        return f"exit {self.code}" if self.code is not None else f"ended by {_signal_name(self.signal)}"


class OutputFeed:
    """Turns raw output into deltas of one part, decoded across the edges of chunks, at most ``MAX_SHOWN`` characters.

    Args:
        ctx: whose call it is; ``part`` is the call's id.
    """

    def __init__(self, ctx: ToolContext) -> None:
        self._ctx = ctx
        self._shown = ShownText()
        self._off = 0

    def __call__(self, data: bytes, skipped: int = 0) -> None:
        """Take the next bytes; ``skipped`` bytes before them are not given."""
        if self._off >= MAX_SHOWN:
            return  # What nobody will see is not decoded.
        text = self._shown.feed(data, skipped)
        if self._off >= MAX_SHOWN or not text:
            return
        if self._off + len(text) > MAX_SHOWN:
            text = f"{text[: MAX_SHOWN - self._off]}\n[more output, not shown]\n"
        self._ctx.emit(
            Delta(task=self._ctx.task, ch="tool_out", part=self._ctx.call, text=text, off=self._off)
        )
        self._off += len(text)


async def run_command(ctx: ToolContext, argv: list[str], *, timeout: float, show_output: bool) -> Ended:
    """Run ``argv`` in the workspace and wait for its exit, at most ``timeout`` seconds; then it is ended.

    Raises:
        SpawnFailed: it cannot be started.
    """
    await ctx.heed()
    feed: Callable[[bytes, int], None] | None = OutputFeed(ctx) if show_output else None
    command = await ctx.processes.spawn(
        ctx.task,
        argv,
        cwd=str(ctx.workspace),
        env=ctx.env,
        on_output=feed,
        spill=ctx.call if show_output else None,
    )
    try:
        async with asyncio.timeout(timeout):
            status = await command.wait()
    except TimeoutError:
        await command.stop()
        return Ended(None, None, _text(command), timed_out=True, kept=_kept(command))
    orphans = await command.settle()
    return Ended(status.code, status.signal, _text(command), orphans, kept=_kept(command))


def _kept(command: Any) -> str:
    spill = command.output.spill
    if spill is None:
        return ""
    if spill.failure:
        return f"the whole output could not be kept: {spill.failure}"
    which = f"the first {spill.kept} bytes" if spill.dropped else f"all {spill.kept} bytes"
    return f"{which} of the output are kept in {spill.path}"


def _text(command: Any) -> str:
    return str(command.output.text())


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return f"signal {number}"
