"""Saves the draft and the queue while they change: in a thread, at most four times a second, the last state always."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from peri_tui.tui.ports import DraftKeeper

DELAY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class DraftText:
    """What was typed and not sent, and what waits."""

    text: str = ""
    queued: tuple[str, ...] = ()


class DraftSaver:
    """Debounces.

    Args:
        keeper: writes the file; blocks, so it runs in a thread.
        spawn: runs a coroutine as a task of the app.
        failed: told once when saving does not work.
    """

    def __init__(
        self,
        keeper: DraftKeeper,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        failed: Callable[[str], None],
    ) -> None:
        self._keeper = keeper
        self._spawn = spawn
        self._failed = failed
        self._wanted = DraftText()
        self._saved: DraftText | None = None
        self._busy = False
        self._told = False

    async def load(self) -> DraftText:
        """Return what a former run left; empty when it cannot be read."""
        try:
            draft = await asyncio.to_thread(self._keeper.load)
        except OSError as error:
            self._tell(error)
            return DraftText()
        self._saved = self._wanted = DraftText(draft.text, tuple(draft.queued))
        return self._wanted

    def changed(self, text: str, queued: tuple[str, ...]) -> None:
        """Note the present state; it is on disk within a quarter of a second."""
        self._wanted = DraftText(text, queued)
        if not self._busy and self._wanted != self._saved:
            self._busy = True
            self._spawn(self._save())

    async def _save(self) -> None:
        try:
            while self._wanted != self._saved:
                await asyncio.sleep(DELAY_S)
                await self.flush()
        finally:
            self._busy = False

    async def flush(self) -> None:
        """Save now what is not saved yet."""
        wanted = self._wanted
        if wanted == self._saved:
            return
        self._saved = wanted
        try:
            await asyncio.to_thread(self._keeper.save, wanted)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._failed(f"the draft cannot be kept: {error.strerror or error}")
