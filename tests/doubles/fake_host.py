"""A system whose process table is a list, for what macOS would be asked; signals take effect at once, or not at all."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

from peri_tui.agent.processes.mac_supervisor import Row


class FakeHost:
    """Processes by pid. ``deaf`` ones ignore what can be ignored, ``stuck`` ones everything."""

    def __init__(self, *rows: Row) -> None:
        self.rows = {row.pid: row for row in rows}
        self.deaf: set[int] = set()
        self.stuck: set[int] = set()
        self.sent: list[tuple[int, int]] = []
        self.sent_to_group: list[tuple[int, int]] = []
        self.before_look: list[dict[int, Row]] = []  # Tables that replace the current one, one a look.

    def list_processes(self, pids: Iterable[int] = ()) -> dict[int, Row]:
        if self.before_look:
            self.rows = self.before_look.pop(0)
        only = set(pids)
        return {pid: row for pid, row in self.rows.items() if not only or pid in only}

    def kill(self, pid: int, number: int) -> None:
        if pid not in self.rows:
            raise ProcessLookupError(pid)
        self.sent.append((pid, number))
        self._take(pid, number)

    def kill_group(self, group: int, number: int) -> None:
        self.sent_to_group.append((group, number))
        for pid in [row.pid for row in self.rows.values() if row.pgid == group]:
            self._take(pid, number)

    def probe(self, pid: int, _number: int) -> None:
        if pid not in self.rows:
            raise ProcessLookupError(pid)

    def _take(self, pid: int, number: int) -> None:
        if pid in self.stuck or (number != signal.SIGKILL and (pid in self.deaf or number == signal.SIGCONT)):
            return
        del self.rows[pid]
        # Nobody is a subreaper: who loses its parent belongs to the first process.
        self.rows = {
            other: replace(row, ppid=1) if row.ppid == pid else row for other, row in self.rows.items()
        }
