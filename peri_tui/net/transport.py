"""A transport for models that can be hung up at any moment.

``ModelTransport`` owns every socket it opens from the moment of its creation, also while connecting and inside the
TLS handshake, so that ``shut`` needs no await and no second cancel can cut it short. It takes a network backend of
its own for two reasons that were measured with httpx 0.28: a connection leaks when a task is cancelled twice with
one turn of the loop between, and one that is cancelled in the TLS handshake stays established. The backend's
``aclose`` never suspends, so no cancel can land in it.

httpx is imported when it is first needed; ``warm`` does it early.
``httpx.AsyncHTTPTransport._pool`` is a private name: that is why httpx's minor version is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from peri_tui.core import faults
from peri_tui.errors import (
    ConfigError,
    ModelError,
    ModelProtocolError,
    ModelTimeout,
    ModelTruncated,
    ModelUnreachable,
)
from peri_tui.sockets import (
    OwnedSocket,
    PlainChannel,
    ShutSocket,
    TlsChannel,
    is_loopback,
    resolve,
    still_open,
)

if TYPE_CHECKING:
    import httpx
    from httpcore import AsyncNetworkBackend, AsyncNetworkStream
else:
    # httpcore's backends are called by name, never checked by type; importing it here would cost every start.
    AsyncNetworkBackend = AsyncNetworkStream = object

T = TypeVar("T")

_context: ssl.SSLContext | None = None
_context_lock = threading.Lock()


def warm() -> None:
    """Import httpx and load the certificates, so that the first request does not wait for it. For a thread."""
    import httpx  # noqa: F401

    shared_context()


def shared_context() -> ssl.SSLContext:
    """Return the TLS context of this process; made once, because loading the certificates takes 0.1 s."""
    global _context
    with _context_lock:
        if _context is None:
            import httpx

            _context = httpx.create_ssl_context()
        return _context


class _Stream(AsyncNetworkStream):
    """Gives an owned socket to httpcore: its names, its errors. ``aclose`` never suspends."""

    def __init__(self, owner: ModelTransport, channel: PlainChannel | TlsChannel) -> None:
        self._owner = owner
        self._channel = channel

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        import httpcore

        return await _guarded(
            self._channel.read(max_bytes), timeout, httpcore.ReadTimeout, httpcore.ReadError
        )

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        import httpcore

        if buffer:
            self._owner.note_sent()
            await _guarded(self._channel.write(buffer), timeout, httpcore.WriteTimeout, httpcore.WriteError)

    async def aclose(self) -> None:
        self._channel.owned.close()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> AsyncNetworkStream:
        import httpcore

        assert isinstance(self._channel, PlainChannel), "TLS inside TLS is refused by _proxy_for"
        owned = self._channel.owned
        owned.phase = "tls"
        channel = TlsChannel(self._channel, ssl_context, server_hostname)
        try:
            await _guarded(channel.shake_hands(), timeout, httpcore.ConnectTimeout, httpcore.ConnectError)
        except BaseException:
            # A cancel too: httpcore itself closes on Exception only, which leaks the connection.
            owned.close()
            raise
        owned.phase = "open"
        return _Stream(self._owner, channel)

    def get_extra_info(self, info: str) -> Any:
        if info == "socket":
            return self._channel.owned.sock
        if info == "is_readable":
            return self._channel.owned.is_readable()
        if info == "ssl_object" and isinstance(self._channel, TlsChannel):
            return self._channel.tls
        return None


async def _guarded(
    work: Awaitable[T], timeout: float | None, late: type[Exception], broken: type[Exception]
) -> T:
    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:  # ssl.SSLError is one
        raise broken(str(error)) from error


class _RecordingBackend(AsyncNetworkBackend):
    """Opens sockets that the transport knows before they connect."""

    def __init__(self, owner: ModelTransport) -> None:
        self._owner = owner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> AsyncNetworkStream:
        import httpcore

        return await _guarded(
            self._connect(host, port), timeout, httpcore.ConnectTimeout, httpcore.ConnectError
        )

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _connect(self, host: str, port: int) -> AsyncNetworkStream:
        self._owner.phase = "resolving"
        addresses = await resolve(host, port)
        self._owner.phase = "connecting"
        for left, (family, name) in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
            try:
                # An address that swallows packets must leave time for the next one.
                async with asyncio.timeout(2.0 if left else None):
                    return await self._connect_one(family, name)
            except OSError:
                if not left:
                    raise
        raise OSError(errno.EADDRNOTAVAIL, f"{host} has no address")

    async def _connect_one(self, family: int, name: tuple[Any, ...]) -> AsyncNetworkStream:
        owned = self._owner.own(family, name)
        try:
            await asyncio.get_running_loop().sock_connect(owned.sock, name)
            self._owner.refuse_if_shut()
        except BaseException:
            owned.close()
            raise
        owned.phase = "open"
        return _Stream(self._owner, PlainChannel(owned))


@dataclass(slots=True)
class Reply:
    """The head of an HTTP answer, and its body as it comes. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: AsyncGenerator[bytes] = field(init=False)
    whole: bool = False


class ModelTransport:
    """The connections of one task to its model. One request at a time; not thread-safe, but for ``shut``.

    Args:
        connect_s: seconds for resolving, connecting and the TLS handshake together with their retries by address.
        environ: where HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY are looked up; loopback bypasses any proxy.
        context: a TLS context instead of the process's own.
    """

    def __init__(
        self,
        *,
        connect_s: float = 10.0,
        environ: Mapping[str, str] = os.environ,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.phase = "idle"
        self.on_sent: Callable[[], None] | None = None
        self._made = time.monotonic()
        self._connect_s = connect_s
        self._environ = environ
        self._tls = context
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._sockets: list[OwnedSocket] = []
        self._gone: list[ShutSocket] = []
        self._shut = False
        self._busy = False

    @property
    def is_shut(self) -> bool:
        """True after ``shut``: no request can start any more."""
        return self._shut

    @property
    def last_life(self) -> float:
        """Monotonic time in seconds of the last byte in (of the transport's making, when none came)."""
        return max((owned.last_life for owned in self._sockets), default=self._made)

    def note_sent(self) -> None:
        """The request is on its way: the wait for the first byte begins."""
        if self.phase in ("resolving", "connecting"):
            self.phase = "headers"
            if self.on_sent is not None:
                self.on_sent()

    def refuse_if_shut(self) -> None:
        """Raise where nothing may start any more.

        Raises:
            ModelError: ``shut`` was called; ``evidence['stopped']`` is true.
        """
        if self._shut:
            raise ModelError("stopped: the connection to the model is shut", stopped=True)

    def own(self, family: int, name: tuple[Any, ...]) -> OwnedSocket:
        """Create a socket and note it before it connects."""
        self.refuse_if_shut()
        owned = OwnedSocket.create(family, name)
        # Past ones are kept too: they are what open_sockets asks the kernel about.
        self._sockets.append(owned)
        return owned

    def shut(self) -> list[ShutSocket]:
        """Hang up for good: shut down every socket, now, whatever it is doing. Idempotent; never raises.

        Returns:
            Every socket that was shut so far. This is what was done, not proof: ``open_sockets`` is.
        """
        if faults.active("model.keep_socket"):
            return []
        self._shut = True
        for owned in list(self._sockets):
            if not owned.shut and not owned.is_closed:
                described = owned.describe(self.phase)
                owned.shut_down()
                self._gone.append(described)
        return list(self._gone)

    def open_sockets(self) -> list[str]:
        """Return the connections of this transport that the kernel still has open on our side, in words.

        Independent of ``shut``: asks the kernel's table by inode, so it sees what ``shut`` missed, and what
        another descriptor or process still holds.
        """
        return still_open(self._sockets)

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str], content: bytes = b""
    ) -> AsyncIterator[Reply]:
        """Send a request and yield the head of the answer; its body is read from ``Reply.body``.

        Leaving the block before the body was read to its end closes the connection, synchronously.

        Raises:
            ModelUnreachable: resolving, connecting or TLS failed; ``evidence['retry']`` says whether again helps.
            ModelTimeout: the connect clock ran out.
            ModelTruncated: the connection ended inside the body.
            ModelProtocolError: the answer is no HTTP.
            ModelError: the transport is shut.
        """
        self.refuse_if_shut()
        if self._busy:
            raise RuntimeError("one request at a time on a ModelTransport")
        self._busy = True
        reply: Reply | None = None
        try:
            client = await self._client(url)
            self.refuse_if_shut()
            # A connection that is used again has no connecting phase; the clocks start all the same.
            self.phase = "connecting"
            with self._mapped(url):
                request = client.build_request(method, url, headers=dict(headers), content=content)
                response = await client.send(request, stream=True)
            reply = Reply(response.status_code, response.headers)
            try:
                async with contextlib.aclosing(self._body(response, reply, url)) as reply.body:
                    yield reply
            finally:
                self._end(reply)
                await response.aclose()
        finally:
            self._busy = False
            self._end(reply)

    async def aclose(self) -> None:
        """Close every connection and give everything back."""
        self._close_all()
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.aclose()

    def _end(self, reply: Reply | None) -> None:
        if reply is None or not reply.whole:
            self._close_all()

    def _close_all(self) -> None:
        for owned in self._sockets:
            owned.close()

    async def _body(self, response: httpx.Response, reply: Reply, url: str) -> AsyncGenerator[bytes]:
        with self._mapped(url, started=True):
            async for chunk in response.aiter_bytes():
                yield chunk
        reply.whole = True

    @contextlib.contextmanager
    def _mapped(self, url: str, *, started: bool = False) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.TransportError as error:
            self.refuse_if_shut()
            raise self._explain(error, url, started) from error
        except (httpx.InvalidURL, httpx.DecodingError, UnicodeError) as error:
            raise ModelProtocolError(f"model server {_origin(url)}: {error}") from None

    def _explain(self, error: Exception, url: str, started: bool) -> ModelError:
        import httpx

        where = f"model server {_origin(url)}"
        if isinstance(error, httpx.ConnectTimeout):
            return ModelTimeout(f"{where}: no connection within {self._connect_s:g} s", clock="connect")
        if isinstance(error, (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol)):
            return _unreachable(where, error)
        if started:
            return ModelTruncated(f"{where}: the connection ended inside the answer")
        if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error).lower():
            return ModelProtocolError(f"{where}: the answer is no HTTP: {error}")
        return ModelUnreachable(f"{where}: closed the connection without an answer", retry=True)

    async def _client(self, url: str) -> httpx.AsyncClient:
        parts = urlsplit(url)
        proxy = _proxy_for(parts.scheme, parts.hostname or "", self._environ)
        # The same client for the whole task, so that its requests share a connection.
        key = f"{parts.scheme} {proxy}"
        if key not in self._clients:
            secure = parts.scheme == "https" or proxy.startswith("https:")
            context = self._tls
            if secure and context is None:
                context = _context or await asyncio.to_thread(shared_context)
            self._clients[key] = self._build(context, proxy)
        return self._clients[key]

    def _build(self, context: ssl.SSLContext | None, proxy: str) -> httpx.AsyncClient:
        import httpcore
        import httpx

        unused = context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        options: dict[str, Any] = {
            "ssl_context": unused,
            "max_connections": None,  # a contended pool that is cancelled never recovers
            "max_keepalive_connections": 4,
            "keepalive_expiry": 30.0,
            "http1": True,
            "http2": False,
            "retries": 0,
            "network_backend": _RecordingBackend(self),
        }
        transport = httpx.AsyncHTTPTransport(verify=unused, trust_env=False)
        if proxy:
            parts = urlsplit(proxy)
            auth = (parts.username or "", parts.password or "") if parts.username else None
            bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
            transport._pool = httpcore.AsyncHTTPProxy(proxy_url=bare, proxy_auth=auth, **options)
        else:
            transport._pool = httpcore.AsyncConnectionPool(**options)
        # Only connecting has a clock here; the others depend on what came, so the caller keeps them.
        timeout = httpx.Timeout(None, connect=self._connect_s)
        return httpx.AsyncClient(
            transport=transport, timeout=timeout, trust_env=False, follow_redirects=False
        )


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _unreachable(where: str, error: BaseException) -> ModelUnreachable:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            why = getattr(cause, "verify_message", "") or cause.reason or str(cause)
            return ModelUnreachable(f"{where}: TLS failed: {why}", retry=False)
        if isinstance(cause, socket.gaierror):
            again = cause.errno == socket.EAI_AGAIN
            return ModelUnreachable(f"{where}: the name cannot be resolved", retry=again)
        if isinstance(cause, ConnectionRefusedError):
            return ModelUnreachable(
                f"{where}: connection refused; is it running, and is the base URL right?", retry=True
            )
        if isinstance(cause, OSError):
            return ModelUnreachable(f"{where}: {cause.strerror or cause}", retry=True)
        # httpcore raises again "from None", so the reason is left in the context only.
        cause = cause.__cause__ or cause.__context__
    return ModelUnreachable(f"{where}: {error}", retry=False)


def _proxy_for(scheme: str, host: str, environ: Mapping[str, str]) -> str:
    if is_loopback(host):
        return ""
    # Imported here: urllib.request costs the start of every command 20 ms.
    from urllib.request import getproxies_environment, proxy_bypass

    proxies = {key.lower()[:-6]: value for key, value in environ.items() if key.lower().endswith("_proxy")}
    if environ is os.environ:
        proxies = getproxies_environment()
    if proxy_bypass(host, proxies):
        return ""
    proxy = proxies.get(scheme) or proxies.get("all") or ""
    if proxy and "://" not in proxy:
        proxy = f"http://{proxy}"
    if proxy and urlsplit(proxy).scheme != "http":
        raise ConfigError(
            f"{scheme.upper()}_PROXY: expected an http:// proxy, got one with {urlsplit(proxy).scheme}://"
        )
    return proxy
