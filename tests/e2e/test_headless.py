"""``peri -p`` and the commands for other shells, as a script meets them: output, order, exit codes, signals."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from tests.e2e.outside import agents, marked, wait_until
from tests.e2e.scene import Scene, stubborn_command, tool
from tests.e2e.terminal import PERI, clean_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

LONG = {"text": "word " * 3000, "rate": 40}
WRITE = [[tool("write_file", path="new.txt", content="new\n")], [{"text": "All done."}]]


def start(scene: Scene, *arguments: str, prompt: str = "please go", **options: Any) -> subprocess.Popen[str]:
    """Start ``peri -p`` beside the test."""
    return subprocess.Popen(
        [*PERI, *scene.options, "-p", prompt, *arguments], cwd=scene.workspace, text=True,
        env=clean_environment(scene.home), stdin=subprocess.DEVNULL,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )  # fmt: skip


def end(process: subprocess.Popen[str], timeout: float = 20) -> tuple[int, str, str]:
    """Wait for the end; returns exit code, output and errors."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def messages(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def gone(scene: Scene) -> None:
    """The agent left with its client."""
    wait_until(lambda: agents(scene.runtime) == [], what="the agent left")


# --- what it prints -------------------------------------------------------------------------------------------------


def test_text_is_the_answer_and_nothing_else() -> None:
    with Scene(WRITE) as scene:
        ran = scene.headless("-p", "please go")
        assert (ran.returncode, ran.stdout) == (0, "All done.\n")
        assert "write_file new.txt" in ran.stderr
        assert (scene.workspace / "new.txt").read_text() == "new\n"
        gone(scene)


def test_json_is_the_end_with_the_answer() -> None:
    with Scene(WRITE) as scene:
        ran = scene.headless("-p", "please go", "--output-format", "json")
        (message,) = messages(ran.stdout)
        assert ran.returncode == 0
        assert (message["t"], message["state"], message["answer"]) == ("task.end", "completed", "All done.")
        assert message["files"] == {"kept": ["new.txt"]}


def test_stream_json_is_every_message_in_order() -> None:
    with Scene(WRITE) as scene:
        ran = scene.headless("-p", "please go", "--output-format", "stream-json")
        found = messages(ran.stdout)
        kinds = [message["t"] for message in found]
        assert (kinds[0], found[0]["state"]) == ("task.state", "queued")
        assert (kinds[-1], kinds.count("task.end")) == ("task.end", 1)
        numbers = [message["seq"] for message in found]
        assert numbers == sorted(set(numbers))
        order = [
            kinds.index(kind) for kind in ("task.state", "tool.start", "file.change", "tool.end", "delta")
        ]
        assert order == sorted(order)
        assert [m["state"] for m in found if m["t"] == "task.state"] == ["queued", "running"]


def test_stream_json_of_a_stop_ends_with_the_evidence_of_each_layer() -> None:
    with Scene([[LONG]]) as scene:
        process = start(scene, "--output-format", "stream-json")
        scene.server.wait_event("progress")
        process.send_signal(signal.SIGINT)
        code, out, _ = end(process)
        scene.assert_quiet()
        found = messages(out)
        assert code == 130
        states = [m["state"] for m in found if m["t"] == "task.state"]
        assert states[:3] == ["queued", "running", "cancelling"]
        last = found[-1]
        assert (last["t"], last["state"], last["stop_reason"]) == ("task.end", "cancelled", "user")
        assert [(layer["layer"], layer["ok"]) for layer in last["evidence"]] == [
            (n, True) for n in (2, 3, 4, 5)
        ]
        assert "residue" not in last


def test_the_prompt_comes_from_standard_input() -> None:
    with Scene([[{"text": "ok"}]]) as scene:
        ran = subprocess.run(
            [*PERI, *scene.options, "-p", "-"], cwd=scene.workspace, env=clean_environment(scene.home),
            input="tell me\nall of it", text=True, capture_output=True, timeout=30, check=False,
        )  # fmt: skip
        assert (ran.returncode, ran.stdout) == (0, "ok\n")
        assert scene.server.requests()[0]["messages"][-1]["content"] == "tell me\nall of it"


def test_c_continues_the_last_conversation() -> None:
    with Scene([[{"text": "I am the first answer."}], [{"text": "ok"}]]) as scene:
        assert scene.headless("-p", "first question").returncode == 0
        assert scene.headless("-c", "-p", "second question").returncode == 0
        assert scene.headless("-p", "a new conversation").returncode == 0
        texts = [[m["content"] for m in request["messages"][1:]] for request in scene.server.requests()]
        assert texts[1] == ["first question", "I am the first answer.", "second question"]
        assert texts[2] == ["a new conversation"]


def test_c_continues_a_conversation_that_was_stopped() -> None:
    calls = [tool("read_file", path="README.md"), tool("shell", command="sleep 300")]
    with Scene([[{"tools": calls}], [{"text": "ok"}]]) as scene:
        process = start(scene)
        assert process.stderr is not None
        while "sleep 300" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert end(process)[0] == 130
        ran = scene.headless("-c", "-p", "go on")
        assert (ran.returncode, ran.stdout) == (0, "ok\n")
        assert scene.server.events("violation") == []
        roles = [m["role"] for m in scene.server.requests()[1]["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "tool", "user"]


# --- exit codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "word", "arguments", "reply"),
    [
        (1, "scripted 400", [], [{"status": 400}]),
        (1, "--approve", ["--approve", "ask"], [tool("shell", command="true")]),
        (2, "--max-turns", ["--max-turns", "many"], []),
        (2, "anthropic", ["--provider", "anthropic"], []),
        (41, "key", [], [{"status": 401}]),
        (42, "nowhere", ["-C", "nowhere"], []),
        (42, "empty", ["-p", "  "], []),
        (52, "theme", ["--config", "wrong.toml"], []),
        (53, "turns", ["--max-turns", "1"], [tool("read_file", path="README.md")]),
    ],
    ids=["refused", "denied", "usage", "not built", "key", "folder", "prompt", "config", "limit"],
)
def test_exit_codes_and_their_one_line(code: int, word: str, arguments: list[str], reply: list[Any]) -> None:
    with Scene([reply, [{"text": "ok"}]]) as scene:
        (scene.base / "wrong.toml").write_text("theme = 3\n")
        arguments = [str(scene.base / one) if one == "wrong.toml" else one for one in arguments]
        ran = scene.headless("-p", "please go", *arguments)
        assert ran.returncode == code, ran.stderr
        assert word in ran.stderr.splitlines()[-1] or word in ran.stderr
        assert "Traceback" not in ran.stderr
        scene.assert_quiet()
        gone(scene)


def test_not_clean_is_74_and_the_trace_names_the_layer() -> None:
    with Scene([[LONG]]) as scene:
        process = subprocess.Popen(
            [*PERI, *scene.options, "-p", "please go"], cwd=scene.workspace, text=True,
            env=clean_environment(scene.home, PERI_FAULTS="model.keep_socket"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        scene.server.wait_event("progress")
        process.send_signal(signal.SIGINT)
        code, _, err = end(process)
        assert code == 74, err
        assert "not verified" in err
        found = scene.trace()
        assert (found["complete"], found["failed"]) == (False, "Model")


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_whole_stop(number: signal.Signals, code: int) -> None:
    with Scene() as scene, scene.script([[tool("shell", command=stubborn_command(scene.marker))]]):
        process = start(scene)
        wait_until(lambda: marked(scene.marker), what="the grandchild runs")
        scene.see_tags()
        process.send_signal(number)
        ended = end(process)
        scene.assert_quiet()
        assert ended[0] == code, ended[2]
        assert "cancelled" in ended[2]
        scene.assert_server_saw_ends()
        assert len(scene.server.requests()) == 1
        scene.assert_trace_agrees()
        gone(scene)


def test_a_second_signal_forces() -> None:
    slow = 'trap "" INT TERM; while :; do sleep 1; done'
    with Scene() as scene, scene.script([[tool("shell", command=f"sh -c '{slow}' {scene.marker}")]]):
        process = start(scene)
        wait_until(lambda: marked(scene.marker), what="the command runs")
        scene.see_tags()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        ended = end(process)
        scene.assert_quiet()
        assert ended[0] == 130, ended[2]
        found = scene.assert_trace_agrees()
        assert [r["data"]["mode"] for r in found["records"] if r["ev"] == "pressed"] == ["graceful", "force"]


def test_a_reader_that_leaves_is_a_stop() -> None:
    with Scene([[LONG]]) as scene:
        process = start(scene, "--output-format", "stream-json")
        assert process.stdout is not None
        while json.loads(process.stdout.readline())["t"] != "delta":
            pass
        process.stdout.close()
        process.stdout = None
        code, _, err = end(process)
        scene.assert_quiet()
        assert code == 130, err
        assert "Traceback" not in err
        scene.assert_server_saw_ends()
        assert len(scene.server.requests()) == 1


# --- the commands for other shells ----------------------------------------------------------------------------------


def test_stop_all_ends_every_task_of_every_peri() -> None:
    with Scene([[LONG]]) as scene:
        processes = [start(scene), start(scene)]
        wait_until(lambda: len(scene.server.requests()) == 2, what="both are asking")
        listed = messages(scene.command("tasks", "--json").stdout)
        assert [task["state"] for task in listed] == ["running", "running"]
        assert scene.command("stop", "--all").returncode == 130
        scene.assert_quiet()
        assert [end(process)[0] for process in processes] == [130, 130]
        listed = messages(scene.command("tasks", "--json").stdout)
        assert [task["state"] for task in listed] == ["cancelled", "cancelled"]
        scene.assert_server_saw_ends()
        gone(scene)


def test_stop_with_an_id_ends_that_task_only() -> None:
    with Scene([[LONG]]) as scene:
        first = start(scene)
        wait_until(lambda: len(scene.server.requests()) == 1, what="the first is asking")
        (task,) = messages(scene.command("tasks", "--json").stdout)
        second = start(scene)
        wait_until(lambda: len(scene.server.requests()) == 2, what="the second is asking")
        assert scene.command("stop", task["task"]).returncode == 130
        assert end(first)[0] == 130
        assert second.poll() is None
        assert len(scene.connections()) == 1
        second.send_signal(signal.SIGINT)
        assert end(second)[0] == 130


def test_stop_without_a_task_says_so() -> None:
    with Scene() as scene:
        ran = scene.command("stop", "--all")
        assert (ran.returncode, ran.stdout) == (0, "nothing is running\n")
        assert scene.command("tasks").stdout == "no tasks yet\n"
        assert scene.command("trace").returncode != 0
