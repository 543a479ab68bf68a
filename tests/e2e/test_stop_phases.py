"""One press in each phase of a task, judged from outside at the moment when *Stopped* is first on the screen."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.outside import manifest, marked, wait_until
from tests.e2e.scene import STOPPED, Scene, other_client, stubborn_command, tool, until
from tests.e2e.terminal import ESC

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

CTRL_S = b"\x13"
LONG = {"text": "word " * 3000, "rate": 40}


def asks(*steps, when: str = "go"):
    """Return a reply to the prompt that holds a word."""
    return {"when": when, "steps": list(steps)}


# A prompt after a stop that produced nothing is one message with the stopped one, so it is served by the same queue.
ANSWER = asks({"text": "ok"})


# --- the model's phases ---------------------------------------------------------------------------------------------


def test_connecting_to_a_full_backlog() -> None:
    with Scene(backlog_full=True) as scene:
        scene.open().submit("please go")
        wait_until(lambda: [line for line in scene.connections() if line.split()[3] == "02"], what="SYN sent")
        scene.stop()
        scene.replace_server()
        scene.requests_at_stop = 0
        scene.finish(given_back="please go")


@pytest.mark.parametrize(
    ("phase", "given_back", "steps"),
    [
        ("headers_delayed", "please go", [{"headers_delay": -1}]),
        ("stalled", "please go", [{"stall": -1}]),
        ("first_byte", "", [{"text": "word", "rate": 0}, {"stall": -1}]),
        ("progress", "", [LONG]),
        ("progress", "", [{"flood": 0}]),
    ],
    ids=["waiting for headers", "before the first token", "at the first token", "mid-stream", "flood"],
)
def test_while_the_model_answers(phase: str, given_back: str, steps: list[Any]) -> None:
    with Scene([asks(*steps), ANSWER]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        scene.server.wait_event(phase)
        if not given_back:
            terminal.wait_for("flood" if "flood" in steps[0] else "  word")
        assert scene.connections()
        scene.stop()
        scene.finish(given_back=given_back)


def test_between_retries() -> None:
    with Scene([asks({"status": 429, "retry_after": 30}), ANSWER]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("retry")
        scene.stop()
        scene.finish(given_back="please go")


# --- queued ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_waits_in_the_screen_is_held_and_not_sent() -> None:
    with Scene([asks(LONG)]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("  word")
        terminal.submit("and then this")
        terminal.wait_for("1 queued")
        scene.stop()
        terminal.wait_for(lambda text: "Describe a task" in text and "held" in text)
        scene.assert_server_saw_ends()
        assert len(scene.server.requests()) == 1
        terminal.send(CTRL_S)
        terminal.wait_for("✓ Done")
        assert scene.server.requests()[1]["messages"][-1]["content"].endswith("and then this")
        assert scene.server.events("violation") == []
        assert scene.quit() == 0
        scene.assert_trace_agrees()


async def test_a_task_that_waits_in_the_agent() -> None:
    with Scene([asks(LONG), ANSWER, asks({"stall": -1}, when="block")], config="concurrency = 1\n") as scene:
        terminal = scene.open()
        async with other_client(scene) as other:
            await other.submit("block the only place", approve="all")
            await until(lambda: scene.server.requests())
            terminal.submit("please go")
            terminal.wait_for("○ Queued")
            terminal.send(ESC)
            terminal.wait_for(STOPPED)
            # The task that runs is another one: it goes on, and is the only one that was ever asked for.
            assert len(scene.connections()) == 1
            assert manifest(scene.workspace) == scene.before
            assert len(scene.server.requests()) == 1
            assert scene.server.ends() == []
            scene.assert_trace_agrees()
            assert scene.command("stop", "--all").returncode == 130
            scene.assert_quiet()
        scene.requests_at_stop = 1
        scene.prompt_works(given_back="please go")
        assert scene.quit() == 0


# --- tools and files ------------------------------------------------------------------------------------------------


def test_while_a_command_with_a_deaf_grandchild_runs() -> None:
    with Scene() as scene, scene.script([asks(tool("shell", command=stubborn_command(scene.marker)))]):
        scene.open().submit("please go")
        wait_until(lambda: marked(scene.marker), what="the grandchild runs")
        scene.see_tags()
        scene.stop()
        scene.finish()


def test_while_a_permission_is_asked() -> None:
    calls = [tool("write_file", path="new.txt", content="new\n"), tool("shell", command="touch made")]
    with Scene([asks({"tools": calls})], approve="ask") as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("Deny")
        assert "new.txt" in terminal.text
        scene.stop()
        assert "Deny" not in terminal.text
        scene.finish()


MANY = 2000
A_MESSAGE = 50


def many_edits() -> list[Any]:
    """Return replies that rewrite three files and make 2,000 more, fifty calls a message, then stall."""
    reads = [tool("read_file", path=name) for name in EDITED]
    writes = [tool("write_file", path=name, content="rewritten\n") for name in EDITED]
    writes += [tool("write_file", path=f"made/{n % 20}/{n}.txt", content=f"{n}\n") for n in range(MANY)]
    messages = [reads, *(writes[at : at + A_MESSAGE] for at in range(0, len(writes), A_MESSAGE))]
    return [asks({"tools": message}) for message in messages] + [asks({"stall": -1})]


EDITED = ("README.md", "src/cart.py", "src/crlf.txt")


@pytest.mark.timeout(180)
def test_a_second_press_while_two_thousand_files_are_restored_forces_and_breaks_nothing() -> None:
    with Scene(many_edits()) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        scene.server.wait_event("stalled", 120)
        assert len(manifest(scene.workspace)) > MANY
        terminal.send(ESC)
        scene.stop(lambda: press_amid_the_restore(scene), within=60)
        assert f"{MANY + len(EDITED)} files restored" in terminal.text
        scene.finish()
        pressed = [r["data"]["mode"] for r in scene.trace()["records"] if r["ev"] == "pressed"]
        assert pressed == ["graceful", "force"]


def press_amid_the_restore(scene: Scene) -> None:
    """Press again once files go; the agent is frozen until a press counts as a second one (400 ms)."""
    agent, first, last = scene.agent, made(scene, 0), made(scene, MANY - 1)
    wait_until(lambda: not (first.exists() and last.exists()), what="the restore began")
    os.kill(agent, signal.SIGSTOP)
    try:
        assert first.exists() or last.exists(), "the restore was over before it could be disturbed"
        time.sleep(0.45)
        scene.terminal.send(ESC)
        scene.terminal.wait_for("Forcing")
    finally:
        os.kill(agent, signal.SIGCONT)


def made(scene: Scene, number: int) -> Path:
    """Return the path of one of the many files."""
    return scene.workspace / f"made/{number % 20}/{number}.txt"
