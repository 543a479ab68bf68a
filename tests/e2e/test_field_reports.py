"""What users of other agents reported, run against Peri: F042, F068, F127, F150."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e.outside import marked, wait_until
from tests.e2e.scene import STOPPED, Scene, stubborn_command, tool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

SAID = tool("shell", command="echo hi")
TOUCH = '{"command": "touch late"}'
HALF = {"tool": "shell", "args": TOUCH, "cut_at": 12}
REST_OF_CALL = {
    "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": TOUCH[12:]}}]}}]
}


def test_f042_a_tool_call_that_comes_after_the_stop_is_never_run() -> None:
    late = [
        {"ignore_close": True},
        {"text": "one moment"},
        {"stall": 2.0},
        tool("shell", command="touch late"),
    ]
    with Scene([{"when": "go", "steps": late}]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("one moment")
        scene.stop()
        # The server goes on writing: into a connection that is gone.
        scene.server.wait_for(lambda event: event["ev"] in ("write_failed", "reply_done"))
        scene.assert_quiet()
        scene.finish()
        scene.assert_quiet()
        assert not (scene.workspace / "late").exists()


REST = {
    "arguments": [{"raw": "data: " + json.dumps(REST_OF_CALL) + "\n\n"}],
    "end of file": [],
    "text": [{"text": "late words"}],
}


@pytest.mark.parametrize("rest", REST)
def test_f042_a_call_that_was_half_there_at_the_stop_is_never_run(rest: str) -> None:
    steps = [{"ignore_close": True}, {"text": "one moment"}, HALF, {"stall": 2.0}, *REST[rest]]
    with Scene([{"when": "go", "steps": steps}]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("one moment")
        scene.server.wait_event("stalled")
        scene.stop()
        scene.server.wait_for(lambda event: event["ev"] in ("write_failed", "reply_done"))
        scene.finish()
        scene.assert_quiet()


POINTS = {
    "name sent": ("", [{"text": "now "}, SAID | {"cut_at": 0}, {"stall": -1}]),
    "arguments half": ("please go", [SAID | {"cut_at": 9}, {"stall": -1}]),
    "call whole, message not": ("please go", [SAID, {"stall": -1}]),
}


@pytest.mark.parametrize("point", POINTS)
def test_f127_a_stop_inside_a_tool_call_leaves_a_history_that_a_strict_server_takes(point: str) -> None:
    given_back, steps = POINTS[point]
    with Scene([{"when": "go", "steps": steps}, {"when": "go", "steps": [{"text": "ok"}]}]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        scene.server.wait_event("stalled")
        if not given_back:
            terminal.wait_for("  now")
        scene.stop()
        scene.finish(given_back=given_back)


def test_f127_a_stop_with_the_result_ready() -> None:
    with Scene([[tool("read_file", path="README.md")], [{"headers_delay": -1}], [{"text": "ok"}]]) as scene:
        scene.open().submit("please go")
        scene.server.wait_event("headers_delayed")
        assert scene.server.requests()[-1]["messages"][-1]["role"] == "tool"
        scene.stop()
        scene.finish()


def test_f127_a_stop_between_two_parallel_tools() -> None:
    calls = [tool("read_file", path="README.md"), tool("shell", command="touch late")]
    with Scene([[{"tools": calls}], [{"text": "ok"}]], approve="ask") as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("touch late")
        terminal.wait_for("Deny")
        scene.stop()
        scene.finish()
        messages = scene.server.requests()[-1]["messages"]
        results = {m["tool_call_id"]: m["content"] for m in messages if m["role"] == "tool"}
        assert len(results) == 2
        assert "A shop." in next(iter(results.values()))


BLACK_HOLE = [{"text": "one two three four five"}, {"stall": -1}]


def test_f150_a_black_hole_is_left_within_a_second() -> None:
    with Scene([{"when": "go", "steps": BLACK_HOLE}]) as scene:
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("four five")
        pressed = time.monotonic_ns()
        scene.stop()
        left = scene.server.wait_for(lambda event: event["ev"] in ("fin", "rst"))
        assert left["mono"] - pressed < 1e9
        scene.finish()


def test_f150_silence_ends_a_task_with_its_reason_and_the_next_prompt_works() -> None:
    with Scene([{"when": "go", "steps": BLACK_HOLE}], config="idle_s = 1.5\n") as scene:
        terminal = scene.open()
        began = time.monotonic()
        terminal.submit("please go")
        text = terminal.wait_for("silent")
        # The default would be a minute.
        assert 1.4 < time.monotonic() - began < 15
        assert STOPPED not in text
        terminal.wait_for("Failed")
        scene.assert_quiet()
        scene.assert_server_saw_ends()
        scene.requests_at_stop = len(scene.server.requests())
        scene.prompt_works()
        assert scene.quit() == 0


def test_f068_a_background_child_that_holds_stdout_does_not_hang_the_tool() -> None:
    with (
        Scene() as scene,
        scene.script(
            [
                [tool("shell", command=stubborn_command(scene.marker, "echo hi"))],
                [{"text": "five words "}, {"stall": -1}],
                [{"text": "ok"}],
            ]
        ),
    ):
        terminal = scene.open()
        terminal.submit("please go")
        scene.server.wait_for(lambda event: event["ev"] == "request" and event["number"] == 2)
        called, again = scene.server.events("reply_done")[0], scene.server.requests()[1]
        assert "hi" in again["messages"][-1]["content"]
        assert (again["mono"] - called["mono"]) / 1e9 < 5
        terminal.wait_for("five words")
        # It is in the background now, and still the task's.
        assert marked(scene.marker)
        scene.see_tags()
        scene.stop()
        scene.finish()


def test_f068_what_is_in_the_background_ends_with_the_task() -> None:
    with (
        Scene() as scene,
        scene.script([[tool("shell", command=stubborn_command(scene.marker, "echo hi"))], [{"text": "ok"}]]),
    ):
        terminal = scene.open()
        terminal.submit("please go")
        terminal.wait_for("✓ Done")
        wait_until(lambda: not marked(scene.marker), what="the background process ended")
        assert scene.quit() == 0
