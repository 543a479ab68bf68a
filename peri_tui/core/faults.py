"""Named faults, one or more a layer, that a test or ``peri doctor`` switches on to see that it is detected.

Nothing is switched on in normal use: ``install`` is called once by a process's entry point with the names in
``PERI_FAULTS``, and every check is a look-up in an empty set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

KNOWN: Final[dict[str, str]] = {
    "ui.block_loop": "the UI loop is blocked as soon as a stop was pressed",
    "client.drop_control": "control frames with a cancel are thrown away by the agent",
    "client.drop_http": "HTTP cancels are never answered by the agent",
    "scheduler.refuse_cas": "the compare-and-set to cancelling is refused",
    "model.keep_socket": "the model's socket is not shut down",
    "rollback.hang_cleanup": "a cleanup of the task never ends",
    "rollback.skip_restore": "one file is not restored, although the restore says so",
    "processes.skip_kill": "the supervisor of a command is never told to kill",
}

_active: set[str] = set()


def install(names: Iterable[str]) -> None:
    """Switch on the named faults, replacing those before.

    Raises:
        ValueError: a name is not in ``KNOWN``.
    """
    wanted = set(names)
    unknown = wanted - KNOWN.keys()
    if unknown:
        raise ValueError(f"unknown fault {sorted(unknown)[0]!r}; known: {', '.join(sorted(KNOWN))}")
    _active.clear()
    _active.update(wanted)


def active(name: str) -> bool:
    """Tell whether the fault is switched on."""
    return name in _active
