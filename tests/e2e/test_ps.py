"""``peri ps`` from outside: what runs, what a crash left, and that only that is ended. F057, F058, F060, F075, F082."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.outside import agents, state_of, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are listed on Linux"),
]

DESERTER = Path(__file__).parents[1] / "doubles" / "deserter.py"


class Home:
    """One user's folders, with tasks in them; ends everything that it started."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workspace = root / "ws"
        self.workspace.mkdir()
        self.env = os.environ | {"PERI_HOME": str(root / "home")}
        self._started: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []

    @property
    def runtime(self) -> Path:
        from peri_tui.config import find_paths

        return find_paths({"PERI_HOME": self.env["PERI_HOME"]}).runtime

    @property
    def ledgers(self) -> list[Path]:
        return list((self.root / "home" / "state" / "ledger").glob("*.jsonl"))

    def peri(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "peri_tui", *arguments], env=self.env, cwd=self.workspace, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=50, check=False,
        )  # fmt: skip

    def run(self, command: str) -> subprocess.Popen[str]:
        """Start a task that runs a command."""
        prompt = ["-p", f"run {command}", "--approve", "all", "--provider", "offline"]
        process = subprocess.Popen(
            [sys.executable, "-m", "peri_tui", *prompt], env=self.env, cwd=self.workspace, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._started.append(process)
        return process

    def desert(self, *words: str) -> tuple[int, str]:
        """Let a task kill its agent, warden and supervisor; returns the pid of its daemon and what peri said."""
        task = self.run(" ".join([sys.executable, "-I", "-S", str(DESERTER), str(self.root), *words]))
        pid = int(wait_until(lambda: (self.root / "pid").exists() and (self.root / "pid").read_text()))
        self._pids.append(pid)
        # Without its environment, the daemon is known only once it was sampled.
        wait_until(lambda: any(f"[{pid}, " in file.read_text() for file in self.ledgers), what="sampled")
        (self.root / "go").touch()
        said, _ = task.communicate(timeout=40)
        return pid, said

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(30)
            if process.stdout:
                process.stdout.close()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.close()


@pytest.mark.parametrize("words", [(), ("clean",)], ids=["tagged", "without environment"])
def test_f060_what_outlived_agent_warden_and_supervisor_is_found_told_and_ended(
    home: Home, words: tuple[str, ...]
) -> None:
    innocent = subprocess.Popen(["sleep", "1000"])
    try:
        pid, said = home.desert(*words)
        assert state_of(pid) not in ("", "Z")
        # The next agent says so by itself, does not call the task clean, and kills nothing.
        assert f"pid {pid}" in said
        told = home.peri("recover")
        assert "1 process of a task whose agent died is still alive: see peri ps" in told.stdout
        assert state_of(pid) not in ("", "Z")

        listed = home.peri("ps")
        assert listed.returncode == 74
        (line,) = [line for line in listed.stdout.splitlines() if "[left, found by ledger]" in line]
        assert f" {pid} " in line
        # A line of the table is cut to its width, so how much is seen depends on where the clone is; JSON is whole.
        assert sys.executable[:20] in line
        assert "deserter.py" in home.peri("ps", "--json").stdout
        assert "DEAD" in listed.stdout
        assert "1 process outlived its agent: 'peri ps --kill' ends what is left" in listed.stdout

        refused = home.peri("ps", "--kill")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "add --yes" in refused.stderr
        assert state_of(pid) not in ("", "Z")

        ended = home.peri("ps", "--kill", "--yes")
        assert ended.returncode == 0, ended.stdout
        assert f"ended pid {pid}" in ended.stdout
        wait_until(lambda: state_of(pid) in ("", "Z"))
        assert innocent.poll() is None

        after = home.peri("ps")
        assert (after.returncode, after.stdout) == (0, "nothing runs\n")
        assert home.ledgers == []
    finally:
        innocent.kill()
        innocent.wait()


def test_ps_lists_a_living_agents_processes_connections_and_files_and_never_ends_them(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            f"import socket, time; s = socket.create_connection(('127.0.0.1', {port}));"
            " f = open('held.txt', 'w'); print('ready', flush=True); time.sleep(1000)"
        )
        (home.workspace / "hold.py").write_text(script)
        home.run(f"{sys.executable} hold.py & exec sleep 1000")
        server.accept()[0].close()
        wait_until(lambda: (home.workspace / "held.txt").exists())
        for option in ((), ("--kill", "--yes")):
            listed = json.loads(home.peri("ps", "--json", *option).stdout)
            (agent,) = listed["agents"]
            assert agent["alive"]
            assert listed["left"] == []
            roles = {one["role"] for one in agent["processes"]}
            assert roles == {"agent", "warden", "supervisor", "command", "child"}
            commands = {one["pid"]: one for one in agent["processes"]}
            (holder,) = [one for one in commands.values() if one["command"].endswith("hold.py")]
            assert len(holder["task"]) == 26
            assert holder["rss"] > 0
            assert 0 <= holder["age"] < 60
            assert [c["peer"] for c in agent["connections"] if c["pid"] == holder["pid"]] == [
                f"127.0.0.1:{port}"
            ]
            assert {"unix"} == {c["kind"] for c in agent["connections"] if c["pid"] == agent["pid"]}
            held = {(one["pid"], one["path"]) for one in agent["files"]}
            assert (holder["pid"], str(home.workspace / "held.txt")) in held
            assert any(path.endswith("state.db") for pid, path in held if pid == agent["pid"])
        text = home.peri("ps")
        assert text.returncode == 0
        assert f"task {holder['task']}" in text.stdout
        assert f"→ 127.0.0.1:{port}" in text.stdout
        assert state_of(holder["pid"]) not in ("", "Z")


def test_a_clean_end_leaves_no_ledger(home: Home) -> None:
    task = home.run("true")
    assert task.wait(40) == 0
    wait_until(lambda: not agents(home.runtime))
    wait_until(lambda: not home.ledgers)
    assert home.peri("ps").stdout == "nothing runs\n"
