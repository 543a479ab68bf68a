"""list_files: the regular files of the workspace that git would not ignore."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from peri_tui.agent.rollback.beneath import show
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult, shown
from peri_tui.agent.tools.walk import Glob, Walk

MAX_LISTED: Final = 1_000


class ListFilesArgs(msgspec.Struct):
    """Arguments of list_files."""

    path: Annotated[str, Meta(description="Folder, relative to the workspace; empty for all of it")] = ""
    glob: Annotated[str, Meta(description="Pattern such as *.py or src/**/*.js")] = ""


class ListFiles(Tool[ListFilesArgs]):
    """Lists files, sorted, one a line."""

    name = "list_files"
    description = "List the files of the workspace, without those that .gitignore leaves out."
    arguments = ListFilesArgs

    def summary(self, args: ListFilesArgs) -> str:
        """Return folder and pattern."""
        return " ".join(
            filter(None, (shown(args.path) if args.path else ".", show(args.glob)[:100] if args.glob else ""))
        )

    async def run(self, args: ListFilesArgs, ctx: ToolContext) -> ToolResult:
        """Return at most ``MAX_LISTED`` paths."""
        found, note = await ctx.thread(_collect, ctx, args, Glob(args.glob))
        if not found:
            return ToolResult(note or "no files", "no files")
        tail = [f"[{note}]"] if note else []
        return ToolResult("\n".join([*found, *tail]), f"{len(found)}{'+' if note else ''} files")


def _collect(ctx: ToolContext, args: ListFilesArgs, glob: Glob) -> tuple[list[str], str]:
    """Return the paths, and why there may be more of them ("": there are none)."""
    found: list[str] = []
    walk = Walk(ctx.root, args.path, lambda: ctx.token.is_set)
    for path, _ in walk:
        if glob.matches(path):
            if len(found) == MAX_LISTED:
                return found, f"only the first {MAX_LISTED}: use path or glob"
            found.append(show(path))
    return found, walk.cut
