"""Knows how much of the output the terminal has taken: a frame that waits in our own queue is on nobody's screen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import IO


class CountedOutput:
    """The file that the driver's writer thread writes to. ``noted`` is called by whoever queues, the rest by the writer.

    Args:
        file: the terminal.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._queued = self._written = self._flushed = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def noted(self) -> None:
        """Say that one more piece is going to be queued."""
        with self._lock:
            self._queued += 1

    def withdrawn(self) -> None:
        """Say that the queue did not take it."""
        with self._lock:
            self._queued -= 1

    def when_flushed(self, call: Callable[[], None]) -> None:
        """Call back, from any thread, once the terminal has taken everything that is queued now."""
        with self._lock:
            if self._flushed < self._queued:
                self._waiting.append((self._queued, call))
                return
        call()

    # --- the writer thread's side -----------------------------------------------------------------------------------

    def write(self, text: str) -> int:
        """Write one piece; blocks while the terminal takes nothing."""
        count = self._file.write(text)
        with self._lock:
            self._written += 1
        return count

    def flush(self) -> None:
        """Write out what is buffered; blocks while the terminal takes nothing."""
        with self._lock:
            reached = self._written
        self._file.flush()
        with self._lock:
            self._flushed = reached
            due = [call for target, call in self._waiting if target <= reached]
            self._waiting = [(target, call) for target, call in self._waiting if target > reached]
        for call in due:
            call()

    def fileno(self) -> int:
        """Return the terminal's descriptor."""
        return self._file.fileno()

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._file.isatty()
