"""The draft being typed and the queued prompts, kept on disk so that no crash takes them.

One small file a session, written whole beside the old one and renamed over it, so that a reader (the next start) finds
the old draft or the new one, never half of either.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from peri_tui.config import Paths, make_private
from peri_tui.core.ids import is_ulid
from peri_tui.core.messages import scrub
from peri_tui.errors import ConfigError, InputError


class Draft(msgspec.Struct, kw_only=True):
    """What the user has typed and not sent, and what waits to be sent."""

    text: str = ""
    queued: list[str] = []


class Unsent(Protocol):
    """Anything that looks like a ``Draft``."""

    @property
    def text(self) -> str:
        """The prompt as it stands."""

    @property
    def queued(self) -> Sequence[str]:
        """Prompts that wait, first one first."""


class DraftKeeper:
    """Loads and saves the draft of one session.

    Args:
        paths: the user's folders.
        session: the session's id.

    Raises:
        InputError: ``session`` is no id, so it names no file.
    """

    def __init__(self, paths: Paths, session: str) -> None:
        if not is_ulid(session):
            raise InputError(f"{session!r} is no session id")
        self._file = paths.sessions / f"{session}.draft.json"

    @property
    def file(self) -> Path:
        """Where the draft is."""
        return self._file

    def load(self) -> Draft:
        """Return the saved draft; an empty one if there is none, or if the file is damaged (it is kept aside)."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Draft)
        except OSError:
            return Draft()
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Whatever is in there was the user's: the next save must not destroy it.
            with contextlib.suppress(OSError):
                self._file.replace(self._file.with_suffix(".damaged"))
            return Draft()

    def save(self, draft: Unsent) -> None:
        """Save durably; blocks for the time of an ``fsync``, so call it in a thread.

        Raises:
            OSError: the disk is full or cannot be written; its text names the file. The draft before is untouched.
        """
        clean = Draft(text=scrub(draft.text), queued=[scrub(prompt) for prompt in draft.queued])
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            make_private(self._file.parent)
            self._write(temporary, msgspec.json.encode(clean))
            temporary.replace(self._file)
            self._sync_folder()
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise OSError(error.errno, f"{self._file}: the draft cannot be saved: {error.strerror}") from None
        except ConfigError as error:
            raise OSError(errno.EACCES, f"the draft cannot be saved: {error}") from None

    @staticmethod
    def _write(file: Path, data: bytes) -> None:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())

    def _sync_folder(self) -> None:
        fd = os.open(self._file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
