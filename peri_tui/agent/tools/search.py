"""search: lines of workspace files that hold a text or match a regular expression.

A text is looked for in the file thread, file by file. A regular expression runs in a process of its own, under the
warden like every command: Python's engine may take exponential time for a pattern, and holds the interpreter, so in
this process nothing could stop it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from peri_tui.agent.rollback.beneath import Root, show
from peri_tui.agent.tools import text_file
from peri_tui.agent.tools.command import run_command
from peri_tui.agent.tools.contract import Tool, ToolContext, ToolResult
from peri_tui.agent.tools.walk import Glob, Walk
from peri_tui.errors import ToolError

MAX_HITS: Final = 200
MAX_FILE: Final = 2 * 1024 * 1024
REGEX_S: Final = 20.0
_MAX_LINE: Final = 300
_MAX_PATTERN: Final = 1_000


class SearchArgs(msgspec.Struct):
    """Arguments of search."""

    pattern: Annotated[
        str, Meta(description="Text to find; case matters", min_length=1, max_length=_MAX_PATTERN)
    ]
    glob: Annotated[str, Meta(description="Only files such as *.py or src/**/*.js")] = ""
    regex: Annotated[bool, Meta(description="The pattern is a Python regular expression, line by line")] = (
        False
    )


class Search(Tool[SearchArgs]):
    """Gives the model ``path:line: text``, at most ``MAX_HITS``."""

    name = "search"
    description = "Search the files of the workspace for a text or a regular expression."
    arguments = SearchArgs

    def summary(self, args: SearchArgs) -> str:
        """Return pattern and glob."""
        return " ".join(filter(None, (repr(args.pattern)[:100], show(args.glob)[:100] if args.glob else "")))

    async def run(self, args: SearchArgs, ctx: ToolContext) -> ToolResult:
        """Return the hits, by path and line."""
        glob = Glob(args.glob)
        if args.regex:
            text = await _regex_hits(args, ctx)
        else:
            text = await ctx.thread(_text_hits, ctx, args, glob)
        lines = text.splitlines()
        more = len(lines) > MAX_HITS
        if not lines:
            return ToolResult("no hits", "no hits")
        tail = [f"[only the first {MAX_HITS} hits: narrow the pattern or the glob]"] if more else []
        hits = min(len(lines), MAX_HITS)
        summary = f"{hits}{'+' if more else ''} hit{'s' if hits != 1 else ''}"
        return ToolResult("\n".join([*lines[:MAX_HITS], *tail]), summary)


def find_lines(
    root: Root, glob: Glob, matches: Callable[[str], bool], stopped: Callable[[], bool]
) -> Iterator[str]:
    """Yield ``path:line: text`` of every matching line; binary and large files are left out.

    A walk that ended early says so in a last line in brackets.
    """
    walk = Walk(root, "", stopped)
    for path, entry in walk:
        if entry.size > MAX_FILE or not glob.matches(path):
            continue
        try:
            text = text_file.decode(root.read(path, MAX_FILE).data, path).text
        except ToolError:
            continue
        for number, line in enumerate(text_file.unify(text).split("\n"), 1):
            if matches(line):
                yield f"{show(path)}:{number}: {_printable(line)}"
    if walk.cut:
        yield f"[{walk.cut}]"


def _text_hits(ctx: ToolContext, args: SearchArgs, glob: Glob) -> str:
    found: list[str] = []
    for line in find_lines(ctx.root, glob, lambda line: args.pattern in line, lambda: ctx.token.is_set):
        found.append(line)
        if len(found) > MAX_HITS:
            break
    return "\n".join(found)


async def _regex_hits(args: SearchArgs, ctx: ToolContext) -> str:
    try:
        re.compile(args.pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ToolError(f"search: not a regular expression: {error}") from None
    worker = [sys.executable, "-P", "-m", "peri_tui.agent.tools.search_worker"]
    ended = await run_command(
        ctx, [*worker, str(ctx.workspace), args.glob, args.pattern], timeout=REGEX_S, show_output=False
    )
    if ended.timed_out:
        raise ToolError(f"search: the expression took longer than {REGEX_S:g} s; make it simpler")
    if ended.code != 0:
        raise ToolError(f"search: failed: {ended.output.strip().splitlines()[-1:] or ended.how}")
    return ended.output


def _printable(line: str) -> str:
    cut = line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}…"
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in cut)
