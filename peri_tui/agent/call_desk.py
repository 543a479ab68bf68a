"""One tool call from the model's words to its result: checked, approved, run, reported.

The order is the guarantee: arguments are checked before anything is asked, what an approval is bound to is compared
again after the answer, and the stop is looked at before the question, after it and directly before the act.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import msgspec

from peri_tui.agent.permissions import HEADLESS, MAX_ASKS, Decision, Preview
from peri_tui.agent.rollback.beneath import show
from peri_tui.agent.task_context import TaskContext
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult
from peri_tui.core.messages import Delta, ToolEnded, ToolStarted, scrub
from peri_tui.errors import ProcessError, StoreFull, ToolError

_MAX_ARGS: Final = 16 * 1024
_UNATTENDED: Final = "Tools that need approval are denied here; --approve all allows them.\n"


class CallDesk:
    """Runs the tool calls of one task.

    ``ran`` counts the calls that ran, ``unapproved`` those denied because nobody was there; ``touched`` is true once
    something that can change the workspace was begun.
    """

    def __init__(self, ctx: TaskContext) -> None:
        self._ctx = ctx
        self._task = ctx.submit.task
        self._seen: dict[str, str] = {}
        self.ran = 0
        self.unapproved = 0
        self.touched = False

    async def run(self, call_id: str, name: str, arguments: str) -> str:
        """Carry out one call and return the text for the model. Raises CancelledError, and no ToolError."""
        began = time.monotonic()
        try:
            status, result = await self._try(call_id, name, arguments)
        except asyncio.CancelledError:
            self._end(call_id, name, "cancelled", ToolResult("", "stopped"), began)
            raise
        except Exception as error:
            # Not the tool's fault, and not for the model: the task ends with it.
            self._end(call_id, name, "error", ToolResult("", " ".join(str(error).split())), began)
            raise
        self._end(call_id, name, status, result, began)
        return result.text

    def refuse(self, call_id: str, name: str, why: str) -> None:
        """Report a call that is not even looked at."""
        self._start(call_id, name, "", "")
        self._end(call_id, name, "error", ToolResult(why, "not run", ok=False), time.monotonic())

    def detail(self, name: str, arguments: str) -> str:
        """Return the one line about a call, "" where it is malformed."""
        try:
            tool = self._ctx.tools.find(name)
            return str(tool.summary(tool.decode(arguments)))
        except ToolError:
            return ""

    async def _try(self, call_id: str, name: str, arguments: str) -> tuple[str, ToolResult]:
        ctx = self._context(call_id)
        started = False
        try:
            tool = self._ctx.tools.find(name)
            args = tool.decode(arguments)
            canonical = msgspec.json.encode(args, order="sorted").decode()
            self._start(call_id, name, str(tool.summary(args)), canonical)
            started = True
            decision = await self._approve(tool, args, canonical, ctx)
            if not decision.allowed:
                self._note_unattended(decision)
                return "denied", ToolResult(decision.text, "denied", ok=False)
            await ctx.heed()
            self._ctx.history.start_call(call_id)
            self.ran += 1
            self.touched = self.touched or tool.touches
            result = await tool.run(args, ctx)
            return ("ok" if result.ok else "error"), result
        except (ToolError, ProcessError, StoreFull) as error:
            if not started:
                self._start(call_id, name, "", "")
            text = " ".join(str(error).split()) or type(error).__name__
            return "error", ToolResult(f"Error: {text}", text, ok=False)

    async def _approve(self, tool: Tool[Any], args: Any, canonical: str, ctx: ToolContext) -> Decision:
        """Ask until the answer fits what stands on disk; the approved hashes go into ``ctx.bound``."""
        permissions = self._ctx.permissions
        if not tool.needs_approval(args):
            return Decision(True)
        for _ in range(MAX_ASKS):
            preview = await tool.preview(args, ctx)
            ctx.bound = preview.targets
            why = await ctx.thread(permissions.asks, preview)
            if why is None:
                return Decision(True)
            asked_for = await ctx.thread(permissions.binding, tool.name, canonical, preview)
            rule = await ctx.thread(permissions.rule, tool.name, canonical, preview)
            decision = await permissions.decide(tool.name, preview, why=why, rule=rule)
            await ctx.heed()
            if not decision.allowed or await self._still(tool, args, canonical, ctx, asked_for):
                return decision
        return Decision(False, "Denied: what it is about kept changing while the user was asked; try again.")

    async def _still(
        self, tool: Tool[Any], args: Any, canonical: str, ctx: ToolContext, asked_for: str
    ) -> bool:
        """Tell whether everything the approval was given for is still the same."""
        preview: Preview = await tool.preview(args, ctx)
        return await ctx.thread(self._ctx.permissions.binding, tool.name, canonical, preview) == asked_for

    def _context(self, call_id: str) -> ToolContext:
        ctx = self._ctx
        return ToolContext(
            task=self._task,
            call=call_id,
            root=ctx.root,
            files=ctx.files,
            processes=ctx.processes,
            in_thread=ctx.in_thread,
            emit=ctx.emit,
            token=ctx.token,
            env=ctx.env,
            jobs=ctx.jobs,
            seen=self._seen,
        )

    def _note_unattended(self, decision: Decision) -> None:
        if not decision.unattended:
            return
        self.unapproved += 1
        if self.unapproved == 1:
            text = (
                f"{decision.text}\n"
                if decision.text != HEADLESS
                else "Tools that need approval are denied here; --approve all allows them.\n"
            )
            self._ctx.emit(Delta(task=self._task, ch="notice", part="approval", text=text))

    def _start(self, call_id: str, name: str, summary: str, args: str) -> None:
        shown = args if len(args) <= _MAX_ARGS else ""
        self._ctx.emit(
            ToolStarted(
                task=self._task, call=call_id, name=show_name(name), summary=scrub(summary), args=scrub(shown)
            )
        )

    def _end(self, call_id: str, name: str, status: str, result: ToolResult, began: float) -> None:
        self._ctx.emit(
            ToolEnded(
                task=self._task,
                call=call_id,
                name=show_name(name),
                status=status,
                summary=scrub(result.summary)[:300],
                diff=scrub(result.diff),
                seconds=round(time.monotonic() - began, 3),
            )
        )


def show_name(name: str) -> str:
    """Return a tool's name as the model gave it, as one printable line of at most 64 characters."""
    return show(scrub(name))[:64]
