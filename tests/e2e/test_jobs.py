"""Background jobs on a real screen: a stop ends and lists them, a service survives, leaving asks. F050, F057, F075, F078."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.e2e.outside import agents, marked, state_of, wait_until
from tests.e2e.scene import CTRL_Q, STOPPED, Scene, tool
from tests.e2e.terminal import ESC

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]

CTRL_T = b"\x14"


def start(command: str) -> dict[str, object]:
    return tool("shell", command=command, background=True)


def replies(marker: str) -> list[object]:
    server = f"sh -c 'sleep 1000; : server {marker}'; :"
    watcher = f"sh -c 'sleep 1000; : watcher {marker}'; :"
    return [
        [{"tools": [start(server), start(watcher)]}],
        [{"text": "both run"}, {"stall": -1}],
        [{"text": "at it"}, {"stall": -1}],
    ]


def leaders(marker: str, word: str) -> list[int]:
    """Return the processes of one of the two jobs."""
    found = []
    for pid in marked(marker):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if word in file.read().decode():
                found.append(pid)
    return found


def promote_the_server(scene: Scene) -> None:
    terminal = scene.terminal
    terminal.send(CTRL_T)
    terminal.wait_for("Background jobs")
    terminal.wait_for("s stop the job")
    # Newest first: the task has the cursor, then the watcher, then the server.
    terminal.send(b"\x1b[B")
    time.sleep(0.1)
    terminal.send(b"\x1b[B")
    time.sleep(0.1)
    terminal.send(b"p")
    terminal.wait_for("j1 kept as a service")
    terminal.send(CTRL_T)
    terminal.wait_for(lambda text: "Background jobs" not in text)


def test_f078_a_stop_ends_the_jobs_and_keeps_the_service_and_leaving_asks() -> None:
    with Scene() as scene, scene.script(replies(scene.marker)):
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("both run")
        server, watcher = leaders(scene.marker, "server"), leaders(scene.marker, "watcher")
        assert server
        assert watcher
        promote_the_server(scene)

        terminal.send(ESC)
        terminal.wait_for(STOPPED)
        assert leaders(scene.marker, "watcher") == []
        assert leaders(scene.marker, "server") == server
        terminal.wait_for("kept  service j1")
        terminal.wait_for("ended ")

        terminal.submit("once again")
        terminal.wait_for("at it")
        terminal.send(ESC)
        wait_until(lambda: "running" not in scene.command("tasks").stdout, what="the second stop")
        assert leaders(scene.marker, "server") == server
        assert f" {server[0]} " in scene.command("ps").stdout
        assert "service:j1" in scene.command("ps").stdout

        terminal.send(CTRL_Q)
        terminal.wait_for("A service runs and would end with Peri")
        known = agents(scene.runtime)
        time.sleep(0.6)
        terminal.send(b"n")
        terminal.wait_for(lambda text: "Quit?" not in text)
        assert leaders(scene.marker, "server") == server
        terminal.send(CTRL_Q)
        terminal.wait_for("A service runs and would end with Peri")
        time.sleep(0.6)
        terminal.send(b"y")
        terminal.wait_exit()
        assert marked(scene.marker) == []
        wait_until(lambda: all(state_of(agent["pid"]) in ("", "Z") for agent in known), what="the agent left")
        assert scene.command("ps").stdout == "nothing runs\n"


def test_f057_a_service_of_an_agent_that_was_killed_is_gone_with_it() -> None:
    with Scene() as scene, scene.script(replies(scene.marker)):
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("both run")
        promote_the_server(scene)
        os.kill(scene.agent, signal.SIGKILL)
        wait_until(lambda: not marked(scene.marker), timeout=5, what="its supervisors ended everything")
        assert scene.command("ps").returncode == 0
