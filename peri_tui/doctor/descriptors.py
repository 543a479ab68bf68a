"""What processes hold open, by the kernel's own tables: TCP connections, named Unix sockets, files. Linux only."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_TCP_STATES: Final = (
    "", "established", "connecting", "connecting", "closing", "closing", "closing", "closed", "closed", "closing",
    "closing", "listening", "closing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Connection:
    """One socket of a process. ``kind``: tcp or unix; ``peer`` is empty for one that listens and for Unix sockets."""

    pid: int
    kind: str
    local: str
    peer: str = ""
    state: str = ""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One file that a process holds open."""

    pid: int
    path: str


@dataclass(slots=True)
class Descriptors:
    """Looks up what processes hold open; tables are read once a network namespace.

    ``unreadable`` counts processes that may not be looked at.
    """

    unreadable: int = 0
    _tables: dict[str, dict[int, tuple[str, str, str, str]]] = field(default_factory=dict)

    def look(self, pids: Iterable[int], folders: Sequence[Path]) -> tuple[list[Connection], list[OpenFile]]:
        """Return the connections of processes, and those of their open files that are below ``folders``."""
        connections: list[Connection] = []
        files: dict[OpenFile, None] = {}
        for pid in pids:
            for target in self._targets(pid):
                if target.startswith("socket:["):
                    connections += self._socket(pid, int(target[8:-1]))
                elif any(Path(target).is_relative_to(folder) for folder in folders):
                    files[OpenFile(pid, target)] = None
        return connections, list(files)

    def _targets(self, pid: int) -> Iterator[str]:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            self.unreadable += 1
            return
        except OSError:
            return
        for name in sorted(names, key=int):
            try:
                yield os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue

    def _socket(self, pid: int, inode: int) -> Iterator[Connection]:
        try:
            space = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            return
        if space not in self._tables:
            self._tables[space] = dict(_sockets(pid))
        found = self._tables[space].get(inode)
        if found is not None:
            yield Connection(pid, *found)


def _sockets(pid: int) -> Iterator[tuple[int, tuple[str, str, str, str]]]:
    for name in ("tcp", "tcp6"):
        for line in _lines(pid, name):
            fields = line.split()
            state = _TCP_STATES[int(fields[3], 16)] if int(fields[3], 16) < len(_TCP_STATES) else ""
            peer = "" if state == "listening" else _address(fields[2])
            yield int(fields[9]), ("tcp", _address(fields[1]), peer, state)
    for line in _lines(pid, "unix"):
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            listening = int(fields[3], 16) & 0x10000
            state = "listening" if listening else "connected"
            yield int(fields[6]), ("unix", fields[7], "", state)


def _lines(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/net/{name}").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return []


def _address(image: str) -> str:
    # Four bytes a word, each word in the machine's own order.
    host, _, port = image.partition(":")
    words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    text = f"[{address}]" if address.version == 6 else str(address)
    return f"{text}:{int(port, 16)}"
