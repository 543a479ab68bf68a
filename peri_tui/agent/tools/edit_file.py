"""edit_file: replaces a text in one file that the model knows; every other byte stays."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from peri_tui.agent.permissions import Preview
from peri_tui.agent.rollback.beneath import show
from peri_tui.agent.tools import text_file
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult, shown
from peri_tui.agent.tools.read_file import read_text
from peri_tui.agent.tools.writing import Plan, apply, plan
from peri_tui.errors import FileChanged, ToolError


class EditFileArgs(msgspec.Struct):
    """Arguments of edit_file."""

    path: Annotated[str, Meta(description="File, relative to the workspace; read it first")]
    old: Annotated[str, Meta(description="The exact text to replace, unique in the file unless 'all' is set")]
    new: Annotated[str, Meta(description="The text in its place")]
    all: Annotated[bool, Meta(description="Replace every occurrence")] = False


class EditFile(Tool[EditFileArgs]):
    """Changes one span (or each equal span) of a text file."""

    name = "edit_file"
    description = "Replace an exact text in a file that you have read or made in this task."
    arguments = EditFileArgs
    touches = True

    def summary(self, args: EditFileArgs) -> str:
        """Return the path."""
        return shown(args.path)

    async def preview(self, args: EditFileArgs, ctx: ToolContext) -> Preview:
        """Return the diff, and the hash of the file that it is for."""
        planned = await ctx.thread(_plan, args, ctx)
        return Preview(
            title="Change a file?",
            detail=show(planned.path),
            diff=planned.change.diff,
            where=str(ctx.workspace),
            targets={planned.path: planned.before_sha},
            danger=planned.danger,
        )

    async def run(self, args: EditFileArgs, ctx: ToolContext) -> ToolResult:
        """Change the file through the rollback layer."""
        planned = await ctx.thread(_plan, args, ctx)
        return await apply(ctx, planned)


def _plan(args: EditFileArgs, ctx: ToolContext) -> Plan:
    path, file, sha = read_text(ctx, args.path)
    if path not in ctx.seen:
        raise ToolError(f"{shown(path)}: read it first, then edit it")
    if ctx.seen[path] != sha:
        raise FileChanged(f"{shown(path)}: changed since you read it; read it again")
    data = text_file.replace(file, args.old, args.new, every=args.all, path=shown(path))
    return plan(ctx, path, sha, file.text, data)
