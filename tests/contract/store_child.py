"""A second process on the state store. ``complete``: completes the tasks named on standard input and says how it
went. ``append``: appends batches for ever and names the last durable number, until it is killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from peri_tui.agent.scheduler.store_sqlite import SqliteStore
from peri_tui.core.messages import Delta, TaskEnded
from peri_tui.core.states import TaskState
from peri_tui.errors import StateError


async def complete(store: SqliteStore) -> None:
    print("ready", flush=True)
    while line := sys.stdin.readline():
        task, version = line.split()
        end = TaskEnded(task=task, state="completed")
        try:
            await store.finish(task, TaskState.COMPLETED, end, version=int(version), epoch=1)
            print("completed", flush=True)
        except StateError as error:
            print(type(error).__name__, flush=True)


async def append(store: SqliteStore, task: str) -> None:
    while True:
        batch = [Delta(task=task, ch="text", part="p", text="x" * 200) for _ in range(20)]
        print((await store.append(task, batch, epoch=1))[-1].seq, flush=True)


async def main(mode: str, path: str, *rest: str) -> None:
    store = SqliteStore(Path(path))
    await store.open()
    try:
        await (append(store, *rest) if mode == "append" else complete(store))
    finally:
        await store.close()


asyncio.run(main(*sys.argv[1:]))
