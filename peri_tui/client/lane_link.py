"""One synchronous control connection without an event loop, for the stop lane.

A sans-I/O WebSocket over a plain Unix socket. Two threads use it: the lane thread connects, reads and keeps it alive;
the input thread sends on it. A lock guards protocol and socket, and the sender never waits longer than it says.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from pathlib import Path
from typing import Final

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from peri_tui.core.messages import CONTROL_PATH, MAX_CONTROL, SUBPROTOCOL

OPEN_TIMEOUT_S: Final = 2.0
_READ: Final = 64 * 1024


class LaneLink:
    """An open control connection.

    Raises:
        OSError: nobody listens, or the handshake did not end within ``OPEN_TIMEOUT_S``.
    """

    def __init__(self, path: Path, *, timeout: float = OPEN_TIMEOUT_S) -> None:
        self._lock = threading.Lock()
        self._protocol = ClientProtocol(
            parse_uri(f"ws://localhost{CONTROL_PATH}"),
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            max_size=MAX_CONTROL,
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames: list[str] = []
        self._broken = False
        try:
            self._handshake(path, timeout)
        except BaseException:
            self._socket.close()
            raise

    def _handshake(self, path: Path, timeout: float) -> None:
        until = time.monotonic() + timeout
        self._socket.settimeout(timeout)
        self._socket.connect(str(path))
        self._protocol.send_request(self._protocol.connect())
        self._socket.sendall(b"".join(self._protocol.data_to_send()))
        while not self._opened():
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            data = self._socket.recv(_READ)
            if not data or time.monotonic() > until:
                raise ConnectionError("the agent did not open the control connection")
            self._protocol.receive_data(data)
        self._socket.setblocking(False)

    def _opened(self) -> bool:
        self._collect()
        if self._protocol.handshake_exc is not None:
            raise ConnectionError(str(self._protocol.handshake_exc))
        return self._protocol.state is OPEN

    def fileno(self) -> int:
        """Return the descriptor to select on."""
        return self._socket.fileno()

    @property
    def usable(self) -> bool:
        """True until a write was cut or the peer left."""
        return not self._broken and self._protocol.state is OPEN

    def send(self, frame: str, *, patience: float = 0.001) -> bool:
        """Write a frame; True when every byte is in the kernel's hands.

        Args:
            frame: the text of one message.
            patience: seconds to wait for the lock, and again for a full socket.
        """
        if not self._lock.acquire(timeout=patience):
            return False
        try:
            if not self.usable:
                return False
            self._protocol.send_text(frame.encode())
            return self._write(b"".join(self._protocol.data_to_send()), patience)
        except (OSError, WebSocketException):
            self._broken = True
            return False
        finally:
            self._lock.release()

    def _write(self, data: bytes, patience: float) -> bool:
        until = time.monotonic() + patience
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                rest = until - time.monotonic()
                if rest <= 0 or not select.select([], [self._socket], [], rest)[1]:
                    # Half a frame may be out: nothing more can be said on this connection.
                    self._broken = True
                    return False
        return True

    def receive(self) -> list[str]:
        """Return the text frames that have arrived; call it when the descriptor is readable.

        Raises:
            ConnectionError: the peer closed or broke the connection.
        """
        with self._lock:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                return []
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            self._collect()
            with contextlib.suppress(BlockingIOError):
                for answer in self._protocol.data_to_send():
                    if answer:
                        self._socket.send(answer)
            if self._protocol.state is not OPEN:
                self._broken = True
                raise ConnectionError("the agent closed the control connection")
            frames, self._frames = self._frames, []
            return frames

    def _collect(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                continue
            if isinstance(event, Frame) and event.opcode is Opcode.TEXT and event.fin:
                self._frames.append(bytes(event.data).decode("utf-8", "replace"))

    def close(self) -> None:
        """Close at once; the agent reads it as a client that left."""
        self._broken = True
        # Under the lock, so that the number is not reused by another file while the input thread sends on it.
        with self._lock, contextlib.suppress(OSError):
            self._socket.close()
