"""The stat table of a workspace, to tell which paths a command changed. It reads no file.

Nothing is left out by name, size or ``.gitignore``. What cannot be looked at (over the budget, unreadable, another
file system) is named in a note, so a comparison never claims more than it saw.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from peri_tui.agent.rollback.beneath import Root, show

BUDGET: Final = 300_000
_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Row = tuple[int, int, int, int, int]
"""Mode, size, mtime (ns), ctime (ns), inode. For a folder only mode and inode: its other numbers follow its names."""


@dataclass(slots=True)
class Table:
    """Every path beneath a workspace with its row, notes on what is not in it; ``cut``: over the budget."""

    rows: dict[bytes, Row] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cut: bool = False


def scan(root: Root, budget: int = BUDGET) -> Table:
    """Return the table of the workspace, without following links or leaving its file system.

    Args:
        budget: most paths to look at; what is over it is noted.
    """
    table = Table()
    device = os.fstat(root.fd).st_dev
    folders = [b""]
    while folders:
        if len(table.rows) >= budget:
            table.cut = True
            table.notes.append(f"more than {budget} files: not all were compared")
            break
        prefix = folders.pop()
        try:
            for path, info, is_dir in _entries(root, prefix):
                table.rows[path] = row(info)
                if is_dir and info.st_dev == device:
                    folders.append(path)
                elif is_dir:
                    table.notes.append(f"{show(path)}: another file system, not compared")
        except OSError as error:
            table.notes.append(f"{show(prefix)}: not compared: {error.strerror}")
    return table


def row(info: os.stat_result) -> Row:
    """Return what is compared of a stat result."""
    if stat.S_ISDIR(info.st_mode):
        return (info.st_mode, 0, 0, 0, info.st_ino)
    return (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)


def _entries(root: Root, prefix: bytes) -> Iterator[tuple[bytes, os.stat_result, bool]]:
    fd = os.open(prefix or b".", _DIR, dir_fd=root.fd)
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                name = os.fsencode(entry.name)
                path = prefix + b"/" + name if prefix else name
                yield path, info, entry.is_dir(follow_symlinks=False)
    finally:
        os.close(fd)
