"""Which draft belongs to this screen: one a folder, so that the next start finds what a crash left.

Two screens on one folder must not write over each other: each holds a lock for its life, and the second one takes the
folder's second slot. A crash lets go of the lock, not of the draft.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Final

from peri_tui.client.drafts import Draft, DraftKeeper
from peri_tui.config import Paths
from peri_tui.core.ids import make_ulid

_SLOTS: Final = 64


def claim_draft(paths: Paths, workspace: Path, *, fallback: str = "") -> DraftKeeper:
    """Return the keeper of the first free draft of a folder, held until this process ends.

    Args:
        paths: the user's folders.
        workspace: the folder; told apart by its real path.
        fallback: the text to begin with where nothing was kept.
    """
    digest = hashlib.sha256(os.fsencode(os.path.realpath(workspace))).digest()[:10]
    for slot in range(_SLOTS):
        name = make_ulid(slot, digest)
        fd = os.open(paths.sessions / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            continue
        return _HeldKeeper(paths, name, fd, fallback)
    return _HeldKeeper(paths, make_ulid(_SLOTS, os.urandom(10)), -1, fallback)


class _HeldKeeper(DraftKeeper):
    """Keeps the lock's descriptor for its own life."""

    def __init__(self, paths: Paths, name: str, fd: int, fallback: str) -> None:
        super().__init__(paths, name)
        self._fd = fd
        self._fallback = fallback

    def load(self) -> Draft:
        """Return the kept draft, or the text to begin with."""
        draft = super().load()
        return draft if draft.text or draft.queued else Draft(text=self._fallback)
