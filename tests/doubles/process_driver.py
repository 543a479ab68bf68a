"""A tiny agent: starts the given nasty commands, prints what it started as one JSON line, waits to be killed.

A line on its input makes it close instead and print the evidence.

``python -m tests.doubles.process_driver MARKER MODE[:N] ...``
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from peri_tui.agent.processes.spawn import Processes, child_env

NASTY = Path(__file__).with_name("nasty.py")


def nasty(mode: str, marker: str) -> list[str]:
    """Return the command line of a mode, with its number after a colon."""
    name, _, number = mode.partition(":")
    return [sys.executable, "-I", "-S", str(NASTY), name, marker, number or "0"]


async def drive(marker: str, modes: list[str]) -> None:
    processes = Processes()
    commands = []
    for index, mode in enumerate(modes):
        env = child_env(os.environ, f"task{index}")
        commands.append(await processes.spawn(f"task{index}", nasty(mode, marker), cwd="/", env=env))
    while not all("ready" in command.output.text() for command in commands):
        await asyncio.sleep(0.01)
    told = {"warden": processes.warden_pid, "supervisors": [command.supervisor.pid for command in commands]}
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(asdict(await processes.close())), flush=True)


if __name__ == "__main__":
    asyncio.run(drive(sys.argv[1], sys.argv[2:]))
