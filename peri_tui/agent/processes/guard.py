"""What a task's processes may take, and the word when they take too much.

The supervisor measures its own tree (see ``warden``: it is nearest, and a busy event loop cannot hold it up); output
is counted where it is read. Memory is the sum of resident pages. Shared pages count once for each process, so the
number is an upper bound: good for a stop rule, and said as "about".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Which = Literal["memory", "processes", "seconds", "cpu", "output"]
Level = Literal["warn", "limit", "hard"]
WARN_SHARE: Final = 0.8
_GIB: Final = 1 << 30
_LEAST_BYTES: Final = _GIB // 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one command's tree: bytes, processes, seconds. 0 is no limit.

    ``memory`` and ``processes`` also hold for all commands of a task together.
    """

    memory: int = 0
    processes: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    output: int = 0

    @property
    def wire(self) -> dict[str, float]:
        """The part that the supervisor watches."""
        return {
            "memory": self.memory, "processes": self.processes, "seconds": self.seconds, "cpu": self.cpu,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class LimitReport:
    """A tree came near a limit (``warn``), crossed it (``limit``), or went so far that it is being killed (``hard``)."""

    task: str
    command: str
    which: Which
    value: float
    limit: float
    level: Level

    @property
    def text(self) -> str:
        """The report in one line."""
        value, limit = _amount(self.which, self.value), _amount(self.which, self.limit)
        near = "near the limit: " if self.level == "warn" else "over the limit: "
        return near + _SENTENCES[self.which].format(value=value, limit=limit)


_SENTENCES: Final[dict[str, str]] = {
    "memory": "its processes use about {value} of memory, {limit} are allowed",
    "processes": "it runs {value} processes, {limit} are allowed",
    "seconds": "a command runs since {value}, {limit} are allowed",
    "cpu": "a command used {value} of processor time, {limit} are allowed",
    "output": "a command printed {value}, {limit} are allowed",
}


def _amount(which: str, value: float) -> str:
    if which == "processes":
        return f"{value:.0f}"
    if which in ("seconds", "cpu"):
        return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"
    return f"{value / _GIB:.1f} GiB" if value >= _GIB else f"{value / (1 << 20):.0f} MiB"


def default_memory(meminfo: str = "/proc/meminfo") -> int:
    """Return the usual limit in bytes: half of the memory, or what is free now less 1 GiB; at least 256 MiB.

    0 where the system does not tell.
    """
    try:
        with open(meminfo, encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file if ":" in line)
        total, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0
    return max(_LEAST_BYTES, min(total // 2, free - _GIB))
