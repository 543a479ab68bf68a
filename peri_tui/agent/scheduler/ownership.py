"""Who is alive: an agent is dead only when that is proven, never because it was silent.

Each agent holds a lock on a file of its own for as long as it lives; the kernel lets go of it when the process ends,
however it ends. Proof is any of: the machine was booted again, the lock can be had, the process with that pid (in the
same pid namespace) is gone or is a later one. A stopped or swapped-out process keeps its lock, so it counts as alive.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from peri_tui.agent.scheduler.store import InstanceRow
from peri_tui.errors import StoreUnavailable


class Liveness:
    """Holds this agent's lock and judges others.

    Args:
        folder: the folder of the locks; made if missing (0700).
        boot_id: this boot and pid namespace, see ``this_boot``.
        wall: wall-clock seconds.
    """

    def __init__(
        self, folder: Path, *, boot_id: str | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._boot_id = this_boot() if boot_id is None else boot_id
        self._wall = wall
        self._held: dict[str, int] = {}

    def hold(self, instance: str) -> None:
        """Take the agent's lock, for life; before the agent is registered, so that no other judges it earlier.

        Raises:
            StoreUnavailable: the lock file cannot be made, or somebody else holds it.
        """
        path = self._path(instance)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"{path}: the agent's lock cannot be made: {error.strerror}") from None
        if not _try_lock(fd):
            os.close(fd)
            raise StoreUnavailable(f"{path}: another process holds this agent's lock")
        self._held[instance] = fd

    def release(self, instance: str) -> None:
        """Let go of the agent's lock and remove its file: the last thing before the process ends."""
        fd = self._held.pop(instance, None)
        if fd is not None:
            self._path(instance).unlink(missing_ok=True)
            os.close(fd)

    def describe(self, instance: str, *, workspace: str, socket: str) -> InstanceRow:
        """Return this process's row for the store."""
        pid = os.getpid()
        return InstanceRow(
            instance, pid, start_time(pid) or 0, self._boot_id, workspace, socket, self._wall()
        )

    def is_dead(self, row: InstanceRow) -> bool:
        """Tell whether the agent is proven to be dead; False also when nothing can be proven."""
        if row.instance in self._held:
            return False
        if _boot(row.boot_id) != _boot(self._boot_id):
            return bool(row.boot_id and self._boot_id)
        return self._lock_is_free(row.instance) or self._process_is_gone(row)

    def forget(self, instance: str) -> None:
        """Remove what a dead agent left: its lock file."""
        if self._lock_is_free(instance):
            self._path(instance).unlink(missing_ok=True)

    def _path(self, instance: str) -> Path:
        return self._folder / f"{instance}.lock"

    def _lock_is_free(self, instance: str) -> bool:
        # A missing file proves nothing: the agent may be about to make it.
        try:
            fd = os.open(self._path(instance), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return _try_lock(fd)
        finally:
            os.close(fd)

    def _process_is_gone(self, row: InstanceRow) -> bool:
        if row.boot_id != self._boot_id:
            return False
        try:
            os.kill(row.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        now = start_time(row.pid)
        return bool(row.start_time and now and now != row.start_time)


def this_boot() -> str:
    """Return an id of this boot and of this pid namespace, as ``boot/namespace``; "" where the system has none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks after the boot; None where it is gone or cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command's name, in parentheses, may hold anything; field 22 counts from behind it.
    return int(stat.rpartition(b")")[2].split()[19])


def _boot(boot_id: str) -> str:
    return boot_id.partition("/")[0]


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
