"""The agent's side of the macOS back end: a supervisor process for each command, and a look through ``ps``.

There is no warden: each command's supervisor (``mac_supervisor``) is a child of the agent. It kills what it knows of
when the agent hangs up or dies, which is the same rule as on Linux. What macOS does not offer (a subreaper, a signal at
the parent's death, a handle for a process) is not replaced by a claim: the outcome of a stop is ``best_effort`` or
``survivors``, and ``NOTES`` says so once. **Not run on macOS so far**, only on Linux with a fake platform.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from peri_tui.agent.processes import mac_supervisor
from peri_tui.agent.processes.evidence import ProcessRef
from peri_tui.agent.processes.mac_supervisor import Host, Lines, PsHost
from peri_tui.errors import WardenLost

NOTES: Final = (
    "macOS: best effort, no proof that a process which left its session is gone",
    "macOS: processes that a crashed agent left are not looked for, and processor time is not measured",
)
_FILE: Final = Path(mac_supervisor.__file__)


def line_pair() -> tuple[Lines, socket.socket]:
    """Return two connected stream sockets; ours, the first, with messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Lines(ours), theirs


def unnamed_file() -> int:
    """Return a new file that has no name. Raises OSError."""
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class PsLook:
    """Tells whether a process lives, by number and start time.

    Args:
        host: the system.
        probe: raises as ``os.kill(pid, 0)``: the cheap look that spares ``ps`` for most of the dead.
    """

    def __init__(self, host: Host | None = None, probe: Callable[[int, int], None] = os.kill) -> None:
        self._host = host or PsHost()
        self._probe = probe

    def is_alive(self, ref: ProcessRef) -> bool:
        """Tell whether this very process runs; one that cannot be looked at counts as alive."""
        try:
            self._probe(ref.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            pass
        try:
            row = self._host.list_processes([ref.pid]).get(ref.pid)
        except OSError:
            return True
        return row is not None and row.start == ref.start_time and not row.dead


class MacLink:
    """Starts supervisors as children of the agent, and collects them.

    Args:
        on_swept: never called: nobody sweeps after a supervisor here.
        on_lost: never called: there is no warden that could be lost.
        words: the containments that were asked for; ``strict`` cannot be had.
    """

    pid = 0
    alive = True
    guards = False

    def __init__(
        self,
        on_swept: Callable[[dict[str, Any]], None],
        on_lost: Callable[[Any], None],
        words: Sequence[str] = (),
    ) -> None:
        self.facts: dict[str, Any] = {"refused": "macOS has no namespaces"} if "strict" in words else {}
        self.facts["platform"] = "darwin"
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._news = asyncio.Event()

    async def ready(self) -> None:
        """Return at once: nothing has to be started before a command is."""

    async def request(self, number: int, fds: Sequence[int]) -> None:
        """Start a supervisor: its socket, request, stdin, stdout, stderr. Raises WardenLost."""
        life, theirs = os.pipe()
        try:
            process = _launch([*fds, theirs])
        except OSError as error:
            os.close(life)
            raise WardenLost(
                f"the supervisor of command {number} cannot be started: {error.strerror}", errno=error.errno
            ) from None
        finally:
            os.close(theirs)
        self._running[life] = process
        self._loop.add_reader(life, self._ended, life)

    async def close(self, timeout: float) -> None:
        """See the supervisors' end; those that still hunt after ``timeout`` seconds stay, and go on hunting."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._running:
                    self._news.clear()
                    await self._news.wait()
        for life in list(self._running):
            self._forget(life)

    def _ended(self, life: int) -> None:
        # The pipe closes on its way out, so this is a matter of microseconds.
        self._forget(life).wait()
        self._news.set()

    def _forget(self, life: int) -> subprocess.Popen[bytes]:
        self._loop.remove_reader(life)
        os.close(life)
        return self._running.pop(life)


def _launch(fds: Sequence[int]) -> subprocess.Popen[bytes]:
    # As for the warden: not the agent's own folder and environment, and a session that no terminal ends.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-X", "utf8", str(_FILE), *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"},
    )
