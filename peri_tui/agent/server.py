"""The agent's door: two WebSockets a client and the HTTP routes, on one Unix socket.

All cancel routes call the same function of the scheduler. A cancel never queues behind other requests: it is judged
and started in the very turn in which its frame is read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
from websockets.asyncio.server import Server, ServerConnection, unix_serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response
from websockets.typing import Subprotocol

from peri_tui.agent.access import Admitted, Refused, admit, peer_uid
from peri_tui.agent.desk import ControlDesk
from peri_tui.agent.stream import StreamFeed
from peri_tui.core import faults, messages
from peri_tui.core.ids import is_ulid
from peri_tui.errors import AgentUnreachable
from peri_tui.log import Log, read_trace

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 5.0
CLOSE_S: Final = 0.5
HELLO_S: Final = 2.0
CLOSE_PROTOCOL: Final = 4400
CLOSE_NO_HELLO: Final = 4408
_BAD_MESSAGES: Final = 20
_BAD_WINDOW_S: Final = 10.0

# A peer that breaks off is not our error, and nothing of a request may reach a log by way of a library.
_quiet = logging.getLogger("peri_tui.websockets")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


class AgentServer:
    """Listens on a Unix socket and speaks ``peri.v1``.

    Args:
        desk: answers the requests.
        socket_path: where to listen (in a 0700 folder).
        token: the secret of this instance.
        trace_dir: where the trace files are.
        log: the structured log.
    """

    def __init__(
        self, desk: ControlDesk, socket_path: Path, token: str, *, trace_dir: Path, log: Log
    ) -> None:
        self._desk = desk
        self._socket_path = socket_path
        self._token = token
        self._trace_dir = trace_dir
        self._log = log
        self._access: dict[ServerConnection, Admitted] = {}
        self._server: Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            AgentUnreachable: the socket cannot be made.
        """
        before = os.umask(0o077)
        try:
            self._server = await unix_serve(
                self._serve,
                str(self._socket_path),
                process_request=self._gate,
                subprotocols=[Subprotocol(messages.SUBPROTOCOL)],
                compression=None,
                max_size=messages.MAX_CONTROL,
                ping_interval=None,
                open_timeout=HELLO_S,
                close_timeout=CLOSE_S,
                server_header=None,
                logger=_quiet,
            )
        except OSError as error:
            raise AgentUnreachable(f"{self._socket_path}: cannot listen: {error.strerror}") from None
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Stop listening and drop every connection, within the close deadline."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._access):
                connection.transport.abort()
            try:
                async with asyncio.timeout(CLOSE_S * 2):
                    await self._server.wait_closed()
            except TimeoutError:
                self._log.event("server close timed out")
        self._socket_path.unlink(missing_ok=True)

    # --- the gate and the HTTP routes -------------------------------------------------------------------------------

    async def _gate(self, connection: ServerConnection, request: HttpRequest) -> Response | None:
        judged = admit(
            self._token,
            peer_uid=peer_uid(connection.transport.get_extra_info("socket")),
            hosts=request.headers.get_all("Host"),
            origins=request.headers.get_all("Origin"),
            authorizations=request.headers.get_all("Authorization"),
        )
        if isinstance(judged, Refused):
            return _answer(judged.status, judged.text)
        parts = urlsplit(request.path)
        if parts.path in (messages.CONTROL_PATH, messages.STREAM_PATH):
            if request.headers.get("Upgrade", "").lower() == "websocket":
                if messages.SUBPROTOCOL not in ",".join(request.headers.get_all("Sec-WebSocket-Protocol")):
                    return _answer(HTTPStatus.BAD_REQUEST, f"speak {messages.SUBPROTOCOL}\n")
                self._access[connection] = judged
                return None
            return _answer(HTTPStatus.UPGRADE_REQUIRED, "WebSocket only\n")
        return await self._route(request.method, parts.path, parse_qs(parts.query))

    async def _route(self, method: str, path: str, query: dict[str, list[str]]) -> Response:
        steps = path.strip("/").split("/")
        if steps[:2] != ["v1", "tasks"] or len(steps) > 4:
            return _answer(HTTPStatus.NOT_FOUND, "no such route\n")
        if len(steps) == 2:
            return await self._get(method, self._desk.list_tasks())
        task = steps[2]
        if not is_ulid(task):
            return _failure(HTTPStatus.NOT_FOUND, "E_UNKNOWN_TASK", f"{task!r} is no task id")
        if len(steps) == 3:
            return await self._get(method, self._desk.describe(task))
        if steps[3] == "trace":
            return await self._get(method, self._trace(task))
        if steps[3] != "cancel":
            return _answer(HTTPStatus.NOT_FOUND, "no such route\n")
        if method != "POST":
            return _answer(HTTPStatus.METHOD_NOT_ALLOWED, "POST only\n")
        return await self._cancel(task, {key: values[0] for key, values in query.items()})

    async def _get(self, method: str, answer: Coroutine[Any, Any, object]) -> Response:
        if method != "GET":
            answer.close()
            return _answer(HTTPStatus.METHOD_NOT_ALLOWED, "GET only\n")
        value = await answer
        if value is None:
            return _failure(HTTPStatus.NOT_FOUND, "E_UNKNOWN_TASK", "no such task")
        return _json(HTTPStatus.OK, value)

    async def _trace(self, task: str) -> object:
        return await asyncio.to_thread(read_trace, self._trace_dir, task)

    async def _cancel(self, task: str, query: dict[str, str]) -> Response:
        if faults.active("client.drop_http"):
            await asyncio.sleep(HELLO_S * 2)
        try:
            epoch, t_ui, attempt = (int(query.get(key, "0")) for key in ("epoch", "t_ui", "attempt"))
        except ValueError:
            return _failure(HTTPStatus.BAD_REQUEST, "E_PROTO", "epoch, t_ui and attempt are whole numbers")
        request = messages.Cancel(
            id=query.get("req", "http"),
            task=task,
            epoch=epoch,
            reason=query.get("reason", "user"),
            mode=query.get("mode", "graceful"),
            t_ui=t_ui,
            attempt=attempt or 1,
        )
        answer = await self._desk.cancel(request, "http")
        status = HTTPStatus.BAD_REQUEST if isinstance(answer, messages.Failure) else HTTPStatus.ACCEPTED
        return _respond(status, "application/json", messages.encode(answer).encode())

    # --- the two sockets --------------------------------------------------------------------------------------------

    async def _serve(self, connection: ServerConnection) -> None:
        access = self._access.get(connection)
        try:
            if access is None or connection.request is None:
                return
            if urlsplit(connection.request.path).path == messages.CONTROL_PATH:
                await _Control(connection, access, self._desk, self._log).run()
            else:
                await self._stream(connection)
        except ConnectionClosed:
            return
        finally:
            self._access.pop(connection, None)

    async def _stream(self, connection: ServerConnection) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = messages.decode_request(await connection.recv())
        except (TimeoutError, messages.MalformedFrame):
            await connection.close(CLOSE_NO_HELLO, "say hello first")
            return
        if not isinstance(hello, messages.Hello):
            await connection.close(CLOSE_PROTOCOL, "say hello first")
            return
        feed = StreamFeed(lambda frame: connection.send(frame), self._desk.replay)
        unsubscribe = self._desk.subscribe(hello.session, hello.resume, feed)
        sender = asyncio.create_task(feed.run())
        replayer = asyncio.create_task(self._desk.catch_up(hello.session, hello.resume, feed))
        try:
            async for frame in connection:
                self._take_credit(feed, frame)
        finally:
            unsubscribe()
            await _end(sender, replayer)

    @staticmethod
    def _take_credit(feed: StreamFeed, frame: str | bytes) -> None:
        try:
            message = messages.decode_request(frame)
        except messages.MalformedFrame:
            return
        if isinstance(message, messages.Credit) and message.n > 0:
            feed.grant(message.n)


class _Control:
    """One control connection."""

    def __init__(self, connection: ServerConnection, access: Admitted, desk: ControlDesk, log: Log) -> None:
        self._connection = connection
        self._access = access
        self._desk = desk
        self._log = log
        self._heard = time.monotonic()
        self._bad: list[float] = []
        self._present = False
        self._pending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        pulse: asyncio.Task[None] | None = None
        try:
            async for frame in self._connection:
                self._heard = time.monotonic()
                request = await self._decode(frame)
                if isinstance(request, messages.Hello) and not self._present:
                    self._present = True
                    pulse = asyncio.create_task(self._pulse())
                    if self._access.may_write:
                        self._desk.presence.client_came()
                if request is not None:
                    self._take(request)
        finally:
            if self._present and self._access.may_write:
                self._desk.presence.client_left()
            # Requests under way are carried out to their end: a submit cut in half would queue and never start.
            if pulse is not None:
                await _end(pulse)

    async def _decode(self, frame: str | bytes) -> messages.Request | None:
        try:
            return messages.decode_request(frame)
        except messages.MalformedFrame as error:
            now = time.monotonic()
            self._bad = [at for at in self._bad if now - at < _BAD_WINDOW_S] + [now]
            code = "E_UNKNOWN_TYPE" if error.unknown else "E_PROTO"
            await self._connection.send(messages.encode(messages.Failure(code=code, msg=str(error))))
            if len(self._bad) >= _BAD_MESSAGES:
                await self._connection.close(1008, "too many bad messages")
            return None

    def _take(self, request: messages.Request) -> None:
        if isinstance(request, messages.Cancel) and faults.active("client.drop_control"):
            return
        if isinstance(request, messages.Heartbeat):
            return
        # Each request runs in a task of its own: none waits behind another, a cancel least of all.
        # ``answer`` of a cancel does its synchronous part (the token) before its first await.
        task = asyncio.create_task(self._answer(request))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _answer(self, request: messages.Request) -> None:
        reply = await self._desk.answer(request, may_write=self._access.may_write)
        if reply is None:
            return
        try:
            await self._connection.send(messages.encode(reply))
        except ConnectionClosed:
            # The request was carried out; the client asks again with the same id.
            return
        if isinstance(reply, messages.Failure) and reply.code == "E_PROTO":
            await self._connection.close(CLOSE_PROTOCOL, reply.msg[:120])

    async def _pulse(self) -> None:
        while time.monotonic() - self._heard < SILENCE_S:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._connection.send(messages.encode(messages.Heartbeat(mono=time.monotonic_ns())))
            except ConnectionClosed:
                return
        self._log.event("client silent", layer=2)
        self._connection.transport.abort()


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _headers(kind: str) -> Headers:
    return Headers([("Content-Type", kind), ("Connection", "close"), ("Cache-Control", "no-store")])


def _answer(status: HTTPStatus, text: str) -> Response:
    return _respond(status, "text/plain; charset=utf-8", text.encode())


def _json(status: HTTPStatus, value: object) -> Response:
    return _respond(status, "application/json", msgspec.json.encode(value))


def _failure(status: HTTPStatus, code: str, text: str) -> Response:
    return _json(status, {"t": "error", "code": code, "msg": text})


def _respond(status: HTTPStatus, kind: str, body: bytes) -> Response:
    headers = _headers(kind)
    headers["Content-Length"] = str(len(body))
    return Response(status, status.phrase, headers, body)
