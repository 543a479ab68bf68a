"""The lock that git leaves behind when it is killed: removed only when it is surely the killed command's.

git makes ``index.lock`` beside its index and removes it on every signal but SIGKILL; with it, every later git command
in that repository refuses to work. It is removed here only if it was made while the command ran, and no git process
works in that repository any more. Anything in doubt stays.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_LOCK: Final = "index.lock"
# File systems round times, some to whole seconds; a lock older than the command by more than that is not its own.
_ROUNDING_S: Final = 0.01


def drop_stale_lock(cwd: str, began: float, ended: float, *, proc: str = "/proc") -> str:
    """Remove the lock that a killed git left in the repository of ``cwd``.

    Args:
        began, ended: wall-clock seconds between which the command ran.

    Returns what was done, in a line; empty when there is no lock. Blocks for some milliseconds.
    """
    repository = _repository(Path(cwd))
    if repository is None:
        return ""
    root, folder = repository
    lock = folder / _LOCK
    try:
        info = lock.lstat()
    except OSError:
        return ""
    if not stat.S_ISREG(info.st_mode) or not began - _ROUNDING_S <= info.st_mtime <= ended + _ROUNDING_S:
        return f"{lock}: a lock that is not this command's, left alone"
    if _git_lives((root, folder), proc):
        return f"{lock}: left alone, another git works there"
    try:
        lock.unlink()
    except OSError as error:
        return f"{lock}: cannot be removed: {error.strerror}"
    return f"{lock}: removed, the killed git had left it"


def _repository(start: Path) -> tuple[Path, Path] | None:
    """Return the working tree that holds a folder, and its git folder (elsewhere for a linked working tree)."""
    for root in (start, *start.parents):
        entry = root / ".git"
        if entry.is_dir():
            return root, entry
        if entry.is_file():
            try:
                words = entry.read_text(encoding="utf-8", errors="surrogateescape")[:4096].partition(
                    "gitdir:"
                )
            except OSError:
                return None
            return (root, (root / words[2].strip()).resolve()) if words[1] else None
    return None


def _git_lives(folders: tuple[Path, ...], proc: str) -> bool:
    places = tuple(os.path.realpath(folder) for folder in folders)
    for entry in os.listdir(proc):
        if not entry.isdigit() or not _is_git(f"{proc}/{entry}"):
            continue
        try:
            where = os.readlink(f"{proc}/{entry}/cwd")
        except FileNotFoundError:
            continue
        except OSError:
            return True  # Somebody else's git, and nobody may know where.
        if any(where == place or where.startswith(place + os.sep) for place in places):
            return True
    return False


def _is_git(folder: str) -> bool:
    try:
        with open(f"{folder}/stat", "rb") as file:
            head, _, rest = file.read().rpartition(b")")
    except OSError:
        return False
    return head.partition(b"(")[2].startswith(b"git") and rest.split()[0] not in (b"Z", b"X")
