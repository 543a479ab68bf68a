"""One edit of one name: look, and put in place. The order around it is the transaction's."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from typing import Final

import msgspec

from peri_tui.agent.rollback import calls, place
from peri_tui.agent.rollback.beneath import Root, show
from peri_tui.agent.rollback.journal import Intent
from peri_tui.agent.rollback.node import (
    NONE,
    State,
    hash_fd,
    make_state,
    observe,
    open_file,
    read_xattrs,
    same,
)
from peri_tui.agent.rollback.segments import SegmentStore
from peri_tui.errors import FileChanged, ToolError

IN_MEMORY: Final = 64 << 20
PREFIX: Final = b".peri-"


@dataclass(frozen=True, slots=True)
class Before:
    """What is under a name before an edit; ``data`` is None for no file, a link, or one over 64 MiB."""

    state: State
    data: bytes | None = None


def look(root: Root, rel: bytes) -> Before:
    """Return what is under a name.

    Raises:
        ToolError: a folder, pipe, socket or device.
        OSError: it cannot be read.
    """
    with root.parent(rel) as (folder, name):
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return Before(NONE)
        state = make_state(info)
        if state.kind == "link":
            return Before(observe(folder, name))
        if state.kind != "file":
            word = "folder" if state.kind == "dir" else state.kind
            raise ToolError(f"{show(rel)}: not a regular file but a {word}")
        return _look_file(folder, name)


def _look_file(folder: int, name: bytes) -> Before:
    fd = open_file(folder, name)
    try:
        info, xattrs = os.fstat(fd), read_xattrs(fd)
        if info.st_size > IN_MEMORY:
            sha, size = hash_fd(fd)
            return Before(make_state(info, sha=sha, size=size, xattrs=xattrs))
        data = b""
        while chunk := os.pread(fd, max(info.st_size - len(data), 0) + 1, len(data)):
            data += chunk
        sha = hashlib.sha256(data).hexdigest()
        return Before(make_state(info, sha=sha, size=len(data), xattrs=xattrs), data)
    finally:
        os.close(fd)


def missing_folders(root: Root, rel: bytes) -> list[bytes]:
    """Return the folders on the way to a name that are not there, outermost first.

    Raises:
        ToolError: something on the way is not a folder.
    """
    parts = rel.split(b"/")[:-1]
    for count in range(1, len(parts) + 1):
        prefix = b"/".join(parts[:count])
        with root.parent(prefix) as (folder, name):
            state = observe(folder, name) if not _is_folder(folder, name) else None
        if state is not None and state.kind == "none":
            return [b"/".join(parts[:n]) for n in range(count, len(parts) + 1)]
        if state is not None:
            raise ToolError(f"{show(prefix)}: not a folder but a {state.kind}")
    return []


def _is_folder(folder: int, name: bytes) -> bool:
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    return True


def refuse_name(rel: bytes, path: str | bytes) -> None:
    """Refuse the workspace itself and our own temporary names.

    Raises:
        ToolError: it is one of them.
    """
    if not rel:
        raise ToolError(f"{show(path)}: is the workspace itself")
    if rel.rpartition(b"/")[2].startswith(PREFIX):
        raise ToolError(f"{show(path)}: names that start with {PREFIX.decode()!r} are Peri's own")


def refuse_unexpected(before: State, path: str | bytes, data: bytes | None, expected: str | None) -> None:
    """Refuse an edit of a file that is not what the caller has seen.

    Raises:
        FileChanged: its hash is another, or it must be absent and is not.
        ToolError: there is nothing to delete.
    """
    if expected is not None and expected != before.sha:
        words = "does not exist any more" if before.kind == "none" else "changed since it was read"
        raise FileChanged(f"{show(path)}: {'exists already' if not expected else words}", sha=before.sha)
    if data is None and before.kind == "none":
        raise ToolError(f"{show(path)}: is missing")
    if data is not None and before.nlink > 1 and not before.mode & 0o200 and os.geteuid():
        raise ToolError(f"{show(path)}: is read-only and has {before.nlink} names")


def store_before(store: SegmentStore, root: Root, rel: bytes, before: Before) -> None:
    """Put a file's bytes into the store.

    Raises:
        FileChanged: it changed since it was looked at.
        StoreFull: no space.
    """
    if before.state.kind != "file":
        return
    if before.data is not None:
        store.put(before.data)
        return
    with root.parent(rel) as (folder, name):
        fd = open_file(folder, name)
        try:
            sha, _ = store.put_fd(fd)
        finally:
            os.close(fd)
    if sha != before.state.sha:
        raise FileChanged(f"{show(rel)}: changes while it is read")


def state_after(before: State, data: bytes | None, umask: int) -> State:
    """Return the state that an edit makes: mode, owner, attributes stay; the inode only when written in place."""
    if data is None:
        return NONE
    sha = hashlib.sha256(data).hexdigest()
    if before.kind == "file":
        after = msgspec.structs.replace(before, sha=sha, size=len(data), mtime=0)
        return after if before.nlink > 1 else msgspec.structs.replace(after, dev=0, ino=0)
    return State(kind="file", sha=sha, size=len(data), mode=0o666 & ~umask, nlink=1)


def put_in_place(
    folder: int, name: bytes, temp: bytes, intent: Intent, data: bytes | None, keep: place.Keep
) -> bool:
    """Do what an intent says; False when somebody else's save was met, which is in place again.

    True: what was displaced is under ``temp`` (nothing, for a new file or one written in place).

    Raises:
        OSError: it is not possible; the name is as before.
    """
    if data is None:
        return place.take_out(folder, name, temp, intent.pre, keep).ok
    if intent.in_place:
        return _write_in_place(folder, name, intent, data)
    place.write_temp(folder, temp, lambda fd: calls.write_all(fd, data), intent.post, sync=True)
    if intent.pre.kind == "none":
        return place.put_new(folder, name, temp).ok
    return place.swap_in(folder, name, temp, intent.post, intent.pre, keep).ok


def _write_in_place(folder: int, name: bytes, intent: Intent, data: bytes) -> bool:
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        info = os.fstat(fd)
        now = make_state(info, sha=hash_fd(fd)[0])
        if not same(now, intent.pre) or now.identity != intent.pre.identity:
            return False
        place.overwrite(fd, data, info.st_size)
        calls.fsync(fd)
    finally:
        os.close(fd)
    return True
