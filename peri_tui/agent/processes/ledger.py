"""The ledger: which processes an agent started, so that a later one can find what a crash left.

One file an agent, ``<state>/ledger/<instance>.jsonl`` (0600), one JSON object a line, appended as it happens and never
synced: after a crash of the machine there are no processes to find. A process is named by pid *and* start time. A
line that is damaged, or cut by the crash, is skipped.

``ev``: ``agent {instance, boot, pid, start, at, workspace}``, ``warden {pid, start}``, ``began {n, task, tag, pid, start, sup, argv}``,
``seen {n, refs}``, ``moved {n, task}``, ``ended {n}``. ``n`` is the command's number within the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from peri_tui.agent.processes.evidence import ProcessRef, is_alive
from peri_tui.config import Paths, make_private
from peri_tui.errors import ConfigError

MAX_BYTES: Final = 1 << 20
MAX_SEEN: Final = 2000
_ARGV: Final = 200


def ledger_folder(paths: Paths) -> Path:
    """Return where the ledgers of this user's agents are."""
    return paths.state / "ledger"


class Named(Protocol):
    """What the ledger wants to know of a command (``command.Command``)."""

    task: str

    @property
    def number(self) -> int:
        """Its number within the agent."""
        ...

    @property
    def ref(self) -> ProcessRef:
        """Its own process."""
        ...

    @property
    def supervisor(self) -> ProcessRef | None:
        """Its supervisor."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One command that is not known to have ended, with every process of its tree that was ever named.

    ``task`` is whose it is now, ``tag`` the ``PERI_TASK`` that it was started with.
    """

    number: int
    task: str
    ref: ProcessRef
    supervisor: ProcessRef | None = None
    seen: tuple[ProcessRef, ...] = ()
    tag: str = ""

    @property
    def refs(self) -> tuple[ProcessRef, ...]:
        """The command and the known rest of its tree, without the supervisor."""
        return tuple(dict.fromkeys((self.ref, *self.seen)))


@dataclass(frozen=True, slots=True)
class Book:
    """What one agent's ledger says: who the agent was, and what of its commands was not seen to end."""

    file: Path
    instance: str
    boot: str
    agent: ProcessRef
    started: float = 0.0
    workspace: str = ""
    wardens: tuple[ProcessRef, ...] = ()
    entries: tuple[Entry, ...] = ()

    @property
    def tasks(self) -> frozenset[str]:
        """The tasks whose commands were not seen to end."""
        return frozenset(entry.task for entry in self.entries)


class Ledger:
    """Writes this agent's ledger. Trouble with the disk is told once and never keeps a command from starting.

    Args:
        folder: where the ledgers are; made if missing (0700).
        instance, boot, agent, workspace: who writes, and for which folder.
        trouble: told, in one line, when it cannot be written.
        wall: wall-clock seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        instance: str,
        boot: str,
        agent: ProcessRef,
        workspace: str = "",
        trouble: Callable[[str], None] = lambda text: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = folder / f"{instance}.jsonl"
        self._trouble = trouble
        self._failed = False
        self._size = 0
        self._fd = -1
        head = {
            "ev": "agent",
            "instance": instance,
            "boot": boot,
            "pid": agent.pid,
            "start": agent.start_time,
        }
        self._head = head | {"at": round(wall(), 3), "workspace": workspace}
        self._wardens: list[ProcessRef] = []
        self._live: dict[int, Entry] = {}
        with self._reporting():
            make_private(folder)
            self._rewrite()

    @property
    def live(self) -> tuple[Entry, ...]:
        """The commands that have begun and are not proven to have ended."""
        return tuple(self._live.values())

    def warden_started(self, ref: ProcessRef) -> None:
        """A warden runs."""
        self._wardens.append(ref)
        self._append(_warden_line(ref))

    def command_started(self, command: Named) -> None:
        """A command runs."""
        entry = Entry(command.number, command.task, command.ref, command.supervisor, tag=command.task)
        self._live[entry.number] = entry
        self._append(_began_line(entry))

    def processes_seen(self, number: int, refs: Sequence[ProcessRef]) -> None:
        """More processes of a command's tree became known."""
        entry = self._live.get(number)
        if entry is None or not refs:
            return
        self._live[number] = _trimmed(replace(entry, seen=(*entry.seen, *refs)))
        self._append(_seen_line(number, refs))

    def command_moved(self, number: int, task: str) -> None:
        """A command belongs to another task now."""
        if number in self._live:
            self._live[number] = replace(self._live[number], task=task)
            self._append({"ev": "moved", "n": number, "task": task})

    def command_ended(self, number: int) -> None:
        """A command's whole tree is proven to be gone."""
        if self._live.pop(number, None) is not None:
            self._append({"ev": "ended", "n": number})

    def close(self) -> None:
        """End the ledger: nothing left, nothing to remember; else the file stays for the next agent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if not self._live:
            with self._reporting():
                self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        if self._fd < 0:
            return
        data = _encoded([line])
        with self._reporting():
            if self._size + len(data) > MAX_BYTES:
                self._rewrite()  # The new file holds what this line says.
                return
            self._size += os.write(self._fd, data)

    def _rewrite(self) -> None:
        """Write the file anew with what is still true, so that it does not grow for as long as the agent lives."""
        lines: list[dict[str, Any]] = [self._head, *map(_warden_line, self._wardens[-1:])]
        for entry in map(_trimmed, self._live.values()):
            lines += [_began_line(entry), _seen_line(entry.number, entry.seen)]
        fresh = self.path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(fresh, flags, 0o600)
        try:
            self._size = os.write(fd, _encoded(lines))
            os.replace(fresh, self.path)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ConfigError) as error:
            if not self._failed:
                self._failed = True
                self._trouble(f"{self.path}: cannot be written: {error}")


def _trimmed(entry: Entry) -> Entry:
    """Forget the dead of a command that starts processes without end."""
    if len(entry.seen) <= MAX_SEEN:
        return entry
    return replace(entry, seen=tuple(filter(is_alive, dict.fromkeys(entry.seen))))


def _warden_line(ref: ProcessRef) -> dict[str, Any]:
    return {"ev": "warden", "pid": ref.pid, "start": ref.start_time}


def _began_line(entry: Entry) -> dict[str, Any]:
    above = entry.supervisor
    return {
        "ev": "began", "n": entry.number, "task": entry.task, "tag": entry.tag, "pid": entry.ref.pid, "start": entry.ref.start_time,
        "sup": [above.pid, above.start_time] if above else None, "argv": entry.ref.command[:_ARGV],
    }  # fmt: skip


def _seen_line(number: int, refs: Iterable[ProcessRef]) -> dict[str, Any]:
    return {
        "ev": "seen", "n": number, "refs": [[ref.pid, ref.start_time, ref.command[:_ARGV]] for ref in refs]
    }  # fmt: skip


def _encoded(lines: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    head: dict[str, Any] = field(default_factory=dict)
    wardens: list[ProcessRef] = field(default_factory=list)
    entries: dict[int, Entry] = field(default_factory=dict)

    def take(self, line: bytes) -> None:
        """Take one line; what is no line of a ledger is skipped."""
        try:
            fact = json.loads(line)
            getattr(self, f"_take_{fact['ev']}")(fact)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return

    def _take_agent(self, fact: dict[str, Any]) -> None:
        ProcessRef(int(fact["pid"]), int(fact["start"]), "")
        self.head = fact

    def _take_warden(self, fact: dict[str, Any]) -> None:
        self.wardens.append(ProcessRef(int(fact["pid"]), int(fact["start"]), "peri-warden"))

    def _take_began(self, fact: dict[str, Any]) -> None:
        above = fact["sup"]
        entry = Entry(
            int(fact["n"]), str(fact["task"]), ProcessRef(int(fact["pid"]), int(fact["start"]), str(fact["argv"])),
            ProcessRef(int(above[0]), int(above[1]), "peri-supervisor") if above else None,
            tag=str(fact["tag"]),
        )  # fmt: skip
        self.entries[entry.number] = entry

    def _take_seen(self, fact: dict[str, Any]) -> None:
        refs = tuple(ProcessRef(int(row[0]), int(row[1]), str(row[2])) for row in fact["refs"])
        entry = self.entries[int(fact["n"])]
        self.entries[entry.number] = replace(entry, seen=(*entry.seen, *refs))

    def _take_moved(self, fact: dict[str, Any]) -> None:
        self.entries[int(fact["n"])] = replace(self.entries[int(fact["n"])], task=str(fact["task"]))

    def _take_ended(self, fact: dict[str, Any]) -> None:
        self.entries.pop(int(fact["n"]), None)


def read_ledger(file: Path) -> Book | None:
    """Return what a ledger says; None when it cannot be read or does not even say whose it is."""
    reader = _Reader()
    try:
        with open(file, "rb") as opened:
            for line in opened:
                reader.take(line)
    except OSError:
        return None
    head = reader.head
    if not head or str(head.get("instance")) != file.stem:
        return None
    return Book(
        file, file.stem, str(head.get("boot", "")), ProcessRef(int(head["pid"]), int(head["start"]), "agent"),
        float(head.get("at", 0)), str(head.get("workspace", "")), tuple(reader.wardens), tuple(reader.entries.values()),
    )  # fmt: skip


def read_ledgers(folder: Path) -> list[Book]:
    """Return every ledger of a folder, oldest agent first."""
    books = (read_ledger(file) for file in sorted(folder.glob("*.jsonl")))
    return sorted(
        (book for book in books if book is not None), key=lambda book: (book.started, book.instance)
    )
