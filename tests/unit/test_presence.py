"""Presence: when the agent is orphaned, adopted, and gone for good."""

from __future__ import annotations

import asyncio
import os

import pytest

from peri_tui.agent.presence import Presence

pytestmark = pytest.mark.unit


class Watched:
    """A presence and what it called."""

    def __init__(self, *, busy: bool = True, grace_s: float = 3600) -> None:
        self.gone = asyncio.Event()
        self.changes: list[bool] = []
        self.busy = busy
        self.presence = Presence(self.gone.set, lambda: self.busy, self.changes.append, grace_s=grace_s)
        self.read, self.write = os.pipe()
        self.presence.watch_pipe(self.read)

    async def lose_pipe(self) -> None:
        os.close(self.write)
        async with asyncio.timeout(5):
            while not self.presence.orphaned and not self.gone.is_set():
                await asyncio.sleep(0)

    def close(self) -> None:
        self.presence.close()
        os.close(self.read)


async def test_while_the_pipe_is_open_a_lost_connection_means_nothing() -> None:
    watched = Watched()
    watched.presence.client_came()
    watched.presence.client_left()
    assert (watched.presence.orphaned, watched.changes) == (False, [])
    os.close(watched.write)
    watched.close()


async def test_with_the_pipe_and_all_connections_gone_it_is_orphaned_until_somebody_comes() -> None:
    watched = Watched()
    await watched.lose_pipe()
    assert watched.changes == [True]
    watched.presence.client_came()
    assert (watched.presence.orphaned, watched.changes) == (False, [True, False])
    watched.presence.client_left()
    assert watched.changes == [True, False, True]
    assert not watched.gone.is_set()
    watched.close()


async def test_a_living_connection_outlives_the_pipe() -> None:
    watched = Watched()
    watched.presence.client_came()
    os.close(watched.write)
    for _ in range(20):
        await asyncio.sleep(0)
    assert watched.changes == []
    watched.presence.client_left()
    assert watched.changes == [True]
    watched.close()


async def test_nobody_came_in_time() -> None:
    watched = Watched(grace_s=0.01)
    await watched.lose_pipe()
    async with asyncio.timeout(5):
        await watched.gone.wait()
    watched.close()


async def test_an_orphan_with_nothing_to_do_leaves_at_once_also_when_its_last_task_ends() -> None:
    idle = Watched(busy=False)
    await idle.lose_pipe()
    async with asyncio.timeout(5):
        await idle.gone.wait()
    idle.close()
    busy = Watched()
    await busy.lose_pipe()
    busy.busy = False
    busy.presence.work_ended()
    async with asyncio.timeout(5):
        await busy.gone.wait()
    busy.close()
