"""What ``/proc`` says of every process: the agent's and ``peri ps``' view from outside. Linux only, else empty.

Only reading; a process that goes away meanwhile is simply not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from peri_tui.agent.processes.evidence import ProcessRef

PROC: Final = Path("/proc")
_COMMAND: Final = 200


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One living process. ``start_time`` in clock ticks since boot, ``cpu_seconds`` its own, ``rss`` in bytes."""

    pid: int
    ppid: int
    start_time: int
    name: str
    cpu_seconds: float
    rss: int

    @property
    def ref(self) -> ProcessRef:
        """The process as others keep it, with its whole command line."""
        return ProcessRef(self.pid, self.start_time, command_line(self.pid) or self.name)


def read_table() -> dict[int, ProcessRow]:
    """Return every living process by pid; zombies are left out. Empty where there is no ``/proc``."""
    try:
        names = os.listdir(PROC)
    except OSError:
        return {}
    rows = (read_row(int(name)) for name in names if name.isdigit())
    return {row.pid: row for row in rows if row is not None}


def read_row(pid: int) -> ProcessRow | None:
    """Return one process, None when it is gone or a zombie (one whose threads still run is none)."""
    head, closing, rest = _read(pid, "stat").rpartition(b")")
    fields = rest.split()
    if not closing or len(fields) < 22 or (fields[0] in (b"Z", b"X") and int(fields[17]) < 2):
        return None
    return ProcessRow(
        pid=pid,
        ppid=int(fields[1]),
        start_time=int(fields[19]),
        name=head.partition(b"(")[2].decode("utf-8", "replace"),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        rss=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def command_line(pid: int) -> str:
    """Return a process's arguments as one text, at most 200 characters; "" when they cannot be read."""
    return _read(pid, "cmdline").rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")[:_COMMAND]


def task_tag(pid: int) -> str:
    """Return the ``PERI_TASK`` of a process of this user, "" where it has none or cannot be looked at."""
    for item in _read(pid, "environ").split(b"\0"):
        if item.startswith(b"PERI_TASK="):
            return item[10:].decode("utf-8", "replace")
    return ""


def descendants(table: Mapping[int, ProcessRow], roots: Iterable[int]) -> set[int]:
    """Return the pids below ``roots``, the roots themselves included where they live."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.ppid, []).append(row.pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in table]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def ancestors(table: Mapping[int, ProcessRow], pid: int) -> set[int]:
    """Return a process and all that are above it."""
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].ppid
    return found


def lives(table: Mapping[int, ProcessRow], ref: ProcessRef) -> bool:
    """Tell whether this very process is in the table: number and start time."""
    row = table.get(ref.pid)
    return row is not None and row.start_time == ref.start_time


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
