"""The segment store: file contents by their SHA-256, appended to a few large files.

``seg/0000.seg`` starts with ``PSEG`` and a version; then records of ``u32 length | u8 flags | 32 bytes SHA-256 |
bytes``, little-endian. Many small contents cost one file and one ``fdatasync`` (packs of restic, bup and borg).
Nothing is ever written over. A record that a crash cut off ends its segment: it is not indexed, the next write opens
a new segment, and no byte is removed, so a damaged length in the middle cannot make good contents be cut away.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

from peri_tui.agent.rollback import calls
from peri_tui.agent.rollback.beneath import CHUNK
from peri_tui.agent.rollback.node import hash_fd
from peri_tui.config import make_private
from peri_tui.errors import RollbackError, StoreFull, ToolError

MAGIC: Final = b"PSEG" + struct.pack("<I", 1)
SEAL: Final = 256 << 20
LARGEST: Final = (1 << 32) - 1
_HEAD: Final = struct.Struct("<IB32s")
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BadBlob(RollbackError):
    """A stored content is missing or not what its hash says; it is never written anywhere."""


class _Place(NamedTuple):
    segment: int
    offset: int
    length: int


class SegmentStore:
    """Contents by hash. One writer (who holds the workspace's lock), any number of readers.

    Args:
        folder: where the segments are; made at the first ``put``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index: dict[str, _Place] = {}
        self._checked: set[str] = set()
        self._fds: dict[int, int] = {}
        self._writing: int | None = None
        self._end = 0
        self._dirty = False
        self._new_name = False
        self._next = 0
        for path in sorted(folder.glob("*.seg")) if folder.is_dir() else []:
            self._load(int(path.stem))

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._writing = None

    def __contains__(self, sha: str) -> bool:
        return sha in self._index

    # Reading

    def check(self, sha: str) -> None:
        """Read a content and compare its hash.

        Raises:
            BadBlob: missing or damaged.
        """
        if sha not in self._checked:
            self._stream(sha, None)
            self._checked.add(sha)

    def get(self, sha: str) -> bytes:
        """Return a content, its hash compared.

        Raises:
            BadBlob: missing or damaged.
        """
        found = bytearray()
        self._stream(sha, found)
        return bytes(found)

    def copy(self, sha: str, fd: int) -> None:
        """Write a content to an open file, in chunks, after its hash was compared.

        Raises:
            BadBlob: missing or damaged; then nothing was written.
        """
        self._stream(sha, None)
        place = self._index[sha]
        source, at, left = self._fds[place.segment], place.offset, place.length
        while left:
            chunk = os.pread(source, min(CHUNK, left), at)
            calls.write_all(fd, chunk)
            at, left = at + len(chunk), left - len(chunk)

    def _stream(self, sha: str, into: bytearray | None) -> None:
        place = self._index.get(sha)
        if place is None:
            raise BadBlob(f"backup {sha[:12]} is missing from {self._folder}", sha=sha)
        digest, at, left = hashlib.sha256(), place.offset, place.length
        while left and (chunk := os.pread(self._fds[place.segment], min(CHUNK, left), at)):
            digest.update(chunk)
            at, left = at + len(chunk), left - len(chunk)
            if into is not None:
                into += chunk
        if digest.hexdigest() != sha:
            raise BadBlob(f"backup {sha[:12]} in {self._name(place.segment)} is damaged", sha=sha)

    # Writing

    def put(self, data: bytes) -> str:
        """Append a content unless it is there (and good); returns its hash. Durable after ``sync``.

        Raises:
            StoreFull: no space; the store is as before.
        """
        sha = hashlib.sha256(data).hexdigest()
        if not self._has(sha):
            self._append(sha, len(data), [data])
        return sha

    def put_fd(self, fd: int) -> tuple[str, int]:
        """Append an open file's content in chunks; returns (hash, size). Durable after ``sync``.

        Raises:
            StoreFull: no space.
            ToolError: larger than the format can hold, or the file changed while it was read.
        """
        sha, size = hash_fd(fd)
        if size > LARGEST:
            raise ToolError(f"{size} bytes are more than a backup can hold ({LARGEST})")
        if not self._has(sha):
            self._append(sha, size, (os.pread(fd, min(CHUNK, size - at), at) for at in range(0, size, CHUNK)))
            self._checked.discard(sha)
            try:
                self.check(sha)
            except BadBlob:
                del self._index[sha]
                raise ToolError("the file changes while it is read") from None
        return sha, size

    def sync(self) -> None:
        """Make everything that was put durable.

        Raises:
            StoreFull: the disk could not take it.
        """
        if not self._dirty or self._writing is None:
            return
        try:
            calls.fdatasync(self._fds[self._writing])
            if self._new_name:
                self._sync_folder()
        except OSError as error:
            raise self._full(error) from None
        self._dirty = False

    def _has(self, sha: str) -> bool:
        # A backup is only as good as its bytes: one that is there already is read once before it is relied on.
        if sha in self._index:
            try:
                self.check(sha)
            except BadBlob:
                return False
            return True
        return False

    def _append(self, sha: str, size: int, chunks: object) -> None:
        try:
            fd = self._writable()
        except OSError as error:
            raise self._full(error) from None
        try:
            calls.write_all(fd, _HEAD.pack(size, 0, bytes.fromhex(sha)))
            written = 0
            for chunk in chunks:  # type: ignore[attr-defined]
                calls.write_all(fd, chunk)
                written += len(chunk)
            if written != size:
                raise ToolError("the file changes while it is read")
        except (OSError, ToolError) as error:
            os.ftruncate(fd, self._end)
            raise self._full(error) if isinstance(error, OSError) else error from None
        assert self._writing is not None
        self._index[sha] = _Place(self._writing, self._end + _HEAD.size, size)
        self._checked.add(sha)
        self._end += _HEAD.size + size
        self._dirty = True

    def _writable(self) -> int:
        if self._writing is not None and self._end < SEAL:
            return self._fds[self._writing]
        if self._writing is not None and self._dirty:
            calls.fdatasync(self._fds[self._writing])
        make_private(self._folder)
        number = self._next
        fd = calls.open_append(os.fsencode(self._name(number)), new=True)
        self._fds[number], self._writing, self._next = fd, None, number + 1
        calls.write_all(fd, MAGIC)
        self._writing, self._end = number, len(MAGIC)
        self._new_name = self._dirty = True
        return fd

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            calls.fsync(fd)
        finally:
            os.close(fd)
        self._new_name = False

    def _full(self, error: OSError) -> StoreFull:
        words = "no space left" if error.errno in _NO_SPACE else error.strerror
        return StoreFull(f"{self._folder}: backup not possible: {words}", errno=error.errno)

    # Opening

    def _name(self, number: int) -> Path:
        return self._folder / f"{number:04d}.seg"

    def _load(self, number: int) -> None:
        fd = os.open(self._name(number), os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._fds[number], self._next = fd, number + 1
        size = os.fstat(fd).st_size
        whole = os.pread(fd, len(MAGIC), 0) == MAGIC
        at = len(MAGIC)
        while whole and at < size:
            head = os.pread(fd, _HEAD.size, at)
            length = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else size
            whole = at + _HEAD.size + length <= size
            if whole:
                sha = _HEAD.unpack(head)[2].hex()
                self._index[sha] = _Place(number, at + _HEAD.size, length)
                at += _HEAD.size + length
        # Only a segment that ends with a whole record is written on.
        self._writing, self._end = (number, at) if whole else (None, 0)
