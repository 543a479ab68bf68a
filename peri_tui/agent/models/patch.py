"""A pasted unified diff, as the edits that apply it. Pure.

Line numbers are not used: a hunk is found by its own lines, which the edit tool wants to be unique. Format: GNU
diffutils manual, "Detailed Description of Unified Format", and git's header lines.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

Args = dict[str, object]

_HUNK = re.compile(r"@@ -\d+(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@")


@dataclass(slots=True)
class Hunk:
    """Lines before and after, both with their context."""

    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass(slots=True)
class FilePatch:
    """What a diff does to one file; ``kind`` is added, modified or deleted. ``refused`` says why it cannot."""

    path: str
    kind: str
    hunks: list[Hunk] = field(default_factory=list)
    refused: str = ""

    def calls(self) -> list[tuple[str, Args]]:
        """Return the tool calls that apply it, in order."""
        if self.refused:
            return []
        if self.kind == "deleted":
            # No tool deletes; the command asks for approval, and says what it is.
            return [("shell", {"command": f"rm -- {shlex.quote(self.path)}"})]
        if self.kind == "added":
            content = "\n".join(line for hunk in self.hunks for line in hunk.new) + "\n"
            return [("write_file", {"path": self.path, "content": content})]
        calls: list[tuple[str, Args]] = [("read_file", {"path": self.path})]
        for hunk in self.hunks:
            args: Args = {"path": self.path, "old": "\n".join(hunk.old), "new": "\n".join(hunk.new)}
            calls.append(("edit_file", args))
        return calls


def parse_patch(text: str) -> list[FilePatch]:
    """Return the files of a unified diff anywhere in ``text``; empty where there is none."""
    lines = text.replace("\r\n", "\n").split("\n")
    patches: list[FilePatch] = []
    position = 0
    while position < len(lines):
        if _is_header(lines, position):
            patches.append(_open(lines[position], lines[position + 1]))
            position += 2
        elif patches and (match := _HUNK.match(lines[position])):
            position = _take_hunk(patches[-1], lines, position + 1, match)
        else:
            position += 1
    return [_checked(patch) for patch in patches if patch.hunks]


def _is_header(lines: list[str], position: int) -> bool:
    return (
        lines[position].startswith("--- ")
        and position + 1 < len(lines)
        and lines[position + 1].startswith("+++ ")
    )


def _open(old_line: str, new_line: str) -> FilePatch:
    old, new = (line[4:].partition("\t")[0].strip() for line in (old_line, new_line))
    kind = "added" if old == "/dev/null" else "deleted" if new == "/dev/null" else "modified"
    path = old if kind == "deleted" else new
    return FilePatch(re.sub(r"^[ab]/", "", path), kind)


def _take_hunk(patch: FilePatch, lines: list[str], position: int, match: re.Match[str]) -> int:
    hunk = Hunk()
    old_left, new_left = (int(match[name]) if match[name] else 1 for name in ("old", "new"))
    while position < len(lines) and (old_left > 0 or new_left > 0):
        line = lines[position]
        if not line.startswith(("\\", "+", "-", " ", "")) or _is_header(lines, position) or _HUNK.match(line):
            break
        position += 1
        if line.startswith("\\"):
            continue
        # A pasted diff loses the blank of an empty context line.
        sign, rest = line[:1] or " ", line[1:]
        if sign not in "+- ":
            break
        if sign in "- ":
            hunk.old.append(rest)
            old_left -= 1
        if sign in "+ ":
            hunk.new.append(rest)
            new_left -= 1
    if old_left or new_left:
        patch.refused = "a hunk is not complete"
    patch.hunks.append(hunk)
    return position


def _checked(patch: FilePatch) -> FilePatch:
    if patch.kind == "modified" and any(not "".join(hunk.old).strip() for hunk in patch.hunks):
        patch.refused = patch.refused or "a hunk has no lines to be found by"
    return patch
