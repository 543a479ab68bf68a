"""Which paths differ after a command: two stat tables compared. What a command changed is listed, not put back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from peri_tui.agent.rollback.beneath import Root
from peri_tui.agent.rollback.scan import Row, Table, row, scan


@dataclass(frozen=True, slots=True)
class WindowChange:
    """One path that a command (or somebody else meanwhile) added, modified or deleted."""

    path: str
    kind: str

    @property
    def raw(self) -> bytes:
        """The path as bytes."""
        return os.fsencode(self.path)


@dataclass(slots=True)
class Window:
    """An open window: the table before, to be compared with one after."""

    seq: int
    before: Table

    def note_own(self, root: Root, path: bytes) -> None:
        """Take a path that the task itself just wrote out of the comparison, as it is now."""
        try:
            with root.parent(path) as (folder, name):
                self.before.rows[path] = row(os.stat(name, dir_fd=folder, follow_symlinks=False))
        except OSError:
            self.before.rows.pop(path, None)

    def compare(self, root: Root) -> tuple[list[WindowChange], list[str]]:
        """Return (changes sorted by path, notes)."""
        after = scan(root)
        found = _differences(self.before.rows, after.rows)
        if self.before.cut or after.cut:  # which of the rest was there before cannot be told
            found = [change for change in found if change.kind == "modified"]
        return found, list(dict.fromkeys(self.before.notes + after.notes))


def _differences(before: dict[bytes, Row], after: dict[bytes, Row]) -> list[WindowChange]:
    found = [(path, "deleted") for path in before.keys() - after.keys()]
    found += [(path, "added") for path in after.keys() - before.keys()]
    found += [(path, "modified") for path, old in before.items() if after.get(path, old) != old]
    return [WindowChange(os.fsdecode(path), kind) for path, kind in sorted(found)]


def changed_since(root: Root, wall: int, own: Iterable[bytes]) -> tuple[list[WindowChange], list[str]]:
    """Return the paths whose change time is at or after ``wall`` (ns), for a command that a crash cut off.

    The table before the command died with the process, so deleted paths cannot be told: a note says so.
    """
    table = scan(root)
    skip = set(own)
    tick = 10_000_000  # a file stamp may lag the clock by one timer tick
    found = [
        WindowChange(os.fsdecode(path), "modified")
        for path, info in sorted(table.rows.items())
        if info[3] >= wall - tick and path not in skip
    ]
    note = "a command was running when the agent ended: files that it deleted cannot be listed"
    return found, [note, *table.notes]
