"""How long a stop of a process tree takes, beside the floor of this machine in the same run.

``python -m tests.bench.processes [--json] [--runs N]``: milliseconds, median and worst. The floor is one ``kill`` and ``waitpid``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import time

from peri_tui.agent.processes.spawn import Processes, child_env
from tests.doubles.process_driver import nasty

CASES = ("sleeper", "stubborn", "new_session", "lost_daemon", "respawner", "wide:200", "chain:200")


def floor(runs: int) -> list[float]:
    """Return seconds from a kill to the end of a sleeping child."""
    taken = []
    for _ in range(runs):
        pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        time.sleep(0.01)
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        taken.append(time.perf_counter() - began)
    return taken


async def measure(mode: str, runs: int) -> tuple[list[float], list[float]]:
    """Return seconds for starts and for forced stops, up to the proof."""
    processes = Processes()
    await processes.start()
    starts, stops = [], []
    for index in range(runs):
        task = f"T{index}"
        began = time.perf_counter()
        command = await processes.spawn(task, nasty(mode, "bench"), cwd="/", env=child_env(os.environ, task))
        starts.append(time.perf_counter() - began)
        while "ready" not in command.output.text():
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        processes.force(task)
        evidence = await processes.stop(task)
        stops.append(time.perf_counter() - began)
        assert evidence.outcome == "empty", evidence
        processes.forget(task)
    await processes.close()
    return starts, stops


def in_ms(seconds: list[float]) -> dict[str, float]:
    """Return median and worst in milliseconds."""
    return {
        "median": round(statistics.median(seconds) * 1000, 2),
        "max": round(max(seconds) * 1000, 2),
        "n": len(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    rows = {"floor kill+waitpid": in_ms(floor(options.runs))}
    for mode in CASES:
        starts, stops = asyncio.run(measure(mode, options.runs))
        rows[f"start {mode}"] = in_ms(starts)
        rows[f"forced stop {mode}"] = in_ms(stops)
    least = rows["floor kill+waitpid"]["median"]
    for row in rows.values():
        row["times_floor"] = round(row["median"] / least, 1) if least else 0.0
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for name, row in rows.items():
        print(f"{name:28} median {row['median']:8.2f} ms   max {row['max']:8.2f} ms   n {row['n']}")


if __name__ == "__main__":
    main()
