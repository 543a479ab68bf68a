"""What one edit changed, for people: counts of lines and a unified diff. Never used to put anything back."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

LARGEST: Final = 2 << 20
_MIDDLE: Final = 2000


@dataclass(frozen=True, slots=True)
class Change:
    """One edit as it happened. ``kind`` is added, modified, deleted, or unchanged (nothing was written)."""

    path: str
    kind: str
    added_lines: int = 0
    removed_lines: int = 0
    diff: str = ""


def describe(path: str, kind: str, old: bytes | None, new: bytes | None) -> Change:
    """Return the change between two contents; ``None`` is no file, too large or binary gives no line counts."""
    before, after = old or b"", new or b""
    if b"\0" in before or b"\0" in after:
        return Change(path, kind, diff="binary file\n")
    if max(len(before), len(after)) > LARGEST:
        return Change(path, kind, diff="too large to show\n")
    return _describe_lines(path, kind, _lines(before), _lines(after))


def _lines(data: bytes) -> list[str]:
    lines = data.decode("utf-8", "replace").split("\n")
    ended = lines.pop() == ""
    return [line + "\n" for line in lines] + ([] if ended else _last(data))


def _last(data: bytes) -> list[str]:
    return [data.rpartition(b"\n")[2].decode("utf-8", "replace") + "\n\\ no newline at the end\n"]


def _describe_lines(path: str, kind: str, old: list[str], new: list[str]) -> Change:
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    middle = max(len(old), len(new)) - start - end
    # difflib is quadratic, so a change this large is shown as one block.
    large = middle > _MIDDLE
    body = _block(old, new, start, end) if large else list(difflib.unified_diff(old, new, n=3))[2:]
    added = sum(line.startswith("+") for line in body)
    removed = sum(line.startswith("-") for line in body)
    return Change(path, kind, added, removed, "".join(body))


def _common(one: list[str], other: list[str]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def _block(old: list[str], new: list[str], start: int, end: int) -> list[str]:
    gone, come = old[start : len(old) - end], new[start : len(new) - end]
    head = f"@@ -{start + 1},{len(gone)} +{start + 1},{len(come)} @@\n"
    return [head, *("-" + line for line in gone), *("+" + line for line in come)]
