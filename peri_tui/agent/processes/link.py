"""The agent's side of the warden: launch it, hand it spawn requests, learn at once when it is gone."""

from __future__ import annotations

import array
import asyncio
import contextlib
import importlib.util
import json
import os
import py_compile
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from peri_tui.errors import WardenLost

WARDEN_FILE: Final = Path(__file__).with_name("warden.py")
WARDEN_OPTIONS: tuple[str, ...] = ()  # "scan": do as on a kernel without lists of children.
_MESSAGE_BYTES: Final = 256 * 1024
_READY_S: Final = 10.0
_SEND_S: Final = 5.0


class Packets(Protocol):
    """A socket on which each ``recv`` and ``send`` is one message, and which never blocks."""

    def fileno(self) -> int:
        """Return the descriptor, -1 once it is closed."""

    def recv(self, size: int, /) -> bytes:
        """Return a message, none when the peer is gone. Raises BlockingIOError when none is there, or OSError."""

    def send(self, data: bytes, /) -> int:
        """Send a message. Raises OSError."""

    def close(self) -> None:
        """Hang up."""


def read_packets(sock: Packets) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages that are there, and whether the peer is gone."""
    found: list[dict[str, Any]] = []
    while True:
        try:
            data = sock.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return found, False
        except OSError:
            return found, True
        if not data:
            return found, True
        with contextlib.suppress(ValueError):
            found.append(json.loads(data))


def send_packet(sock: Packets, message: Mapping[str, Any]) -> bool:
    """Send without blocking; False when it cannot be sent now, or ever."""
    try:
        sock.send(json.dumps(message).encode())
    except OSError:
        return False
    return True


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected packet sockets; ours, the first, does not block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def memory_file() -> int:
    """Return a new file in memory. Raises OSError."""
    return os.memfd_create("peri-spawn", os.MFD_CLOEXEC)


def request_file(
    argv: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    *,
    new_file: Callable[[], int] = memory_file,
    **more: Any,
) -> int:
    """Return a file with a spawn request: a packet could be too small for a long command line."""
    request = {
        "argv": [_image(word) for word in argv],
        "cwd": _image(cwd),
        "env": {_image(name): _image(value) for name, value in env.items()},
    } | more
    fd = new_file()
    with open(fd, "wb", closefd=False) as file:
        file.write(json.dumps(request).encode())
    return fd


def _image(text: str) -> str:
    # A file name may be any bytes, JSON holds text: Latin-1 maps each byte to one character and back.
    return os.fsencode(text).decode("latin-1")


class WardenLink:
    """A running warden.

    Args:
        on_swept: gets each ``swept`` message.
        on_lost: called once when the warden is gone although nobody closed it.
        options: words for the warden's ``main``.
    """

    def __init__(
        self,
        on_swept: Callable[[dict[str, Any]], None],
        on_lost: Callable[[WardenLink], None],
        options: Sequence[str] = (),
    ) -> None:
        self._on_swept = on_swept
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._sock, theirs = packet_pair()
        try:
            with theirs:
                self._process = _launch(theirs.fileno(), options)
        except OSError:
            self._sock.close()
            raise
        self._pidfd = os.pidfd_open(self._process.pid)
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._closing = False
        self.facts: dict[str, Any] = {}
        self._loop.add_reader(self._sock, self._hear)
        self._loop.add_reader(self._pidfd, self._ended)

    @property
    def pid(self) -> int:
        """The warden's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until its end was seen."""
        return not self._gone.is_set()

    @property
    def guards(self) -> bool:
        """True while somebody ends what a supervisor leaves that was killed itself."""
        return self.alive

    async def ready(self) -> None:
        """Wait for its first word. Raises WardenLost when it does not come."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._ready, self._gone)]
        try:
            await asyncio.wait(waits, timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        if not self._ready.is_set():
            raise WardenLost(
                f"the warden ({WARDEN_FILE}) did not start within {_READY_S:.0f} s", pid=self.pid
            )

    async def request(self, number: int, fds: Sequence[int]) -> None:
        """Ask for a supervisor. Raises WardenLost when the request cannot be handed over."""
        data = json.dumps({"op": "spawn", "id": number}).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        deadline = self._loop.time() + _SEND_S
        while self.alive:
            try:
                self._sock.sendmsg([data], rights)
            except BlockingIOError:
                if self._loop.time() > deadline:
                    break
                await asyncio.sleep(0.01)
            except OSError:
                break
            else:
                return
        raise WardenLost("the warden takes no request", pid=self.pid)

    async def close(self, timeout: float) -> None:
        """Hang up, wait for the warden's end, kill it if it does not come."""
        self._closing = True
        self._close_socket()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._gone.wait()
        if self.alive:
            self._process.kill()
            await self._gone.wait()

    def _hear(self) -> None:
        messages, gone = read_packets(self._sock)
        for message in messages:
            if message.get("ev") == "ready":
                self.facts = message
                self._ready.set()
            elif message.get("ev") == "swept":
                self._on_swept(message)
        if gone:
            self._close_socket()
            # A warden without its socket is of no use; usually it is dead already and this reaches nobody.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self) -> None:
        if self._sock.fileno() >= 0:
            self._hear()
        self._close_socket()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._gone.set()
        if not self._closing:
            self._on_lost(self)

    def _close_socket(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()


def find_program(source: Path) -> Path:
    """Return the compiled form of a program, made now if need be; the source where that cannot be.

    Python compiles a program that it is given as source at each start, and never gives back the memory of that:
    2 MB here, which each supervisor would have a share in.
    """
    compiled = Path(importlib.util.cache_from_source(str(source)))
    try:
        if not _is_current(compiled, source) and not sys.dont_write_bytecode:
            py_compile.compile(str(source), str(compiled), doraise=True)
        return compiled if _is_current(compiled, source) else source
    except (OSError, py_compile.PyCompileError):
        return source


def _is_current(compiled: Path, source: Path) -> bool:
    # The header of a compiled file (PEP 552): magic number, kind, and the source's time and size.
    told = source.stat()
    wanted = struct.pack(
        "<4sIII", importlib.util.MAGIC_NUMBER, 0, int(told.st_mtime), told.st_size & 0xFFFFFFFF
    )
    try:
        with open(compiled, "rb") as file:
            return file.read(len(wanted)) == wanted
    except FileNotFoundError:
        return False


def _launch(fd: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    # Not the agent's own folder and environment: the warden must not keep a mount busy, nor hold a key.
    return subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-X",
            "utf8",
            str(find_program(WARDEN_FILE)),
            str(fd),
            *options,
            *WARDEN_OPTIONS,
        ],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
    )
