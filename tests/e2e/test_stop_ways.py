"""Every way to stop: keys, mouse, another shell, a signal, quitting; and presses that must count only once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.outside import marked, wait_until
from tests.e2e.scene import CTRL_Q, STOPPED, Scene, stubborn_command, tool
from tests.e2e.terminal import CTRL_C, ESC, Terminal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

LONG = [{"text": "word " * 3000, "rate": 40}]


def click(terminal: Terminal, words: str) -> None:
    """Press and release the left button on some words, as a terminal reports it (SGR, 1-based)."""
    rows = terminal.text.split("\n")
    row = next(number for number, line in enumerate(rows) if words in line)
    column = rows[row].index(words) + 2
    terminal.send(f"\x1b[<0;{column};{row + 1}M")
    terminal.send(f"\x1b[<0;{column};{row + 1}m")


def by_button(scene: Scene) -> None:
    click(scene.terminal, "Stop  Esc")


def by_slash(scene: Scene) -> None:
    scene.terminal.submit("/stop")


def by_another_shell(scene: Scene) -> None:
    ran = scene.command("stop")
    assert ran.returncode == 130, ran.stderr
    assert "cancelled" in ran.stdout


def by_all(scene: Scene) -> None:
    assert scene.command("stop", "--all").returncode == 130


def by_ctrl_c(scene: Scene) -> None:
    scene.terminal.send(CTRL_C)


WAYS = [by_ctrl_c, by_button, by_slash, by_another_shell, by_all]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_is_one_whole_stop(way: Callable[[Scene], None]) -> None:
    with Scene([{"when": "go", "steps": LONG}]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("  word")
        scene.stop(lambda: way(scene))
        scene.finish()


@pytest.mark.parametrize(
    ("press", "code"),
    [
        (lambda scene: scene.terminal.process.send_signal(signal.SIGTERM), 143),
        (lambda scene: scene.terminal.process.send_signal(signal.SIGHUP), 0),
        (lambda scene: scene.terminal.send(CTRL_Q), 0),
    ],
    ids=["SIGTERM", "SIGHUP", "Ctrl+Q"],
)
def test_leaving_stops_first(press: Callable[[Scene], Any], code: int) -> None:
    with DeafCommand() as scene:
        press(scene)
        left = scene.terminal.wait_exit()
        # At this very moment: who waited for the exit may rely on it.
        scene.assert_quiet()
        scene.assert_server_saw_ends()
        assert left == code
        scene.assert_trace_agrees()


def test_a_held_key_is_one_stop_and_no_force() -> None:
    with DeafCommand() as scene:
        for _ in range(90):
            scene.terminal.send(ESC)
            time.sleep(1 / 30)
        scene.terminal.wait_for(STOPPED)
        scene.assert_quiet()
        scene.requests_at_stop = len(scene.server.requests())
        scene.finish()
        records = scene.trace()["records"]
        assert len({r["cancel_id"] for r in records if r.get("cancel_id")}) == 1
        assert {r["data"].get("mode") for r in records if r["ev"] in ("pressed", "received")} == {"graceful"}


class DeafCommand(Scene):
    """A scene in which a command with a grandchild that ignores every polite signal runs."""

    def __enter__(self) -> Scene:
        super().__enter__()
        with self.script([{"when": "go", "steps": [tool("shell", command=stubborn_command(self.marker))]}]):
            self.open().submit("please go")
        wait_until(lambda: marked(self.marker), what="the grandchild runs")
        self.see_tags()
        return self
