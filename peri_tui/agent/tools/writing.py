"""What edit_file and write_file share: the planned change, the change itself, and what is told about it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from peri_tui.agent.history import bound
from peri_tui.agent.rollback.diff import Change, describe
from peri_tui.agent.tools import text_file
from peri_tui.agent.tools.contract import ToolContext, ToolResult, shown
from peri_tui.core.messages import FileChanged, scrub
from peri_tui.errors import ToolError

# A frame of the stream holds 4 MiB, and JSON may need six characters for one.
MAX_DIFF: Final = 200_000


@dataclass(frozen=True, slots=True)
class Plan:
    """A change that was not made yet.

    ``path`` is resolved; ``before_sha`` is the hash of what stands there ("" for nothing); ``data`` the new bytes;
    ``change`` describes it for people; ``danger`` is why it always asks, or "".
    """

    path: str
    before_sha: str
    data: bytes
    change: Change
    danger: str


def plan(ctx: ToolContext, path: str, before_sha: str, before: str, data: bytes) -> Plan:
    """Return the plan to give ``path`` the bytes ``data``. Runs in the file thread.

    Raises:
        ToolError: nothing would change.
    """
    sha = hashlib.sha256(data).hexdigest()
    if sha == before_sha:
        raise ToolError(f"{shown(path)}: has this content already")
    after = text_file.decode(data, shown(path)).text
    kind = "modified" if before_sha else "added"
    old = text_file.unify(before).encode() if before_sha else None
    change = describe(path, kind, old, text_file.unify(after).encode())
    change = replace(change, diff=bound(change.diff, MAX_DIFF))
    return Plan(path, before_sha, data, change, _other_names(ctx, path) if before_sha else "")


async def apply(ctx: ToolContext, planned: Plan) -> ToolResult:
    """Make the change, journaled, if the file still is what the plan, and the approval, were made for.

    Raises:
        ToolError: it is not; nothing was changed.
    """
    path, change = planned.path, planned.change
    expected = ctx.bound.get(path, planned.before_sha)
    done = await ctx.thread(partial(ctx.files.edit, path, planned.data, expected_sha=expected))
    ctx.seen[path] = hashlib.sha256(planned.data).hexdigest()
    added, removed = change.added_lines, change.removed_lines
    ctx.emit(
        FileChanged(task=ctx.task, path=scrub(path), kind=done.kind, by="edit", added=added, removed=removed)
    )
    counts = " ".join(filter(None, (f"−{removed}" if removed else "", f"+{added}" if added else "")))
    verb = "made" if done.kind == "added" else "changed"
    return ToolResult(f"{shown(path)}: {verb} ({counts or 'line ends only'})", counts, change.diff)


def _other_names(ctx: ToolContext, path: str) -> str:
    links = ctx.root.lstat(path).st_nlink
    return f"{shown(path)} has {links} names (hard links); all of them change" if links > 1 else ""
