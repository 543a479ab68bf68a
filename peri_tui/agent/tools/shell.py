"""shell: a command in the workspace. What it changes is seen by comparing before and after, and is not restored."""

from __future__ import annotations

import os
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from peri_tui.agent.history import bound
from peri_tui.agent.permissions import Preview
from peri_tui.agent.rollback.window import WindowChange
from peri_tui.agent.tools.command import Ended, run_command
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult, shown
from peri_tui.agent.tools.jobs import jobs_of
from peri_tui.core.messages import FileChanged, scrub
from peri_tui.errors import ToolError

DEFAULT_S: Final = 120.0
MAX_S: Final = 3600.0
MAX_COMMAND: Final = 20_000
MAX_OUTPUT: Final = 30_000
_LISTED: Final = 20
_NOTE: Final = "files that the command changes are not restored by a stop"
_BACKGROUND_NOTE: Final = f"it runs on until the task ends or is stopped; {_NOTE}"
_SHELLS: Final = ("/bin/bash", "/usr/bin/bash", "/bin/sh")


class ShellArgs(msgspec.Struct):
    """Arguments of shell."""

    command: Annotated[str, Meta(description="The command line, as in a terminal without keyboard")]
    timeout: Annotated[float, Meta(description="Seconds until it is ended", ge=0)] = DEFAULT_S
    background: Annotated[
        bool, Meta(description="Start it as a job that runs on; see job_output and job_stop")
    ] = False


class Shell(Tool[ShellArgs]):
    """Runs a command line in the workspace, without keyboard, its output bounded."""

    name = "shell"
    description = (
        "Run a shell command in the workspace. It has no keyboard; start a server or a watcher with "
        "background: true. Background jobs end with the task. Changes to files that commands make cannot be undone for the user, so prefer edit_file and write_file."
    )
    arguments = ShellArgs
    touches = True

    def summary(self, args: ShellArgs) -> str:
        """Return the command on one line."""
        return shown(f"{args.command} (in the background)" if args.background else args.command)

    async def preview(self, args: ShellArgs, ctx: ToolContext) -> Preview:
        """Return the whole command."""
        _check(args.command)
        return Preview(
            title="Run a command in the background?" if args.background else "Run a command?",
            detail=args.command,
            where=str(ctx.workspace),
            note=_BACKGROUND_NOTE if args.background else _NOTE,
            command=args.command,
        )

    async def run(self, args: ShellArgs, ctx: ToolContext) -> ToolResult:
        """Run it, and list what differs after it."""
        _check(args.command)
        if args.background:
            return await _start_job(args, ctx)
        seconds = min(args.timeout or DEFAULT_S, MAX_S)
        _tell(ctx, await ctx.thread(_begin_window, ctx))
        ended = await run_command(ctx, [_shell(), "-c", args.command], timeout=seconds, show_output=True)
        changes = await ctx.thread(_end_window, ctx, bool(ctx.processes.list_refs(ctx.task)))
        _tell(ctx, changes)
        summary = ended.how + (f", {len(changes)} files changed" if changes else "")
        return ToolResult(_report(ended, seconds, changes), summary, ok=ended.code == 0)


async def _start_job(args: ShellArgs, ctx: ToolContext) -> ToolResult:
    """Start a job and return at once; the window stays open, since the job may write as long as it lives."""
    jobs = jobs_of(ctx)
    await ctx.heed()
    _tell(ctx, await ctx.thread(_begin_window, ctx))
    job = await jobs.start(
        [_shell(), "-c", args.command], cwd=str(ctx.workspace), env=ctx.env, text=args.command
    )
    text = (
        f"Started in the background as job {job.id}, pid {job.command.ref.pid}. "
        f"Its output: job_output {job.id}. It ends with the task, or by job_stop {job.id}."
    )
    return ToolResult(text, f"job {job.id} started, pid {job.command.ref.pid}")


def _begin_window(ctx: ToolContext) -> list[WindowChange]:
    """Open the window; what background processes did before it is returned."""
    before = ctx.files.window_close()
    ctx.files.window_open()
    return before


def _end_window(ctx: ToolContext, alive: bool) -> list[WindowChange]:
    changes = ctx.files.window_close()
    if alive:
        # Processes of this command or of one before may be in the background. They may write as long as
        # they live, so the looking goes on; the next command or the task's end closes it.
        ctx.files.window_open()
    return changes


def _tell(ctx: ToolContext, changes: list[WindowChange]) -> None:
    for change in changes:
        ctx.emit(FileChanged(task=ctx.task, path=scrub(change.path), kind=change.kind, by="shell"))


def _check(command: str) -> None:
    if not command.strip():
        raise ToolError("shell: the command is empty")
    if "\0" in command:
        raise ToolError("shell: a command cannot hold a NUL")
    if len(command) > MAX_COMMAND:
        raise ToolError(f"shell: the command has {len(command)} characters, more than {MAX_COMMAND}")


def _shell() -> str:
    return next((path for path in _SHELLS if os.access(path, os.X_OK)), "/bin/sh")


def _report(ended: Ended, seconds: float, changes: list[WindowChange]) -> str:
    how = f"timed out after {seconds:g} s and was ended" if ended.timed_out else ended.how
    lines = [bound(ended.output, MAX_OUTPUT).rstrip("\n") or "(no output)", f"[{how}]"]
    if ended.kept:
        lines.append(f"[{ended.kept}]")
    if ended.orphans:
        lines.append(f"[{ended.orphans} of its processes still run in the background]")
    if changes:
        names = ", ".join(f"{shown(c.path)} ({c.kind})" for c in changes[:_LISTED])
        more = f" and {len(changes) - _LISTED} more" if len(changes) > _LISTED else ""
        lines.append(f"[changed files: {names}{more}]")
    return "\n".join(lines)
