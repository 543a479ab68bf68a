"""The SQLite store against other processes, and against a file that does not do what it should."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peri_tui.agent.scheduler.store import CancelKind
from peri_tui.agent.scheduler.store_sqlite import SqliteStore
from peri_tui.core.messages import Delta, TaskEnded
from peri_tui.core.states import StopReason, TaskState
from peri_tui.errors import StoreUnavailable
from tests.contract.scheduling import bring, make_id, make_submit

pytestmark = pytest.mark.contract

CHILD = Path(__file__).with_name("store_child.py")


@contextmanager
def child(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(CHILD), *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_cancel_against_completion_of_another_process(tmp_path: Path) -> None:
    """The head start of the other process is steered to where both win, so that the race is really run."""
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    won: Counter[str] = Counter()
    with child("complete", str(tmp_path / "state.db")) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == "ready\n"
        head_start = 0.0
        for _ in range(300):
            row = await bring(store, TaskState.RUNNING)
            other.stdin.write(f"{row.task} {row.version}\n")
            other.stdin.flush()
            until = time.perf_counter() + head_start
            while time.perf_counter() < until:
                pass
            result = await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C")
            said = other.stdout.readline().strip()
            now = await store.get(row.task)
            assert now is not None
            assert now.version == row.version + 1
            events = await store.events(row.task)
            assert [event.seq for event in events] == [1, 2, 3]
            if result.kind is CancelKind.ACCEPTED:
                won["cancel"] += 1
                assert (now.state, said) == (TaskState.CANCELLING, "StaleVersion")
                head_start += 0.00005
            else:
                won["complete"] += 1
                assert (now.state, said) == (TaskState.COMPLETED, "completed")
                assert isinstance(events[-1], TaskEnded)
                head_start = max(0.0, head_start - 0.00005)
    await store.close()
    assert min(won["cancel"], won["complete"]) >= 20, won


async def test_a_killed_writer_leaves_a_dense_log(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.open()
    row = await bring(store, TaskState.RUNNING)
    await store.close()
    for round_ in range(3):
        with child("append", str(path), row.task) as writer:
            assert writer.stdout
            for _ in range(5 + 7 * round_):
                durable = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        again = SqliteStore(path)
        await again.open()
        now = await again.get(row.task)
        events = await again.events(row.task, limit=100_000)
        assert now is not None
        assert [event.seq for event in events] == list(range(1, now.last_seq + 1))
        assert now.last_seq >= durable
        await again.append(row.task, [Delta(task=row.task, ch="text", part="p", text="x")], epoch=1)
        await again.close()


async def test_two_processes_may_create_the_store_at_once(tmp_path: Path) -> None:
    stores = [SqliteStore(tmp_path / "state.db") for _ in range(8)]
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.submit(make_submit(), "A") for store in stores))
    assert len(await stores[0].tasks()) == 8
    for store in stores:
        await store.close()


async def test_the_file_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = SqliteStore(tmp_path / "state.db")
        await store.open()
        await bring(store, TaskState.RUNNING)
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    await store.close()
    assert modes == {"state.db": 0o600, "state.db-wal": 0o600, "state.db-shm": 0o600}


async def test_a_locked_store_is_unavailable_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, busy_ms=50)
    await store.open()
    row = await bring(store, TaskState.RUNNING)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C")
    assert await store.get(row.task) == row
    blocker.execute("ROLLBACK")
    blocker.close()
    assert (await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C")).first
    await store.close()


async def test_a_full_disk_is_unavailable_and_changes_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.open()
    row = await bring(store, TaskState.RUNNING)
    pages = await store._read(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
    await store._read(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone())
    big = [Delta(task=row.task, ch="text", part="p", text="x" * 100_000)]
    with pytest.raises(StoreUnavailable, match="full"):
        await store.append(row.task, big, epoch=1)
    assert await store.get(row.task) == row
    await store.close()


@pytest.mark.parametrize(
    "content", [b"this is no database, but long enough to look at" * 30, b"SQLite format 3\0junk"]
)
async def test_a_file_that_is_no_store_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match=r"state\.db"):
        await store.open()
    await store.close()
    assert path.read_bytes() == content


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match="format 99"):
        await store.open()
    await store.close()


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "none" / "state.db")
    with pytest.raises(StoreUnavailable, match="none"):
        await store.open()
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.get(make_id())
    await store.close()


async def test_a_read_only_store_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.open()
    row = await bring(store, TaskState.RUNNING)
    await store._read(lambda db: db.execute("PRAGMA query_only = ON").fetchone())
    with pytest.raises(StoreUnavailable, match="readonly"):
        await store.request_cancel(row.task, reason=StopReason.USER, cancel_id="C")
    assert (await store.get(row.task)) == row
    await store.close()
