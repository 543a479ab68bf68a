"""Which back end starts and ends commands on which system: Linux with proof, macOS as best it can, others not at all."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from peri_tui.agent.processes import darwin
from peri_tui.agent.processes.evidence import ProcessRef, is_alive
from peri_tui.agent.processes.link import Packets, WardenLink, memory_file, packet_pair
from peri_tui.errors import ProcessError


class Link(Protocol):
    """Who starts supervisors; on Linux the warden (see ``WardenLink``)."""

    facts: dict[str, Any]

    @property
    def pid(self) -> int:
        """Its process id, 0 when it is no process of its own."""

    @property
    def alive(self) -> bool:
        """True while it can start more."""

    @property
    def guards(self) -> bool:
        """True while somebody ends what a supervisor leaves that was killed itself."""

    async def ready(self) -> None:
        """Wait until it can be used. Raises WardenLost."""

    async def request(self, number: int, fds: Sequence[int]) -> None:
        """Start a supervisor: its socket, request, stdin, stdout, stderr. Raises WardenLost."""

    async def close(self, timeout: float) -> None:
        """Hang up, and see everyone's end for at most that many seconds."""


OnSwept = Callable[[dict[str, Any]], None]
OnLost = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Platform:
    """What differs between systems.

    Args:
        name: as in ``sys.platform``.
        launch: makes the link, given who is told of sweeps and of its loss, and words for it. Raises OSError, or
            ProcessError where commands cannot be run.
        packet_pair: returns two connected sockets, ours with messages.
        new_file: returns a new file without a name.
        is_alive: tells whether this very process still runs.
        notes: what its user must know about it; said once.
    """

    name: str
    launch: Callable[[OnSwept, OnLost, Sequence[str]], Link]
    packet_pair: Callable[[], tuple[Packets, socket.socket]] = packet_pair
    new_file: Callable[[], int] = memory_file
    is_alive: Callable[[ProcessRef], bool] = is_alive
    notes: tuple[str, ...] = ()


def _refuse(_on_swept: OnSwept, _on_lost: OnLost, _words: Sequence[str]) -> Link:
    raise ProcessError(f"commands can be run on Linux and macOS only, this is {sys.platform}")


LINUX: Final = Platform("linux", WardenLink)
DARWIN: Final = Platform(
    "darwin",
    darwin.MacLink,
    darwin.line_pair,
    darwin.unnamed_file,
    darwin.PsLook().is_alive,
    darwin.NOTES,
)


def find_platform(name: str) -> Platform:
    """Return the back end for a system named as in ``sys.platform``; one that refuses where there is none."""
    known = {one.name: one for one in (LINUX, DARWIN)}
    return known.get(name, Platform(name, _refuse))
