"""Which rung of the ladder is due: interrupt, terminate, kill. Pure: times come in, a rung comes out.

SIGINT comes first because test runners and ``finally`` blocks clean up on it and not on SIGTERM. When the command
itself has ended, the rest of its tree is killed at once: the leader's end never means that the tree is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Rung(IntEnum):
    """A rung; higher is harder."""

    NONE = 0
    INTERRUPT = 1
    TERMINATE = 2
    KILL = 3

    @property
    def word(self) -> str:
        """The signal's name as it is shown; empty for none."""
        return ("", "SIGINT", "SIGTERM", "SIGKILL")[self]

    @classmethod
    def from_word(cls, word: str) -> Rung:
        """Return the rung of a signal's name. Raises ValueError for another word."""
        for rung in cls:
            if rung.word == word:
                return rung
        raise ValueError(f"no rung is called {word!r}")


class Alive(StrEnum):
    """What of a command's tree still lives."""

    LEADER = "leader"
    REST = "rest"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Grace periods in seconds: between interrupt and terminate, terminate and kill, kill and the proof."""

    interrupt_s: float = 2.0
    terminate_s: float = 1.0
    confirm_s: float = 5.0

    @property
    def kill_at(self) -> float:
        """Seconds from the stop to the kill."""
        return self.interrupt_s + self.terminate_s

    def next_rung(self, elapsed: float, forced: bool, alive: Alive) -> Rung:
        """Return the rung to stand on now.

        Args:
            elapsed: seconds since the stop.
            forced: every grace period is skipped.
            alive: what still lives; for nothing there is no rung.
        """
        if alive is Alive.NOTHING:
            return Rung.NONE
        if forced or alive is Alive.REST or elapsed >= self.kill_at:
            return Rung.KILL
        return Rung.TERMINATE if elapsed >= self.interrupt_s else Rung.INTERRUPT

    def until_next(self, elapsed: float) -> float:
        """Return the seconds until a higher rung is due by time alone; 0 when the highest is."""
        limit = self.interrupt_s if elapsed < self.interrupt_s else self.kill_at
        return max(0.0, limit - elapsed)
