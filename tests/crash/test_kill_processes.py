"""SIGKILL of the screen, the agent, both, the warden: at any instant, nothing runs on and every byte comes back."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.outside import agents, manifest, marked, wait_until
from tests.e2e.scene import CTRL_Q, Scene, stubborn_command, tool
from tests.e2e.terminal import ESC, Terminal, peri

pytestmark = [pytest.mark.crash, pytest.mark.timeout(90)]

LONG = {"text": "word " * 3000, "rate": 40}
CTRL_S = b"\x13"
ENDED = ("cancelled", "failed")


def reply(*steps: Any) -> dict[str, Any]:
    """Return a reply to the prompt that holds *go*."""
    return {"when": "go", "steps": list(steps)}


def edits(count: int = 8) -> list[dict[str, Any]]:
    """Return replies that edit a file, again and again, and make new ones."""
    replies = [reply(tool("read_file", path="src/cart.py"))]
    old = "return sum(items)"
    for number in range(count):
        new = f"return {number}"
        replies.append(
            reply(
                tool("edit_file", path="src/cart.py", old=old, new=new),
                tool("write_file", path=f"made/{number}.txt", content=f"{number}\n" * 2000),
            )
        )
        old = new
    return replies


def script(scene: Scene, last: str) -> list[dict[str, Any]]:
    """Return the script of a task that edits, and then streams or runs a command that is hard to end."""
    command = tool("shell", command=stubborn_command(scene.marker))
    return [*edits(3), reply(LONG) if last == "stream" else reply(command)]


class Crash(Scene):
    """A scene whose task edited files and is in the middle of something."""

    def __init__(self, last: str = "command", **options: Any) -> None:
        super().__init__(**options)
        self.last = last
        self.server._replies = script(self, last)

    def begin(self, **env: str) -> Terminal:
        """Open the screen and wait until the task is in its last reply."""
        self.open(**env).submit("please go")
        self.wait_busy()
        return self.terminal

    def wait_busy(self) -> None:
        """Wait until the files are edited and the command runs, or the model streams."""
        self.server.wait_for(lambda event: event["ev"] == "first_byte" and event["number"] == 5, 20)
        if self.last == "command":
            wait_until(lambda: len(marked(self.marker)) >= 2, what="the command runs")
            self.see_tags()
        assert manifest(self.workspace) != self.before

    def adopt(self, **env: str) -> Terminal:
        """Start another screen while the task runs."""
        self.terminal = peri(*self.options, cwd=self.workspace, home=self.home, **env)
        self._terminals.append(self.terminal)
        return self.terminal

    def tasks(self) -> list[dict[str, Any]]:
        """Return what ``peri tasks --json`` prints."""
        return [json.loads(line) for line in self.command("tasks", "--json").stdout.splitlines()]

    def quiet(self) -> bool:
        """Tell whether nothing is left of the task."""
        return not self.connections() and not self.living() and manifest(self.workspace) == self.before


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(words[1]) == pid:
                found.append(int(entry.name))
    return found


# --- the screen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["stream", "command"])
def test_a_new_screen_adopts_the_task_of_a_killed_one(last: str) -> None:
    with Crash(last) as scene:
        terminal = scene.begin()
        agent = scene.agent
        terminal.kill()
        wait_until(lambda: agents(scene.runtime)[0]["orphaned"], what="the agent noticed")
        terminal = scene.adopt()
        terminal.wait_for("● Running")
        terminal.wait_for("✓ write   made/2.txt")
        terminal.wait_for("word word" if last == "stream" else "setsid sh")
        assert scene.agent == agent
        scene.stop()
        scene.finish()


def test_without_a_new_screen_the_task_is_stopped_after_the_grace() -> None:
    with Crash() as scene:
        terminal = scene.begin(PERI_ADOPTION_GRACE="1.5")
        agent = scene.agent
        terminal.kill()
        killed = time.monotonic()
        wait_until(lambda: not Path(f"/proc/{agent}").exists(), 20, what="the agent left")
        assert time.monotonic() - killed > 1.5
        assert scene.quiet()
        (task,) = scene.tasks()
        assert (task["state"], task["stop_reason"]) == ("cancelled", "disconnect")


# --- the agent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["stream", "command"])
def test_a_killed_agent_is_replaced_and_its_task_rolled_back(last: str) -> None:
    with Crash(last) as scene:
        terminal = scene.begin()
        old = scene.agent
        kill(old)
        shown = terminal.wait_for("its agent process died", 20)
        assert "Stopped in" not in shown
        scene.assert_quiet()
        assert scene.agent != old
        (task,) = scene.tasks()
        assert (task["state"], task["stop_reason"]) == ("failed", "owner_lost")
        scene.requests_at_stop = len(scene.server.requests())
        scene.prompt_works()
        assert scene.quit() == 0


@pytest.mark.parametrize("seed", range(4))
def test_an_agent_killed_at_any_instant_of_editing(seed: int) -> None:
    kill_while_editing(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4, 40))
def test_an_agent_killed_at_many_instants_of_editing(seed: int) -> None:
    kill_while_editing(seed)


def kill_while_editing(seed: int) -> None:
    """Kill the agent some time after the first edit was asked for."""
    with Scene(edits(40)) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        scene.server.wait_for(lambda event: event["ev"] == "first_byte" and event["number"] == 2, 20)
        time.sleep(random.Random(seed).uniform(0, 0.6))
        kill(scene.agent)
        terminal.wait_for("its agent process died", 20)
        scene.assert_quiet()
        scene.requests_at_stop = len(scene.server.requests())
        scene.prompt_works()
        assert scene.quit() == 0


@pytest.mark.parametrize("seed", range(3))
def test_an_agent_killed_while_it_stops(seed: int) -> None:
    with Crash() as scene:
        terminal = scene.begin()
        old = scene.agent
        terminal.send(ESC)
        time.sleep(random.Random(seed).uniform(0, 0.25))
        kill(old)
        terminal.wait_for(lambda text: "verified" in text and "╭─" in text, 20)
        scene.assert_quiet()
        assert "Not verified" not in terminal.text
        (task,) = scene.tasks()
        assert task["state"] in ENDED
        assert task["stop_reason"] in ("user", "owner_lost")
        scene.requests_at_stop = len(scene.server.requests())
        scene.prompt_works()
        assert scene.quit() == 0


def test_an_agent_killed_while_it_restores() -> None:
    with Crash("stream") as scene:
        many = [tool("write_file", path=f"many/{n}.txt", content=f"{n}\n") for n in range(120)]
        scene.server._replies = [*edits(3)[:-1], reply(*many), reply(LONG)]
        scene.replace_server(scene.server._replies)
        terminal = scene.open()
        terminal.submit("please go")
        scene.wait_busy()
        old = scene.agent
        terminal.send(ESC)
        wait_until(lambda: len(list((scene.workspace / "many").glob("*"))) < 115, what="the restore began")
        kill(old)
        assert list((scene.workspace / "many").glob("*")), "too late: everything was restored"
        terminal.wait_for(lambda text: "verified" in text and "╭─" in text, 20)
        scene.assert_quiet()
        assert scene.quit() == 0


# --- both -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["screen", "prompt", "recover"])
def test_both_killed_the_next_start_ends_and_rolls_back_once(how: str) -> None:
    with Crash() as scene:
        terminal = scene.begin()
        terminal.submit("a prompt that waits")
        terminal.send("half a thought")
        terminal.wait_for("half a thought")
        time.sleep(0.5)
        agent = scene.agent
        terminal.process.kill()
        kill(agent)
        terminal.process.wait(10)
        if how == "recover":
            said = scene.command("recover")
            assert said.returncode == 0
            assert said.stdout.count("was ended: 4 files restored") == 1
            assert "nothing to recover" in scene.command("recover").stdout
        elif how == "prompt":
            said = scene.headless("-p", "what now")
            assert (said.returncode, said.stdout) == (0, "ok\n"), said.stderr
        terminal = scene.open()
        terminal.wait_for("half a thought")
        terminal.wait_for("1 held")
        wait_until(scene.quiet, what="the files are back")
        ended = [task for task in scene.tasks() if task["prompt"] == "please go"]
        assert [(task["state"], task["stop_reason"]) for task in ended] == [("failed", "owner_lost")]
        lines = [line for file in scene.home.glob("**/agent.jsonl") for line in file.read_text().splitlines()]
        taken = [line for line in lines if "task taken over" in line]
        assert len(taken) == 1
        terminal.send(CTRL_S)
        terminal.wait_for("✓ Done")
        assert scene.server.requests()[-1]["messages"][-1]["content"] == "a prompt that waits"


# --- the warden -----------------------------------------------------------------------------------------------------


def test_a_killed_warden_is_reported_and_the_next_command_works() -> None:
    with Crash() as scene:
        replies = [
            *scene.server._replies,
            reply(tool("shell", command="echo again > again.txt")),
            reply({"text": "all done"}),
        ]
        scene.replace_server(replies)
        terminal = scene.begin()
        (warden,) = [
            pid for pid in children(scene.agent) if b"warden" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        kill(warden)
        terminal.wait_for("all done", 20)
        assert scene.living() == []
        assert (scene.workspace / "again.txt").read_text() == "again\n"
        told = scene.server.requests()[5]["messages"][-1]["content"]
        assert "[ended by SIGKILL]" in told
        assert scene.quit() == 0


# --- the draft ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_survives_but_for_its_last_quarter_second(seed: int) -> None:
    with Scene() as scene:
        terminal = scene.open()
        rng = random.Random(seed)
        typed: list[tuple[float, str]] = []
        until = time.monotonic() + 0.8 + rng.random()
        text = ""
        while time.monotonic() < until:
            text += rng.choice("abcdefgh")
            terminal.send(text[-1])
            typed.append((time.monotonic(), text))
            time.sleep(rng.uniform(0.005, 0.06))
        terminal.process.kill()
        killed = time.monotonic()
        terminal.process.wait(10)
        # A quarter of a second, and as much again for a machine that is busy.
        due = [text for at, text in typed if at < killed - 0.5][-1]
        terminal = scene.open()
        terminal.wait_for(lambda shown: due in shown)
        terminal.send(CTRL_Q)
