"""An agent process without a server: holds its lock, runs tasks that never end by themselves, until it is killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from peri_tui.agent.scheduler.ownership import Liveness
from peri_tui.agent.scheduler.scheduler import Scheduler
from peri_tui.agent.scheduler.store_sqlite import SqliteStore
from peri_tui.log import Log
from tests.contract.scheduling import FakeExecutor, make_submit


async def main(folder: Path, name: str, count: int) -> None:
    store, live = SqliteStore(folder / "state.db"), Liveness(folder / "instances")
    await store.open()
    live.hold(name)
    await store.register(live.describe(name, workspace="/w", socket="/s"))
    executor = FakeExecutor()
    scheduler = Scheduler(
        store,
        Log(folder / "log", folder, name),
        executor,
        instance=name,
        liveness=live,
        poll_s=0.05,
        concurrency=2,
    )
    scheduler.start()
    tasks = [(await scheduler.submit(make_submit())).task for _ in range(count)]
    await executor.until_started(*tasks[:2])
    print(*tasks, flush=True)
    for task in tasks[:2]:
        run = scheduler._table.get(task)
        assert run is not None
        await run.token.wait()
        print("stopped", task, flush=True)
    await asyncio.Event().wait()


asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
