"""What is under one name: the state that a journal records, a rollback compares and a proof re-reads."""

from __future__ import annotations

import errno
import hashlib
import os
import stat

import msgspec

from peri_tui.agent.rollback.beneath import CHUNK, Root, kind_of


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """One name's state.

    ``kind`` is none, file, dir, link, or another word of ``beneath.kind_of`` (never opened). ``sha`` is the SHA-256
    (hex) of a file's bytes, ``target`` a link's text, ``mode`` the permission bits, ``mtime`` in nanoseconds,
    ``xattrs`` the ``user.*`` attributes and the access list.
    """

    kind: str = "none"
    sha: str = ""
    size: int = 0
    mode: int = 0
    mtime: int = 0
    target: bytes = b""
    xattrs: dict[str, bytes] = {}
    dev: int = 0
    ino: int = 0
    nlink: int = 0
    uid: int = -1
    gid: int = -1

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode."""
        return self.dev, self.ino


NONE = State()


def same(one: State, other: State) -> bool:
    """Tell whether two states hold the same thing: type and bytes (or link text); not mode or times."""
    return one.kind == other.kind and one.sha == other.sha and one.target == other.target


def hash_fd(fd: int) -> tuple[str, int]:
    """Return (SHA-256 hex, number of bytes) of an open file from its start, in chunks of 1 MiB."""
    digest, size = hashlib.sha256(), 0
    while chunk := os.pread(fd, CHUNK, size):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def open_file(folder: int, name: bytes) -> int:
    """Open a regular file for reading, following nothing and never waiting for a pipe."""
    return os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=folder
    )


def observe(folder: int, name: bytes) -> State:
    """Return the state of a name in an open folder, hashing a file's bytes.

    Raises:
        OSError: it exists but cannot be read.
    """
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            return _observe_file(folder, name)
        if stat.S_ISLNK(info.st_mode):
            return make_state(info, target=os.readlink(name, dir_fd=folder))
        return make_state(info)
    except FileNotFoundError:
        return NONE


def observe_path(root: Root, rel: bytes) -> State:
    """Return the state of a name beneath the root; ``none`` also when its folder is missing or no folder."""
    try:
        with root.parent(rel) as (folder, name):
            return observe(folder, name)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return NONE
        raise


def _observe_file(folder: int, name: bytes) -> State:
    fd = open_file(folder, name)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return make_state(info)
        sha, size = hash_fd(fd)
        return make_state(info, sha=sha, size=size, xattrs=read_xattrs(fd))
    finally:
        os.close(fd)


def read_xattrs(fd: int) -> dict[str, bytes]:
    """Return the ``user.*`` attributes, none where the file system has none."""
    try:
        return {name: os.getxattr(fd, name) for name in sorted(os.listxattr(fd)) if name.startswith("user.")}
    except OSError:
        return {}


def _kept(name: str) -> bool:
    return (name.startswith("user.") and name.isprintable()) or name == "system.posix_acl_access"


def make_state(
    info: os.stat_result,
    *,
    sha: str = "",
    size: int = 0,
    target: bytes = b"",
    xattrs: dict[str, bytes] | None = None,
) -> State:
    """Return the state that a stat result and what was read beside it stand for."""
    return State(
        kind=kind_of(info.st_mode),
        sha=sha,
        size=size,
        mode=stat.S_IMODE(info.st_mode),
        mtime=info.st_mtime_ns,
        target=target,
        xattrs=xattrs or {},
        dev=info.st_dev,
        ino=info.st_ino,
        nlink=info.st_nlink,
        uid=info.st_uid,
        gid=info.st_gid,
    )
