"""write_file: makes a file, or gives one that the model knows a new content."""

from __future__ import annotations

import os
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from peri_tui.agent.permissions import Preview
from peri_tui.agent.rollback.beneath import show
from peri_tui.agent.tools import text_file
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult, shown
from peri_tui.agent.tools.read_file import read_text
from peri_tui.agent.tools.writing import Plan, apply, plan
from peri_tui.core.messages import scrub
from peri_tui.errors import FileChanged, ToolError

MAX_CONTENT: Final = 2 * 1024 * 1024


class WriteFileArgs(msgspec.Struct):
    """Arguments of write_file."""

    path: Annotated[str, Meta(description="File, relative to the workspace; missing folders are made")]
    content: Annotated[str, Meta(description="The whole new content")]


class WriteFile(Tool[WriteFileArgs]):
    """Writes a whole file. An existing one keeps its encoding and its line ends, and must have been read."""

    name = "write_file"
    description = "Make a new text file, or replace the whole content of one that you have read."
    arguments = WriteFileArgs
    touches = True

    def summary(self, args: WriteFileArgs) -> str:
        """Return the path."""
        return shown(args.path)

    async def preview(self, args: WriteFileArgs, ctx: ToolContext) -> Preview:
        """Return the diff, and the hash of what stands there ("" for nothing)."""
        planned = await ctx.thread(_plan, args, ctx)
        return Preview(
            title="Change a file?" if planned.before_sha else "Make a file?",
            detail=show(planned.path),
            diff=planned.change.diff,
            where=str(ctx.workspace),
            targets={planned.path: planned.before_sha},
            danger=planned.danger,
        )

    async def run(self, args: WriteFileArgs, ctx: ToolContext) -> ToolResult:
        """Write the file through the rollback layer."""
        planned = await ctx.thread(_plan, args, ctx)
        return await apply(ctx, planned)


def _plan(args: WriteFileArgs, ctx: ToolContext) -> Plan:
    if len(args.content) > MAX_CONTENT:
        raise ToolError(f"{shown(args.path)}: {len(args.content)} characters, more than {MAX_CONTENT}")
    content = scrub(args.content)
    path = os.fsdecode(ctx.root.resolve(args.path))
    if not ctx.root.exists(path or "."):
        return plan(ctx, path, "", "", content.encode())
    return _overwrite(args.path, content, ctx)


def _overwrite(asked: str, content: str, ctx: ToolContext) -> Plan:
    path, file, sha = read_text(ctx, asked)
    if path not in ctx.seen:
        raise ToolError(f"{shown(path)}: exists already; read it first")
    if ctx.seen[path] != sha:
        raise FileChanged(f"{shown(path)}: changed since you read it; read it again")
    ends = file.line_end
    data = file.encode(text_file.unify(content).replace("\n", ends) if ends else content)
    return plan(ctx, path, sha, file.text, data)
