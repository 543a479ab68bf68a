"""The workspace as a set of names beneath one open folder: no path given to it can read or change anything outside.

Every operation walks from the root's descriptor, one component at a time, with ``O_NOFOLLOW``. A symbolic link that
stays inside is resolved once, by reading it, and the resolved name is walked again without following anything; a
link put in the way between the two is refused. The technique is the one of ``openat2(RESOLVE_BENEATH)``, done by
hand so that it works on every kernel and gives messages that name the path.

Names are bytes inside and ``str`` (``os.fsdecode``) at the edge, so a name that is not UTF-8 survives.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from peri_tui.errors import InputError, OutsideWorkspace, ToolError

PathLike = str | bytes | os.PathLike[str]

MAX_LINKS: Final = 40
CHUNK: Final = 1 << 20
_DIR: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS: Final = {
    stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


class StatKey(NamedTuple):
    """What says that a file is still the one that was read (``ctime`` cannot be forged back, ``mtime`` can)."""

    dev: int
    ino: int
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class FileRead:
    """A regular file's bytes, what ``fstat`` said of it, and the SHA-256 of the bytes (hex)."""

    data: bytes
    key: StatKey
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder; ``kind`` is file, dir, link, fifo, socket or device, ``size`` in bytes."""

    name: str
    kind: str
    size: int


def kind_of(mode: int) -> str:
    """Return the word for an ``st_mode``: file, dir, link, fifo, socket, device."""
    return _KINDS.get(stat.S_IFMT(mode), "device")


def stat_key(info: os.stat_result) -> StatKey:
    """Return the comparable part of a stat result."""
    return StatKey(info.st_dev, info.st_ino, info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def show(path: PathLike) -> str:
    """Return a path as one printable line: control characters and bytes that are not UTF-8 are escaped."""
    text = os.fsdecode(path)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text) or "''"


class Root:
    """The workspace, held by an open descriptor for as long as this object lives.

    Args:
        path: an existing folder; links on the way to it are resolved here, once.

    Raises:
        InputError: it is missing, not a folder or unreadable; the message names it.
    """

    def __init__(self, path: PathLike) -> None:
        self._given = os.path.abspath(os.fsencode(path))
        try:
            real = os.path.realpath(self._given, strict=True)
            self.fd = os.open(real, _DIR)
        except OSError as error:
            raise InputError(f"{show(path)}: cannot be used as workspace: {error.strerror}") from None
        self._real = real
        self.path = Path(os.fsdecode(real))

    def close(self) -> None:
        """Close the descriptor; the object cannot be used after."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Root:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Names

    def relative(self, path: PathLike) -> bytes:
        """Return ``path`` relative to the root, by its text alone; the root itself is ``b""``.

        Raises:
            ToolError: empty, or with a NUL.
            OutsideWorkspace: absolute and not beneath the root, or with ``..`` in it.
        """
        raw = os.fsencode(path)
        if not raw:
            raise ToolError("the path is empty")
        if b"\0" in raw:
            raise ToolError(f"{show(raw)}: a path cannot hold a NUL")
        if raw.startswith(b"/"):
            raw = self._inside(raw, raw)
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        if b".." in parts:
            raise OutsideWorkspace(f"{show(path)}: '..' is not allowed; name it from the workspace's root")
        return b"/".join(parts)

    def resolve(self, path: PathLike, *, last: bool = True) -> bytes:
        """Return the relative name that ``path`` stands for, links that stay inside resolved.

        Args:
            path: relative to the root, or absolute beneath it. The last component need not exist.
            last: follow a link that is the last component too.

        Raises:
            OutsideWorkspace: a link leaves the workspace.
            ToolError: a loop of links, or a component before the last that is no folder.
        """
        done: list[bytes] = []
        todo = self.relative(path).split(b"/")[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not done:
                    self._leaves(path)
                done.pop()
                continue
            target = self._readlink([*done, part], path) if todo or last else None
            if target is None:
                done.append(part)
                continue
            links += 1
            if links > MAX_LINKS:
                raise ToolError(f"{show(path)}: too many links, or a loop of them")
            if target.startswith(b"/"):
                target, done = self._inside(target, os.fsencode(path)), []
            todo += target.split(b"/")[::-1]
        return b"/".join(done)

    def _inside(self, absolute: bytes, asked: bytes) -> bytes:
        for root in (self._real, self._given):
            prefix = root.rstrip(b"/") + b"/"
            if absolute == root or (absolute + b"/").startswith(prefix):
                return absolute[len(prefix) :] or b"."
        self._leaves(asked)

    def _leaves(self, path: PathLike) -> NoReturn:
        raise OutsideWorkspace(f"{show(path)}: outside the workspace {show(self._real)}")

    def _readlink(self, parts: list[bytes], asked: PathLike) -> bytes | None:
        """Return the target if the (already resolved) name is a link, None if it is not one or is missing."""
        try:
            with self.parent(b"/".join(parts)) as (folder, name):
                return os.readlink(name, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
                return None
            raise ToolError(f"{show(asked)}: {error.strerror}") from None

    # Descriptors; these two raise OSError, for callers that tell the cases apart

    def open_dir(self, rel: bytes) -> int:
        """Return a new descriptor of the folder ``rel`` (resolved, relative). Follows no link: ``ELOOP``/``ENOTDIR``."""
        fd = os.open(b".", _DIR, dir_fd=self.fd)
        for part in rel.split(b"/") if rel else []:
            try:
                inner = os.open(part, _DIR, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
        return fd

    @contextmanager
    def parent(self, rel: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (descriptor of the folder that holds ``rel``, last name), for the ``*at`` calls."""
        head, _, name = rel.rpartition(b"/")
        fd = self.open_dir(head)
        try:
            yield fd, name or b"."
        finally:
            os.close(fd)

    # What tools use

    def read(self, path: PathLike, limit: int) -> FileRead:
        """Return the bytes of a regular file of at most ``limit`` bytes.

        Raises:
            OutsideWorkspace: the path, or a link in it, leaves the workspace.
            ToolError: missing, not a regular file (nothing else is ever opened for good: a pipe cannot block),
                larger than ``limit`` or unreadable; the message names the path.
        """
        rel = self.resolve(path)
        with _named(path), self.parent(rel) as (folder, name):
            self._refuse_special(os.stat(name, dir_fd=folder, follow_symlinks=False), path)
            fd = os.open(name, _FILE, dir_fd=folder)
            try:
                return self._read_open(fd, path, limit)
            finally:
                os.close(fd)

    def _read_open(self, fd: int, path: PathLike, limit: int) -> FileRead:
        info = os.fstat(fd)
        self._refuse_special(info, path)
        if info.st_size > limit:
            raise ToolError(f"{show(path)}: {info.st_size} bytes, more than the limit of {limit}")
        data = bytearray()
        while len(data) <= limit and (chunk := os.read(fd, min(CHUNK, limit + 1 - len(data)))):
            data += chunk
        if len(data) > limit:
            raise ToolError(f"{show(path)}: more than the limit of {limit} bytes")
        return FileRead(bytes(data), stat_key(info), hashlib.sha256(data).hexdigest())

    def _refuse_special(self, info: os.stat_result, path: PathLike) -> None:
        kind = kind_of(info.st_mode)
        if kind == "link":
            raise OutsideWorkspace(f"{show(path)}: became a link while it was opened")
        if kind != "file":
            raise ToolError(f"{show(path)}: not a regular file but a {'folder' if kind == 'dir' else kind}")

    def lstat(self, path: PathLike) -> os.stat_result:
        """Return the stat of the name itself: a link as the last component is not followed.

        Raises:
            OutsideWorkspace, ToolError: as ``read``; also for a missing name.
        """
        rel = self.resolve(path, last=False)
        with _named(path), self.parent(rel) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def exists(self, path: PathLike) -> bool:
        """Tell whether the name is there (a dangling link is)."""
        rel = self.resolve(path, last=False)
        with suppress(FileNotFoundError, NotADirectoryError), _named(path, missing=True):
            with self.parent(rel) as (folder, name):
                os.stat(name, dir_fd=folder, follow_symlinks=False)
            return True
        return False

    def listdir(self, path: PathLike = b".") -> list[Entry]:
        """Return the entries of a folder, sorted by the bytes of their names.

        Raises:
            OutsideWorkspace, ToolError: as ``read``; also when it is not a folder.
        """
        rel = self.resolve(path)
        found = []
        with _named(path):
            fd = self.open_dir(rel)
            try:
                for name in sorted(os.fsencode(name) for name in os.listdir(fd)):
                    with suppress(FileNotFoundError):  # gone since it was listed
                        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                        found.append(Entry(os.fsdecode(name), kind_of(info.st_mode), info.st_size))
            finally:
                os.close(fd)
        return found


@contextmanager
def _named(path: PathLike, *, missing: bool = False) -> Iterator[None]:
    """Turn an ``OSError`` into a one-line ``ToolError`` that names the path."""
    try:
        yield
    except OSError as error:
        if missing and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise
        if error.errno == errno.ELOOP:
            raise OutsideWorkspace(f"{show(path)}: a link was put in the way") from None
        words = "is missing" if error.errno == errno.ENOENT else str(error.strerror).lower()
        raise ToolError(f"{show(path)}: {words}", errno=error.errno) from None
