"""Stops commands that are hard to end, again and again, and counts what is left.

``python -m tests.doubles.sweep_driver REPEATS MODE[:N] ...`` prints one JSON line: runs, survivors (processes that
``/proc`` still shows a quarter of a second after the proof), outcomes by name, and the user it ran as.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import sys
import uuid

from peri_tui.agent.processes.spawn import Processes, child_env
from tests.doubles.process_driver import nasty
from tests.e2e.outside import marked

TOGETHER = 6
AFTER_S = 0.25
ACTS_BY_ITSELF_S = 0.35
NASTY = (
    "plain", "stubborn", "stopped", "new_session", "threaded", "own_group", "lost_daemon", "exited_daemon",
    "respawner", "wide:100", "chain:100", "hops:200", "burst:200", "breeds:20", "zombies:5", "flood", "paced:20",
    "holds_stdout", "cleans_up", "kills_supervisor", "stops_supervisor",
)  # fmt: skip


async def stop_one(processes: Processes, mode: str) -> tuple[str, list[int]]:
    """Run a command, stop it by force, and return the outcome and what lives a quarter of a second later."""
    task = marker = f"sweep-{uuid.uuid4().hex}"
    command = await processes.spawn(task, nasty(mode, marker), cwd="/", env=child_env(os.environ, task))
    async with asyncio.timeout(30):
        while not (command.output.total if mode == "flood" else "ready" in command.output.text()):
            await asyncio.sleep(0.002)
    if "supervisor" in mode:
        await asyncio.sleep(ACTS_BY_ITSELF_S)
    processes.force(task)
    evidence = await processes.stop(task)
    processes.forget(task)
    await asyncio.sleep(AFTER_S)
    return evidence.outcome, marked(marker)


async def sweep(repeats: int, modes: list[str]) -> dict[str, object]:
    """Stop every mode so many times, several at once."""
    processes = Processes()
    runs = collections.deque(mode for _ in range(repeats) for mode in modes)
    outcomes: collections.Counter[str] = collections.Counter()
    left: list[str] = []
    total = len(runs)

    async def work() -> None:
        while runs:
            mode = runs.popleft()
            outcome, pids = await stop_one(processes, mode)
            outcomes[outcome] += 1
            left.extend(f"{mode} {pid}" for pid in pids)

    async with asyncio.TaskGroup() as group:
        for _ in range(TOGETHER):
            group.create_task(work())
    await processes.close()
    return {"runs": total, "survivors": left, "outcomes": dict(outcomes), "uid": os.getuid()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(sweep(int(sys.argv[1]), sys.argv[2:] or list(NASTY)))), flush=True)
