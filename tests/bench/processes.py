"""What starts, stops and reading cost, beside the floor of this machine in the same run and under the same load.

``python -m tests.bench.processes [--json] [--runs N]``. The floor F is one ``kill`` and ``waitpid`` of a sleeping
child, sampled between the measurements it is compared with. Each figure has its ratio, the value that is accepted, and
the one that is aimed at; ``met`` is about the accepted one.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import math
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peri_tui.agent.processes.spawn import Command, Processes, child_env
from tests.doubles.process_driver import nasty
from tests.e2e.outside import marked

ROOT = Path(__file__).parents[2]
SMALL_TREES = ("plain", "stubborn", "stopped", "new_session", "lost_daemon", "respawner")
LARGE_TREES = ("wide:200", "chain:200")
AGENT_TREES = ("sleeper", "stubborn", "lost_daemon", "new_session")
ONE_BYTE = ["sh", "-c", "echo x; exec sleep 1000"]
TICK_S = 0.005
SUBREAPER = 36


@dataclass(frozen=True)
class Figure:
    """One number. ``ratio`` is to ``per``; ``accept`` and ``aim`` are ratios too, or values where there is no ratio."""

    name: str
    value: float
    unit: str
    accept: float
    aim: float | None = None
    ratio: float | None = None
    per: str = ""
    worst: float | None = None
    n: int = 1

    @property
    def met(self) -> bool:
        return (self.value if self.ratio is None else self.ratio) <= self.accept


def kill_once() -> float:
    """Return seconds from a kill to the end of a sleeping child."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
    time.sleep(0.01)
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return time.perf_counter() - began


async def ready(command: Command) -> None:
    async with asyncio.timeout(20):
        while "ready" not in command.output.text():
            await asyncio.sleep(0.001)


async def forced_stop(processes: Processes, mode: str) -> float:
    """Return seconds from the request to the proof."""
    task = uuid.uuid4().hex
    command = await processes.spawn(task, nasty(mode, "bench"), cwd="/", env=child_env(os.environ, task))
    await ready(command)
    began = time.perf_counter()
    processes.force(task)
    evidence = await processes.stop(task)
    taken = time.perf_counter() - began
    assert evidence.outcome == "empty", evidence
    processes.forget(task)
    return taken


async def forced_stops(name: str, modes: Sequence[str], runs: int, accept: float, aim: float) -> Figure:
    """Measure forced stops, each beside a floor."""
    processes = Processes()
    await processes.start()
    stops, floors = [], []
    for _ in range(runs):
        for mode in modes:
            floors.append(kill_once())
            stops.append(await forced_stop(processes, mode))
    await processes.close()
    return against(name, stops, floors, "F", accept, aim)


def against(
    name: str, taken: list[float], base: list[float], per: str, accept: float, aim: float | None
) -> Figure:
    """Compare medians; values in milliseconds."""
    value, below = statistics.median(taken) * 1000, statistics.median(base) * 1000
    return Figure(
        name, round(value, 2), "ms", accept, aim, round(value / below, 2), f"{per} = {below:.3f} ms",
        round(max(taken) * 1000, 2), len(taken),
    )  # fmt: skip


# --- 200 processes against one killpg ----------------------------------------------------------------------------------


def kill_group(mode: str) -> float:
    """Return seconds from one ``killpg`` of a tree to the end of its last process; children come to us meanwhile."""
    libc = ctypes.CDLL(None)
    libc.prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        with subprocess.Popen(
            nasty(mode, "bench"), cwd="/", stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            began = time.perf_counter()
            os.killpg(process.pid, signal.SIGKILL)
            while True:
                try:
                    os.waitpid(-process.pid, 0)
                except ChildProcessError:
                    return time.perf_counter() - began
    finally:
        libc.prctl(SUBREAPER, 0, 0, 0, 0)


async def large_tree(mode: str, runs: int) -> Figure:
    processes = Processes()
    await processes.start()
    stops, groups = [], []
    for _ in range(runs):
        groups.append(kill_group(mode))
        stops.append(await forced_stop(processes, mode))
    await processes.close()
    return against(f"forced stop of {mode}", stops, groups, "killpg of the same", 1.5, None)


# --- SIGKILL of the agent ----------------------------------------------------------------------------------------------


def kill_agent(mode: str) -> float:
    """Return seconds from SIGKILL of an agent to the end of everything it had started."""
    marker = f"bench-{uuid.uuid4().hex}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.doubles.process_driver", marker, mode],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        pids = {told["warden"], *told["supervisors"], *marked(marker)} - {process.pid}
        fds = [os.pidfd_open(pid) for pid in pids]
        began = time.perf_counter()
        process.kill()
        wait_for_ends(fds)
        taken = time.perf_counter() - began
    assert marked(marker) == []
    return taken


def wait_for_ends(fds: list[int]) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    left = len(fds)
    while left:
        for fd, _ in poll.poll(20_000):
            poll.unregister(fd)
            os.close(fd)
            left -= 1


def killed_agents(runs: int) -> Figure:
    taken, floors = [], []
    for _ in range(runs):
        for mode in AGENT_TREES:
            floors.append(kill_once())
            taken.append(kill_agent(mode))
    return against("SIGKILL of the agent, tree empty", taken, floors, "F", 250, 100)


# --- starts ------------------------------------------------------------------------------------------------------------


def bare_start() -> tuple[float, float]:
    """Return seconds until ``Popen`` returned, and until the first byte was read."""
    began = time.perf_counter()
    with subprocess.Popen(
        ONE_BYTE, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        returned = time.perf_counter() - began
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - began
        process.kill()
    return returned, first


async def starts(runs: int) -> list[Figure]:
    """Measure starts up to the return of the call, and up to the first byte of output."""
    processes = Processes()
    await processes.start()
    ours, bare = [], []
    for index in range(runs):
        bare.append(bare_start())
        task = f"T{index}"
        heard = asyncio.Event()
        began = time.perf_counter()
        await processes.spawn(
            task,
            ONE_BYTE,
            cwd="/",
            env=child_env(os.environ, task),
            on_output=lambda *_, heard=heard: heard.set(),
        )
        returned = time.perf_counter() - began
        await heard.wait()
        ours.append((returned, time.perf_counter() - began))
        processes.force(task)
        await processes.stop(task)
        processes.forget(task)
    await processes.close()
    return [
        against(
            "start, up to its first byte", [one for _, one in ours], [one for _, one in bare], "bare Popen", 10, None
        ),
        against(
            "start, up to the return", [one for one, _ in ours], [one for one, _ in bare], "bare Popen", math.inf, None
        ),
    ]  # fmt: skip


# --- reading -----------------------------------------------------------------------------------------------------------


async def lags(seconds: float) -> list[float]:
    """Return by how many seconds a tick came late, again and again."""
    loop = asyncio.get_running_loop()
    found = []
    until = loop.time() + seconds
    while (due := loop.time() + TICK_S) < until:
        await asyncio.sleep(TICK_S)
        found.append(loop.time() - due)
    return found


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def reading(seconds: float) -> list[Figure]:
    """Measure the event loop while a command prints 100 MB a second."""
    processes = Processes()
    command = await processes.spawn("T", nasty("paced:100", "bench"), cwd="/", env=child_env(os.environ, "T"))
    await ready(command)
    os.kill(command.ref.pid, signal.SIGSTOP)
    idle = p99(await lags(seconds))
    idle_cpu, wall = time.process_time(), time.perf_counter()
    await lags(seconds / 2)
    idle_cpu = (time.process_time() - idle_cpu) / (time.perf_counter() - wall)
    os.kill(command.ref.pid, signal.SIGCONT)
    await asyncio.sleep(0.2)
    cpu, wall, had = time.process_time(), time.perf_counter(), command.output.total
    busy = p99(await lags(seconds))
    wall = time.perf_counter() - wall
    cpu = (time.process_time() - cpu) / wall
    rate = (command.output.total - had) / wall / 1e6
    processes.force("T")
    await processes.stop("T")
    await processes.close()
    return [
        Figure("reading 100 MB/s: processor", round((cpu - idle_cpu) * 100, 1), "%", 15, per=f"{rate:.0f} MB/s read"),
        Figure(
            "reading 100 MB/s: loop lag p99 above idle", round((busy - idle) * 1000, 2), "ms", 5,
            per=f"idle {idle * 1000:.2f} ms",
        ),
    ]  # fmt: skip


# --- memory ------------------------------------------------------------------------------------------------------------


def pss(pid: int) -> float:
    """Return the proportional share of memory of a process, in MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ProcessLookupError(pid)


async def memory(more: int = 8) -> list[Figure]:
    """Measure warden and supervisors: alone, and what each further one adds to the sum."""
    kept, sys.dont_write_bytecode = (
        sys.dont_write_bytecode,
        False,
    )  # The warden is run compiled where that may be.
    processes = Processes()
    await processes.start()
    sys.dont_write_bytecode = kept
    warden = processes.warden_pid
    assert warden is not None
    supervisors: list[int] = []

    async def add() -> None:
        command = await processes.spawn("T", ["sleep", "1000"], cwd="/", env={"PATH": os.environ["PATH"]})
        assert command.supervisor is not None
        supervisors.append(command.supervisor.pid)

    await add()
    await asyncio.sleep(0.6)  # It has looked at its tree once by then.
    alone = pss(supervisors[0])
    held, first = pss(warden), pss(warden) + alone
    for _ in range(more):
        await add()
    await asyncio.sleep(0.6)
    added = (pss(warden) + sum(map(pss, supervisors)) - first) / more
    shared = statistics.mean(map(pss, supervisors))
    processes.force("T")
    await processes.stop("T")
    await processes.close()
    return [
        Figure("memory of the warden, PSS", round(held, 2), "MB", 6),
        Figure("memory that one more supervisor adds, PSS", round(added, 2), "MB", 1.5),
        Figure(f"memory of a supervisor, PSS, one of {more + 1}", round(shared, 2), "MB", 1.5 + 0.75),
        Figure("memory of the only supervisor, PSS", round(alone, 2), "MB", math.inf),
    ]


# --- all of them -------------------------------------------------------------------------------------------------------


def measure(runs: int) -> list[Figure]:
    """Measure everything; ``runs`` starts and stops of each kind, fewer of what takes long."""
    fewer = max(3, runs // 4)
    found = [
        asyncio.run(forced_stops("forced stop of one process", ["sleeper"], runs, 50, 20)),
        asyncio.run(forced_stops("forced stop of a nasty tree of up to 5", SMALL_TREES, fewer, 100, 50)),
        *(asyncio.run(large_tree(mode, fewer)) for mode in LARGE_TREES),
        killed_agents(fewer),
        *asyncio.run(starts(runs)),
        *asyncio.run(reading(2.0)),
        *asyncio.run(memory()),
    ]
    return found


def describe(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"{figure.ratio:7.1f} x"
    limit = f"accept {figure.accept:g}" + (f", aim {figure.aim:g}" if figure.aim else "")
    met = "met" if figure.met else "NOT MET"
    return f"{figure.name:44} {figure.value:8.2f} {figure.unit:3} {ratio:10} {figure.per:32} {limit:22} {met}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    before = os.getloadavg()
    figures = measure(options.runs)
    facts = {
        "python": platform.python_version(), "kernel": platform.release(), "cpus": os.cpu_count(),
        "load_before": before, "load_after": os.getloadavg(),
    }  # fmt: skip
    if options.json:
        rows = [
            asdict(one) | {"accept": one.accept if math.isfinite(one.accept) else None, "met": one.met}
            for one in figures
        ]
        print(json.dumps(facts | {"figures": rows}, indent=1))
        return
    print(facts)
    for figure in figures:
        print(describe(figure))


if __name__ == "__main__":
    main()
