"""The write-ahead journal of one task: what was there before, what the task put there, and how it ended.

One line a record: CRC-32 of the JSON (8 hex digits), a space, the JSON, a newline. A line without its newline at the
end of the file was cut by a crash and counts as absent (nothing acts on a record before it is durable). Any other
line that does not match its CRC is damage: reading stops there and says at which byte.

The file is locked (``flock``) by its writer from creation to end, so a free lock says that the writer is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from peri_tui.agent.rollback import calls
from peri_tui.agent.rollback.node import State
from peri_tui.errors import JournalDamaged, StoreFull

VERSION: Final = 1
_FRAME: Final = 9


class Record(msgspec.Struct, omit_defaults=True, tag_field="k"):
    """Base of all records."""


_R = TypeVar("_R", bound=Record)


class PathRecord(Record, kw_only=True):
    """A record about one name: ``p`` when it is UTF-8, else ``pb`` (base64 in the JSON)."""

    p: str = ""
    pb: bytes = b""

    @property
    def path(self) -> bytes:
        """The name, relative to the workspace."""
        return self.pb or self.p.encode()

    def named(self, path: bytes) -> Self:
        """Set the name and return the record."""
        try:
            self.p = path.decode()
        except UnicodeDecodeError:
            self.pb = path
        return self


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who writes a journal: boot id, pid and start time (clock ticks) name one process for ever."""

    pid: int
    start: int
    boot: str
    instance: str = ""


class Begin(PathRecord, tag="begin"):
    """First record; ``path`` is the workspace's real path. ``wall`` in nanoseconds."""

    version: int = VERSION
    dev: int = 0
    ino: int = 0
    task: str = ""
    owner: Owner = Owner(0, 0, "")
    wall: int = 0
    policy: str = "restore"


class Intent(PathRecord, tag="intent"):
    """The task will make ``path`` from ``pre`` to ``post``. ``folder``: the folder's mtime before, in ns."""

    seq: int
    pre: State
    post: State
    in_place: bool = False
    folder: int = 0


class Done(Record, tag="done"):
    """Intent ``seq`` is in place; ``folder``: the folder's mtime after."""

    seq: int
    folder: int = 0


class Void(Record, tag="void"):
    """Intent ``seq`` was given up, nothing of it is in place."""

    seq: int
    why: str = ""


class Seen(PathRecord, tag="seen"):
    """A command changed ``path``, which the task had changed before, to ``state`` (its bytes are stored).

    ``folder``: the folder's mtime after the command.
    """

    seq: int
    state: State
    folder: int = 0


class WindowOpened(Record, tag="win_open"):
    """A command may change files from now on. ``wall``: clock of the file stamps, in ns."""

    seq: int
    wall: int


class Changed(PathRecord, tag="changed"):
    """One path that differs after a command; ``change`` is added, modified or deleted."""

    change: str = "modified"


class WindowClosed(Record, tag="win_close"):
    """The command of window ``seq`` is over; ``notes`` say what could not be compared."""

    seq: int
    changes: list[Changed] = []
    notes: list[str] = []


class RollbackBegun(Record, tag="rb_begin"):
    """Files are being put back: ``mode`` is rollback, recover or undo; ``folders`` the mtimes to give back."""

    mode: str
    folders: list[tuple[bytes, int]] = []


class Displaced(PathRecord, tag="displaced"):
    """What was taken out of ``path`` is kept: ``trash`` (a name in the task's trash) or ``sha`` (a backup)."""

    trash: str = ""
    sha: str = ""
    target: bytes = b""
    why: str = ""


class RollbackEnded(Record, tag="rb_end"):
    """The proof of a rollback, as reported. Not ``complete``: it is tried again by a recovery."""

    complete: bool
    digest: str = ""
    restored: int = 0
    conflicts: list[str] = []
    blocked: list[str] = []


class Committed(Record, tag="commit"):
    """The task ended and keeps its files."""


AnyRecord = (
    Begin | Intent | Done | Void | Seen | WindowOpened | WindowClosed | RollbackBegun | Displaced
    | RollbackEnded | Committed
)  # fmt: skip

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord)


@dataclass(frozen=True, slots=True)
class Story:
    """A journal as read: its records, the end of the last whole line, and the byte of the damage if there is one."""

    records: list[AnyRecord]
    end: int
    damage: int | None = None

    @property
    def begin(self) -> Begin | None:
        """The first record, None if even that is missing."""
        first = self.records[0] if self.records else None
        return first if isinstance(first, Begin) else None

    @property
    def ended(self) -> str:
        """``""`` while something is left to do, else committed, restored or undone."""
        state, mode = "", "rollback"
        for record in self.records:
            if isinstance(record, Committed):
                state = "committed"
            elif isinstance(record, RollbackBegun):
                state, mode = "", record.mode
            elif isinstance(record, RollbackEnded) and record.complete:
                state = "undone" if mode == "undo" else "restored"
        return state

    @property
    def undoing(self) -> bool:
        """True when the last rollback that began is an undo of a finished task."""
        modes = [record.mode for record in self.records if isinstance(record, RollbackBegun)]
        return bool(modes) and modes[-1] == "undo"


def encode(record: Record) -> bytes:
    """Return a record as its line."""
    body = _encoder.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read(path: Path) -> Story:
    """Return what a journal tells, up to its end or to the damage.

    Raises:
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    records: list[AnyRecord] = []
    at = 0
    while (newline := data.find(b"\n", at)) >= 0:
        line = data[at:newline]
        record = _decode(line)
        if record is None:
            return Story(records, at, damage=at)
        records.append(record)
        at = newline + 1
    return Story(records, at)


def _decode(line: bytes) -> AnyRecord | None:
    body = line[_FRAME:]
    if line[:_FRAME] != b"%08x " % zlib.crc32(body):
        return None
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError:
        return None


def refuse_damaged(path: Path, story: Story) -> None:
    """Raise for a journal that is damaged in its middle.

    Raises:
        JournalDamaged: names file and byte.
    """
    if story.damage is not None:
        raise JournalDamaged(f"{path}: damaged at byte {story.damage}", offset=story.damage, path=str(path))


class Journal:
    """An open journal: appends records, durable when asked. Holds the file's lock until ``close``."""

    def __init__(self, path: Path, fd: int, end: int) -> None:
        self.path = path
        self._fd = fd
        self._end = end

    @classmethod
    def create(cls, path: Path, begin: Begin) -> Journal:
        """Make a new journal with its first record, durable together with its name.

        Raises:
            StoreFull: it cannot be made; nothing is left of it.
        """
        try:
            fd = calls.open_append(os.fsencode(path), new=True)
        except OSError as error:
            raise StoreFull(f"{path}: journal not possible: {error.strerror}", errno=error.errno) from None
        journal = cls(path, fd, 0)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            journal.append(begin, sync=True)
            sync_folder(path.parent)
        except (OSError, StoreFull) as error:
            path.unlink(missing_ok=True)
            journal.close()
            raise StoreFull(f"{path}: journal not possible: {error}") from None
        return journal

    @classmethod
    def resume(cls, path: Path) -> tuple[Journal, Story] | None:
        """Open a journal that was left, a cut last line taken off; None while its writer lives.

        After damage in the middle the records before it are returned and nothing is cut: new records follow the
        damaged part, where no reader looks, so the file stays as evidence.

        Raises:
            OSError: it cannot be opened.
        """
        fd = calls.open_append(os.fsencode(path), new=False)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            story = read(path)
            if story.damage is None and os.fstat(fd).st_size > story.end:
                calls.truncate(fd, story.end)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return cls(path, fd, os.fstat(fd).st_size), story

    def append(self, *records: Record, sync: bool) -> None:
        """Write records in one go.

        Raises:
            StoreFull: they could not be written; the journal is as before.
        """
        data = b"".join(map(encode, records))
        try:
            calls.write_all(self._fd, data)
            if sync:
                calls.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, self._end)
            words = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise StoreFull(f"{self.path}: journal not possible: {words}", errno=error.errno) from None
        self._end += len(data)

    def story(self) -> Story:
        """Read the journal again from the disk."""
        return read(self.path)

    def remove(self) -> None:
        """Take the file away (nothing was touched)."""
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    finally:
        os.close(fd)


def of_kind(records: Sequence[AnyRecord], kind: type[_R]) -> list[_R]:
    """Return the records of one kind, in order."""
    return [record for record in records if isinstance(record, kind)]
