"""The key of the model's server: sent to that server, and found nowhere else."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.e2e.outside import agents, manifest, wait_until
from tests.e2e.scene import Scene, tool
from tests.e2e.terminal import PERI, clean_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

CANARY = "sk-test-CANARY-0123456789/+é="[:27]
FORMS = [CANARY.encode(), quote(CANARY, safe="").encode(), base64.b64encode(CANARY.encode()).rstrip(b"=")]
ECHO = f"bad key {CANARY}, in an address {quote(CANARY, safe='')}, coded {base64.b64encode(CANARY.encode()).decode()}"
LOOK = "env; ls -l /proc/self/fd; cat; tr '\\0' '\\n' < /proc/$PPID/environ; cat /proc/[0-9]*/cmdline 2>/dev/null; true"


class Watch:
    """Looks at the arguments of every process until it is told to end, and keeps what holds a needle."""

    def __init__(self, needles: list[bytes]) -> None:
        self.found: set[bytes] = set()
        self._needles = needles
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = file.read_bytes()
                except OSError:
                    continue
                self.found |= {words for needle in self._needles if needle in words}


def holders(root: Path, needles: list[bytes]) -> list[Path]:
    """Return the files below a folder that hold a needle."""
    files = [file for file in root.rglob("*") if file.is_file() and not file.is_symlink()]
    return [file for file in files if any(needle in file.read_bytes() for needle in needles)]


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Be a user whose files are open to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def public(home: Path) -> list[str]:
    """Return what below a folder, itself too, is open to others.

    A displaced file of the user's keeps its mode, so that it can go back as it was; the folder around it is private.
    """
    found = [
        path for path in [home, *home.rglob("*")] if not path.is_symlink() and path.stat().st_mode & 0o77
    ]
    return [str(path) for path in found if not (path.is_file() and "trash" in path.parts)]


def test_a_whole_session_keeps_the_key_to_itself(open_umask: None) -> None:
    replies = [
        {"when": "go", "steps": [tool("shell", command=LOOK)]},
        {"when": "go", "steps": [{"tools": [tool("read_file", path="README.md"),
                                             tool("edit_file", path="README.md", old="A shop", new="B shop")]}]},
        {"when": "go", "steps": [{"text": "all done"}]},
        {"when": "refuse", "steps": [{"status": 401, "body": {"error": {"message": ECHO}}}]},
        {"when": "inside-the-200", "steps": [{"error": {"message": ECHO}}]},
        {"when": "wait-for-the-stop", "steps": [tool("shell", command=f"echo child; {LOOK}; sleep 300")]},
    ]  # fmt: skip
    with Scene(replies) as scene, Watch(FORMS) as watch:
        environ = {"PERI_API_KEY": CANARY, "OPENAI_API_KEY": CANARY}
        terminal = scene.open(**environ)
        terminal.submit("please go")
        terminal.wait_for("all done")
        agent = scene.agent
        token = next(scene.runtime.glob("*.token")).read_bytes().strip()
        terminal.submit("please refuse")
        terminal.wait_for("the key was refused")
        terminal.submit("please inside-the-200")
        terminal.wait_for(lambda text: "in an address" in text)
        scene.before = manifest(scene.workspace)
        terminal.submit("please wait-for-the-stop")
        wait_until(lambda: children_with_tag(agent), what="the command runs")
        for pid in children_with_tag(agent):
            assert not [form for form in [*FORMS, token] if form in Path(f"/proc/{pid}/environ").read_bytes()]
        assert public(scene.home) == []
        scene.stop()
        assert scene.quit() == 0
        headless = [scene.headless("-p", f"please {word}", **environ) for word in ("go", "refuse")]
        assert [ran.returncode for ran in headless] == [0, 41]
        said = "".join(ran.stdout + ran.stderr for ran in headless).encode()
        said += "".join(
            scene.command(*words).stdout for words in (("tasks", "--json"), ("trace", "--json"))
        ).encode()

        keys = {request["authorization"] for request in scene.server.requests()}
        assert keys == {f"Bearer {CANARY}"}
        results = [m["content"] for request in scene.server.requests() for m in request["messages"]
                   if m["role"] == "tool"]  # fmt: skip
        (looked,) = {result for result in results if "PERI_TASK=" in result}
        needles = [*FORMS, token]
        assert not [needle for needle in needles if needle in looked.encode()]
        assert not [needle for needle in needles if needle in terminal.raw]
        assert not [needle for needle in needles if needle in said]
        assert watch.found == set()
        assert holders(scene.home, needles) == []
        assert holders(scene.workspace, needles) == []
        assert public(scene.home) == []


def children_with_tag(agent: int) -> list[int]:
    """Return the processes that carry a task's tag and are not the agent."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (
                b"PERI_TASK=" in (entry / "environ").read_bytes()
                and b"sleep\x00300" in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != agent]


def test_a_command_sees_three_descriptors_and_an_ended_input() -> None:
    command = "ls /proc/self/fd | tr '\\n' ' '; cat; echo end"
    with Scene([{"when": "go", "steps": [tool("shell", command=command)]},
                {"when": "go", "steps": [{"text": "done"}]}]) as scene:  # fmt: skip
        assert scene.headless("-p", "go", PERI_API_KEY=CANARY).returncode == 0
        (result,) = [m["content"] for m in scene.server.requests()[1]["messages"] if m["role"] == "tool"]
        # The fourth is the folder that ls itself opened.
        assert re.search(r"\b0 1 2 3 end\b", result), result


def test_an_agent_that_dies_or_a_screen_that_is_killed_leaves_no_key(open_umask: None) -> None:
    with Scene([{"when": "go", "steps": [{"text": "word "}, {"stall": -1}]}]) as scene:
        terminal = scene.open(PERI_API_KEY=CANARY)
        terminal.submit("please go")
        terminal.wait_for("  word")
        os.kill(scene.agent, 6)
        terminal.wait_for(lambda text: "Stopped" in text or "Failed" in text or "ended" in text)
        terminal.kill()
        wait_until(lambda: not agents(scene.runtime), timeout=45, what="the agent left")
        assert not [form for form in FORMS if form in terminal.raw]
        assert holders(scene.home, FORMS) == []
        assert public(scene.home) == []


def test_a_key_that_no_header_can_carry_is_named_and_not_shown() -> None:
    with Scene() as scene:
        bad = f"{CANARY}\né"
        ran = subprocess.run(
            [*PERI, *scene.options, "-p", "hi"], cwd=scene.workspace, capture_output=True, text=True, check=False,
            env=clean_environment(scene.home, PERI_API_KEY=bad), timeout=60,
        )  # fmt: skip
        assert ran.returncode == 52, ran.stderr
        assert "PERI_API_KEY" in ran.stderr
        assert CANARY not in ran.stderr
        assert holders(scene.home, FORMS) == []
        assert scene.server.requests() == []


def test_two_agents_have_different_tokens() -> None:
    with Scene() as scene:
        scene.open()
        scene.open()
        tokens = {file.read_text() for file in scene.runtime.glob("*.token")}
        assert len(tokens) == 2
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{43,}", token) for token in tokens)
