"""One SQLite connection on one thread of its own.

A commit cannot be cancelled, because it runs in a thread. So an awaiter that is cancelled leaves at once, the commit
goes on, and the thread's order makes every later question come after it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from peri_tui.errors import StoreUnavailable

T = TypeVar("T")

# Switching a fresh file to WAL does not wait for other connections by itself, so opening tries again.
_OPEN_TRIES: Final = 40


class SqliteThread:
    """A file in WAL mode; work is done in the order in which it was asked for.

    Args:
        path: the file; its folder must exist. Created with mode 0600.
        busy_ms: how long one operation waits for another process before it gives up.
    """

    def __init__(self, path: Path, *, busy_ms: int) -> None:
        self.path = path
        self._busy_ms = busy_ms
        self._db: sqlite3.Connection | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peri-store")

    async def open(self, create: Callable[[sqlite3.Connection], None]) -> None:
        """Connect, and run ``create`` in a transaction.

        Raises:
            StoreUnavailable: the file cannot be opened or is no database.
        """
        await self._in_thread(lambda: self._connect(create))

    async def close(self) -> None:
        """Finish what was asked, then disconnect. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            await self._in_thread(self._disconnect)
            self._thread.shutdown(wait=False)

    async def write(self, work: Callable[[sqlite3.Connection], T], *, synced: bool = False) -> T:
        """Run ``work`` in a transaction that has the file for itself; ``synced``: on the disk when this returns.

        Raises:
            StoreUnavailable: nothing was changed. And what ``work`` raises: nothing was changed.
        """
        return await self._in_thread(lambda: _transact(self._connected(), work, synced))

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` outside a transaction.

        Raises:
            StoreUnavailable: the file does not answer.
        """
        return await self._in_thread(lambda: work(self._connected()))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            future = asyncio.get_running_loop().run_in_executor(self._thread, self._named, work)
        except RuntimeError:
            raise StoreUnavailable(f"{self.path}: the state store is closed") from None
        # Nobody may be left to hear of a failure when the awaiter was cancelled.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(future)

    def _named(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (sqlite3.Error, OSError) as error:
            raise StoreUnavailable(f"{self.path}: the state store does not answer: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreUnavailable(f"{self.path}: the state store is not open")
        return self._db

    def _connect(self, create: Callable[[sqlite3.Connection], None]) -> None:
        if self._db is not None:
            return
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        db = sqlite3.connect(self.path, isolation_level=None, timeout=self._busy_ms / 1000)
        try:
            _use_wal(db, self._busy_ms / 1000 / _OPEN_TRIES)
            db.execute("PRAGMA synchronous=NORMAL")
            _transact(db, create, synced=True)
        except BaseException:
            db.close()
            raise
        self._db = db

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _use_wal(db: sqlite3.Connection, pause_s: float) -> None:
    for attempt in range(_OPEN_TRIES):
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or attempt == _OPEN_TRIES - 1:
                raise
            time.sleep(pause_s)


def _transact(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], synced: bool) -> T:
    if synced:
        db.execute("PRAGMA synchronous=FULL")
    try:
        db.execute("BEGIN IMMEDIATE")
        try:
            result = work(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return result
    finally:
        if synced:
            db.execute("PRAGMA synchronous=NORMAL")
