"""What the tests of the process layer share: a registry that is checked at its end, and ways to start and to wait."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from peri_tui.agent.processes.spawn import Command, Ladder, Processes, child_env
from tests.doubles.process_driver import nasty
from tests.e2e.outside import marked, state_of

QUICK = Ladder(interrupt_s=0.3, terminate_s=0.2, confirm_s=5.0)
SLOW_MACHINE_S = 10.0


def make_marker() -> str:
    return f"mark-{uuid.uuid4().hex}"


@asynccontextmanager
async def registry(marker: str, **options: Any) -> AsyncIterator[Processes]:
    """A registry that must leave nothing behind."""
    found = Processes(**{"ladder": QUICK} | options)
    try:
        yield found
    finally:
        warden = found.warden_pid
        await found.close()
    assert marked(marker) == []
    assert warden is None or state_of(warden) == ""


async def run(registry: Processes, mode: str, marker: str, task: str = "T", **options: Any) -> Command:
    env = child_env(os.environ, task)
    return await registry.spawn(task, nasty(mode, marker), cwd="/", env=env, **options)


async def until(holds: Callable[[], object], timeout: float = SLOW_MACHINE_S) -> None:
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.005)


async def is_ready(command: Command) -> None:
    await until(lambda: "ready" in command.output.text())
