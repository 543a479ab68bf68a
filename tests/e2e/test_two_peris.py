"""Two Peris on one folder: neither disturbs the other, a stop finds the right one, only the dead are cleaned up after."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from peri_tui.client.mint import fresh_id
from peri_tui.net import post_cancel
from tests.e2e.outside import agents, manifest, wait_until
from tests.e2e.scene import CTRL_Q, STOPPED, Scene, tool
from tests.e2e.terminal import ESC, Terminal, peri

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

LONG = {"text": "word " * 3000, "rate": 40}
EDITED = b"def total(items):\n    return 0\n"


def two() -> Scene:
    """Return a scene: *go* edits a file and streams, *peek* reads it, *write* writes another one."""
    read = tool("read_file", path="src/cart.py")
    edit = tool("edit_file", path="src/cart.py", old="return sum(items)", new="return 0")
    make = tool("write_file", path="second.txt", content="second\n")
    steps = [("go", read), ("go", edit), ("go", LONG), ("peek", read), ("peek", {"text": "seen"}),
             ("write", make), ("write", make), ("write", {"text": "written"}), ("slow", LONG)]  # fmt: skip
    return Scene([{"when": when, "steps": [step]} for when, step in steps])


def begin(scene: Scene) -> Terminal:
    """Start the first Peri; its task edited a file and streams."""
    terminal = scene.open()
    terminal.submit("please go")
    scene.server.wait_for(lambda event: event["ev"] == "first_byte" and event["number"] == 3, 20)
    assert (scene.workspace / "src" / "cart.py").read_bytes() == EDITED
    return terminal


def second(scene: Scene) -> Terminal:
    """Start another screen beside the first."""
    terminal = peri(*scene.options, cwd=scene.workspace, home=scene.home)
    scene._terminals.append(terminal)
    terminal.wait_for("Ready")
    return terminal


def running(scene: Scene) -> list[dict]:
    """Return the tasks that are not over, newest first."""
    lines = scene.command("tasks", "--json").stdout.splitlines()
    return [
        task for task in map(json.loads, lines) if task["state"] not in ("completed", "failed", "cancelled")
    ]


def sockets(scene: Scene) -> dict[int, Path]:
    """Return the socket of each living agent, by pid."""
    return {one["pid"]: scene.runtime / f"{one['instance']}.sock" for one in agents(scene.runtime)}


def progress(scene: Scene) -> int:
    """Return how many pieces of the first task's text the server has sent."""
    return max([event["chunks"] for event in scene.server.events("progress")], default=0)


def test_a_second_start_leaves_the_first_untouched_and_both_can_read() -> None:
    with two() as scene:
        first = begin(scene)
        known = scene.agent
        other = second(scene)
        assert len(sockets(scene)) == 2
        other.submit("peek please")
        other.wait_for("✓ Done")
        assert "seen" in other.text
        other.send(CTRL_Q)
        assert other.wait_exit() == 0
        sent = progress(scene)
        wait_until(lambda: progress(scene) > sent, what="the first streams on")
        assert "● Running" in first.text
        assert scene.agent == known
        assert (scene.workspace / "src" / "cart.py").read_bytes() == EDITED
        scene.stop()
        assert scene.quit() == 0


def test_the_second_write_waits_and_then_names_the_holder() -> None:
    with two() as scene:
        begin(scene)
        ran = scene.headless("-p", "write please", "--max-seconds", "2")
        assert ran.returncode == 75, ran.stderr
        assert str(scene.agent) in ran.stderr
        assert not (scene.workspace / "second.txt").exists()
        assert (scene.workspace / "src" / "cart.py").read_bytes() == EDITED
        scene.stop()
        ran = scene.headless("-p", "write please", "--max-seconds", "20")
        assert ran.returncode == 0, ran.stderr
        assert (scene.workspace / "second.txt").read_bytes() == b"second\n"


def test_a_write_that_waits_goes_on_when_the_other_is_stopped() -> None:
    with two() as scene:
        first = begin(scene)
        other = second(scene)
        other.submit("write please")
        other.wait_for("● Running")
        scene.server.wait_for(lambda event: event["ev"] == "first_byte" and event["number"] == 4)
        first.send(ESC)
        first.wait_for(STOPPED)
        other.wait_for("✓ Done")
        assert (scene.workspace / "second.txt").read_bytes() == b"second\n"
        now = manifest(scene.workspace)
        assert {path: now[path] for path in scene.before} == scene.before


def test_peri_stop_from_a_third_shell_reaches_the_owner() -> None:
    with two() as scene:
        first = begin(scene)
        other = second(scene)
        other.submit("slow please")
        wait_until(lambda: len(running(scene)) == 2, what="both run")
        (mine,) = [task for task in running(scene) if task["prompt"] == "please go"]
        ran = scene.command("stop", mine["task"])
        assert ran.returncode == 130, ran.stdout + ran.stderr
        assert f"cancelled {mine['task']}" in ran.stdout
        first.wait_for(STOPPED)
        assert manifest(scene.workspace) == scene.before
        assert [task["prompt"] for task in running(scene)] == ["slow please"]
        assert "● Running" in other.text


def test_a_cancel_sent_to_the_wrong_agent_is_routed() -> None:
    with two() as scene:
        first = begin(scene)
        owner = scene.agent
        second(scene)
        (wrong,) = [path for pid, path in sockets(scene).items() if pid != owner]
        (task,) = running(scene)
        answer = post_cancel(wrong, task["task"])
        assert answer["t"] == "cancel.accepted"
        assert answer["routed"] == task["owner"]
        first.wait_for(STOPPED)
        scene.assert_quiet()
        again = post_cancel(wrong, task["task"])
        assert (again["t"], again["state"]) == ("cancel.noop", "cancelled")
        unknown = post_cancel(wrong, fresh_id())
        assert (unknown["t"], unknown["state"]) == ("cancel.noop", "tombstone")
        nonsense = post_cancel(wrong, "nonsense")
        assert (nonsense["t"], nonsense["code"]) == ("error", "E_UNKNOWN_TASK")


def test_only_tasks_of_proven_dead_owners_are_rolled_back() -> None:
    with two() as scene:
        begin(scene)
        owner = scene.agent
        # A stopped process is silent, and not dead.
        os.kill(owner, signal.SIGSTOP)
        try:
            said = scene.command("recover").stdout
            assert "nothing to recover" in said
            other = second(scene)
            time.sleep(1.2)
            assert (scene.workspace / "src" / "cart.py").read_bytes() == EDITED
            assert "was ended" not in other.text
        finally:
            os.kill(owner, signal.SIGCONT)
        scene.stop()


def test_a_living_peri_ends_nothing_of_its_dead_neighbour_until_asked_then_once() -> None:
    with two() as scene:
        first = begin(scene)
        owner = scene.agent
        other = second(scene)
        first.process.kill()
        os.kill(owner, signal.SIGKILL)
        first.process.wait(10)
        (task,) = running(scene)
        (socket,) = sockets(scene).values()
        answer = post_cancel(socket, task["task"])
        assert answer["t"] == "cancel.accepted", answer
        wait_until(lambda: manifest(scene.workspace) == scene.before, what="the files are back")
        wait_until(lambda: not running(scene), what="it ended")
        other.submit("peek please")
        other.wait_for("✓ Done")
