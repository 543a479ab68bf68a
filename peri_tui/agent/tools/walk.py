"""Walking the workspace as git sees it: ignore files obeyed, links not followed, bounded, stoppable between entries.

Ignore rules are pathspec's (git's own semantics). A pattern that could take exponential time is left out: matching
holds the interpreter, and a stop must not wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import pathspec

from peri_tui.agent.rollback.beneath import Entry, Root
from peri_tui.errors import ToolError

MAX_VISITED: Final = 200_000
_MAX_IGNORE: Final = 64 * 1024
_MAX_DEPTH: Final = 64
_MAX_STARS: Final = 3
_ALWAYS: Final = frozenset({".git"})

Stopped = Callable[[], bool]
_Rules = list[tuple[str, pathspec.GitIgnoreSpec]]


class Glob:
    """A pattern of paths in git's manner: ``*.py`` anywhere, ``src/**/*.py``, ``/top.txt``; "" matches all.

    Raises:
        ToolError: it is too long or has too many stars in one part.
    """

    def __init__(self, pattern: str) -> None:
        if not is_harmless(pattern) or pattern.startswith("!"):
            raise ToolError(f"glob {pattern!r:.80}: too long or too many '*' in one part")
        self._spec = _spec([pattern]) if pattern.strip() else None

    def matches(self, path: str) -> bool:
        """Tell whether a path relative to the workspace matches."""
        return self._spec is None or self._spec.match_file(path)


def is_harmless(pattern: str) -> bool:
    """Tell whether matching the pattern takes bounded time."""
    stars = max((len(re.sub(r"\*+", "*", part).split("*")) - 1 for part in pattern.split("/")), default=0)
    return len(pattern) <= 300 and stars <= _MAX_STARS and pattern.count("**") <= _MAX_STARS


def walk(root: Root, start: str, stopped: Stopped) -> Iterator[tuple[str, Entry]]:
    """Yield (path relative to the workspace, entry) of every regular file below ``start`` that git would not ignore.

    Ends early when ``stopped`` says so, and after ``MAX_VISITED`` entries. A folder that cannot be read is left out,
    but for ``start`` itself.

    Raises:
        ToolError: ``start`` is missing, outside or no folder.
    """
    base = root.resolve(start or ".").decode("utf-8", "surrogateescape")
    rules = _inherited(root, base)
    visited = [0]
    root.listdir(base or ".")
    yield from _descend(root, base, rules, stopped, visited, 0)


def _descend(
    root: Root, folder: str, rules: _Rules, stopped: Stopped, visited: list[int], depth: int
) -> Iterator[tuple[str, Entry]]:
    try:
        entries = root.listdir(folder or ".")
    except ToolError:
        return
    rules = [*rules, *_rules_of(root, folder)]
    for entry in entries:
        visited[0] += 1
        if stopped() or visited[0] > MAX_VISITED:
            return
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.name in _ALWAYS or _ignored(path, entry.kind == "dir", rules):
            continue
        if entry.kind == "file":
            yield path, entry
        elif entry.kind == "dir" and depth < _MAX_DEPTH:
            yield from _descend(root, path, rules, stopped, visited, depth + 1)


def _inherited(root: Root, base: str) -> _Rules:
    parts = base.split("/") if base else []
    return [rule for n in range(len(parts)) for rule in _rules_of(root, "/".join(parts[:n]))]


def _rules_of(root: Root, folder: str) -> _Rules:
    name = f"{folder}/.gitignore" if folder else ".gitignore"
    try:
        text = root.read(name, _MAX_IGNORE).data.decode("utf-8", "surrogateescape")
    except ToolError:
        return []
    return [
        (f"{folder}/" if folder else "", _spec([line for line in text.splitlines() if is_harmless(line)]))
    ]


def _spec(lines: list[str]) -> pathspec.GitIgnoreSpec:
    try:
        return pathspec.GitIgnoreSpec.from_lines(lines)
    except ValueError:
        # One bad line must not void the others.
        return pathspec.GitIgnoreSpec.from_lines([line for line in lines if _compiles(line)])


def _compiles(line: str) -> bool:
    try:
        pathspec.GitIgnoreSpec.from_lines([line])
    except ValueError:
        return False
    return True


def _ignored(path: str, is_dir: bool, rules: _Rules) -> bool:
    # The innermost ignore file that says anything decides, as in git.
    for prefix, spec in reversed(rules):
        said = spec.check_file(path[len(prefix) :] + ("/" if is_dir else "")).include
        if said is not None:
            return said
    return False
