"""Walking the workspace as git sees it: ignore files obeyed, links not followed, bounded, stoppable between entries.

Ignore rules are pathspec's (git's own semantics). A pattern that could take exponential time is left out: matching
holds the interpreter, and a stop must not wait for it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import pathspec

from peri_tui.agent.rollback.beneath import Entry, Root
from peri_tui.errors import ToolError

MAX_VISITED: Final = 200_000
MAX_SECONDS: Final = 30.0
_IGNORE: Final = ".gitignore"
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


class Walk:
    """One walk over the regular files that git would not ignore.

    Args:
        root: the workspace.
        start: where to begin, "" for the whole workspace.
        stopped: asked before each entry; True ends the walk.
        clock: monotonic seconds.

    ``cut`` says why the walk ended early, or is "".

    Raises:
        ToolError: ``start`` is missing, outside or no folder.
    """

    def __init__(
        self, root: Root, start: str, stopped: Stopped, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root = root
        self._stopped = stopped
        self._clock = clock
        self._end = clock() + MAX_SECONDS
        self._visited = 0
        self._base = os.fsdecode(root.resolve(start or "."))
        self._entries = root.listdir(self._base or ".")
        self.cut = ""

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        """Yield (path relative to the workspace, entry); a folder that cannot be read is left out."""
        return self._descend(self._base, self._entries, self._inherited(), 0)

    def _descend(
        self, folder: str, entries: list[Entry], rules: _Rules, depth: int
    ) -> Iterator[tuple[str, Entry]]:
        if any(entry.name == _IGNORE and entry.kind == "file" for entry in entries):
            rules = [*rules, *self._rules_of(folder)]
        for entry in entries:
            if self._must_end():
                return
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name in _ALWAYS or _ignored(path, entry.kind == "dir", rules):
                continue
            if entry.kind == "file":
                yield path, entry
            elif entry.kind == "dir" and depth < _MAX_DEPTH:
                with suppress(ToolError):
                    yield from self._descend(path, self._root.listdir(path), rules, depth + 1)

    def _must_end(self) -> bool:
        self._visited += 1
        if self._stopped():
            self.cut = self.cut or "stopped"
        elif self._visited > MAX_VISITED:
            self.cut = self.cut or f"only the first {MAX_VISITED} entries were looked at"
        elif self._visited % 64 == 0 and self._clock() > self._end:
            self.cut = self.cut or f"ended after {MAX_SECONDS:g} s"
        return bool(self.cut)

    def _inherited(self) -> _Rules:
        parts = self._base.split("/") if self._base else []
        return [rule for n in range(len(parts)) for rule in self._rules_of("/".join(parts[:n]))]

    def _rules_of(self, folder: str) -> _Rules:
        prefix = f"{folder}/" if folder else ""
        try:
            data = self._root.read(f"{prefix}{_IGNORE}", _MAX_IGNORE).data
        except ToolError:
            return []
        lines = data.decode("utf-8", "surrogateescape").splitlines()
        return [(prefix, _spec([line for line in lines if is_harmless(line)]))]


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
