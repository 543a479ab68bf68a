"""Sockets that are known from their creation on, and the kernel's word on whether they are still open.

A connection to a model must end at any moment, by one synchronous call that no second cancel can cut short. So a
socket is recorded before it connects, and reading, writing and TLS run on the socket itself, with no transport
object between that would have to be awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import select
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from peri_tui.core import faults

T = TypeVar("T")

# A flood always has bytes ready, and a stop is heard between two turns of the loop. Measured with two busy cores: a
# turn takes 12 ms (median) with reads of 16 KiB, 0.9 ms with 4 KiB, at the same number of events a second.
READ_SIZE: Final = 4 * 1024
_OPEN_STATES: Final = {1: "ESTABLISHED", 2: "SYN_SENT", 3: "SYN_RECV", 8: "CLOSE_WAIT"}
_NO_LINGER: Final = struct.pack("ii", 1, 0)

# Descriptors that the fault ``model.keep_socket`` holds open for the life of the process.
_kept: list[int] = []


def release_kept() -> None:
    """Close what the fault ``model.keep_socket`` held open."""
    while _kept:
        os.close(_kept.pop())


@dataclass(frozen=True, slots=True)
class ShutSocket:
    """One socket that was shut down: evidence for the trace. ``bytes_in`` were received on it."""

    peer: str
    local: str
    phase: str
    bytes_in: int


@dataclass(slots=True, eq=False)
class OwnedSocket:
    """A socket from its creation on; the inode outlives the descriptor and is what the kernel is asked for.

    ``phase`` is connecting, tls or open. ``last_life`` is the monotonic time of the last byte in.
    """

    sock: socket.socket
    peer: str
    inode: int
    phase: str = "connecting"
    bytes_in: int = 0
    last_life: float = field(default_factory=time.monotonic)
    shut: bool = False
    kept: int = -1

    @classmethod
    def create(cls, family: int, name: tuple[Any, ...]) -> OwnedSocket:
        """Make a non-blocking TCP socket that is going to connect to ``name``."""
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        owned = cls(sock, show_address(name), os.fstat(sock.fileno()).st_ino)
        if faults.active("model.keep_socket"):
            owned.kept = os.dup(sock.fileno())
            _kept.append(owned.kept)
        return owned

    @property
    def is_closed(self) -> bool:
        """True when our descriptor is given back."""
        return self.sock.fileno() < 0

    def describe(self, phase: str) -> ShutSocket:
        """Return what is known of it now; ``phase`` is the word for an open connection."""
        try:
            local = show_address(self.sock.getsockname())
        except OSError:
            local = ""
        return ShutSocket(self.peer, local, phase if self.phase == "open" else self.phase, self.bytes_in)

    def shut_down(self) -> None:
        """End the connection in both directions, also one that is still being made; never raises."""
        self.shut = True
        if self.is_closed:
            return
        with contextlib.suppress(OSError):
            # Unsent bytes would hold our end of file back behind a peer that does not read: then close resets.
            unsent = fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4))
            if any(unsent):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut down and give the descriptor back; never raises, never suspends."""
        fd = self.sock.fileno()
        if fd < 0:
            return
        if not faults.active("model.keep_socket"):
            self.shut_down()
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            loop = asyncio.get_running_loop()
            loop.remove_reader(fd)
            loop.remove_writer(fd)
        self.sock.close()

    def is_readable(self) -> bool:
        """True when bytes or an end of file wait."""
        if self.is_closed:
            return True
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))


class Channel(Protocol):
    """Bytes in and out of an owned socket. Errors are ``OSError`` (``ssl.SSLError`` is one)."""

    async def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, none at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        ...


class PlainChannel:
    """Reads and writes the socket on the running loop."""

    def __init__(self, owned: OwnedSocket) -> None:
        self.owned = owned

    async def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, none at the end."""
        data = await asyncio.get_running_loop().sock_recv(self.owned.sock, min(size, READ_SIZE))
        # sock_recv does not suspend while bytes are ready; without this a flood starves the loop and the stop.
        await asyncio.sleep(0)
        if data:
            self.owned.bytes_in += len(data)
            self.owned.last_life = time.monotonic()
        return data

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        await asyncio.get_running_loop().sock_sendall(self.owned.sock, data)


class TlsChannel:
    """TLS through memory buffers, so that the socket below stays ours, from the handshake on."""

    def __init__(self, below: PlainChannel, context: ssl.SSLContext, hostname: str | None) -> None:
        self.owned = below.owned
        self._below = below
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=hostname)

    async def shake_hands(self) -> None:
        """Run the handshake.

        Raises:
            ssl.SSLError: it failed, or the certificate is not good.
        """
        await self._pump(self.tls.do_handshake)
        await self._flush()

    async def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes, none at the end."""
        try:
            data = await self._pump(lambda: self.tls.read(min(size, READ_SIZE)))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""
        await asyncio.sleep(0)
        return data

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        await self._pump(lambda: self.tls.write(data))
        await self._flush()

    async def _pump(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._below.read(READ_SIZE)
                if data:
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()

    async def _flush(self) -> None:
        data = self._outgoing.read()
        if data:
            await self._below.write(data)


async def resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, name) of every address; a literal address needs no thread.

    Raises:
        socket.gaierror: the name has none.
    """
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).version == 4:
            return [(socket.AF_INET, (host, port))]
        return [(socket.AF_INET6, (host, port, 0, 0))]
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return [(family, name) for family, _, _, _, name in found]


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine by its name alone (nothing is looked up)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        name = host.lower().rstrip(".")
        return name == "localhost" or name.endswith(".localhost")


def show_address(name: Any) -> str:
    """Return a socket address in words."""
    if not isinstance(name, tuple):
        return str(name)
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def still_open(sockets: Iterable[OwnedSocket]) -> list[str]:
    """Return the connections that the kernel still has open on our side, in words.

    Looks the inodes up in the kernel's table, whatever we did and whoever else holds a descriptor. A connection on
    which our end of file was sent is not open.
    """
    inodes = {owned.inode: owned for owned in sockets}
    if inodes and sys.platform == "linux":
        with contextlib.suppress(OSError):
            return _open_by_table(inodes)
    return [text for owned in inodes.values() if (text := open_by_handle(owned))]


def _open_by_table(inodes: dict[int, OwnedSocket]) -> list[str]:
    found = []
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        if table.name == "tcp6" and not table.exists():
            continue
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            owned = inodes.get(int(fields[9]))
            state = _OPEN_STATES.get(int(fields[3], 16))
            if owned is not None and state is not None:
                port = int(fields[1].rpartition(":")[2], 16)
                found.append(f"local port {port} to {owned.peer} {state}")
    return found


def open_by_handle(owned: OwnedSocket) -> str:
    """Without the kernel's table: ask a handle (the first byte of TCP_INFO is the state)."""
    fd = owned.kept if owned.kept in _kept else owned.sock.fileno()
    if fd < 0:
        return ""
    with socket.socket(fileno=os.dup(fd)) as probe:
        try:
            if hasattr(socket, "TCP_INFO"):
                state = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                return f"to {owned.peer} {_OPEN_STATES[state]}" if state in _OPEN_STATES else ""
            probe.getpeername()
        except OSError:
            return ""
    return "" if owned.shut else f"to {owned.peer}"
