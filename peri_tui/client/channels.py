"""The two sockets of a client, each kept open by a loop of its own: control (small, acknowledged) and stream (credit).

They share nothing, so a flood on the stream can delay no stop. The library's defaults are overridden where they would
cost a stop its time: no keepalive on a busy stream, half a second to close and then an abort, two seconds to open, the
first reconnect after 50 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from websockets.asyncio.client import ClientConnection, unix_connect
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from peri_tui.core.backoff import delays
from peri_tui.core.messages import (
    CONTROL_PATH,
    CREDIT_WINDOW,
    MAX_CONTROL,
    MAX_STREAM,
    STREAM_PATH,
    SUBPROTOCOL,
    Credit,
    Failure,
    Heartbeat,
    Hello,
    MalformedFrame,
    Message,
    Reply,
    TaskEvent,
    Welcome,
    decode_from_agent,
    encode,
)
from peri_tui.errors import AgentUnreachable, NotAuthorized, PeriError, VersionMismatch

OPEN_S: Final = 2.0
CLOSE_S: Final = 0.5
SEND_S: Final = 1.0
HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 5.0

# Nothing of a frame may reach a log by way of the library.
_quiet = logging.getLogger("peri_tui.websockets.client")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

LOST: Final = (OSError, WebSocketException, TimeoutError, EOFError)


@dataclass(frozen=True, slots=True)
class Target:
    """Where an agent listens, and the token that lets us submit; without one, a client may read and stop."""

    socket: Path
    token: str = ""


@contextlib.asynccontextmanager
async def open_socket(target: Target, route: str, max_size: int) -> AsyncIterator[ClientConnection]:
    """Open one socket for the time of a ``with`` block; leaving it never takes longer than ``CLOSE_S``.

    Raises:
        NotAuthorized: the token is wrong.
        OSError, WebSocketException, TimeoutError: nobody answers.
    """
    headers = {"Authorization": f"Bearer {target.token}"} if target.token else {}
    try:
        socket = await unix_connect(
            str(target.socket), f"ws://localhost{route}", subprotocols=[Subprotocol(SUBPROTOCOL)],
            additional_headers=headers, user_agent_header=None, compression=None, max_size=max_size,
            max_queue=CREDIT_WINDOW, ping_interval=None, open_timeout=OPEN_S, close_timeout=CLOSE_S, proxy=None,
            logger=_quiet,
        )  # fmt: skip
    except InvalidStatus as error:
        if error.response.status_code in (401, 403):
            raise NotAuthorized(f"the agent at {target.socket} does not take our token") from None
        raise
    try:
        yield socket
    finally:
        await _leave(socket)


async def _leave(socket: ClientConnection) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await socket.close()
    except TimeoutError:
        socket.transport.abort()
    except BaseException:
        # Cancelled while closing: the connection goes at once, the cancel goes on.
        socket.transport.abort()
        raise


class ControlChannel:
    """Keeps the control socket: hello, heartbeats, replies.

    Args:
        target: where to connect, asked before each attempt; may start an agent.
        hello: makes the hello of a connection.
        on_welcome: called with each welcome, before replies flow.
        on_reply: called with each other reply.
        on_lost: called with the reason when the connection broke.
        on_unknown: called for a frame that this version does not know.
    """

    def __init__(
        self,
        target: Callable[[], Awaitable[Target]],
        hello: Callable[[], Hello],
        *,
        on_welcome: Callable[[Welcome], Awaitable[None]],
        on_reply: Callable[[Reply], None],
        on_lost: Callable[[str], None],
        on_unknown: Callable[[], None],
    ) -> None:
        self._target = target
        self._hello = hello
        self._on_welcome = on_welcome
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._on_unknown = on_unknown
        self._socket: ClientConnection | None = None
        self._welcomed = False

    @property
    def open(self) -> bool:
        """True after the welcome, until the connection breaks."""
        return self._socket is not None and self._welcomed

    async def run(self) -> None:
        """Connect, and again after each loss, for ever.

        Raises:
            PeriError: it makes no sense to try again (version, token, the agent cannot be started).
        """
        waits = delays(random=random.random)
        while True:
            try:
                async with open_socket(await self._target(), CONTROL_PATH, MAX_CONTROL) as socket:
                    await self._greet(socket)
                    waits = delays(random=random.random)
                    await self._talk(socket)
                reason = "the agent closed the control connection"
            except LOST as error:
                reason = str(error) or type(error).__name__
            finally:
                self._socket, self._welcomed = None, False
            self._on_lost(reason)
            await asyncio.sleep(next(waits))

    async def _greet(self, socket: ClientConnection) -> None:
        hello = self._hello()
        await socket.send(encode(hello))
        async with asyncio.timeout(OPEN_S):
            while not isinstance(reply := self._decode(await socket.recv()), Welcome):
                if isinstance(reply, Failure) and reply.re in (hello.id, ""):
                    raise _refusal(reply)
        if reply.proto not in hello.proto:
            raise VersionMismatch(
                f"the agent speaks peri.v{reply.proto}, this client {hello.proto}: update the older"
            )
        self._socket = socket
        await self._on_welcome(reply)
        self._welcomed = True

    async def _talk(self, socket: ClientConnection) -> None:
        pulse = asyncio.create_task(self._pulse())
        try:
            while True:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        frame = await socket.recv()
                except TimeoutError:
                    socket.transport.abort()
                    raise TimeoutError(f"the agent said nothing for {SILENCE_S:g} s") from None
                reply = self._decode(frame)
                if reply is not None and not isinstance(reply, Heartbeat):
                    self._on_reply(reply)
        finally:
            pulse.cancel()
            await asyncio.gather(pulse, return_exceptions=True)

    def _decode(self, frame: str | bytes) -> Reply | None:
        try:
            message = decode_from_agent(frame)
        except MalformedFrame:
            self._on_unknown()
            return None
        return message if isinstance(message, Reply) else None

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.send(Heartbeat(mono=time.monotonic_ns()))

    async def send(self, message: Message) -> bool:
        """Send now if the connection is open; False if it is not, or takes nothing within ``SEND_S``."""
        socket = self._socket
        if socket is None:
            return False
        try:
            async with asyncio.timeout(SEND_S):
                await socket.send(encode(message))
        except LOST:
            socket.transport.abort()
            return False
        return True

    def abort(self) -> None:
        """Break the connection, so that a fresh one is made."""
        if self._socket is not None:
            self._socket.transport.abort()


class StreamChannel:
    """Keeps the stream socket: hello with resume points, events in order, credit back.

    Args:
        target: where to connect; ``None`` while it is not known.
        hello: makes the hello of a connection.
        on_event: takes an event; False asks for a new connection (something is missing).
        on_opened: called before the hello of each connection.
        consumed: counts one frame and returns the credit to give back.
        on_unknown: called for a frame that this version does not know.
    """

    def __init__(
        self,
        target: Callable[[], Awaitable[Target]],
        hello: Callable[[], Hello],
        *,
        on_event: Callable[[TaskEvent], Awaitable[bool]],
        on_opened: Callable[[], None],
        consumed: Callable[[], int],
        on_unknown: Callable[[], None],
    ) -> None:
        self._target = target
        self._hello = hello
        self._on_event = on_event
        self._on_opened = on_opened
        self._consumed = consumed
        self._on_unknown = on_unknown
        self._socket: ClientConnection | None = None
        self._nudged = asyncio.Event()
        self.connections = 0

    async def run(self) -> None:
        """Connect, and again after each loss, for ever.

        Raises:
            PeriError: it makes no sense to try again.
        """
        waits = delays(random=random.random)
        while True:
            try:
                async with open_socket(await self._target(), STREAM_PATH, MAX_STREAM) as socket:
                    self._socket = socket
                    self._on_opened()
                    self.connections += 1
                    await socket.send(encode(self._hello()))
                    await socket.send(encode(Credit(n=CREDIT_WINDOW)))
                    if await self._follow(socket):
                        waits = delays(random=random.random)
            except LOST:
                pass
            finally:
                self._socket = None
            await self._pause(next(waits))

    async def _pause(self, seconds: float) -> None:
        self._nudged.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._nudged.wait()

    def nudge(self) -> None:
        """Try again now: the control socket just found a living agent."""
        self._nudged.set()

    async def _follow(self, socket: ClientConnection) -> bool:
        heard = False
        while True:
            # A quiet stream is no sign of anything: whether the agent lives is the control socket's business.
            try:
                frame = await socket.recv()
            except LOST:
                return heard
            heard = True
            event = self._decode(frame)
            if event is not None and not await self._on_event(event):
                return heard
            if grant := self._consumed():
                await socket.send(encode(Credit(n=grant)))

    def _decode(self, frame: str | bytes) -> TaskEvent | None:
        try:
            message = decode_from_agent(frame)
        except MalformedFrame:
            self._on_unknown()
            return None
        return message if isinstance(message, TaskEvent) else None

    def abort(self) -> None:
        """Break the connection, so that a fresh one is made."""
        if self._socket is not None:
            self._socket.transport.abort()


def _refusal(reply: Failure) -> PeriError:
    if reply.code == "E_PROTO":
        return VersionMismatch(reply.msg)
    if reply.code == "E_AUTH":
        return NotAuthorized(reply.msg)
    return AgentUnreachable(f"the agent refused the connection: {reply.msg}", code=reply.code)
