"""Put one name into a wanted state without ever destroying what is there.

A new object is made whole under a temporary name and *exchanged* with the target; what came out is looked at. If it
is not what was expected, somebody else saved meanwhile: it goes back, and the caller is told. Measured against
verify-then-rename, which loses a save in between about once in 150 trials, the exchange loses none.

Temporary names: ``.peri-<task>-<seq>.w`` while being written (always ours), ``.peri-<task>-<seq>`` when whole. After
a crash a whole one is either ours (its hash is known) or somebody's save that an exchange took out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from peri_tui.agent.rollback import calls
from peri_tui.agent.rollback.beneath import CHUNK
from peri_tui.agent.rollback.node import NONE, State, observe, same

Keep = Callable[[int, bytes], None]
"""Takes (folder, temporary name) and moves what is there out of the workspace, kept."""


@dataclass(frozen=True, slots=True)
class Placed:
    """``ok``: the new state is in place. ``out``: what was displaced (still under the temporary name when ok)."""

    ok: bool
    out: State


def temp_name(task: str, seq: int, *, restore: bool = False) -> bytes:
    """Return the temporary name for an intent (or for putting its path back)."""
    return b".peri-%s-%s%d" % (task.encode(), b"r" if restore else b"", seq)


def write_temp(folder: int, temp: bytes, fill: Callable[[int], None], want: State, *, sync: bool) -> None:
    """Make the file ``temp`` whole: bytes by ``fill``, then mode, attributes, time (if ``want.mtime``), sync.

    Raises:
        OSError: and nothing is left under either name.
    """
    part = temp + b".w"
    try:
        fd = calls.create(folder, part)
        try:
            fill(fd)
            calls.fchown(fd, want.uid, want.gid)
            for key, value in want.xattrs.items():
                calls.setxattr(fd, key, value)
            calls.fchmod(fd, want.mode)
            if want.mtime:
                calls.set_times(fd, want.mtime)
            if sync:
                calls.fsync(fd)
        finally:
            os.close(fd)
        calls.move_new(folder, part, temp)
    except Exception:
        for name in (part, temp):
            remove_quietly(folder, name)
        raise


def write_temp_link(folder: int, temp: bytes, want: State) -> None:
    """Make the link ``temp``."""
    calls.symlink(want.target, folder, temp)
    if want.mtime:
        calls.set_link_times(folder, temp, want.mtime)


def swap_in(folder: int, name: bytes, temp: bytes, new: State, expected: State, keep: Keep) -> Placed:
    """Exchange ``temp`` (which holds ``new``) with ``name`` if that holds ``expected``.

    Not ok: what is under ``name`` is what somebody else put there (or took away) last, and nothing of ours is left.
    """
    ours = _identity(folder, temp)
    try:
        calls.exchange(folder, temp, name)
    except FileNotFoundError:
        calls.unlink(folder, temp)
        return Placed(False, NONE)
    except OSError:
        remove_quietly(folder, temp)
        raise
    out = _observe(folder, temp)
    if same(out, expected):
        return Placed(True, out)
    _give_back(folder, name, temp, ours, new, keep)
    return Placed(False, out)


def _give_back(
    folder: int, name: bytes, temp: bytes, placed: tuple[int, int], new: State, keep: Keep
) -> None:
    """Swap until what comes out is what we put there, so the newest save of somebody else is in place."""
    while True:
        held = _identity(folder, temp)
        try:
            calls.exchange(folder, temp, name)
        except FileNotFoundError:
            keep(folder, temp)  # They took the name away meanwhile: absent is their newest wish.
            return
        if _identity(folder, temp) == placed:
            break
        placed = held
    # What came out is ours, unless somebody wrote into it while it was there.
    if same(_observe(folder, temp), new):
        calls.unlink(folder, temp)
    else:
        keep(folder, temp)


def give_back_after_crash(folder: int, name: bytes, temp: bytes, ours: State, keep: Keep) -> None:
    """Put somebody's save, which a crash left under ``temp``, back in the place of ``ours`` (or of nothing)."""
    there = observe(folder, name)
    if there.kind == "none":
        calls.move_new(folder, temp, name)
    elif same(there, ours):
        _give_back(folder, name, temp, there.identity, ours, keep)
    else:
        keep(folder, temp)


def put_new(folder: int, name: bytes, temp: bytes) -> Placed:
    """Move ``temp`` to a ``name`` that must be free; not ok (and ``temp`` gone) when it is taken."""
    try:
        calls.move_new(folder, temp, name)
    except FileExistsError:
        calls.unlink(folder, temp)
        return Placed(False, _observe(folder, name))
    except OSError:
        remove_quietly(folder, temp)
        raise
    return Placed(True, NONE)


def take_out(folder: int, name: bytes, temp: bytes, expected: State, keep: Keep) -> Placed:
    """Move ``name`` to ``temp`` if it holds ``expected``; otherwise it goes back."""
    try:
        calls.move_new(folder, name, temp)
    except FileNotFoundError:
        return Placed(False, NONE)
    out = _observe(folder, temp)
    if same(out, expected):
        return Placed(True, out)
    try:
        calls.move_new(folder, temp, name)
    except FileExistsError:
        keep(folder, temp)
    return Placed(False, out)


def _identity(folder: int, name: bytes) -> tuple[int, int]:
    info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return info.st_dev, info.st_ino


def _observe(folder: int, name: bytes) -> State:
    """Return the state, and for what cannot be read one that equals nothing: it is somebody else's."""
    try:
        return observe(folder, name)
    except OSError:
        return State(kind="unreadable")


def overwrite(fd: int, data: bytes, old_size: int) -> None:
    """Write a file's new bytes over its old ones, for a file with several names; front to back, then cut."""
    for at in range(0, len(data), CHUNK):
        calls.pwrite_all(fd, memoryview(data)[at : at + CHUNK], at)
    if old_size > len(data):
        calls.truncate(fd, len(data))


def is_mixture(data: bytes, one: bytes, other: bytes) -> bool:
    """Tell whether a crash of ``overwrite`` between two contents, either way and repeatedly, can have left ``data``."""
    if not min(len(one), len(other)) <= len(data) <= max(len(one), len(other)):
        return False
    return all(
        byte == one[i : i + 1] or byte == other[i : i + 1]
        for i, byte in ((i, data[i : i + 1]) for i in range(len(data)))
    )


def remove_quietly(folder: int, name: bytes) -> None:
    """Remove one of our own temporary files if it is there."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return
