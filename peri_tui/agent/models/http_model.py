"""What every model over HTTP shares: clocks, retries, usage, hanging up.

Every clock is ``asyncio.timeout`` around one await, never around a ``yield``: the time that the consumer takes is not
the model's.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from peri_tui.agent.models.call import (
    Clocks,
    FarEnd,
    Meter,
    ModelEvent,
    ModelRequest,
    Retrying,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    UsageReport,
)
from peri_tui.agent.models.refusals import refusal, retry_wait
from peri_tui.agent.models.sse import SseEvent, SseReader
from peri_tui.core.backoff import full_jitter
from peri_tui.core.messages import Usage
from peri_tui.errors import ModelError, ModelProtocolError, ModelRefused, ModelTimeout
from peri_tui.net import ModelTransport, Reply
from peri_tui.sockets import ShutSocket

MAX_ATTEMPTS: Final = 3
# A server that asks for a longer wait than this has said no.
MAX_RETRY_AFTER: Final = 120.0
_ERROR_BODY_MAX: Final = 64 * 1024
_ERROR_BODY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What goes over the wire."""

    url: str
    headers: Mapping[str, str]
    content: bytes


class Decoder(Protocol):
    """Turns the events of one answer into model events; a provider's own part."""

    @property
    def patience(self) -> float | None:
        """None while more must come; after the terminator, the seconds that what may follow is waited for."""
        ...

    def take(self, event: SseEvent) -> Iterator[ModelEvent]:
        """Yield what this event means.

        Raises:
            ModelRefused: it is an error object.
            ModelProtocolError: it is not the protocol.
        """
        ...

    def end(self) -> Iterator[ModelEvent]:
        """The stream is over: yield the rest.

        Raises:
            ModelTruncated: the terminator never came.
        """
        ...


class HttpModel(abc.ABC):
    """A model behind HTTP and server-sent events.

    Args:
        name: what to call it.
        transport: the task's connections.
        clocks: limits of one turn.
        secret: the key, which no message may hold.
        delays: makes the schedule of retries, in seconds.
        sleep: waits; a test replaces it.
    """

    def __init__(
        self,
        name: str,
        transport: ModelTransport,
        *,
        clocks: Clocks,
        secret: str = "",
        delays: Callable[[], Iterator[float]] = lambda: full_jitter(random=random.random),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self._transport = transport
        self._clocks = clocks
        self._secret = secret
        self._delays = delays
        self._sleep = sleep
        self._meter = Meter()
        self._far_end: FarEnd = "none"
        self._asked_at = time.monotonic()

    @abc.abstractmethod
    def build(self, request: ModelRequest) -> HttpRequest:
        """Return the HTTP request of a turn."""

    @abc.abstractmethod
    def decoder(self) -> Decoder:
        """Return the decoder for one answer."""

    @property
    def phase(self) -> str:
        """What it is doing."""
        return self._transport.phase

    @property
    def last_life(self) -> float:
        """When the last byte came, or the request went out."""
        return max(self._transport.last_life, self._asked_at)

    def shut(self) -> list[ShutSocket]:
        """Hang up for good; see ``ModelTransport.shut``."""
        return self._transport.shut()

    def open_sockets(self) -> list[str]:
        """Return the connections that the kernel still has open."""
        return self._transport.open_sockets()

    def far_end(self) -> FarEnd:
        """Say whether the server stopped: a closed connection is what it is told by, so ``assumed`` at best."""
        if self._far_end == "assumed" and self._transport.open_sockets():
            return "continues"
        return self._far_end

    def usage(self) -> Usage:
        """Return the tokens of all turns."""
        return self._meter.usage()

    async def aclose(self) -> None:
        """Close every connection."""
        self._meter.end()
        await self._transport.aclose()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Yield the events of one turn; retries by itself as long as nothing was yielded."""
        wire = self.build(request)
        end = asyncio.get_running_loop().time() + self._clocks.total
        waits = self._delays()
        try:
            for attempt in range(1, MAX_ATTEMPTS + 1):
                yielded = False
                try:
                    async with contextlib.aclosing(self._attempt(wire, end)) as events:
                        async for event in events:
                            yielded = True
                            yield event
                    return
                except ModelError as error:
                    wait = None if yielded or attempt == MAX_ATTEMPTS else retry_wait(error, next(waits))
                    if wait is None or wait > min(MAX_RETRY_AFTER, end - asyncio.get_running_loop().time()):
                        raise
                    retrying = Retrying(attempt, wait, str(error))
                yield retrying
                self._transport.phase = "retrying"
                await self._sleep(retrying.wait_s)
                # Between the sleep and the next request: nothing may start after a stop.
                self._transport.refuse_if_shut()
        finally:
            self._meter.end()
            self._transport.phase = "idle"

    async def _attempt(self, wire: HttpRequest, end: float) -> AsyncGenerator[ModelEvent]:
        self._asked_at = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            turn = _Turn(self._clocks, end)
            opening = self._transport.request("POST", wire.url, headers=wire.headers, content=wire.content)
            reply = await turn.open(stack.enter_async_context(opening), self._transport, self._sent(wire))
            self._transport.phase = "first_token"
            if reply.status != 200:
                raise await self._refused(reply, wire.url)
            await self._check_type(reply, wire.url)
            async for event in self._decode(reply, turn):
                yield event
        self._far_end = "none"

    def _sent(self, wire: HttpRequest) -> Callable[[], None]:
        def sent() -> None:
            # From here on the server may work for us, and bill.
            self._far_end = "assumed"
            self._meter.begin(len(wire.content))

        return sent

    async def _decode(self, reply: Reply, turn: _Turn) -> AsyncGenerator[ModelEvent]:
        reader, decoder = SseReader(), self.decoder()
        while (piece := await turn.next_piece(reply, decoder.patience)) is not None:
            for sse in reader.feed(piece):
                for event in decoder.take(sse):
                    self._count(event)
                    yield event
                    # The consumer may have been away; what came after a stop is not for it.
                    self._transport.refuse_if_shut()
        self._transport.refuse_if_shut()
        for event in decoder.end():
            self._count(event)
            yield event

    def _count(self, event: ModelEvent) -> None:
        match event:
            case TextDelta(text) | ThinkingDelta(text):
                self._transport.phase = "streaming"
                self._meter.produced(len(text))
            case ToolCall(arguments=arguments, name=name):
                self._meter.produced(len(name) + len(arguments))
            case UsageReport():
                self._meter.report(event)
            case _:
                pass

    async def _refused(self, reply: Reply, url: str) -> ModelRefused:
        body = await self._error_body(reply)
        self._far_end = "none"
        self._meter.forget()
        return refusal(reply.status, reply.headers, body, url, self._secret)

    async def _check_type(self, reply: Reply, url: str) -> None:
        kind = reply.headers.get("content-type", "text/event-stream").partition(";")[0].strip().lower()
        if kind in ("text/event-stream", "application/octet-stream", "text/plain", ""):
            return
        body = await self._error_body(reply)
        if kind == "application/json":
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(found := json.loads(body), dict) and found.get("error"):
                    raise refusal(200, reply.headers, body, url, self._secret)
        page = "a web page" if kind == "text/html" else kind
        raise ModelProtocolError(
            f"model server {url}: answered with {page}, not with a stream; is the base URL right?"
        )

    async def _error_body(self, reply: Reply) -> bytes:
        body = b""
        with contextlib.suppress(TimeoutError, ModelError):
            async with asyncio.timeout(_ERROR_BODY_S):
                async for piece in reply.body:
                    body += piece
                    if len(body) > _ERROR_BODY_MAX:
                        break
        self._transport.refuse_if_shut()
        return body


class _Turn:
    """The clocks of one attempt."""

    def __init__(self, clocks: Clocks, end: float) -> None:
        self._clocks = clocks
        self._end = end
        self._first_byte_by = end
        self._began = False

    async def open(
        self, opening: Awaitable[Reply], transport: ModelTransport, sent: Callable[[], None]
    ) -> Reply:
        """Return the head of the answer; connecting has its own clock, the wait for bytes starts when it is sent."""
        loop = asyncio.get_running_loop()

        def on_sent() -> None:
            sent()
            self._first_byte_by = min(loop.time() + self._clocks.first_byte, self._end)
            if not scope.expired():
                scope.reschedule(self._first_byte_by)

        try:
            async with asyncio.timeout_at(self._end) as scope:
                transport.on_sent = on_sent
                try:
                    return await opening
                finally:
                    transport.on_sent = None
        except TimeoutError:
            raise self._late("first_byte") from None

    async def next_piece(self, reply: Reply, patience: float | None) -> bytes | None:
        """Return the next bytes of the body, None at its end; once there is patience, its end is no error."""
        now = asyncio.get_running_loop().time()
        clock, by = ("idle", now + self._clocks.idle) if self._began else ("first_byte", self._first_byte_by)
        if patience is not None:
            by = now + patience
        try:
            async with asyncio.timeout_at(min(by, self._end)):
                piece = await anext(reply.body, None)
        except TimeoutError:
            if patience is not None:
                return None
            raise self._late(clock) from None
        except ModelError as error:
            if patience is not None and not error.evidence.get("stopped"):
                return None
            raise
        self._began = self._began or piece is not None
        return piece

    def _late(self, clock: str) -> ModelTimeout:
        if asyncio.get_running_loop().time() >= self._end:
            return ModelTimeout(f"the model's turn took more than {self._clocks.total:g} s", clock="total")
        seconds = getattr(self._clocks, clock)
        words = {"first_byte": "did not answer within", "idle": "was silent for"}
        return ModelTimeout(f"the model {words[clock]} {seconds:g} s", clock=clock)
