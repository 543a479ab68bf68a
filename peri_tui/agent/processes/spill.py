"""Output that is too long to keep in memory goes to a file, written by one thread that nobody waits for.

The queue to the thread is bounded; what does not fit (a slow disk) is dropped and counted, and the gap is marked in
the file. A file has at most 64 MB. Files are private to the user and are removed after a week.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import stat
import threading
from pathlib import Path
from typing import Final

CAP_BYTES: Final = 64_000_000
SPILL_FROM: Final = 30_000
KEEP_DAYS: Final = 7
QUEUE_LENGTH: Final = 64  # Of at most 256 KiB each.
_DAY_S: Final = 86400.0
_CLOSE_S: Final = 2.0


class SpillWriter:
    """The thread that writes; it starts with the first file."""

    def __init__(self, length: int = QUEUE_LENGTH) -> None:
        self._queue: queue.Queue[tuple[Spill, bytes] | None] = queue.Queue(length)
        self._thread: threading.Thread | None = None
        self._late: list[Spill] = []

    def put(self, spill: Spill, data: bytes) -> bool:
        """Hand over bytes (none: close the file); False when the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spill", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((spill, data))
        except queue.Full:
            return False
        return True

    def close_later(self, spill: Spill) -> None:
        """Close a file when all of it is written, although the queue is too full to say so there."""
        self._late.append(spill)

    def close(self) -> None:
        """Write what is queued and end the thread; gives up on a disk that hangs after 2 s."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)
        self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            spill, data = item
            spill.write(data)
            for late in [one for one in self._late if one.all_written]:
                late.write(b"")
                self._late.remove(late)


class Spill:
    """One command's file.

    Args:
        path: where it will be, once there is something to write; its folder is made private.
        writer: the thread that writes.
        cap: bytes that are kept.
    """

    def __init__(self, path: Path, writer: SpillWriter, *, cap: int = CAP_BYTES) -> None:
        self.path = path
        self.kept = 0
        self.dropped = 0
        self.failure = ""
        self._writer = writer
        self._cap = cap
        self._gap = 0
        self._begun = False
        self._closed = False
        self._given = 0
        self._taken = 0
        self._fd = -1

    @property
    def begun(self) -> bool:
        """True once something was handed over."""
        return self._begun

    def add(self, data: bytes) -> None:
        """Take the next bytes; never waits."""
        self._begun = True
        part = data[: max(0, self._cap - self.kept)]
        lost = len(data) - len(part)
        if part and not self._put(part):
            lost = len(data)
        self.dropped += lost

    def _put(self, part: bytes) -> bool:
        mark = f"\n[{self._gap} bytes not kept]\n".encode() if self._gap else b""
        if self._closed or not self._writer.put(self, mark + part):
            self._gap += len(part)
            return False
        self._gap = 0
        self._given += 1
        self.kept += len(part)
        return True

    def close(self) -> None:
        """Nothing more comes."""
        if self._begun and not self._closed and not self._writer.put(self, b""):
            self._writer.close_later(self)
        self._closed = True

    @property
    def all_written(self) -> bool:
        """True when the thread took every piece."""
        return self._taken == self._given

    def write(self, data: bytes) -> None:
        """In the thread: append, or close on nothing. A full or broken disk is remembered, not raised."""
        self._taken += bool(data)
        try:
            if self._fd < 0 and data and not self.failure:
                self._fd = self._open()
            view = memoryview(data)
            while view and self._fd >= 0:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self.failure = error.strerror or str(error)
            data = b""
        if self._fd >= 0 and not data:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        self.path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        # After a close nothing is written any more, so the file is opened once: it must be new.
        return os.open(
            self.path,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND,
            0o600,
        )


def spill_path(root: Path, task: str, call: str, number: int) -> Path:
    """Return the file for a call; ids come from models and may be anything, so only plain characters are taken."""
    folder, name = (re.sub(r"[^A-Za-z0-9_-]", "", text)[:80] for text in (task, call))
    path = root / (folder or "task") / f"{name or number}.log"
    return path if not path.exists() else path.with_name(f"{name}-{number}.log")


def sweep_spill(root: Path, now: float, *, keep_days: float = KEEP_DAYS) -> int:
    """Remove files older than a week and folders that are empty then; returns how many files. Follows no link."""
    removed = 0
    for folder in _folders(root):
        for entry in os.scandir(folder):
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and info.st_mtime < now - keep_days * _DAY_S:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
        with contextlib.suppress(OSError):
            os.rmdir(folder)  # Only if it is empty.
    return removed


def _folders(root: Path) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
