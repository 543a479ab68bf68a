"""Which rung of the ladder is due: close the input, interrupt, terminate, kill. Pure: times come in, a rung comes out.

SIGINT comes first because test runners and ``finally`` blocks clean up on it and not on SIGTERM. When the command
itself has ended, the rest of its tree is killed at once: the leader's end never means that the tree is gone.

A program that is known to need something else gets a profile: ``SERVER`` ends by itself when its input is closed,
``MODEL`` holds no files that a kill could harm, ``GIT`` must not be killed early, because it leaves its lock behind.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import PurePath
from typing import Final


class Rung(IntEnum):
    """A rung; higher is harder."""

    NONE = 0
    CLOSE = 1
    INTERRUPT = 2
    TERMINATE = 3
    KILL = 4

    @property
    def word(self) -> str:
        """The signal's name as it is shown; empty for none."""
        return ("", "closed input", "SIGINT", "SIGTERM", "SIGKILL")[self]

    @property
    def said(self) -> str:
        """What was done, in words."""
        return ("", "input closed", "interrupt sent", "termination sent", "kill sent")[self]

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
    """Seconds on each rung: the input closed, interrupt, terminate, and from the kill to the proof.

    A rung without seconds is left out, except that the last one is always the kill.
    """

    interrupt_s: float = 2.0
    terminate_s: float = 1.0
    confirm_s: float = 5.0
    close_s: float = 0.0

    @property
    def kill_at(self) -> float:
        """Seconds from the stop to the kill."""
        return self.close_s + self.interrupt_s + self.terminate_s

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
        if elapsed < self.close_s:
            return Rung.CLOSE
        return Rung.TERMINATE if elapsed >= self.close_s + self.interrupt_s else Rung.INTERRUPT

    def until_next(self, elapsed: float) -> float:
        """Return the seconds until a higher rung is due by time alone; 0 when the highest is."""
        edges = (self.close_s, self.close_s + self.interrupt_s, self.kill_at)
        return max(0.0, next((edge for edge in edges if elapsed < edge), elapsed) - elapsed)


DEFAULT: Final = Ladder()
SERVER: Final = Ladder(interrupt_s=0.0, terminate_s=1.0, close_s=0.5)
MODEL: Final = Ladder(interrupt_s=1.0, terminate_s=2.0)
GIT: Final = Ladder(interrupt_s=5.0, terminate_s=0.0)

_SHELLS: Final = frozenset({"sh", "bash", "dash", "zsh"})
_BESIDE_GIT: Final = frozenset({"cd", "echo", "true", "export", "pwd"})
_JOINS: Final = frozenset({"&&", "||", ";", "|", "&"})


def is_git(argv: Sequence[str]) -> bool:
    """Tell whether a command line runs git and nothing else that would need a ladder of its own."""
    words = list(argv)
    if len(words) > 2 and PurePath(words[0]).name in _SHELLS and words[1] == "-c":
        lexer = shlex.shlex(words[2].replace("\n", " ; "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            return False
    programs = set(_programs(words))
    return "git" in programs and programs <= {"git", *_BESIDE_GIT}


def _programs(words: list[str]) -> list[str]:
    found = []
    first = True
    for word in words:
        if word in _JOINS:
            first = True
        elif first and not ("=" in word and word.partition("=")[0].isidentifier()):
            found.append(PurePath(word).name)
            first = False
    return found
