"""The output of a command: an own pipe, read without ever waiting for its end.

A pipe reaches its end only when the last process that holds it is gone, which may be a grandchild that nobody waits
for. So nothing here waits: bytes are taken when they are there, within a budget a callback (so that a command that
prints without end cannot hold the event loop), and memory keeps the head and the tail only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable
from typing import Final, Literal

from peri_tui.agent.processes.guard import WARN_SHARE
from peri_tui.agent.processes.spill import CAP_BYTES, SPILL_FROM, Spill

HEAD_BYTES: Final = 64 * 1024
TAIL_BYTES: Final = 192 * 1024
FRESH_BYTES: Final = 16 * 1024
PIPE_BYTES: Final = 1024 * 1024
BUDGET_BYTES: Final = 1024 * 1024
BUDGET_S: Final = 0.002
DRAIN_S: Final = 0.02
_READ_BYTES: Final = 256 * 1024
THROTTLE_BYTES_S: Final = 1024 * 1024
_F_SETPIPE_SZ: Final = 1031

Policy = Literal["discard", "throttle"]
OnFresh = Callable[[bytes, int], None]
OnLimit = Callable[[float, float, str], None]


class HeadTail:
    """Keeps the first and the last bytes of a stream and counts those between.

    Args:
        head: bytes kept from the start.
        tail: bytes kept from the end.
    """

    def __init__(self, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self.total = 0
        self._head_size = head
        self._tail_size = tail
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if len(data) >= self._tail_size:
            self._tail = bytearray(data[len(data) - self._tail_size :])
            return
        self._tail += data
        # Cut rarely: each cut moves the whole tail.
        if len(self._tail) > 2 * self._tail_size:
            del self._tail[: len(self._tail) - self._tail_size]

    @property
    def head(self) -> bytes:
        """The first bytes."""
        return bytes(self._head)

    @property
    def tail(self) -> bytes:
        """The last bytes, none of them also in ``head``."""
        return bytes(self._tail[max(0, len(self._tail) - self._tail_size) :])

    @property
    def dropped(self) -> int:
        """How many bytes between head and tail are not kept."""
        return self.total - len(self._head) - min(len(self._tail), self._tail_size)

    def text(self) -> str:
        """Return what is kept as text, undecodable bytes replaced, with a line that counts what is not."""
        if not self.dropped:
            return (self.head + self.tail).decode("utf-8", "replace")
        first, last = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return f"{first}\n[{self.dropped} bytes not kept]\n{last}"


class Output:
    """One command's stdout and stderr.

    Args:
        on_fresh: called with new bytes (at most 16 KiB a call, the newest) and how many before them it is not given.
        limit_bytes: more than that is too much, 0 for no limit; ``on_limit`` is called with value, limit and level.
        spill: the file that gets the whole output once it is more than ``SPILL_FROM`` bytes.
        policy: what a command that prints without end meets beyond 64 MB: ``discard`` reads as fast as it prints,
            ``throttle`` reads 1 MiB a second, so that it has to wait.
        terminal: columns and lines of a terminal that the command gets instead of a pipe; it is also its input.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        on_fresh: OnFresh | None = None,
        *,
        limit_bytes: int = 0,
        spill: Spill | None = None,
        policy: Policy = "discard",
        terminal: tuple[int, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = HeadTail()
        self._on_fresh = on_fresh
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._spill = spill
        self._throttled = policy == "throttle"
        self._pause: asyncio.TimerHandle | None = None
        self._reading, self._writing = _open_terminal(*terminal) if terminal else _open_pipe()
        os.set_blocking(self._reading, False)
        self._loop.add_reader(self._reading, self._take)
        self.last_mono = clock()
        self.late_bytes = 0
        self.limit_bytes = limit_bytes
        self.on_limit: OnLimit | None = None
        self._terminal = terminal is not None
        self._level = 0
        self._detached = False
        self._news = asyncio.Event()

    @property
    def writing_fd(self) -> int:
        """The end that the command gets; -1 once ``hand_over`` was called."""
        return self._writing

    @property
    def closed(self) -> bool:
        """True when nothing more will come: end of file was seen, or the pipe was cut."""
        return self._reading < 0

    @property
    def total(self) -> int:
        """Bytes written by the command so far, as far as they count as its output."""
        return self._kept.total

    @property
    def dropped(self) -> int:
        """Bytes counted but not kept."""
        return self._kept.dropped

    @property
    def terminal_fd(self) -> int:
        """Our end of the command's terminal; -1 without one, or when it is closed."""
        return self._reading if self._terminal else -1

    @property
    def spill(self) -> Spill | None:
        """The file with the whole output, if there was so much that it was begun."""
        return self._spill if self._spill is not None and self._spill.begun else None

    def resize(self, columns: int, lines: int) -> None:
        """Tell the command's terminal another size."""
        if self._terminal and not self.closed:
            _set_size(self._reading, columns, lines)

    def text(self) -> str:
        """Return the output as text (see ``HeadTail.text``)."""
        return self._kept.text()

    def hand_over(self) -> None:
        """Close our copy of the writing end; the command has its own."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def mute(self) -> None:
        """Hand out no fresh bytes any more; they are still read and kept."""
        self._on_fresh = None

    def detach(self) -> None:
        """From now on read and throw away.

        The pipe stays open: closing it would kill a background process by SIGPIPE at its next line.
        """
        self._unthrottle()
        self._detached = True
        self._on_fresh = None
        if self._spill is not None:
            self._spill.close()

    async def quiet(self, quiet_s: float, limit_s: float) -> None:
        """Wait until the end of file, ``quiet_s`` without a byte, or ``limit_s``, whichever is first."""
        self._unthrottle()
        began = self._clock()
        while not self.closed:
            now = self._clock()
            left = min(max(self.last_mono, began) + quiet_s, began + limit_s) - now
            if left <= 0:
                return
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()

    def cut(self) -> None:
        """Stop reading: take what is there for at most 20 ms, then close. Never waits for the end of file."""
        if self.closed:
            return
        self._unthrottle()
        self._loop.remove_reader(self._reading)
        deadline = self._clock() + DRAIN_S
        while self._clock() < deadline and self._read_once():
            pass
        self._close()

    def _take(self) -> None:
        deadline = self._clock() + BUDGET_S
        before = self.total
        size = 0
        fresh = b""
        while size < BUDGET_BYTES and self._clock() < deadline:
            data = self._read_once()
            if not data:
                break
            size += len(data)
            fresh = data
        if self.total > before:
            self._tell(fresh, self.total - before)
        if self.limit_bytes:
            self._check()
        if self._throttled and self.total > CAP_BYTES and not self.closed:
            self._loop.remove_reader(self._reading)
            self._pause = self._loop.call_later(size / THROTTLE_BYTES_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if not self.closed:
            self._loop.add_reader(self._reading, self._take)

    def _unthrottle(self) -> None:
        self._throttled = False
        if self._pause is not None:
            self._pause.cancel()
            self._resume()

    def _check(self) -> None:
        share = (self.total + self.late_bytes) / self.limit_bytes
        level = 2 if share >= 1 else 1 if share >= WARN_SHARE else 0
        if level > self._level and self.on_limit is not None:
            self._level = level
            self.on_limit(self.total + self.late_bytes, self.limit_bytes, ("", "warn", "limit")[level])

    def _tell(self, newest: bytes, size: int) -> None:
        self.last_mono = self._clock()
        self._news.set()
        if self._on_fresh is not None:
            shown = newest[-FRESH_BYTES:]
            self._on_fresh(shown, size - len(shown))

    def _read_once(self) -> bytes:
        if self.closed:
            return b""
        try:
            data = os.read(self._reading, _READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        if not data:
            self._close()
        elif self._detached:
            self.late_bytes += len(data)
        else:
            self._store(data)
        return data

    def _store(self, data: bytes) -> None:
        if self._spill is not None and (self._spill.begun or self.total + len(data) > SPILL_FROM):
            # Up to here all of it is in memory.
            self._spill.add(data if self._spill.begun else self._kept.head + self._kept.tail + data)
        self._kept.add(data)

    def _close(self) -> None:
        self.hand_over()
        if self.closed:
            return
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        self._reading = -1
        if self._spill is not None:
            self._spill.close()
        self._news.set()


def _open_pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    # A wide pipe means fewer wake-ups; unprivileged users may have used up their share of pipe memory.
    with contextlib.suppress(OSError):
        fcntl.fcntl(reading, _F_SETPIPE_SZ, PIPE_BYTES)
    return reading, writing


def _open_terminal(columns: int, lines: int) -> tuple[int, int]:
    ours, theirs = os.openpty()
    _set_size(theirs, columns, lines)
    return ours, theirs


def _set_size(fd: int, columns: int, lines: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
