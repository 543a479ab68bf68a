"""read_file: a part of a text file; what was read is remembered, since an edit needs it."""

from __future__ import annotations

import os
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from peri_tui.agent.tools import text_file
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult, shown
from peri_tui.errors import ToolError

MAX_FILE: Final = 10 * 1024 * 1024
_MAX_TEXT: Final = 40_000
_MAX_LINES: Final = 2_000


class ReadFileArgs(msgspec.Struct):
    """Arguments of read_file."""

    path: Annotated[str, Meta(description="File, relative to the workspace")]
    offset: Annotated[int, Meta(description="First line, from 1", ge=0)] = 1
    limit: Annotated[int, Meta(description="Number of lines", ge=0)] = _MAX_LINES


class ReadFile(Tool[ReadFileArgs]):
    """Gives the model lines of a file, line ends as line feeds, with a header that says which."""

    name = "read_file"
    description = "Read a text file of the workspace. Long files come in parts: use offset and limit."
    arguments = ReadFileArgs

    def summary(self, args: ReadFileArgs) -> str:
        """Return the path."""
        return shown(args.path)

    async def run(self, args: ReadFileArgs, ctx: ToolContext) -> ToolResult:
        """Return the lines from ``offset`` on."""
        path, file, sha = await ctx.thread(read_text, ctx, args.path)
        part, count, total = _part(file.text, max(args.offset, 1), args.limit or _MAX_LINES)
        ctx.seen[path] = sha
        first = max(args.offset, 1)
        if not total:
            return ToolResult(f"{shown(path)}: an empty file", "empty")
        if not count:
            raise ToolError(f"{shown(path)}: has {total} lines, so there is no line {first}")
        last = first + count - 1
        more = f"; go on with offset={last + 1}" if last < total else ""
        header = f"[{shown(path)}: lines {first}-{last} of {total}{_kind(file)}{more}]"
        return ToolResult(f"{header}\n{part}", f"{count} line{'s' if count != 1 else ''}")


def read_text(ctx: ToolContext, path: str) -> tuple[str, text_file.TextFile, str]:
    """Return (resolved path, text, SHA-256) of a workspace file. Runs in the file thread.

    Raises:
        ToolError: missing, outside, not regular, too large or binary; names the path.
    """
    name = os.fsdecode(ctx.root.resolve(path))
    found = ctx.root.read(path, MAX_FILE)
    return name, text_file.decode(found.data, shown(path)), found.sha256


def _part(text: str, first: int, limit: int) -> tuple[str, int, int]:
    """Return (lines, how many they are, how many the file has), at most ``_MAX_TEXT`` characters."""
    lines = text_file.unify(text).split("\n")
    if lines[-1] == "":
        lines.pop()
    taken: list[str] = []
    size = 0
    for line in lines[first - 1 : first - 1 + limit]:
        if len(line) > _MAX_TEXT:
            line = f"{line[:_MAX_TEXT]}… [{len(line) - _MAX_TEXT} more characters in this line]"
        size += len(line) + 1
        if taken and size > _MAX_TEXT:
            break
        taken.append(line)
    return "\n".join(taken), len(taken), len(lines)


def _kind(file: text_file.TextFile) -> str:
    words = [file.encoding] if file.encoding != "utf-8" or file.mark else []
    if "\r" in file.text:
        words.append({"\r\n": "CRLF", "\r": "CR"}.get(file.line_end, "mixed line ends"))
    return f"; {', '.join(words)}, kept by edits" if words else ""
