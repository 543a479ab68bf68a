"""Every system call of this layer that changes or syncs a file, behind one probe.

In use the probe is ``None`` and costs one comparison. A crash test installs one that ends the process before the
n-th call, or raises ``ENOSPC``; so what is tested is the real order of the real calls. Reads are not listed: ending
before a read is ending before the next change.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

Probe = Callable[[str, tuple[Any, ...]], None]

_AT_FDCWD: Final = -100
_NOREPLACE: Final = 1
_EXCHANGE: Final = 2
_RENAMEAT2: Final = {"x86_64": 316, "aarch64": 276, "riscv64": 276, "ppc64le": 357, "s390x": 347}
_UNSUPPORTED: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_probe: Probe | None = None


def set_probe(probe: Probe | None) -> None:
    """Call ``probe(name, arguments)`` before every call from now on (tests only); ``None`` takes it away."""
    global _probe
    _probe = probe


def _step(name: str, *args: Any) -> None:
    if _probe is not None:
        _probe(name, args)


def create(folder: int, name: bytes, mode: int = 0o600) -> int:
    """Create a file that was not there; returns its descriptor."""
    _step("create", folder, name)
    return os.open(name, _CREATE, mode, dir_fd=folder)


def open_append(path: bytes, *, new: bool) -> int:
    """Open a store or journal file for appending, created when ``new`` (then it must not exist)."""
    _step("open", path)
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte."""
    _step("write", fd, data)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write every byte at an offset."""
    _step("pwrite", fd, data, offset)
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def truncate(fd: int, size: int) -> None:
    """Cut a file."""
    _step("truncate", fd, size)
    os.ftruncate(fd, size)


def allocate(fd: int, size: int) -> None:
    """Reserve the space of a file."""
    _step("allocate", fd, size)
    os.posix_fallocate(fd, 0, size)


def fdatasync(fd: int) -> None:
    """Make a file's bytes durable."""
    _step("fdatasync", fd)
    os.fdatasync(fd)


def fsync(fd: int) -> None:
    """Make a file or folder durable."""
    _step("fsync", fd)
    os.fsync(fd)


def syncfs(fd: int) -> None:
    """Make everything of the file system of ``fd`` durable; one call for a whole batch."""
    _step("syncfs", fd)
    if _libc.syncfs(fd) != 0:
        raise _failed("syncfs")


def fchmod(fd: int, mode: int) -> None:
    """Set the mode bits."""
    _step("fchmod", fd, mode)
    os.fchmod(fd, mode)


def fchown(fd: int, uid: int, gid: int) -> None:
    """Give a file to its former owner where that is allowed; -1 and our own ids change nothing."""
    info = os.fstat(fd)
    if uid < 0 or (info.st_uid, info.st_gid) == (uid, gid):
        return
    _step("fchown", fd, uid, gid)
    with suppress(PermissionError):
        os.fchown(fd, uid, gid)


def set_times(fd: int, mtime_ns: int) -> None:
    """Set the modification time to the nanosecond; the access time stays."""
    _step("utimens", fd, mtime_ns)
    os.utime(fd, ns=(os.fstat(fd).st_atime_ns, mtime_ns))


def set_link_times(folder: int, name: bytes, mtime_ns: int) -> None:
    """Set the modification time of a link itself."""
    _step("utimens", folder, name, mtime_ns)
    os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)


def setxattr(fd: int, name: str, value: bytes) -> None:
    """Set one extended attribute."""
    _step("setxattr", fd, name)
    os.setxattr(fd, name, value)


def unlink(folder: int, name: bytes) -> None:
    """Remove a name."""
    _step("unlink", folder, name)
    os.unlink(name, dir_fd=folder)


def symlink(target: bytes, folder: int, name: bytes) -> None:
    """Make a link."""
    _step("symlink", target, folder, name)
    os.symlink(target, name, dir_fd=folder)


def mkdir(folder: int, name: bytes) -> None:
    """Make a folder with the user's usual mode."""
    _step("mkdir", folder, name)
    os.mkdir(name, 0o777, dir_fd=folder)


def rmdir(folder: int, name: bytes) -> None:
    """Remove a folder, only when empty."""
    _step("rmdir", folder, name)
    os.rmdir(name, dir_fd=folder)


def rename(folder: int, name: bytes, to_folder: int, to_name: bytes) -> None:
    """Rename within a file system (``EXDEV`` otherwise)."""
    _step("rename", folder, name, to_folder, to_name)
    os.rename(name, to_name, src_dir_fd=folder, dst_dir_fd=to_folder)


def link(folder: int, name: bytes, to_folder: int, to_name: bytes) -> None:
    """Give a file a second name (``EXDEV`` across file systems)."""
    _step("link", folder, name, to_folder, to_name)
    os.link(name, to_name, src_dir_fd=folder, dst_dir_fd=to_folder, follow_symlinks=False)


def move_new(folder: int, name: bytes, to_name: bytes) -> None:
    """Rename inside a folder; ``FileExistsError`` if the new name is taken: nothing is ever replaced."""
    _step("move_new", folder, name, to_name)
    if _renameat2(folder, name, to_name, _NOREPLACE):
        return
    # Without the flag: a second name fails on a taken one too. Folders cannot be linked, so this raises for them.
    os.link(name, to_name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    os.unlink(name, dir_fd=folder)


def exchange(folder: int, one: bytes, other: bytes) -> None:
    """Swap two names of a folder in one step, so what was displaced can be looked at, and given back.

    Where the file system cannot (NFS, some FUSE): the displaced file gets a second name first, then the new one is
    renamed over it; weaker, as a save between the two is lost, but the looked-at bytes are not.
    """
    _step("exchange", folder, one, other)
    if _renameat2(folder, one, other, _EXCHANGE):
        return
    aside = one + b".o"
    os.link(other, aside, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    os.rename(one, other, src_dir_fd=folder, dst_dir_fd=folder)
    os.rename(aside, one, src_dir_fd=folder, dst_dir_fd=folder)


def _renameat2(folder: int, name: bytes, to_name: bytes, flag: int) -> bool:
    """True when done, False when the system cannot."""
    if hasattr(_libc, "renameat2"):
        result = _libc.renameat2(folder, name, folder, to_name, flag)
    elif platform.machine() in _RENAMEAT2:
        result = _libc.syscall(_RENAMEAT2[platform.machine()], folder, name, folder, to_name, flag)
    else:
        return False
    if result == 0:
        return True
    if ctypes.get_errno() in _UNSUPPORTED:
        return False
    raise _failed(os.fsdecode(to_name))


def _failed(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), name)
