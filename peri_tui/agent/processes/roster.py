"""Everyone of a command's tree who was ever named, and what became of them.

A word from elsewhere ("it is empty") is believed only as far as ``/proc`` agrees for each process that was named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peri_tui.agent.processes.evidence import (
    ProcessRef,
    Survivor,
    TreeEvidence,
    is_alive,
    own_survivor,
    refs_from_wire,
    signals_from_wire,
    survivors_from_wire,
)
from peri_tui.agent.processes.ladder import Rung


class Roster:
    """The processes of one tree.

    Args:
        alive: tells whether this very process still runs.
    """

    def __init__(self, alive: Callable[[ProcessRef], bool] = is_alive) -> None:
        self.at_stop: tuple[ProcessRef, ...] = ()
        self._alive = alive
        self._known: dict[ProcessRef, None] = {}
        self._ended: tuple[ProcessRef, ...] = ()
        self._signals: dict[ProcessRef, str] = {}
        self._reported: tuple[Survivor, ...] = ()

    @property
    def refs(self) -> tuple[ProcessRef, ...]:
        """Every process that was ever named, the command first."""
        return tuple(self._known)

    def know(self, refs: Sequence[ProcessRef]) -> list[ProcessRef]:
        """Take names; return those that are new."""
        have = {(ref.pid, ref.start_time) for ref in self._known}
        fresh = [ref for ref in refs if (ref.pid, ref.start_time) not in have]
        self._known |= dict.fromkeys(fresh)
        return fresh

    def name(self, rows: Sequence[Sequence[Any]]) -> tuple[ProcessRef, ...]:
        """Return rows ``[pid, start, name, ...]`` as processes, by the names under which they are known.

        The tree knows a process by its short name; the command itself is better known by its command line.
        """
        own = {(ref.pid, ref.start_time): ref for ref in self._known}
        return tuple(own.get((ref.pid, ref.start_time), ref) for ref in refs_from_wire(rows))

    def learn_ended(self, rows: Sequence[Sequence[Any]]) -> None:
        """Take the list of those that were ended, ``[pid, start, name, signal]``."""
        self._ended = self.name(rows)
        self._signals = dict(zip(self._ended, signals_from_wire(rows), strict=True))

    def learn_survivors(self, rows: Sequence[Sequence[Any]]) -> None:
        """Take the list of those that could not be ended."""
        self._reported = survivors_from_wire(rows)

    @property
    def survivors(self) -> tuple[Survivor, ...]:
        """Those that were reported, and live."""
        return tuple(
            one for one in self._reported if self._alive(ProcessRef(one.pid, one.start_time, one.command))
        )

    def killed(self, leader: ProcessRef | None, name: str) -> bool:
        """Tell whether SIGKILL ended the leader (if given), or a program whose name begins so."""
        killed = [ref for ref, word in self._signals.items() if word == "SIGKILL"]
        return any(ref == leader or ref.command.startswith(name) for ref in killed)

    def judge(self, *, proven: bool, silent: ProcessRef | None, rung: Rung, seconds: float) -> TreeEvidence:
        """Return what is proven.

        Args:
            proven: somebody who can know said that nothing is left.
            silent: who should have said something, and did not.
            rung: the hardest signal that was needed.
            seconds: since the stop.
        """
        named = tuple(dict.fromkeys((*self._known, *self.at_stop, *self._ended)))
        alive = {(ref.pid, ref.start_time): ref for ref in named if self._alive(ref)}
        survivors = self.survivors
        for one in survivors:
            alive.pop((one.pid, one.start_time), None)
        survivors += tuple(own_survivor(ref, "not confirmed") for ref in alive.values())
        if silent is not None and not survivors:
            survivors = (own_survivor(silent, "supervisor does not answer"),)
        met = dict.fromkeys((*self.at_stop, *self._ended))
        ended = tuple(ref for ref in met if not self._alive(ref))
        return TreeEvidence(
            "survivors" if survivors else "empty" if proven else "best_effort",
            ended,
            survivors,
            rung.word,
            round(seconds, 4),
            tuple(self._signals.get(ref, "") for ref in ended),
        )
