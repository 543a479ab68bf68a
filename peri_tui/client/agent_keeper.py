"""Keeps a session's agent alive: where it listens, whether its process lives, and a new one when it died."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peri_tui.client.channels import Target
from peri_tui.client.launcher import AgentHandle
from peri_tui.config import Paths
from peri_tui.errors import AgentUnreachable
from peri_tui.log import Log

RESTARTS: Final = 3
RESTARTS_WITHIN_S: Final = 60.0

Launch = Callable[[Paths, Path], Awaitable[AgentHandle]]


@dataclass(frozen=True, slots=True)
class LinkNews:
    """What the screen should know of the link.

    ``state``: open, lost (reconnecting), restarting, restarted, failed (given up), escalated, killing (the tasks in
    ``tasks`` would end too; ``AgentSession.decline_kill`` within 3 s says no), unanswered (a stop nobody answers).
    """

    state: str
    detail: str = ""
    task: str = ""
    tasks: tuple[str, ...] = ()


class AgentKeeper:
    """The agent of one session; embedded (a handle) or running by itself (a socket: never signalled or killed).

    Args:
        agent: the handle, or the socket.
        paths, log: of this process.
        workspace: the folder of a new agent.
        launch: starts an agent.
        announce: tells the screen.
    """

    def __init__(
        self,
        agent: AgentHandle | Path,
        *,
        paths: Paths,
        log: Log,
        workspace: Path,
        launch: Launch,
        announce: Callable[[LinkNews], None],
    ) -> None:
        self.handle = agent if isinstance(agent, AgentHandle) else None
        self.socket = agent.socket if isinstance(agent, AgentHandle) else agent
        self._paths = paths
        self._log = log
        self._workspace = workspace
        self._launch = launch
        self._announce = announce
        self._restarts: list[float] = []

    @property
    def embedded(self) -> bool:
        """True when the agent is ours to signal."""
        return self.handle is not None

    def target(self) -> Target:
        """Return where to connect as of now."""
        token = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            token = self._paths.token(self.socket.stem).read_text(encoding="ascii").strip()
        return Target(self.socket, token)

    async def revive(self) -> bool:
        """Start a new agent if ours died; True if that happened. It ends and rolls back what the old one left.

        Raises:
            AgentUnreachable: three died within a minute, or the new one did not become ready.
            PeriError: the new agent refused to start.
        """
        dead = self.handle
        if dead is None or dead.is_alive():
            return False
        now = time.monotonic()
        self._restarts = [*(at for at in self._restarts if now - at < RESTARTS_WITHIN_S), now]
        if len(self._restarts) > RESTARTS:
            raise AgentUnreachable(f"the agent died {RESTARTS} times within a minute (see {self._paths.log})")
        self._announce(LinkNews("restarting", f"the agent (pid {dead.pid}) is gone"))
        self._log.event("agent gone", layer=2, pid=dead.pid)
        dead.close()
        self.handle = await self._launch(self._paths, self._workspace)
        self.socket = self.handle.socket
        detail = f"a new agent (pid {self.handle.pid}) recovers what the old one left"
        self._announce(LinkNews("restarted", detail))
        return True

    def terminate(self) -> bool:
        """Ask an embedded agent to shut down; False if there is none alive."""
        return self.handle is not None and self.handle.signal(signal.SIGTERM)

    def kill(self) -> bool:
        """Kill an embedded agent; False if there is none alive."""
        return self.handle is not None and self.handle.kill_session()

    def close(self) -> None:
        """Let go of an embedded agent."""
        if self.handle is not None:
            self.handle.close()
