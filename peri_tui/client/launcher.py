"""Finds the agent of a workspace, or starts one; the only place in the client that starts a process.

An embedded agent is a process with its own session, started by an explicit argument list and with nothing secret in
it. It holds the read end of a pipe whose write end stays open here for our whole life: its end of file is our death.
An agent that lost its TUI (*orphaned*) is adopted instead of starting a second one for the same workspace.

Who an agent is gets proven by the kernel, not by a file: the process that listens on the socket must be the one that
the file names (``SO_PEERCRED``), and signals go through a process descriptor, so that a reused pid is never hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal as signals
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from peri_tui.client.mint import fresh_id
from peri_tui.config import Paths, Settings, make_private
from peri_tui.errors import AgentUnreachable, ConfigError, InputError, PeriError, UsageError, WorkspaceBusy

READY_DEADLINE_S: Final = 15.0
_ERRORS_BY_EXIT: Final[dict[int, type[PeriError]]] = {
    kind.exit_code: kind for kind in (UsageError, InputError, ConfigError)
}


class AgentRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an agent says of itself in ``<runtime>/<instance>.json``."""

    instance: str
    pid: int
    start_time: int | float | str = 0
    workspace: str = ""
    orphaned: bool = False
    started: float = 0


class _Ready(msgspec.Struct, kw_only=True):
    ready: bool = False
    pid: int = 0
    error: str = ""
    exit: int = 1


@dataclass(frozen=True, slots=True)
class _Spawned:
    process: subprocess.Popen[bytes]
    ready_fd: int
    parent_fd: int


class AgentHandle:
    """One agent process as the client sees it.

    Args:
        instance: the agent's id.
        pid: its process id.
        socket: its Unix socket.
        parent_fd: the write end of the life pipe, ``None`` for an adopted agent.
        adopted: it was started by somebody else.
        process: the child, when it is ours.
    """

    def __init__(
        self,
        instance: str,
        pid: int,
        socket: Path,
        *,
        parent_fd: int | None = None,
        adopted: bool = False,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.instance = instance
        self.pid = pid
        self.socket = socket
        self.parent_fd = parent_fd
        self.adopted = adopted
        self._process = process
        self._gone = threading.Event()
        self._pidfd = _open_pidfd(pid) if process is None else -1
        if process is not None:
            # Somebody has to reap the child the moment it dies; a thread needs no loop and no SIGCHLD handler.
            threading.Thread(target=self._reap, args=(process,), name="peri-reaper", daemon=True).start()

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._gone.set()

    def is_alive(self) -> bool:
        """Tell whether the process runs; a zombie does not."""
        if self._process is not None:
            return not self._gone.is_set()
        if self._pidfd >= 0:
            return not select.select([self._pidfd], [], [], 0)[0]
        return _is_running(self.pid)

    def signal(self, number: int) -> bool:
        """Send a signal to this very process; False when it is already gone."""
        if not self.is_alive():
            return False
        try:
            if self._process is not None:
                self._process.send_signal(number)
            elif self._pidfd >= 0:
                signals.pidfd_send_signal(self._pidfd, signals.Signals(number))
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill_session(self) -> bool:
        """Kill the agent with all processes of its own group; False when there was nothing to kill.

        The supervisors of commands have sessions of their own: they see the end of file and end their trees with
        proof, which a kill from here could not give.
        """
        alive = self.is_alive()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if alive:
                os.killpg(self.pid, signals.SIGKILL)
        return alive

    async def wait_gone(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the end of the process; tell whether it ended."""
        await asyncio.to_thread(self._wait, timeout)
        return not self.is_alive()

    def _wait(self, timeout: float) -> None:
        if self._process is not None:
            self._gone.wait(timeout)
        elif self._pidfd >= 0:
            select.select([self._pidfd], [], [], timeout)
        else:
            until = time.monotonic() + timeout
            while self.is_alive() and time.monotonic() < until:
                time.sleep(0.02)

    def close(self) -> None:
        """Let go of the agent: it sees end of file and follows its policy for a client that left. Idempotent."""
        for name in ("parent_fd", "_pidfd"):
            fd = getattr(self, name)
            if fd is not None and fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.parent_fd = None
        self._pidfd = -1


async def find_or_start(
    paths: Paths,
    workspace: Path,
    *,
    settings: Settings | None = None,
    environ: Mapping[str, str] = os.environ,
    adopt: bool = True,
) -> AgentHandle:
    """Return an agent for the workspace: an orphaned one of the same folder, else a new process.

    Args:
        paths: the user's folders.
        workspace: the folder that the agent works on.
        settings: the settings of this client; the agent reads file and environment by itself, what differs a task
            travels with the task.
        environ: the environment of a new agent; the model's key stays in it and goes no further.
        adopt: take over an orphan, if there is one.

    Raises:
        AgentUnreachable: it did not become ready within 15 s, or died before.
        PeriError: the agent's own refusal (workspace, configuration), by its exit code.
    """
    found = await asyncio.to_thread(_adopt, paths, workspace) if adopt else None
    return found or await start(paths, workspace, environ=environ)


async def start(
    paths: Paths,
    workspace: Path,
    *,
    environ: Mapping[str, str] = os.environ,
    deadline_s: float = READY_DEADLINE_S,
) -> AgentHandle:
    """Start an agent process and wait until it says that it is ready.

    Raises:
        AgentUnreachable, PeriError: as in ``find_or_start``.
    """
    instance = fresh_id()
    spawned = await asyncio.to_thread(_spawn, paths, workspace, instance, environ)
    handle = AgentHandle(
        instance,
        spawned.process.pid,
        paths.socket(instance),
        parent_fd=spawned.parent_fd,
        process=spawned.process,
    )
    try:
        line = await _read_line(spawned.ready_fd, deadline_s)
        _check_ready(line, _error_file(paths, instance))
    except BaseException:
        handle.kill_session()
        handle.close()
        raise
    finally:
        os.close(spawned.ready_fd)
    return handle


def command(instance: str, workspace: Path, ready_fd: int, parent_fd: int) -> list[str]:
    """Return the argument list of an agent; ``-P`` keeps the current folder out of the import path."""
    return [
        sys.executable, "-P", "-m", "peri_tui.agent", "--instance", instance, "--workspace", str(workspace),
        "--ready-fd", str(ready_fd), "--parent-fd", str(parent_fd),
    ]  # fmt: skip


def read_records(paths: Paths) -> list[AgentRecord]:
    """Return what the agents of this user say of themselves, oldest first; damaged files are left out."""
    records = []
    for file in sorted(paths.runtime.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            records.append(msgspec.json.decode(file.read_bytes(), type=AgentRecord))
    return sorted(records, key=lambda record: record.started)


def listening_pid(path: Path, timeout: float = 0.5) -> int:
    """Return the pid of the process that listens on a Unix socket, 0 if nobody does.

    Where the system does not name the peer, a connection that is taken counts as -1 (somebody).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout)
        try:
            probe.connect(str(path))
            if not hasattr(socket, "SO_PEERCRED"):
                return -1
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return 0
    return int(struct.unpack("3i", raw)[0])


def living(paths: Paths, records: Iterable[AgentRecord]) -> list[AgentRecord]:
    """Return the records whose process really listens on its socket."""
    return [record for record in records if listening_pid(paths.socket(record.instance)) in (record.pid, -1)]


def _adopt(paths: Paths, workspace: Path) -> AgentHandle | None:
    wanted = os.path.realpath(workspace)
    orphans = [r for r in read_records(paths) if r.orphaned and os.path.realpath(r.workspace) == wanted]
    for record in living(paths, reversed(orphans)):
        return AgentHandle(record.instance, record.pid, paths.socket(record.instance), adopted=True)
    return None


def _spawn(paths: Paths, workspace: Path, instance: str, environ: Mapping[str, str]) -> _Spawned:
    make_private(paths.runtime)
    make_private(paths.log)
    ready_read, ready_write = os.pipe()
    parent_read, parent_write = os.pipe()
    try:
        fd = os.open(
            _error_file(paths, instance), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(fd, "wb") as errors:
            process = subprocess.Popen(
                command(instance, workspace, ready_write, parent_read),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd=paths.runtime,
                env=dict(environ),
                pass_fds=(ready_write, parent_read),
                start_new_session=True,
            )
    except OSError as error:
        os.close(ready_read)
        os.close(parent_write)
        raise AgentUnreachable(f"the agent cannot be started: {error}") from None
    finally:
        os.close(ready_write)
        os.close(parent_read)
    return _Spawned(process, ready_read, parent_write)


async def _read_line(fd: int, deadline_s: float) -> bytes:
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    line = b""
    try:
        async with asyncio.timeout(deadline_s):
            while not line.endswith(b"\n"):
                readable = loop.create_future()
                loop.add_reader(fd, _set_once, readable)
                try:
                    await readable
                finally:
                    loop.remove_reader(fd)
                chunk = os.read(fd, 65536)
                line += chunk
                if not chunk:
                    break
    except TimeoutError:
        raise AgentUnreachable(f"the agent did not become ready within {deadline_s:g} s") from None
    return line


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _check_ready(line: bytes, errors: Path) -> None:
    try:
        word = msgspec.json.decode(line, type=_Ready)
    except msgspec.DecodeError:
        last = _last_line(errors)
        raise AgentUnreachable(
            f"the agent died while starting{': ' + last if last else ''} (see {errors})"
        ) from None
    if word.ready:
        return
    kind = _ERRORS_BY_EXIT.get(
        word.exit, WorkspaceBusy if word.exit == WorkspaceBusy.exit_code else PeriError
    )
    raise kind(word.error or f"the agent refused to start with exit code {word.exit}")


def _error_file(paths: Paths, instance: str) -> Path:
    return paths.log / f"agent-{instance}.err"


def _last_line(file: Path) -> str:
    try:
        lines = file.read_bytes()[-4096:].decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
