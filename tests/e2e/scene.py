"""A user at a terminal with a scripted model: starts ``peri``, presses a stop, and looks at what is left from outside.

Nothing here believes Peri. The kernel's tables say which connections and processes live, the model server's log says
what it was asked and how each connection ended, hashes say what the files hold. Peri's own trace is read last, only to
see that it agrees.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peri_tui.client.session import AgentSession
from peri_tui.config import find_paths, load_settings
from peri_tui.log import Log
from tests.doubles.model_server import ModelServer
from tests.e2e.outside import agents, manifest, marked, tagged, wait_until
from tests.e2e.terminal import CTRL_C, ESC, Terminal, peri, run_peri

CTRL_Q = b"\x11"
STOPPED = "■ Stopped"
FILES = {
    "README.md": b"# Shop\n\nA shop.\n",
    "src/cart.py": b"def total(items):\n    return sum(items)\n",
    "src/crlf.txt": b"one\r\ntwo\r\nthree",
    "linked.md": b"two names\n",
    "data.bin": bytes(range(256)),
}


class Scene:
    """One user, one workspace, one model server, and (with ``open``) one screen.

    Args:
        replies: the script of the model server.
        approve: the approval mode.
        config: lines of ``config.toml``.
        backlog_full: the server never accepts.
    """

    def __init__(
        self,
        replies: Sequence[Any] = (),
        *,
        approve: str = "all",
        config: str = "",
        backlog_full: bool = False,
    ) -> None:
        # Short, because socket paths hold 107 bytes.
        self.base = Path(tempfile.mkdtemp(prefix="pe-"))
        self.home = self.base / "home"
        self.workspace = self.base / "shop"
        self.marker = f"mark-{uuid.uuid4().hex}"
        self._approve = approve
        self.server = ModelServer(list(replies), strict=True, backlog_full=backlog_full)
        self.ports: list[int] = []
        self.task_tags: set[str] = set()
        self.terminal: Terminal
        self._terminals: list[Terminal] = []
        self._servers: list[ModelServer] = []
        for name, data in FILES.items():
            file = self.workspace / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        (self.workspace / "src" / "run.sh").write_bytes(b"#!/bin/sh\necho run\n")
        (self.workspace / "src" / "run.sh").chmod(0o755)
        (self.workspace / "link").symlink_to("src/cart.py")
        os.link(self.workspace / "linked.md", self.workspace / "hard.md")
        if config:
            (self.home / "config").mkdir(parents=True)
            (self.home / "config" / "config.toml").write_text(config)
        self.before = manifest(self.workspace)

    def __enter__(self) -> Scene:
        self.serve(self.server)
        return self

    def __exit__(self, *exc: object) -> None:
        for terminal in self._terminals:
            terminal.close()
        for server in self._servers:
            server.__exit__()
        shutil.rmtree(self.base, ignore_errors=True)

    def serve(self, server: ModelServer) -> ModelServer:
        """Start a model server, here or in the place of the one before."""
        server.__enter__()
        self._servers.append(server)
        self.server = server
        self.ports.append(server.port)
        return server

    @contextlib.contextmanager
    def script(self, replies: Sequence[Any]) -> Iterator[Scene]:
        """Serve replies that need to know this scene's marker."""
        self._servers.pop().__exit__()
        self.serve(ModelServer(list(replies), strict=True))
        yield self

    def replace_server(self, replies: Sequence[Any] = ()) -> ModelServer:
        """End the server and start a good one on the same port."""
        old = self._servers.pop()
        old.__exit__()
        return self.serve(ModelServer(list(replies), strict=True, port=old.port))

    # --- doing ------------------------------------------------------------------------------------------------------

    @property
    def options(self) -> list[str]:
        """How ``peri`` is told of the server."""
        return ["--provider", "openai", "--base-url", self.server.base_url, "--approve", self._approve]

    def open(self, *options: str, size: tuple[int, int] = (120, 40), **env: str) -> Terminal:
        """Start the screen and wait until it takes prompts."""
        self.terminal = peri(*self.options, *options, cwd=self.workspace, home=self.home, size=size, **env)
        self._terminals.append(self.terminal)
        self.terminal.wait_for("Ready")
        return self.terminal

    def headless(self, *arguments: str, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ``peri`` with the server's options to its end."""
        return run_peri(*self.options, *arguments, cwd=self.workspace, home=self.home, timeout=timeout, **env)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command such as ``trace`` from another shell."""
        return run_peri(*arguments, cwd=self.workspace, home=self.home)

    def stop(self, press: Callable[[], object] | None = None, *, within: float = 15) -> float:
        """Press once (Esc unless told otherwise); the moment *Stopped* is on the screen everything must hold.

        Returns:
            Seconds from the press until the word was seen.
        """
        pressed = time.monotonic()
        if press is None:
            self.terminal.send(ESC)
        else:
            press()
        self.terminal.wait_for(STOPPED, within)
        seen = time.monotonic()
        self.assert_quiet()
        self.requests_at_stop = len(self.server.requests())
        assert "Not verified" not in self.terminal.text
        return seen - pressed

    def prompt_works(self, prompt: str = "what now", *, given_back: str = "") -> None:
        """Send the next prompt: the server, strict about histories, answers it, and was asked nothing in between.

        Args:
            prompt: what to send.
            given_back: the stopped prompt, where nothing was produced: it stands in the input again.
        """
        if given_back:
            self.terminal.wait_for(lambda text: f"\n › {given_back}" in text)
            self.terminal.send(CTRL_C)
        self.terminal.wait_for("Describe a task")
        self.terminal.submit(prompt)
        self.terminal.wait_for("✓ Done")
        assert "ok" in self.terminal.text
        asked = self.server.requests()[self.requests_at_stop :]
        assert [request["messages"][-1]["content"].rpartition("\n")[2] for request in asked] == [prompt]
        assert self.server.events("violation") == []

    def quit(self) -> int:
        """Quit by Ctrl+Q; the agent goes too. Returns the exit code."""
        known = agents(self.runtime)
        self.terminal.send(CTRL_Q)
        code = self.terminal.wait_exit()
        wait_until(
            lambda: all(not Path(f"/proc/{agent['pid']}").exists() for agent in known), what="the agent left"
        )
        return code

    def trace(self, task: str = "") -> dict[str, Any]:
        """Return what ``peri trace --json`` prints, and check its exit code against it."""
        ran = self.command("trace", *([task] if task else []), "--json")
        found = json.loads(ran.stdout)
        assert ran.returncode == (0 if found["complete"] else 74), ran.stderr
        return found

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> Path:
        """Where the agents announce themselves."""
        return self.home / "run"

    @property
    def agent(self) -> int:
        """The process id of the only agent."""
        found = agents(self.runtime)
        assert len(found) == 1, found
        return int(found[0]["pid"])

    def connections(self) -> list[str]:
        """Return the connections to the model server that a process other than it holds."""
        return connections(self.ports, apart=self.server.pid)

    def see_tags(self) -> None:
        """Note which task the processes with our marker belong to."""
        pids = set(marked(self.marker))
        self.task_tags |= {tag for pid in pids for tag in [tag_of(pid)] if tag}
        assert self.task_tags, "no process of the task carries a tag"

    def living(self) -> list[tuple[int, str]]:
        """Return living processes of the task, by marker and by tag."""
        found = [(pid, "marked") for pid in marked(self.marker)]
        for tag in self.task_tags:
            found += tagged(tag)
        return found

    def assert_quiet(self) -> None:
        """Nothing is connected, nothing lives, every file is as it was."""
        assert self.connections() == []
        assert self.living() == []
        assert manifest(self.workspace) == self.before

    def assert_server_saw_ends(self) -> None:
        """Each connection that the server had accepted ended: FIN or RST of the client, or its own end."""

        def over() -> bool:
            accepted = {event["conn"] for event in self.server.events("accept")}
            ended = {event["conn"] for event in self.server.events("fin", "rst", "write_failed", "closed")}
            return accepted <= ended

        wait_until(over, what="the server saw the end of every connection")

    def assert_trace_agrees(self, *, state: str = "cancelled", headless: bool = False) -> dict[str, Any]:
        """The last stop's trace is complete, of one cancel, and ends as the task list says."""
        found = self.trace()
        assert found["complete"], found["missing"]
        records = found["records"]
        # A task that never started has no state but the one that the list tells.
        assert [r["data"].get("state", state) for r in records if r["ev"] == "ended"] == [state]
        assert len({r["cancel_id"] for r in records if r.get("cancel_id")}) == 1
        assert [lamp["ok"] for lamp in found["layers"]] == [True] * 5
        listed = [json.loads(line) for line in self.command("tasks", "--json").stdout.splitlines()]
        assert [task["state"] for task in listed if task["task"] == found["task"]] == [state]
        return found

    def finish(self, *, given_back: str = "") -> None:
        """The server saw the ends, the next prompt works, quitting works, exit code and trace agree."""
        self.assert_server_saw_ends()
        self.prompt_works(given_back=given_back)
        assert self.quit() == 0
        self.assert_trace_agrees()
        assert self.connections() == []


def tag_of(pid: int) -> str:
    """Return the task that a process is tagged with, or an empty text."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((item.partition(b"=")[2].decode() for item in environ if item.startswith(b"PERI_TASK=")), "")


def connections(ports: Sequence[int], *, apart: int) -> list[str]:
    """Return the kernel's lines of sockets connected (or connecting) to a local port, held by any other process."""
    own = set()
    for fd in Path(f"/proc/{apart}/fd").glob("*"):
        try:
            own.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    wanted = {f":{port:04X}" for port in ports}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            # Inode 0: no process holds it any more, the kernel alone keeps it for the far end's sake.
            if words[2][-5:] in wanted and words[9] != "0" and words[9] not in own:
                found.append(line)
    return found


def stubborn_command(marker: str, more: str = "sleep 300") -> str:
    """Return a command line whose grandchild has a session of its own, ignores signals and holds stdout."""
    deaf = 'trap "" INT TERM HUP QUIT; echo deaf; while :; do sleep 1; done'
    return f"setsid sh -c '{deaf}' {marker} & {more}"


def tool(name: str, **args: Any) -> dict[str, Any]:
    """Return a step that calls a tool."""
    return {"tool": name, "args": args}


@contextlib.asynccontextmanager
async def other_client(scene: Scene) -> AsyncIterator[AgentSession]:
    """Connect to the scene's agent as a second client with a conversation of its own."""
    environ = {"PERI_HOME": str(scene.home)}
    paths = find_paths(environ)
    options = {"provider": "openai", "base_url": scene.server.base_url}
    session = AgentSession(
        next(scene.runtime.glob("*.sock")),
        paths=paths,
        log=Log(paths.log / "other.jsonl", paths.trace, "other"),
        workspace=scene.workspace,
        settings=load_settings(paths, options, environ=environ),
        on_event=lambda event: None,
    )
    await session.connect()
    try:
        yield session
    finally:
        await session.close()


async def until(holds: Callable[[], Any], timeout: float = 15) -> None:
    """Wait for a condition while the loop runs on."""
    async with asyncio.timeout(timeout):
        while not holds():
            await asyncio.sleep(0.005)
