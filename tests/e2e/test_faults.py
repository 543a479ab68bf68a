"""One fault a layer, a file already edited: *Stopped* is not said, and card, trace and exit code name that layer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

from tests.e2e.outside import manifest, wait_until
from tests.e2e.scene import CTRL_Q, STOPPED, Scene, stubborn_command, tool
from tests.e2e.terminal import ESC, PERI, clean_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

EDITED = b"def total(items):\n    return 0\n"
LONG = {"text": "word " * 3000, "rate": 40}
NOT_VERIFIED = "Not verified · "


def edits_then(*steps) -> list:
    """Return a script: a file is edited, one is made, then the model does ``steps``."""
    read = tool("read_file", path="src/cart.py")
    edit = tool("edit_file", path="src/cart.py", old="return sum(items)", new="return 0")
    make = tool("write_file", path="src/new.py", content="x = 1\n")
    return [{"when": "go", "steps": one} for one in ([read], [edit, make], list(steps))]


def wait_edited(scene: Scene) -> None:
    """Wait until the edits are done and the third reply began."""
    scene.server.wait_for(lambda event: event["ev"] == "first_byte" and event["number"] == 3, 15)
    assert (scene.workspace / "src" / "cart.py").read_bytes() == EDITED


def begin(scene: Scene, **env: str) -> None:
    """Open the screen, and wait until the file is edited and the model goes on."""
    scene.open(**env).submit("please go")
    wait_edited(scene)


def never_said_stopped(scene: Scene) -> None:
    """*Stopped* was at no moment on the screen."""
    assert scene.terminal.first_seen(b"Stopped in", 0) is None


def seconds_on_card(shown: str) -> float:
    """Return the time that the stop card says."""
    found = re.search(r"╭─ Stopped in ([\d.]+) s", shown)
    assert found, shown
    return float(found[1])


def quit_with(scene: Scene) -> int:
    """Quit and return the exit code."""
    scene.terminal.send(CTRL_Q)
    return scene.terminal.wait_exit()


FAULTS = [
    ("ui.block_loop", "UI", "blocked", ""),
    ("scheduler.refuse_cas", "Scheduler", "compare-and-set was refused", ""),
    ("model.keep_socket", "Model", "connection to the model is still open", "open connection local port"),
    ("rollback.hang_cleanup", "Rollback", "did not end within", "cleanup 'injected fault'"),
    ("rollback.skip_restore", "Rollback", "src/cart.py", "src/cart.py"),
]


@pytest.mark.parametrize(("fault", "layer", "missing", "left"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_fault_is_named(fault: str, layer: str, missing: str, left: str) -> None:
    with Scene(edits_then(LONG)) as scene:
        begin(scene, PERI_FAULTS=fault)
        scene.terminal.send(ESC)
        shown = scene.terminal.wait_for(lambda text: f"╭─ {NOT_VERIFIED}" in text and "─╯" in text)
        title = next(line for line in shown.split("\n") if f"╭─ {NOT_VERIFIED}" in line)
        assert f"{NOT_VERIFIED}{layer}: " in title
        assert missing in title
        assert not left or f"left  {left}" in shown
        traced = scene.trace()
        assert traced["failed"] == layer
        assert [lamp["layer"] for lamp in traced["layers"] if not lamp["ok"]] == [
            ["UI", "Client", "Scheduler", "Model", "Rollback"].index(layer) + 1
        ]
        if fault != "rollback.skip_restore":
            assert manifest(scene.workspace) == scene.before
        if fault == "model.keep_socket":
            assert scene.connections()
        never_said_stopped(scene)
        assert quit_with(scene) == 74
        wait_until(lambda: not scene.connections(), what="the agent's end closed what it kept")


def test_a_tree_that_nobody_kills_is_named_with_its_pids() -> None:
    with Scene() as scene:
        command = tool("shell", command=stubborn_command(scene.marker))
        scene.replace_server(edits_then(command))
        begin(scene, PERI_FAULTS="processes.skip_kill")
        wait_until(lambda: len(scene.living()) >= 2, what="the command runs")
        scene.see_tags()
        scene.terminal.send(ESC)
        shown = scene.terminal.wait_for(NOT_VERIFIED, 25)
        assert f"{NOT_VERIFIED}Rollback: waits for" in shown
        assert any(f"pid {pid} " in shown for pid, _ in scene.living())
        assert scene.trace()["failed"] == "Rollback"
        never_said_stopped(scene)
        assert quit_with(scene) == 74
        # The agent's end hangs up on the supervisors, and that kills.
        wait_until(lambda: not scene.living(), what="the tree died with the agent")


def test_lost_control_frames_are_healed_by_http() -> None:
    with Scene(edits_then(LONG)) as scene:
        begin(scene, PERI_FAULTS="client.drop_control")
        seconds = scene.stop(within=5)
        took = seconds_on_card(scene.terminal.wait_for("╭─ Stopped"))
        # The time on the card is the user's: it begins with the key, not with what arrived at last.
        assert 0.3 <= took <= seconds + 0.05
        scene.finish()
        routes = [r["data"].get("route") for r in scene.trace()["records"] if r["ev"] == "acked"]
        assert "http" in routes


def test_an_agent_deaf_on_every_route_is_asked_by_signal() -> None:
    with Scene(edits_then(LONG)) as scene:
        begin(scene, PERI_FAULTS="client.drop_control,client.drop_http")
        pressed = time.monotonic()
        scene.terminal.send(ESC)
        scene.terminal.wait_for("waits for Client")
        scene.terminal.wait_for("agent escalated")
        shown = scene.terminal.wait_for("╭─ Stopped")
        scene.assert_quiet()
        took = seconds_on_card(shown)
        assert 3 <= took <= time.monotonic() - pressed
        assert time.monotonic() - pressed < 8
        traced = scene.trace()
        assert traced["complete"], traced["missing"]
        assert "sigterm" in {r["data"].get("route") for r in traced["records"] if r["ev"] == "escalated"}
        acks = [r["data"]["said"] for r in traced["records"] if r["ev"] == "acked"]
        assert acks == ["no acknowledgement came; the end did, after SIGTERM to its agent"]
        assert quit_with(scene) == 0


def test_a_frozen_agent_is_named_killed_and_its_successor_restores() -> None:
    with Scene() as scene:
        command = tool("shell", command=stubborn_command(scene.marker))
        scene.replace_server(edits_then(command))
        begin(scene)
        wait_until(lambda: len(scene.living()) >= 2, what="the command runs")
        scene.see_tags()
        old = scene.agent
        os.kill(old, signal.SIGSTOP)
        pressed = time.monotonic()
        scene.terminal.send(ESC)
        scene.terminal.wait_for("waits for Client")
        scene.terminal.wait_for("the agent was killed")
        scene.terminal.wait_for("╭─ Failed · its agent process died · verified clean", 12)
        assert time.monotonic() - pressed < 12
        scene.assert_quiet()
        never_said_stopped(scene)
        scene.terminal.wait_for("│ 2 files restored")
        assert scene.agent != old
        traced = scene.trace()
        assert traced["complete"], traced["missing"]
        scene.requests_at_stop = len(scene.server.requests())
        scene.prompt_works()
        assert quit_with(scene) == 0


def test_an_agent_that_wakes_in_time_is_not_killed() -> None:
    with Scene(edits_then(LONG)) as scene:
        begin(scene)
        old = scene.agent
        os.kill(old, signal.SIGSTOP)
        scene.terminal.send(ESC)
        scene.terminal.wait_for("Stopping")
        time.sleep(1.5)
        os.kill(old, signal.SIGCONT)
        scene.terminal.wait_for(STOPPED)
        scene.assert_quiet()
        assert scene.agent == old
        assert quit_with(scene) == 0


def test_a_terminal_that_takes_nothing_shows_nothing() -> None:
    with Scene(edits_then({"flood": 0})) as scene:
        begin(scene)
        scene.terminal.pause_reading()
        time.sleep(1)
        scene.terminal.send(ESC)
        wait_until(lambda: manifest(scene.workspace) == scene.before, what="the files are back")
        time.sleep(2.1)
        assert "painted" not in {r["ev"] for r in scene.trace()["records"]}
        scene.terminal.resume_reading()
        shown = scene.terminal.wait_for(NOT_VERIFIED)
        assert f"{NOT_VERIFIED}UI: the screen was blocked" in shown
        assert quit_with(scene) == 74


# --- without a screen -----------------------------------------------------------------------------------------------


def stopped_headless(scene: Scene, fault: str) -> tuple[int, str]:
    """Run ``peri -p`` with a fault, stop it by SIGINT mid-stream; returns exit code and standard error."""
    process = subprocess.Popen(
        [*PERI, *scene.options, "-p", "please go"], cwd=scene.workspace, stdin=subprocess.DEVNULL,
        env=clean_environment(scene.home, PERI_FAULTS=fault), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        wait_edited(scene)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=40)[1]
    finally:
        process.kill()
        process.wait()
    return process.returncode, said


@pytest.mark.parametrize("fault", [row[0] for row in FAULTS[1:]])
def test_a_fault_without_a_screen_is_exit_74(fault: str) -> None:
    layer = next(row[1] for row in FAULTS if row[0] == fault)
    with Scene(edits_then(LONG)) as scene:
        code, said = stopped_headless(scene, fault)
        assert code == 74, said
        assert "not verified" in said
        assert scene.trace()["failed"] == layer


def test_lost_control_frames_without_a_screen_are_healed() -> None:
    with Scene(edits_then(LONG)) as scene:
        code, said = stopped_headless(scene, "client.drop_control")
        assert code == 130, said
        scene.assert_quiet()
        assert scene.trace()["complete"]
