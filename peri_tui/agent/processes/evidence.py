"""What is known of processes, and the agent's own look at ``/proc`` that checks what a supervisor says.

A process is named by pid *and* start time (clock ticks since boot), so a reused number is never taken for it.
"""

from __future__ import annotations

import pwd
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from peri_tui.agent.processes.ladder import Rung

Outcome = Literal["empty", "survivors", "best_effort"]
_WORST_FIRST: Final[tuple[Outcome, ...]] = ("survivors", "best_effort", "empty")


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process; ``start_time`` in clock ticks since boot, ``command`` as far as it is known."""

    pid: int
    start_time: int
    command: str


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that could not be ended, whose it is, and why."""

    pid: int
    start_time: int
    command: str
    user: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a command ended: by exit code, or by signal number (then ``code`` is None)."""

    code: int | None
    signal: int | None

    @classmethod
    def from_wait(cls, value: int) -> ExitStatus:
        """Return the status for a number as ``os.waitstatus_to_exitcode`` gives it."""
        return cls(value, None) if value >= 0 else cls(None, -value)


@dataclass(frozen=True, slots=True)
class TreeStats:
    """What a tree uses now. Shared pages are counted in each process, so memory is an upper bound."""

    rss_bytes: int = 0
    cpu_seconds: float = 0.0
    processes: int = 0
    names: tuple[str, ...] = ()

    @staticmethod
    def total(parts: Iterable[TreeStats]) -> TreeStats:
        """Return the sum over several trees; each name once."""
        several = list(parts)
        return TreeStats(
            sum(part.rss_bytes for part in several),
            sum(part.cpu_seconds for part in several),
            sum(part.processes for part in several),
            tuple(dict.fromkeys(name for part in several for name in part.names)),
        )


@dataclass(frozen=True, slots=True)
class TreeEvidence:
    """What a stop of one or several trees achieved.

    Args:
        outcome: ``empty`` = the kernel said that no descendant is left, and ``/proc`` agrees; ``survivors`` = some
            are listed, or could not be disproved; ``best_effort`` = none is known, but there is no proof.
        ended: processes that lived when the stop began, or were met later, and are gone.
        survivors: those that are not.
        rung: the hardest signal that was needed, empty if none was.
        seconds: from the first signal to the proof.
        signals: for each of ``ended`` the last signal that it was sent; empty where it ended without one.
        notes: what else was done about what they left (a lock of git).
    """

    outcome: Outcome
    ended: tuple[ProcessRef, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    rung: str = ""
    seconds: float = 0.0
    signals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def list_ended(self) -> list[str]:
        """Return one line for each process that was ended: pid, command, and the signal that ended it."""
        signals = (*self.signals, *[""] * (len(self.ended) - len(self.signals)))
        return [
            f"{ref.pid} {ref.command[:160]} {word}".rstrip()
            for ref, word in zip(self.ended, signals, strict=True)
        ]

    @staticmethod
    def merge(parts: Iterable[TreeEvidence]) -> TreeEvidence:
        """Return the evidence for all: the worst outcome, every process, the hardest rung, the longest time."""
        several = list(parts)
        outcomes = {part.outcome for part in several}
        words: dict[ProcessRef, str] = {}
        for part in several:
            words |= dict.fromkeys((ref for ref in part.ended if ref not in words), "")
            words |= {ref: word for ref, word in zip(part.ended, part.signals, strict=False) if word}
        return TreeEvidence(
            next((word for word in _WORST_FIRST if word in outcomes), "empty"),
            tuple(words),
            tuple(dict.fromkeys(one for part in several for one in part.survivors)),
            max((Rung.from_word(part.rung) for part in several), default=Rung.NONE).word,
            max((part.seconds for part in several), default=0.0),
            tuple(words.values()) if any(words.values()) else (),
            tuple(dict.fromkeys(note for part in several for note in part.notes)),
        )


def is_alive(ref: ProcessRef) -> bool:
    """Tell from ``/proc`` whether this very process still runs; a zombie does not."""
    try:
        with open(f"/proc/{ref.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return (
        len(fields) > 19
        and int(fields[19]) == ref.start_time
        and not (fields[0] in b"ZX" and int(fields[17]) < 2)
    )


def own_survivor(ref: ProcessRef, reason: str) -> Survivor:
    """Describe a process that ``is_alive`` found."""
    return Survivor(ref.pid, ref.start_time, ref.command, _owner(ref.pid), reason)


def _owner(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    # Not the owner of the folder: that is root for a process that changed its user.
    return next((user_name(int(line.split()[2])) for line in lines if line.startswith(b"Uid:")), "")


def user_name(uid: int) -> str:
    """Return a user's name, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def refs_from_wire(rows: Sequence[Sequence[Any]]) -> tuple[ProcessRef, ...]:
    """Return what a supervisor listed as ``[pid, start, name, ...]``."""
    return tuple(ProcessRef(int(row[0]), int(row[1]), text_from_wire(row[2])) for row in rows)


def signals_from_wire(rows: Sequence[Sequence[Any]]) -> tuple[str, ...]:
    """Return the names of the signals in rows of ``[pid, start, name, signal number]``; empty for none."""
    return tuple(signal.Signals(row[3]).name if len(row) > 3 and row[3] else "" for row in rows)


def survivors_from_wire(rows: Sequence[Sequence[Any]]) -> tuple[Survivor, ...]:
    """Return what a supervisor listed as ``[pid, start, command, uid, reason]``."""
    return tuple(
        Survivor(int(row[0]), int(row[1]), text_from_wire(row[2]), user_name(int(row[3])), str(row[4]))
        for row in rows
    )


def text_from_wire(image: str) -> str:
    """Return the text for the Latin-1 image of its bytes."""
    return image.encode("latin-1", "replace").decode("utf-8", "replace")
