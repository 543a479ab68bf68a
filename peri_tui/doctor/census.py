"""Everything that runs for Peri, and what it holds open, grouped by agent and task.

Agents are known by the files in which they announce themselves, by their ledgers, and by the kernel's tables; nobody
is asked, so this works whatever state an agent is in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from peri_tui.agent.processes.ledger import Book
from peri_tui.agent.processes.sweep import Leftover, Sweep
from peri_tui.agent.processes.table import ProcessRow, descendants, lives, read_table, task_tag
from peri_tui.client.launcher import AgentRecord, living, read_records
from peri_tui.config import Paths
from peri_tui.doctor.descriptors import Connection, Descriptors, OpenFile

FILES_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """One process: ages and times in seconds, memory in bytes. ``leftover`` says how one that was left was found.

    ``role``: agent, warden, supervisor, command, child (below a command), or stray (carries a task's tag only).
    """

    pid: int
    start_time: int
    role: str
    task: str
    age: float
    cpu: float
    rss: int
    command: str
    leftover: str = ""


@dataclass(slots=True)
class AgentSeen:
    """One agent, living or dead, with what belongs to it; ``files_more`` counts open files that are not listed."""

    instance: str
    pid: int
    alive: bool
    workspace: str = ""
    processes: list[ProcessSeen] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)
    files: list[OpenFile] = field(default_factory=list)
    files_more: int = 0


@dataclass(slots=True)
class Census:
    """All agents, oldest first, and what dead ones left."""

    agents: list[AgentSeen]
    left: list[Leftover]
    unreadable: int = 0


def take_census(paths: Paths, sweep: Sweep) -> Census:
    """Look at everything once. Blocks for some milliseconds."""
    books = sweep.books()
    left = sweep.find(books=books)
    census = _Taking(paths, read_table(), left)
    for book, is_dead in books:
        if is_dead:
            census.add_dead(book)
    known = {book.instance: book for book, is_dead in books if not is_dead}
    for record in living(paths, read_records(paths)):
        census.add_living(record.instance, record.pid, record, known.pop(record.instance, None))
    for book in known.values():
        census.add_living(book.instance, book.agent.pid, None, book)
    return Census(census.agents, left, census.descriptors.unreadable)


class _Taking:
    def __init__(self, paths: Paths, table: Mapping[int, ProcessRow], left: Sequence[Leftover]) -> None:
        self._paths = paths
        self._table = table
        self._left = left
        self._now = _uptime()
        self.descriptors = Descriptors()
        self.agents: list[AgentSeen] = []

    def add_dead(self, book: Book) -> None:
        """Add a dead agent, if it left anything."""
        mine = [one for one in self._left if one.instance == book.instance]
        rows = [(self._table[one.ref.pid], one) for one in mine if lives(self._table, one.ref)]
        if rows:
            agent = AgentSeen(book.instance, book.agent.pid, False, book.workspace)
            agent.processes = [self._seen(row, one.role, one.task, one.found) for row, one in rows]
            self._finish(agent)

    def add_living(self, instance: str, pid: int, record: AgentRecord | None, book: Book | None) -> None:
        """Add a living agent with its whole tree."""
        workspace = record.workspace if record else book.workspace if book else ""
        agent = AgentSeen(instance, pid, True, workspace)
        roles, tasks = _known(self._table, book)
        tags = {entry.tag for entry in book.entries} if book else set()
        strays = {one: tag for one in self._table if (tag := task_tag(one)) in tags} if tags else {}
        below = descendants(self._table, [pid, *roles])
        # This command itself may have been started from a task; it is not worth a line.
        for one in sorted({*below, *strays} - {os.getpid()}):
            row = self._table[one]
            task = self._nearest(one, tasks) or strays.get(one, "")
            role = "agent" if one == pid else roles.get(one) or self._guess(row, one in below)
            agent.processes.append(self._seen(row, role, task))
        self._finish(agent)

    def _nearest(self, pid: int, tasks: Mapping[int, str]) -> str:
        while pid in self._table:
            if pid in tasks:
                return tasks[pid]
            pid = self._table[pid].ppid
        return ""

    def _guess(self, row: ProcessRow, below: bool) -> str:
        if row.name in ("peri-warden", "peri-supervisor"):
            return row.name.removeprefix("peri-")
        above = self._table.get(row.ppid)
        if above is not None and above.name == "peri-supervisor":
            return "command"
        return "child" if below else "stray"

    def _seen(self, row: ProcessRow, role: str, task: str, leftover: str = "") -> ProcessSeen:
        age = max(0.0, self._now - row.start_time / os.sysconf("SC_CLK_TCK"))
        return ProcessSeen(
            row.pid, row.start_time, role, task, round(age, 2), round(row.cpu_seconds, 2), row.rss,
            row.ref.command, leftover,
        )  # fmt: skip

    def _finish(self, agent: AgentSeen) -> None:
        own = (self._paths.data, self._paths.state, self._paths.runtime, self._paths.config)
        folders = [*own, *([Path(agent.workspace)] if agent.workspace else [])]
        pids = [one.pid for one in agent.processes]
        agent.connections, files = self.descriptors.look(pids, folders)
        agent.files, agent.files_more = files[:FILES_SHOWN], max(0, len(files) - FILES_SHOWN)
        self.agents.append(agent)


def _known(table: Mapping[int, ProcessRow], book: Book | None) -> tuple[dict[int, str], dict[int, str]]:
    """Return role and task by pid for what a living agent's ledger names and still lives."""
    roles: dict[int, str] = {}
    tasks: dict[int, str] = {}
    if book is None:
        return roles, tasks
    roles |= {ref.pid: "warden" for ref in book.wardens if lives(table, ref)}
    for entry in book.entries:
        for role, ref in (("command", entry.ref), ("supervisor", entry.supervisor)):
            if ref is not None and lives(table, ref):
                roles[ref.pid] = role
                tasks[ref.pid] = entry.task
    return roles, tasks


def _uptime() -> float:
    try:
        return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return time.monotonic()
