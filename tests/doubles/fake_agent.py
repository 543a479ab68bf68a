"""A scripted agent of ``peri.v1`` on a real Unix socket, in a thread with a loop of its own.

It runs beside the test's loop, so that a blocked client loop can be tested. It keeps the wire's rules (dense numbers,
credit, one effect a cancel) and breaks them only where a script says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from peri_tui.core import messages as m
from peri_tui.core.ids import make_ulid


@dataclass
class Script:
    """What goes wrong; every counter counts down to normal."""

    drop_cancels: int = 0
    drop_acks: int = 0
    cut_after_cancel: int = 0
    http_deaf: bool = False
    refuse_proto: bool = False
    proto: int = m.PROTOCOL
    silent: bool = False
    extra_frames: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """A cancel that arrived."""

    at: int
    route: str
    request: m.Cancel


class FakeAgent:
    """See the module; use as a context manager."""

    def __init__(self, path: Path, *, session: str = "", token: str = "") -> None:
        self.path = path
        self.token = token
        self.session = session or make_ulid(1, b"0123456789")
        self.script = Script()
        self.cancels: list[Seen] = []
        self.effects: dict[str, str] = {}
        self.requests: list[Any] = []
        self.acked_ends: list[str] = []
        self.logs: dict[str, list[Any]] = defaultdict(list)
        self.control_connections = 0
        self.stream_connections = 0
        self.frames_sent = 0
        self.hellos: list[m.Hello] = []
        self.authorizations: list[str] = []
        self._streams: set[ServerConnection] = set()
        self._controls: set[ServerConnection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._grown: asyncio.Event | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> FakeAgent:
        self._thread.start()
        assert self._ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self.call(lambda: self._stop.set())
        self._thread.join(5)

    def call(self, act: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    def publish(self, *events: Any) -> None:
        """Append events; numbers are given here unless they have one."""

        def append() -> None:
            for event in events:
                log = self.logs[event.task]
                if not event.seq:
                    event.seq = (max(log[-1].seq, getattr(log[-1], "seq_to", 0)) if log else 0) + 1
                log.append(event)
            self._grow()

        self.call(append)

    def tell(self, reply: Any) -> None:
        """Send a reply of our own on every control connection."""
        frame = m.encode(reply)
        self.call(lambda: [asyncio.ensure_future(socket.send(frame)) for socket in list(self._controls)])

    def cut_streams(self) -> None:
        self.call(lambda: [socket.transport.abort() for socket in list(self._streams)])

    def cut_controls(self) -> None:
        self.call(lambda: [socket.transport.abort() for socket in list(self._controls)])

    def _grow(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._grown = asyncio.Event()
        self.path.unlink(missing_ok=True)
        async with unix_serve(
            self._talk, str(self.path), process_request=self._gate, subprotocols=[m.SUBPROTOCOL], compression=None,
            ping_interval=None, close_timeout=0.1,
        ):  # fmt: skip
            self._ready.set()
            await self._stop.wait()
            for socket in [*self._streams, *self._controls]:
                socket.transport.abort()
        # An aborted transport closes its socket in a later turn; without one it would be left to the collector.
        for _ in range(5):
            await asyncio.sleep(0)

    async def _gate(self, connection: ServerConnection, request: Request) -> Response | None:
        self.authorizations.append(request.headers.get("Authorization", ""))
        parts = urlsplit(request.path)
        if not parts.path.startswith("/v1/tasks"):
            return None
        if self.script.http_deaf:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3):
                    await self._stop.wait()
            return _json(b"{}", 503)
        steps = parts.path.strip("/").split("/")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if steps[-1] == "cancel":
            cancel = m.Cancel(id=query.get("req", "http"), task=steps[2], mode=query.get("mode", "graceful"))
            return _json(m.encode(self._cancel(cancel, "http")).encode(), 202)
        return _json(
            msgspec.json.encode([m.TaskSummary(task=task, state="running") for task in self.logs]), 200
        )

    def _cancel(self, request: m.Cancel, route: str) -> m.CancelAccepted:
        self.cancels.append(Seen(time.monotonic_ns(), route, request))
        first = request.task not in self.effects
        self.effects.setdefault(request.task, request.id)
        log = self.logs[request.task]
        return m.CancelAccepted(
            re=request.id, task=request.task, state="cancelling", cancel_id=self.effects[request.task], first=first,
            reason=request.reason, mode=request.mode, cut_seq=log[-1].seq if log else 0, deadline_ms=8000,
        )  # fmt: skip

    async def _talk(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            if urlsplit(connection.request.path).path == m.CONTROL_PATH:
                await self._control(connection)
            else:
                await self._stream(connection)

    async def _control(self, connection: ServerConnection) -> None:
        self.control_connections += 1
        self._controls.add(connection)
        pulse = asyncio.create_task(self._pulse(connection))
        try:
            async for frame in connection:
                request = m.decode_request(frame)
                if isinstance(request, m.Cancel):
                    await self._answer_cancel(connection, request)
                elif not isinstance(request, m.Heartbeat):
                    await self._answer(connection, request)
        finally:
            pulse.cancel()
            self._controls.discard(connection)

    async def _pulse(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await asyncio.sleep(1)
                if not self.script.silent:
                    await connection.send(m.encode(m.Heartbeat(mono=time.monotonic_ns())))

    async def _answer_cancel(self, connection: ServerConnection, request: m.Cancel) -> None:
        if self.script.drop_cancels > 0:
            self.script.drop_cancels -= 1
            return
        reply = self._cancel(request, "control")
        if self.script.cut_after_cancel > 0:
            self.script.cut_after_cancel -= 1
            connection.transport.abort()
        elif self.script.drop_acks > 0:
            self.script.drop_acks -= 1
        else:
            await connection.send(m.encode(reply))

    async def _answer(self, connection: ServerConnection, request: Any) -> None:
        self.requests.append(request)
        if isinstance(request, m.Hello):
            self.hellos.append(request)
            if self.script.refuse_proto:
                text = "this agent speaks peri.v9, the client 1: update the older of the two"
                await connection.send(m.encode(m.Failure(code="E_PROTO", msg=text, re=request.id)))
                await connection.close(4400)
                return
            for frame in self.script.extra_frames:
                await connection.send(frame)
            tasks = [m.TaskSummary(task=task, state="running") for task in self.logs]
            welcome = m.Welcome(
                re=request.id, instance=self.path.stem, pid=1, proto=self.script.proto, session=self.session,
                may_write=True, tasks=tasks,
            )  # fmt: skip
            await connection.send(m.encode(welcome))
        elif isinstance(request, m.Submit):
            await connection.send(
                m.encode(m.SubmitOk(re=request.id, task=request.task, state="queued", epoch=1))
            )
        elif isinstance(request, m.EndAck):
            self.acked_ends.append(request.task)
        else:
            await connection.send(m.encode(m.Ok(re=request.id)))

    async def _stream(self, connection: ServerConnection) -> None:
        self.stream_connections += 1
        self._streams.add(connection)
        hello = m.decode_request(await connection.recv())
        sent = dict(hello.resume)
        credit = [0, 0]  # granted, used
        feeder = asyncio.create_task(self._feed(connection, sent, credit))
        try:
            async for frame in connection:
                message = m.decode_request(frame)
                if isinstance(message, m.Credit):
                    credit[0] += message.n
                    self._grow()
        finally:
            feeder.cancel()
            self._streams.discard(connection)

    async def _feed(self, connection: ServerConnection, sent: dict[str, int], credit: list[int]) -> None:
        for frame in self.script.extra_frames:
            await connection.send(frame)
        with contextlib.suppress(ConnectionClosed):
            while True:
                grown = self._grown
                for task, log in list(self.logs.items()):
                    for event in list(log):
                        if event.seq > sent.get(task, 0) and credit[1] < credit[0]:
                            sent[task] = max(event.seq, getattr(event, "seq_to", 0))
                            credit[1] += 1
                            self.frames_sent += 1
                            await connection.send(m.encode(event))
                await grown.wait()


def _json(body: bytes, status: int) -> Response:
    headers = Headers([("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return Response(status, "OK", headers, body)
