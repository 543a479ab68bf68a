"""Limits as a user meets them: the task is warned, stopped through all layers, and says why; and what a stop waits for."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.doubles.process_driver import NASTY
from tests.e2e.outside import agents, marked, wait_until
from tests.e2e.scene import Scene, tool

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="the warden is built for Linux"),
]


def nasty(scene: Scene, mode: str, number: int = 0) -> str:
    return f"{sys.executable} -I -S {NASTY} {mode} {scene.marker} {number}"


def headless(scene: Scene, *options: str) -> tuple[int, list[dict[str, Any]]]:
    ran = scene.headless("-p", "please go", "--output-format", "stream-json", *options)
    wait_until(lambda: agents(scene.runtime) == [], what="the agent left")
    return ran.returncode, [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    ("config", "mode", "number", "reason", "words"),
    [
        ("max_memory_mb = 200", "hog", 4000, "limit_memory", "of memory, 200 MiB are allowed"),
        ("max_processes = 15", "breeds", 400, "limit_processes", "processes, 15 are allowed"),
        ("max_command_s = 1.0", "sleeper", 0, "limit_seconds", "1 s are allowed"),
        ("max_output_mb = 20", "flood", 0, "limit_output", "20 MiB are allowed"),
    ],
)
def test_a_limit_stops_the_task_through_all_layers_and_says_why(
    config: str, mode: str, number: int, reason: str, words: str
) -> None:
    with Scene(config=config) as scene:
        script = [[tool("shell", command=nasty(scene, mode, number))], [{"text": "never said"}]]
        with scene.script(script):
            code, found = headless(scene)
        end = found[-1]
        assert (end["t"], end["state"], end["stop_reason"], code) == ("task.end", "cancelled", reason, 53)
        assert end.get("verified", True)
        assert [layer["layer"] for layer in end["evidence"] if layer["ok"]] == [2, 3, 4, 5]
        assert end["message"].startswith("over the limit: ")
        assert words in end["message"]
        assert marked(scene.marker) == []


def test_near_a_limit_the_user_is_told_and_the_task_goes_on() -> None:
    with Scene(config="max_processes = 20") as scene:
        line = f"{nasty(scene, 'wide', 16)} & sleep 2; kill %1"
        script = [[tool("shell", command=line)], [{"text": "done"}]]
        with scene.script(script):
            code, found = headless(scene)
        notices = [m["text"] for m in found if m["t"] == "delta" and m["ch"] == "notice"]
        assert len(notices) == 1
        assert notices[0].startswith("near the limit: it runs 1")
        assert notices[0].endswith(" processes, 20 are allowed\n")
        assert (code, found[-1]["state"]) == (0, "completed")


def test_what_was_ended_is_listed_with_its_signal() -> None:
    with Scene(config="interrupt_s = 0.4\nterminate_s = 0.3\nmax_command_s = 1.0") as scene:
        script = [[tool("shell", command=nasty(scene, "stubborn"))], [{"text": "never said"}]]
        with scene.script(script):
            _, found = headless(scene)
        end = found[-1]
        assert end["killed"]
        assert all(line.split()[-1] == "SIGKILL" for line in end["killed"])
        said = [m["data"].get("said", "") for m in found if m["t"] == "trace" and m["ev"] == "tree_signalled"]
        assert any("interrupt sent, " in text and "next signal in 0." in text for text in said), said
        assert any("termination sent, " in text and "force in 0." in text for text in said), said
