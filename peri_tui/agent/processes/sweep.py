"""What dead agents left: found by their ledgers, shown, and ended only when somebody says so.

A process is a leftover when a dead agent's ledger names it (pid and start time), when it carries the ``PERI_TASK`` of
such an agent's task, or when it is below one of those. The tag only detects: it is inherited, so a program that the
user started from a task's process has it too. That is why nothing is killed without a question. What belongs to a
living agent, and whoever asks, is never a leftover.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peri_tui.agent.processes.evidence import ProcessRef, is_alive
from peri_tui.agent.processes.ledger import Book, ledger_folder, read_ledgers
from peri_tui.agent.processes.table import (
    ProcessRow,
    ancestors,
    descendants,
    lives,
    read_table,
    task_tag,
)
from peri_tui.agent.scheduler.ownership import Liveness, this_boot
from peri_tui.agent.scheduler.store import InstanceRow
from peri_tui.config import Paths

POLITE_S: Final = 1.0
LIMIT_S: Final = 5.0
_POLL_S: Final = 0.02
_STALE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A process that outlived its agent. ``found``: ledger, tag or child; ``role``: command, supervisor or warden."""

    ref: ProcessRef
    instance: str
    task: str
    found: str
    role: str = "command"


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep did: those that are gone, and those that are not, each with the reason."""

    ended: tuple[Leftover, ...] = ()
    left: tuple[tuple[Leftover, str], ...] = ()


class Sweep:
    """Judges ledgers and finds leftovers.

    Args:
        paths: the user's folders.
        liveness: proves agents dead; default: one that holds nothing itself.
        boot: this boot and pid namespace.
    """

    def __init__(self, paths: Paths, *, liveness: Liveness | None = None, boot: str | None = None) -> None:
        self._folder = ledger_folder(paths)
        self._boot = this_boot() if boot is None else boot
        self._liveness = liveness or Liveness(paths.data / "instances", boot_id=self._boot)

    def books(self) -> list[tuple[Book, bool]]:
        """Return every readable ledger and whether its agent is proven dead, oldest first."""
        return [(book, self._is_dead(book)) for book in read_ledgers(self._folder)]

    def find(self, task: str = "", *, books: Sequence[tuple[Book, bool]] | None = None) -> list[Leftover]:
        """Return the leftovers of all dead agents (of one task, if given), oldest process first."""
        known = self.books() if books is None else books
        dead = [book for book, is_dead in known if is_dead and book.boot == self._boot]
        if not dead:
            return []
        table = read_table()
        spared = _spared(table, (book for book, is_dead in known if not is_dead))
        found: dict[int, Leftover] = {}
        for one in (*_named(table, dead), *_tagged(table, dead)):
            if one.ref.pid not in spared and (not task or one.task == task):
                found.setdefault(one.ref.pid, one)
        _add_children(found, table, spared)
        return sorted(found.values(), key=lambda one: (one.ref.start_time, one.ref.pid))

    def tidy(self) -> None:
        """Remove the ledgers of dead agents that left nothing."""
        known = self.books()
        kept = {one.instance for one in self.find(books=known)}
        for book, is_dead in known:
            if is_dead and book.instance not in kept and self._may_go(book):
                with contextlib.suppress(OSError):
                    book.file.unlink()

    def end(
        self,
        *,
        polite_s: float = POLITE_S,
        limit_s: float = LIMIT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> SweepResult:
        """End all leftovers: SIGTERM, after ``polite_s`` SIGKILL, at most ``limit_s`` seconds. Blocks."""
        began = time.monotonic()
        met: dict[tuple[int, int], Leftover] = {}
        asked: set[tuple[int, int]] = set()
        why: dict[tuple[int, int], str] = {}
        while (left := self.find()) and time.monotonic() - began < limit_s:
            hard = time.monotonic() - began >= polite_s
            for one in left:
                key = (one.ref.pid, one.ref.start_time)
                met.setdefault(key, one)
                if hard or key not in asked:
                    asked.add(key)
                    why[key] = send(
                        one.ref, *((signal.SIGKILL,) if hard else (signal.SIGTERM, signal.SIGCONT))
                    )
            sleep(_POLL_S)
        alive = {(one.ref.pid, one.ref.start_time): one for one in left}
        self.tidy()
        return SweepResult(
            tuple(one for key, one in met.items() if key not in alive and not is_alive(one.ref)),
            tuple((one, why.get(key) or "did not end") for key, one in alive.items()),
        )

    def _is_dead(self, book: Book) -> bool:
        row = InstanceRow(
            book.instance, book.agent.pid, book.agent.start_time, book.boot, "", "", book.started
        )
        return self._liveness.is_dead(row)

    def _may_go(self, book: Book) -> bool:
        if book.boot == self._boot or book.boot.partition("/")[0] != self._boot.partition("/")[0]:
            return True
        # The same boot, but another pid namespace: its numbers say nothing here, so only age can.
        with contextlib.suppress(OSError):
            return time.time() - book.file.stat().st_mtime > _STALE_S
        return False


def send(ref: ProcessRef, *numbers: signal.Signals) -> str:
    """Send signals to this very process; returns why that was not possible, "" when it was or it is gone.

    The process is held by a pidfd before its start time is looked at, so a number that was reused is never hit.
    """
    try:
        handle = os.pidfd_open(ref.pid)
    except OSError:
        return ""
    try:
        if is_alive(ref):
            for number in numbers:
                signal.pidfd_send_signal(handle, number)
    except PermissionError:
        return "not permitted"
    except ProcessLookupError:
        return ""
    finally:
        os.close(handle)
    return ""


def describe(left: Sequence[Leftover]) -> str:
    """Return the one line for the screen about what is left."""
    count, tasks = len(left), len({one.task for one in left if one.task})
    some = f"{count} process{'es' if count > 1 else ''}"
    whose = "a task" if tasks <= 1 else f"{tasks} tasks"
    return f"{some} of {whose} whose agent died {'are' if count > 1 else 'is'} still alive: see peri ps"


def _spared(table: Mapping[int, ProcessRow], living: Iterable[Book]) -> set[int]:
    roots = [
        ref.pid
        for book in living
        for ref in (book.agent, *book.wardens, *(ref for entry in book.entries for ref in entry.refs))
        if lives(table, ref)
    ]
    return descendants(table, roots) | ancestors(table, os.getpid())


def _named(table: Mapping[int, ProcessRow], dead: Sequence[Book]) -> Iterable[Leftover]:
    for book in dead:
        for ref in book.wardens:
            if lives(table, ref):
                yield Leftover(ref, book.instance, "", "ledger", "warden")
        for entry in book.entries:
            if entry.supervisor is not None and lives(table, entry.supervisor):
                yield Leftover(entry.supervisor, book.instance, entry.task, "ledger", "supervisor")
            for ref in entry.refs:
                if lives(table, ref):
                    yield Leftover(ref, book.instance, entry.task, "ledger")


def _tagged(table: Mapping[int, ProcessRow], dead: Sequence[Book]) -> Iterable[Leftover]:
    owners = {entry.tag: book.instance for book in dead for entry in book.entries}
    if not owners:
        return
    for pid, row in table.items():
        tag = task_tag(pid)
        if tag in owners:
            yield Leftover(row.ref, owners[tag], tag, "tag")


def _add_children(found: dict[int, Leftover], table: Mapping[int, ProcessRow], spared: set[int]) -> None:
    for parent in list(found.values()):
        for pid in descendants(table, [parent.ref.pid]) - found.keys() - spared:
            found[pid] = Leftover(table[pid].ref, parent.instance, parent.task, "child")
