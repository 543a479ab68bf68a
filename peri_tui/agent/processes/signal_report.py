"""What a stop waits for, in one sentence for the screen."""

from __future__ import annotations

from dataclasses import dataclass

from peri_tui.agent.processes.ladder import Rung


@dataclass(frozen=True, slots=True)
class SignalReport:
    """What a stop of a task waits for: ``processes`` (an upper bound: others may have ended since) by their names.

    ``rung`` is the hardest that was sent; ``next_rung`` is due in ``next_s`` seconds, NONE when none is.
    """

    task: str
    rung: Rung
    processes: int
    names: tuple[str, ...]
    next_rung: Rung
    next_s: float
    fresh: bool

    @property
    def text(self) -> str:
        """The report in one line."""
        some = ", ".join(self.names[:4]) + (", …" if len(self.names) > 4 else "")
        count = f"{self.processes} process{'' if self.processes == 1 else 'es'} ({some})"
        due = {
            Rung.KILL: f", force in {self.next_s:.1f} s", Rung.TERMINATE: f", next signal in {self.next_s:.1f} s",
            Rung.INTERRUPT: f", interrupt in {self.next_s:.1f} s",
        }  # fmt: skip
        return f"{self.rung.said}, {count}{due.get(self.next_rung, '')}"
