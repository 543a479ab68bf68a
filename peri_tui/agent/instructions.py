"""Instructions that a project brings along, and the user's word whether they may be read.

A project's ``AGENTS.md`` (else ``CLAUDE.md``) speaks to the model, so it is read only where the user said that the
folder is trusted; the default is no. An answer belongs to one folder: its real path, device and inode, so a folder
put in its place later is asked about again, and no parent, link or file in the workspace can give it. What is read
is data in the conversation, never a setting. ``.peri/config.toml`` is only named.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiofiles
import msgspec

from peri_tui.core.messages import scrub
from peri_tui.errors import ConfigError

NAMES: Final = ("AGENTS.md", "CLAUDE.md")
MAX_FILE: Final = 32 * 1024
MAX_ALL: Final = 96 * 1024
_PROJECT_CONFIG: Final = ".peri/config.toml"
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Instruction:
    """One file of instructions: its path relative to the repository's root, and at most ``MAX_FILE`` bytes of it."""

    path: str
    text: str


class TrustStore:
    """The user's answers, in one file (0600).

    Args:
        file: ``trust.json`` in the data folder; its folder exists and is private.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def known(self, workspace: Path) -> bool:
        """Tell whether the user answered for this folder, either way."""
        return _key(workspace) in self._load()

    def trusted(self, workspace: Path) -> bool:
        """Tell whether the user said yes for this folder."""
        entry = self._load().get(_key(workspace))
        return isinstance(entry, dict) and entry.get("trusted") is True

    def set(self, workspace: Path, trusted: bool) -> None:
        """Keep an answer, durably.

        Raises:
            ConfigError: the folder is gone or the file cannot be written.
        """
        key = _key(workspace)
        if not key:
            raise ConfigError(f"{workspace}: no such folder")
        answers = self._load()
        answers[key] = {"trusted": trusted, "at": int(time.time())}
        try:
            _replace(self._file, msgspec.json.format(msgspec.json.encode(answers)))
        except OSError as error:
            raise ConfigError(f"{self._file}: cannot be written: {error.strerror}") from None

    def _load(self) -> dict[str, Any]:
        # A missing, foreign or damaged file trusts nothing: the user is asked again.
        try:
            fd = os.open(self._file, _OPEN)
        except OSError:
            return {}
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
                return {}
            try:
                answers = msgspec.json.decode(file.read())
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return {}
        return answers if isinstance(answers, dict) else {}


def what_there_is(workspace: Path) -> list[str]:
    """Return the paths that trust would be about; names only, nothing is opened. Empty: nothing to ask."""
    found = [str(folder / name) for folder, name in _candidates(workspace)]
    config = _real(workspace) / _PROJECT_CONFIG
    return found + ([str(config)] if _is_own_file(config) else [])


async def read_instructions(workspace: Path, trust: TrustStore) -> list[Instruction]:
    """Return the instructions for a workspace, outermost first; empty where the folder is not trusted.

    Links are not followed, files of other users are left out, and what is too long is cut and says so.
    """
    if not trust.trusted(workspace):
        return []
    read: list[Instruction] = []
    left = MAX_ALL
    for folder, name in _candidates(workspace):
        text = await _read(folder / name, min(MAX_FILE, left))
        if text:
            left -= len(text.encode())
            read.append(Instruction(str(folder / name), text))
        if left <= 0:
            break
    return read


def _candidates(workspace: Path) -> Iterator[tuple[Path, str]]:
    for folder in _folders(_real(workspace)):
        for name in NAMES:
            if _is_own_file(folder / name):
                yield folder, name
                break


def _folders(workspace: Path) -> list[Path]:
    """Return the folders from the repository's root down to the workspace; only the workspace without one."""
    for depth, folder in enumerate((workspace, *workspace.parents)):
        if _is_own(folder / ".git"):
            return [*reversed(workspace.parents[:depth]), workspace]
    return [workspace]


def _is_own(path: Path) -> bool:
    # Somebody else's /tmp/.git must not make /tmp/AGENTS.md ours.
    try:
        return path.lstat().st_uid in (os.getuid(), 0)
    except OSError:
        return False


def _is_own_file(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_uid in (os.getuid(), 0)


async def _read(path: Path, limit: int) -> str:
    try:
        async with aiofiles.open(path, "rb", opener=lambda name, _: os.open(name, _OPEN)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            data = await file.read(limit + 1)
    except OSError:
        return ""
    text = scrub(data[:limit].decode("utf-8", "replace"))
    return text if len(data) <= limit else f"{text}\n[cut after {limit} bytes]"


def _real(workspace: Path) -> Path:
    return Path(os.path.realpath(workspace))


def _key(workspace: Path) -> str:
    real = _real(workspace)
    try:
        info = os.stat(real)
    except OSError:
        return ""
    return f"{real}|{info.st_dev}|{info.st_ino}"


def _replace(file: Path, data: bytes) -> None:
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(fresh, file)
