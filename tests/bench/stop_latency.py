"""How long a stop takes, from the key byte, seen from outside; beside the floors of the same run.

::

    python tests/bench/stop_latency.py [--json] [--runs 30] [--files 10]

One TUI in a real pty, an agent process, the scripted model server. Two kinds of stop, alternating: while the model
streams, and while a command runs. Times are milliseconds from the write of the key byte to

* ``painted``: the first bytes of a frame that says *Stopping* came out of the pty,
* ``socket_closed``: the model server saw FIN or RST (stops while streaming),
* ``tree_gone``: the command's processes ended, by their pidfds (stops while a command runs),
* ``files_restored``: every file that the task wrote is gone again,
* ``stopped``: the card says so.

Floors: a WebSocket echo over a Unix socket between two processes, ``kill`` and ``waitpid`` of a sleeping child, and
``cp -a`` of the files. Absolute figures depend on the machine and its load, which is reported; nothing here passes or
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.doubles.model_server import ModelServer  # noqa: E402
from tests.e2e.outside import marked  # noqa: E402
from tests.e2e.terminal import ESC, Terminal, peri  # noqa: E402

MARKER = "31415"
MOST_RUNS = 200


def script(files: int) -> list[dict[str, Any]]:
    """Return replies that write files, then stream or run a command until they are stopped."""
    writes = [
        {"tool": "write_file", "args": {"path": f"out/{number}.txt", "content": f"line {number}\n" * 50}}
        for number in range(files)
    ]
    tools = {"tools": writes}
    shell = {"tool": "shell", "args": {"command": f"sleep {MARKER} & sleep {MARKER}"}}
    # Each task streams a word of its own, so that what an earlier one left on the screen is not taken for it.
    replies: list[dict[str, Any]] = []
    for number in range(MOST_RUNS):
        streams = [[tools], [{"text": f"{word(number)} " * 5_000, "rate": 200}]]
        replies += [{"when": "stream", "steps": steps} for steps in streams]
        replies += [{"when": "command", "steps": steps} for steps in ([tools], [shell])]
    return replies


def word(number: int) -> str:
    """Return what the model says in the stream of one task."""
    return f"w{number}w"


class Bench:
    """One TUI, many stops."""

    def __init__(self, screen: Terminal, server: ModelServer, workspace: Path, files: int) -> None:
        self._screen = screen
        self._server = server
        self._out = workspace / "out"
        self._files = files
        self.times: dict[str, list[float]] = {}

    def stop_while(self, kind: str, number: int) -> None:
        """Run one task, stop it when it streams or its command runs, and note the times."""
        self._screen.submit(f"{kind} task {number}")
        self._until(lambda: len(list(self._out.glob("*"))) == self._files, "the files are written")
        pids: list[int] = []
        if kind == "stream":
            twice = f"{word(number)} {word(number)}"
            self._until(lambda: twice in self._screen.text, "it streams")
        else:
            pids = self._until(lambda: len(found := marked(MARKER)) >= 2 and found, "the command runs")
        ends = len(self._server.ends())
        pidfds = [os.pidfd_open(pid) for pid in pids]
        pressed = self._screen.send(ESC)
        if pidfds:
            self._note("tree_gone", _wait_gone(pidfds), pressed)
        self._note("files_restored", self._when(lambda: not self._out.exists()), pressed)
        self._screen.wait_for("Stopped in")
        self._note("stopped", time.monotonic_ns(), pressed)
        self._note("painted", self._screen.first_seen(b"Stopping", pressed) or time.monotonic_ns(), pressed)
        if kind == "stream":
            self._until(lambda: len(self._server.ends()) > ends, "the server saw the end")
            self._note("socket_closed", self._server.ends()[ends]["mono"], pressed)
        self._screen.wait_for("Enter sends")

    def _until(self, holds: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            value = holds()
            if value:
                return value
            time.sleep(0.01)
        raise SystemExit(f"never happened: {what}\n{self._screen.text}")

    @staticmethod
    def _when(holds: Callable[[], bool]) -> int:
        deadline = time.monotonic() + 30
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.0005)
        return time.monotonic_ns()

    def _note(self, name: str, at: int, pressed: int) -> None:
        self.times.setdefault(name, []).append((at - pressed) / 1e6)


def _wait_gone(pidfds: list[int]) -> int:
    for pidfd in pidfds:
        select.select([pidfd], [], [], 30)
    now = time.monotonic_ns()
    for pidfd in pidfds:
        os.close(pidfd)
    return now


def floor_kill(runs: int) -> list[float]:
    """Time ``kill`` and ``waitpid`` of a sleeping child, in ms."""
    times = []
    for _ in range(runs):
        child = subprocess.Popen(["sleep", "1000"])
        time.sleep(0.01)
        begin = time.monotonic_ns()
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        times.append((time.monotonic_ns() - begin) / 1e6)
        child.returncode = 0
    return times


def floor_copy(runs: int, files: int, folder: Path) -> list[float]:
    """Time ``cp -a`` of as many files as a task writes, in ms."""
    source = folder / "source"
    source.mkdir()
    for number in range(files):
        (source / f"{number}.txt").write_text(f"line {number}\n" * 50)
    times = []
    for number in range(runs):
        begin = time.monotonic_ns()
        subprocess.run(["cp", "-a", str(source), str(folder / f"copy{number}")], check=True)
        times.append((time.monotonic_ns() - begin) / 1e6)
    return times


_ECHO = """
import asyncio, sys
from websockets.asyncio.server import unix_serve
async def echo(connection):
    async for frame in connection:
        await connection.send(frame)
async def main():
    async with unix_serve(echo, sys.argv[1], compression=None):
        print("ready", flush=True)
        await asyncio.get_running_loop().create_future()
asyncio.run(main())
"""


def floor_echo(runs: int, folder: Path) -> list[float]:
    """Time an echo of one small frame over a WebSocket on a Unix socket to another process, in ms."""
    from websockets.sync.client import unix_connect

    path = str(folder / "echo.sock")
    server = subprocess.Popen([sys.executable, "-c", _ECHO, path], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        times = []
        with unix_connect(path, compression=None) as connection:
            for _ in range(runs):
                begin = time.monotonic_ns()
                connection.send("x" * 120)
                connection.recv()
                times.append((time.monotonic_ns() - begin) / 1e6)
        return times
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def summary(times: list[float]) -> dict[str, float]:
    """Return median, p99 (the maximum below 100 runs) and count."""
    ordered = sorted(times)
    at = min(len(ordered) - 1, int(len(ordered) * 0.99))
    return {
        "median_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[at], 2),
        "n": len(ordered),
    }


def measure(runs: int, files: int) -> dict[str, Any]:
    """Do everything and return the figures."""
    folder = Path(tempfile.mkdtemp(prefix="peri-bench-"))
    workspace = folder / "workspace"
    workspace.mkdir()
    load = os.getloadavg()[0]
    try:
        with ModelServer(script(files)) as server:
            arguments = (
                "--provider",
                "openai",
                "--base-url",
                server.base_url,
                "--model",
                "bench",
                "--approve",
                "all",
            )
            with peri(*arguments, cwd=workspace, home=folder / "home") as screen:
                screen.wait_for("Enter sends")
                bench = Bench(screen, server, workspace, files)
                for number in range(runs):
                    bench.stop_while("stream", number)
                    bench.stop_while("command", number)
        floors = {
            "websocket_echo": floor_echo(runs, folder),
            "kill_waitpid": floor_kill(runs),
            "cp_a_files": floor_copy(runs, files, folder),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "runs": runs,
        "files": files,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "stop": {name: summary(times) for name, times in bench.times.items()},
        "floor": {name: summary(times) for name, times in floors.items()},
    }


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--files", type=int, default=10)
    given = parser.parse_args()
    figures = measure(given.runs, given.files)
    if given.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"{given.runs} stops of each kind, {given.files} files, load {figures['load_before']}")
    for group in ("stop", "floor"):
        for name, row in figures[group].items():
            print(
                f"  {group:5} {name:15} median {row['median_ms']:8.2f} ms   p99 {row['p99_ms']:8.2f} ms   n {row['n']}"
            )


if __name__ == "__main__":
    main()
