"""Is anybody there? What the agent does when its TUI is gone.

While the pipe to the TUI is open, the TUI lives, however broken its connections are. When the pipe ends, a control
connection with the token is the sign of life (a new TUI adopted us). With neither, the tasks get ``grace_s`` seconds
for somebody to come, then ``gone`` is called once; with nothing to do it is called at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

ADOPTION_GRACE_S = 30.0


class Presence:
    """Watches the pipe and the control connections of one agent.

    Args:
        gone: called once when nobody came back.
        busy: tells whether there is anything to adopt.
        changed: called with True when the agent becomes orphaned, with False when it is adopted.
        grace_s: seconds until ``gone``.
    """

    def __init__(
        self,
        gone: Callable[[], None],
        busy: Callable[[], bool],
        changed: Callable[[bool], None],
        *,
        grace_s: float = ADOPTION_GRACE_S,
    ) -> None:
        self._gone = gone
        self._busy = busy
        self._changed = changed
        self._grace_s = grace_s
        self._pipe_open = False
        self._clients = 0
        self._timer: asyncio.TimerHandle | None = None
        self.orphaned = False

    def watch_pipe(self, fd: int) -> None:
        """Take the read end of the pipe whose other end the TUI holds; its end of file is the TUI's death."""
        self._pipe_open = True
        asyncio.get_running_loop().add_reader(fd, self._pipe_ended, fd)

    def _pipe_ended(self, fd: int) -> None:
        # Nothing is ever written to it, so readable means end of file.
        asyncio.get_running_loop().remove_reader(fd)
        self._pipe_open = False
        self._judge()

    def client_came(self) -> None:
        """A control connection that may write opened."""
        self._clients += 1
        self._judge()

    def client_left(self) -> None:
        """A control connection that may write closed."""
        self._clients -= 1
        self._judge()

    def work_ended(self) -> None:
        """The last task ended: an orphan with nothing to do leaves at once."""
        if self.orphaned:
            self._judge()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _judge(self) -> None:
        orphaned = not self._pipe_open and self._clients == 0
        if orphaned != self.orphaned:
            self.orphaned = orphaned
            self._changed(orphaned)
        self.close()
        if orphaned:
            delay = self._grace_s if self._busy() else 0.0
            self._timer = asyncio.get_running_loop().call_later(delay, self._gone)
