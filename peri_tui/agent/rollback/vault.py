"""Where one workspace's backups and journals are, and the lock that one writer holds.

``<state>/journal/<key>/<task>.wal`` and ``<data>/store/<key>/{lock,ballast,seg/,trash/<task>/}``; the key is the
SHA-256 of the workspace's real path, device and inode, so another folder at the same path is another workspace.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from peri_tui.agent.rollback import calls
from peri_tui.agent.rollback.beneath import Root, show
from peri_tui.agent.rollback.journal import Begin, Owner, sync_folder
from peri_tui.agent.rollback.node import State, observe, open_file
from peri_tui.agent.rollback.segments import SegmentStore
from peri_tui.config import Paths, make_private
from peri_tui.errors import ConfigError, InputError, RollbackError, StoreFull, WorkspaceBusy

BALLAST: Final = 16 << 20
_TASK: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_task(task: str) -> str:
    """Return the task id if it can be a file name.

    Raises:
        InputError: it cannot.
    """
    if not _TASK.match(task):
        raise InputError(f"task id {task[:80]!r}: expected letters, digits, '-' and '_'")
    return task


def this_process(instance: str = "") -> Owner:
    """Return who we are, in a way that no later process can be mistaken for."""
    return Owner(os.getpid(), start_time(os.getpid()) or 0, boot_id(), instance)


def boot_id() -> str:
    """Return the kernel's id of this boot, empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks after boot; None when there is no such process, 0 when unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return int(stat.rpartition(b")")[2].split()[19])
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0


def owner_is_dead(owner: Owner) -> bool:
    """Tell whether the process is proven gone: another boot, no such pid, or the pid was given to another one."""
    if owner.boot != boot_id():
        return True
    start = start_time(owner.pid)
    return start is None or (bool(start and owner.start) and start != owner.start)


class Vault:
    """One workspace's folders. Making the object makes nothing on disk.

    Raises:
        RollbackError: the folders would be inside the workspace (a task could change its own backups).
    """

    def __init__(self, paths: Paths, root: Root) -> None:
        self.root = root
        info = os.fstat(root.fd)
        self.dev, self.ino = info.st_dev, info.st_ino
        self.key = _key(root, info)
        self.folder = paths.store / self.key
        self.journals = paths.journal / self.key
        for folder in (self.folder, self.journals):
            real = os.path.realpath(folder)
            if (real + "/").startswith(str(root.path).rstrip("/") + "/"):
                raise RollbackError(
                    f"{show(real)}: backups cannot be inside the workspace; set PERI_HOME to another place"
                )
        self._lock = -1
        self._trash: dict[str, int] = {}
        self._store: SegmentStore | None = None

    @property
    def store(self) -> SegmentStore:
        """The segments, opened at first use."""
        if self._store is None:
            self._store = SegmentStore(self.folder / "seg")
        return self._store

    def journal_path(self, task: str) -> Path:
        """The journal file of a task."""
        return self.journals / f"{check_task(task)}.wal"

    def begin(self, task: str, instance: str, wall: int, policy: str = "restore") -> Begin:
        """Return the first record for a journal of this workspace."""
        record = Begin(
            dev=self.dev, ino=self.ino, task=task, owner=this_process(instance), wall=wall, policy=policy
        )
        return record.named(os.fsencode(self.root.path))

    def owns(self, begin: Begin) -> bool:
        """Tell whether a journal belongs to this workspace."""
        return (begin.path, begin.dev, begin.ino) == (os.fsencode(self.root.path), self.dev, self.ino)

    # Lock

    @property
    def locked(self) -> bool:
        """True while this object holds the workspace."""
        return self._lock >= 0

    def make(self) -> None:
        """Make the folders.

        Raises:
            StoreFull: they cannot be made.
        """
        try:
            for folder in (
                self.folder.parent.parent, self.folder.parent, self.folder, self.journals.parent.parent,
                self.journals.parent, self.journals,
            ):  # fmt: skip
                if not folder.is_dir():
                    make_private(folder)
                    sync_folder(folder.parent)
        except (ConfigError, OSError) as error:
            raise StoreFull(f"{self.folder}: backup not possible: {error}") from None

    def acquire(self, instance: str = "") -> None:
        """Take the workspace, for writing or restoring, until ``release``.

        Raises:
            WorkspaceBusy: another writer has it; ``evidence['pid']`` says who.
            StoreFull: the lock file cannot be made.
        """
        if self.locked:
            return
        self.make()
        path = self.folder / "lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreFull(f"{path}: cannot be made: {error.strerror}", errno=error.errno) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(fd)
            os.close(fd)
            raise WorkspaceBusy(
                f"{show(str(self.root.path))}: being changed by another task (process {holder.pid or 'unknown'})",
                pid=holder.pid,
                instance=holder.instance,
            ) from None
        self._lock = fd
        _write_holder(fd, this_process(instance))

    def release(self) -> None:
        """Give the workspace back and close everything."""
        for fd in self._trash.values():
            os.close(fd)
        self._trash.clear()
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # Ballast: space that only a rollback may use

    def load_ballast(self) -> None:
        """Reserve 16 MiB once; without it a rollback on a full disk may not be able to write."""
        path = self.folder / "ballast"
        if path.exists():
            return
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            calls.allocate(fd, BALLAST)
        except OSError:
            path.unlink(missing_ok=True)
        finally:
            os.close(fd)

    def drop_ballast(self) -> bool:
        """Free the reserved space; True when there was some."""
        path = self.folder / "ballast"
        there = path.exists()
        path.unlink(missing_ok=True)
        return there

    # Trash

    def keep(self, task: str, folder: int, name: bytes, label: str) -> tuple[str, str, State]:
        """Move a displaced file out of the workspace; returns (name in the trash, backup hash, its state).

        Across file systems a file's bytes are stored and a link's text is returned in the state.

        Raises:
            OSError: it cannot be moved (a folder across file systems, say); it stays where it is.
            StoreFull: its bytes cannot be stored; it stays where it is.
        """
        state = observe(folder, name)
        trash = self._open_trash(task)
        target = _free_name(trash, label)
        try:
            calls.rename(folder, name, trash, target)
        except OSError as error:
            if error.errno != errno.EXDEV or state.kind not in ("file", "link"):
                raise
        else:
            return os.fsdecode(target), "", state
        sha = ""
        if state.kind == "file":
            fd = open_file(folder, name)
            try:
                sha, _ = self.store.put_fd(fd)
            finally:
                os.close(fd)
            self.store.sync()
        calls.unlink(folder, name)
        return "", sha, state

    def find_kept(self, task: str, identity: tuple[int, int]) -> tuple[int, bytes] | None:
        """Return (folder, name) of a displaced file in a task's trash by its device and inode."""
        if not (self.folder / "trash" / task).is_dir():
            return None
        trash = self._open_trash(task)
        for name in map(os.fsencode, os.listdir(trash)):
            info = os.stat(name, dir_fd=trash, follow_symlinks=False)
            if (info.st_dev, info.st_ino) == identity:
                return trash, name
        return None

    def _open_trash(self, task: str) -> int:
        if task not in self._trash:
            for folder in (self.folder / "trash", self.folder / "trash" / task):
                make_private(folder)
            self._trash[task] = os.open(self.folder / "trash" / task, _DIR)
        return self._trash[task]


def _free_name(folder: int, label: str) -> bytes:
    name, number = label, 1
    while True:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return name.encode()
        number += 1
        name = f"{label}.{number}"


def _key(root: Root, info: os.stat_result) -> str:
    text = b"%s\0%d\0%d" % (os.fsencode(root.path), info.st_dev, info.st_ino)
    return hashlib.sha256(text).hexdigest()[:16]


def _holder(fd: int) -> Owner:
    try:
        return msgspec.json.decode(os.pread(fd, 4096, 0), type=Owner)
    except (OSError, msgspec.DecodeError):
        return Owner(0, 0, "")


def _write_holder(fd: int, owner: Owner) -> None:
    # Only a hint for the message of the next one; the lock itself is the flock, so a full disk changes nothing.
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, msgspec.json.encode(owner), 0)
    except OSError:
        return
